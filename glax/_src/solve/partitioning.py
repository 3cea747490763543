"""Run a kernel on arrays that are sharded over the batch or the heads. Each device computes its shard, without communication.

XLA cannot partition a call of foreign code: it would gather the operands on every device. So glax says how each kernel is
partitioned, in one of three ways:

    automatic sharding      `by_compiler` wraps the kernel in custom_partitioning, which receives the shardings that XLA chose.
    explicit sharding       `by_type` wraps it in shard_map, with the shardings that the types of the operands have.
    inside shard_map        Each device has its own arrays already, and the kernel runs on them as it is.

custom_partitioning does not exist on TPUs. With automatic sharding XLA's kernels run there, which XLA partitions by itself.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glax._src.core.backend import Backend, computes_on, jax_option, lowering_platform
from glax._src.core.decay import PARTS
from glax._src.core.erasure import Erasure
from glax._src.core.files import is_edited, sources
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, StoredStates, aligned, varying_axes
from glax._src.kernels.common.softmax import SoftmaxOperands, StepOperands

Axis = str | tuple[str, ...] | None  # one or more axes of a mesh, the first of them outermost


DIVIDED = "runs on the arrays of one device, and the compiler divides these: call inside jax.shard_map over all axes"


def why_not_on_gpu() -> str:
    """Return the refusal of a kernel that runs on one GPU alone: on a GPU, that the compiler divides its arrays; else, that it
    needs a GPU."""
    return DIVIDED if Backend.here() is Backend.GPU else f"needs a gpu, {computes_on()}"


def is_spread_by_type(operands) -> bool:
    """Return whether some operand is sharded along an explicit axis, as its type says."""
    types = [jax.typeof(x).sharding for x in jax.tree.leaves(operands)]
    return any(axis is not None for type in types for axis in type.spec)


def all_manual(mesh) -> bool:
    """Return whether the code is traced inside shard_map over all axes of the mesh. Arrays are then those of one device."""
    return bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)


def is_on_one_device() -> bool:
    """Return whether arrays are those of one device: inside shard_map over all axes, and inside of a lowering, where the call
    that is being lowered is partitioned already."""
    return lowering_platform.value is not None or all_manual(jax.sharding.get_abstract_mesh())


def by_type(f, saves_residuals: bool, *operands):
    """Return f(*operands), run in shard_map with the shardings that the types of the operands have.

    f: (r) -> Outputs, or (Outputs, Residuals) with `saves_residuals`; or (r, d_output, d_final[, residuals]) -> Recurrence; or
    (r, slots) -> Outputs with a pool of states, from which each sequence reads its slot. d_final: None for zeros.
    """
    given = operands[0].floats
    mesh = next(mesh for x in jax.tree.leaves(operands) if not (mesh := jax.typeof(x).sharding.mesh).empty)
    batch, heads = common_axes(mesh, operands, [jax.typeof(x).sharding.spec for x in jax.tree.leaves(operands)])
    into = operand_specs(operands, batch, heads)
    operands = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, into)
    on_one_device = summed(f, heads, operands)

    def inside(*operands):
        return on_one_device(*aligned(operands))

    out_specs = result_specs(operands, saves_residuals, batch, heads)
    # Inside shard_map over some axes, map over the others. vma is checked only where types already have it.
    names, checks = set(mesh.axis_names) - set(mesh.manual_axes), bool(varying_axes(operands[0].q))
    run = jax.shard_map(inside, mesh=mesh, in_specs=into, out_specs=out_specs, check_vma=checks, axis_names=names)
    result = run(*operands)
    if len(operands) <= 2:
        return result
    # A gradient has its input's type.
    return jax.tree.map(
        lambda dx, x: jax.sharding.reshard(dx, NamedSharding(mesh, jax.typeof(x).sharding.spec)), result, given
    )


@dataclasses.dataclass(frozen=True)
class FreeAxis:
    """Hold `name`, the one axis of a mesh that the compiler spreads arrays over, inside shard_map over all other axes.

    In such a region XLA numbers the devices anew, in the order of the tiles into which it cuts an operand. With one axis of
    several devices that order is the axis's own. With more axes it is not known which tile lies on which device.
    """

    mesh: jax.sharding.Mesh
    name: str

    @classmethod
    def of(cls, context) -> "FreeAxis | None":
        """Return the free axis of a lowering's axis context.

        Return None outside of shard_map, inside of shard_map over all axes, and where several axes are left.
        """
        manual = getattr(context, "manual_axes", ())
        if not manual or isinstance(context.mesh, jax.sharding.AbstractMesh):
            return None
        free = [name for name, size in context.mesh.shape.items() if name not in manual and size > 1]
        return cls(context.mesh, free[0]) if len(free) == 1 else None

    def sharding(self, spec: P) -> NamedSharding:
        """Return the sharding by `spec` over the devices of the region, as XLA numbers them."""
        devices = self.mesh.devices.reshape(-1)[: self.mesh.shape[self.name]]
        return NamedSharding(jax.sharding.Mesh(devices, (self.name,)), spec)

    def spec(self, x: jax.ShapeDtypeStruct) -> P:
        """Return the PartitionSpec of an operand over the axis: every dimension of which each device has 1 / n has the axis's
        name.

        n is the size of the axis. A dimension that fewer devices share counts as not sharded.
        """
        try:
            tile = x.sharding.shard_shape(x.shape)
        except ValueError:  # uneven
            return P()
        size = self.mesh.shape[self.name]
        return P(*(self.name if part * size == whole else None for part, whole in zip(tile, x.shape, strict=True)))


def spec_on(mesh: jax.sharding.Mesh, x: jax.ShapeDtypeStruct) -> P:
    """Return the PartitionSpec of an operand on the mesh, from the sharding that XLA chose.

    A dimension counts as not sharded if XLA divides it by a part of a mesh axis, or unevenly, as two heads over four devices.
    """
    try:
        tile, found = x.sharding.shard_shape(x.shape), x.sharding.devices_indices_map(x.shape)
    except ValueError:  # uneven
        return P()

    def axes(d: int) -> Axis:
        parts = x.shape[d] // max(tile[d], 1)
        names = [name for name, size in mesh.shape.items() if size > 1]
        for count in range(1, len(names) + 1 if parts > 1 else 1):
            for chosen in itertools.permutations(names, count):
                if math.prod(mesh.shape[name] for name in chosen) != parts:
                    continue
                candidate = NamedSharding(mesh, P(*[None] * d, chosen)).devices_indices_map(x.shape)
                if all(candidate[device][d] == index[d] for device, index in found.items()):
                    return chosen if count > 1 else chosen[0]
        return None

    return P(*map(axes, range(len(x.shape))))


class Division(NamedTuple):
    """Describe how the compiler divides a call over devices.

    rule, replicated, sizes: the results of `sharding_rule`. specs: a function (mesh, PartitionSpecs of the operands) -> (the
    function that each device runs, PartitionSpecs of its operands, PartitionSpecs of its results). results: the tree of the
    results.
    """

    rule: str
    replicated: tuple[str, ...]
    sizes: dict[str, int]
    specs: Callable[[Any, list[P]], tuple[Callable, list[P], list[P]]]
    results: Any


def by_compiler(f, saves_residuals: bool, *operands, free: FreeAxis | None = None):
    """Return f(*operands), run in custom_partitioning with the shardings that XLA chose. f: as in `by_type`.

    The first operand may also be the operands of softmax attention. saves_residuals: whether residuals are among the results.
    free: the one axis to shard over; all axes of the program's mesh if None.
    """
    from jax.experimental.custom_partitioning import custom_partitioning  # not a part of `import jax`

    leaves, structure = jax.tree.flatten(operands)
    match operands[0]:
        case SoftmaxOperands():
            division = softmax_division(f, operands)
        case StepOperands():
            division = step_division(f, operands[0])
        case _:
            division = recurrence_division(f, saves_residuals, operands)

    def flat(f):
        return lambda *leaves: tuple(jax.tree.leaves(f(*structure.unflatten(leaves))))

    def partition(mesh, arguments, results):
        if free is None:
            place, specs = functools.partial(NamedSharding, mesh), [spec_on(mesh, x) for x in arguments]
        else:
            mesh, place = free.mesh, free.sharding
            specs = [free.spec(x) for x in arguments]
        on_one_device, into, out = division.specs(mesh, specs)
        return mesh, flat(on_one_device), tuple(map(place, out)), tuple(map(place, into))

    call = custom_partitioning(
        jax.jit(flat(f))
    )  # jit makes the constants in f part of a function of its own, not operands of the call
    call.def_partition(
        partition=partition,
        sharding_rule=division.rule,
        need_replication_factors=division.replicated,
        decode_shardings=False,
        **division.sizes,
    )
    return division.results.unflatten(call(*leaves))


def recurrence_division(f, saves_residuals: bool, operands) -> Division:
    """Return the `Division` of f for these operands: a recurrence (r), its gradient (r, d_output, d_final, ...), or its call on
    a pool (r, slots)."""

    def specs(mesh, found: list[P]):
        axes = common_axes(mesh, operands, found)
        into, out = operand_specs(operands, *axes), result_specs(operands, saves_residuals, *axes)
        return summed(f, axes[1], operands), leaves_of(into), leaves_of(out)

    results = jax.tree.structure(result_specs(operands, saves_residuals, None, None), is_leaf=is_spec)
    return Division(*sharding_rule(operands, saves_residuals), specs, results)


def letters_of_heads(HQ: int, HK: int) -> tuple[str, str, dict[str, int]]:
    """Return the names of the head axes of q and of k in a sharding rule, and the sizes of names within a joint axis.

    With HQ = g * HK heads these are ("(h g)", "h", {"g": HQ // HK}): h may be sharded, for q and k alike. Each name of a joint
    axis must stand for at least 2, so with HQ = HK both are "h", and with HK = 1 they are "g" and "one", with no sizes.
    """
    if 1 in (HK, HQ // HK):
        return ("h", "h", {}) if HQ == HK else ("g", "one", {})
    return "(h g)", "h", dict(g=HQ // HK)


def dividing_axes(mesh, specs: list[P], place: int, count: int) -> Axis:
    """Return the mesh axes that shard dimension number `place` in the first spec that shards it.

    Return None if no spec does, or if the size of these axes does not divide `count`, the size of the dimension.
    """
    names = next((x[place] for x in specs if len(x) > place and x[place] is not None), None)
    return None if count % math.prod(mesh.shape[name] for name in flat_axes(names)) else names


def softmax_division(f, operands) -> Division:
    """Return the `Division` of f: softmax attention (operands), or its gradient (operands, o, log_total, d_o).

    The batch and the heads of k are sharded. The heads of q that read one head of k lie on its device.
    """
    first = operands[0]
    (B, _, HQ, _), HK = first.q.shape, first.k.shape[2]
    heads, shared, sizes = letters_of_heads(HQ, HK)
    rows = [("b", "t"), ("b", "t")]
    forms = [("b", "t", heads, "d"), ("b", "s", shared, "d"), ("b", "s", shared, "e"), *rows]
    forms += [("c",)] * (first.cuts is not None) + [("b", "t", "w")] * (first.blocks is not None)
    outputs = [("b", "t", heads, "e"), ("b", "t", heads)]
    is_gradient = len(operands) > 1
    given, results = ([*forms, *outputs, outputs[0]], forms[:3]) if is_gradient else (forms, outputs)
    rule = " -> ".join(", ".join(map(" ".join, side)) for side in (given, results))
    replicated = tuple(name for name in dict.fromkeys(re.findall(r"\w+", rule)) if name not in ("b", "h"))

    def laid(side, batch, on_heads) -> list[P]:
        """Return the PartitionSpec of each array. side: for each array a tuple, with the factor of the rule for each axis. batch,
        on_heads: the mesh axes of the batch and of heads."""
        axes = {"b": batch, heads: on_heads, shared: on_heads}
        return [P(*(axes.get(factor) for factor in form)) for form in side]

    def specs(mesh, operand_specs: list[P]):
        def with_axis(*factors: str) -> list[P]:
            return [spec for spec, form in zip(operand_specs, given, strict=True) if set(factors) & set(form)]

        batch, on_heads = (
            dividing_axes(mesh, with_axis("b"), 0, B),
            dividing_axes(mesh, with_axis(heads, shared), 2, HK),
        )
        on_heads = None if set(flat_axes(batch)) & set(flat_axes(on_heads)) else on_heads
        return f, laid(given, batch, on_heads), laid(results, batch, on_heads)

    return Division(rule, replicated, sizes, specs, jax.tree.structure((0,) * len(results)))


def step_division(f, operands: StepOperands) -> Division:
    """Return the `Division` of f, one step of softmax attention over caches.

    The heads of k are sharded, or the heads of q if k has one head. Without slots the batch is sharded, too; slots may name any
    row of the caches.
    """
    q, k, v, _, _, slots = operands
    HQ, HK, rows = q.shape[2], k.shape[2], "b" if slots is None else "p"
    heads, shared, sizes = letters_of_heads(HQ, HK)
    divided = heads if heads == "g" else "h"
    caches = [f"{rows} s {shared} {letter}" for letter, x in (("d", k), ("e", v)) if x is not None]
    rule = ", ".join([f"b t {heads} d", *caches, "b t", "b t", *["b"] * (slots is not None)]) + f" -> b t {heads} e"
    names = (divided,) if slots is not None else (divided, "b")
    replicated = tuple(name for name in dict.fromkeys(re.findall(r"\w+", rule)) if name not in names)

    def specs(mesh, found: list[P]):
        floats = found[: 1 + len(caches)]
        batch = dividing_axes(mesh, floats, 0, q.shape[0]) if slots is None else None
        heads = dividing_axes(mesh, floats, 2, HQ if HK == 1 else HK)
        heads = None if set(flat_axes(batch)) & set(flat_axes(heads)) else heads
        of_q, of_caches = P(batch, None, heads), P(batch, None, None if HK == 1 else heads)
        rest = [P(batch), P(batch), *[P()] * (slots is not None)]
        return f, [of_q, *[of_caches] * len(caches), *rest], [of_q]

    return Division(rule, replicated, sizes, specs, jax.tree.structure(0))


def name_by_content(context, call, content: str):
    """Name the callbacks of a lowered custom_partitioning, a result of `by_compiler`, by a digest of what they do.

    JAX names them by an address, which becomes part of the program's text, so that a persistent compilation cache would never
    find the program again. The digest covers this package's code and `content`. JAX's names stay where the code has been edited
    since this process imported it.
    """
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.extend.mlir import ir

    # JAX has no public name for this table. Without the table programs are only compiled again in every process.
    callbacks = getattr(sys.modules[custom_partitioning.__module__], "_sharding_callbacks", None)
    config = call.attributes["backend_config"]
    if callbacks is None or is_edited() or (info := callbacks.get(bytes(config.value, "utf8"))) is None:
        return
    name = "glax " + hashlib.sha256((sources() + content).encode()).hexdigest()
    # Callbacks of a program that is not compiled yet stay, and serve this program, too.
    context.add_keepalive(callbacks.setdefault(bytes(name, "utf8"), info))
    call.attributes["backend_config"] = ir.StringAttr.get(name)


def check_shardy():
    """Raise NotImplementedError if JAX does not use Shardy. XLA would abort the process at a kernel that only Shardy can
    partition."""
    if not jax_option("jax_use_shardy_partitioner"):
        raise NotImplementedError(
            "glax spreads kernels over devices by the Shardy partitioner, which jax_use_shardy_partitioner=False switches "
            "off: set it to True, which is JAX's default, or call glax inside jax.shard_map"
        )


def summed(f, heads, operands):
    """Return f as each device runs it. If f is a gradient, it then sums gradients over the mesh axes `heads`.

    Summed are the gradients of arrays that all heads share: of the scale, and of a q, k or v with one head among several. Other
    functions are returned as they are. heads: the axes that shard the heads, or None. operands: those of f, as in `by_type`.
    """
    r = operands[0]
    if heads is None or len(operands) <= 2:
        return f
    shared = [name for name in ("q", "k", "v") if getattr(r, name).shape[2] == 1 and r.num_heads > 1]

    def on_one_device(*operands):
        d = f(*operands)
        return d.replace(**{name: jax.lax.psum(getattr(d, name), heads) for name in (*shared, "scale")})

    return on_one_device


# ---- what lies where -------------------------------------------------------------------------------------------------


# A PartitionSpec instead of an array, in the trees below.
Spec = Any


def recurrence_specs(r: Recurrence, batch, heads, sequence=None, shared_heads=None) -> Recurrence:
    """Return a tree like r with a PartitionSpec for every array. batch, heads, sequence: the mesh axes that shard B, H and T;
    None for no axis. shared_heads: the axes for the heads of a q, k or v that has one head while others have several."""

    def tokens(x: jax.Array) -> Spec:
        is_shared = x.shape[2] == 1 and r.num_heads > 1
        return P(batch, sequence, shared_heads if is_shared else heads)

    gates: Spec = P(batch, sequence, heads)
    states: Spec = P(batch, heads)
    sequences: Spec = P(batch)
    replicated: Spec = P()
    decay = r.decay.map_tokens(lambda _: gates)
    return Recurrence(
        q=tokens(r.q),
        k=tokens(r.k),
        v=tokens(r.v),
        decay=decay if decay.constant is None else dataclasses.replace(decay, constant=states),
        initial_state=None if r.initial_state is None else states,
        boundaries=None if r.boundaries is None else replicated,
        scale=sequences,
        erasure=jax.tree.map(lambda _: gates, r.erasure),
        reverse=r.reverse,
        segments=jax.tree.map(lambda _: P(batch, sequence), r.segments),
    )


def output_specs(batch, heads, sequence=None) -> Outputs:
    output: Spec = P(batch, sequence, heads)
    final_state: Spec = P(batch, heads)
    return Outputs(output, final_state)


def outputs_of(r: Recurrence, batch, heads) -> Any:
    """Return the PartitionSpecs of the outputs and final states of r, and of the states that r stores, if any. batch, heads:
    mesh axes."""
    outputs = output_specs(batch, heads)
    if r.states_every is None:
        return outputs
    states: Spec = P(batch, None, heads)
    return outputs._replace(final_state=StoredStates(outputs.final_state, states))


def residual_specs(batch, heads) -> Residuals:
    chunks: Spec = P(batch, None, heads)
    return Residuals(chunks, chunks)


def operand_specs(operands, batch, heads):
    """Return a tuple of PartitionSpecs for operands as in `by_type`; None for an operand that is None. batch, heads: mesh
    axes."""
    if has_pool(operands):
        every, pool = recurrence_specs(operands[0], batch, heads), cast(Any, P(None, heads))
        return every.replace(initial_state=pool), P()
    output, final_state = outputs_of(operands[0], batch, heads)
    if len(operands) > 2 and isinstance(operands[2], StoredStates) and operands[2].states is None:
        final_state = final_state._replace(states=None)
    every = recurrence_specs(operands[0], batch, heads), output, final_state, residual_specs(batch, heads)
    return tuple(None if x is None else spec for x, spec in zip(operands, every, strict=False))


def has_pool(operands) -> bool:
    """Return whether the operands are (r, slots), where r's states are a pool."""
    return len(operands) == 2


def result_specs(operands, saves_residuals: bool, batch, heads):
    """Return a tree of PartitionSpecs for the results of f(*operands) in `by_type`. batch, heads: mesh axes."""
    if has_pool(operands):
        return output_specs(batch, heads)._replace(final_state=P(None, heads))
    if len(operands) > 1:
        return recurrence_specs(operands[0], batch, heads).floats
    outputs = outputs_of(operands[0], batch, heads)
    return (outputs, residual_specs(batch, heads)) if saves_residuals else outputs


def is_spec(x) -> bool:
    return isinstance(x, P)


def leaves_of(specs) -> list[P]:
    return jax.tree.leaves(specs, is_leaf=is_spec)


def common_axes(mesh, operands, specs: list[P]):
    """Return (the mesh axes that shard the batch, those that shard the heads), from the PartitionSpecs of the operands' leaves.

    Either is None if no operand is sharded there, or if its size does not divide the number of sequences or of heads. Packed
    sequences and pools have no axes of the batch. Axes of heads that the batch has, too, are dropped.
    """
    r = operands[0]
    probes = operand_specs(operands, "batch", "heads")
    found = dict(batch=None, heads=None)
    for probe, spec in zip(leaves_of(probes), specs, strict=True):
        for letter, axes in zip(probe, spec, strict=False):
            if letter is not None and axes is not None and found[letter] is None:
                found[letter] = axes
    counts = dict(batch=[r.q.shape[0]], heads=[n for n in (r.num_heads, *head_counts(r)) if n > 1])
    if r.boundaries is not None or has_pool(operands):  # any sequence may have any slot
        found["batch"] = None
    for letter, axes in found.items():
        names = (axes,) if isinstance(axes, str) else axes or ()
        size = math.prod(mesh.shape[name] for name in names)
        if any(count % size for count in counts[letter]):
            found[letter] = None
    taken = set(flat_axes(found["batch"])) & set(flat_axes(found["heads"]))
    return found["batch"], None if taken else found["heads"]


def flat_axes(axes) -> tuple[str, ...]:
    """Return one axis, a tuple of axes or None as a tuple of names."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def head_counts(r: Recurrence) -> tuple[int, int, int]:
    return r.q.shape[2], r.k.shape[2], r.v.shape[2]


# ---- the same for the compiler: a name for every dimension -----------------------------------------------------------


def sharding_rule(operands, saves_residuals: bool) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Return (a rule like einsum's for custom_partitioning, the names of dimensions that must not be sharded, {name: size} of
    the parts of joint dimensions). operands: as in `by_type`.

    Heads that share one head are adjacent. With h the fewest heads of any operand, H = (h i j): h can be sharded, and the other
    factors follow it.
    """
    r = operands[0]
    counts = sorted({n for n in (*head_counts(r), r.num_heads) if n > 1})
    nested = all(more % fewer == 0 for fewer, more in itertools.pairwise(counts))
    parts = {n: more // fewer for n, fewer, more in zip("hij", (1, *counts), counts, strict=False)} if nested else {}

    def heads(count: int) -> str:
        if count == 1:
            return "o"
        if not nested:
            return f"h{count}"
        names = [name for i, name in enumerate(parts) if counts[i] <= count]
        return names[0] if len(names) == 1 else f"({' '.join(names)})"

    N = "n" if r.boundaries is not None else "b"
    S = "slot" if has_pool(operands) else N
    H = heads(r.num_heads)
    letters = dict(N=N, B="b", T="t", H=H, K="k", V="v")

    outputs, residuals = [f"b t {H} v", f"{S} {H} k v"], [f"b run {H} row column", f"b chunk {H}"]

    def named(x: Recurrence) -> list[str]:
        decay, erasure = vars(x.decay), x.erasure or Erasure()
        forms = [
            (x.q, f"b t {heads(x.q.shape[2])} k"), (x.k, f"b t {heads(x.k.shape[2])} k"),
            (x.v, f"b t {heads(x.v.shape[2])} v"),
            *((decay[name], " ".join(letters[d] for d in part.dimensions.split())) for name, part in PARTS.items()),
            (x.initial_state, f"{S} {H} k v"),
            (x.boundaries, "c"), (x.scale, N),
            (erasure.beta, f"b t {H}"), (erasure.erase, f"b t {H} k"), (erasure.write, f"b t {H} v"),
            (erasure.along, f"b t {H} k"),
            *((mask, "b t") for mask in jax.tree.leaves(x.segments)),
        ]  # fmt: skip
        return [form for array, form in forms if array is not None]

    if r.states_every is not None:
        outputs.append(f"{N} behind {H} k v")
    cotangents = [form for form, _ in zip(outputs, jax.tree.leaves(operands[1:3]), strict=False)]
    beside = ["sequence"] if has_pool(operands) else cotangents + residuals * (len(operands) > 3)
    given = named(r) + beside
    results = named(r.floats) if len(operands) > 2 else outputs + residuals * saves_residuals
    rule = f"{', '.join(given)} -> {', '.join(results)}"
    used = dict.fromkeys(re.findall(r"\w+", rule))  # the compiler wants them in the order of their first use
    spread = {"h"} | ({"b"} if r.boundaries is None and not has_pool(operands) else set())
    joint = {name: size for name, size in parts.items() if name != "h" and name in used}
    return rule, tuple(name for name in used if name not in spread), joint

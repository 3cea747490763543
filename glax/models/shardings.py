"""Choose the placement of a model's parameters on a mesh."""

import dataclasses
import itertools
import logging
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glax._src.core.explicit_axes import explicit_mesh
from glax.nn.attention import Attention
from glax.nn.parts import EMBED, EXPERTS, HEADS, MLP, VOCABULARY

# The axes of a mesh over which a logical axis is spread: the first that the mesh has, whose size divides the axis.
RULES: dict[str, tuple[str, ...]] = {
    VOCABULARY: ("model", "tensor"),
    HEADS: ("model", "tensor"),
    MLP: ("model", "tensor"),
    EMBED: ("fsdp",),
    EXPERTS: ("expert",),
}

BATCH = ("batch", "data", "sequence")  # usual names of axes that shard activations alone
# The attributes that hold how many heads a layer with a recurrence has.
COUNTS = ("num_heads", "num_kv_heads", "num_query_heads", "num_key_heads", "num_qk_heads", "groups")

logger = logging.getLogger("glax")

# The first logical axes of a layer's states, by their names. Other states are replicated: the index of chosen blocks has one
# head, which all others read, and the states of n-grams have few rows.
STATES = dict(
    recurrent=(None, HEADS),
    normaliser=(None, HEADS),
    stabiliser=(None, HEADS),
    keys=(None, HEADS),
    values=(None, HEADS),
    key=(None, None, HEADS),
    value=(None, None, HEADS),
)


def partition_spec(
    axes: tuple[str | None, ...] | None, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Return the PartitionSpec of a parameter with these logical axes.

    axes: one name for each axis of the parameter: "embed" (the width), "experts", "heads", "mlp" or "vocabulary". An axis
        with None or another name stays whole. axes=None is None for every axis.
    shape: the sizes of the axes, as many as axes has.
    mesh: its axis "model" can shard "heads", "mlp" and "vocabulary", and so can its axis "tensor". "fsdp" can shard "embed",
        and "expert" can shard "experts". Other axes of the mesh shard nothing.

    The axes of the parameter choose in their order. Each takes an axis of the mesh that can shard it, whose size divides its
    own, and that no axis before it has taken; "model" goes before "tensor". It stays whole if there is none.

    Raises ValueError if axes and shape differ in length.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
    >>> tuple(glax.models.partition_spec(("embed", "heads"), (64, 128), mesh))
    (None, 'model')
    """
    if axes is None:
        return PartitionSpec()
    taken, chosen = set(), []
    for axis, size in zip(axes, shape, strict=True):
        rules = () if axis is None else RULES.get(axis, ())
        fits = [x for x in rules if x in mesh.shape and size % mesh.shape[x] == 0 and x not in taken]
        chosen.append(fits[0] if fits else None)
        taken |= set(fits[:1])
    return PartitionSpec(*chosen)


def check_mesh(mesh):
    """Raise TypeError unless `mesh` is a jax.sharding.Mesh."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh returns it, got {type(mesh).__name__}")


def states_on_mesh(states, array: jax.Array | None):
    """Return the empty states, a tree, moved to the mesh of `array` if that mesh has explicit axes; else unchanged. array: a
    parameter of the model; None if it has none."""
    found = explicit_mesh(array)
    if found is None:
        return states
    placed = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    mesh: Mesh | AbstractMesh = placed.mesh if isinstance(placed, NamedSharding) else found

    def place(path, x):
        axes = STATES.get(path[-1].key, ())
        spec = partition_spec((*axes, *(None,) * (x.ndim - len(axes))), x.shape, mesh)
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, states)


def head_counts(module: Any, part: str) -> set[int]:
    """Return the numbers of heads that must each be a multiple of the size of a mesh's axis that shards a `part` of the layer
    `module`. Outside of softmax attention, a number of 1 is left out: all heads read that one.

    part: the name of a submodule or parameter, such as "query"; of a layer without softmax attention it has no effect.
    """
    if isinstance(module, Attention):
        counts = {"query": {module.num_heads}, "output": {module.num_heads}}
        counts |= {"key": {module.num_kv_heads}, "value": {module.num_kv_heads}}
        return counts.get(part, {module.num_heads, module.num_kv_heads})
    sizes = getattr(module, "sizes", module)
    return {getattr(sizes, name) for name in COUNTS if getattr(sizes, name, 1) > 1}


def layer_of(model: nnx.Module, path: tuple) -> tuple[Any, str]:
    """Return (the innermost module on the path to a parameter that has `num_heads`, itself or in its `sizes`; the next name on
    the path behind the module). Return (None, "") if there is none."""
    module: Any = model
    found: tuple[Any, str] = None, ""
    for name, part in itertools.pairwise(path):
        module = module[name] if isinstance(name, int) else getattr(module, name)
        if getattr(getattr(module, "sizes", module), "num_heads", None) is not None:
            found = (module, part)
    return found


@dataclasses.dataclass
class Placement:
    """Choose the placement of a model's parameters on a mesh, and record which are replicated although an axis could shard
    them.

    used: the axes of the mesh that shard some parameter. whole: {an axis of the mesh: the parameters that are replicated
    because it does not divide them}.
    """

    model: nnx.Module
    mesh: Mesh
    used: set[str] = dataclasses.field(default_factory=set)
    whole: dict[str, set[str]] = dataclasses.field(
        default_factory=dict
    )  # the axis -> parameters that it does not divide

    def sharding(self, path: tuple, param: nnx.Variable) -> NamedSharding:
        """Return the sharding of a parameter by `partition_spec`, except that no axis shards heads that it does not divide."""
        axes, shape = param.get_metadata().get("out_sharding"), param.shape
        if axes is not None:
            layer, part = layer_of(self.model, path)
            heads = head_counts(layer, part) if layer is not None else set()
            axes = tuple(
                None if axis == HEADS and not self.divides(heads, size) else axis
                for axis, size in zip(axes, shape, strict=True)
            )
        spec = partition_spec(axes, shape, self.mesh)
        self.note(path, param, spec)
        return NamedSharding(self.mesh, spec)

    def divides(self, heads: set[int], size: int) -> bool:
        """Return whether some axis of the mesh that can shard heads divides `size` and each number in `heads`."""
        return any(
            all(n % self.mesh.shape[x] == 0 for n in heads | {size}) for x in RULES[HEADS] if x in self.mesh.shape
        )

    def note(self, path: tuple, param: nnx.Variable, spec: PartitionSpec):
        """Record which axes of the mesh `spec` uses, and whether the parameter is replicated along an axis that could shard
        it."""
        self.used |= {name for name in spec if name is not None}
        for axis, chosen in zip(param.get_metadata().get("out_sharding") or (), spec, strict=True):
            rules = [x for x in RULES.get(axis, ()) if self.mesh.shape.get(x, 1) > 1]
            if chosen is None and rules and not set(rules) & set(spec):
                name = ".".join("*" if isinstance(part, int) else part for part in path)
                self.whole.setdefault(rules[0], set()).add(f"{name} ({axis})")

    def say(self):
        """Warn of axes of the mesh that shard no parameter, and of parameters that an axis does not divide."""
        mesh, known = self.mesh, sorted({x for axes in RULES.values() for x in axes})
        idle = [x for x, size in mesh.shape.items() if size > 1 and x not in (*self.used, *self.whole)]
        if idle and (not self.used or set(idle) - set(BATCH)):
            logger.warning(
                "the axes %s of the mesh shard no parameter: axes that shard parameters are called %s",
                ", ".join(map(repr, idle)),
                ", ".join(map(repr, known)),
            )
        for axis, names in self.whole.items():
            logger.warning(
                "the axis %r of %d devices does not divide these parameters, which are replicated along it: %s",
                axis,
                mesh.shape[axis],
                ", ".join(sorted(names)),
            )


def shard(model: nnx.Module, mesh: Mesh):
    """Move every parameter of `model` to the devices that `partition_spec` names, in place. Returns None.

    mesh: a jax.sharding.Mesh. `partition_spec` reads its axes "model", "tensor", "fsdp" and "expert", as far as it has them;
    over other axes parameters are replicated. An axis of the mesh that does not divide the heads of a layer does not shard
    them, and a warning of the logger "glax" names the parameters. On a mesh with none of the four axes all parameters are
    replicated, and a warning says so if it has several devices. Raises TypeError if mesh is no jax.sharding.Mesh, as an
    AbstractMesh is not.

    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> glax.models.shard(model, mesh)
    >>> next(iter(model.head.kernel[...].devices())) in mesh.devices
    True
    """
    check_mesh(mesh)
    placement, moved = Placement(model, mesh), []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        moved.append((path, param.replace(jax.device_put(param[...], placement.sharding(path, param)))))
    nnx.update(model, nnx.from_flat_state(moved))
    placement.say()

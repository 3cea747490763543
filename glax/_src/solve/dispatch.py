"""Choose the kernels that run a recurrence and its gradient, and insert them into the program."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from glax._src.core.backend import sequences_apart
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, StoredStates, varying_like
from glax._src.core.registry import Config, KernelSpec, Platform, Role, TwoPhase, UnsupportedError, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.isolation import isolating
from glax._src.solve.pieces import solve_with_states
from glax._src.tuning.cache import PersistentCache, overlaid, overlay
from glax._src.tuning.executor import Executor, is_recorded
from glax._src.tuning.selection import AutotunePolicy, ConfigSelectorChain


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold the platform and the config that the caller requires. None leaves the choice to glax.

    pieces: n where sequences are solved in pieces of n tokens, one after another (solve/pieces.py); None where they are solved
    whole.
    """

    platform: Platform | None = None
    config: Config | None = None
    pieces: int | None = None

    @property
    def refused(self) -> dict[str, str]:
        """Return {path: reason} for the paths that the caller's options rule out, other than kernels, for `explain`."""
        if self.pieces is None:
            return {}
        why = (
            f"no kernel returns the states behind every {self.pieces} tokens, so pieces of as many are solved in order"
        )
        return {"one call for all tokens": why}


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Hold the kernels of one call, chosen once for its forward and its gradient.

    choice: the platform and config that the forward runs with. vjp: the fused gradient kernel, or None where the derived
    gradient is used. vjp_choice: the platform and config that `vjp` runs with.
    """

    choice: Choice
    forward: KernelSpec
    vjp: KernelSpec | None
    vjp_choice: Choice

    def takes_segments(self, r: Recurrence) -> bool:
        """Return whether the kernels receive segments as they are, and not folded into gates.

        That is so if the forward and the gradient both read segments, or if one of the two has a function `KernelSpec.isolate`.
        """
        kernels = [spec for spec in (self.forward, self.vjp) if spec is not None]
        return all(x.takes_segments(r) for x in kernels) or any(x.isolate is not None for x in kernels)

    def mixes_segments(self, r: Recurrence) -> bool:
        """Return whether NaN or inf can pass between the segments of r in the forward or the gradient.

        The results are then checked. The derived gradient always lets NaN and inf pass, because it sums over tokens of all
        segments.
        """
        return self.forward.mixes_segments(r) or self.vjp is None or self.vjp.mixes_segments(r)

    def saves_residuals(self, r: Recurrence) -> bool:
        """Return whether the forward saves residuals for r: the kernel can, r is worth their memory, and the chosen gradient
        kernel takes them."""
        given = r if self.takes_segments(r) else r.folded
        if self.forward.forward_with_residuals is None or not self.forward.saves_residuals(given):
            return False
        return self.vjp is not None and self.vjp.is_gradient_of(self.forward)


def resolve(choice: Choice, r: Recurrence) -> Resolution:
    """Choose the kernels for r and its gradient on this machine.

    Raises UnsupportedError, with each kernel's reason, if no kernel can run r.
    """
    load_kernels()
    return Resolution(choice, kernel_registry.find(r, choice.platform, choice.config), *vjp_kernel(choice, r))


def vjp_kernel(choice: Choice, r: Recurrence) -> tuple[KernelSpec | None, Choice]:
    """Return (the best fused gradient kernel for r, or None; the choice that it runs with).

    If no gradient kernel takes choice.config, this config is the forward's alone. The choice that is returned has no config
    then.
    """
    for config in dict.fromkeys((choice.config, None)):
        able, _ = kernel_registry.able(r, choice.platform, config, role=Role.VJP)
        if able:
            return able[0], dataclasses.replace(choice, config=config)
    return None, choice


# Every public function runs kernels through this executor. Its caches are in memory, on the user's disk and in the package.
executor = Executor(
    ConfigSelectorChain(
        persistent=PersistentCache("recurrent"),
        shipped=PersistentCache("tuned", folder=pathlib.Path(__file__).parents[1] / "tuning", any_compiler=True),
    )
)


# ---- forward and gradient --------------------------------------------------------------------------------------------


def run_forward(resolution: Resolution, r: Recurrence) -> Outputs:
    """Return the outputs and final states of r by the forward kernel."""
    run = functools.partial(execute, resolution.forward, resolution.choice, again=forward_elsewhere)
    return merged_vmap(run, r)


def forward_with_residuals(resolution: Resolution, r: Recurrence) -> tuple[Outputs, Residuals | None]:
    """Return (the outputs of the forward kernel on r, the residuals for its gradient). The residuals are None if the kernel
    saves none, or the gradient kernel reads none."""
    if not resolution.saves_residuals(r):
        return run_forward(resolution, r), None
    spec = resolution.forward
    options = dict(part=spec.forward_with_residuals, saves_residuals=True, again=forward_elsewhere_without_residuals)
    return merged_vmap(functools.partial(execute, spec, resolution.choice, **options), r)


def run_backward(
    resolution: Resolution, r: Recurrence, d_output, d_final, residuals: Residuals | None, derived: Callable
) -> Recurrence | None:
    """Return the gradient of r by the fused gradient kernel, or None if there is none; the caller then uses the derived
    gradient.

    d_output [B, T, H, V] and d_final [N, H, K, V] are the cotangents; d_final may be None for zeros. residuals: what the
    forward saved, or None. derived: (choice, r, d_output, d_final) -> the derived gradient, which runs where the program is
    lowered for a backend without a kernel that stores states.
    """
    if resolution.vjp is None:
        return None
    if resolution.mixes_segments(r) or not resolution.vjp.omits_d_final(r):
        d_final = filled(d_final, r)
    operands = (r, d_output, d_final, *([] if residuals is None else [residuals]))
    again = functools.partial(gradient_elsewhere, derived)
    return merged_vmap(functools.partial(execute, resolution.vjp, resolution.vjp_choice, again=again), *operands)


def filled(d_final, r: Recurrence):
    """Return d_final, or if it is None zeros of the shape of r's final states, [N, H, K, V]."""
    return varying_like(jnp.zeros(r.state_shape, r.dtype), r.q) if d_final is None else d_final


# ---- the same where the program is lowered for another backend than it was traced for ---------------------------------


def forward_elsewhere(choice: Choice, results, r: Recurrence) -> Outputs:
    """Return the outputs of r by a kernel for the backend that the program is lowered for, with the platform and config of
    `choice`.

    Where r stores states, r is solved in pieces. results: not used.
    """
    if r.states_every is not None:
        pieces = functools.partial(forward_elsewhere, choice, results)
        found = solve_with_states(pieces, r.replace(states_every=None), r.states_every, None)
        states: Any = StoredStates(found.final_state, cast(Any, found.states))
        return Outputs(found.output, states)
    return run_spec(kernel_registry.find(r.folded, choice.platform, choice.config), choice, r)


def forward_elsewhere_without_residuals(
    choice: Choice, results: tuple[Outputs, Residuals], r: Recurrence
) -> tuple[Outputs, Residuals]:
    """Return (the outputs by a kernel of the backend of the lowering, residuals of zeros).

    The gradient was traced for another backend, whose kernel fixed the shapes of the residuals. The gradient of this backend
    does not read them. results: the shapes and dtypes of the outputs and residuals, as they were traced.
    """
    outputs, (states, flags) = results
    H = r.num_heads
    rows = states.shape[0] * r.q.shape[0] // outputs.output.shape[0]  # a kernel's row may hold several sequences
    zero_states = jnp.zeros((rows, states.shape[1], H, *states.shape[3:]), states.dtype)
    zero_flags = jnp.zeros((rows, flags.shape[1], H), flags.dtype)
    residuals = Residuals(varying_like(zero_states, r.q), varying_like(zero_flags, r.q))
    return forward_elsewhere(choice, results, r), residuals


def gradient_elsewhere(
    derived: Callable, choice: Choice, results, r: Recurrence, d_output, d_final, residuals: Residuals | None = None
) -> Recurrence:
    """Return the gradient of r, for the cotangents d_output and d_final, by a kernel of the backend of the lowering.

    The residuals are another kernel's, and are not read. derived: the function of the derived gradient, which runs if r stores
    states. results: not used. Raises UnsupportedError if no kernel can form the gradient.
    """
    if r.states_every is not None:
        return derived(choice, r, d_output, d_final)
    spec, own = vjp_kernel(choice, r.folded)
    if spec is None:
        kernel_registry.find(r.folded, choice.platform, choice.config)  # the error that it raises states why
        raise UnsupportedError("no kernel forms this gradient")
    return run_spec(spec, own, r, d_output, filled(d_final, r))


# ---- kernels in two phases, see `TwoPhase` ---------------------------------------------------------------------------


class Phases(NamedTuple):
    """Hold a kernel that runs in two phases: `spec`, the platform and config that the caller requires as `choice`, and its
    phases."""

    spec: KernelSpec
    choice: Choice
    phases: TwoPhase


def phases_of(resolution: Resolution, r: Recurrence, gradient: bool) -> Phases | None:
    """Return the kernel of r, or of its gradient, as `Phases`. Return None if the kernel has no two phases for r."""
    spec = resolution.vjp if gradient else resolution.forward
    choice = resolution.vjp_choice if gradient else resolution.choice
    if spec is None:
        return None
    required = choice.config or overlaid(spec.name)
    phases = spec.two_phase(r, spec.config.heuristic(r) if required is None else required)
    return None if phases is None else Phases(spec, choice, phases)


def two_phases(resolution: Resolution, r: Recurrence, gradient: bool) -> Phases:
    """Return the result of `phases_of`, which is not None. The caller has checked that the kernel has two phases."""
    found = phases_of(resolution, r, gradient)
    assert found is not None, "the caller has checked runs_in_two_phases"
    return found


def runs_in_two_phases(resolution: Resolution, r: Recurrence, gradient: bool) -> bool:
    """Return whether the kernel of r, or of its gradient if `gradient`, runs in two phases for r."""
    return phases_of(resolution, r, gradient) is not None


def begin(resolution: Resolution, r: Recurrence, *cotangents):
    """Run the first phase of r's kernel or, given cotangents (d_output, d_final), of its gradient kernel. Return (begun, state,
    log), the results of `local_states` in `TwoPhase`."""
    spec, choice, phases = two_phases(resolution, r, bool(cotangents))
    return merged_vmap(functools.partial(run_spec, spec, choice, part=phases.local_states), r, *cotangents)


def finish(resolution: Resolution, r: Recurrence, *given, begun):
    """Run the second phase of r's kernel or, with cotangents in `given`, of its gradient kernel.

    begun: the first result of `begin`. given: d_output, d_final and the residuals, if there are any; empty for the forward.
    """
    spec, choice, phases = two_phases(resolution, r, bool(given))
    return finish_by(phases.finish, spec, choice, r, *given, begun=begun)


def finish_with_residuals(resolution: Resolution, r: Recurrence, begun) -> tuple[Outputs, Residuals | None]:
    """Run the second phase of the forward: return the outputs, and the residuals for its gradient or None. begun: the first
    result of `begin`."""
    spec, choice, phases = two_phases(resolution, r, gradient=False)
    if phases.finish_with_residuals is None or not resolution.saves_residuals(r):
        return finish(resolution, r, begun=begun), None
    return finish_by(phases.finish_with_residuals, spec, choice, r, begun=begun)


def finish_by(part, spec: KernelSpec, choice: Choice, *operands, begun):
    """Run `part`, the second phase of a kernel, on (begun, *operands), under vmap with the axis of examples merged into the
    batch."""

    def run(*operands):
        *operands, begun = operands
        return run_spec(spec, choice, *operands, part=functools.partial(part, begun))

    return merged_vmap(run, *operands, begun)


# ---- kernels on a pool of states: decode steps, and the verification of draft tokens ---------------------------------


def pooled_kernel(choice: Choice, r: Recurrence, role: Role) -> KernelSpec | None:
    """Return the best kernel of `role` for r, whose initial states are a pool of states. Return None if no kernel of this role
    is able, or none takes choice.config; a config of another kernel is meant for the kernels of whole sequences, which the
    caller then uses."""
    load_kernels()
    able, _ = kernel_registry.able(r, choice.platform, choice.config, role=role)
    return able[0] if able else None


def run_pooled(spec: KernelSpec, choice: Choice, r: Recurrence, slots, otherwise) -> Outputs:
    """Return the output and, as the final state, the pool, which r has as its initial state.

    Sequence n has row slots[n] of the pool (-1: none), or row n if slots is None. A step's pool has the new states; other
    kernels leave the pool as it is. otherwise: (choice, r, slots) -> Outputs, which runs where the program is lowered for a
    backend without such a kernel.
    """
    from glax._src.solve.lowering import Kernel  # loads modules of JAX that are not a part of `import jax`

    others = why_not_others(spec, choice, r)

    def run(spec, others: dict, r: Recurrence, slots=None) -> Outputs:
        rows = jnp.arange(r.num_sequences, dtype=jnp.int32) if slots is None else slots.astype(jnp.int32)
        tokens, pool = r.replace(initial_state=None), r.initial_state
        assert pool is not None
        results = executor(spec, tokens, pool, rows, cfg=choice.config, **others)
        return Outputs(*results) if spec.is_step else Outputs(results, pool)

    def again(platform: Platform | None, results, r: Recurrence, slots=None) -> Outputs:
        own = narrowed(choice, platform)
        other = pooled_kernel(own, r, spec.role)
        return otherwise(own, r, slots) if other is None else run(other, {}, r, slots)

    kernel = Kernel(functools.partial(run, spec, others), again, opaque=spec.platform is not Platform.XLA)
    return kernel.placed(r) if slots is None else kernel.placed(r, slots)


def execute(spec: KernelSpec, choice: Choice, r: Recurrence, *given, again, part=None, saves_residuals: bool = False):
    """Return the results of spec's kernel on (r, *given), or of `again` where the program is lowered for another backend.

    again: (choice, results, r, *given) -> the same results. results: the shapes that spec's kernel returns. given: the operands
    beside r, such as cotangents. part: the function of the kernel to run instead of `run`, such as `forward_with_residuals`;
    None for `run`. saves_residuals: whether the kernel returns residuals, too.
    """
    from glax._src.solve.lowering import Kernel  # loads modules of JAX that are not a part of `import jax`

    def anew(platform: Platform | None, results, *operands):
        with overlay(policy=AutotunePolicy()):  # there is nothing to measure on
            return again(narrowed(choice, platform), results, *operands)

    run = functools.partial(run_spec, spec, choice, part=part)
    return Kernel(run, anew, spec.platform is not Platform.XLA, saves_residuals).placed(r, *given)


def run_spec(spec: KernelSpec, choice: Choice, r: Recurrence, *given, part=None):
    """Return the results of spec's kernel on (r, *given), in which no NaN or inf has passed between sequences or segments.

    part: the function of the kernel to run instead of `run`, or None.
    """
    run = functools.partial(run_config, spec, choice, part=part)
    if spec.isolate is not None and part in (None, spec.forward_with_residuals):
        return spec.isolate(run, r, *given)
    return run(r, *given)


def run_config(spec: KernelSpec, choice: Choice, r: Recurrence, *given, part=None):
    """Return the results of spec's kernel on (r, *given), run with the config that the executor chooses. part: as in
    `run_spec`.

    Segments that the kernel does not read are folded into gates first.
    """
    if r.segments is not None and not spec.takes_segments(r):
        run = functools.partial(run_config, spec, choice, part=part)
        return by_folding(isolating(run, r.segments) if spec.mixes_segments(r) else run)(r, *given)
    others = why_not_others(spec, choice, r)
    route = functools.partial(spec.route, r, *given) if others else None
    return executor(spec, r, *given, cfg=choice.config, part=part, route=route, **others)


def why_not_others(spec: KernelSpec, choice: Choice, r: Recurrence) -> dict[str, dict[str, str]]:
    """Return {"refused": {kernel: why}, "outranked": {kernel: why}} for all kernels of the same role but spec, as the executor
    records it. The result is empty where decisions are neither recorded nor logged."""
    if not is_recorded():
        return {}
    able, refused = kernel_registry.able(r, choice.platform, choice.config, role=spec.role)
    chosen, outranked = spec.priority(r), {}
    for other in able:
        if other.name != spec.name:
            outranked[other.name] = f"able, with a priority of {other.priority(r)}; {spec.name} has {chosen}"
    return dict(refused=refused | choice.refused, outranked=outranked)


def by_folding(run: Callable) -> Callable:
    """Return `run` for a recurrence without segments: the segments of r are folded into gates first.

    run: (r) -> Outputs or (Outputs, Residuals), or (r, d_output, d_final, *residuals) -> Recurrence.
    """

    def run_folded(r: Recurrence, *given):
        assert r.segments is not None
        if not given:
            found = run(r.folded)
            outputs, *residuals = (found,) if isinstance(found, Outputs) else found
            outputs = outputs._replace(output=r.segments.masked(outputs.output))
            return (outputs, *residuals) if residuals else outputs
        folded, pull = jax.vjp(lambda floats: floats.with_integers(r).folded, r.floats)
        d_output, *rest = given
        return pull(run(folded, r.segments.masked(d_output), *rest))[0]

    return run_folded


def narrowed(choice: Choice, platform: Platform | None) -> Choice:
    """Return the choice with `platform` required. Raises UnsupportedError if the choice requires another platform."""
    if platform is None or choice.platform is platform:
        return choice
    if choice.platform is not None:
        raise UnsupportedError(
            f"kernels on platform {str(choice.platform)!r} cannot be divided over several devices in a program that is exported, "
            f"or over automatic axes on a TPU: call glax with platform {str(platform)!r} or None, or inside jax.shard_map"
        )
    return dataclasses.replace(choice, platform=platform)


def merged_vmap(f, *operands):
    """Return f(*operands). Under vmap the axis of examples is merged into the batch, so that no kernel needs a batching rule.

    operands: trees of arrays, the first a Recurrence. Packed sequences have different boundaries in each example, so these
    examples run one after another.
    """
    run = custom_vmap(f)

    @run.def_vmap
    def rule(size, batched, *operands):
        def broadcast(x, is_batched):
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        operands = jax.tree.map(broadcast, operands, tuple(batched))
        if operands[0].boundaries is not None:
            results = jax.lax.map(lambda each: run(*each), operands)
        else:
            # Examples with scales of their own are not to be joined, also where another vmap traces f again later.
            apart = bool(batched[0].scale) or sequences_apart.value
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), operands)
            results = merged_vmap(functools.partial(run_apart, f), *merged) if apart else run(*merged)
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return run(*operands)


def run_apart(f, *operands):
    """Return f(*operands), traced such that kernels do not join several sequences to one row."""
    with sequences_apart(True):
        return f(*operands)

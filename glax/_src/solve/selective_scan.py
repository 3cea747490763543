"""Choose the kernels that run a selective scan, its gradient and its step, and insert them into the program.

Each has native code for CPUs, which is chosen wherever it is able (docs/internals/experiments/cpu.md), and XLA's kernel. The scan
and its gradient also have Triton's for GPUs of NVIDIA, which are chosen in the same way. These add D x themselves and store y in
the dtype of x, so that no y in float32 passes through memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.core.backend import Backend, computes_on
from glax._src.core.recurrence import aligned, varying_like
from glax._src.core.registry import Config, Platform, UnsupportedError
from glax._src.kernels.common.selective import Packing, SelectiveOperands, StepOperands
from glax._src.kernels.cpu import selective_scan as native
from glax._src.kernels.triton.selective_scan_config import forward_config, gradient_config
from glax._src.kernels.triton.selective_scan_config import refusal as triton_takes
from glax._src.kernels.xla import selective_scan as xla
from glax._src.solve.autodiff import float0_zeros
from glax._src.solve.dispatch import executor
from glax._src.solve.partitioning import DIVIDED, is_on_one_device, is_spread_by_type, why_not_on_gpu
from glax._src.tuning.executor import is_recorded
from glax._src.tuning.op import Kernel, example_leaf


@dataclasses.dataclass(frozen=True)
class SelectiveKernel(Kernel):
    """Describe one implementation of a selective scan, its gradient or its step: what an executor asks of a kernel.

    function: (*operands, options) -> the results, with cfg= if there is a `heuristic`. supports: operands -> None, or why the
    kernel refuses them.
    """

    algorithm: str
    platform: Platform
    backend: Backend
    function: Callable[..., Any]
    supports: Callable[[Any], str | None] = lambda operands: None
    # operands -> the config that `function` takes as cfg; None if it takes none
    heuristic: Callable[[Any], Config] | None = None

    op_ids: ClassVar = ("selective_scan/triton/gpu", "selective_scan.vjp/triton/gpu")  # those with configs

    @property
    def op_id(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  (the base declares it as a field)
        return f"{self.algorithm}/{self.platform}/{self.backend}"

    def refusal(self, operands, is_named: bool) -> str | None:
        """Return why this kernel does not run the operands here; None if it does. is_named: whether the caller names its
        platform."""
        if self.backend not in (Backend.here(), Backend.ANY):
            return f"needs a {self.backend}, {computes_on()}"
        if self.platform is Platform.CPP and not is_named and (why := spread_refusal()) is not None:
            return why
        if self.platform is Platform.TRITON and is_spread_by_type(operands):
            return DIVIDED
        return self.supports(operands)

    def run(self, *args, cfg: Config, **options):
        own = {} if self.heuristic is None else dict(cfg=cfg)
        return self.function(*args, **own, **options)

    def heuristic_cfg(self, inv) -> Config:
        return Config() if self.heuristic is None else self.heuristic(inv.args[0])

    def example(self, inv) -> tuple[tuple, dict]:
        """Return (args, kwargs) to measure an `Invocation` inv on: random arrays, decays below 1 and sequences of equal
        length."""
        args, kwargs = jax.tree.map(functools.partial(example_leaf, jax.random.key(0)), (inv.args, inv.kwargs))
        operands, *others = args
        operands = operands._replace(dt=jax.nn.softplus(operands.dt), A=-jnp.exp(operands.A))
        if isinstance(operands, StepOperands) and operands.slots is not None:
            slots = jnp.arange(len(operands.slots), dtype=operands.slots.dtype)
            operands = operands._replace(slots=slots)
        if isinstance(operands, SelectiveOperands) and (cuts := operands.packing.cuts) is not None:
            cuts = (jnp.arange(len(cuts)) * operands.x.shape[1] // max(len(cuts) - 1, 1)).astype(cuts.dtype)
            operands = operands._replace(packing=Packing(cuts, None))
        return (operands, *others), kwargs


def spread_refusal() -> str | None:
    """Return why native code is not chosen where XLA may divide the call over several devices; None where it may not.

    Native code then runs only if the caller names its platform.
    """
    count = max(jax.device_count(), jax.sharding.get_abstract_mesh().size)
    if count == 1 or is_on_one_device():
        return None
    return f"runs on one device, and XLA may divide the call over {count}: name platform='cpp', or call it in jax.shard_map"


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """Hold the platform that runs a call and its gradient, and whether the caller names that platform.

    refused, outranked: {each other platform: why its kernel does not run}, because the kernel refuses or a faster one is able.
    """

    platform: Platform
    is_named: bool
    refused: dict[Platform, str]
    outranked: dict[Platform, str]


def choose(kernels: tuple[SelectiveKernel, ...], platform: Platform | None, operands) -> Chosen:
    """Return as `Chosen` the platform of the first of `kernels` that is able to run the operands here.

    kernels: the implementations of one function, the fastest first. platform: the one that the caller names, or None. Raises
    UnsupportedError, with every refusal, if none is able.
    """
    eligible = [kernel for kernel in kernels if platform in (None, kernel.platform)]
    reasons = [(kernel, kernel.refusal(operands, platform is not None)) for kernel in eligible]
    able = [kernel for kernel, why in reasons if why is None]
    if not able:
        on = "" if platform is None else f" on platform {str(platform)!r}"
        lines = [f"  {kernel.op_id}: {why}" for kernel, why in reasons] or ["  none is written for it"]
        raise UnsupportedError(f"no kernel computes {kernels[0].algorithm}{on}:\n" + "\n".join(lines))
    first, *rest = able
    refused = {kernel.platform: why for kernel, why in reasons if why is not None}
    return Chosen(
        first.platform,
        platform is not None,
        refused,
        {kernel.platform: f"able, and slower than {first.op_id}" for kernel in rest},
    )


def run_chosen(kernels: tuple[SelectiveKernel, ...], chosen: Chosen, *operands, **options):
    """Return the results of the kernel in `kernels` of the chosen platform, and record for `explain` why the others do not run.

    options: further arguments of the kernel's function.
    """
    own = {kernel.platform: kernel for kernel in kernels}

    def by_name(reasons: dict[Platform, str]) -> dict[str, str]:
        return {own[platform].op_id: why for platform, why in reasons.items()}

    others = dict(refused=by_name(chosen.refused), outranked=by_name(chosen.outranked)) if is_recorded() else {}
    return executor(own[chosen.platform], *operands, **others, **options)


# ---- the scan and its gradient -------------------------------------------------------------------------------------------


def scan(
    platform: Platform | None, reverse: bool, operands: SelectiveOperands, skip: Float[Array, "D"] | None
) -> tuple[Float[Array, "G T D"], Float[Array, "sequences D N"]]:
    """Return (y, the final states) by the best kernel. y is in the dtype of x. No size may be 0.

    platform: the one that the caller names, or None. reverse: whether the scan goes from the last token to the first. skip: D,
    whose product with x is a term of y; None for none. y is undefined in rows of no sequence.
    """
    chosen = choose(SCAN, platform, operands)
    operands, skip = differentiable((operands, skip))
    if chosen.platform is Platform.TRITON:
        return solve_with_skip(chosen, reverse, operands, skip)
    y, final = cast(tuple, solve(chosen, reverse, operands))
    return with_skip(y, operands.x, skip).astype(operands.x.dtype), final


def with_skip(y: Array, x: Float[Array, "*rows D"], D: Float[Array, "D"] | None) -> Array:
    """Return y + D x in the dtype of y, or y if D is None. The last axis of y and x has the channels of D."""
    return y if D is None else y + jnp.expand_dims(D.astype(y.dtype), range(x.ndim - 1)) * x.astype(y.dtype)


def differentiable(operands):
    """Return the operands such that all vary over the same mesh axes, and only reverse mode can differentiate them."""
    from glax._src.solve.reverse_mode import reverse_mode  # loads modules of JAX that are not a part of `import jax`

    return reverse_mode(aligned(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def solve(chosen: Chosen, reverse: bool, operands: SelectiveOperands):
    """Return (y without D x, the final states) by the kernel of `chosen`, with a gradient by the kernel of the same
    platform."""
    return run_chosen(SCAN, chosen, operands, reverse=reverse, saves_residuals=False)[:2]


def _fwd(chosen: Chosen, reverse: bool, operands: SelectiveOperands):
    *outputs, starts = run_chosen(SCAN, chosen, operands, reverse=reverse, saves_residuals=True)
    return tuple(outputs), (operands, starts)


def _bwd(chosen: Chosen, reverse: bool, residuals, cotangents):
    operands, starts = residuals
    found = run_chosen(GRADIENT, chosen, operands, starts, *cotangents, reverse=reverse)
    return (cotangents_of(operands, found),)


solve.defvjp(_fwd, _bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def solve_with_skip(chosen: Chosen, reverse: bool, operands: SelectiveOperands, skip: Array | None):
    """Return (y with D x if `skip` is D, the final states) by Triton's kernel, with a gradient by Triton's."""
    options = dict(reverse=reverse, saves_residuals=False, spreads=spreads(chosen))
    return run_chosen(SCAN, chosen, operands, skip, **options)[:2]


def _whole_fwd(chosen: Chosen, reverse: bool, operands: SelectiveOperands, skip: Array | None):
    options = dict(reverse=reverse, saves_residuals=True, spreads=spreads(chosen))
    *outputs, starts = run_chosen(SCAN, chosen, operands, skip, **options)
    return tuple(outputs), (operands, skip, starts)


def _whole_bwd(chosen: Chosen, reverse: bool, residuals, cotangents):
    options = dict(reverse=reverse, spreads=spreads(chosen))
    found, d_skip = run_chosen(GRADIENT, chosen, *residuals, *cotangents, **options)
    return cotangents_of(residuals[0], found), d_skip


solve_with_skip.defvjp(_whole_fwd, _whole_bwd)


def spreads(chosen: Chosen) -> bool:
    """Return whether XLA may divide the operands over devices: False if the caller names the platform, or inside shard_map over
    all axes. If so, XLA's kernel runs where there are several devices."""
    return not (chosen.is_named or is_on_one_device())


def cotangents_of(operands, floats: Sequence[Array]):
    """Return the cotangents of the operands: `floats` for all but the last operand, which holds integers and booleans."""
    *names, last = operands._fields
    rest = jax.tree.map(float0_zeros, getattr(operands, last))
    return operands._replace(**dict(zip(names, floats, strict=True)) | {last: rest})


def with_floats(operands, floats: Sequence[Array]):
    """Return the operands with `floats` in the place of all but the last."""
    return operands._replace(**dict(zip(operands._fields, floats, strict=False)))


# ---- foreign code in a program ----------------------------------------------------------------------------------------


def inserted(run: Callable, again: Callable, *operands, spreads: bool = False):
    """Return run(*operands), which is foreign code, or again(results, *operands) if the program is lowered for another backend.

    spreads: whether `again` also runs if the program is lowered for several devices. results: the shapes and dtypes that `run`
    returns. The examples of vmap run one after another.
    """
    from glax._src.solve.lowering import Kernel as Inserted  # loads modules of JAX that are not a part of `import jax`

    def elsewhere(platform: Platform | None, results, *operands):
        return again(results, *operands)

    kernel = Inserted(run, elsewhere, opaque=True, is_divisible=False)
    call = jax.custom_batching.custom_vmap(functools.partial(kernel.bind, spreads))

    @call.def_vmap
    def rule(size: int, batched, *operands):
        def spread(x, is_batched: bool):
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        results = jax.lax.map(lambda each: call(*each), jax.tree.map(spread, operands, tuple(batched)))
        return results, jax.tree.map(lambda _: True, results)

    return call(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def native_forward(reverse: bool, saves_residuals: bool, operands: SelectiveOperands) -> tuple[Array, Array, Array]:
    """Return y and the final states, and the states before chunks as residuals, by native code; an empty array without
    residuals."""

    def again(results, operands: SelectiveOperands):
        y, final, _ = xla.forward(operands, reverse=reverse)
        return y, final, varying_like(jnp.zeros(results[2].shape, results[2].dtype), operands.x)

    run = functools.partial(native.forward, reverse=reverse, saves_residuals=saves_residuals)
    return inserted(run, again, operands)


def native_forward_fwd(reverse: bool, saves_residuals: bool, operands: SelectiveOperands):
    y, final, starts = cast(tuple, native_forward(reverse, True, operands))
    return (y, final, starts if saves_residuals else jnp.zeros(0, jnp.float32)), (operands, starts)


def native_forward_bwd(reverse: bool, saves_residuals: bool, residuals, cotangents):
    # The gradient does not depend on the saved states but through the operands, so their cotangent is 0.
    operands, starts = residuals
    found = cast(tuple, native_gradient(reverse, operands, starts, *cotangents[:2]))
    return (cotangents_of(operands, found),)


native_forward.defvjp(native_forward_fwd, native_forward_bwd)


def derived_gradient(reverse: bool, operands: SelectiveOperands, d_y: Array, d_final: Array) -> tuple[Array, ...]:
    """Return the gradients of the floats of the operands by XLA's kernels, which form the states before chunks again."""
    _, _, starts = xla.forward(operands, reverse=reverse)
    return xla.gradient(operands, starts, d_y, d_final, reverse=reverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def native_gradient(reverse: bool, operands: SelectiveOperands, starts: Array, d_y: Array, d_final: Array):
    """Return the gradients of the operands' floats by native code. starts: the states before chunks, as `native_forward` saves
    them."""

    def again(results, operands: SelectiveOperands, starts: Array, d_y: Array, d_final: Array):
        return derived_gradient(reverse, operands, d_y, d_final)

    return inserted(functools.partial(native.gradient, reverse=reverse), again, operands, starts, d_y, d_final)


def native_gradient_fwd(reverse: bool, operands: SelectiveOperands, starts: Array, d_y: Array, d_final: Array):
    found = native_gradient(reverse, operands, starts, d_y, d_final)
    return found, (operands, starts, d_y, d_final)


def native_gradient_bwd(reverse: bool, residuals, cotangents):
    operands, starts, d_y, d_final = residuals

    def gradient(floats, d_y, d_final):
        return derived_gradient(reverse, with_floats(operands, floats), d_y, d_final)

    d_floats, d_d_y, d_d_final = jax.vjp(gradient, operands[:-1], d_y, d_final)[1](cotangents)
    return cotangents_of(operands, d_floats), jnp.zeros_like(starts), d_d_y, d_d_final


native_gradient.defvjp(native_gradient_fwd, native_gradient_bwd)


# ---- Triton in a program. `place`: (config, reverse, whether the compiler may divide the call) ---------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def triton_forward(place: tuple, saves_residuals: bool, operands: SelectiveOperands, skip: Array | None):
    """Return y with D x, the final states and the residuals, by Triton's kernel.

    place: (config, reverse, whether XLA may divide the call over devices). skip: D, or None.
    """
    cfg, reverse, spreads = place

    def run(operands: SelectiveOperands, skip: Array | None):
        from glax._src.kernels.triton import selective_scan  # imports Triton

        return selective_scan.forward(operands, skip, cfg, reverse=reverse, saves_residuals=saves_residuals)

    def again(results, operands: SelectiveOperands, skip: Array | None):
        y, final = whole_by_xla(reverse, operands, skip)
        return y, final, varying_like(jnp.zeros(results[2].shape, results[2].dtype), operands.x)

    return inserted(run, again, operands, skip, spreads=spreads)


def triton_forward_fwd(place: tuple, saves_residuals: bool, operands: SelectiveOperands, skip: Array | None):
    return triton_forward(place, saves_residuals, operands, skip), (operands, skip)


def triton_forward_bwd(place: tuple, saves_residuals: bool, residuals, cotangents):
    found, d_skip = whole_gradient_by_xla(place[1], *residuals, *cotangents[:2])
    return cotangents_of(residuals[0], found), d_skip


triton_forward.defvjp(triton_forward_fwd, triton_forward_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def triton_gradient(
    place: tuple, operands: SelectiveOperands, skip: Array | None, starts: Array, d_y: Array, d_final: Array
):
    """Return (the gradients of the operands' floats, the gradient of skip) by Triton's kernel. place: as in `triton_forward`.

    starts: the residuals of `triton_forward`.
    """
    cfg, reverse, spreads = place

    def run(operands, skip, starts, d_y, d_final):
        from glax._src.kernels.triton import selective_scan  # imports Triton

        return selective_scan.gradients(operands, skip, starts, d_y, d_final, cfg, reverse=reverse)

    def again(results, operands, skip, starts, d_y, d_final):
        return whole_gradient_by_xla(reverse, operands, skip, d_y, d_final)

    return inserted(run, again, operands, skip, starts, d_y, d_final, spreads=spreads)


def triton_gradient_fwd(place: tuple, *operands):
    return triton_gradient(place, *operands), operands


def triton_gradient_bwd(place: tuple, residuals, cotangents):
    operands, skip, starts, d_y, d_final = residuals

    def gradient(floats, skip, d_y, d_final):
        return whole_gradient_by_xla(place[1], with_floats(operands, floats), skip, d_y, d_final)

    d_floats, d_skip, *rest = jax.vjp(gradient, operands[:-1], skip, d_y, d_final)[1](cotangents)
    return cotangents_of(operands, d_floats), d_skip, jnp.zeros_like(starts), *rest


triton_gradient.defvjp(triton_gradient_fwd, triton_gradient_bwd)


def whole_by_xla(reverse: bool, operands: SelectiveOperands, skip: Array | None) -> tuple[Array, Array]:
    """Return (y with D x if `skip` is D, in the dtype of x; the final states) by XLA's kernel."""
    options: dict[str, Any] = dict(reverse=reverse, saves_residuals=False)
    y, final, _ = executor(SCAN[-1], operands, **options, refused={SCAN[0].op_id: why_not_on_gpu()})
    return with_skip(y, operands.x, skip).astype(operands.x.dtype), final


def whole_gradient_by_xla(reverse: bool, operands: SelectiveOperands, skip: Array | None, d_y: Array, d_final: Array):
    """Return the gradients of the operands' floats and of `skip`, by XLA's kernels."""
    x, d_y = operands.x, d_y.astype(operands.A.dtype)
    d_x, *others = derived_gradient(reverse, operands, d_y, d_final)
    if skip is None:
        return (d_x, *others), None
    d_skip = (d_y * x.astype(d_y.dtype)).sum((0, 1)).astype(skip.dtype)
    return ((with_skip(d_x.astype(d_y.dtype), d_y, skip)).astype(x.dtype), *others), d_skip


# ---- the kernels ---------------------------------------------------------------------------------------------------------


def xla_forward(operands: SelectiveOperands, *, reverse: bool, saves_residuals: bool):
    return xla.forward(operands, reverse=reverse)


def native_forward_of(operands: SelectiveOperands, *, reverse: bool, saves_residuals: bool):
    return native_forward(reverse, saves_residuals, operands)


def native_gradient_of(*operands, reverse: bool):
    return native_gradient(reverse, *operands)


def triton_forward_of(operands: SelectiveOperands, skip, *, reverse: bool, saves_residuals: bool, spreads: bool, cfg):
    return triton_forward((cfg, reverse, spreads), saves_residuals, operands, skip)


def triton_gradient_of(*operands, reverse: bool, spreads: bool, cfg):
    return triton_gradient((cfg, reverse, spreads), *operands)


SCAN = (
    SelectiveKernel("selective_scan", Platform.TRITON, Backend.GPU, triton_forward_of, triton_takes, forward_config),
    SelectiveKernel("selective_scan", Platform.CPP, Backend.CPU, native_forward_of, native.takes),
    SelectiveKernel("selective_scan", Platform.XLA, Backend.ANY, xla_forward),
)
GRADIENT = (
    SelectiveKernel(
        "selective_scan.vjp", Platform.TRITON, Backend.GPU, triton_gradient_of, triton_takes, gradient_config
    ),
    SelectiveKernel("selective_scan.vjp", Platform.CPP, Backend.CPU, native_gradient_of, native.takes),
    SelectiveKernel("selective_scan.vjp", Platform.XLA, Backend.ANY, xla.gradient),
)


# ---- the step ------------------------------------------------------------------------------------------------------------


def step(
    platform: Platform | None, operands: StepOperands, gathered: Callable, refusal: str | None
) -> tuple[Float[Array, "G D"], Float[Array, "P D N"]]:
    """Return (y, the pool) behind one token of each sequence, by the best kernel. y is in the dtype of A.

    gathered: operands -> the same results, by XLA, through which the gradient is taken. refusal: why native code cannot run, or
    None. y is undefined in a row without a slot.
    """

    def supports(operands: StepOperands) -> str | None:
        return refusal or native.step_takes(operands)

    def again(results, operands: StepOperands):
        return gathered(operands)

    @jax.custom_vjp
    def in_pool(operands: StepOperands):
        return inserted(native.step, again, operands)

    def bwd(operands: StepOperands, cotangents):
        _, pull = jax.vjp(lambda floats: gathered(with_floats(operands, floats)), operands[:-1])
        return (cotangents_of(operands, *pull(cotangents)),)

    in_pool.defvjp(lambda operands: (in_pool(operands), operands), bwd)
    kernels = (
        SelectiveKernel("selective_scan.step", Platform.CPP, Backend.CPU, in_pool, supports),
        SelectiveKernel("selective_scan.step", Platform.XLA, Backend.ANY, gathered),
    )
    operands = differentiable(operands)
    return run_chosen(kernels, choose(kernels, platform, operands), operands)

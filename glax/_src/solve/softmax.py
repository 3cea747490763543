"""Choose the kernels that run softmax attention and its gradient, and insert them into the program.

Attention and its gradient each have two implementations: Triton's for GPUs of NVIDIA, which is chosen wherever it is able, and
XLA's, in one of three forms: `whole`, `in_blocks` and `by_sequence`. A step over caches has two as well, XLA's in one form. The
gradient of a step is always XLA's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.backend import Backend, computes_on
from glax._src.core.recurrence import aligned, varying_like
from glax._src.core.registry import Platform
from glax._src.kernels.common.softmax import Intervals, ReadBlocks, SoftmaxOperands, StepOperands
from glax._src.kernels.triton import softmax_config
from glax._src.kernels.xla import softmax as xla
from glax._src.kernels.xla.softmax import by_sequence, in_blocks, whole
from glax._src.solve.autodiff import float0_zeros
from glax._src.solve.dispatch import executor
from glax._src.tuning.op import FunctionKernel

Operands = TypeVar("Operands", SoftmaxOperands, StepOperands)


class SoftmaxKernel(FunctionKernel):
    """Hold an implementation of softmax attention, of its gradient, or of its step."""

    op_ids = ("softmax/triton/gpu", "softmax.vjp/triton/gpu", "softmax.step/triton/gpu")


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """Hold how a call is computed where Triton's kernels do not run, by_xla(operands, scale) -> o, and the scale of q k^T."""

    by_xla: Callable[[SoftmaxOperands, float], Array]
    scale: float

    def pulled(self, f: Callable, operands: SoftmaxOperands, d_o: Array) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv for the cotangent d_o of o = f(operands, self.scale), by XLA. f: `by_xla` or `whole`. Only
        `whole` has derivatives of all orders."""

        def of_floats(q: Array, k: Array, v: Array) -> Array:
            return f(operands._replace(q=q, k=k, v=v), self.scale)

        return jax.vjp(of_floats, operands.q, operands.k, operands.v)[1](d_o)


def attend_whole(q, k, v, intervals: Intervals, scale: float | None) -> Float[Array, "B T Hq V"]:
    """Return softmax(scale q k^T) v over each row's interval of keys; XLA forms it by one product of all rows and keys.

    q [B, T, Hq, D], k [B, S, Hk, D], v [B, S, Hk, V]; Hk divides Hq, and the result has q's dtype. intervals: of [B, T] rows.
    scale: D ** -0.5 if None. A row that reads nothing is 0.
    """
    return attend(whole, SoftmaxOperands(q, k, v, *intervals, None), scale)


def attend_in_blocks(
    q, k, v, intervals: Intervals, scale: float | None, blocks: ReadBlocks | None = None
) -> Float[Array, "B T Hq V"]:
    """Return the outputs of softmax attention in which each row reads the keys of its interval. q, k, v: as in `attend_whole`.

    XLA takes blocks of rows, and reads for each block only the keys from the lowest first[t] to the highest last[t] of its
    rows. blocks: which blocks of keys each row reads of its interval; all if None.
    """
    return attend(in_blocks, SoftmaxOperands(q, k, v, *intervals, None, blocks), scale)


def attend_by_sequence(
    q, k, v, intervals: Intervals, scale: float | None, cuts: Int[Array, "N+1"], blocks: ReadBlocks | None = None
) -> Float[Array, "1 T Hq V"]:
    """Return the outputs of softmax attention for B = 1. Sequence n has the rows cuts[n] to cuts[n + 1] of q.

    Each row reads the keys of its interval, as in `attend_whole`. XLA takes blocks of rows of one sequence, so the keys of a
    sequence need not lie beside those of the next. Rows behind the last sequence are 0. With `blocks`, as in
    `attend_in_blocks`, all rows of a sequence have one first[t].
    """
    return attend(by_sequence, SoftmaxOperands(q, k, v, *intervals, cuts, blocks), scale)


def attend(by_xla: Callable, operands: SoftmaxOperands, scale: float | None) -> Float[Array, "B T Hq V"]:
    """Return the attention by Triton's kernels where they are able, else by_xla(operands, scale). k and v are cast to the dtype
    of q."""
    q, k, v = operands[:3]
    form = Form(by_xla, q.shape[-1] ** -0.5 if scale is None else scale)
    operands = operands._replace(k=k.astype(q.dtype), v=v.astype(q.dtype))
    why = refusal(operands, form.scale)
    if why is not None:
        by_form = SoftmaxKernel("softmax/xla/any", lambda operands, *, cfg, scale: by_xla(operands, scale))
        return executor(by_form, operands, scale=form.scale, refused={TRITON.op_id: why})
    return fused(form, aligned(operands))


def refusal(operands: SoftmaxOperands, scale: float) -> str | None:
    """Return why Triton's kernels do not run a call here, or None."""
    return gpu_refusal() or softmax_config.refusal(operands, scale)


def gpu_refusal() -> str | None:
    """Return the refusal of Triton's kernels where the backend is no GPU; None on a GPU."""
    return None if Backend.here() is Backend.GPU else f"needs a gpu, {computes_on()}"


# ---- a step ------------------------------------------------------------------------------------------------------------


def attend_step(
    q, k, v, intervals: Intervals, scale: float | None, *, width: int, slots: Int[Array, "B"] | None = None
) -> Float[Array, "B 1 Hq V"]:
    """Return the attention of one row of q for each sequence over caches of keys and values, by Triton's kernel where it is
    able, else by XLA.

    q [B, 1, Hq, D], k [P, S, Hk, D], v [P, S, Hk, V]. v: None for values that are the first `width` channels of the keys.
    intervals: of [B, 1] rows. slots: the row of the caches of each sequence, P for none; row b for sequence b if None.
    """
    operands, scale = StepOperands(q, k, v, *intervals, slots), q.shape[-1] ** -0.5 if scale is None else scale
    why = gpu_refusal() or softmax_config.step_refusal(operands, scale, width)
    if why is not None:
        by_form = SoftmaxKernel("softmax.step/xla/any", step_by_xla)
        return executor(by_form, operands, scale=scale, width=width, refused={TRITON_STEP.op_id: why})
    return step(scale, width, aligned(operands))


def step_by_xla(operands: StepOperands, *, cfg=None, scale: float, width: int) -> Float[Array, "B 1 Hq V"]:
    q, k, v, first, last, slots = operands
    return xla.attend_step(q, k, v, Intervals(first, last), scale, width=width, slots=slots)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def step(scale: float, width: int, operands: StepOperands) -> Float[Array, "B 1 Hq V"]:
    """Return the attention of `attend_step` by Triton's kernel, with the gradient of XLA's. width: the channels of a value."""
    by_xla = functools.partial(step_by_xla, scale=scale, width=width)
    kernel = dataclasses.replace(
        TRITON_STEP, heuristic=functools.partial(softmax_config.step_config, value_width=width)
    )
    return placed(functools.partial(executor, kernel, scale=scale, width=width), by_xla, operands)


def step_fwd(scale: float, width: int, operands: StepOperands):
    return step(scale, width, operands), operands


def step_bwd(scale: float, width: int, operands: StepOperands, d_o):
    def of_floats(q, k, v):
        return step_by_xla(operands._replace(q=q, k=k, v=v), scale=scale, width=width)

    return (cotangents(operands, jax.vjp(of_floats, *operands[:3])[1](d_o)),)


step.defvjp(step_fwd, step_bwd)


# ---- the kernels -------------------------------------------------------------------------------------------------------


def run_forward(operands: SoftmaxOperands, *, cfg, scale: float):
    from glax._src.kernels.triton import softmax  # imports Triton

    return softmax.forward(in_range(operands), scale, cfg)


def run_gradient(operands: SoftmaxOperands, o, log_total, d_o, *, cfg, scale: float):
    from glax._src.kernels.triton import softmax  # imports Triton

    return tuple(softmax.gradient(in_range(operands), o, log_total, d_o, scale, cfg))


def run_step(operands: StepOperands, *, cfg, scale: float, width: int):
    from glax._src.kernels.triton import softmax_step  # imports Triton

    return softmax_step.forward(in_range(operands), scale, width, cfg)


def in_range(operands: Operands) -> Operands:
    """Return the operands with `first` at least 0 and `last` below S, as int32.

    The forward and the gradient both call this on the same operands, which are saved as given.
    """
    first, last = jnp.maximum(operands.first, 0), jnp.minimum(operands.last, operands.k.shape[1] - 1)
    return operands._replace(first=first.astype(jnp.int32), last=last.astype(jnp.int32))


FORWARD_ID, GRADIENT_ID, STEP_ID = SoftmaxKernel.op_ids
TRITON = SoftmaxKernel(FORWARD_ID, run_forward, softmax_config.forward_config)
TRITON_GRADIENT = SoftmaxKernel(GRADIENT_ID, run_gradient, softmax_config.gradient_config)
# `step` adds the rule for its config, which depends on the width of values.
TRITON_STEP = SoftmaxKernel(STEP_ID, run_step)


def placed(run: Callable, by_xla: Callable, *operands):
    """Return run(*operands), or by_xla(*operands) where the program is lowered for another backend or exported for several
    devices.

    Under vmap the axis of examples joins the batch. Operands with cuts or slots depend on where rows lie: there the examples
    run one after another.
    """
    from glax._src.solve.lowering import Kernel as Inserted  # loads modules of JAX that are not a part of `import jax`
    from glax._src.solve.partitioning import is_on_one_device

    def again(platform: Platform | None, results, *operands):
        is_able = Backend.here() is Backend.GPU and platform is not Platform.XLA
        return run(*operands) if is_able else by_xla(*operands)

    first = operands[0]
    has_places = (first.slots if isinstance(first, StepOperands) else first.cuts) is not None
    kernel = Inserted(run, again, opaque=True)
    call = jax.custom_batching.custom_vmap(lambda *operands: kernel.bind(not is_on_one_device(), *operands))

    @call.def_vmap
    def rule(size: int, batched, *operands):
        def spread(x, is_batched: bool):
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        operands = jax.tree.map(spread, operands, tuple(batched))
        if has_places:
            results = jax.lax.map(lambda each: call(*each), operands)
        else:
            joined = call(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), operands))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), joined)
        return results, jax.tree.map(lambda _: True, results)

    return call(*operands)


# ---- derivatives -------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(form: Form, operands: SoftmaxOperands):
    """Return o of `forward`, with a gradient by the kernel of `gradient`."""
    return cast(tuple, forward(form, operands))[0]


def fused_fwd(form: Form, operands: SoftmaxOperands):
    o, log_total = cast(tuple, forward(form, operands))
    return o, (operands, o, log_total)


def fused_bwd(form: Form, residuals, d_o):
    return (cotangents(residuals[0], cast(tuple, gradient(form, *residuals, d_o))),)


fused.defvjp(fused_fwd, fused_bwd)


def cotangents(operands: Operands, floats) -> Operands:
    """Return `floats`, the gradients of q, k and v, as a cotangent of the operands, with float0 zeros for their integers."""
    return type(operands)(*floats, *jax.tree.map(float0_zeros, tuple(operands[3:])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(form: Form, operands: SoftmaxOperands) -> tuple[Array, Array]:
    """Return (o, log_total [B, T, Hq]). log_total is the base-2 logarithm of each row's sum of exp(scale q k), for `gradient`.

    XLA returns zeros as log_total, because its gradient does not read them. The gradient of this function counts o alone.
    """

    def by_xla(operands):
        log_total = jnp.zeros((*operands.q.shape[:3],), jnp.float32)  # XLA's gradient forms its own
        return form.by_xla(operands, form.scale), varying_like(log_total, operands.q)

    return placed(functools.partial(executor, TRITON, scale=form.scale), by_xla, operands)


def forward_fwd(form: Form, operands: SoftmaxOperands):
    return forward(form, operands), operands


def forward_bwd(form: Form, operands: SoftmaxOperands, d):
    return (cotangents(operands, form.pulled(whole, operands, d[0])),)


forward.defvjp(forward_fwd, forward_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient(form: Form, operands: SoftmaxOperands, o: Array, log_total: Array, d_o: Array):
    """Return dq, dk and dv for the cotangent d_o. o, log_total: the results of `forward`.

    Derivatives of this function treat o and log_total as functions of the operands, so the cotangents of these two are zeros.
    """

    def by_xla(operands, o, log_total, d_o):
        return form.pulled(form.by_xla, operands, d_o)

    run = functools.partial(executor, TRITON_GRADIENT, scale=form.scale)
    return placed(run, by_xla, operands, o, log_total, d_o)


def gradient_fwd(form: Form, operands: SoftmaxOperands, o: Array, log_total: Array, d_o: Array):
    return gradient(form, operands, o, log_total, d_o), (operands, o, log_total, d_o)


def gradient_bwd(form: Form, residuals, d):
    operands, o, log_total, d_o = residuals

    def derived(q, k, v, d_o):
        return form.pulled(whole, operands._replace(q=q, k=k, v=v), d_o)

    *floats, d_d_o = jax.vjp(derived, *operands[:3], d_o)[1](d)
    return cotangents(operands, floats), jnp.zeros_like(o), jnp.zeros_like(log_total), d_d_o


gradient.defvjp(gradient_fwd, gradient_bwd)

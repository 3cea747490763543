"""The one gradient, above all platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, aligned, gradient_recurrence, spread_heads
from glax._src.solve.dispatch import Choice, forward_with_residuals, run_backward, run_forward


def differentiable(r: Recurrence) -> Recurrence:
    """r as the custom gradients take it: `aligned`, each array differentiable in reverse mode alone."""
    from glax._src.solve.reverse_mode import reverse_mode  # loads modules of JAX that are not a part of `import jax`

    return jax.tree.map(lambda x: reverse_mode(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, aligned(r))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve(choice: Choice, r: Recurrence) -> Outputs:
    """The outputs and final states of r, differentiable any number of times. For its gradient it keeps r, and what the kernel
    leaves to its gradient: at most a state a chunk."""
    return run_forward(choice, r)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve_with_residuals(choice: Choice, r: Recurrence) -> tuple[Outputs, Residuals | None]:
    """The same, with what is kept beside r: a by-product, which takes no cotangent."""
    return forward_with_residuals(choice, r)


def _residuals_fwd(choice, r):
    outputs, residuals = solve_with_residuals(
        choice, r
    )  # not forward_with_residuals: the gradient of a gradient passes through here
    return (outputs, residuals), (r, residuals)


def _residuals_bwd(choice, residuals, cotangents):
    (r, residuals), (cotangents, _) = residuals, cotangents
    d = gradient(choice, r, *cotangents, residuals)
    return (d.replace(boundaries=float0_zeros(r.boundaries)),)


def _solve_fwd(choice, r):
    (outputs, _), residuals = _residuals_fwd(choice, r)
    return outputs, residuals


def _solve_bwd(choice, residuals, cotangents):
    return _residuals_bwd(choice, residuals, (cotangents, None))


solve_with_residuals.defvjp(_residuals_fwd, _residuals_bwd)
solve.defvjp(_solve_fwd, _solve_bwd)


def float0_zeros(x: Array | None):
    """What JAX takes for the cotangent of integers."""
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)


def zero_cotangent(residuals: Residuals | None) -> Residuals | None:
    """The cotangent of what was kept."""
    return None if residuals is None else Residuals(jnp.zeros_like(residuals.states), float0_zeros(residuals.far))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient(choice: Choice, r: Recurrence, d_output, d_final, residuals: Residuals | None = None) -> Recurrence:
    """The gradient of <output, d_output> + <final_state, d_final> in every array of r, its boundaries set to None."""
    fused = run_backward(choice, r, d_output, d_final, residuals)
    return derived_gradient(choice, r, d_output, d_final) if fused is None else fused


def _gradient_fwd(choice, *operands):
    return gradient(choice, *operands), operands


def _gradient_bwd(choice, operands, cotangent):
    """Fused kernels have no gradient of their own; the derived form, made of `solve` and r alone, equals them and has one."""
    r, d_output, d_final, residuals = operands
    cotangents = d_output, d_final
    cuts = r.boundaries
    _, pull = jax.vjp(
        lambda r, *c: derived_gradient(choice, r.replace(boundaries=cuts), *c), r.replace(boundaries=None), *cotangents
    )
    d_r, *rest = pull(cotangent)
    return (d_r.replace(boundaries=float0_zeros(cuts)), *rest, zero_cotangent(residuals))


gradient.defvjp(_gradient_fwd, _gradient_bwd)


def derived_gradient(choice: Choice, r: Recurrence, d_output, d_final) -> Recurrence:
    """The gradient by the forward alone, its roles permuted; so a platform that writes only a forward can train.

        dq_t = scale S_t do_t      dk_t = G_t v_t      dv_t = G_t^T k_t

    G = dL/dS obeys the same recurrence against time with every decay one token late, driven by scale q and do and begun
    by d_final. The gradient of the log decays telescopes: its sum over the tokens behind t is q*dq - k*dk (of the state's
    rows; o*do - v*dv of its columns), from <S, dS> at the end.
    """
    given = r
    scale = r.by_token(r.scale)[..., None, None]
    r, do = clean(r, d_output)
    ones = jnp.ones_like(r.scale)

    # [B, T, H, K], [N, H, V, K]
    read, final = solve(choice, r.transposed.replace(q=do, k=r.v, v=r.k, scale=ones))
    adjoint = adjoint_of(r).replace(initial_state=d_final.astype(r.dtype), scale=ones)
    dk = solve(choice, adjoint.transposed.replace(q=r.v, k=do, v=r.q * scale)).output
    dv, G = solve(choice, adjoint.replace(q=r.k, k=r.q * scale, v=do))

    q, k, v = (spread_heads(x, r.num_heads) for x in (r.q, r.k, r.v))
    q_read, at_end = q * read, final.mT * d_final
    decay = r.decay
    d_rows = d_columns = None
    if decay.form not in ("none", "value"):
        d_rows = sum_behind(r, q_read * scale - k * dk, at_end.sum(3))
    if decay.value is not None:
        output = solve(choice, r).output
        d_columns = sum_behind(r, output * do - v * dv, at_end.sum(2))

    d_decay = Decay(
        constant=None if decay.constant is None else r.per_sequence(d_rows.sum(3)),
        head=None if decay.head is None else d_rows.sum(3),
        key=None if decay.key is None else d_rows,
        value=None if decay.value is None else d_columns,
    )
    initial = None if r.initial_state is None else G * first_decay(r)
    return gradient_recurrence(given, read * scale, dk, dv, d_decay, initial, r.per_sequence(q_read.sum((2, 3))))


def clean(r: Recurrence, d_output) -> tuple[Recurrence, Array]:
    """r and d_output in the dtype of sums, with padding rows zeroed: they may hold anything, NaN too."""

    def each(x):
        if x is None:
            return None
        x = x.astype(r.dtype)
        return x if r.boundaries is None else jnp.where(r.is_token.reshape(-1, *[1] * (x.ndim - 2)), x, 0)

    decay = r.decay
    decay = Decay(decay.constant, *map(each, (decay.head, decay.key, decay.value)))
    return r.replace(q=each(r.q), k=each(r.k), v=each(r.v), decay=decay), each(d_output)


def adjoint_of(r: Recurrence) -> Recurrence:
    """The recurrence of G = dL/dS, before its q, k, v and initial state are set: against time, every decay one late."""
    first = r.ends(scan_end=True)  # where the adjoint's walk begins

    def late(x):
        if x is None:
            return None
        moved = jnp.roll(x, 1 if r.reverse else -1, axis=1)
        return jnp.where(first.reshape(-1, *[1] * (x.ndim - 2)), 0, moved)

    constant = r.decay.constant
    head = r.decay.head if constant is None else r.by_token(constant.astype(r.dtype))
    return r.replace(decay=Decay(None, late(head), late(r.decay.key), late(r.decay.value)), reverse=not r.reverse)


def first_decay(r: Recurrence) -> Float[Array, "N H K V"]:
    """The decay of the first token of every walk; 1 for an empty sequence, which passes its state through."""
    decay, packed = r.decay, r.boundaries is not None
    if packed:
        begin, end = r.boundaries[:-1], r.boundaries[1:]
        at = jnp.clip(end - 1 if r.reverse else begin, 0, r.q.shape[1] - 1)
    rows = lambda x: x[0][at] if packed else x[:, -1 if r.reverse else 0]  # noqa: E731
    log = jnp.zeros(r.state_shape, r.dtype)
    head = (
        decay.constant.astype(r.dtype)
        if decay.constant is not None
        else None
        if decay.head is None
        else rows(decay.head)
    )
    if head is not None:
        log += head[..., None, None]
    if decay.key is not None:
        log += rows(decay.key)[..., :, None]
    if decay.value is not None:
        log += rows(decay.value)[..., None, :]
    factor = jnp.exp(log)
    return jnp.where((begin < end)[:, None, None, None], factor, 1) if packed else factor


def sum_behind(r: Recurrence, x: Float[Array, "B T H D"], at_end: Float[Array, "N H D"]) -> Float[Array, "B T H D"]:
    """The sum of x over a token and those behind it in the walk of its sequence, plus `at_end`; 0 in padding rows."""
    last = r.ends(scan_end=True)

    def step(total, row):
        x, at_end, last = row
        total = jnp.where(last, at_end, total) + x
        return total, total

    by_time = jnp.moveaxis(x, 1, 0), jnp.moveaxis(r.by_token(at_end), 1, 0), last
    _, sums = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), by_time, reverse=not r.reverse)
    sums = jnp.moveaxis(sums, 0, 1)
    return sums if r.boundaries is None else jnp.where(r.is_token[:, None, None], sums, 0)

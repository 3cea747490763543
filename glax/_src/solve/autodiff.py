"""Differentiate recurrences, above all platforms: a fused gradient kernel if one is able, else a gradient derived from the
forward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jaxtyping import Array, Float

from glax._src.core.decay import USUAL_FORMS, Decay
from glax._src.core.recurrence import (
    Outputs,
    OutputsWithStates,
    Recurrence,
    Residuals,
    StoredStates,
    aligned,
    gradient_recurrence,
    spread_heads,
)
from glax._src.core.registry import check_form, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import (
    Choice,
    Resolution,
    by_folding,
    filled,
    forward_with_residuals,
    resolve,
    run_backward,
    run_forward,
)
from glax._src.solve.isolation import isolating, isolating_gradient
from glax._src.solve.pieces import solve_with_states

DERIVED_FORMS = USUAL_FORMS  # whose gradient `derived_gradient` and `first_decay` form


def differentiable(r: Recurrence) -> Recurrence:
    """Return r prepared for the custom gradients: all arrays vary over the same mesh axes, and allow reverse mode alone."""
    from glax._src.solve.reverse_mode import reverse_mode  # loads modules of JAX that are not a part of `import jax`

    return reverse_mode(aligned(r))


class SavedNames(NamedTuple):
    """Hold the names of what a call saves for its gradient, for policies of jax.checkpoint. docs/models.md lists the names.

    The names do not change, since users write them in their policies.
    """

    output: str = "glax_output"
    final_state: str = "glax_final_state"
    states: str = "glax_states"
    out_of_range: str = "glax_out_of_range"
    entering_state: str = "glax_entering_state"


SAVED_NAMES = SavedNames()


def named_outputs(outputs: Outputs) -> Outputs:
    """Return the outputs of a forward under differentiation, each under a name for jax.checkpoint policies."""
    output, final_state = outputs
    return Outputs(
        named(output, SAVED_NAMES.output), jax.tree.map(lambda x: named(x, SAVED_NAMES.final_state), final_state)
    )


def named(x: Array, name: str) -> Array:
    """Return x under a name that policies of jax.checkpoint can list."""
    from jax.ad_checkpoint import checkpoint_name  # not a part of `import jax`

    return checkpoint_name(x, name)


def named_residuals(residuals):
    """Return the residuals of a forward, each array under its name of `SavedNames` for jax.checkpoint policies.

    residuals: a tree of `Residuals`, arrays or None. An array that is not in a `Residuals` is taken for the state that entered
    a shard of a sequence.
    """

    def named_each(x):
        if not isinstance(x, Residuals):
            return named(x, SAVED_NAMES.entering_state)
        return Residuals(named(x.states, SAVED_NAMES.states), named(x.out_of_range, SAVED_NAMES.out_of_range))

    return jax.tree.map(named_each, residuals, is_leaf=lambda x: isinstance(x, Residuals))


# ---- custom gradients, shared by `solve` here and by the solve over sequence shards ----------------------------------


class SolvePair(NamedTuple):
    """Hold two versions of one function with a custom gradient: `solve` returns Outputs, `solve_with_residuals` (Outputs,
    residuals)."""

    solve: Callable[..., Outputs]
    solve_with_residuals: Callable


def solve_with_vjp(
    run: Callable, run_with_residuals: Callable, gradient: Callable, num_static: int, omits_d_final: bool = False
) -> SolvePair:
    """Return the two functions as a `SolvePair` with `gradient` as their custom gradient. The first `num_static` operands of
    each function are static.

    run: (*static, r) -> Outputs. run_with_residuals: (*static, r) -> (Outputs, residuals); the residuals take no cotangent.
    gradient: (*static, r, d_output, d_final, residuals) -> Recurrence.
    omits_d_final: whether gradient takes None for a d_final of zeros, as when nothing depends on the final state.
    """
    static = tuple(range(num_static))
    solve = jax.custom_vjp(run, nondiff_argnums=static)
    solve_with_residuals = jax.custom_vjp(run_with_residuals, nondiff_argnums=static)

    def fwd_with_residuals(*operands):
        operands = (*operands[:num_static], jax.tree.map(lambda x: x.value, operands[num_static]))
        # Through the custom gradient, not run_with_residuals: the gradient of a gradient passes through here.
        outputs, residuals = solve_with_residuals(*operands)
        outputs, residuals = named_outputs(outputs), named_residuals(residuals)
        return (outputs, residuals), (operands[-1], residuals)

    def bwd_with_residuals(*operands):
        *static, (r, residuals), (cotangents, _) = operands
        d_output, d_final = cotangents
        d_final = None if omits_d_final and isinstance(d_final, SymbolicZero) else instantiated(d_final)
        d = gradient(*static, r, instantiated(d_output), d_final, residuals)
        return (with_float0(d, r),)

    def fwd(*operands):
        (outputs, _), saved = fwd_with_residuals(*operands)
        return outputs, saved

    def bwd(*operands):
        *static_and_saved, cotangents = operands
        return bwd_with_residuals(*static_and_saved, (cotangents, None))

    solve_with_residuals.defvjp(fwd_with_residuals, bwd_with_residuals, symbolic_zeros=True)
    solve.defvjp(fwd, bwd, symbolic_zeros=True)
    return SolvePair(solve, solve_with_residuals)


def instantiated(cotangent):
    """Return the cotangent as an array, zeros for a symbolic zero. In `StoredStates`, `states` becomes None for a symbolic
    zero."""
    if isinstance(cotangent, StoredStates):
        states = None if isinstance(cotangent.states, SymbolicZero) else cotangent.states
        return StoredStates(instantiated(cotangent.final_state), states)
    return ad.instantiate_zeros(ad.Zero(cotangent.aval)) if isinstance(cotangent, SymbolicZero) else cotangent


def gradient_with_vjp(run: Callable, derived: Callable, num_static: int) -> Callable[..., Recurrence]:
    """Return the gradient `run` with a gradient of its own: the gradient of `derived`, which equals `run` and can be
    differentiated any number of times.

    run: (*static, r, d_output, d_final, residuals) -> Recurrence, by kernels that have no gradient.
    derived: (*static, r, d_output, d_final) -> Recurrence.
    """
    gradient = jax.custom_vjp(run, nondiff_argnums=tuple(range(num_static)))

    def fwd(*operands):
        return gradient(*operands), operands[num_static:]

    def bwd(*operands):
        *static, (r, d_output, d_final, residuals), cotangent = operands

        def of_floats(rows: Recurrence, *cotangents):
            return derived(*static, rows.with_integers(r), *cotangents)

        _, pull = jax.vjp(of_floats, r.floats, d_output, d_final)
        d_r, *rest = pull(cotangent)
        return with_float0(d_r, r), *rest, zero_cotangent(residuals)

    gradient.defvjp(fwd, bwd)
    return gradient


def with_float0(d: Recurrence, r: Recurrence) -> Recurrence:
    """Return d, a gradient with respect to r, as cotangents for JAX: float0 zeros for r's boundaries, and None for its
    segments.

    None stands for zeros. It needs no shape, which may be symbolic.
    """
    return d.replace(boundaries=float0_zeros(r.boundaries), segments=None)


def float0_zeros(x: Array | None):
    """Return the cotangent that JAX requires for an array of integers or booleans: zeros of dtype float0. None for None."""
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)


def zero_cotangent(residuals):
    """Return the zero cotangent of residuals, a tree of arrays or None."""

    def zeros(x: Array):
        return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else float0_zeros(x)

    return jax.tree.map(zeros, residuals)


# ---- solve and its gradient ------------------------------------------------------------------------------------------


def solve(choice: Choice, r: Recurrence) -> Outputs:
    """Return the outputs and final states of r, differentiable any number of times in reverse mode.

    The residuals are r and what the chosen kernel saves, at most one state per chunk. Raises UnsupportedError, with each
    kernel's reason, if no kernel can run r.
    """
    resolution = resolve(choice, r.folded)
    # Segments are folded outside of the custom gradient, so that the forward and its gradient share the result.
    run = functools.partial(resolved.solve, resolution)
    return by_folding(run)(r) if folds(resolution, r) else run(r)


def solve_with_residuals(choice: Choice, r: Recurrence) -> tuple[Outputs, Residuals | None]:
    """Return (the outputs and final states of r, the residuals of the kernel or None). The residuals take no cotangent."""
    resolution = resolve(choice, r.folded)
    run = functools.partial(resolved.solve_with_residuals, resolution)
    return by_folding(run)(r) if folds(resolution, r) else run(r)


def gradient(choice: Choice, r: Recurrence, d_output, d_final, residuals: Residuals | None = None) -> Recurrence:
    """Return the gradient of <output, d_output> + <final_state, d_final> in every float array of r, as a Recurrence.

    d_final: None for zeros. residuals: what the forward saved, or None.
    """
    resolution = resolve(choice, r.folded)
    run = functools.partial(resolved_gradient, resolution)
    return (by_folding(run) if folds(resolution, r) else run)(r, d_output, d_final, residuals)


def folds(resolution: Resolution, r: Recurrence) -> bool:
    """Return whether the kernels receive the segments of r folded into gates of -inf, and keep the segments apart without a
    check."""
    return r.segments is not None and not (resolution.takes_segments(r) or resolution.mixes_segments(r))


def fused_or_derived_gradient(resolution: Resolution, r: Recurrence, d_output, d_final, residuals) -> Recurrence:
    """Return the gradient of r by the fused gradient kernel if there is one, else the derived gradient.

    d_output, d_final: the cotangents; d_final may be None for zeros. residuals: what the forward saved, or None.
    """
    fused = run_backward(resolution, r, d_output, d_final, residuals, derived_gradient)
    if fused is not None:
        return fused
    derived = functools.partial(derived_gradient, resolution.choice)
    if r.segments is None or not resolution.mixes_segments(r):
        return derived(r, d_output, d_final)
    return by_folding(isolating(derived, r.segments))(r, d_output, filled(d_final, r))


def derived_gradient_of(resolution: Resolution, r: Recurrence, d_output, d_final) -> Recurrence:
    """Return the derived gradient of r, as `derived_gradient` does, for the cotangents d_output and d_final.

    In it, and in its derivatives of any order, each segment depends on its own tokens alone.
    """
    derived = functools.partial(derived_gradient, resolution.choice)
    if r.segments is None or r.states_every is not None:
        return derived(r, d_output, d_final)
    return by_folding(isolating_gradient(derived, r.segments))(r, d_output, filled(d_final, r))


def derived_gradient(choice: Choice, r: Recurrence, d_output, d_final) -> Recurrence:
    """Return the gradient by the forward alone, with its operands permuted. A platform with only a forward kernel can therefore
    train. d_final: None for zeros.

        dq_t = scale S_t do_t      dk_t = G_t v_t      dv_t = G_t^T k_t

    G = dL/dS obeys the same recurrence in reverse time: each decay applies one token later, the inputs are scale q and do, and
    the initial state is d_final. The gradient of the log decays telescopes. For a gate on the state's rows at token t it is the
    sum of q*dq - k*dk over t and the later tokens, plus S * dS at the sequence's end, summed over the state's columns. For a
    gate on columns o*do - v*dv takes the place of q*dq - k*dk, and the sum is over rows.

    With an erasure, the transposed state obeys no recurrence of this form. The gradient is then taken token by token
    (`delta_recurrent`), in plain JAX on every platform.
    """
    check_form(r, "the derived gradient", DERIVED_FORMS)
    if r.states_every is not None:
        return gradient_by_pieces(choice, r, d_output, d_final)
    d_final = filled(d_final, r)
    if r.segments is not None:
        return by_folding(functools.partial(derived_gradient, choice))(r, d_output, d_final)
    if r.erasure is not None:
        # Registers kernels, which happens at the first call.
        from glax._src.kernels.xla.delta_recurrent import delta_gradient_by_token

        return delta_gradient_by_token(r, d_output, d_final)
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

    d_decay = Decay(key=None if decay.key is None else d_rows, value=d_columns)
    if d_rows is not None and decay.constant is not None:
        d_decay = Decay(constant=r.per_sequence(d_rows.sum(3)))
    if d_rows is not None and decay.head is not None:
        d_decay = Decay(head=d_rows.sum(3))
    initial = None if r.initial_state is None else G * first_decay(r)
    return gradient_recurrence(given, read * scale, dk, dv, d_decay, initial, r.per_sequence(q_read.sum((2, 3))))


def gradient_by_pieces(choice: Choice, r: Recurrence, d_output, d_final: StoredStates) -> Recurrence:
    """Return the derived gradient of a recurrence with states_every=n, by differentiating its solution in pieces of n tokens.

    d_final: the cotangents of the final state and of the stored states, of which the latter may be None for zeros.
    """
    plain, every = r.replace(states_every=None), r.states_every
    assert every is not None

    def outputs(rows: Recurrence):
        return tuple(solve_with_states(functools.partial(solve, choice), rows.with_integers(plain), every, None))

    found, pull = jax.vjp(outputs, plain.floats)
    states: Any = found[2]
    d_states = jnp.zeros_like(states) if d_final.states is None else d_final.states
    return pull((d_output, d_final.final_state, d_states))[0].replace(states_every=every)


def solve_storing_states(choice: Choice, r: Recurrence, every: int, dtype) -> OutputsWithStates:
    """Return the outputs of r and the states after every `every` tokens, by a kernel that stores them, else in pieces.

    dtype: the dtype of these states; None for the dtype of sums.
    """
    load_kernels()
    stored = r.replace(states_every=every)
    if not kernel_registry.able(stored.folded, choice.platform, choice.config)[0]:
        pieces = functools.partial(solve, dataclasses.replace(choice, pieces=every))
        return solve_with_states(pieces, r, every, dtype)
    output, (final_state, states) = solve(choice, stored)
    return OutputsWithStates(output, final_state, states if dtype is None else states.astype(dtype))


def clean(r: Recurrence, d_output) -> tuple[Recurrence, Array]:
    """Return r and d_output in the dtype in which sums are formed, with zeros in padding rows, which may hold NaN."""

    def each(x: Array) -> Array:
        x = x.astype(r.dtype)
        return x if r.boundaries is None else jnp.where(r.is_token.reshape(-1, *[1] * (x.ndim - 2)), x, 0)

    decay = r.decay.map_tokens(each)
    return r.replace(q=each(r.q), k=each(r.k), v=each(r.v), decay=decay), each(d_output)


def adjoint_of(r: Recurrence) -> Recurrence:
    """Return the recurrence of G = dL/dS: in reverse time, with each decay one token later. The caller sets q, k, v and the
    initial state."""
    first = r.ends(scan_end=True)  # where the adjoint's scan begins

    def late(x: Array) -> Array:
        moved = jnp.roll(x, 1 if r.reverse else -1, axis=1)
        return jnp.where(first.reshape(-1, *[1] * (x.ndim - 2)), 0, moved)

    decay = r.decay.with_tokens(lambda x: r.by_token(x.astype(r.dtype)))
    return r.replace(decay=decay.map_tokens(late), reverse=not r.reverse)


def first_decay(r: Recurrence) -> Float[Array, "N H K V"]:
    """Return the decay, not its log, of each sequence's first token in scan order, [N, H, K, V].

    It is 1 for an empty sequence, whose final state is its initial state.
    """
    decay, first, begin, end, at = r.decay, -1 if r.reverse else 0, None, None, None
    if r.boundaries is not None:
        begin, end = r.boundaries[:-1], r.boundaries[1:]
        at = jnp.clip(end - 1 if r.reverse else begin, 0, r.q.shape[1] - 1)

    def rows(x):
        return x[:, first] if at is None else x[0][at]

    log = jnp.zeros(r.state_shape, r.dtype)
    if decay.constant is not None:
        log += decay.constant.astype(r.dtype)[..., None, None]
    elif decay.head is not None:
        log += rows(decay.head)[..., None, None]
    if decay.key is not None:
        log += rows(decay.key)[..., :, None]
    if decay.value is not None:
        log += rows(decay.value)[..., None, :]
    factor = jnp.exp(log)
    return factor if begin is None or end is None else jnp.where((begin < end)[:, None, None, None], factor, 1)


def sum_behind(r: Recurrence, x: Float[Array, "B T H D"], at_end: Float[Array, "N H D"]) -> Float[Array, "B T H D"]:
    """Return the sums of x over each token and the later tokens of its sequence in scan order, plus `at_end`; 0 in padding
    rows."""
    last = r.ends(scan_end=True)

    def step(total, row):
        x, at_end, last = row
        total = jnp.where(last, at_end, total) + x
        return total, total

    by_time = jnp.moveaxis(x, 1, 0), jnp.moveaxis(r.by_token(at_end), 1, 0), last
    _, sums = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), by_time, reverse=not r.reverse)
    sums = jnp.moveaxis(sums, 0, 1)
    return sums if r.boundaries is None else jnp.where(r.is_token[:, None, None], sums, 0)


resolved_gradient = gradient_with_vjp(fused_or_derived_gradient, derived_gradient_of, num_static=1)
resolved = solve_with_vjp(run_forward, forward_with_residuals, resolved_gradient, num_static=1, omits_d_final=True)

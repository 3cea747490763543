"""Define `mlstm`, the matrix memory of xLSTM, by two calls of `recurrent`: one for the matrix C, one for the normaliser n.

The states are those of the plain recurrence divided by e^{m_t}, where m is the largest logarithm of a weight so far:

    m_t = max(g_t + m_{t-1}, i_t)        C_t = e^{g_t + m_{t-1} - m_t} C_{t-1} + e^{i_t - m_t} k_t v_t^T

n is C with a value of 1. Neither exponent is positive. h does not depend on m, but for its eps, so any m will do whose
differences are exact: m is rounded to its dtype, and what the rounding loses is a part of the gate g_t + m_{t-1} - m_t. Gates in
the hundreds thus cost no digits. The gradient of m counts for eps e^{m_t} alone.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glax._src.api.named import StepCall, StepOptions, batched, checked_call, named_arrays, scaled
from glax._src.api.recurrent import recurrent
from glax._src.core.backend import Backend
from glax._src.core.bind import ScanOptions, bind, check_array, check_real, transferred
from glax._src.core.decay import promoted
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Config
from glax._src.core.segments import expanded
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.state_pool import put, take, usable
from glax._src.solve.dispatch import Choice
from glax._src.tuning.executor import compiled


class MLSTMState(NamedTuple):
    """Hold the states of N sequences of `mlstm`: C [N, H, K, V] and n [N, H, K], both divided by e^m, and m [N, H].

    All are float32, or float64 for float64 inputs. Zeros stand before the first token. It is a tuple of the three.

    >>> q, gate = jnp.ones((1, 8, 2, 4)), jnp.zeros((1, 8, 2))
    >>> glax.mlstm(q, q, q, gate, gate).final_state.m.shape
    (1, 2)
    """

    C: Float[Array, "N H K V"]
    n: Float[Array, "N H K"]
    m: Float[Array, "N H"]


class MLSTMOptions(TypedDict, total=False):
    """List the options of `mlstm`, as in `recurrent`. initial_state: an `MLSTMState`, or a tuple of its three arrays."""

    softmax_scale: float | Float[Array, ""] | None
    initial_state: MLSTMState | tuple[Array, Array, Array] | None
    reverse: bool
    cu_seqlens: Int[Array, "N+1"] | None
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None
    pad_id: int | None
    platform: str | None
    cfg: Config | None


def mlstm(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    input_gate: Float[Array, "B T H"],
    g: Float[Array, "B T H"],
    *,
    eps: float = 1e-6,
    **options: Unpack[MLSTMOptions],
) -> Outputs:
    """Compute the mLSTM of xLSTM:   C_t = exp(g_t) C_{t-1} + exp(i_t) k_t v_t^T,   n_t = exp(g_t) n_{t-1} + exp(i_t) k_t,

        h_t = softmax_scale * C_t^T q_t / (max(|softmax_scale * n_t^T q_t|, 1) + eps e^{m_t}),   m_t = max(g_t + m_{t-1}, i_t)

    with i = input_gate, the logarithm of the input gate, and g, the logarithm of the forget gate: log_sigmoid of what
    mlstm-kernels take. m is 0 before the first token of a sequence without an initial state.

    Exact for any input gate, for the states are divided by e^m. eps: a number of at least 0, as in the formula.

    Returns `Outputs`: output h [B, T, H, V] in the query's dtype, and final_state an `MLSTMState`, as initial_state is.
    Gradients of every input, and of C and n of the initial state; m has none. Shapes, dtypes, errors and other options as in
    `recurrent`, but for states_every.

    Beck et al. 2024, https://arxiv.org/abs/2405.04517.

    >>> q, gate = jnp.ones((1, 8, 2, 4)), jnp.zeros((1, 8, 2))
    >>> glax.mlstm(q, q, q, 300 + gate, gate - 0.1).output.shape
    (1, 8, 2, 4)
    """
    arrays = dict(query=query, key=key, value=value, input_gate=input_gate, g=g)
    return mlstm_by(recurrent, arrays, eps=eps, **options)


def mlstm_by(
    recurrence: Callable[..., Outputs], arrays: dict[str, Array], *, eps: float, **options: Unpack[MLSTMOptions]
) -> Outputs:
    """Return the results of `mlstm`, with C and n solved by the function `recurrence`, such as `recurrent` or
    `glax.parallel.recurrent` with its mesh. arrays: the array arguments by name."""
    check_real("eps", eps)
    state = three_states("initial_state", options.get("initial_state"))
    given = {**options, "initial_state": None if state is None else state.C}
    choice, static, traced = checked_call(arrays, given, without=("states_every", "states_dtype", "use_qk_l2norm"))
    rest = transferred(traced | dict(eps=eps))
    return bind_mlstm(recurrence, choice, static, transferred(arrays), rest, state)


def mlstm_step(
    query: Float[Array, "B Hq K"],
    key: Float[Array, "B Hk K"],
    value: Float[Array, "B Hv V"],
    input_gate: Float[Array, "B H"],
    g: Float[Array, "B H"],
    state: MLSTMState | tuple[Array, Array, Array],
    *,
    eps: float = 1e-6,
    **options: Unpack[StepOptions],
) -> tuple[Float[Array, "B H V"], MLSTMState]:
    """Compute one token of `mlstm` for each of B sequences:

        C' = exp(g) C + exp(i) k v^T,   n' = exp(g) n + exp(i) k,   h = C'^T q' / (max(|n'^T q'|, 1) + eps e^{m'})

    with q' = softmax_scale * q and m' = max(g + m, i). The gates and eps are as in `mlstm`. state: an `MLSTMState`, of pools
    [P, ...] with slots, which holds C and n divided by e^m. Returns (h [B, H, V] in the query's dtype, the new `MLSTMState`).
    Options and errors as in `recurrent_step`.

    Beck et al. 2024, https://arxiv.org/abs/2405.04517.

    >>> q, gate = jnp.ones((1, 2, 4)), jnp.zeros((1, 2))
    >>> state = glax.MLSTMState(jnp.zeros((1, 2, 4, 4)), jnp.zeros((1, 2, 4)), gate)
    >>> glax.mlstm_step(q, q, q, gate, gate, state)[0].shape
    (1, 2, 4)
    """
    arrays = dict(query=query, key=key, value=value, input_gate=input_gate, g=g)
    check_real("eps", eps)
    states = three_states("state", state)
    if states is None:
        raise TypeError("state must be an MLSTMState, got None")
    call = StepCall.of(arrays, states.C, options, takes=StepOptions)
    return bind_mlstm_step(call.choice, transferred(arrays), states, transferred(call.traced | dict(eps=eps)))


def three_states(name: str, state) -> MLSTMState | None:
    """Return `state`, what a caller gives, as an MLSTMState; None for None. name: the argument, for messages.

    Raises TypeError for anything but a tuple or list of three arrays.
    """
    if state is None:
        return None
    if not isinstance(state, tuple | list) or len(state) != 3:
        raise TypeError(f"{name} must be an MLSTMState, or a tuple of its three arrays, got {type(state).__name__}")
    for field, x in zip(MLSTMState._fields, state, strict=True):
        check_array(f"{name}.{field}", x)
    return MLSTMState(*state)


def check_normaliser(name: str, state: MLSTMState, shape: tuple[int, ...]):
    """Raise ValueError unless n and m have the shapes that belong to a C of [N, H, K, V]."""
    N, H, K, _ = shape
    for field, x, wanted in (("n", state.n, (N, H, K)), ("m", state.m, (N, H))):
        if x.shape != wanted:
            raise ValueError(f"{name}.{field} must be {list(wanted)}, as C is {list(shape)}, got shape {x.shape}")


# ---- the stabiliser ----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Hold a number as the sum high + low of two numbers of one dtype, where `low` is what `high` loses by rounding."""

    high: Array
    low: Array

    @classmethod
    def sum_of(cls, x: Array, y: Array) -> "Pair":
        """Return x + y without rounding. `low` is 0 where the sum is not finite."""
        high = x + y
        part = high - x
        low = (x - (high - part)) + (y - part)
        return cls(high, jnp.where(jnp.isfinite(high), low, 0))

    def plus(self, other: "Pair") -> "Pair":
        total = Pair.sum_of(self.high, other.high)
        return Pair.sum_of(total.high, total.low + self.low + other.low)

    def max(self, other: "Pair") -> "Pair":
        is_less = (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))
        return Pair(jnp.where(is_less, other.high, self.high), jnp.where(is_less, other.low, self.low))


class Weights(NamedTuple):
    """Hold the logarithms of a token's weights, [B, T, H], and m behind the token, rounded to its dtype.

    log_decay: of the state before the token, g_t + m_{t-1} - m_t. log_key: of the token's own key, i_t - m_t.
    """

    log_decay: Array
    log_key: Array
    m: Array


def weights(i: Array, g: Array, m_before: Array, m: Array) -> Weights:
    """Return the `Weights` of tokens for any m, from the gates i and g [B, T, H]. m_before, m: m before and behind each token.

    i and g have gradients, m has none.
    """
    m_before, m = lax.stop_gradient((m_before, m))
    change = Pair.sum_of(m_before, -m)
    return Weights((g + change.high) + change.low, i - m, m)


def lowest(dtype) -> float:
    """Return the least m: a finite number of `dtype` far below all others, which stands for the m of states that are 0."""
    return float(jnp.finfo(dtype).min) / 4


def begins_sequence(r: Recurrence) -> Array:
    """Return which tokens are the first of their sequence or segment in the order of r's scan, bool [1 or B, T, 1]."""
    begins = r.ends(scan_end=False)[None, :, None]
    return begins if r.segments is None else begins | expanded(r.segments.resets, 3)


def largest_weights(r: Recurrence, i: Array, g: Array, m_0: Float[Array, "N H"]) -> tuple[Array, Array]:
    """Return m before and behind every token, [B, T, H], in the order of r's scan.

    i, g: the gates [B, T, H]. m_0: m before the first token of each sequence. The map m -> max(m + a, b) of a token is composed
    with the next token's in parallel, in sums without rounding.
    """
    begins, start = begins_sequence(r), r.by_token(m_0)
    if r.segments is not None:
        start = jnp.where(expanded(r.segments.resets, 3), 0, start)
    zero = jnp.zeros_like(g)
    own = Pair(i, zero).max(Pair.sum_of(jnp.where(begins, start, -jnp.inf), g))
    maps = (Pair(jnp.where(begins, -jnp.inf, g), zero), own)

    def then(first: tuple[Pair, Pair], second: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
        composed = first[0].plus(second[0]), first[1].plus(second[0]).max(second[1])
        forgets = jnp.isneginf(second[0].high)  # then nothing before counts, whatever it is
        return jax.tree.map(lambda own, both: jnp.where(forgets, own, both), second, composed)

    _, found = lax.associative_scan(then, maps, reverse=r.reverse, axis=1)
    m = jnp.maximum(found.high, lowest(g.dtype))
    return jnp.where(begins, start, jnp.roll(m, -1 if r.reverse else 1, axis=1)), m


def last_of(r: Recurrence, m: Float[Array, "B T H"], m_0: Float[Array, "N H"]) -> Float[Array, "N H"]:
    """Return m behind each sequence's last token in scan order, [N, H]; m_0 for an empty sequence. m: behind every token."""
    if r.boundaries is None:
        return m[:, 0 if r.reverse else -1]
    begin, end = r.boundaries[:-1], r.boundaries[1:]
    row = jnp.clip(begin if r.reverse else end - 1, 0, m.shape[1] - 1)
    return jnp.where((begin < end)[:, None], m[0, row], m_0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def change_of_m(reverse: bool, is_own: Array, begins: Array, i: Array, g: Array) -> Array:
    """Return zeros whose gradient is the gradient of m, [B, T, H], where m_t = i_t if is_own_t, else g_t + m_{t-1}.

    begins: whether m_{t-1} belongs to the initial state, whose m has no gradient.
    """
    return jnp.zeros_like(g)


def _change_fwd(reverse: bool, is_own: Array, begins: Array, i: Array, g: Array) -> tuple[Array, tuple]:
    return jnp.zeros_like(g), (is_own, begins)


def _change_bwd(reverse: bool, saved: tuple, d_m: Array) -> tuple[None, None, Array, Array]:
    """Return the cotangents (None, None, di, dg). A token's total is its d_m, plus the total of the next token in the scan if
    that token's m is formed from this one's. The total is di where is_own, else dg."""
    is_own, begins = saved

    def then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] & second[0], jnp.where(second[0], first[1], 0) + second[1]

    carries = jnp.roll(~is_own & ~begins, 1 if reverse else -1, axis=1).at[:, 0 if reverse else -1].set(False)
    _, total = lax.associative_scan(then, (carries, d_m), reverse=not reverse, axis=1)
    return None, None, jnp.where(is_own, total, 0), jnp.where(is_own, 0, total)


change_of_m.defvjp(_change_fwd, _change_bwd)


def normalised_output(numerator: Array, n_read: Array, m: Array, eps: Array, dtype) -> Array:
    """Return numerator / (max(|n_read|, e^-m) + eps) in `dtype`: the output h of `mlstm`.

    numerator [..., V] and n_read [..., 1] are C^T q and n^T q, both divided by e^m. m and eps have no axis V.
    """
    below = jnp.maximum(jnp.abs(n_read), jnp.exp(-m)[..., None]) + eps[..., None]
    return (numerator.astype(n_read.dtype) / below).astype(dtype)


def operand_dtype(q: Array) -> jnp.dtype:
    """Return the dtype of the operands of C's recurrence: on GPUs, whose kernels take it, the query's; else the dtype of sums.

    In the query's dtype the weighted keys, the numerators and their cotangents are rounded once more than the results.
    """
    return q.dtype if Backend.here() is Backend.GPU else promoted(q.dtype, jnp.float32)


# ---- calls ---------------------------------------------------------------------------------------------------------------


@compiled(static_argnums=(0, 1, 2))
def bind_mlstm(
    recurrence: Callable[..., Outputs],
    choice: Choice,
    options: ScanOptions,
    arrays: dict,
    rest: dict,
    state: MLSTMState | None,
) -> Outputs:
    traced = {name: rest[name] for name in ("cu_seqlens", "segment_ids")}
    flat, arrays, traced = batched(arrays, traced, options)
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    r = bind(q, k, v, initial_state=rest["initial_state"], **traced, reverse=options.reverse, pad_id=options.pad_id)
    i, g = (arrays[name].astype(r.dtype) for name in ("input_gate", "g"))
    if r.segments is not None and r.segments.is_token is not None:
        is_token = expanded(r.segments.is_token, 3)
        i, g = jnp.where(is_token, i, -jnp.inf), jnp.where(is_token, g, 0)
    if state is not None:
        check_normaliser("initial_state", state, r.state_shape)
    m_0 = jnp.zeros(r.state_shape[:2], r.dtype) if state is None else state.m.astype(r.dtype)
    m_0 = lax.stop_gradient(m_0)
    has_tokens = 0 not in (*q.shape[:2], r.num_sequences)
    found = lax.stop_gradient((i, g))
    m_before, m = largest_weights(r, *found, m_0) if has_tokens else (g, g)
    w = weights(i, g, m_before, m)
    key_weight = jnp.exp(w.log_key)[..., None]
    call: dict[str, Any] = dict(
        **traced, g=w.log_decay, softmax_scale=rest["softmax_scale"], reverse=options.reverse, pad_id=options.pad_id
    )
    call |= dict(platform=choice.platform, cfg=choice.config)
    initial = dict(C=None, n=None) if state is None else dict(C=state.C, n=state.n[..., None])
    # Each is cast once, so that the two gradients of a query and of a key are summed before they are rounded.
    dtype, wide, by_key = operand_dtype(q), q.astype(r.dtype), scaled(k.astype(r.dtype), key_weight)
    operands = (wide.astype(dtype), by_key.astype(dtype), v.astype(dtype))
    numerator, C = recurrence(*operands, initial_state=initial["C"], **call)
    # n^T q may be far smaller than its terms, so it is summed from keys that are not rounded again.
    n_read, n = recurrence(wide, by_key, jnp.ones((*i.shape, 1), r.dtype), initial_state=initial["n"], **call)
    eps = jnp.asarray(rest["eps"], r.dtype) * jnp.ones_like(m)
    if has_tokens:
        eps *= jnp.exp(change_of_m(options.reverse, found[0] >= m, begins_sequence(r), i, g))
    output = normalised_output(numerator, n_read, w.m, eps, q.dtype)
    final = MLSTMState(C, n[..., 0], last_of(r, m, m_0) if has_tokens else m_0)
    return Outputs(output[0] if flat else output, cast(Any, final))


@compiled(static_argnums=(0,))
def bind_mlstm_step(choice: Choice, arrays: dict, state: MLSTMState, rest: dict) -> tuple[Array, MLSTMState]:
    arrays, sizes = named_arrays(arrays, False, one_token=True)
    check_normaliser("state", state, state.C.shape)
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    dtype = promoted(q.dtype, jnp.float32)
    i, g = (arrays[name].astype(dtype) for name in ("input_gate", "g"))
    rows, B = rest["slots"], sizes["B"]
    at = jnp.arange(B) if rows is None else usable(rows, state.C.shape[0], B, ("B", "query"))[0]
    m_before = lax.stop_gradient(take(state.m, at).astype(dtype))
    exact_m = jnp.maximum(jnp.maximum(Pair.sum_of(m_before, g).high, i), lowest(dtype))
    m = lax.stop_gradient(exact_m)
    w = weights(i, g, m_before, m)
    key_weight = jnp.exp(w.log_key)[..., None]
    keys = (None, None) if rest["rounding_key"] is None else tuple(jax.random.split(rest["rounding_key"]))
    call: dict[str, Any] = dict(
        g=w.log_decay, softmax_scale=rest["softmax_scale"], slots=rows, platform=choice.platform, cfg=choice.config
    )
    narrow, wide = operand_dtype(q), q.astype(dtype)
    by_key = scaled(k[:, None].astype(dtype), key_weight[:, None])[:, 0]
    operands = (wide.astype(narrow), by_key.astype(narrow), v.astype(narrow))
    numerator, C = recurrent_step(*operands, state.C, rounding_key=keys[0], **call)
    ones = jnp.ones((*i.shape, 1), dtype)
    n_read, n = recurrent_step(wide, by_key, ones, state.n[..., None], rounding_key=keys[1], **call)
    eps = jnp.asarray(rest["eps"], dtype) * jnp.exp(exact_m - m)
    output = normalised_output(numerator, n_read, w.m, eps, q.dtype)
    return output, MLSTMState(C, n[..., 0], put(state.m, at, m))

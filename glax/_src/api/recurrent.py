"""Define the public functions. Each function names its gates, and `Options` documents the other arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, Unpack, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from glax._src.core.backend import x64_is_enabled
from glax._src.core.bind import (
    ScanOptions,
    bind,
    check_array,
    check_before_tracing,
    check_flag,
    check_integer,
    check_memory,
    is_array,
    known_number,
    transferred,
)
from glax._src.core.recurrence import Outputs, OutputsWithStates, Recurrence, to_int32
from glax._src.core.registry import Config, Platform
from glax._src.solve.autodiff import differentiable, solve, solve_storing_states
from glax._src.solve.dispatch import Choice
from glax._src.solve.exclusive_read import check_bonus, check_no_erasure, solve_with_bonus
from glax._src.solve.pieces import no_states
from glax._src.tuning.executor import compiled

SLOPES = ("fla", "minimax")
P = ParamSpec("P")


class Options(TypedDict, total=False):
    """List the arguments that every function accepts in addition to its arrays and gates.

    A row is one of the B rows of the batch, with T tokens. N is the number of initial and of final states: B, also with
    segment_ids; with cu_seqlens the number of packed sequences.

    softmax_scale: the factor of the output; K ** -0.5 if None. It may be traced, and has a gradient.
    initial_state: the states before the first tokens, [N, H, K, V], or [H, K, V] for the same state in all sequences; zeros if
                   None. Any float dtype.
    reverse:       whether each sequence is scanned from its last token to its first.
    cu_seqlens:    [N + 1] integers that pack N sequences in one row, so B is 1. Sequence n has the tokens from cu_seqlens[n] up
                   to, and without, cu_seqlens[n + 1]. May be traced.
    segment_ids:   integers that divide each row into segments: [B, T], or [T] where query, key and value have no axis B either.
                   In the order of the scan, a token with the id of the token before it continues that token's state; a token
                   with another id starts from zeros. Ids need no order. Not with cu_seqlens. May be traced.
    pad_id:        the id of padding tokens. Their output is 0, they change no state, and they may hold NaN. A token behind
                   padding starts from zeros, even if the token before the padding has the same id: in [1, 1, 0, 1] with
                   pad_id=0 the last token is a segment of its own. The initial state of a row enters its first token that is
                   no padding, and its final state is the state behind the last such token; a row of padding alone hands its
                   initial state through. None: no padding. ValueError without segment_ids.
    states_every:  a multiple of 64: the result then has a third field, `states`, behind every states_every tokens in the
                   order of the scan, a tail of fewer not included. [N, T // states_every, H, K, V], counted along the row
                   with segment_ids too; with cu_seqlens `PackedStates`, counted within each sequence. Differentiable.
    states_dtype:  the dtype of these states: float32, bfloat16, float16 or float64; the dtype of sums if None.
    platform:      the platform of the kernel: "xla", "cpp", "triton", "pallas" or "cuda". None or "auto": glax chooses.
    cfg:           the config of the kernel, such as glax.configs.ChunkedConfig(chunk=64). None: a measured config, or else one
                   that the kernel derives from the shapes.

    Defaults are None, and False for reverse.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.retention(q, q, q, softmax_scale=1.0, segment_ids=jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]]), pad_id=0).output.shape
    (1, 8, 2, 4)
    """

    softmax_scale: float | Float[Array, ""] | None
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None
    reverse: bool
    cu_seqlens: Int[Array, "N+1"] | None
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None
    pad_id: int | None
    states_every: int | None
    states_dtype: DTypeLike | None
    platform: str | None
    cfg: Config | None


def recurrent(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    bonus: Float[Array, "H K"] | None = None,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    beta: Float[Array, "B T H"] | None = None,
    erase: Float[Array, "B T H K"] | None = None,
    write: Float[Array, "B T H V"] | None = None,
    erase_along: Float[Array, "B T H K"] | None = None,
    erase_before_decay: bool = False,
    use_qk_l2norm: bool = False,
    states_every: int | None = None,
    states_dtype: DTypeLike | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Outputs:
    """Compute linear attention with any mix of gates:

        S_t = exp(g_t + g_gamma) diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T,     o_t = softmax_scale * S_t^T q_t

    Gates are logarithms of decays: 0 keeps the state, -inf forgets it, and a number above 0 lets it grow. No value is refused,
    but sums of gates over tokens above about 88 overflow float32. All gates are optional and add up; g of shape [B, T, H, K]
    is the same as gk. H is the largest of the three head counts, which the others divide: head h of H reads head h * Hk // H
    of the keys. Without B, with query [T, Hq, K] and so on, the output is [T, H, V]; states keep their axis N, of size 1.

    query, key and value share one dtype: float32, bfloat16, float16, or float64. All other float arguments may have any of
    these. Sums, states and gates are float32 (float64 for float64). Differentiable in every float argument and through both
    results, any number of times, in reverse mode.

    softmax_scale is K ** -0.5 if None. initial_state [N, H, K, V], or [H, K, V] for all sequences, is zeros if None. `reverse`
    scans from the last token to the first. cu_seqlens [N + 1] packs N sequences in one row, so B is 1: sequence n has the
    tokens from cu_seqlens[n] up to, and without, cu_seqlens[n + 1]. cu_seqlens begins with 0, does not decrease, and ends at T
    or before; ValueError if known values do not. segment_ids [B, T] packs by ids, of which pad_id is padding. N is B without
    cu_seqlens. states_every=n also returns the states behind every n tokens. platform and cfg choose the kernel; glax does if
    None. `glax._src.api.recurrent.Options` has more of these.

    With `bonus` u [H, K] the read is RWKV-6's, of the state before the token and its decay:

        o_t = softmax_scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t

    With `beta`, or `erase` and `write`, it is the delta rule. A token first erases from the decayed state, then writes:

        S_bar_t = the decayed S_{t-1},     S_t = S_bar_t + k_t (w_t * v_t - S_bar_t^T e_t)^T

    beta [B, T, H], after its sigmoid and of any size: e = beta k and w = beta. erase [B, T, H, K] and write [B, T, H, V]: e and
    w themselves; without write, w = 1. `use_qk_l2norm` divides each query and key by its norm: x * rsqrt(sum x^2 + 1e-6).
    With `erase_before_decay` e reads the state before the token's own decay: S_t = S_bar_t + k_t (w_t * v_t - S_{t-1}^T e_t)^T.
    With `erase_along` b [B, T, H, K] what e reads is taken along b: S_t = S_bar_t + k_t (w_t * v_t)^T - b_t (S_bar_t^T e_t)^T.

    Returns output [B, T, H, V] in the query's dtype and final_state [N, H, K, V]. Tokens behind cu_seqlens[-1] are padding:
    output 0, no effect. An empty sequence hands its initial state through. With segment_ids, the initial state of a row enters
    its first segment that is not padding, and the final state is the state of the last such segment, in the order of the scan; a
    row of padding alone hands its initial state through. With states_every the result is `OutputsWithStates`.

    Raises ValueError or TypeError naming the argument, what was expected and what came; UnsupportedError, with each
    kernel's reason, if no kernel of an explicit `platform` or `cfg` can run the call.

    Gated linear attention: Yang et al. 2024, https://arxiv.org/abs/2312.06635. The bonus: Peng et al. 2024,
    https://arxiv.org/abs/2404.05892.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> output, state = glax.recurrent(q, q, q, g=jnp.full((1, 8, 2), -0.1))
    >>> output.shape, state.shape
    ((1, 8, 2, 4), (1, 2, 4, 4))
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, erase=erase, write=write,
        erase_along=erase_along, softmax_scale=softmax_scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, bonus=bonus,
    )  # fmt: skip
    options = ScanOptions(reverse, pad_id, states_every, states_dtype, use_qk_l2norm, erase_before_decay)
    check_before_tracing(arrays, platform, cfg, options)
    return bind_and_solve(Choice(Platform.parse(platform), cfg), options.static, transferred(arrays))


@compiled(static_argnums=(0, 1))
def bind_and_solve(choice: Choice, options: ScanOptions, arrays: dict) -> Outputs:
    """Bind the arguments and solve the recurrence, compiled by jit.

    Outside of jit, a call then costs no more than its kernel. Inside of jit, the function is inlined.
    """
    every, dtype = options.states_every, options.states_dtype

    def prepared(r: Recurrence) -> tuple[Recurrence, Callable]:
        if every is None:
            return differentiable(r), functools.partial(solve, choice)
        return differentiable(r), functools.partial(solve_storing_states, choice, every=every, dtype=dtype)

    return bound_and_solved(prepared, options, arrays)


def bound_and_solved(
    prepared: Callable[[Recurrence], tuple[Recurrence, Callable]], options: ScanOptions, arrays: dict
) -> Outputs:
    """Bind the arguments and solve the recurrence. prepared: r -> (r, the solver that computes its outputs)."""
    bonus = arrays.get("bonus")
    r = bind(**{name: x for name, x in arrays.items() if name != "bonus"}, **options.of_bind)
    if bonus is not None:
        check_no_erasure(r)
        check_bonus(bonus, r.num_heads, r.q.shape[3])
    every, dtype = options.states_every, options.states_dtype
    if 0 in (*r.q.shape[:2], r.num_sequences):
        outputs = nothing_to_solve(r)
        outputs = outputs if every is None else OutputsWithStates(*outputs, no_states(r, every, dtype))
    else:
        r, solver = prepared(r)
        outputs = solver(r) if bonus is None else solve_with_bonus(solver, r, bonus)
    outputs = outputs if arrays["query"].ndim == 4 else outputs._replace(output=outputs.output[0])
    return cast(Outputs, outputs)  # two fields for type checkers: no call without states_every has a third


def nothing_to_solve(r: Recurrence) -> Outputs:
    """Return empty or padding outputs and the unchanged states, for a call without tokens or without sequences."""
    return Outputs(jnp.zeros((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype), r.start_state)


def recurrent_attention(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    states_every: int | None = None,
    states_dtype: DTypeLike | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Config | None = None,
) -> Float[Array, "B T H V"] | Outputs:
    """Compute `recurrent`, which has the formula, and return the output alone: [B, T, H, V] in the query's dtype.

    return_state: whether to return `Outputs`, (output, final_state), instead. With states_every the result is
    `OutputsWithStates` in any case. The other arguments and the errors are those of `recurrent`; TypeError for a return_state
    that is no bool.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.recurrent_attention(q, q, q).shape
    (1, 8, 2, 4)
    """
    check_flag("return_state", return_state)
    outputs = recurrent(
        query, key, value, g, g_gamma, gk, gv, softmax_scale, initial_state, reverse, cu_seqlens,
        segment_ids=segment_ids, pad_id=pad_id, states_every=states_every, states_dtype=states_dtype, platform=platform,
        cfg=cfg,
    )  # fmt: skip
    return outputs if return_state or states_every is not None else outputs.output


def variant(arguments: Callable[P, dict[str, Any]]) -> Callable[P, Outputs]:
    """Return the public function of a variant. arguments: a function that maps the variant's arguments to those of `recurrent`,
    by name.

    `glax.parallel` makes its own function from the same `arguments`.
    """

    @functools.wraps(arguments)
    def run(*args: P.args, **options: P.kwargs) -> Outputs:
        return recurrent(**arguments(*args, **options))

    run.__signature__ = inspect.signature(arguments).replace(return_annotation=Outputs)  # pyright: ignore[reportAttributeAccessIssue]  (PEP 362)
    return run


@variant
def recurrent_gla(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    gk: Float[Array, "B T H K"] | None = None,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    states_every: int | None = None,
    states_dtype: DTypeLike | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
) -> dict[str, Any]:
    """Compute gated linear attention:   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = softmax_scale * S_t^T q_t.

    g: log decays, [B, T, H, K], one per key channel, or [B, T, H], one per head. gk: [B, T, H, K] log decays, as in
    `recurrent`.
    g_gamma: log decays of every token, [H] or [N, H]. The decay is the sum of those given; without any there is none. Other
    shapes and dtypes, options, results and errors: as in `recurrent`.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.recurrent_gla(q, q, q, jnp.full(q.shape, -0.1)).final_state.shape
    (1, 2, 4, 4)
    """
    return dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, softmax_scale=softmax_scale,
        initial_state=initial_state, reverse=reverse, cu_seqlens=cu_seqlens, segment_ids=segment_ids, pad_id=pad_id,
        states_every=states_every, states_dtype=states_dtype, platform=platform, cfg=cfg,
    )  # fmt: skip


@variant
def simple_gla(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"],
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Compute simple GLA, with one data-dependent decay per head as in Mamba-2:

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,     o_t = softmax_scale * S_t^T q_t

    g: [B, T, H] log decays, with the range of gates in `recurrent`; ValueError for g [B, T, H, K]. Other shapes and dtypes,
    options, results and errors: as in `recurrent`.

    Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.simple_gla(q, q, q, jnp.full((1, 8, 2), -0.1)).output.shape
    (1, 8, 2, 4)
    """
    check_per_head(query, g)
    return dict(query=query, key=key, value=value, g=g, **options)


@variant
def retention(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Compute RetNet's retention, in head h = 0, 1, ...:

        S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t^T,     o_t = softmax_scale * S_t^T q_t

    Shapes, dtypes, options, results and errors: as in `recurrent`. The decay is fixed: it takes no gates.

    Sun et al. 2023, https://arxiv.org/abs/2307.08621.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.retention(q, q, q).output.shape
    (1, 8, 2, 4)
    """
    return dict(query=query, key=key, value=value, g_gamma=retention_decay(query, key, value), **options)


@variant
def lightning_attention(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    layer_idx: int | Int[Array, ""],
    num_layers: int,
    *,
    slopes: Literal["fla", "minimax"] = "fla",
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Compute lightning attention, in head h = 0, 1, ...:

        S_t = exp(-s_h) S_{t-1} + k_t v_t^T,     o_t = softmax_scale * S_t^T q_t

    slopes: with l = layer_idx and L = num_layers,
        "fla"      s_h = (8 h / H) (1 - l / L)                           l from 0 to L, as in flash-linear-attention
        "minimax"  s_h = 2^(-8 (h + 1) / H) (1 - l / (L - 1) + 1e-5)     l from 0 to L - 1, as in MiniMax-01

    With L = 1 the last factor of "minimax" is 1 + 1e-5. For any L, transformers has 1 - l / (L - 1 + 1e-5) + 1e-5 as that
    factor. Its s_h in the last layer is 1 + 1 / (L - 1) times this one.

    layer_idx is the layer's number in its model, num_layers the number of layers. Deeper layers decay more slowly. layer_idx may
    be traced, so that layers can be scanned over. Raises TypeError if layer_idx or num_layers is no integer; ValueError if
    num_layers < 1, if a known layer_idx is outside its range, or if slopes is neither. Shapes, dtypes, options, results and other
    errors: as in `recurrent`.

    Qin et al. 2024, https://arxiv.org/abs/2401.04658; MiniMax 2025, https://arxiv.org/abs/2501.08313.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.lightning_attention(q, q, q, layer_idx=0, num_layers=12).output.shape
    (1, 8, 2, 4)
    """
    decay = lightning_decay(query, key, value, layer_idx, num_layers, slopes)
    return dict(query=query, key=key, value=value, g_gamma=decay, **options)


# ---- the gates that the variants fix, or check -----------------------------------------------------------------------


# Float[Array, "H"], or a NumPy array: JAX takes one in the place of an array, though its annotations do not say so.
Gate = Any


def check_per_head(query, g):
    """Raise ValueError unless g has one axis less than query, that is [B, T, H]."""
    check_array("query", query)
    check_array("g", g)
    if query.ndim in (3, 4) and g.ndim != query.ndim - 1:
        raise ValueError(f"g must be [B, T, H] in simple_gla, one gate per head, got shape {g.shape}")


def retention_decay(query, key, value) -> Gate:
    """Return RetNet's log decay of each head of these arrays, log(1 - 2^(-5 - h)), as a NumPy array [H]."""
    h, dtype = head_numbers(query, key, value)
    return np.log1p(-np.exp2(-5.0 - h)).astype(dtype)


def lightning_decay(query, key, value, layer_idx, num_layers: int, slopes: str = "fla") -> Gate:
    """Return the log decay -s_h of each head, [H], by the formulas of `lightning_attention`.

    It is a NumPy array, or a JAX array if layer_idx is traced. Raises the errors of `lightning_attention` for these arguments.
    """
    if not isinstance(slopes, str) or slopes not in SLOPES:
        raise ValueError(f"slopes must be {' or '.join(map(repr, SLOPES))}, got {slopes!r}")
    check_integer("num_layers", num_layers)
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    if slopes == "fla":
        depth = int(num_layers)
        check_layer(layer_idx, depth, "num_layers")
    else:
        depth = max(int(num_layers) - 1, 1)
        check_layer(layer_idx, int(num_layers) - 1, "num_layers - 1")
    h, dtype = head_numbers(query, key, value)
    each = -8.0 / len(h) * h if slopes == "fla" else -np.exp2(-8.0 / len(h) * (h + 1.0))
    # 1 - l / L as (L - l) / L with an integer difference: in float32 a compiler may add 1e-5 to L before it subtracts l.
    layer = known_number(layer_idx)
    difference = (depth - to_int32(layer_idx)).astype(dtype) if layer is None else depth - layer
    above = difference / depth + (0.0 if slopes == "fla" else 1e-5)
    return each.astype(dtype) * above if layer is None else (each * above).astype(dtype)


def check_layer(layer_idx, last: int, by: str):
    """Raise TypeError or ValueError unless layer_idx is one integer, and if it is known from 0 to `last`. by: `last` as the
    message names it."""
    if isinstance(layer_idx, bool) or not (isinstance(layer_idx, int) or is_array(layer_idx)):
        raise TypeError(f"layer_idx must be an integer, got {layer_idx!r}")
    if isinstance(layer_idx, np.ndarray):
        check_memory("layer_idx", layer_idx)
    if is_array(layer_idx) and not jnp.issubdtype(layer_idx.dtype, jnp.integer):
        raise TypeError(f"layer_idx must be an integer, got {layer_idx.dtype}")
    if np.shape(layer_idx) != ():
        raise ValueError(f"layer_idx must be one integer, got shape {np.shape(layer_idx)}")
    value = known_number(layer_idx)
    if value is not None and not 0 <= value <= last:
        raise ValueError(f"layer_idx must be from 0 to {by}={last}, got {value}")


def head_numbers(*arrays) -> tuple[np.ndarray, type]:
    """Return (0, 1, ..., H - 1 as floats, the dtype of gates) for these queries, keys and values.

    Wrong shapes raise no error here, because `bind` checks them.
    """
    heads = max((x.shape[-2] for x in arrays if is_array(x) and x.ndim >= 2), default=1)
    wide = any(is_array(x) and x.dtype == jnp.float64 for x in arrays)
    return np.arange(float(heads)), np.float64 if wide and x64_is_enabled() else np.float32

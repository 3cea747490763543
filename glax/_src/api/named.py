"""Define the recurrences that are built on the delta rule, by their names.

Each is a recipe: a function of the named arrays that returns the arguments of `recurrent`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from glax._src.api.delta import DeltaOptions, check_rank
from glax._src.api.recurrent import Options, recurrent
from glax._src.core.bind import (
    REQUIRED,
    ScanOptions,
    as_float,
    bind,
    check_array,
    check_before_tracing,
    check_boundaries,
    check_dtypes,
    check_segment_ids,
    check_shapes,
    known_integer,
    transferred,
)
from glax._src.core.decay import promoted
from glax._src.core.recurrence import Outputs, spread_heads
from glax._src.core.registry import Config, Platform
from glax._src.core.segments import differs_from_padding, expanded
from glax._src.core.stored_states import check_rounding_key
from glax._src.kernels.common.limits import LOG_OF_NOTHING
from glax._src.serving.decode_step import advance_rounded, recurrent_step, with_states
from glax._src.serving.state_pool import check_known_slots
from glax._src.solve.dispatch import Choice
from glax._src.tuning.executor import compiled

# The options of a call that are known while tracing, as `recurrent` names them.
STATIC = ("reverse", "pad_id", "states_every", "states_dtype", "use_qk_l2norm")
# The same that are arrays.
TRACED = ("softmax_scale", "initial_state", "cu_seqlens", "segment_ids")
Arrays = dict[str, jax.Array]


class StepOptions(TypedDict, total=False):
    """List the options of a step, as in `recurrent_step`."""

    slots: Int[Array, "B"] | None
    softmax_scale: float | Float[Array, ""] | None
    rounding_key: Key | None
    platform: str | None
    cfg: Config | None


class DeltaStepOptions(StepOptions, total=False):
    """List the options of a step that has queries and keys to normalise."""

    use_qk_l2norm: bool


class StepCall(NamedTuple):
    """Hold the checked arguments of a step other than its arrays and states.

    choice: the platform and config. options: the flags. traced: softmax_scale, slots and rounding_key by name, None if absent.
    """

    choice: Choice
    options: ScanOptions
    traced: dict[str, Any]

    @classmethod
    def of(cls, arrays: dict[str, Any], state, options, takes: type = DeltaStepOptions) -> "StepCall":
        """Return the arguments after a check. arrays, options: by name. state: the states or pool, whose type and slots are
        checked.

        takes: the class that lists the names of the options.
        """
        check_options(options, {*StepOptions.__annotations__, *takes.__annotations__})
        static = ScanOptions(use_qk_l2norm=options.get("use_qk_l2norm", False))
        traced = {name: options.get(name) for name in ("softmax_scale", "slots", "rounding_key")}
        checked = arrays | dict(
            state=state, slots=traced["slots"], softmax_scale=traced["softmax_scale"], cu_seqlens=None
        )
        platform, cfg = options.get("platform"), options.get("cfg")
        check_before_tracing(checked, platform, cfg, static, required=(*arrays, "state"))
        check_known_slots(traced["slots"], state)
        check_rounding_key(traced["rounding_key"])
        return cls(Choice(Platform.parse(platform), cfg), static.static, traced)


Recipe = Callable[[Arrays, ScanOptions], dict[str, Any]]


def gated_delta_rule_2(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H K"],
    erase_gate: Float[Array, "B T H K"],
    write_gate: Float[Array, "B T H V"],
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute Gated DeltaNet-2:   S_bar = diag(exp(g_t)) S_{t-1},   S_t = S_bar + k_t (w_t * v_t - S_bar^T (b_t * k_t))^T,

    and o_t = softmax_scale * S_t^T q_t, with b = erase_gate and w = write_gate.

    g: log decays, one a key channel, with the range of gates in `recurrent`. erase_gate, write_gate: any float dtype, after
    their sigmoids. use_qk_l2norm: whether each query and key is divided by its norm first, x * rsqrt(sum x^2 + 1e-6); False by
    default. erase_gate then multiplies the normalised key. Other shapes and dtypes, options, results and errors: as in
    `recurrent`.

    For decoding, `recurrent_step`, `prefill_into` and `recurrent_verify` compute it from the same query, key and value, with
    gk = g, erase = erase_gate * key with H heads, and write = write_gate. Their use_qk_l2norm leaves erase as it is: form it
    from the normalised key.

    2026, https://arxiv.org/abs/2605.22791.

    >>> q, g = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2, 4), -0.1)
    >>> glax.gated_delta_rule_2(q, q, q, g, jnp.exp(g), jnp.exp(g), use_qk_l2norm=True).output.shape
    (1, 8, 2, 4)
    """
    check_rank(query, g, 0, "[B, T, H, K] in gated_delta_rule_2")
    arrays = dict(query=query, key=key, value=value, g=g, erase_gate=erase_gate, write_gate=write_gate)
    return solve_recipe(gated_delta_rule_2_recipe, arrays, options)


def gated_delta_rule_2_recipe(a: Arrays, options: ScanOptions) -> dict[str, Any]:
    """Return the arguments of `recurrent` that compute `gated_delta_rule_2`, from its arrays by name."""
    q, k = normalised(a["query"], options), normalised(a["key"], options)
    erase = scaled(k, a["erase_gate"])
    return dict(query=q, key=k, value=a["value"], gk=a["g"], erase=erase, write=a["write_gate"])


def comba(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    erase_key: Float[Array, "B T Hk K"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute Comba:   S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T,   o_t = softmax_scale * S_t^T q_t,

    with p = erase_key, which reads the state before the decay.

    g: log decays, one a head, with the range of gates in `recurrent`. Where g_t is -inf, S_{t-1} still enters through p:
    S_t = beta_t k_t (v_t - S_{t-1}^T p_t)^T. beta: any float dtype, after its sigmoid. use_qk_l2norm: whether each query, key
    and erase_key is divided by its norm first, x * rsqrt(sum x^2 + 1e-6); False by default. Other shapes and dtypes, options,
    results and errors: as in `recurrent`.

    For decoding, `recurrent_step`, `prefill_into` and `recurrent_verify` compute Comba from the same query, key and g, with
    value = beta * value, erase = beta * erase_key, both with H heads, and erase_before_decay=True. Their use_qk_l2norm divides
    query and key alone: divide erase_key by its norm before.

    Hu et al. 2025, https://arxiv.org/abs/2506.02475.

    >>> q, g = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2), -0.1)
    >>> glax.comba(q, q, q, 0.5 * q, g, jnp.exp(g), use_qk_l2norm=True).output.shape
    (1, 8, 2, 4)
    """
    check_rank(query, g, -1, "[B, T, H] in comba")
    arrays = dict(query=query, key=key, value=value, erase_key=erase_key, g=g, beta=beta)
    return solve_recipe(comba_recipe, arrays, options)


def comba_recipe(a: Arrays, options: ScanOptions) -> dict[str, Any]:
    """Return the arguments of `recurrent` that compute `comba`, from its arrays by name."""
    q, k, p = (normalised(a[name], options) for name in ("query", "key", "erase_key"))
    beta = a["beta"][..., None]
    return dict(
        query=q, key=k, value=scaled(a["value"], beta), g=a["g"], erase=scaled(p, beta), erase_before_decay=True
    )


def rwkv7(
    receptance: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H V"],
    a: Float[Array, "B T H K"],
    b: Float[Array, "B T H K"],
    **options: Unpack[Options],
) -> Outputs:
    """Compute RWKV-7:   S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,

    and o_t = softmax_scale * S_t^T r_t, with r = receptance. a reads the state before the decay. softmax_scale is 1 if None.

    log_decay, a, b: any float dtype. log_decay has the range of gates in `recurrent`. a and b need no norm of 1. receptance,
    key and value: as query, key and value of `recurrent`. Options, results and errors: as in `recurrent`.

    For `prefill_into` and `recurrent_verify` the arguments are query = receptance, gk = log_decay, erase = -a, erase_along = b,
    erase_before_decay=True and softmax_scale=1.

    Peng et al. 2025, https://arxiv.org/abs/2503.14456.

    >>> r, a = jnp.ones((1, 8, 2, 4)), jnp.full((1, 8, 2, 4), 0.5)
    >>> glax.rwkv7(r, jnp.full(r.shape, -0.1), r, r, -a, a).output.shape
    (1, 8, 2, 4)
    """
    arrays = dict(receptance=receptance, log_decay=log_decay, key=key, value=value, a=a, b=b)
    return solve_recipe(rwkv7_recipe, as_query(arrays, "receptance"), unscaled(options), without=("use_qk_l2norm",))


def rwkv7_step(
    receptance: Float[Array, "B H K"],
    log_decay: Float[Array, "B H K"],
    key: Float[Array, "B H K"],
    value: Float[Array, "B H V"],
    a: Float[Array, "B H K"],
    b: Float[Array, "B H K"],
    state: Float[Array, "_ H K V"],
    **options: Unpack[StepOptions],
) -> tuple[Float[Array, "B H V"], Float[Array, "_ H K V"]]:
    """Compute one token of `rwkv7` for each of B sequences:   S' = diag(exp(log_decay)) S + b (a^T S) + k v^T,   o = S'^T r.

    receptance to b: as in `rwkv7`, without T. state: [B, H, K, V], or a pool [P, H, K, V] with slots. Returns (o [B, H, V] in the
    dtype of receptance, the new state). softmax_scale, a factor of o, is 1 if None. state, the options and the errors are as in
    `recurrent_step`.

    Peng et al. 2025, https://arxiv.org/abs/2503.14456.

    >>> r, state = jnp.ones((1, 2, 4)), jnp.zeros((1, 2, 4, 4))
    >>> glax.rwkv7_step(r, -r, r, r, -r, r, state)[0].shape
    (1, 2, 4)
    """
    arrays = dict(receptance=receptance, log_decay=log_decay, key=key, value=value, a=a, b=b)
    return step_recipe(rwkv7_recipe, as_query(arrays, "receptance"), state, unscaled(options))


def rwkv7_recipe(x: Arrays, options: ScanOptions) -> dict[str, Any]:
    """Return the arguments of `recurrent` that compute `rwkv7`, from its arrays by name."""
    erasure = dict(erase=-x["a"], erase_along=x["b"], erase_before_decay=True)
    return dict(query=x["query"], key=x["key"], value=x["value"], gk=x["log_decay"], **erasure)


# ---- several updates a token ------------------------------------------------------------------------------------------


def gated_delta_product(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B rows Hk K"],
    value: Float[Array, "B rows Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None,
    beta: Float[Array, "B rows H"],
    *,
    num_updates: int,
    **options: Unpack[DeltaOptions],
) -> Outputs:
    """Compute Gated DeltaProduct: a token decays the state once, updates it num_updates times, and reads it once:

        S_t0 = exp(g_t) S_{t-1},   S_tj = S_t,j-1 + beta_tj k_tj (v_tj - S_t,j-1^T k_tj)^T,   o_t = softmax_scale * S_tn^T q_t

    with n = num_updates and j = 1 ... n. key, value, beta: T * n rows, token by token: the first n rows are updates 1 to n of the
    first token, and so on. beta: any float dtype, after its sigmoid. g: log decays, one a head or one a key channel; no decay if
    None. use_qk_l2norm: as in `delta_rule`. cu_seqlens, segment_ids and states_every count tokens. `reverse` turns the tokens
    round, not the updates of one. Raises ValueError if num_updates is below 1, or if key, value or beta have another number of
    rows. Other shapes and dtypes, options, results and errors: as in `recurrent`. To go on from a state, as for the second part
    of a prompt, pass initial_state.

    It is the delta rule over T * n rows: a row that is not a token's first has no decay, one that is not its last no query.

    Siems et al. 2025, https://arxiv.org/abs/2502.10297.

    >>> q, k, beta = jnp.ones((1, 8, 2, 4)), jnp.full((1, 16, 2, 4), 0.5), jnp.ones((1, 16, 2))
    >>> glax.gated_delta_product(q, k, k, None, beta, num_updates=2).output.shape
    (1, 8, 2, 4)
    """
    arrays = dict(query=query, key=key, value=value, beta=beta) | given(g=g)
    return gated_delta_product_by(recurrent, arrays, num_updates=num_updates, **options)


def gated_delta_product_by(
    recurrence: Callable[..., Outputs], arrays: dict[str, Any], *, num_updates: int, **options: Unpack[DeltaOptions]
) -> Outputs:
    """Return the results of `gated_delta_product`, with its rows solved by the function `recurrence`, such as `recurrent` or
    `glax.parallel.recurrent` with its mesh. arrays: the array arguments by name."""
    choice, static, traced = checked_call(arrays, options)
    n = check_updates(arrays, num_updates)
    return bind_updates(recurrence, n, choice, static, transferred(arrays), transferred(traced))


def gated_delta_product_step(
    query: Float[Array, "B Hq K"],
    key: Float[Array, "B n Hk K"],
    value: Float[Array, "B n Hv V"],
    g: Float[Array, "B H"] | Float[Array, "B H K"] | None,
    beta: Float[Array, "B n H"],
    state: Float[Array, "_ H K V"],
    *,
    num_updates: int,
    **options: Unpack[DeltaStepOptions],
) -> tuple[Float[Array, "B H V"], Float[Array, "_ H K V"]]:
    """Compute one token of `gated_delta_product` for each of B sequences, with n = num_updates rows of key, value and beta.

    S_0 = exp(g) S,   S_j = S_{j-1} + beta_j k_j (v_j - S_{j-1}^T k_j)^T,   S' = S_n,   o = softmax_scale * S'^T q.

    g: log decays, one a head or one a key channel; no decay if None. state: [B, H, K, V], or a pool [P, H, K, V] with slots.
    Returns (o [B, H, V] in the query's dtype, the new state). use_qk_l2norm: as in `delta_rule`. Raises ValueError if key, value
    or beta have another number of rows. state, the other options and errors are as in `recurrent_step`.

    Siems et al. 2025, https://arxiv.org/abs/2502.10297.

    >>> q, k, state = jnp.ones((1, 2, 4)), jnp.full((1, 2, 2, 4), 0.5), jnp.zeros((1, 2, 4, 4))
    >>> glax.gated_delta_product_step(q, k, k, None, k[..., 0], state, num_updates=2)[0].shape
    (1, 2, 4)
    """
    arrays = dict(query=query, key=key, value=value, beta=beta) | given(g=g)
    call = StepCall.of(arrays, state, options)
    check_updates(arrays | dict(query=query[:, None]), num_updates)
    return bind_updates_step(call.choice, call.options, transferred(arrays), state, call.traced)


def check_updates(arrays: dict[str, Any], num_updates) -> int:
    """Return num_updates. Raise unless key, value and beta have num_updates rows for each token of query."""
    n = known_integer("num_updates", num_updates)
    if n < 1:
        raise ValueError(f"num_updates must be at least 1, got {n}")
    T, rank = np.shape(arrays["query"])[-3], np.ndim(arrays["query"])
    for name, rest in dict(key=2, value=2, beta=1).items():
        shape = np.shape(arrays[name])
        if len(shape) != rank - 2 + rest or shape[-1 - rest] != T * n:
            wanted = "[B, rows, heads, width]" if rest == 2 else "[B, rows, H]"
            raise ValueError(f"{name} must be {wanted} with T * num_updates = {T} * {n} rows, got shape {shape}")
    return n


def spread_tokens(x: Float[Array, "B T *rest"], n: int, at: int) -> Float[Array, "B rows *rest"]:
    """Return n rows for each token of x, of which row `at` is the token's and the others are zeros."""
    rows = jnp.zeros((*x.shape[:2], n, *x.shape[2:]), x.dtype).at[:, :, at].set(x)
    return rows.reshape(x.shape[0], -1, *x.shape[2:])


def spread_gates(g: Float[Array, "B T *rest"], n: int, at: int) -> Float[Array, "B rows *rest"]:
    """Return gates [B, T * n, ...] with n rows for each token: row t * n + at is g_t, and the others are 0, no decay.

    Where exp(g) underflows to 0, the gradient is 0. Kernels form it as a difference of sums over tokens, of which only rounding
    would be left.
    """
    floor = LOG_OF_NOTHING if promoted(g.dtype, jnp.float32) == jnp.float32 else -746.0
    return spread_tokens(jnp.where(g < floor, jax.lax.stop_gradient(g), g), n, at)


@compiled(static_argnums=(0, 1, 2, 3))
def bind_updates(
    recurrence: Callable[..., Outputs], n: int, choice: Choice, options: ScanOptions, arrays: dict, traced: dict
) -> Outputs:
    """Solve `gated_delta_product` by one call of `recurrence` with n rows for each token, compiled by jit.

    arrays: its array arguments by name. traced: the options of TRACED by name.
    """
    flat, reverse = arrays["query"].ndim == 3, options.reverse
    arrays = {name: x[None] if flat else x for name, x in arrays.items()}
    (B, T), cuts, ids = arrays["query"].shape[:2], traced["cu_seqlens"], traced["segment_ids"]
    if cuts is not None:
        traced = traced | dict(cu_seqlens=check_boundaries(cuts, dict(B=B, T=T)) * n)
    elif ids is not None:
        check_segment_ids(ids, dict(B=B, T=T), flat, False)
        traced = traced | dict(segment_ids=jnp.repeat(ids[None] if flat else ids, n, axis=1))

    def in_scan_order(x: Array) -> Array:
        """Return x with the updates of each token in reverse order if the scan goes from the last row to the first."""
        return jnp.flip(x.reshape(B, T, n, *x.shape[2:]), 2).reshape(x.shape) if reverse else x

    first, last = (n - 1, 0) if reverse else (0, n - 1)
    rows = {name: in_scan_order(arrays[name]) for name in ("key", "value", "beta")}
    rows["query"] = spread_tokens(arrays["query"], n, last)
    if "g" in arrays:
        rows["g"] = spread_gates(arrays["g"], n, first)
    every = None if options.states_every is None else options.states_every * n
    of_call: dict[str, Any] = {name: getattr(options, name) for name in STATIC} | dict(states_every=every)
    of_call |= dict(platform=choice.platform, cfg=choice.config)
    outputs = recurrence(**rows, **traced, **of_call)
    output = outputs.output.reshape(B, T, n, *outputs.output.shape[2:])[:, :, last]
    return outputs._replace(output=output[0] if flat else output)


@compiled(static_argnums=(0, 1))
def bind_updates_step(choice: Choice, options: ScanOptions, arrays: dict, state, traced: dict):
    """Return (the output, the states) of `gated_delta_product_step`, compiled by jit. arrays: its array arguments by name."""
    n = arrays["key"].shape[1]
    rows = arrays | dict(query=spread_tokens(arrays["query"][:, None], n, n - 1))
    if "g" in arrays:
        rows["g"] = spread_tokens(arrays["g"][:, None], n, 0)
    r = bind(**rows, softmax_scale=traced["softmax_scale"], **options.of_bind)
    r, slots = with_states(r, state, traced["slots"])
    output, pool = advance_rounded(choice, r, slots, traced["rounding_key"])
    return output[:, -1], pool


# ---- what the recipes share --------------------------------------------------------------------------------------------


def normalised(x: Float[Array, "B T _ K"], options: ScanOptions) -> Float[Array, "B T _ K"]:
    """Return x with rows divided by their norms, x * rsqrt(sum x^2 + 1e-6), if options.use_qk_l2norm; else x."""
    if not options.use_qk_l2norm:
        return x
    wide = x.astype(promoted(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def scaled(x: Float[Array, "B T _ D"], by: Float[Array, "B T H _"]) -> Float[Array, "B T H D"]:
    """Return by * x in the dtype of x, rounded once, with a head for each head of `by`."""
    wide = promoted(x.dtype, by.dtype, jnp.float32)
    return (spread_heads(x, by.shape[2]).astype(wide) * by.astype(wide)).astype(x.dtype)


def given(**arrays) -> dict[str, Any]:
    """Return the arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def as_query(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arrays with the one called `name` renamed to "query", after a check that it is an array."""
    check_array(name, arrays[name])
    return {"query" if other == name else other: x for other, x in arrays.items()}


def unscaled(options) -> dict[str, Any]:
    """Return the options with softmax_scale=1 if softmax_scale is None or absent."""
    return {**options, "softmax_scale": 1.0 if (given := options.get("softmax_scale")) is None else given}


def check_options(options, names: set[str]):
    """Raise TypeError for an option whose name is not in `names`."""
    if unknown := options.keys() - names:
        raise TypeError(f"options must be of {', '.join(sorted(names))}; got {', '.join(sorted(unknown))}")


def solve_recipe(recipe: Recipe, arrays: dict[str, Any], options, without: tuple[str, ...] = ()) -> Outputs:
    """Check the arrays and options of a call by name, and solve the recurrence of `recipe`, compiled by jit.

    recipe: (the arrays, each with B and with zeros in padding, options) -> the arguments of `recurrent`. without: the options
    that it does not take.
    """
    choice, static, traced = checked_call(arrays, options, without)
    return bind_recipe(recipe, choice, static, transferred(arrays), transferred(traced))


def checked_call(
    arrays: dict[str, Any], options, without: tuple[str, ...] = ()
) -> tuple[Choice, ScanOptions, dict[str, Any]]:
    """Check the arrays and options of a call by name. Return (the platform and config, the options known while tracing, the
    options of TRACED by name, None if absent). without: the options of `recurrent` that the call does not take."""
    check_options(options, {*STATIC, *TRACED, "platform", "cfg"} - {*without})
    platform, cfg = options.get("platform"), options.get("cfg")
    static = ScanOptions(**{name: options[name] for name in STATIC if name in options})
    traced = {name: options.get(name) for name in TRACED}
    check_before_tracing(arrays | traced, platform, cfg, static, required=tuple(arrays))
    return Choice(Platform.parse(platform), cfg), static.static, traced


@compiled(static_argnums=(0, 1, 2))
def bind_recipe(recipe: Recipe, choice: Choice, options: ScanOptions, arrays: dict, traced: dict) -> Outputs:
    """Solve the recurrence of `recipe` for these arrays, by name, compiled by jit. traced: the options of TRACED by name."""
    flat, arrays, traced = batched(arrays, traced, options)
    of_call: dict[str, Any] = {name: getattr(options, name) for name in STATIC if name != "use_qk_l2norm"}
    outputs = recurrent(
        **recipe(arrays, options), **traced, **of_call, platform=choice.platform, cfg=cast(Config | None, choice.config)
    )
    return outputs._replace(output=outputs.output[0]) if flat else outputs


def step_recipe(recipe: Recipe, arrays: dict[str, Any], state, options):
    """Check the arguments of a step, and return its results: (the output of one token by `recipe`, the new states), compiled by
    jit.

    arrays, options: by name. state: the states [B, H, K, V] or a pool, as in `recurrent_step`.
    """
    call = StepCall.of(arrays, state, options, takes=StepOptions)
    return bind_step(recipe, call.choice, call.options, transferred(arrays), state, call.traced)


@compiled(static_argnums=(0, 1, 2))
def bind_step(recipe: Recipe, choice: Choice, options: ScanOptions, arrays: dict, state, traced: dict):
    """Return the results of `recurrent_step` for one token of `recipe`, compiled by jit. arrays: without T, by name."""
    arrays, _ = named_arrays(arrays, False, one_token=True)
    found = recipe({name: x[:, None] for name, x in arrays.items()}, options)
    token = {name: x[:, 0] if isinstance(x, jax.Array) else x for name, x in found.items()}
    return recurrent_step(
        **token, **traced, state=state, platform=choice.platform, cfg=cast(Config | None, choice.config)
    )


def named_arrays(arrays: Arrays, flat: bool, one_token: bool = False) -> tuple[Arrays, dict[str, int]]:
    """Return (the arrays with B, the size of every dimension by its letter), after a check. arrays: by name.

    flat: whether the arrays lack B, which is added. one_token: whether they lack T.
    """
    # jit sorts a dictionary; errors state the shapes by query, key and value first.
    arrays = {name: as_float(name, arrays[name]) for name in dict.fromkeys((*REQUIRED, *arrays))}
    check_dtypes(arrays)
    sizes = check_shapes(arrays, absent="T" if one_token else "B" * flat)
    return {name: x[None] if flat else x for name, x in arrays.items()}, sizes


def batched(arrays: Arrays, traced: dict, options: ScanOptions) -> tuple[bool, Arrays, dict]:
    """Return (whether the arrays lack B; the arrays with B, checked, and with zeros in padding; the traced options with B).

    arrays: by name. traced: the options that are arrays, by name, of which segment_ids may lack B.
    """
    flat = arrays["query"].ndim == 3
    arrays, sizes = named_arrays(arrays, flat)
    if flat and traced["segment_ids"] is not None and traced["segment_ids"].ndim == 1:
        traced = traced | dict(segment_ids=traced["segment_ids"][None])
    return flat, with_zeros_in_padding(arrays, traced, options, sizes), traced


def with_zeros_in_padding(arrays: Arrays, traced: dict, options: ScanOptions, sizes: dict[str, int]) -> Arrays:
    """Return the arrays with zeros in padding, which may hold NaN: NaN would pass a product of a recipe to its gradients."""
    is_token = None
    if traced["cu_seqlens"] is not None:
        cuts, rows = check_boundaries(traced["cu_seqlens"], sizes), jnp.arange(sizes["T"])
        is_token = ((rows >= cuts[0]) & (rows < cuts[-1]))[None]
    elif traced["segment_ids"] is not None:
        check_segment_ids(traced["segment_ids"], sizes, False, False)
        is_token = differs_from_padding(jnp.asarray(traced["segment_ids"]), options.pad_id)
    if is_token is None:
        return arrays
    return {name: jnp.where(expanded(is_token, x.ndim), x, 0) for name, x in arrays.items()}

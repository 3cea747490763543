"""Define `mamba3`, the recurrence of Mamba-3 with one or several inputs, by one call of `recurrent`.

With alpha_t = exp(ADT_t), gamma_t = trap_t DT_t and c_t = (1 - trap_t) DT_t the trapezoid reads the token before:

    S_t = alpha_t (S_{t-1} + c_t k_{t-1} v_{t-1}^T) + gamma_t k_t v_t^T

The state R_t = S_t + c_{t+1} k_t v_t^T has no token before in its recurrence, and S_t = R_t where no token follows:

    R_t = alpha_t R_{t-1} + (gamma_t + c_{t+1}) k_t v_t^T        S_t^T q_t = R_t^T q_t - c_{t+1} (k_t . q_t) v_t

With rank R a token writes R pairs of k and v and reads with R queries: R rows of one recurrence, the first with the decay. What
row j does not see of the rows behind it, (gamma_t + c_{t+1}) (k_r . q_j) v_r, is added by pairs of rows of one token.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glax._src.api.mlstm import operand_dtype
from glax._src.api.named import (
    StepCall,
    StepOptions,
    checked_call,
    given,
    spread_gates,
    spread_tokens,
    with_zeros_in_padding,
)
from glax._src.api.recurrent import recurrent
from glax._src.core.bind import DTYPES, ScanOptions, as_float, bind, check_array, transferred
from glax._src.core.decay import promoted
from glax._src.core.recurrence import Outputs, Recurrence, spread_heads
from glax._src.core.registry import Config
from glax._src.core.segments import expanded
from glax._src.serving.decode_step import advance_rounded, with_states
from glax._src.serving.state_pool import put, take, usable
from glax._src.solve.dispatch import Choice
from glax._src.tuning.executor import compiled

# The dimensions of every argument: R is the rank, G divides H, A is at most K / 2. Without R for one input.
SHAPES = dict(
    Q="B T R G K", K="B T R G K", V="B T H V", ADT="B H T", DT="B H T", Trap="B H T", Q_bias="H R K", K_bias="H R K",
    Angles="B T H A", D="H", Z="B T H V", MIMO_V="H R V", MIMO_Z="H R V", MIMO_Out="H R V",
)  # fmt: skip
BY_TOKEN = ("Q", "K", "V", "ADT", "DT", "Trap", "Angles", "Z")
GROUP = 16  # tokens whose angles one thread of a GPU sums


class Mamba3State(NamedTuple):
    """Hold the states of N sequences of `mamba3`: the `angle` [N, H, A] of rotation so far, in [0, 2 pi), `S` [N, H, K, V], and
    of the last token the rotated `key` [N, H, K], or [N, H, R, K] with rank R, and the `value` [N, H, V].

    A is the last axis of `Angles`: the number of pairs of channels that are rotated in each head.
    All are float32, or float64 for float64 inputs. Zeros stand before the first token. It is a tuple of the four.

    >>> glax.Mamba3State(*map(jnp.zeros, ((1, 2, 1), (1, 2, 4, 4), (1, 2, 4), (1, 2, 4)))).S.shape
    (1, 2, 4, 4)
    """

    angle: Float[Array, "N H A"]
    S: Float[Array, "N H K V"]
    key: Float[Array, "N H *R K"]
    value: Float[Array, "N H V"]


class Mamba3Options(TypedDict, total=False):
    """List the options of `mamba3`, as in `recurrent`. initial_state: a `Mamba3State`, or a tuple of its four arrays."""

    softmax_scale: float | Float[Array, ""] | None
    initial_state: Mamba3State | tuple[Array, Array, Array, Array] | None
    reverse: bool
    cu_seqlens: Int[Array, "N+1"] | None
    segment_ids: Int[Array, "B T"] | None
    pad_id: int | None
    platform: str | None
    cfg: Config | None


def mamba3(
    Q: Float[Array, "B T *R G K"],
    K: Float[Array, "B T *R G K"],
    V: Float[Array, "B T H V"],
    ADT: Float[Array, "B H T"],
    DT: Float[Array, "B H T"],
    Trap: Float[Array, "B H T"],
    Q_bias: Float[Array, "H *R K"],
    K_bias: Float[Array, "H *R K"],
    Angles: Float[Array, "B T H A"],
    D: Float[Array, "H"] | None = None,
    Z: Float[Array, "B T H V"] | None = None,
    *,
    MIMO_V: Float[Array, "H R V"] | None = None,
    MIMO_Z: Float[Array, "H R V"] | None = None,
    MIMO_Out: Float[Array, "H R V"] | None = None,
    **options: Unpack[Mamba3Options],
) -> Outputs:
    """Compute Mamba-3, with the trapezoid and rotated queries and keys, in the arguments of mamba_ssm's kernels:

        S_t = alpha S_{t-1} + (1 - trap) DT alpha k_{t-1} v_{t-1}^T + trap DT k_t v_t^T,     o_t = S_t^T q_t + D v_t,

    with alpha = exp(ADT_t), trap = sigmoid(Trap_t) and DT = DT_t, also in the term of the token before. q and k
    are Q + Q_bias and K + K_bias after a rotation. Columns 2 i and 2 i + 1, as (a, b), become (a cos x - b sin x, a sin x +
    b cos x), with x = sum_{s <= t} pi tanh(Angles_s[i]) DT_s. The columns behind 2 A are not rotated. softmax_scale, a factor of
    q, is 1 if None. With Z the output is o_t * silu(Z_t).

    With a rank R, Q and K are [B, T, R, G, K]. A token writes the R products k_r v_r^T with v_r = MIMO_V_r * V to one state,
    and reads it R times: o_r = S_t^T q_r + D v_r. With Z, each o_r is multiplied by silu(MIMO_Z_r * Z). The output is the sum
    of MIMO_Out_r * o_r over r, or all o_r, [B, T, R, H, V], without MIMO_Out. The kernel mamba3_mimo rotates columns i and
    K / 2 + i together: move them to 2 i and 2 i + 1 first, as `glax.nn.Mamba3` does.

    Q, K and V share one dtype of `recurrent`; the other arguments may have any float dtype. G divides H, and head h reads row
    h // (H / G) of the G rows of Q and K. K is even, and A is at most K / 2. Without D there is no skip, and without Z no gate. A
    rank needs MIMO_V, and MIMO_Z where there is Z.

    Returns `Outputs`: output [B, T, H, V], or as above with a rank, in Q's dtype, and final_state a `Mamba3State`, as
    initial_state is. Every input has a gradient. Raises TypeError or ValueError naming the argument. Other options as in
    `recurrent`, but for states_every.

    Lahoti et al. 2026; https://github.com/state-spaces/mamba, mamba3_siso_combined and mamba3_mimo.

    >>> q, gate, bias = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 2, 8)), jnp.ones((2, 4))
    >>> glax.mamba3(q, q, q, -gate, gate, gate, bias, bias, q[..., :2]).output.shape
    (1, 8, 2, 4)
    """
    arrays = dict(Q=Q, K=K, V=V, ADT=ADT, DT=DT, Trap=Trap, Q_bias=Q_bias, K_bias=K_bias, Angles=Angles)
    arrays |= given(D=D, Z=Z, MIMO_V=MIMO_V, MIMO_Z=MIMO_Z, MIMO_Out=MIMO_Out)
    return mamba3_by(recurrent, arrays, **options)


def mamba3_by(
    recurrence: Callable[..., Outputs], arrays: dict[str, Array], **options: Unpack[Mamba3Options]
) -> Outputs:
    """Return the results of `mamba3`, with S solved by the function `recurrence`, such as `recurrent` or
    `glax.parallel.recurrent` with its mesh. arrays: the array arguments by name."""
    V = arrays["V"]
    state = four_states("initial_state", options.get("initial_state"))
    check_shapes(arrays, one_token=False)
    own = {name: x for name, x in options.items() if name != "initial_state"}
    without = ("initial_state", "states_every", "states_dtype", "use_qk_l2norm")
    choice, static, traced = checked_call(arrays | dict(query=V, key=V, value=V), own, without)
    return bind_mamba3(recurrence, choice, static, transferred(arrays), transferred(traced), state)


def mamba3_step(
    Q: Float[Array, "B *R G K"],
    K: Float[Array, "B *R G K"],
    V: Float[Array, "B H V"],
    ADT: Float[Array, "B H"],
    DT: Float[Array, "B H"],
    Trap: Float[Array, "B H"],
    Q_bias: Float[Array, "H *R K"],
    K_bias: Float[Array, "H *R K"],
    Angles: Float[Array, "B H A"],
    D: Float[Array, "H"] | None = None,
    Z: Float[Array, "B H V"] | None = None,
    *,
    state: Mamba3State | tuple[Array, Array, Array, Array],
    MIMO_V: Float[Array, "H R V"] | None = None,
    MIMO_Z: Float[Array, "H R V"] | None = None,
    MIMO_Out: Float[Array, "H R V"] | None = None,
    **options: Unpack[StepOptions],
) -> tuple[Float[Array, "B *R H V"], Mamba3State]:
    """Compute one token of `mamba3` for each of B sequences. Its arguments are those of `mamba3` without the axis T:

        S_t = alpha S_{t-1} + (1 - trap) DT alpha k_{t-1} v_{t-1}^T + trap DT k_t v_t^T,     o_t = S_t^T q_t + D v_t,

    with alpha, trap, the rotated q and k, the gate Z and the rank as `mamba3` says. state: the `Mamba3State` after the previous
    token, whose fields have an entry for each sequence, or with the option `slots` [B] for each slot of a pool. Returns (o [B, H,
    V] in Q's dtype, or [B, R, H, V] with a rank and without MIMO_Out; the new `Mamba3State`). Options and errors as in
    `recurrent_step`; softmax_scale is 1 if None.

    Lahoti et al. 2026; https://github.com/state-spaces/mamba.

    >>> q, gate, bias = jnp.ones((1, 2, 4)), jnp.ones((1, 2)), jnp.ones((2, 4))
    >>> state = glax.Mamba3State(q[..., :2], jnp.zeros((1, 2, 4, 4)), q, q)
    >>> glax.mamba3_step(q, q, q, -gate, gate, gate, bias, bias, q[..., :2], state=state)[0].shape
    (1, 2, 4)
    """
    arrays = dict(Q=Q, K=K, V=V, ADT=ADT, DT=DT, Trap=Trap, Q_bias=Q_bias, K_bias=K_bias, Angles=Angles)
    arrays |= given(D=D, Z=Z, MIMO_V=MIMO_V, MIMO_Z=MIMO_Z, MIMO_Out=MIMO_Out)
    states = four_states("state", state)
    if states is None:
        raise TypeError("state must be a Mamba3State, got None")
    check_shapes(arrays, one_token=True)
    call = StepCall.of(dict(query=V, key=V, value=V), states.S, options, takes=StepOptions)
    return bind_mamba3_step(call.choice, transferred(arrays), states, transferred(call.traced))


def four_states(name: str, state) -> Mamba3State | None:
    """Return `state`, what a caller gives, as a Mamba3State; None for None. name: the argument, for messages.

    Raises TypeError for anything but a tuple or list of four arrays.
    """
    if state is None:
        return None
    if not isinstance(state, tuple | list) or len(state) != 4:
        raise TypeError(f"{name} must be a Mamba3State, or a tuple of its four arrays, got {type(state).__name__}")
    for field, x in zip(Mamba3State._fields, state, strict=True):
        check_array(f"{name}.{field}", x)
    return Mamba3State(*state)


def check_shapes(arrays: dict[str, Any], one_token: bool):
    """Raise TypeError or ValueError for an argument that is no array, or whose shape does not fit those before it.

    arrays: by name. one_token: whether the arguments by token lack the axis T, as in `mamba3_step`.
    """
    sizes: dict[str, int] = {}
    check_array("Q", arrays["Q"])
    has_rank = arrays["Q"].ndim == len(SHAPES["Q"].split()) - one_token
    lacks = ({"T"} if one_token else set()) | (set() if has_rank else {"R"})
    for name, x in arrays.items():
        check_array(name, x)
        if name.startswith("MIMO") and not has_rank:
            raise ValueError(
                f"{name} must be None without a rank, as in Q [B, T, R, G, K], got Q of shape {arrays['Q'].shape}"
            )
        letters = [letter for letter in SHAPES[name].split() if letter not in lacks]
        wanted = [sizes.get(letter, letter) for letter in letters]
        fits = x.ndim == len(letters)
        for letter, size in zip(letters, x.shape, strict=False):
            fits = fits and sizes.setdefault(letter, size) == size
        if not fits:
            raise ValueError(
                f"{name} must be [{', '.join(letters)}]=[{', '.join(map(str, wanted))}], got shape {x.shape}"
            )
    if has_rank and "MIMO_V" not in arrays:
        raise ValueError("MIMO_V must be given with a rank, which Q has, got None")
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"Q must have a number of heads that divides the {sizes['H']} of V, got {sizes['G']}")
    if sizes["K"] % 2 or 2 * sizes["A"] > sizes["K"]:
        raise ValueError(f"Angles must have at most K / 2 columns, with an even K={sizes['K']}, got {sizes['A']}")
    if ("Z" in arrays) != ("MIMO_Z" in arrays) and has_rank:
        raise ValueError("Z and MIMO_Z must come together with a rank, got one of them")


# ---- one token's parts ---------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Hold the operands of the recurrence, by token and head, in the dtype of sums.

    q, k: [B, T, R, H, K], not rotated. v, z: [B, T, R, H, V], the values and the output's gate. log_decay, gamma, c: [B, T, H].
    turn: [B, T, H, A], by how much the angle grows.
    """

    q: Array
    k: Array
    v: Array
    z: Array | None
    log_decay: Array
    gamma: Array
    c: Array
    turn: Array


def with_bias(x: Float[Array, "B T *R G K"], bias: Float[Array, "H *R K"]) -> Float[Array, "B T R H K"]:
    """Return keys or queries [B, T, R, G, K] or [B, T, G, K] for all H heads, with the bias of each head added,
    [B, T, R, H, K].

    Without an axis R in x, R is 1.
    """
    x, bias = (x, jnp.moveaxis(bias, 1, 0)) if x.ndim == 5 else (x[:, :, None], bias[None])
    return spread_heads(x, bias.shape[1], axis=3) + bias[None, None]


def parts_of(a: dict[str, Array], scale) -> Parts:
    """Return the `Parts` of the arguments. a: the arguments by name, those by token as [B, T, ...]. scale: softmax_scale, or
    None."""
    dtype = promoted(a["Q"].dtype, jnp.float32)
    a = {name: x.astype(dtype) for name, x in a.items()}

    def projected(x: Array, by: str) -> Array:
        """Return x [B, T, H, V] times each row of a projection [H, R, V]: [B, T, R, H, V]."""
        return x[:, :, None] * jnp.moveaxis(a[by], 1, 0)[None, None] if by in a else x[:, :, None]

    scale = 1.0 if scale is None else jnp.asarray(scale, dtype)
    trap = jax.nn.sigmoid(a["Trap"])
    return Parts(
        q=with_bias(a["Q"], a["Q_bias"]) * scale,
        k=with_bias(a["K"], a["K_bias"]),
        v=projected(a["V"], "MIMO_V"),
        z=projected(a["Z"], "MIMO_Z") if "Z" in a else None,
        log_decay=a["ADT"],
        gamma=trap * a["DT"],
        c=(1 - trap) * a["DT"],
        turn=turn_of(a["Angles"], a["DT"]),
    )


@jax.checkpoint
def turn_of(angles: Float[Array, "*rows A"], dt: Float[Array, "*rows"]) -> Float[Array, "*rows A"]:
    """Return pi tanh(angles) dt, the angle by which a token turns its key. The gradient computes tanh again, so that none is
    stored for it."""
    return math.pi * jnp.tanh(angles) * dt[..., None]


def wrapped(angle: Array) -> Array:
    """Return the angle in [0, 2 pi). Its gradient is the gradient of the angle."""
    return angle - 2 * math.pi * lax.stop_gradient(jnp.floor(angle / (2 * math.pi)))


def centred(angle: Array) -> Array:
    """Return the angle in [-pi, pi], by subtracting whole turns. Sums of many angles thus stay small.

    2 pi has two parts, of which the first has few digits: whole turns are subtracted without rounding.
    """
    turns, first = jnp.round(angle / (2 * math.pi)), 6.28125
    return (angle - turns * first) - turns * (2 * math.pi - first)


@jax.custom_vjp
def each_twice(x: Float[Array, "*rows A"]) -> Float[Array, "*rows 2*A"]:
    """Return x with each of its columns repeated once, next to itself.

    The gradient adds the columns as slices, which XLA fuses into their reader; a sum over an axis of 2 would be a kernel of its
    own.
    """
    return jnp.repeat(x, 2, axis=-1)


each_twice.defvjp(lambda x: (each_twice(x), None), lambda _, d: (d[..., ::2] + d[..., 1::2],))


class Rotation(NamedTuple):
    """Hold the factors of a rotation of pairs of columns: x * of_own + (the other column of each pair) * of_other.

    of_own: [*rows, K], cosines. of_other: [*rows, K], sines, negated for even columns. Columns behind the last angle have 1 and
    0.
    """

    of_own: Array
    of_other: Array

    @classmethod
    def by(cls, angle: Float[Array, "*rows A"], K: int) -> "Rotation":
        """Return the rotation of the pair of columns 2 i and 2 i + 1 of K columns by angle[..., i]."""
        A, rows = angle.shape[-1], angle.ndim - 1
        behind, signs = [(0, 0)] * rows + [(0, K - 2 * A)], jnp.asarray([-1, 1] * A, angle.dtype)
        cos, sin = each_twice(jnp.cos(angle)), each_twice(jnp.sin(angle)) * jnp.expand_dims(signs, range(rows))
        return cls(jnp.pad(cos, behind, constant_values=1), jnp.pad(sin, behind))

    def of(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
        """Return x with the columns 2 i and 2 i + 1 rotated by angle i."""
        other = x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
        return x * self.of_own + other * self.of_other


def of_pairs(q: Array, k: Array, v: Array, weight: Array) -> Array:
    """Return the sum over r of weight[j, r] (k_r . q_j) v_r, [B, T, R, H, V], of each token's rows. weight: [B, T, H, R, R]."""
    pairs = jnp.einsum("btjhk,btrhk->bthjr", q, k, precision=lax.Precision.HIGHEST) * weight
    return jnp.einsum("bthjr,btrhv->btjhv", pairs, v, precision=lax.Precision.HIGHEST)


def unseen(rank: int, reverse: bool) -> Bool[np.ndarray, "R R"]:
    """Return a mask [j, r]: whether row r of a token comes after row j in the scan."""
    above = np.triu(np.ones((rank, rank), bool), 1)
    return above.T if reverse else above


def gated_output(out: Array, p: Parts, a: dict[str, Array], dtype) -> Array:
    """Return the output [B, T, (R,) H, V] in `dtype`, from what the queries read, out [B, T, R, H, V].

    It adds the skip D v, multiplies by the gate silu(z), and sums over R with MIMO_Out, each where it is given. p: the `Parts`
    of the tokens. a: the arguments of `mamba3` by name.
    """
    if "D" in a:
        out = out + a["D"].astype(out.dtype)[None, None, None, :, None] * p.v
    if p.z is not None:
        out = out * jax.nn.silu(p.z)
    if "MIMO_Out" in a:
        return (out * jnp.moveaxis(a["MIMO_Out"].astype(out.dtype), 1, 0)[None, None]).sum(2).astype(dtype)
    return (out if a["Q"].ndim == 5 else out[:, :, 0]).astype(dtype)


# ---- calls ---------------------------------------------------------------------------------------------------------------


def check_dtypes(arrays: dict[str, Any]) -> dict[str, Array]:
    """Return the arrays as floats. Raises TypeError unless Q, K and V share one dtype of glax's."""
    arrays = {name: as_float(name, arrays[name]) for name in SHAPES if name in arrays}
    if str(arrays["Q"].dtype) not in DTYPES:
        raise TypeError(f"Q must be float32, bfloat16, float16 or float64, got {arrays['Q'].dtype}")
    for name in ("K", "V"):
        if arrays[name].dtype != arrays["Q"].dtype:
            raise TypeError(f"{name} must be {arrays['Q'].dtype} as Q is, got {arrays[name].dtype}")
    return arrays


def state_shapes(rows: int, heads: int, angles: int, key_width: int, value_width: int, *rank: int) -> tuple:
    """Return the shapes of a Mamba3State of `rows` sequences or slots, in the order of its fields. rank: none, or R."""
    by_head = (rows, heads)
    return (
        (*by_head, angles), (*by_head, key_width, value_width), (*by_head, *rank, key_width), (*by_head, value_width),
    )  # fmt: skip


def shapes_of(a: dict[str, Array], rows: int) -> tuple:
    """Return the shapes of a `Mamba3State` for `rows` sequences or slots, in the order of its fields. a: the arguments of a
    call by name."""
    (H, V), K, A = a["V"].shape[-2:], a["Q"].shape[-1], a["Angles"].shape[-1]
    return state_shapes(rows, H, A, K, V, *a["Q_bias"].shape[1:-1])


def check_states(name: str, state: Mamba3State, a: dict[str, Array], rows: int):
    """Raise ValueError unless the states have the shapes of `rows` sequences or slots."""
    for field, x, shape in zip(Mamba3State._fields, state, shapes_of(a, rows), strict=True):
        if x.shape != shape:
            raise ValueError(f"{name}.{field} must be {list(shape)}, got shape {x.shape}")


class Places(NamedTuple):
    """Hold where each of N sequences lies: its batch row, and the places in time of its first and its last token in scan order.

    has_tokens: whether the sequence has any token. If not, first and last are undefined places within T.
    """

    batch: Int[Array, "N"]
    first: Int[Array, "N"]
    last: Int[Array, "N"]
    has_tokens: Bool[Array, "N"]

    @classmethod
    def of(cls, r: Recurrence) -> "Places":
        (B, T), reverse = r.q.shape[:2], r.reverse
        if r.boundaries is not None:
            begin, end = r.boundaries[:-1], r.boundaries[1:]
            ends = jnp.clip(jnp.stack([begin, end - 1]), 0, T - 1)
            return cls(jnp.zeros_like(begin), ends[int(reverse)], ends[1 - int(reverse)], begin < end)
        used = jnp.ones((B, T), bool)
        if r.segments is not None and r.segments.is_token is not None:
            used = r.segments.is_token
        low, high = jnp.argmax(used, axis=1), T - 1 - jnp.argmax(used[:, ::-1], axis=1)
        return cls(jnp.arange(B), high if reverse else low, low if reverse else high, used.any(1))

    def pick(self, x: Float[Array, "B T *rest"], at: Array, otherwise) -> Float[Array, "N *rest"]:
        """Return x at one token of each sequence, or `otherwise` [N, *rest] for a sequence without a token.

        at: [N], the place in time of that token, such as `first` or `last`.
        """
        found = x[self.batch, at]
        return jnp.where(expanded(self.has_tokens[:, None], found.ndim + 1)[:, 0], found, otherwise)


def angles_of(r: Recurrence, turn: Float[Array, "B T H A"], start: Float[Array, "N H A"]) -> Float[Array, "B T H A"]:
    """Return the sums of the turns through every token in scan order, from `start` or, at a reset, from 0. In [-pi, pi]."""
    begins = r.ends(scan_end=False)[None, :, None, None]
    first, resets = jnp.where(begins, r.by_token(start), 0), None if r.boundaries is None else begins
    if r.segments is not None:
        first = jnp.where(expanded(r.segments.resets, 4), 0, first)
        resets = begins | expanded(r.segments.resets, 4)
    return running_sums(r.reverse, True, first + turn, resets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def running_sums(
    reverse: bool, is_centred: bool, x: Float[Array, "B T H A"], resets: Bool[Array, "b T 1 1"] | None
) -> Float[Array, "B T H A"]:
    """Return the sums of x through every token in scan order, which start again at each reset; as angles in [-pi, pi] if
    is_centred."""
    x, resets = jax.tree.map(lambda each: jnp.flip(each, 1) if reverse else each, (x, resets))
    found = sums_by_group(centred(x), resets, centred) if is_centred else sums_by_group(x, resets, lambda y: y)
    return jnp.flip(found, 1) if reverse else found


def _sums_fwd(reverse: bool, is_centred: bool, x: Array, resets: Array | None) -> tuple[Array, Array | None]:
    return running_sums(reverse, is_centred, x, resets), resets


def _sums_bwd(reverse: bool, is_centred: bool, resets: Array | None, d: Array) -> tuple[Array, None]:
    """Sum d over the tokens that a token's x reaches, from the scan's end to the token before the next reset."""
    to_previous = 1 if reverse else -1
    behind = jax.tree.map(lambda each: jnp.roll(each, to_previous, axis=1), resets)
    return running_sums(not reverse, False, d, behind), None


running_sums.defvjp(_sums_fwd, _sums_bwd)


def sums_by_group(x: Array, resets: Array | None, finish: Callable[[Array], Array]) -> Array:
    """Return the running sums of x along axis 1, in order of that axis: first within groups of tokens, then over the groups.

    resets: as in `running_sums`; None for none. finish: a function applied to each sum.

    A group of sums has two kernels, which touch every number once. `lax.associative_scan` has two for each power of two.
    """
    T, groups = x.shape[1], -(-x.shape[1] // GROUP)

    def grouped(x: Array) -> Array:
        padded = jnp.pad(x, [(0, groups * GROUP - T if axis == 1 else 0) for axis in range(x.ndim)])
        return padded.reshape(x.shape[0], groups, GROUP, *x.shape[2:])

    def unless_reset(i: int, before: Array) -> Array:
        return before if resets is None else jnp.where(resets[:, :, i], 0, before)

    x, resets = jax.tree.map(grouped, (x, resets))
    rows = [x[:, :, 0]]
    for i in range(1, GROUP):
        rows.append(x[:, :, i] + unless_reset(i, rows[-1]))
    if groups > 1:
        # Else XLA forms a row again from all rows before it wherever it is read.
        rows = lax.optimization_barrier(rows)
        ends = sums_by_group(finish(rows[-1]), None if resets is None else resets.any(2), finish)
        before = jnp.roll(ends, 1, axis=1).at[:, 0].set(0)
        for i in range(GROUP):
            before = unless_reset(i, before)
            rows[i] += before
    return finish(jnp.stack(rows, 2)).reshape(x.shape[0], groups * GROUP, *x.shape[3:])[:, :T]


def next_in_scan(r: Recurrence, c: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Return, for each token, c of the next token of its sequence in scan order; 0 for the last.

    The result is also 0 for a c that is not finite. Its token's gamma is not finite either, so outputs of the tokens before
    need not read it.
    """
    to_next = 1 if r.reverse else -1
    follows = ~r.ends(scan_end=True)[None, :, None]
    if r.segments is not None:
        follows = follows & ~expanded(jnp.roll(r.segments.resets, to_next, axis=1), 3)
        if r.segments.is_token is not None:
            used = expanded(r.segments.is_token, 3)
            follows = follows & used & jnp.roll(used, to_next, axis=1)
    c_next = jnp.roll(c, to_next, axis=1)
    return jnp.where(follows & jnp.isfinite(c_next), c_next, 0)


@compiled(static_argnums=(0, 1, 2))
def bind_mamba3(
    recurrence: Callable[..., Outputs],
    choice: Choice,
    options: ScanOptions,
    arrays: dict,
    traced: dict,
    state: Mamba3State | None,
) -> Outputs:
    a = check_dtypes(arrays)
    (B, T, H, V), dtype, reverse = a["V"].shape, a["Q"].dtype, options.reverse
    places: dict[str, Any] = dict(cu_seqlens=traced["cu_seqlens"], segment_ids=traced["segment_ids"])
    by_token = {
        name: jnp.moveaxis(x, 1, 2) if name in ("ADT", "DT", "Trap") else x for name, x in a.items() if name in BY_TOKEN
    }
    a |= with_zeros_in_padding(by_token, places, options, dict(B=B, T=T))
    r = bind(a["V"], a["V"], a["V"], **places, reverse=reverse, pad_id=options.pad_id)
    N, R = r.num_sequences, a["Q"].shape[2] if a["Q"].ndim == 5 else 1
    if state is not None:
        check_states("initial_state", state, a, N)
    p = parts_of(a, traced["softmax_scale"])
    wide = p.q.dtype
    start = [jnp.zeros(shape, wide) for shape in shapes_of(a, N)] if state is None else [x.astype(wide) for x in state]
    start = Mamba3State(*start)
    if 0 in (B, T, N):
        return Outputs(jnp.zeros((*a["Q"].shape[: a["Q"].ndim - 2], H, V), dtype), cast(Any, start))

    at, angle = Places.of(r), angles_of(r, p.turn, start.angle)
    rotation = Rotation.by(angle[:, :, None], p.k.shape[-1])
    c_next = next_in_scan(r, p.c)
    weight = p.gamma + c_next
    # [N, R, H, K] and [N, R, H, V]: what the first token reads of the token before it
    key = start.key[:, None] if R == 1 and start.key.ndim == 3 else jnp.moveaxis(start.key, 2, 1)
    value = start.value[:, None] * (jnp.moveaxis(a["MIMO_V"].astype(wide), 1, 0)[None] if "MIMO_V" in a else 1)
    c_first = at.pick(p.c, at.first, 0)[..., None, None]
    initial = start.S + c_first * jnp.einsum("nrhk,nrhv->nhkv", key, value, precision=lax.Precision.HIGHEST)

    narrow, first = operand_dtype(a["Q"]), R - 1 if reverse else 0
    # Weighted before they are rotated: of keys weighted afterwards XLA would store the gradient in the dtype of sums.
    rows: Any = rotation.of(p.q), rotation.of(p.k * weight[:, :, None, :, None]), p.v
    rows = [x.astype(narrow).reshape(B, T * R, H, -1) for x in rows]
    if places["cu_seqlens"] is not None:
        places["cu_seqlens"] = jnp.asarray(r.boundaries) * R
    elif places["segment_ids"] is not None:
        places["segment_ids"] = jnp.repeat(places["segment_ids"], R, axis=1)
    call: dict[str, Any] = dict(reverse=reverse, pad_id=options.pad_id, platform=choice.platform, cfg=choice.config)
    call |= dict(
        g=spread_gates(p.log_decay, R, first), softmax_scale=1.0, initial_state=None if state is None else initial
    )
    read, final = recurrence(*rows, **places, **call)
    of_token = jnp.where(unseen(R, reverse), weight[..., None, None], 0) - c_next[..., None, None]
    # A token's k . q is the same before one angle rotates both. Those are read once for all heads.
    out = read.reshape(B, T, R, H, V).astype(wide) + of_pairs(p.q, p.k, p.v, of_token)
    ended = Mamba3State(
        at.pick(wrapped(angle), at.last, start.angle),
        final,
        start.key,
        at.pick(a["V"].astype(wide), at.last, start.value),
    )
    # Of the last token alone: a gather from all rotated keys would need them in the dtype of sums.
    last_k = with_bias(at.pick(a["K"], at.last, 0)[:, None].astype(wide), a["K_bias"].astype(wide))
    last_k = Rotation.by(ended.angle[:, None, None], last_k.shape[-1]).of(last_k)[:, 0]
    last_k = last_k[:, 0] if start.key.ndim == 3 else jnp.moveaxis(last_k, 1, 2)
    ended = ended._replace(key=jnp.where(expanded(at.has_tokens[:, None], start.key.ndim + 1)[:, 0], last_k, start.key))
    return Outputs(gated_output(out, p, a, dtype), cast(Any, ended))


@compiled(static_argnums=(0,))
def bind_mamba3_step(choice: Choice, arrays: dict, state: Mamba3State, rest: dict) -> tuple[Array, Mamba3State]:
    a = check_dtypes(arrays)
    a |= {name: x[:, None] for name, x in a.items() if name in BY_TOKEN}
    B = a["V"].shape[0]
    P, slots, R = state.S.shape[0], rest["slots"], a["Q"].shape[2] if a["Q"].ndim == 5 else 1
    check_states("state", state, a, P)
    rows, used = jnp.arange(B), jnp.ones(B, bool)
    if slots is not None:
        rows, used = usable(slots, P, B, ("B", "V"))
    p = parts_of(a, rest["softmax_scale"])
    wide = p.q.dtype
    angle_before, key, value = (take(x, rows).astype(wide) for x in (state.angle, state.key, state.value))
    angle = wrapped(angle_before[:, None] + p.turn)
    rotation = Rotation.by(angle[:, :, None], p.k.shape[-1])
    q, k = rotation.of(p.q), rotation.of(p.k)
    has_rank = state.key.ndim == 4
    key = jnp.moveaxis(key, 2, 1) if has_rank else key[:, None]
    value = value[:, None] * (jnp.moveaxis(a["MIMO_V"].astype(wide), 1, 0)[None] if "MIMO_V" in a else 1)

    # 2 R rows: the pairs of the token before, the first of them with the decay, and the token's own, which read.
    before = (p.c * jnp.exp(p.log_decay))[..., None] * key
    narrow = operand_dtype(a["Q"])
    tokens: dict[str, Any] = dict(
        query=jnp.concatenate([jnp.zeros_like(q[:, 0]), q[:, 0]], axis=1),
        key=jnp.concatenate([before, p.gamma[..., None] * k[:, 0]], axis=1),
        value=jnp.concatenate([value, p.v[:, 0]], axis=1),
    )
    tokens = jax.tree.map(lambda x: x.astype(narrow), tokens)
    r = bind(**tokens, g=spread_tokens(p.log_decay, 2 * R, 0), softmax_scale=1.0)
    r, slots = with_states(r, state.S, slots)
    read, pool = advance_rounded(choice, r, slots, rest["rounding_key"])
    of_token = jnp.where(unseen(R, False), p.gamma[..., None, None], 0)
    out = read[:, None, R:].astype(wide) + of_pairs(q, k, p.v, of_token)
    output = gated_output(out, p, a, a["Q"].dtype)[:, 0]
    output = jnp.where(used.reshape(B, *[1] * (output.ndim - 1)), output, 0)
    new_key = jnp.moveaxis(k[:, 0], 1, 2) if has_rank else k[:, 0, 0]
    new = dict(angle=angle[:, 0], key=new_key, value=a["V"][:, 0])
    written = {name: put(getattr(state, name), rows, x) for name, x in new.items()}
    return output, Mamba3State(S=pool, **written)

"""The matrix form of one chunk: its outputs, its last state, and their gradients.

With G_i the sum of log decays from the chunk's first token through token i, and S the state before the chunk,

    o_i = (q_i e^{G_i})^T S + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j
    S'  = e^{G_last} S + sum_j (k_j e^{G_last - G_j}) v_j^T

No exponential of an unbounded positive number is ever formed. There are two ways to write e^{G_i - G_j} as a product of
something of i and something of j, both exact; see `fast` and `exact`. Columns of the state decay in the same way, with v
and o in the places of k and q. Every sum of gates is taken between a token and its reference, never as the difference of
two long sums, so that a gate of -100 costs no precision elsewhere.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.kernels.common.limits import FAST_LIMIT

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def outer(x: Float[Array, "B N C K"], y: Float[Array, "B N C V"]) -> Float[Array, "B N K V"]:
    """x^T y. Of x.mT XLA would write a copy, and read x itself for the other products."""
    return jnp.einsum("bnck,bncv->bnkv", x, y, precision=lax.Precision.HIGHEST)


def inner(x: Float[Array, "B N I D"], y: Float[Array, "B N J D"]) -> Float[Array, "B N I J"]:
    """x y^T, likewise."""
    return jnp.einsum("bnid,bnjd->bnij", x, y, precision=lax.Precision.HIGHEST)


def total(x: Array, axis: int) -> Array:
    """x summed over one axis, by a product with ones.

    XLA's CPU backend draws a reduction into the library call of a matrix product beside it, on one core and slowly: the
    whole gradient then takes a tenth longer. It leaves a product of a matrix and a vector alone.
    """
    if axis == 3:
        return jnp.einsum("bhcd,d->bhc", x, jnp.ones(x.shape[3], x.dtype), precision=lax.Precision.HIGHEST)
    return jnp.einsum("bhc,bhcd->bhd", jnp.ones(x.shape[:3], x.dtype), x, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The constant matrices of a chunk of `size` rows, all [C, C], and the rows where the walk begins and ends.

    prefix, suffix: row i sums the gates up to and including token i, and behind it; before: those before token i.
    middle:         row i sums the gates from the middle token to i, negative before it.
    earlier:        the pairs (i, j) with j before i; causal: those and j = i.
    halvings:       (sums, mask) for each halving of the chunk into blocks. The mask holds the pairs (i, j) in the later
                    and the earlier half of the same block; row i sums the gates between its token and the block's middle.
    """

    size: int
    prefix: np.ndarray
    suffix: np.ndarray
    before: np.ndarray
    middle: np.ndarray
    earlier: np.ndarray
    causal: np.ndarray
    halvings: tuple[tuple[np.ndarray, np.ndarray], ...]
    begin: int
    end: int


@functools.cache
def geometry(size: int, reverse: bool) -> Geometry:
    i, s = np.mgrid[:size, :size]
    half = size // 2
    middle = 1.0 * ((half <= s) & (s <= i)) - 1.0 * ((i < s) & (s < half))
    halvings, blocks = [], [(0, size)]
    while blocks := [block for block in blocks if block[1] - block[0] > 1]:
        sums, mask, smaller = np.zeros((size, size)), np.zeros((size, size), bool), []
        for low, high in blocks:
            cut = (low + high) // 2
            sums += ((cut <= s) & (s <= i) & (i < high)) + 1.0 * ((low <= i) & (i < s) & (s < cut))
            mask |= (cut <= i) & (i < high) & (low <= s) & (s < cut)
            smaller += [(low, cut), (cut, high)]
        halvings.append((sums, mask))
        blocks = smaller
    turned = (lambda x: x[::-1, ::-1].copy()) if reverse else (lambda x: x)
    return Geometry(
        size=size,
        prefix=turned(1.0 * (s <= i)),
        suffix=turned(1.0 * (s > i)),
        before=turned(1.0 * (s < i)),
        middle=turned(middle),
        earlier=turned(s < i),
        causal=turned(s <= i),
        halvings=tuple((turned(sums), turned(mask)) for sums, mask in halvings),
        begin=size - 1 if reverse else 0,
        end=0 if reverse else size - 1,
    )


class Factors(NamedTuple):
    """What the gates of one side of the state (its rows with q and k, or its columns with o and v) multiply; None is 1.

        q reads the state:   (q * inward) S         pairs:   sum over levels of (q * up) (k * down)^T * between, masked
        the state gains:     (k * outward)^T v

    inward, outward, up, down: [B, H, C, D], or [..., 1] for a gate per head; between: [B, H, C, C], for that alone.
    """

    inward: Array | None = None
    outward: Array | None = None
    up: tuple[Array | None, ...] = (None,)
    down: tuple[Array | None, ...] = (None,)
    between: Array | None = None


def sums(matrix: np.ndarray, x: Float[Array, "B H C D"]) -> Float[Array, "B H I D"]:
    """matrix @ x in each sequence and head. Its copies make it a batched product, which XLA runs without transposes.

    Of a matrix of 64 rows and more whose quarters off the diagonal are all 0 or all 1 only the others are multiplied.
    """
    C, half = x.shape[2], x.shape[2] // 2
    above, below = matrix[:half, half:], matrix[half:, :half]
    if matrix.shape != (C, C) or C < 64 or C % 2 or any((part != part[0, 0]).any() for part in (above, below)):
        return matmul(copies(matrix, x), x)
    quarters = copies(np.stack([matrix[:half, :half], matrix[half:, half:]]), x)
    halves = x.reshape(*x.shape[:2], 2, half, x.shape[3])
    y = matmul(quarters, halves)
    for other, weight in enumerate((float(below[0, 0]), float(above[0, 0]))):  # a NumPy number would widen y under x64
        if weight:
            takes = np.reshape(np.arange(2) != other, (2, 1, 1))
            y += jnp.where(takes, weight * total(halves[:, :, other], 2)[:, :, None, None], 0)
    return y.reshape(x.shape)


def copies(matrix: np.ndarray, x: Float[Array, "B H C D"]) -> Array:
    return jnp.broadcast_to(jnp.asarray(matrix, x.dtype), (*x.shape[:2], *matrix.shape))


def fast(g: Geometry, gates: Float[Array, "B H C D"] | None) -> Factors:
    """e^{G_i - G_j} = e^{M_i} e^{-M_j} with M = G minus G at the chunk's middle: two exponentials an element.

    Exact as long as |M|, the rows' and the columns' together, stays within `fast_limit`: no factor then overflows or
    vanishes, nor does the product of a row's and a column's.
    """
    if gates is None:
        return Factors()
    middle = sums(g.middle, gates)
    up, down = jnp.exp(middle), jnp.exp(-middle)
    enter = jnp.exp(gates[:, :, g.begin] - middle[:, :, g.begin])[:, :, None]
    leave = up[:, :, g.end][:, :, None]
    return Factors(up * enter, down * leave, (up,), (down,))


def reach(g: Geometry, gates: Float[Array, "B H C D"]) -> Array:
    """A bound on |M|: the largest sum of |gates| over either half of the chunk."""
    half = g.size // 2 if g.begin == 0 else g.size - g.size // 2
    return jnp.maximum(jnp.abs(gates[:, :, :half]).sum(2), jnp.abs(gates[:, :, half:]).sum(2)).max()


def fast_limit(dtype) -> float:
    """Derived in `limits`, with the range that it leaves to q and k; float64 ends at e^709."""
    return FAST_LIMIT if dtype == jnp.float32 else 500.0


def exact(g: Geometry, gates: Float[Array, "B H C D"] | None, own: bool) -> Factors:
    """e^{G_i - G_j} = e^{G_i - R} e^{R - G_j} with a reference R between j and i: for gates <= 0 no exponent is positive.

    Halving the chunk again and again finds a reference for every pair: pairs in different halves of a block share its
    middle. log2(C) levels, one exponential an element and level; and if `own`, one for a token and itself, without.
    """
    levels, self_level = len(g.halvings), (None,) * own
    if gates is None:
        return Factors(up=(None,) * levels + self_level, down=(None,) * levels + self_level)
    stacked = np.concatenate([g.prefix, g.suffix, *(matrix for matrix, _ in g.halvings)])
    inward, outward, *pairs = jnp.split(jnp.exp(sums(stacked, gates)), levels + 2, axis=2)
    pairs = (*pairs, *self_level)
    return Factors(inward, outward, pairs, pairs)


def per_head(g: Geometry, gates: Float[Array, "B H C 1"]) -> Factors:
    """One gate a head: e^{G_i - G_j} is one matrix, each entry by its own sum, from j's next token through i. Exact."""
    inward, outward = jnp.split(jnp.exp(sums(np.concatenate([g.prefix, g.suffix]), gates)), 2, axis=2)
    between = jnp.exp(sums(g.prefix, jnp.where(g.earlier, gates, 0)))
    return Factors(inward, outward, between=between)


def edges(g: Geometry, gates: Float[Array, "B H C D"] | None) -> Factors:
    """The factors that `added` needs, exact for every gate, for one exponential an element."""
    return Factors() if gates is None else Factors(outward=jnp.exp(sums(g.suffix, gates)))


def times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def added(k, v, key: Factors, value: Factors) -> Float[Array, "B H K V"]:
    """What the tokens of a chunk add to the state behind it: (k * outward)^T (v * outward).

    Of its transpose, with the roles of rows and columns swapped.
    """
    return matmul(times(k, key.outward).mT, times(v, value.outward))


class StateDecay(NamedTuple):
    """The decay of a state over a token or a chunk, base + rest, and base 1 where it is mild.

    A decay close to 1 has few digits left beside the 1. Equal ones round alike at every chunk, and a million tokens multiply
    that: the logarithm of e^-2.6e-6, of 64 gates of -4e-8, is off by up to 1%. `rest`, e^log - 1, has all its digits.
    """

    base: Array
    rest: Array

    @classmethod
    def of(cls, log: Array) -> "StateDecay":
        is_mild = jnp.abs(log) < 0.5
        return cls(jnp.where(is_mild, 1, jnp.exp(log)), jnp.where(is_mild, jnp.expm1(log), 0))

    def times(self, other: "StateDecay") -> "StateDecay":
        return StateDecay(self.base * other.base, self.rest * other.base + other.rest * (self.base + self.rest))


def state_decay(*logs: Array | None) -> StateDecay | None:
    """Of the sum of logs, those that are not None, each shaped to multiply the state's rows or columns."""
    present = [StateDecay.of(log) for log in logs if log is not None]
    return functools.reduce(StateDecay.times, present) if present else None


class State(NamedTuple):
    """A state as a sum: `low` is what rounding left out of `high`, so that errors do not grow with the number of tokens."""

    high: Float[Array, "B H K V"]
    low: Float[Array, "B H K V"]

    @classmethod
    def of(cls, high: Array) -> "State":
        return cls(high, jnp.zeros_like(high))

    def behind(self, decay: StateDecay | None, added: Array) -> "State":
        """The next state: decay * S + added."""
        kept, change = self.high, self.low + added
        if decay is not None:
            kept, change = kept * decay.base, kept * decay.rest + (self.low * decay.base + added)
        high = kept + change
        return State(high, change - (high - kept))


def forward(S, q, k, v, key: Factors, value: Factors, masks):
    """The outputs [B, H, C, V] of a chunk that begins in state S [B, H, K, V], of the pairs of tokens in `masks`.

    q [B, H, C, K] holds the scale.
    """
    o = times(matmul(times(q, key.inward), S), value.inward)
    for up, down, up_v, down_v, mask in zip(key.up, key.down, value.up, value.down, masks, strict=True):
        # [B, H, C, C]
        pairs = jnp.where(mask, times(matmul(times(q, up), times(k, down).mT), key.between), 0)
        o += times(matmul(pairs, times(v, down_v)), up_v)
    return o


def backward(S, dS, q, k, v, do, key: Factors, value: Factors, masks):
    """What the chunk adds to dL/dS, from S before it and dS = dL/dS behind it; and dq, dk, dv, each as (own token's part, rest).

    S and dS are transposed, [B, H, V, K]: of the four products with them, three then need no transposition.
    The own token's parts do not depend on the gates. Residuals out of the gates' telescoped gradient, their rounding cannot
    drown it when decay is strong and all else is small.
    """
    q_in, do_in = times(q, key.inward), times(do, value.inward)
    k_out, v_out = times(k, key.outward), times(v, value.outward)
    dq = times(matmul(do_in, S), key.inward)
    dk = times(matmul(v_out, dS), key.outward)
    dv = times(matmul(k_out, dS.mT), value.outward)
    d_added = matmul(do_in.mT, q_in)
    for up, down, up_v, down_v, mask in zip(key.up, key.down, value.up, value.down, masks, strict=True):
        q_up, k_down, v_down, do_up = times(q, up), times(k, down), times(v, down_v), times(do, up_v)
        # [B, H, C, C]
        pairs = jnp.where(mask, times(matmul(q_up, k_down.mT), key.between), 0)
        d_pairs = jnp.where(mask, times(matmul(do_up, v_down.mT), key.between), 0)
        dq += times(matmul(d_pairs, k_down), up)
        dk += times(matmul(d_pairs.mT, q_up), down)
        dv += times(matmul(pairs.mT, do_up), down_v)
    # [B, H, C, 1]
    own, d_own = total(q * k, 3)[..., None], total(do * v, 3)[..., None]
    return d_added, (d_own * k, dq), (d_own * q, dk), (own * do, dv)


def log_gradient(g: Geometry, terms: Float[Array, "B H C D"], edge: Float[Array, "B H D"], per_head: bool) -> Array:
    """dg_t = <S, dS>_{before the chunk} - sum over earlier s in the chunk of (q_s dq_s - k_s dk_s), [B, H, C, D or 1].

    The sum telescopes the pairs that do not span t. It starts afresh from the states at the chunk's edge, so its rounding
    does not grow with T. For columns, o and v stand for q and k. `terms` and `edge` are by channel, added up for a gate per head.
    """
    if per_head:
        terms, edge = total(terms, 3)[..., None], edge.sum(2, keepdims=True)
    return edge[:, :, None] - sums(g.before, terms)

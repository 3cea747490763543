"""Compute one chunk of C tokens in matrix form: its outputs, the state after it, and their gradients.

G_i is the sum of log decays from the chunk's first token through token i. S [K, V] is the state before the chunk, S' the state
after it. q_i and k_j are [K], v_j and o_i are [V]:

    o_i = (q_i e^{G_i})^T S + sum_{j <= i} (sum_k q_ik k_jk e^{G_ik - G_jk}) v_j
    S'  = e^{G_last} S + sum_j (k_j e^{G_last - G_j}) v_j^T

e^{G_i - G_j} must be the product of a factor of token i and a factor of token j, so that matrix products can sum the pairs. Two
forms do this. `fast` takes both sums from the middle of the chunk, and is exact while those sums are small. `exact` halves the
chunk repeatedly, and is exact for all gates. No form computes the exponential of an unbounded positive number.

Per-value gates decay the columns of S. They follow the same formulas, with v and o in the places of k and q.

Every sum of gates starts at a token's reference. None is the difference of two long sums, so a gate of -100 costs no precision
at other tokens.
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
    """Compute x^T y, [B, N, K, V]. This einsum avoids the copy that XLA would write for x.mT."""
    return jnp.einsum("bnck,bncv->bnkv", x, y, precision=lax.Precision.HIGHEST)


def inner(x: Float[Array, "B N I D"], y: Float[Array, "B N J D"]) -> Float[Array, "B N I J"]:
    """Compute x y^T, [B, N, I, J], without a copy of y.mT."""
    return jnp.einsum("bnid,bnjd->bnij", x, y, precision=lax.Precision.HIGHEST)


def total(x: Array, axis: int) -> Array:
    """Return the sum of x [B, H, C, D] over one axis, 2 or 3, computed as a product with ones.

    XLA for CPUs fuses a reduction with the matrix product beside it, and runs both on one core. It does not fuse a product of a
    matrix and a vector.
    """
    if axis == 3:
        return jnp.einsum("bhcd,d->bhc", x, jnp.ones(x.shape[3], x.dtype), precision=lax.Precision.HIGHEST)
    return jnp.einsum("bhc,bhcd->bhd", jnp.ones(x.shape[:3], x.dtype), x, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Hold the constant matrices [C, C] of a chunk of C = `size` rows, and its first and last row in the order of the recurrence.

    prefix      row i sums the gates through token i
    suffix      row i sums the gates after token i
    before      row i sums the gates before token i
    middle      row i sums the gates from the middle token to token i; the sum is negated before the middle
    middle_before  row i is row i - 1 of `middle`: the sum ends before token i
    earlier     the pairs (i, j) with j before i
    adjacent    the pairs (i, j) where j is the token before i
    causal      the pairs (i, j) with j before i or j = i
    halvings    (sums, mask) for each halving of the chunk into blocks. The mask holds the pairs (i, j) where i is in the later
                half of a block and j in the earlier half. Row i of `sums` sums the gates between token i and the block's middle.
    halvings_before  `sums` for each halving without token i's own gate, for i in the later half of a block
    begin, end  the row of the first and of the last token
    """

    size: int
    prefix: np.ndarray
    suffix: np.ndarray
    before: np.ndarray
    middle: np.ndarray
    middle_before: np.ndarray
    earlier: np.ndarray
    adjacent: np.ndarray
    causal: np.ndarray
    halvings: tuple[tuple[np.ndarray, np.ndarray], ...]
    halvings_before: tuple[np.ndarray, ...]
    begin: int
    end: int


@functools.cache
def geometry(size: int, reverse: bool) -> Geometry:
    """Build the matrices of a chunk of `size` tokens; `reverse` turns each by 180 degrees."""
    i, s = np.mgrid[:size, :size]
    half = size // 2
    middle = 1.0 * ((half <= s) & (s <= i)) - 1.0 * ((i < s) & (s < half))
    middle_before = 1.0 * ((half <= s) & (s < i)) - 1.0 * ((i <= s) & (s < half))
    halvings, halvings_before, blocks = [], [], [(0, size)]
    while blocks := [block for block in blocks if block[1] - block[0] > 1]:
        sums, mask, smaller = np.zeros((size, size)), np.zeros((size, size), bool), []
        sums_before = np.zeros((size, size))
        for low, high in blocks:
            cut = (low + high) // 2
            sums += ((cut <= s) & (s <= i) & (i < high)) + 1.0 * ((low <= i) & (i < s) & (s < cut))
            sums_before += (cut <= s) & (s < i) & (i < high)
            mask |= (cut <= i) & (i < high) & (low <= s) & (s < cut)
            smaller += [(low, cut), (cut, high)]
        halvings.append((sums, mask))
        halvings_before.append(sums_before)
        blocks = smaller

    def turned(matrix: np.ndarray) -> np.ndarray:
        return matrix[::-1, ::-1].copy() if reverse else matrix

    return Geometry(
        size=size,
        prefix=turned(1.0 * (s <= i)),
        suffix=turned(1.0 * (s > i)),
        before=turned(1.0 * (s < i)),
        middle=turned(middle),
        middle_before=turned(middle_before),
        earlier=turned(s < i),
        adjacent=turned(s == i - 1),
        causal=turned(s <= i),
        halvings=tuple((turned(sums), turned(mask)) for sums, mask in halvings),
        halvings_before=tuple(map(turned, halvings_before)),
        begin=size - 1 if reverse else 0,
        end=0 if reverse else size - 1,
    )


class Factors(NamedTuple):
    """Hold the decays that multiply the operands on one side of the state: its rows (q, k) or its columns (o, v). None is 1.

        output from the state    (q * inward) S
        added to the state       (k * outward)^T v
        pairs of tokens          sum over levels of (q * up) (k * down)^T * between, masked

    inward, outward: [B, H, C, D], or [B, H, C, 1] for a per-head gate. up, down: one such array for each level. between: [B, H,
    C, C], for a per-head gate only. before: the factors of what reads the state before each token's own decay: row i has
    G_{i-1} in the place of G_i. These have no `outward`; `before` is None where nothing reads so.
    """

    inward: Array | None = None
    outward: Array | None = None
    up: tuple[Array | None, ...] = (None,)
    down: tuple[Array | None, ...] = (None,)
    between: Array | None = None
    before: "Factors | None" = None

    @property
    def erasing(self) -> "Factors":
        """Return the factors of the rows of erase vectors: `before` if there is one, else this `Factors` itself."""
        return self if self.before is None else self.before


def sums(matrix: np.ndarray, x: Float[Array, "B H C D"]) -> Float[Array, "B H I D"]:
    """Return matrix @ x for each sequence and head. matrix: [I, C].

    The matrix is copied for each sequence and head, so that the product is a batched one, which XLA runs without transposes. If
    the matrix is square with an even number of at least 64 rows, and each quarter off the diagonal is constant, only the
    quarters on the diagonal are multiplied.
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
    """Return the matrix, or stack of matrices, once for each sequence and head of x, in the dtype of x: [B, H,
    *matrix.shape]."""
    return jnp.broadcast_to(jnp.asarray(matrix, x.dtype), (*x.shape[:2], *matrix.shape))


def fast(g: Geometry, gates: Float[Array, "B H C D"] | None, before: bool = False) -> Factors:
    """Compute the factors of e^{G_i - G_j} = e^{M_i} e^{-M_j}, where M is G minus G at the chunk's middle.

    gates: log decays, or None for no decay. The form needs two exponentials per element. It is exact while |M|, summed over the
    rows' and the columns' gates, is at most `fast_limit`: no factor, and no product of a row's and a column's factor, then
    overflows or underflows. before: whether the result also has the factors before each token's own decay.
    """
    if gates is None:
        return Factors()
    middle = sums(g.middle, gates)
    up, down = jnp.exp(middle), jnp.exp(-middle)
    enter = jnp.exp(gates[:, :, g.begin] - middle[:, :, g.begin])[:, :, None]
    leave = up[:, :, g.end][:, :, None]
    factors = Factors(up * enter, down * leave, (up,), (down,))
    if not before:
        return factors
    up = jnp.exp(sums(g.middle_before, gates))
    return factors._replace(before=Factors(up * enter, None, (up,), (down,)))


def max_abs_cumsum(g: Geometry, gates: Float[Array, "B H C D"]) -> Array:
    """Return an upper bound of |M| of `fast`, a scalar: the largest sum of |gates| over either half of the chunk."""
    half = g.size // 2 if g.begin == 0 else g.size - g.size // 2
    return jnp.maximum(jnp.abs(gates[:, :, :half]).sum(2), jnp.abs(gates[:, :, half:]).sum(2)).max()


def fast_limit(dtype) -> float:
    """Return the largest |M| for which `fast` is exact: in float32 the FAST_LIMIT of `common.limits`, in float64 500, as
    float64 ends at e^709."""
    return FAST_LIMIT if dtype == jnp.float32 else 500.0


def exact(g: Geometry, gates: Float[Array, "B H C D"] | None, with_self: bool, before: bool = False) -> Factors:
    """Compute the factors of e^{G_i - G_j} = e^{G_i - R} e^{R - G_j}, where the reference R lies between tokens j and i.

    gates: log decays, or None for no decay. No exponent is positive for gates <= 0. Repeated halving finds a reference for
    every pair: two tokens in different halves of a block share the block's middle. There are log2(C) levels with one
    exponential per element each. `with_self` adds a level without factors, for the pair of each token with itself. before:
    whether the result also has the factors before each token's own decay.
    """
    levels, self_level = len(g.halvings), (None,) * with_self
    if gates is None:
        return Factors(up=(None,) * levels + self_level, down=(None,) * levels + self_level)
    stacked = np.concatenate([g.prefix, g.suffix, *(matrix for matrix, _ in g.halvings)])
    inward, outward, *pairs = jnp.split(jnp.exp(sums(stacked, gates)), levels + 2, axis=2)
    pairs = (*pairs, *self_level)
    factors = Factors(inward, outward, pairs, pairs)
    if not before:
        return factors
    stacked = np.concatenate([g.before, *g.halvings_before])
    inward, *up = jnp.split(jnp.exp(sums(stacked, gates)), levels + 1, axis=2)
    return factors._replace(before=Factors(inward, None, (*up, *self_level), pairs))


def per_head(g: Geometry, gates: Float[Array, "B H C 1"], before: bool = False) -> Factors:
    """Compute the factors of a per-head gate: e^{G_i - G_j} is a matrix [B, H, C, C], exact for all gates.

    Each entry (i, j) is the exponential of a separate sum, over the tokens after j through i. before: whether the result also
    has the factors before each token's own decay, whose sums are over the tokens between j and i.
    """
    inward, outward = jnp.split(jnp.exp(sums(np.concatenate([g.prefix, g.suffix]), gates)), 2, axis=2)
    between = jnp.exp(sums(g.prefix, jnp.where(g.earlier, gates, 0)))
    factors = Factors(inward, outward, between=between)
    if not before:
        return factors
    between = jnp.exp(sums(g.before, jnp.where(g.earlier, gates, 0)))
    return factors._replace(before=Factors(jnp.exp(sums(g.before, gates)), between=between))


def edges(g: Geometry, gates: Float[Array, "B H C D"] | None) -> Factors:
    """Return the factor `outward` alone, which `added` needs: the decay from each token to the end of the chunk. It is exact
    for all gates, with one exponential per element. gates: log decays, or None for no decay."""
    return Factors() if gates is None else Factors(outward=jnp.exp(sums(g.suffix, gates)))


def times(x: Array, factor: Array | None) -> Array:
    """Return x * factor; x itself for None."""
    return x if factor is None else x * factor


def added(k, v, key: Factors, value: Factors) -> Float[Array, "B H K V"]:
    """Compute what the tokens of a chunk add to the state after it: (k * outward)^T (v * outward).

    With k and v swapped, and `key` and `value` swapped, the result is the transpose.
    """
    return matmul(times(k, key.outward).mT, times(v, value.outward))


class StateDecay(NamedTuple):
    """Hold the decay of a state over a chunk, as the sum base + rest. Where |log| < 0.5, base is 1 and rest is e^log - 1.

    A float32 number close to 1 holds few digits of its distance to 1. For 64 gates of -4e-8, the logarithm of the rounded decay
    e^-2.6e-6 is wrong by up to 1%. Equal gates round to the same decay at every chunk, so the error grows with the number of
    chunks. `rest` holds all digits of e^log - 1.
    """

    base: Array
    rest: Array

    @classmethod
    def of(cls, log: Array) -> "StateDecay":
        """Return the decay e^log."""
        is_mild = jnp.abs(log) < 0.5
        return cls(jnp.where(is_mild, 1, jnp.exp(log)), jnp.where(is_mild, jnp.expm1(log), 0))

    def times(self, other: "StateDecay") -> "StateDecay":
        """Return the product of two decays."""
        return StateDecay(self.base * other.base, self.rest * other.base + other.rest * (self.base + self.rest))


def state_decay(*logs: Array | None) -> StateDecay | None:
    """Return the decay e^(sum of logs), where None is a log of 0; None if all are None. The shape of each log broadcasts with
    that state: [B, H, K, 1] or [B, H, 1, V], for example."""
    present = [StateDecay.of(log) for log in logs if log is not None]
    return functools.reduce(StateDecay.times, present) if present else None


class State(NamedTuple):
    """Hold a state as the sum high + low. `low` is the rounding error of `high`, so errors do not grow with the tokens."""

    high: Float[Array, "B H K V"]
    low: Float[Array, "B H K V"]

    @classmethod
    def of(cls, high: Array) -> "State":
        """Return the state `high`, without a rounding error."""
        return cls(high, jnp.zeros_like(high))

    def advance(self, decay: StateDecay | None, added: Array) -> "State":
        """Return the state after a chunk: decay * S + added. decay: None for 1."""
        scaled, change = self.high, self.low + added
        if decay is not None:
            scaled, change = scaled * decay.base, scaled * decay.rest + (self.low * decay.base + added)
        high = scaled + change
        return State(high, change - (high - scaled))


def forward(S, q, k, v, key: Factors, value: Factors, masks):
    """Compute the outputs [B, H, C, V] of a chunk from the state S [B, H, K, V] before it and the pairs of tokens in `masks`.

    q: [B, H, C, K], multiplied by the scale. k: [B, H, C, K]. v: [B, H, C, V]. masks: [C, C] each, one per level of the factors.
    """
    o = times(matmul(times(q, key.inward), S), value.inward)
    for up, down, up_v, down_v, mask in zip(key.up, key.down, value.up, value.down, masks, strict=True):
        # [B, H, C, C]
        pairs = jnp.where(mask, times(matmul(times(q, up), times(k, down).mT), key.between), 0)
        o += times(matmul(pairs, times(v, down_v)), up_v)
    return o


def backward(S, dS, q, k, v, do, key: Factors, value: Factors, masks):
    """Compute the gradient of one chunk from S before the chunk and dS = dL/dS after it.

    S, dS: [B, H, V, K], transposed, so that three of the four products with them need no transposition.
    q, k: [B, H, C, K]. v, do: [B, H, C, V]. `masks` excludes the pair of a token with itself.

    Returns (d_added, dq, dk, dv). d_added [B, H, V, K] is what the chunk adds to dL/dS before it. dq, dk and dv are pairs: the
    term of each token's pair with itself, and all other terms. The first term does not depend on the gates, so the gates'
    gradient is formed without it. Otherwise its rounding error would exceed that gradient where the decay is strong.
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
    self_pairs, d_self_pairs = total(q * k, 3)[..., None], total(do * v, 3)[..., None]
    return d_added, (d_self_pairs * k, dq), (d_self_pairs * q, dk), (self_pairs * do, dv)


def log_gradient(
    g: Geometry,
    terms: Float[Array, "B H C D"],
    edge: Float[Array, "B H D"],
    own: Array | None = None,
    *,
    per_head: bool,
) -> Array:
    """Compute dg_t = <S, dS>_{before the chunk} - sum over earlier s in the chunk of (q_s dq_s - k_s dk_s), [B, H, C, D or 1].

    terms: q_s dq_s - k_s dk_s for every token. edge: S dS before the chunk, summed over the other side of the state. For
    per-value gates, o and v take the places of q and k. own: [B, H, C, D], the term e_t de_t of token t itself, where e reads
    the state before the token's decay; it is subtracted too. None for no such term. per_head: whether the gradient is summed
    over D.

    In the sum, the pairs of tokens that do not span t cancel. It starts again at every chunk, so its rounding error does not
    grow with T.
    """
    if per_head:
        terms, edge = total(terms, 3)[..., None], edge.sum(2, keepdims=True)
        own = None if own is None else total(own, 3)[..., None]
    gradient = edge[:, :, None] - sums(g.before, terms)
    return gradient if own is None else gradient - own

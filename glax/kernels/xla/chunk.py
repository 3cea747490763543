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

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The constant matrices of a chunk of `size` rows, all [C, C], and the rows where the walk begins and ends.

    prefix, suffix: row i sums the gates up to and including token i, and behind it; before: those before token i.
    middle:         row i sums the gates from the middle token to i, negative before it.
    earlier:        the pairs (i, j) with j before i.
    halvings:       (sums, mask) for each halving of the chunk into blocks. The mask holds the pairs (i, j) in the later
                    and the earlier half of the same block; row i sums the gates between its token and the block's middle.
    """

    size: int
    prefix: np.ndarray
    suffix: np.ndarray
    before: np.ndarray
    middle: np.ndarray
    earlier: np.ndarray
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
        halvings=tuple((turned(sums), turned(mask)) for sums, mask in halvings),
        begin=size - 1 if reverse else 0,
        end=0 if reverse else size - 1,
    )


class Factors(NamedTuple):
    """What the gates of one side of the state (its rows with q and k, or its columns with o and v) multiply; None is 1.

        q reads the state:   (q * inward) (enter * S)         pairs:   sum over levels of (q * up) (k * down)^T, masked
        the state goes on:   through * S + leave * (k * outward)^T v

    inward, outward, up, down: [B, H, C, D], or [..., 1] for a gate per head; enter, leave, through: [B, H, 1, D].
    """

    inward: Array | None = None
    enter: Array | None = None
    outward: Array | None = None
    leave: Array | None = None
    through: Array | None = None
    up: tuple[Array | None, ...] = (None,)
    down: tuple[Array | None, ...] = (None,)


def sums(matrix: np.ndarray, gates: Float[Array, "B C H D"]) -> Float[Array, "B H C D"]:
    B, C, H, D = gates.shape
    total = matmul(jnp.asarray(matrix, gates.dtype), gates.reshape(B, C, H * D))
    return total.reshape(B, -1, H, D).transpose(0, 2, 1, 3)


def fast(g: Geometry, gates: Float[Array, "B C H D"] | None, middle: Float[Array, "B H C D"] | None) -> Factors:
    """e^{G_i - G_j} = e^{M_i} e^{-M_j} with M = G minus G at the chunk's middle: two exponentials an element.

    Exact as long as |M|, the rows' and the columns' together, stays within `fast_limit`: no factor then overflows or
    vanishes, nor does the product of a row's and a column's.
    """
    if gates is None:
        return Factors()
    up, down = jnp.exp(middle), jnp.exp(-middle)
    first = gates[:, g.begin, :, None]
    enter = jnp.exp(first - middle[:, :, g.begin : g.begin + 1])
    leave = up[:, :, g.end : g.end + 1]
    return Factors(up, enter, down, leave, enter * leave, (up,), (down,))


def fast_limit(dtype) -> float:
    """e^60 leaves float32 (largest: e^88) twelve digits for q and k themselves."""
    return 60.0 if dtype == jnp.float32 else 500.0


def exact(g: Geometry, gates: Float[Array, "B C H D"] | None) -> Factors:
    """e^{G_i - G_j} = e^{G_i - R} e^{R - G_j} with a reference R between j and i: for gates <= 0 no exponent is positive.

    Halving the chunk again and again finds a reference for every pair: pairs in different halves of a block share its
    middle. log2(C) levels, one exponential an element and level.
    """
    levels = len(g.halvings)
    if gates is None:
        return Factors(up=(None,) * levels, down=(None,) * levels)
    stacked = np.concatenate([g.prefix, g.suffix, *(matrix for matrix, _ in g.halvings)])
    inward, outward, *pairs = jnp.split(jnp.exp(sums(stacked, gates)), levels + 2, axis=2)
    return Factors(inward, None, outward, None, inward[:, :, g.end : g.end + 1], tuple(pairs), tuple(pairs))


def edges(g: Geometry, gates: Float[Array, "B C H D"] | None) -> Factors:
    """The factors that `advance` needs, exact for every gate, for one exponential an element."""
    if gates is None:
        return Factors()
    total = jnp.exp(gates.sum(1))[:, :, None]
    return Factors(outward=jnp.exp(sums(g.suffix, gates)), through=total)


def times(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def rows(factor: Array | None) -> Array | None:
    """[B, H, 1, K] as a factor of the rows of a state [B, H, K, V]."""
    return None if factor is None else factor.mT


def advance(S, k, v, key: Factors, value: Factors):
    """The state after the chunk: through * S + leave * (k * outward)^T (v * outward)."""
    added = matmul(times(k, key.outward).mT, times(v, value.outward))
    kept = times(times(S, rows(key.through)), value.through)
    return kept + times(times(added, rows(key.leave)), value.leave)


def forward(S, q, k, v, key: Factors, value: Factors, masks):
    """The outputs [B, H, C, V] of a chunk that begins in state S [B, H, K, V], in two parts: own token, and the rest.

    q [B, H, C, K] holds the scale. The own token's part, (q_t . k_t) v_t, does not decay.
    """
    entered = times(times(S, rows(key.enter)), value.enter)
    earlier = times(matmul(times(q, key.inward), entered), value.inward)
    for up, down, up_v, down_v, mask in zip(key.up, key.down, value.up, value.down, masks, strict=True):
        # [B, H, C, C]
        pairs = jnp.where(mask, matmul(times(q, up), times(k, down).mT), 0)
        earlier += times(matmul(pairs, times(v, down_v)), up_v)
    return (q * k).sum(-1, keepdims=True) * v, earlier


def backward(S, dS, q, k, v, do, key: Factors, value: Factors, masks):
    """dL/dS before the chunk, from S before it and dS = dL/dS after it; and dq, dk, dv, each as (own token's part, rest).

    The own token's parts do not depend on the gates. Kept out of the gates' telescoped gradient, their rounding cannot
    drown it when decay is strong and all else is small.
    """
    entered = times(times(S, rows(key.enter)), value.enter)
    q_in, do_in = times(q, key.inward), times(do, value.inward)
    left = times(times(dS, rows(key.leave)), value.leave)
    dq = times(matmul(do_in, entered.mT), key.inward)
    dk = times(matmul(times(v, value.outward), left.mT), key.outward)
    dv = times(matmul(times(k, key.outward), left), value.outward)
    read = times(times(matmul(q_in.mT, do_in), rows(key.enter)), value.enter)
    dS = times(times(dS, rows(key.through)), value.through) + read
    for up, down, up_v, down_v, mask in zip(key.up, key.down, value.up, value.down, masks, strict=True):
        q_up, k_down, v_down, do_up = times(q, up), times(k, down), times(v, down_v), times(do, up_v)
        # [B, H, C, C]
        pairs = jnp.where(mask, matmul(q_up, k_down.mT), 0)
        d_pairs = jnp.where(mask, matmul(do_up, v_down.mT), 0)
        dq += times(matmul(d_pairs, k_down), up)
        dk += times(matmul(d_pairs.mT, q_up), down)
        dv += times(matmul(pairs.mT, do_up), down_v)
    # [B, H, C, 1]
    own, d_own = (q * k).sum(-1, keepdims=True), (do * v).sum(-1, keepdims=True)
    return dS, (d_own * k, dq), (d_own * q, dk), (own * do, dv)

"""How the state passes from chunk to chunk, for `at_once`: in a loop, or, of a head with one decay, as one product.

Forwards this is the state S, of which each chunk adds k~^T v, left at the chunk's middle; against time D, its gradient, of
q~^T do.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax.kernels.xla.chunk import matmul, outer, times

# ---- in a loop, all heads ---------------------------------------------------------------------------------------------


def pass_on(first, through, weights, added, against: bool):
    """X' = through_c X + weight_c added_c over the chunks c in order, or `against` it, from X = first.

    Returns before, after, last: of each group the X before and behind each chunk, [B, n, H, K, V], and X behind them all.
    """
    before, after, order = [], [], slice(None, None, -1 if against else 1)
    for through, weight, new in list(zip(through, weights, added, strict=True))[order]:  # noqa: B020
        first, found = within_group(first, through, times(new, weight), against)
        earlier, later = found[:, :-1], found[:, 1:]
        before.append(later if against else earlier)
        after.append(earlier if against else later)
    return before[order], after[order], first


def within_group(X, through, added, against: bool):
    """The same for one group, in the array that holds what is added: X behind the group, and [B, n + 1, H, K, V].

    In a loop, for XLA would form a chunk's X from all before it, again for each.
    """
    n = added.shape[1]
    found = jnp.concatenate([added, X[:, None]] if against else [X[:, None], added], axis=1)

    def step(i, carry):
        X, found = carry
        c = n - 1 - i if against else i
        at = c if against else c + 1
        of = lambda factor: None if factor is None else lax.dynamic_index_in_dim(factor, c, 1, keepdims=False)  # noqa: E731
        X = times(X, of(through)) + lax.dynamic_index_in_dim(found, at, 1, keepdims=False)
        return X, lax.dynamic_update_index_in_dim(found, X, at, 1)

    return lax.fori_loop(0, n, step, (X, found))


# ---- as one product, heads of one decay -------------------------------------------------------------------------------


class Links(NamedTuple):
    """How the chunks of each head are linked, for groups of heads: what decays leave of a state.

    between [B, H, n, n]: [c, d] of what chunk d adds, at the middle of chunk c; 0 unless d is before c.
    first, last [B, H, n, 1]: of the initial state, at the middle of c; of what d adds, at the end. whole [B, H, 1, 1]: from the
    first to the last.
    """

    between: Array
    first: Array
    last: Array
    whole: Array


def links(enter: Float[Array, "B n H 1"], leave: Float[Array, "B n H 1"], reverse: bool) -> Links:
    """From the log decays of each chunk before and behind its middle. Each exponent is a sum, never a difference of two."""
    enter, leave = (x[..., 0].transpose(0, 2, 1) for x in (enter, leave))
    n = enter.shape[2]
    c, d, x = np.mgrid[:n, :n, :n] * (-1 if reverse else 1)
    inside, before = (d < x) & (x < c), (x < c)[:, 0]
    across = lambda matrix: jnp.einsum(  # noqa: E731
        "px,bhx->bhp", jnp.asarray(matrix, enter.dtype), enter + leave, precision=lax.Precision.HIGHEST
    )
    past = across(inside.reshape(n * n, n)).reshape(*enter.shape, n)
    between = jnp.where((d < c)[..., 0], jnp.exp(past + enter[..., None] + leave[:, :, None]), 0)
    first, last = jnp.exp(enter + across(before)), jnp.exp(leave + across(before.T))
    return Links(between, first[..., None], last[..., None], jnp.exp((enter + leave).sum(2))[..., None, None])


def add_up(links: Links, X: Float[Array, "B H K V"], added: Float[Array, "B H*n K V"], against: bool):
    """X at the middle of each chunk of a group of heads, [B, H * n, K, V], and behind them all, from X before them."""
    B, H, n, _ = links.first.shape
    terms, X = added.reshape(B, H, n, -1), X.reshape(B, H, 1, -1)
    # XLA drops zeros that are chosen among by a constant, but not a product with them.
    plus = lambda x, factor: jnp.where((X != 0).any(), x + factor * X, x)  # noqa: E731
    first, last = (links.last, links.first) if against else (links.first, links.last)
    middle = outer(links.between, terms) if against else matmul(links.between, terms)
    middle, behind = plus(middle, first), plus(outer(last, terms), links.whole)
    return middle.reshape(added.shape), behind.reshape(B, H, *added.shape[2:])

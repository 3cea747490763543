"""How the state passes from chunk to chunk, for `at_once`: in a loop, or, of a head with one decay, as one product.

Forwards this is the state S, of which each chunk adds k^T v, decayed to the chunk's end; against time D, its gradient, of
q^T do, decayed to the chunk's begin. So all that passes are states as the recurrence has them: where a decay between chunks is 0,
what it would multiply is gone. From middle to middle decays are of up to e^-120, which is 0 in float32, and what is left at a
middle may be e^60 too large, so that a product of the two would lose tokens that count.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.kernels.xla.chunk_math import State, matmul, outer, state_decay

# ---- in a loop, all heads ---------------------------------------------------------------------------------------------


def pass_on(first, logs, added, against: bool):
    """X' = e^{log_c} X + added_c over the chunks c in order, or `against` it, from X = first.

    Returns before, after, last: of each group the X before and behind each chunk, [B, n, H, K, V], and X behind them all.
    """
    X, before, after, order = State.of(first), [], [], slice(None, None, -1 if against else 1)
    for log, new in list(zip(logs, added, strict=True))[order]:
        X, found = within_group(X, log, new, against)
        earlier, later = found[:, :-1], found[:, 1:]
        before.append(later if against else earlier)
        after.append(earlier if against else later)
    return before[order], after[order], X.high


def within_group(X: State, log, added, against: bool):
    """The same for one group, in the array that holds what is added: X behind the group, and [B, n + 1, H, K, V].

    In a loop, for XLA would form a chunk's X from all before it, again for each.
    """
    n, decay = added.shape[1], state_decay(log)
    found = jnp.concatenate([added, X.high[:, None]] if against else [X.high[:, None], added], axis=1)

    def step(i, carry):
        X, found = carry
        c = n - 1 - i if against else i
        at = c if against else c + 1
        own = jax.tree.map(lambda factor: lax.dynamic_index_in_dim(factor, c, 1, keepdims=False), decay)
        X = X.behind(own, lax.dynamic_index_in_dim(found, at, 1, keepdims=False))
        return X, lax.dynamic_update_index_in_dim(found, X.high, at, 1)

    return lax.fori_loop(0, n, step, (X, found))


# ---- as one product, heads of one decay -------------------------------------------------------------------------------


class Links(NamedTuple):
    """How the chunks of each head are linked, for groups of heads: what decays leave of a state.

    between [B, H, n, n]: [c, d] of what chunk d adds, before chunk c; 0 unless d is before c.
    first, last [B, H, n, 1]: of the initial state, before c; of what d adds, at the end. whole [B, H, 1, 1]: from the first to
    the last. through [B, H * n, 1, 1]: from before a chunk to behind it.
    """

    between: Array
    first: Array
    last: Array
    whole: Array
    through: Array


def links(log: Float[Array, "B n H"], reverse: bool) -> Links:
    """From the log decay of each chunk. Each exponent is a sum, never a difference of two."""
    log = log.transpose(0, 2, 1)
    n = log.shape[2]
    c, d, x = np.mgrid[:n, :n, :n] * (-1 if reverse else 1)
    inside, before = (d < x) & (x < c), (x < c)[:, 0]
    across = lambda matrix: jnp.einsum(  # noqa: E731
        "px,bhx->bhp", jnp.asarray(matrix, log.dtype), log, precision=lax.Precision.HIGHEST
    )
    past = across(inside.reshape(n * n, n)).reshape(*log.shape, n)
    between = jnp.where((d < c)[..., 0], jnp.exp(past), 0)
    first, last = jnp.exp(across(before)), jnp.exp(across(before.T))
    through = jnp.exp(log).reshape(log.shape[0], -1, 1, 1)
    return Links(between, first[..., None], last[..., None], jnp.exp(log.sum(2))[..., None, None], through)


def add_up(links: Links, X: Float[Array, "B H K V"], added: Float[Array, "B H*n K V"], against: bool):
    """X before each chunk of a group of heads (`against`: behind it), [B, H * n, K, V], and behind them all, from the first X."""
    B, H, n, _ = links.first.shape
    terms, X = added.reshape(B, H, n, -1), X.reshape(B, H, 1, -1)
    # XLA drops zeros that are chosen among by a constant, but not a product with them.
    plus = lambda x, factor: jnp.where((X != 0).any(), x + factor * X, x)  # noqa: E731
    first, last = (links.last, links.first) if against else (links.first, links.last)
    each = outer(links.between, terms) if against else matmul(links.between, terms)
    each, behind = plus(each, first), plus(outer(last, terms), links.whole)
    return each.reshape(added.shape), behind.reshape(B, H, *added.shape[2:])

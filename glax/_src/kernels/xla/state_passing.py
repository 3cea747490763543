"""Pass the state from chunk to chunk for `chunk_parallel`: in a loop, or in one matrix product for per-head gates.

Chunk c decays a state by e^{log_c} and adds a [K, V] matrix to it:

    X' = e^{log_c} X + added_c

In the forward, X is the state S, and `added` is k^T v decayed to the end of the chunk. In the gradient, X is D = dL/dS, the
chunks come in the opposite order, and `added` is q^T do decayed to the beginning of the chunk.

X is always the state at a chunk's edge, as the recurrence defines it. It is never the state at a chunk's middle: decays between
two middles reach e^-120, which is 0 in float32, while a factor at a middle may be too large by e^60. Their product would lose
tokens that matter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glax._src.kernels.xla.chunk_math import State, matmul, outer, state_decay

# ---- in a loop, for all gates -------------------------------------------------------------------------------------------


def scan_states(first, logs, added, descending: bool):
    """Compute X' = e^{log_c} X + added_c over all chunks c, from X = first [B, H, K, V].

    logs and added: one array per group of n chunks, [B, n, H, K or 1, 1] and [B, n, H, K, V].
    descending: from the last chunk to the first.

    Returns (before, after, last). `before` and `after` hold, for each group, X before and after each chunk, [B, n, H, K, V].
    `last` is X after all chunks, [B, H, K, V].
    """
    X, before, after, order = State.of(first), [], [], slice(None, None, -1 if descending else 1)
    for log, new in list(zip(logs, added, strict=True))[order]:
        X, found = scan_group(X, log, new, descending)
        earlier, later = found[:, :-1], found[:, 1:]
        before.append(later if descending else earlier)
        after.append(earlier if descending else later)
    return before[order], after[order], X.high


def scan_group(X: State, log, added, descending: bool):
    """Compute the recurrence of `scan_states` over one group of n chunks, from the state X. log: [B, n, H, K or 1, 1]. added:
    [B, n, H, K, V].

    Returns X after the group, a `State`, and X at all n + 1 edges of its chunks, [B, n + 1, H, K, V], in the array that held
    `added`. A loop computes these, because XLA would otherwise recompute all earlier X for each chunk.
    """
    n, decay = added.shape[1], state_decay(log)
    found = jnp.concatenate([added, X.high[:, None]] if descending else [X.high[:, None], added], axis=1)

    def step(i, carry):
        X, found = carry
        c = n - 1 - i if descending else i
        at = c if descending else c + 1
        factor_of_chunk = jax.tree.map(lambda factor: lax.dynamic_index_in_dim(factor, c, 1, keepdims=False), decay)
        X = X.advance(factor_of_chunk, lax.dynamic_index_in_dim(found, at, 1, keepdims=False))
        return X, lax.dynamic_update_index_in_dim(found, X.high, at, 1)

    return lax.fori_loop(0, n, step, (X, found))


# ---- in one product, for per-head gates -------------------------------------------------------------------------------


class ChunkDecays(NamedTuple):
    """Hold the decays between the n chunks of each of H heads. A chunk's `added` is the matrix that it adds to the state.

    between  [B, H, n, n]        entry [c, d]: from the end of chunk d to the beginning of chunk c; 0 unless d is before c
    first    [B, H, n, 1]        from the initial state to the beginning of each chunk
    last     [B, H, n, 1]        from the end of each chunk to the final state
    whole    [B, H, 1, 1]        from the initial state to the final state
    through  [B, H * n, 1, 1]    from the beginning of each chunk to its end
    """

    between: Array
    first: Array
    last: Array
    whole: Array
    through: Array


def chunk_decays(log: Float[Array, "B n H"], reverse: bool) -> ChunkDecays:
    """Return the decays between chunks. log: the log decay through each chunk. Each exponent is a sum of log decays, never a
    difference of sums."""
    log = log.transpose(0, 2, 1)
    n = log.shape[2]
    c, d, x = np.mgrid[:n, :n, :n] * (-1 if reverse else 1)
    inside, before = (d < x) & (x < c), (x < c)[:, 0]

    def across(matrix: np.ndarray) -> Array:
        """Sum the log decays that each row of `matrix` [P, n] selects: [B, H, P]."""
        return jnp.einsum("px,bhx->bhp", jnp.asarray(matrix, log.dtype), log, precision=lax.Precision.HIGHEST)

    past = across(inside.reshape(n * n, n)).reshape(*log.shape, n)
    between = jnp.where((d < c)[..., 0], jnp.exp(past), 0)
    first, last = jnp.exp(across(before)), jnp.exp(across(before.T))
    through = jnp.exp(log).reshape(log.shape[0], -1, 1, 1)
    return ChunkDecays(between, first[..., None], last[..., None], jnp.exp(log.sum(2))[..., None, None], through)


def apply_chunk_decays(decays: ChunkDecays, X: Float[Array, "B H K V"], added: Float[Array, "B Hn K V"], adjoint: bool):
    """Compute X before each chunk from the first X, in one batched product; with `adjoint`, X after each chunk. added: what
    each chunk adds to X, in the order (head, chunk).

    Returns X of each chunk, [B, H * n, K, V], and X after all chunks, [B, H, K, V]. With `adjoint` the chunks come in the
    opposite order, as in the gradient.
    """
    B, H, n, _ = decays.first.shape
    terms, X = added.reshape(B, H, n, -1), X.reshape(B, H, 1, -1)

    def plus(x: Array, factor: Array) -> Array:
        # A select lets XLA drop the product where X is a constant 0; it would compute x + factor * 0.
        return jnp.where((X != 0).any(), x + factor * X, x)

    first, last = (decays.last, decays.first) if adjoint else (decays.first, decays.last)
    each = outer(decays.between, terms) if adjoint else matmul(decays.between, terms)
    each, behind = plus(each, first), plus(outer(last, terms), decays.whole)
    return each.reshape(added.shape), behind.reshape(B, H, *added.shape[2:])

"""Choose the kernels of a recurrence with an erasure. Rewrite `along` as two rows a token for the kernels that have no `along`.

With per-key gates and heads up to 64 wide the kernels of `delta_along` run `along`. In the others a token of
S = S_bar + k (w * v)^T - b (S_bar^T e)^T, with b the array `along`, is two rows of the delta rule:

    S_1 = S_bar - b (S_bar^T e)^T      key b, value 0, erase vector e, the token's decay
    S_2 = S_1 + k (w * v)^T            key k, value v, erase vector 0, no decay, and the token's query
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, spread_heads
from glax._src.kernels.triton.config import GradientConfig, TritonChunkedConfig, is_direct
from glax._src.kernels.triton.delta_along_chunked import along_chunked, along_chunked_vjp
from glax._src.kernels.triton.delta_chunked import delta_chunked, delta_chunked_vjp


def interleaved(first: Array | None, second: Array | None, reverse: bool) -> Array:
    """Return [B, 2 * T, ...], the rows of two arrays [B, T, ...] in turn: for each token first the row of `first`, in scan
    order, then the row of `second`. None stands for zeros."""
    given = first if first is not None else second
    assert given is not None
    rows = [jnp.zeros_like(given) if x is None else x for x in (first, second)]
    x = jnp.stack(rows[::-1] if reverse else rows, axis=2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def two_rows(r: Recurrence) -> Recurrence:
    """Return r with `along` replaced by two rows of the delta rule for each token, as the module states: T becomes 2 T, and
    boundaries are doubled."""
    erasure, decay, H = r.erasing, r.decay, r.num_heads
    along, write = erasure.along, erasure.write
    assert along is not None
    if decay.constant is not None:  # would decay both rows
        decay = Decay(head=r.by_token(decay.constant))
    k = spread_heads(r.k, H)
    return r.replace(
        q=interleaved(None, r.q, r.reverse),
        k=interleaved(along.astype(k.dtype), k, r.reverse),
        v=interleaved(None, r.v, r.reverse),
        decay=jax.tree.map(lambda x: interleaved(x, None, r.reverse), decay),
        erasure=erasure.replace(
            erase=interleaved(erasure.erase, None, r.reverse),
            write=None if write is None else interleaved(None, write, r.reverse),
            along=None,
        ),
        boundaries=None if r.boundaries is None else 2 * r.boundaries,
    )


def forward(r: Recurrence, config: TritonChunkedConfig) -> Outputs:
    """Compute the outputs and final states of a recurrence with an erasure."""
    if r.erasing.along is None:
        return delta_chunked(r, config)
    if is_direct(r):
        return along_chunked(r, config)
    output, final = delta_chunked(two_rows(r), config)
    return Outputs(output[:, 0 if r.reverse else 1 :: 2], final)


def gradient(r: Recurrence, d_output, d_final, config: GradientConfig) -> Recurrence:
    """Compute the gradient of every input of a recurrence with an erasure."""
    if r.erasing.along is None:
        return delta_chunked_vjp(r, d_output, d_final, config)
    if is_direct(r):
        return along_chunked_vjp(r, d_output, d_final, config)
    _, pull = jax.vjp(lambda x: two_rows(x.with_integers(r)).floats, r.floats)
    (d,) = pull(delta_chunked_vjp(two_rows(r), interleaved(None, d_output, r.reverse), d_final, config, per_token=2))
    return d

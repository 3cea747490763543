"""Compute softmax attention of rows that each read an interval of keys, at the cost of the intervals.

A row that is not finite makes NaN of the rows that read it, and of no other: scores, weights and their gradients are selected
by the intervals, for 0 * NaN is NaN. The products sum over finite numbers alone: a row that is not finite is 0 in them, and its
scores are NaN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.backend import Backend
from glax._src.core.recurrence import aligned, bucket, is_symbol, varying_like
from glax._src.core.stored_states import rows_of
from glax._src.kernels.common.softmax import ChosenKeys, Intervals, SoftmaxOperands, sequence_begins

ROWS, KEYS = 128, 256  # rows and keys whose scores are formed together
STEP_KEYS, STEP_KEYS_GPU = 512, 4096  # keys that a step reads together; a GPU waits for its host between two parts
LOWEST = -2e38  # the score of a key outside of the interval


class ReadMask(NamedTuple):
    """Hold which of all S keys each row reads, [blocks, B, rows, S], or [B, rows, S] for one block. A ReadMask takes the place
    of `Intervals` where all keys are read together, and so has no `bounds`."""

    is_read: Bool[Array, "*rows S"]

    def hold(self, keys: Int[Array, "S"]) -> Bool[Array, "*rows S"]:
        """Return whether each row reads each of the keys, which is the field `is_read`.

        keys: the indices 0 to S - 1 in this order. Their values are not read.
        """
        return self.is_read


Read = Intervals | ChosenKeys | ReadMask  # which keys rows read

# ---- how rows are divided into blocks ----------------------------------------------------------------------------------


def whole(operands: SoftmaxOperands, scale: float) -> Float[Array, "B T Hq V"]:
    """Return softmax(scale q k^T) v over the keys that each row reads, by one product of all rows and keys.

    Its gradients of all orders are defined in reverse mode, and none in forward mode. A row that reads nothing is 0.
    """
    q, k, v = operands[:3]
    return of_one_block(None, q, k, v, operands.keys_read, scale)


def attend_step(
    q: Float[Array, "B 1 Hq D"],
    k: Float[Array, "P S Hk D"],
    v: Float[Array, "P S Hk V"] | None,
    intervals: Intervals,
    scale: float | None,
    *,
    width: int,
    slots: Int[Array, "B"] | None = None,
) -> Float[Array, "B 1 Hq V"]:
    """Return softmax(scale q k^T) v for one query of each row of B, over the keys of its interval in caches of any dtype, in
    q's dtype.

    Keys are read in parts, from the lowest to the highest that any row reads, so that the cost does not depend on S. intervals:
    [B, 1]. scale: None for 1 / sqrt(D). width: V. v: None for values that are the first `width` channels of the keys. slots:
    the row of k and v for each row of q; P for none, which gives 0. No other slot is repeated. None if row b of q reads row b.
    """
    scale, (B, P) = q.shape[-1] ** -0.5 if scale is None else scale, (q.shape[0], k.shape[0])
    if slots is None or is_symbol(B) or is_symbol(P) or 2 * B < P:
        return step(scale, width, q, k, v, intervals, slots)
    # Rows in the order of the pool: a copy of its keys in the order of the rows would take longer.
    first, last, ordered = (
        in_pool(x, slots, P, fill) for x, fill in ((intervals.first, 0), (intervals.last, -1), (q, 0))
    )
    return rows_of(step(scale, width, ordered, k, v, Intervals(first, last), None), slots)


def in_pool(x: Array, slots: Int[Array, "B"], size: int, fill: int) -> Array:
    """Return x [B, ...] in the order of a pool: an array of `size` rows with x[b] at row slots[b], and `fill` in the other
    rows. A slot outside of the pool is dropped."""
    return jnp.full((size, *x.shape[1:]), fill, x.dtype).at[slots].set(x, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def step(scale: float, width: int, q, k, v, intervals: Intervals, slots: Array | None) -> Float[Array, "B 1 Hq V"]:
    """Return what `attend_step` does, where row b of q reads row slots[b] of the caches, or row b if slots is None. Keys are
    read in parts of STEP_KEYS or STEP_KEYS_GPU."""
    S, size = k.shape[1], STEP_KEYS_GPU if Backend.here() is Backend.GPU else STEP_KEYS
    size = None if is_symbol(S) or size >= S or k.size == 0 else size
    of_block = Intervals(intervals.first[None], intervals.last[None])
    return summed(size, scale, q[None], k, v, of_block, slots, width)[0][0]


def step_whole(scale: float, width: int, q, k, v, intervals: Intervals, slots: Array | None):
    """Return what `step` does, from copies of whole rows of the caches. JAX derives the gradient of `step` from this
    function."""
    k, v = part_of(k, v, slots, width, q.dtype, 0, k.shape[1])
    return of_one_block(None, q, k, v, intervals, scale)


def step_fwd(scale: float, width: int, *arrays):
    return step(scale, width, *arrays), arrays


def step_bwd(scale: float, width: int, arrays, d_o):
    q, k, v, intervals, slots = arrays
    _, pull = jax.vjp(lambda q, k, v: step_whole(scale, width, q, k, v, intervals, slots), q, k, v)
    return *pull(d_o), None, None


step.defvjp(step_fwd, step_bwd)


def part_of(k, v, slots: Array | None, width: int, dtype, begin, size: int) -> tuple[Array, Array]:
    """Return `size` keys and values from the key `begin` on, [B, size, Hk, D or V], in `dtype`: of the rows `slots` of the
    caches k and v, or for None of all rows. v: None if the values are the first `width` channels of the keys."""

    def read(x):
        if size == x.shape[1]:  # all keys, whose number may be a symbol
            return (x if slots is None else rows_of(x, slots)).astype(dtype)
        if slots is None:
            return jax.lax.dynamic_slice_in_dim(x, begin, size, 1).astype(dtype)
        keys = begin + jnp.arange(size)
        return x.at[slots[:, None], keys[None]].get(mode="fill", fill_value=0).astype(dtype)

    part = read(k)
    return part, part[..., :width] if v is None else read(v)


def of_one_block(size: int | None, q, k, v, intervals: Read, scale: float) -> Float[Array, "B T Hq V"]:
    """Return `attend_blocks` of one block with all rows: q [B, T, Hq, D], intervals of [B, T]."""
    o: Array = attend_blocks(size, scale, q[None], k, v, jax.tree.map(lambda x: x[None], intervals))
    return o[0]


def attend_masked(q, k, v, is_read: Bool[Array, "B T S"], scale: float | None) -> Float[Array, "B T Hq V"]:
    """Return softmax attention over the keys that each row reads, by one product of all rows and keys; 0 where a row reads
    none.

    q [B, T, Hq, D], k [B, S, Hk, D] and v [B, S, Hk, V] have one dtype. scale: None for 1 / sqrt(D). The gradient is defined in
    reverse mode only.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o: Array = attend_blocks(None, scale, q[None], k, v, ReadMask(is_read[None]))
    return o[0]


def in_blocks(operands: SoftmaxOperands, scale: float) -> Float[Array, "B T Hq V"]:
    """Return the same as `whole`, in blocks of ROWS rows. Each block reads only the keys from the lowest to the highest that
    one of its rows reads."""
    q, k, v = operands[:3]
    B, T = q.shape[:2]
    if is_small(T, k.shape[1]):
        return whole(operands, scale)
    blocks = -(-T // ROWS)

    def divided(x: Array, fill: int = 0) -> Array:
        x = jnp.pad(x, [(0, 0), (0, blocks * ROWS - T), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        return x.reshape(B, blocks, ROWS, *x.shape[2:]).swapaxes(0, 1)

    of_blocks = jax.tree.map(divided, operands.keys_read)._replace(last=divided(operands.last, -1))
    o: Array = attend_blocks(KEYS, scale, divided(q), k, v, of_blocks)
    return o.swapaxes(0, 1).reshape(B, blocks * ROWS, *o.shape[3:])[:, :T]


def by_sequence(operands: SoftmaxOperands, scale: float) -> Float[Array, "1 T Hq V"]:
    """Return the same as `whole` for operands with cuts, in blocks of rows of one sequence. Rows behind the last cut are 0."""
    q, k, v, cuts = *operands[:3], operands.cuts
    assert cuts is not None
    T, N = q.shape[1], cuts.shape[0] - 1
    if is_small(T, k.shape[1]):
        return whole(operands, scale)
    size = min(max(bucket(-(-T // N)), 16), ROWS)
    begins = sequence_begins(cuts, T, size)  # of the blocks, and T
    rows = begins[:-1, None] + jnp.arange(size)  # [blocks, size]
    is_own = rows < jnp.minimum(begins[1:, None], cuts[-1])
    rows = jnp.where(is_own, rows, 0)
    of_blocks = jax.tree.map(lambda x: x[0, rows][:, None], operands.keys_read)
    of_blocks = of_blocks._replace(last=jnp.where(is_own[:, None], of_blocks.last, -1))
    o: Array = attend_blocks(KEYS, scale, q[0, rows][:, None], k, v, of_blocks)
    places = jnp.arange(T)
    block = jnp.searchsorted(begins, places, side="right") - 1
    found = o[block, 0, places - begins[block]]
    return jnp.where((places < cuts[-1])[:, None, None], found, 0)[None]


def is_small(T: int, S: int) -> bool:
    """Return whether one product should form all T x S scores: they are few, or T or S is a symbol."""
    return is_symbol(T) or is_symbol(S) or T * S <= ROWS * KEYS


# ---- the blocks --------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_blocks(size: int | None, scale: float, q, k, v, intervals: Read) -> Float[Array, "blocks B rows Hq V"]:
    """Return the outputs of blocks of rows; a row that reads nothing is 0. q: [blocks, B, rows, Hq, D]. k, v: [B, S, Hk, D or
    V]. intervals: of [blocks, B, rows]. size: how many keys a block reads together; None for all. Given a size, only the first
    gradient is defined."""
    return attend_blocks_fwd(size, scale, q, k, v, intervals)[0]


def attend_blocks_fwd(size: int | None, scale: float, q, k, v, intervals: Read):
    q, k, v, intervals = aligned((q, k, v, intervals))
    o, log_total = summed(size, scale, q, k, v, intervals, None, v.shape[-1])
    return o, (q, k, v, intervals, o, log_total)


def summed(size: int | None, scale: float, q, k, v, intervals: Read, slots: Array | None, width: int):
    """Return the outputs [blocks, B, rows, Hq, V] in q's dtype, and the logarithms of the sums of exp(scores), [blocks, B, Hk,
    Hq / Hk, rows]. The output of a row that reads nothing is 0.

    size, q, intervals: as of `attend_blocks`. k, v: as there without `slots`, else the caches of `attend_step`, as are slots and
    width; v is None there where values are columns of k.
    """
    q, k, v, intervals, slots = aligned((q, k, v, intervals, slots))
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    read = functools.partial(part_of, k, v, slots, width, q.dtype)

    def of_block(_, block):
        q, intervals = block
        q = grouped(jnp.where(finite(q), q, jnp.nan), k.shape[2])

        def add(sums, _, k, v, seen):
            highest, total, weighted = sums
            if q.shape[3] == 1:  # the row of a step: what it does not read is selected away without a sum over channels
                v = jnp.where(seen[:, 0, 0, 0, :, None, None], v, 0)
            else:
                sound = finite(k) & finite(v)
                k, v = jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)
            scores = jnp.where(seen, product("bhgtd,bshd->bhgts", q, k, dtype) * scale, LOWEST)
            new = jnp.maximum(highest, scores.max(-1, initial=LOWEST))
            weights, factor = jnp.where(seen, jnp.exp(scores - new[..., None]), 0), jnp.exp(highest - new)
            read = product("bhgts,bshv->bhgtv", weights.astype(v.dtype), v, dtype)
            return new, total * factor + weights.sum(-1), weighted * factor[..., None] + read

        start = (
            jnp.full(q.shape[:-1], LOWEST, dtype),
            *(jnp.zeros(x, dtype) for x in (q.shape[:-1], (*q.shape[:-1], width))),
        )
        highest, total, weighted = over_keys(size, add, varying(start, q), k.shape[1], read, intervals)
        total = jnp.where(total > 0, total, 1)
        o = ungrouped(weighted / total[..., None]).astype(q.dtype)
        return None, (o, highest + jnp.log(total))

    _, (o, log_total) = over_blocks(of_block, None, (q, intervals))
    return o, log_total


def attend_blocks_bwd(size: int | None, scale: float, saved, d_o):
    q, k, v, intervals, o, log_total = saved
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    read = functools.partial(part_of, k, v, None, v.shape[-1], q.dtype)

    def of_block(sums, block):
        q, intervals, o, log_total, d_o = block
        sound = finite(o) & finite(d_o)
        d_o = grouped(jnp.where(sound, d_o, 0), k.shape[2])
        q = grouped(jnp.where(sound & finite(q), q, 0), k.shape[2])
        log_total = jnp.where(grouped(sound, k.shape[2])[..., 0], log_total, jnp.nan)
        shift = (d_o.astype(dtype) * grouped(o, k.shape[2]).astype(dtype)).sum(-1)

        def add(sums, begin, k, v, seen):
            dk, dv, dq = sums
            k = jnp.where(finite(k) & finite(v), k, 0)
            scores = jnp.where(seen, product("bhgtd,bshd->bhgts", q, k, dtype) * scale, LOWEST)
            weights = jnp.where(seen, jnp.exp(scores - log_total[..., None]), 0)
            d_weights = product("bhgtv,bshv->bhgts", d_o, v, dtype)
            d_scores = jnp.where(seen, weights * (d_weights - shift[..., None]) * scale, 0).astype(q.dtype)
            dk = added(dk, begin, product("bhgts,bhgtd->bshd", d_scores, q, dtype))
            dv = added(dv, begin, product("bhgts,bhgtv->bshv", weights.astype(q.dtype), d_o, dtype))
            return dk, dv, dq + product("bhgts,bshd->bhgtd", d_scores, k, dtype)

        sums = *sums, varying(jnp.zeros(q.shape, dtype), q)
        *sums, dq = over_keys(size, add, sums, k.shape[1], read, intervals)
        return tuple(sums), ungrouped(dq).astype(q.dtype)

    start = varying((jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)), q)
    (dk, dv), dq = over_blocks(of_block, start, (q, intervals, o, log_total, d_o))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


attend_blocks.defvjp(attend_blocks_fwd, attend_blocks_bwd)


def over_blocks(of_block: Callable, carry, blocks):
    """Return the results of `jax.lax.scan(of_block, carry, blocks)`, without a loop for one block."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(of_block, carry, blocks)
    carry, results = of_block(carry, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], results)


def over_keys(size: int | None, add: Callable, sums, S: int, read: Callable, intervals: Any):
    """Return the sums behind the calls sums = add(sums, begin, k, v, seen) for every part of the S keys that the rows read.

    size: the keys of a part; None for one part of all keys. begin: the index of the part's first key. read(begin, size): the
    part's keys and values. seen: [B, 1, 1, rows, keys of the part], whether a row reads a key.
    """
    if size is None:
        return add(sums, 0, *read(0, S), intervals.hold(jnp.arange(S))[:, None, None])
    (low, count), size = intervals.bounds(), min(size, S)

    def part(i, sums):
        begin = jnp.minimum(low + i * size, S - size)
        keys = begin + jnp.arange(size)
        seen = intervals.hold(keys) & (keys >= low + i * size)[None, None]  # the last part may begin before its place
        return add(sums, begin, *read(begin, size), seen[:, None, None])

    return jax.lax.fori_loop(0, -(-count // size), part, sums)


def added(total: Float[Array, "B S H D"], begin, part: Float[Array, "B size H D"]) -> Float[Array, "B S H D"]:
    """Return total with `part` added to its rows along axis 1, from `begin` on."""
    if total.shape == part.shape:
        return total + part
    old = jax.lax.dynamic_slice_in_dim(total, begin, part.shape[1], 1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, begin, 1)


def product(form: str, a: Array, b: Array, dtype) -> Array:
    """Return the einsum `form` of a and b, with sums and result in `dtype`."""
    return jnp.einsum(form, a, b, preferred_element_type=dtype)


def finite(x: Float[Array, "*rows D"]) -> Bool[Array, "*rows 1"]:
    """Return whether all numbers of each row are finite, with an axis of size 1 for the last."""
    return jnp.isfinite(x).all(-1, keepdims=True)


def grouped(x: Array, heads: int) -> Array:
    """Return x [B, rows, Hq, D] as [B, heads, Hq / heads, rows, D]."""
    B, T, H, D = x.shape
    return x.reshape(B, T, heads, H // heads, D).transpose(0, 2, 3, 1, 4)


def ungrouped(x: Array) -> Array:
    """Return x [B, heads, Hq / heads, rows, D] as [B, rows, Hq, D], the inverse of `grouped`."""
    B, heads, each, T, D = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(B, T, heads * each, D)


def varying(tree, like: Array):
    """Return the tree with every array as varying over the mesh axes of `like`."""
    return jax.tree.map(lambda x: varying_like(x, like), tree)

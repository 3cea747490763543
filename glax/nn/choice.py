"""Choose the blocks of keys that a row of softmax attention reads, where a sequence has more than it may read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import is_symbol
from glax._src.kernels.common.softmax import Intervals, sequence_begins
from glax._src.kernels.xla.softmax import ROWS, attend_masked

SCORES = 2**26  # scores of rows and keys that are formed at a time, unless those of one row are more
LOWEST = float(jnp.finfo(jnp.float32).min)  # the least score of a whole block, above the -inf of the others


class IndexQueries(NamedTuple):
    """Hold the index queries [B, T, H, D] of rows, and their index weights [B, T, H], None for 1."""

    query: Float[Array, "B T H D"]
    weight: Float[Array, "B T H"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Hold how rows choose the keys that they read. Row t of a sequence sees (t + 1) // block_size whole blocks. It reads those
    num_blocks of them that have the greatest scores, and all tokens behind the last whole block.

        score of block b for row t = sum over heads h of index_weight_th max(index_query_th^T pool(index_key of b), 0)

    Blocks are counted from the first token of a sequence. Of equal scores the first count. One that is NaN counts as infinite:
    the row reads that block, and is NaN if the keys of the block are. Scores have no gradient: which blocks are read is no
    differentiable function of them.

    index_query: [*rows, H, D]. index_key: [*rows, E], which a cache holds as "index" [N, L, 1, E]. block_size: the tokens of a
    block. num_blocks: how many blocks a row reads at most. pool: (the index keys of blocks [..., n, block_size, E], the positions
    of their first tokens [..., n]) -> [..., n, D]. index_weight: [*rows, H]; 1 if None.

    Methods return the results of `attend_all`, attention over all keys that a row sees, where rows read all of them. They raise
    ValueError for a number of tokens that is a symbol.   DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556, where each token is
    a block; larger blocks Qwen Team 2026, https://huggingface.co/Qwen/Qwen3.8-Flash-Next.
    """

    index_query: Float[Array, "*rows H D"]
    index_key: Float[Array, "*rows E"]
    block_size: int
    num_blocks: int
    pool: Callable[[Array, Array], Array]
    index_weight: Float[Array, "*rows H"] | None = None

    @property
    def max_unrestricted_length(self) -> int:
        """Return the longest sequence, in tokens, of which each row reads all that it sees: it has at most `num_blocks`
        whole blocks."""
        return self.num_blocks * self.block_size + self.block_size - 1

    def reads_all(self, keys: int) -> bool:
        """Return whether rows read all of so many keys."""
        if is_symbol(keys):
            raise ValueError(f"the number of tokens must be known where attention chooses blocks of them, got {keys}")
        return keys <= self.max_unrestricted_length

    def attend(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "B T Hq K"],
        k: Float[Array, "B S Hk K"],
        v: Float[Array, "B S Hk V"],
        index: Float[Array, "B S 1 E"],
        seen: Intervals,
        scale: float | None,
        begin: Int[Array, "B S"],
    ) -> Float[Array, "B T Hq V"]:
        """Return softmax attention over those keys that each row sees and chooses.

        index: the index keys of k. seen: the keys that a row sees, which begin with its sequence. begin: the first key of each
        key's sequence.
        """
        (B, T, Hq, _), S = q.shape, k.shape[1]
        if self.reads_all(S) or q.size == 0:
            return attend_all()

        def attend_chosen() -> Array:
            starts, block_of = blocks(begin, self.block_size)
            position = starts - jnp.take_along_axis(begin, jnp.clip(starts, 0, S - 1), 1)
            pooled = self.pooled(index, starts, position)
            at_once, keys, values = min(T, max(1, SCORES // (B * S * Hq))), wide(k), wide(v)

            def divided(x: Array, fill: int = 0) -> Array:  # [B, T, ...] as [T / at_once, B, at_once, ...]
                x = jnp.pad(x, [(0, 0), (0, -T % at_once), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
                return jnp.moveaxis(x.reshape(B, -1, at_once, *x.shape[2:]), 1, 0)

            @jax.checkpoint
            def of_rows(part):
                queries, q, first, last = part
                is_read = self.read_mask(queries, pooled, starts, block_of, Intervals(first, last))
                return attend_masked(q, keys.astype(q.dtype), values.astype(q.dtype), is_read, scale)

            queries = jax.tree.map(divided, self.index_queries(B, T))
            o = jax.lax.map(of_rows, (queries, divided(q), divided(seen.first), divided(seen.last, -1)))
            return jnp.moveaxis(o, 0, 1).reshape(B, -1, *o.shape[3:])[:, :T]

        return jax.lax.cond((seen.last - seen.first).max() < self.max_unrestricted_length, attend_all, attend_chosen)

    def attend_to_caches(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "1 T Hq K"],
        k: Float[Array, "N L Hk K"],
        v: Float[Array, "N L Hk V"],
        index: Float[Array, "N L 1 E"],
        place: Int[Array, "T"],
        scale: float | None,
        cuts: Int[Array, "N+1"],
    ) -> Float[Array, "1 T Hq V"]:
        """Return what `attend` does, of packed rows over the caches of their sequences.

        k, v, index: of the caches. place: the position of each row; -1 for one that reads nothing. cuts: the first row of each
        sequence, and the end. Gradients of the caches are added in their dtype: prompts have none, and a wider copy of the caches
        would take their memory twice more.
        """
        (_, T, Hq, _), (N, L) = q.shape, k.shape[:2]
        if self.reads_all(L) or q.size == 0:
            return attend_all()

        def attend_chosen() -> Array:
            starts, block_of = blocks(jnp.zeros((1, L), jnp.int32), self.block_size)
            each = jnp.broadcast_to(starts, (N, starts.shape[1]))
            pooled = self.pooled(index, each, each)
            at_once = min(T, ROWS, max(1, SCORES // (L * Hq)))
            begins = sequence_begins(cuts, T, at_once)  # of parts with rows of one sequence, and T
            rows = begins[:-1, None] + jnp.arange(at_once)
            is_own = rows < jnp.minimum(begins[1:, None], cuts[-1])
            sequence = jnp.clip(jnp.searchsorted(cuts, begins[:-1], side="right") - 1, 0, N - 1)
            queries = self.index_queries(1, T)

            @jax.checkpoint
            def of_rows(part):
                rows, is_own, n = part
                at = jnp.where(is_own, rows, 0)
                last = jnp.where(is_own, place[at], -1)[None]
                seen, own = Intervals(jnp.zeros_like(last), last), jax.tree.map(lambda x: x[:, at], queries)
                is_read = self.read_mask(own, pooled[n][None], starts, block_of, seen)
                keys, values = (x[n][None].astype(q.dtype) for x in (k, v))
                return attend_masked(q[:, at], keys, values, is_read, scale)[0]

            o = jax.lax.map(of_rows, (rows, is_own, sequence))
            places = jnp.arange(T)
            part = jnp.searchsorted(begins, places, side="right") - 1
            found = o[part, places - begins[part]]
            return jnp.where((places < cuts[-1])[:, None, None], found, 0)[None]

        return jax.lax.cond(place.max() < self.max_unrestricted_length, attend_all, attend_chosen)

    def step(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "B 1 Hq K"],
        cache: Mapping[str, Array],
        slots: Int[Array, "B"],
        place: Int[Array, "B"],
        scale: float | None,
        width: int,
    ) -> Float[Array, "B 1 Hq V"]:
        """Return what `attend` does, of one row of each sequence over a pool of caches [P, L, ...].

        Of "key" and "value" the chosen tokens alone are read, and of "index" all. Without "value" the first `width` channels of a
        key are the value. slots: of the sequences, P for none. place: the position of each row of q.
        """
        size, L, B = self.block_size, cache["index"].shape[1], len(slots)
        if self.reads_all(L) or q.size == 0:
            return attend_all()
        # Unlike `attend`, no branch on the positions: a GPU would wait for its host, longer than a short text saves.
        count, seen = L // size, (place + 1) // size
        index = cache["index"].at[slots, : count * size, 0].get(mode="fill", fill_value=0)
        starts = jnp.broadcast_to(jnp.arange(count) * size, (B, count))
        pooled = self.pool(index.reshape(B, count, size, -1), starts)
        at = self.best_blocks(scores(self.index_queries(B, 1), pooled)[:, 0], jnp.arange(count) < seen[:, None])
        tokens = (jnp.where(at < count, at * size, L)[..., None] + jnp.arange(size)).reshape(B, -1)
        behind = seen[:, None] * size + jnp.arange(size - 1)
        tokens = jnp.concatenate([tokens, jnp.where(behind <= place[:, None], behind, L)], 1)

        def read(name: str) -> Array:
            return cache[name].at[slots[:, None], tokens].get(mode="fill", fill_value=0).astype(q.dtype)

        k = read("key")
        v = read("value") if "value" in cache else k[..., :width]
        return attend_masked(q, k, v, (tokens < L)[:, None], scale)

    def index_queries(self, B: int, T: int) -> IndexQueries:
        """Return by what rows score blocks, with the rows as [B, T]."""
        query, weight = self.index_query, self.index_weight
        query = query.reshape(B, T, *query.shape[-2:])
        return IndexQueries(query, None if weight is None else weight.reshape(B, T, weight.shape[-1]))

    def pooled(self, index: Float[Array, "B S 1 E"], starts: Int[Array, "B n"], position: Int[Array, "B n"]) -> Array:
        """Return `pool` of the blocks that begin at `starts`, [B, n, D]."""
        inside = jnp.clip(starts[..., None] + jnp.arange(self.block_size), 0, index.shape[1] - 1)
        keys = jnp.take_along_axis(index[:, :, 0], inside.reshape(len(starts), -1, 1), 1)
        return jax.lax.stop_gradient(self.pool(keys.reshape(*inside.shape, -1), position))

    def read_mask(self, queries: IndexQueries, pooled, starts, block_of, seen: Intervals) -> Bool[Array, "B rows S"]:
        """Return which keys the rows read. starts, block_of: as `blocks` returns them."""
        count, keys, (first, last) = starts.shape[1], jnp.arange(block_of.shape[1]), seen
        is_whole = (starts[:, None] >= first[..., None]) & (starts[:, None] + self.block_size - 1 <= last[..., None])
        at = self.best_blocks(scores(queries, pooled), is_whole)
        batch, rows = jnp.arange(len(first))[:, None, None], jnp.arange(first.shape[1])[None, :, None]
        # Column `count` takes what `best_blocks` gives in the place of none, and is cleared.
        is_best = jnp.zeros((*first.shape, count + 1), bool).at[batch, rows, at].set(True).at[..., count].set(False)
        in_best = jnp.take_along_axis(is_best, jnp.broadcast_to(block_of[:, None], (*first.shape, len(keys))), -1)
        behind = first + (last - first + 1) // self.block_size * self.block_size
        return seen.hold(keys) & (in_best | (keys >= behind[..., None]))

    def best_blocks(self, score: Float[Array, "*rows n"], is_whole: Bool[Array, "*rows n"]) -> Int[Array, "*rows _"]:
        """Return the numbers of the blocks that rows read, of those that are whole for them; n in the place of none."""
        score = jnp.where(jnp.isnan(score), jnp.inf, jnp.maximum(score, LOWEST))
        score = jax.lax.stop_gradient(jnp.where(is_whole, score, -jnp.inf))
        found, at = jax.lax.top_k(score, min(self.num_blocks, score.shape[-1]))
        return jnp.where(found >= LOWEST, at, score.shape[-1])


def scores(queries: IndexQueries, pooled: Float[Array, "B n D"]) -> Float[Array, "B rows n"]:
    """Return the scores of blocks, in float32 as the models' own code has them: which is greater must not depend on rounding."""
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    found = jax.nn.relu(product("brhd,bnd->brhn", queries.query.astype(jnp.float32), pooled.astype(jnp.float32)))
    if queries.weight is None:
        return found.sum(2)
    return product("brhn,brh->brn", found, queries.weight.astype(jnp.float32))


def wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x in float32 or wider, so that gradients of parts of the rows are added in it."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def blocks(begin: Int[Array, "B S"], size: int) -> tuple[Int[Array, "B n"], Int[Array, "B S"]]:
    """Return the first keys of the whole blocks, filled up with S; and the number of each key's block, n for a key in none.

    begin: the first key of each key's sequence. n = S // size, the most whole blocks that there can be.
    """
    S = begin.shape[1]
    keys, count = jnp.arange(S)[None], S // size
    end = jnp.minimum(keys + size - 1, S - 1)
    is_start = ((keys - begin) % size == 0) & (keys + size <= S) & (jnp.take_along_axis(begin, end, 1) == begin)
    starts = jnp.sort(jnp.where(is_start, keys, S), 1)[:, :count]
    start = keys - (keys - begin) % size
    number = jnp.take_along_axis(jnp.cumsum(is_start, 1) - 1, start, 1)
    return starts, jnp.where(jnp.take_along_axis(is_start, start, 1), number, count)

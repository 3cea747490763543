"""Choose the blocks of keys that a row of softmax attention reads, where a sequence has more than it may read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import is_symbol
from glax._src.kernels.common.softmax import Intervals, sequence_begins
from glax._src.kernels.xla.softmax import ROWS, attend_masked

SCORES = 2**26  # scores of rows and keys that are formed at a time, unless those of one row are more


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Hold how rows choose the keys that they read. Row t of a sequence sees (t + 1) // size whole blocks. It reads the `best` of
    them with the greatest scores, and all tokens behind the last whole block.

        score of block b for row t = sum over heads of max(index_query_t^T pool(index_key of b), 0)

    Blocks are counted from the first token of a sequence. Of equal scores the first count. One that is NaN counts as infinite:
    the row reads that block, and is NaN if the keys of the block are. Scores have no gradient: which blocks are read is no
    differentiable function of them.

    index_query: [*rows, H, D]. index_key: [*rows, D], which a cache holds as "index" [N, L, 1, D]. size: the tokens of a block.
    best: how many blocks a row reads at most. pool: (the index keys of blocks [..., n, size, D], the positions of their first
    tokens [..., n]) -> [..., n, D].

    Methods return the results of `attend_all`, attention over all keys that a row sees, where rows read all of them. They raise
    ValueError for a number of tokens that is a symbol.   Qwen Team 2026, https://huggingface.co/Qwen/Qwen3.8-Flash-Next.
    """

    index_query: Float[Array, "*rows H D"]
    index_key: Float[Array, "*rows D"]
    size: int
    best: int
    pool: Callable[[Array, Array], Array]

    @property
    def unrestricted(self) -> int:
        """Return the longest sequence, in tokens, of which each row reads all that it sees: it has at most `best` blocks."""
        return self.best * self.size + self.size - 1

    def reads_all(self, keys: int) -> bool:
        """Return whether rows read all of so many keys."""
        if is_symbol(keys):
            raise ValueError(f"the number of tokens must be known where attention chooses blocks of them, got {keys}")
        return keys <= self.unrestricted

    def attend(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "B T Hq K"],
        k: Float[Array, "B S Hk K"],
        v: Float[Array, "B S Hk V"],
        index: Float[Array, "B S 1 D"],
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
            starts, block_of = blocks(begin, self.size)
            position = starts - jnp.take_along_axis(begin, jnp.clip(starts, 0, S - 1), 1)
            pooled = self.pooled(index, starts, position)
            rows, keys, values = min(T, max(1, SCORES // (B * S * Hq))), wide(k), wide(v)

            def divided(x: Array, fill: int) -> Array:  # [B, T, ...] as [T / rows, B, rows, ...]
                x = jnp.pad(x, [(0, 0), (0, -T % rows), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
                return jnp.moveaxis(x.reshape(B, -1, rows, *x.shape[2:]), 1, 0)

            @jax.checkpoint
            def of_rows(part):
                query, q, first, last = part
                is_read = self.read_mask(query, pooled, starts, block_of, Intervals(first, last))
                return attend_masked(q, keys.astype(q.dtype), values.astype(q.dtype), is_read, scale)

            query = self.index_query.reshape(B, T, *self.index_query.shape[-2:])
            parts = divided(query, 0), divided(q, 0), divided(seen.first, 0), divided(seen.last, -1)
            o = jax.lax.map(of_rows, parts)
            return jnp.moveaxis(o, 0, 1).reshape(B, -1, *o.shape[3:])[:, :T]

        return jax.lax.cond((seen.last - seen.first).max() < self.unrestricted, attend_all, attend_chosen)

    def attend_to_caches(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "1 T Hq K"],
        cache: Mapping[str, Array],
        place: Int[Array, "T"],
        scale: float | None,
        cuts: Int[Array, "N+1"],
    ) -> Float[Array, "1 T Hq V"]:
        """Return what `attend` does, of packed rows over the caches of their sequences.

        cache: "key", "value" and "index", each [N, L, ...]. place: the position of each row; -1 for one that reads nothing. cuts:
        the first row of each sequence, and the end. Gradients of the cache are added in its dtype: prompts have
        none, and a wider copy of the cache would take its memory twice more.
        """
        (_, T, Hq, _), (N, L) = q.shape, cache["key"].shape[:2]
        if self.reads_all(L) or q.size == 0:
            return attend_all()

        def attend_chosen() -> Array:
            starts, block_of = blocks(jnp.zeros((1, L), jnp.int32), self.size)
            each = jnp.broadcast_to(starts, (N, starts.shape[1]))
            pooled = self.pooled(cache["index"], each, each)
            size = min(T, ROWS, max(1, SCORES // (L * Hq)))
            begins = sequence_begins(cuts, T, size)  # of blocks of rows of one sequence, and T
            rows = begins[:-1, None] + jnp.arange(size)
            is_own = rows < jnp.minimum(begins[1:, None], cuts[-1])
            sequence = jnp.clip(jnp.searchsorted(cuts, begins[:-1], side="right") - 1, 0, N - 1)
            query = self.index_query.reshape(T, *self.index_query.shape[-2:])

            @jax.checkpoint
            def of_rows(part):
                rows, is_own, n = part
                at = jnp.where(is_own, rows, 0)
                last = jnp.where(is_own, place[at], -1)[None]
                seen = Intervals(jnp.zeros_like(last), last)
                is_read = self.read_mask(query[at][None], pooled[n][None], starts, block_of, seen)
                k, v = (cache[name][n][None].astype(q.dtype) for name in ("key", "value"))
                return attend_masked(q[0, at][None], k, v, is_read, scale)[0]

            o = jax.lax.map(of_rows, (rows, is_own, sequence))
            places = jnp.arange(T)
            block = jnp.searchsorted(begins, places, side="right") - 1
            found = o[block, places - begins[block]]
            return jnp.where((places < cuts[-1])[:, None, None], found, 0)[None]

        return jax.lax.cond(place.max() < self.unrestricted, attend_all, attend_chosen)

    def step(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "B 1 Hq K"],
        cache: Mapping[str, Array],
        rows: Int[Array, "B"],
        place: Int[Array, "B"],
        scale: float | None,
    ) -> Float[Array, "B 1 Hq V"]:
        """Return what `attend` does, of one row of each sequence over a pool of caches [P, L, ...].

        Of "key" and "value" the chosen rows alone are read, and of "index" all. rows: those of the pool, P for none. place: the
        position of each row of q.
        """
        size, L, B = self.size, cache["index"].shape[1], len(rows)
        if self.reads_all(L) or q.size == 0:
            return attend_all()
        # No branch on the places, as in `attend`: a GPU would wait for its host, longer than a short text saves.
        count, seen = L // size, (place + 1) // size
        index = cache["index"].at[rows, : count * size, 0].get(mode="fill", fill_value=0)
        starts = jnp.broadcast_to(jnp.arange(count) * size, (B, count))
        pooled = self.pool(index.reshape(B, count, size, -1), starts)
        at = self.best_blocks(scores(self.index_query[:, None], pooled)[:, 0], jnp.arange(count) < seen[:, None])
        tokens = (jnp.where(at < count, at * size, L)[..., None] + jnp.arange(size)).reshape(B, -1)
        behind = seen[:, None] * size + jnp.arange(size - 1)
        tokens = jnp.concatenate([tokens, jnp.where(behind <= place[:, None], behind, L)], 1)
        k, v = (cache[name].at[rows[:, None], tokens].get(mode="fill", fill_value=0) for name in ("key", "value"))
        return attend_masked(q, k.astype(q.dtype), v.astype(q.dtype), (tokens < L)[:, None], scale)

    def pooled(self, index: Float[Array, "B S 1 D"], starts: Int[Array, "B n"], position: Int[Array, "B n"]) -> Array:
        """Return `pool` of the blocks that begin at `starts`, [B, n, D]."""
        inside = jnp.clip(starts[..., None] + jnp.arange(self.size), 0, index.shape[1] - 1)
        keys = jnp.take_along_axis(index[:, :, 0], inside.reshape(len(starts), -1, 1), 1)
        return jax.lax.stop_gradient(self.pool(keys.reshape(*inside.shape, -1), position))

    def read_mask(self, query, pooled, starts, block_of, seen: Intervals) -> Bool[Array, "B rows S"]:
        """Return which keys the rows read. query: their index queries. starts, block_of: as `blocks` returns them."""
        count, keys, (first, last) = starts.shape[1], jnp.arange(block_of.shape[1]), seen
        is_whole = (starts[:, None] >= first[..., None]) & (starts[:, None] + self.size - 1 <= last[..., None])
        at = self.best_blocks(scores(query, pooled), is_whole)
        batch, rows = jnp.arange(len(first))[:, None, None], jnp.arange(first.shape[1])[None, :, None]
        # Column `count` takes what `best_blocks` gives in the place of none, and is cleared.
        is_best = jnp.zeros((*first.shape, count + 1), bool).at[batch, rows, at].set(True).at[..., count].set(False)
        in_best = jnp.take_along_axis(is_best, jnp.broadcast_to(block_of[:, None], (*first.shape, len(keys))), -1)
        behind = first + (last - first + 1) // self.size * self.size
        return seen.hold(keys) & (in_best | (keys >= behind[..., None]))

    def best_blocks(self, score: Float[Array, "*rows n"], is_whole: Bool[Array, "*rows n"]) -> Int[Array, "*rows best"]:
        """Return the numbers of the blocks that rows read, of those that are whole for them; n in the place of none."""
        score = jax.lax.stop_gradient(jnp.where(jnp.isnan(score), jnp.inf, score))
        found, at = jax.lax.top_k(jnp.where(is_whole, score, -1.0), min(self.best, score.shape[-1]))
        return jnp.where(found >= 0, at, score.shape[-1])  # no score is below 0


def scores(query: Float[Array, "B rows H D"], pooled: Float[Array, "B n D"]) -> Float[Array, "B rows n"]:
    """Return the scores of blocks, in float32 as the models' own code has them: which is greater must not depend on rounding."""
    products = functools.partial(jnp.einsum, "brhd,bnd->brhn", precision=jax.lax.Precision.HIGHEST)
    return jax.nn.relu(products(query.astype(jnp.float32), pooled.astype(jnp.float32))).sum(2)


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

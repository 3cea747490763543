"""Choose the blocks of keys that a row of softmax attention reads, where a sequence has more than it may read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.recurrence import is_symbol
from glax._src.kernels.common.softmax import Intervals, ReadBlocks, sequence_begins
from glax._src.kernels.xla.softmax import attend_masked
from glax._src.solve.softmax import attend_by_sequence, attend_in_blocks

SCORES = 2**26  # scores of rows and blocks that are formed at a time, unless those of one row are more
ROWS = 128  # of one sequence of packed rows, whose scores are formed together
LOWEST = float(jnp.finfo(jnp.float32).min)  # the least score of a whole block, above the -inf of the others


class IndexQueries(NamedTuple):
    """Hold the index queries of rows [B, T, H, D], with D channels in each of H index heads, and the weights of the heads'
    scores [B, T, H], which are 1 if None."""

    query: Float[Array, "B T H D"]
    weight: Float[Array, "B T H"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Hold how rows choose the keys that they read. Row t of a sequence sees (t + 1) // block_size whole blocks. It reads the
    num_blocks whole blocks with the greatest scores, and all tokens behind the last whole block.

        score of block b for row t = sum over heads h of index_weight_th max(index_query_th^T pool(index_key of b), 0)

    Blocks are counted from the first token of a sequence. Of blocks with equal scores the first are read. A score of NaN counts
    as infinite: the row reads that block, and its output is NaN if the keys of the block are. Scores have no gradient, because
    the choice of blocks is no differentiable function of them.

    index_query: [*rows, H, D]. index_key: [*rows, E], which a cache holds as "index" [N, L, 1, E]. block_size: the tokens of a
    block. num_blocks: how many blocks a row reads at most. pool: (the index keys of blocks [..., n, block_size, E], the positions
    of their first tokens [..., n]) -> [..., n, D]. index_weight: [*rows, H]; 1 if None.

    `attend`, `attend_to_caches` and `step` return the results of `attend_all`, which is attention over all keys that a row sees,
    where every row reads all of these. They raise ValueError for a number of tokens that is a symbol of `jax.export`.

    DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556, where each token is a block; larger blocks Qwen Team 2026,
    https://huggingface.co/Qwen/Qwen3.8-Flash-Next.
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
        """Return whether every row of a sequence of `keys` keys reads all keys that it sees. Raises ValueError for a symbol of
        `jax.export`."""
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
        *,
        seen: Intervals,
        scale: float | None,
        begin: Int[Array, "B S"],
    ) -> Float[Array, "B T Hq V"]:
        """Return softmax attention over those keys that each row sees and chooses, [B, T, Hq, V].

        attend_all: a function that returns attention over all keys that each row sees; called where no row sees more keys than
        `max_unrestricted_length`. index: the index keys of k. scale: the factor of the scores; K ** -0.5 if None.
        seen: for each row [B, T] the first and the last key that it sees; the first is the first key of its sequence. begin:
        for each key, the index on the axis S of the first key of its sequence.
        """
        if self.reads_all(k.shape[1]) or q.size == 0:
            return attend_all()

        def attend_chosen() -> Array:
            return attend_in_blocks(q, k, v, seen, scale, self.read_blocks(index, seen, begin))

        return jax.lax.cond((seen.last - seen.first).max() < self.max_unrestricted_length, attend_all, attend_chosen)

    def read_blocks(self, index: Float[Array, "B S 1 E"], seen: Intervals, begin: Int[Array, "B S"]) -> ReadBlocks:
        """Return which blocks each row reads of the keys that the row sees. The arguments are those of `attend`."""
        (B, T), S = seen.first.shape, index.shape[1]
        starts = block_starts(begin, self.block_size)
        positions = starts - jnp.take_along_axis(begin, jnp.clip(starts, 0, S - 1), 1)
        pooled, queries = self.pooled(index, starts, positions), self.index_queries(B, T)
        at_once = min(T, max(1, SCORES // (B * starts.shape[1] * queries.query.shape[2])))

        def divided(x: Array, fill: int = 0) -> Array:  # [B, T, ...] as [T / at_once, B, at_once, ...]
            x = jnp.pad(x, [(0, 0), (0, -T % at_once), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
            return jnp.moveaxis(x.reshape(B, -1, at_once, *x.shape[2:]), 1, 0)

        def of_rows(part):
            queries, first, last = part
            return self.words(queries, pooled, starts, Intervals(first, last))

        words = jax.lax.map(of_rows, (jax.tree.map(divided, queries), divided(seen.first), divided(seen.last, -1)))
        return ReadBlocks(jnp.moveaxis(words, 0, 1).reshape(B, -1, words.shape[-1])[:, :T], self.block_size)

    def attend_to_caches(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "1 T Hq K"],
        k: Float[Array, "N L Hk K"],
        v: Float[Array, "N L Hk V"],
        index: Float[Array, "N L 1 E"],
        *,
        positions: Int[Array, "T"],
        own: Int[Array, "T"],
        scale: float | None,
        cuts: Int[Array, "N+1"],
    ) -> Float[Array, "1 T Hq V"]:
        """Return softmax attention of packed rows over those keys of their sequences' caches that each row sees and chooses.

        attend_all, scale: as in `attend`. k, v, index: the caches of N sequences, with L rows each.
        positions: the position of each row in its sequence, and so its row of the cache; -1 for a row that reads nothing. own:
        the number of its sequence, an index on the axis N. cuts: cu_seqlens of the rows.
        """
        N, L = k.shape[:2]
        if self.reads_all(L) or q.size == 0:
            return attend_all()

        def attend_chosen() -> Array:
            keys, values = (x.reshape(1, N * L, *x.shape[2:]) for x in (k, v))
            seen = Intervals((own * L)[None], jnp.where(positions < 0, -1, own * L + positions)[None])
            blocks = self.read_blocks_of_caches(index, positions, own, cuts)
            return attend_by_sequence(q, keys, values, seen, scale, cuts, blocks)

        return jax.lax.cond(positions.max() < self.max_unrestricted_length, attend_all, attend_chosen)

    def read_blocks_of_caches(
        self, index: Float[Array, "N L 1 E"], positions: Int[Array, "T"], own: Int[Array, "T"], cuts: Int[Array, "N+1"]
    ) -> ReadBlocks:
        """Return which blocks of its sequence's cache each row reads. The arguments are those of `attend_to_caches`."""
        T, (N, L) = len(positions), index.shape[:2]
        starts = block_starts(jnp.zeros((1, L), jnp.int32), self.block_size)
        each = jnp.broadcast_to(starts, (N, starts.shape[1]))
        pooled, queries = self.pooled(index, each, each), self.index_queries(1, T)
        at_once = min(T, ROWS, max(1, SCORES // (starts.shape[1] * queries.query.shape[2])))
        begins = sequence_begins(cuts, T, at_once)  # of parts with rows of one sequence, and T

        def of_rows(rows):
            seen = Intervals(jnp.zeros((1, at_once), jnp.int32), positions[rows][None])
            of_part = jax.tree.map(lambda x: x[:, rows], queries)
            return self.words(of_part, pooled[own[rows[0]]][None], starts, seen)[0]

        rows, every_row = jnp.minimum(begins[:-1, None] + jnp.arange(at_once), T - 1), jnp.arange(T)
        words, part = jax.lax.map(of_rows, rows), jnp.searchsorted(begins, every_row, side="right") - 1
        return ReadBlocks(words[part, every_row - begins[part]][None], self.block_size)

    def step(
        self,
        attend_all: Callable[[], Array],
        q: Float[Array, "B 1 Hq K"],
        cache: Mapping[str, Array],
        *,
        slots: Int[Array, "B"],
        positions: Int[Array, "B"],
        scale: float | None,
        width: int,
    ) -> Float[Array, "B 1 Hq V"]:
        """Return softmax attention of one row of each of B sequences over those keys that the row chooses in a pool of caches.

        attend_all, scale: as in `attend`. cache: "key" [P, L, Hk, K], "value" [P, L, Hk, V] and "index" [P, L, 1, E]. Of
        "index" all tokens are read, of the others the chosen ones. Without "value" the first `width` channels of a key are the
        value.
        slots: the row of the pool for each sequence; P for none. positions: the position of each row of q in its sequence.
        """
        size, L, B = self.block_size, cache["index"].shape[1], len(slots)
        if self.reads_all(L) or q.size == 0:
            return attend_all()
        # Unlike `attend`, no branch on the positions: a GPU would wait for its host, longer than a short text saves.
        count, whole = L // size, (positions + 1) // size
        index = cache["index"].at[slots, : count * size, 0].get(mode="fill", fill_value=0)
        starts = jnp.broadcast_to(jnp.arange(count) * size, (B, count))
        pooled = self.pool(index.reshape(B, count, size, -1), starts)
        at = self.best_blocks(scores(self.index_queries(B, 1), pooled)[:, 0], jnp.arange(count) < whole[:, None])
        tokens = (jnp.where(at < count, at * size, L)[..., None] + jnp.arange(size)).reshape(B, -1)
        behind = whole[:, None] * size + jnp.arange(size - 1)
        tokens = jnp.concatenate([tokens, jnp.where(behind <= positions[:, None], behind, L)], 1)

        def read(name: str) -> Array:
            return cache[name].at[slots[:, None], tokens].get(mode="fill", fill_value=0).astype(q.dtype)

        k = read("key")
        v = read("value") if "value" in cache else k[..., :width]
        return attend_masked(q, k, v, (tokens < L)[:, None], scale)

    def index_queries(self, B: int, T: int) -> IndexQueries:
        """Return this choice's index queries and weights with the axes *rows reshaped to [B, T]."""
        query, weight = self.index_query, self.index_weight
        query = query.reshape(B, T, *query.shape[-2:])
        return IndexQueries(query, None if weight is None else weight.reshape(B, T, weight.shape[-1]))

    def pooled(self, index: Float[Array, "B S 1 E"], starts: Int[Array, "B n"], positions: Int[Array, "B n"]) -> Array:
        """Return `pool` of the index keys of each block, [B, n, D], without a gradient. starts: the first key of each block, an
        index on the axis S; S for no block, whose result has no meaning. positions: the position of that key in its sequence."""
        inside = jnp.clip(starts[..., None] + jnp.arange(self.block_size), 0, index.shape[1] - 1)
        keys = jnp.take_along_axis(index[:, :, 0], inside.reshape(len(starts), -1, 1), 1)
        return jax.lax.stop_gradient(self.pool(keys.reshape(*inside.shape, -1), positions))

    def words(
        self, queries: IndexQueries, pooled: Float[Array, "B n D"], starts: Int[Array, "B n"], seen: Intervals
    ) -> Int[Array, "B rows W"]:
        """Return `ReadBlocks.words` of rows, int32: bit b % 32 of word b // 32 says whether the row reads its block number b,
        counted from the row's first key. A row reads the best whole blocks, and the block behind its last whole block.

        pooled, starts: the pooled index keys and the first keys of blocks, as from `pooled` and `block_starts`. seen: [B,
        rows].
        """
        first, last = seen
        is_whole = (starts[:, None] >= first[..., None]) & (starts[:, None] + self.block_size - 1 <= last[..., None])
        at = self.best_blocks(scores(queries, pooled), is_whole)
        start = jnp.take_along_axis(starts[:, None], jnp.minimum(at, starts.shape[1] - 1), -1)
        number = jnp.where(at < starts.shape[1], (start - first[..., None]) // self.block_size, -1)
        behind = jnp.maximum(last - first + 1, 0) // self.block_size
        number = jnp.concatenate([number, behind[..., None]], -1).astype(jnp.int32)
        count = starts.shape[1] // 32 + 1
        word = jnp.where(number < 0, count, number // 32)
        batch, row = jnp.arange(len(first))[:, None, None], jnp.arange(first.shape[1])[None, :, None]
        # Each bit is added once, so that a sum of them holds them all.
        return jnp.zeros((*first.shape, count), jnp.int32).at[batch, row, word].add(1 << (number % 32), mode="drop")

    def best_blocks(self, score: Float[Array, "*rows n"], is_whole: Bool[Array, "*rows n"]) -> Int[Array, "*rows _"]:
        """Return the indices on the axis n of the whole blocks with the greatest scores, [*rows, min(num_blocks, n)]; the
        remaining entries are n where fewer blocks are whole. is_whole: whether the row sees all keys of the block. NaN counts
        as infinite."""
        score = jnp.where(jnp.isnan(score), jnp.inf, jnp.maximum(score, LOWEST))
        score = jax.lax.stop_gradient(jnp.where(is_whole, score, -jnp.inf))
        found, at = jax.lax.top_k(score, min(self.num_blocks, score.shape[-1]))
        return jnp.where(found >= LOWEST, at, score.shape[-1])


def scores(queries: IndexQueries, pooled: Float[Array, "B n D"]) -> Float[Array, "B rows n"]:
    """Return the score of each block for each row, float32: sum over h of weight_h max(query_h^T pooled, 0). Products have the
    highest precision, as in the models' own code: which score is greater must not depend on rounding."""
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    found = jax.nn.relu(product("brhd,bnd->brhn", queries.query.astype(jnp.float32), pooled.astype(jnp.float32)))
    if queries.weight is None:
        return found.sum(2)
    return product("brhn,brh->brn", found, queries.weight.astype(jnp.float32))


def block_starts(begin: Int[Array, "B S"], size: int) -> Int[Array, "B n"]:
    """Return the indices on the axis S of the first keys of all whole blocks of `size` keys, ascending, and then S in entries
    without a block. n is S // size, the most blocks possible. Blocks are counted from the beginning of each sequence.

    begin: for each key, the index of the first key of its sequence.
    """
    S = begin.shape[1]
    keys = jnp.arange(S)[None]
    end = jnp.minimum(keys + size - 1, S - 1)
    is_start = ((keys - begin) % size == 0) & (keys + size <= S) & (jnp.take_along_axis(begin, end, 1) == begin)
    return jnp.sort(jnp.where(is_start, keys, S), 1)[:, : S // size]

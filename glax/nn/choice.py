"""Choose the blocks of keys that a row of softmax attention reads, where a sequence has more than it may read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.kernels.common.softmax import Intervals, sequence_begins

SCORES = 2**26  # the most scores of queries and keys that are formed at a time
LOWEST = -2e38  # below each score
ROWS = 128  # the most rows of one sequence among packed ones whose scores are formed together


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Hold how rows choose the keys that they read: blocks of tokens by a score, and the tokens behind the last whole block.

        score of block b for row t = sum over heads of max(query_t^T pooled_b, 0)

    Blocks are counted from a sequence's first token, and a row sees those that end at it or before it. Of these it reads the
    `best` ones with the greatest scores, of equal ones the first. Scores have no gradient.

    query: [*rows, H, D]. key: [*rows, D], what a cache of keys holds as "index". size: the tokens of a block. best: how many
    blocks a row reads. pooled: (the keys of blocks [..., n, size, D], the positions of their first tokens [..., n]) ->
    [..., n, D].
    """

    query: Float[Array, "*rows H D"]
    key: Float[Array, "*rows D"]
    size: int
    best: int
    pooled: Callable[[Array, Array], Array]

    @property
    def whole(self) -> int:
        """Return how many tokens of a sequence a row reads without a choice: up to them, it sees at most `best` blocks."""
        return self.best * self.size + self.size - 1

    def attend(
        self,
        all_seen: Callable[[], Array],
        q,
        k,
        v,
        index,
        seen: Intervals,
        scale: float | None,
        begin: Int[Array, "B S"],
    ) -> Float[Array, "B T Hq V"]:
        """Return softmax attention of q [B, T, Hq, D] over those keys of k [B, S, Hk, D] that each row sees and chooses.

        all_seen: computes it for rows that read all that they see. index: [B, S, 1, D], the keys that scores are formed of.
        seen: the keys that a row sees, an interval that begins with its sequence. begin: the first key of each key's sequence.
        """
        (B, T, Hq, _), S = q.shape, k.shape[1]
        if self.whole >= S or q.size == 0:
            return all_seen()

        def chosen() -> Array:
            starts, block_of = blocks(begin, self.size)
            position = starts - jnp.take_along_axis(begin, jnp.clip(starts, 0, S - 1), 1)
            pooled = self.of_blocks(index, starts, position)
            rows = min(T, max(1, SCORES // (B * S * Hq)))

            def some(x: Array, fill: int) -> Array:  # [B, T, ...] as [T / rows, B, rows, ...]
                x = jnp.pad(x, [(0, 0), (0, -T % rows), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
                return jnp.moveaxis(x.reshape(B, -1, rows, *x.shape[2:]), 1, 0)

            @jax.checkpoint
            def of_rows(part):
                query, q, first, last = part
                is_read = self.is_read(query, pooled, starts, block_of, first, last)
                return masked(q, k, v, is_read, scale)

            query = self.query.reshape(B, T, *self.query.shape[-2:])
            o = jax.lax.map(of_rows, (some(query, 0), some(q, 0), some(seen.first, 0), some(seen.last, -1)))
            return jnp.moveaxis(o, 0, 1).reshape(B, -1, *o.shape[3:])[:, :T]

        return jax.lax.cond((seen.last - seen.first).max() < self.whole, all_seen, chosen)

    def attend_to_caches(
        self, all_seen: Callable[[], Array], q, cache: Mapping, place: Int[Array, "T"], scale: float | None, cuts: Array
    ) -> Float[Array, "1 T Hq V"]:
        """Return what `attend` does, of packed rows q [1, T, Hq, D] over the caches [N, L, ...] of their sequences.

        cache: the arrays "key", "value" and "index". place: the position of each row; -1 for one that reads nothing. cuts:
        [N + 1], the first row of each sequence, and the end.
        """
        T, (N, L) = q.shape[1], cache["key"].shape[:2]
        if self.whole >= L or q.size == 0:
            return all_seen()

        def chosen() -> Array:
            starts, block_of = blocks(jnp.zeros((1, L), jnp.int32), self.size)
            each = jnp.broadcast_to(starts, (N, starts.shape[1]))
            pooled = self.of_blocks(cache["index"], each, each)
            begins = sequence_begins(cuts, T, min(ROWS, T))  # of the blocks of rows, and T
            rows = begins[:-1, None] + jnp.arange(min(ROWS, T))
            is_own = rows < jnp.minimum(begins[1:, None], cuts[-1])
            own = jnp.clip(jnp.searchsorted(cuts, begins[:-1], side="right") - 1, 0, N - 1)
            query = self.query.reshape(T, *self.query.shape[-2:])

            @jax.checkpoint
            def of_rows(part):
                rows, is_own, n = part
                at = jnp.where(is_own, rows, 0)
                last = jnp.where(is_own, place[at], -1)[None]
                first = jnp.zeros_like(last)
                is_read = self.is_read(query[at][None], pooled[n][None], starts, block_of, first, last)
                return masked(q[0, at][None], cache["key"][n][None], cache["value"][n][None], is_read, scale)[0]

            o = jax.lax.map(of_rows, (rows, is_own, own))
            places = jnp.arange(T)
            block = jnp.searchsorted(begins, places, side="right") - 1
            found = o[block, places - begins[block]]
            return jnp.where((places < cuts[-1])[:, None, None], found, 0)[None]

        return jax.lax.cond(place.max() < self.whole, all_seen, chosen)

    def of_blocks(self, index: Array, starts: Int[Array, "B n"], position: Int[Array, "B n"]) -> Float[Array, "B n D"]:
        """Return `pooled` of the blocks of index [B, S, 1, D] that begin at `starts`."""
        inside = jnp.clip(starts[..., None] + jnp.arange(self.size), 0, index.shape[1] - 1)
        keys = jnp.take_along_axis(index[:, :, 0], inside.reshape(len(starts), -1, 1), 1)
        return self.pooled(keys.reshape(*inside.shape, -1), position)

    def is_read(self, query, pooled, starts, block_of, first, last) -> Bool[Array, "B rows S"]:
        """Return which keys the rows read. first, last: [B, rows], the interval that a row sees."""
        count, keys = starts.shape[1], jnp.arange(block_of.shape[1])
        ends = starts[:, None] + self.size - 1
        is_whole = (starts[:, None] >= first[..., None]) & (ends <= last[..., None])
        at = self.chosen(scores(query, pooled), is_whole)
        rows = jnp.arange(first.shape[1])
        is_chosen = jnp.zeros((*first.shape, count + 1), bool)
        is_chosen = is_chosen.at[jnp.arange(len(first))[:, None, None], rows[None, :, None], at].set(True)
        is_chosen = is_chosen.at[..., count].set(False)
        found = jnp.take_along_axis(is_chosen, jnp.broadcast_to(block_of[:, None], (*first.shape, len(keys))), -1)
        tail = first + (last - first + 1) // self.size * self.size
        is_seen = (keys >= first[..., None]) & (keys <= last[..., None])
        return is_seen & (found | (keys >= tail[..., None]))

    def chosen(self, score: Float[Array, "*rows n"], is_whole: Bool[Array, "*rows n"]) -> Int[Array, "*rows best"]:
        """Return the numbers of the blocks that rows read; n for no block."""
        count = score.shape[-1]
        score = jax.lax.stop_gradient(jnp.where(jnp.isnan(score), jnp.inf, score))  # a row that is not finite is read
        found, at = jax.lax.top_k(jnp.where(is_whole, score, -1.0), min(self.best, count))
        return jnp.where(found >= 0, at, count)  # no score is below 0

    def step(
        self,
        all_seen: Callable[[], Array],
        q,
        cache: Mapping,
        rows: Int[Array, "B"],
        place: Int[Array, "B"],
        scale: float | None,
    ) -> Float[Array, "B 1 Hq V"]:
        """Return what `attend` does, of one row q [B, 1, Hq, D] of each sequence over a pool of caches [P, L, ...], of which no
        keys but those chosen are read. rows: those of the pool, P for none. place: the position of each row of q."""
        size, L, B = self.size, cache["index"].shape[1], len(rows)
        if self.whole >= L or q.size == 0:
            return all_seen()
        # Whatever the places are: a GPU waits for its host where they decide, which takes longer than what a short text saves.
        count, seen = L // size, (place + 1) // size
        index = cache["index"].at[rows, : count * size, 0].get(mode="fill", fill_value=0)
        starts = jnp.broadcast_to(jnp.arange(count) * size, (B, count))
        pooled = self.pooled(index.reshape(B, count, size, -1), starts)
        at = self.chosen(scores(self.query[:, None], pooled)[:, 0], jnp.arange(count) < seen[:, None])
        tokens = (jnp.where(at < count, at * size, L)[..., None] + jnp.arange(size)).reshape(B, -1)
        behind = seen[:, None] * size + jnp.arange(size - 1)
        tokens = jnp.concatenate([tokens, jnp.where(behind <= place[:, None], behind, L)], 1)
        k, v = (cache[name].at[rows[:, None], tokens].get(mode="fill", fill_value=0) for name in ("key", "value"))
        return masked(q, k, v, (tokens < L)[:, None], scale)


def scores(query: Float[Array, "B rows H D"], pooled: Float[Array, "B n D"]) -> Float[Array, "B rows n"]:
    products = functools.partial(jnp.einsum, "brhd,bnd->brhn", precision=jax.lax.Precision.HIGHEST)
    return jax.nn.relu(products(query.astype(jnp.float32), pooled.astype(jnp.float32))).sum(2)


def blocks(begin: Int[Array, "B S"], size: int) -> tuple[Int[Array, "B n"], Int[Array, "B S"]]:
    """Return the first key of each whole block, S behind the last one; and the number of each key's block, n where there is none.

    begin: the first key of each key's sequence. n = S // size: a sequence's last tokens may be no whole block.
    """
    S = begin.shape[1]
    keys, count = jnp.arange(S)[None], S // size
    end = jnp.minimum(keys + size - 1, S - 1)
    is_start = ((keys - begin) % size == 0) & (keys + size <= S) & (jnp.take_along_axis(begin, end, 1) == begin)
    starts = jnp.sort(jnp.where(is_start, keys, S), 1)[:, :count]
    start = keys - (keys - begin) % size
    number = jnp.take_along_axis(jnp.cumsum(is_start, 1) - 1, start, 1)
    return starts, jnp.where(jnp.take_along_axis(is_start, start, 1), number, count)


def masked(q, k, v, is_read: Bool[Array, "B T S"], scale: float | None) -> Float[Array, "B T Hq V"]:
    """Return softmax attention of q [B, T, Hq, D] over the keys that are read; 0 in a row that reads none. Sums are float32.

    A row that is not finite makes NaN of the rows that read it, and of the gradient of the keys that it reads, and of no other.
    """
    return attend_masked(
        q.shape[-1] ** -0.5 if scale is None else scale, q, k.astype(q.dtype), v.astype(q.dtype), is_read
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_masked(scale: float, q, k, v, is_read: Bool[Array, "B T S"]) -> Float[Array, "B T Hq V"]:
    return attend_masked_fwd(scale, q, k, v, is_read)[0]


def attend_masked_fwd(scale: float, q, k, v, is_read):
    k, v = sound_keys(k, v)
    logits = logits_of(scale, q, k, is_read)
    highest = jnp.maximum(logits.max(-1, keepdims=True), LOWEST)
    weights = jnp.where(is_read[:, None, None], jnp.exp(logits - highest), 0)
    total = weights.sum(-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    o = jnp.einsum("bghts,bsgd->btghd", (weights / total).astype(v.dtype), v, preferred_element_type=jnp.float32)
    o = o.reshape(*q.shape[:3], -1).astype(q.dtype)
    return o, (q, k, v, is_read, o, highest + jnp.log(total))


def attend_masked_bwd(scale: float, saved, d_o):
    q, k, v, is_read, o, log_total = saved
    sound = finite(o) & finite(d_o)
    d_o, q = jnp.where(sound, d_o, 0), jnp.where(sound & finite(q), q, 0)
    k = jnp.where(finite(k), k, 0)
    rows = jnp.moveaxis(by_key_head(sound, k)[..., 0], 1, 3)[..., None]  # [B, Hk, Hq / Hk, T, 1]
    logits = logits_of(scale, q, k, is_read)
    shown = is_read[:, None, None]
    weights = jnp.where(shown, jnp.exp(logits - jnp.where(rows, log_total, jnp.nan)), 0)
    d_o, o, wide = by_key_head(d_o, k), by_key_head(o, k), by_key_head(q, k)
    shift = jnp.moveaxis((d_o.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1), 1, 3)[..., None]
    d_weights = jnp.einsum("btghd,bsgd->bghts", d_o, v, preferred_element_type=jnp.float32)
    d_logits = jnp.where(shown, weights * (d_weights - shift) * scale, 0).astype(q.dtype)
    dq = jnp.einsum("bghts,bsgd->btghd", d_logits, k).reshape(q.shape)
    dk = jnp.einsum("bghts,btghd->bsgd", d_logits, wide)
    dv = jnp.einsum("bghts,btghd->bsgd", weights.astype(q.dtype), d_o)
    return dq, dk, dv, None


attend_masked.defvjp(attend_masked_fwd, attend_masked_bwd)


def sound_keys(k: Float[Array, "B S Hk D"], v: Float[Array, "B S Hk V"]) -> tuple[Array, Array]:
    """Return k with NaN, and v with 0, in the keys of which either is not finite: the products of `v` are selected by no mask."""
    sound = finite(k) & finite(v)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def logits_of(scale: float, q, k, is_read) -> Float[Array, "B Hk heads T S"]:
    q = by_key_head(jnp.where(finite(q), q, jnp.nan), k)
    logits = jnp.einsum("btghd,bsgd->bghts", q, k, preferred_element_type=jnp.float32) * scale
    return jnp.where(is_read[:, None, None], logits, -jnp.inf)


def by_key_head(x: Float[Array, "B T Hq D"], k: Float[Array, "B S Hk D"]) -> Float[Array, "B T Hk heads D"]:
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def finite(x: Float[Array, "*rows D"]) -> Bool[Array, "*rows 1"]:
    return jnp.isfinite(x).all(-1, keepdims=True)

"""Exact scan with per-key gates, token by token, for the programs whose gates are out of range for `key_scan`:

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t

in float32 and without products. No exponent but a gate itself is formed, so the scan is exact for all gates. A loop over tokens
also takes a tenth of the instructions of a chunk in products by halving, and the first call of `key_scan` waits until all of
them are compiled.

A program is one warpgroup with 32 columns of the state: a thread has K/16 rows of 4 columns. It forms e^g, k and q of 8 tokens
at a time in float32 in shared memory and scans these tokens, reading one token ahead. Every thread leaves its share of their
outputs in shared memory, where the shares are summed together.

Where states are stored, the scan begins from zero in the chunk before the first that is out of range. In the middle of that chunk
it adds the state that `key_scan` stored there. A program whose fast form held ends immediately.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu import tiles
from glax._src.kernels.pallas_gpu.lowering_cache import once
from glax._src.kernels.pallas_gpu.plan import place_of, quotient, remainder
from glax._src.kernels.pallas_gpu.scan_key_gate_refs import FLAGS
from glax._src.kernels.pallas_gpu.tiles import HALF, LOG2E, C, read, store

BF16 = jnp.bfloat16
# Of rows of the state, one to a thread, by warps. Two dimensions of 4: in one of 16 Pallas would look for ways to swizzle.
GROUPS = 4, 4
COLUMNS = 32  # of the state in a program
TOKENS, SLOTS = 8, 2  # formed in float32 together; of which shared memory holds so many times, one on its way


def state_layout(rows: int):
    """[*GROUPS, rows, COLUMNS]: a thread has all rows of one group in every eighth column."""
    tiling = Tiling(((*GROUPS, rows, COLUMNS), (8,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-5, -2), vector_dim=-1)


# [TOKENS, *GROUPS, COLUMNS]: a thread has a pair of columns of one token.
SHARES = plgpu.Layout.TILED(
    Tiling(((TOKENS, *GROUPS, COLUMNS), (2, *GROUPS, COLUMNS), (2,))),
    warp_dims=(-9,),
    lane_dims=(-5, -2),
    vector_dim=-1,
)


def by_token(count: int, operands, step, carry):
    """carry through step(i, carry, *operands(i)) of `count` tokens; each reads what the next needs before it computes."""

    def one(i, state):
        carry, now = state
        after = operands(jnp.minimum(i + 1, count - 1))
        return step(i, carry, *now), after

    return lax.fori_loop(0, count, one, (carry, operands(0)))[0]


def exact_scan(w, table, out_of_range, chunk_out_of_range, q, k, v, g, scale, start, o, states, last):
    """Return o, states and last of `key_scan`, computed again where any of out_of_range [E, H, FLAGS] is not 0.

    Where states are stored, the largest of out_of_range is the number of chunks left of the segment when the first comes that is
    out of range. chunk_out_of_range [B, chunks, H]: `out_of_range` of `ScanResults`, read there.
    """
    E, blocks = table.shape[0], w.V // COLUMNS
    T, H, K = k.shape[1], w.H, w.K
    rows = K // math.prod(GROUPS)
    state = state_layout(rows)
    of_k, of_v = state.reduce(3), state.reduce(0).reduce(0).reduce(0)
    flat = plgpu.Layout.WG_STRIDED((TOKENS, K), vec_size=4)
    shape = (*GROUPS, rows, COLUMNS)
    parts = C // TOKENS

    def along(x):
        return lax.broadcast_in_dim(x, shape, [0, 1, 2])

    def across(x):
        return lax.broadcast_in_dim(x, shape, [3])

    def by_group(x):
        return x.reshape(TOKENS, *GROUPS, rows)

    def body(
        table_g, out_of_range_g, chunk_out_of_range_g, q_g, k_g, v_g, g_g, scale_g, start_g, o_g, states_g, last_g, _,
        q_s, k_s, v_s, g_s, half_s, query_s, key_s, decay_s, value_s, shares_s, loaded, half_loaded,
    ):  # fmt: skip
        program = lax.axis_index("program")
        block, h, e = place_of(program, blocks, H)
        batch, first, count, n = (table_g[e, i] for i in range(4))
        mine = pl.ds(block * COLUMNS, COLUMNS)

        def chunk(step):
            return first + w.place(step, count)

        def tokens(x, head, i, *columns):
            """Return the rows of the scan's i-th group of tokens, of one head of x."""
            row = chunk(quotient(i, parts)) * C + w.place(remainder(i, parts), parts) * TOKENS
            return x.at[(batch, pl.ds(row, TOKENS), head, *columns)]

        flags = plgpu.Layout.WG_STRIDED((FLAGS,), vec_size=1)
        left = jnp.max(plgpu.load(out_of_range_g.at[e, h], layout=flags)).astype(
            jnp.int32
        )  # here: XLA launches a kernel for it

        @pl.when(left > 0)
        def _():
            factor = scale_g[n]
            begin = count - left if w.states else 0
            gate_head = w.blocks.of_keys(h, H, g.shape[3])

            def fetch(i):
                slot = remainder(i, SLOTS)

                @pl.when(i < count * parts)
                def _():
                    for term in range(w.terms):
                        source = tokens(g_g.at[term], gate_head, i)
                        plgpu.copy_gmem_to_smem(source, g_s.at[slot, term], loaded.at[slot])
                    plgpu.copy_gmem_to_smem(
                        tokens(k_g, w.blocks.of_keys(h, H, k.shape[2]), i), k_s.at[slot], loaded.at[slot]
                    )
                    source = tokens(v_g, w.blocks.of_values(h, H, v.shape[2]), i, mine)
                    plgpu.copy_gmem_to_smem(source, v_s.at[slot], loaded.at[slot])
                    if w.outputs:
                        plgpu.copy_gmem_to_smem(
                            tokens(q_g, w.blocks.of_keys(h, H, q.shape[2]), i), q_s.at[slot], loaded.at[slot]
                        )

            def fetch_half(step):
                """Fetch the gates of the half chunk that is scanned first."""
                row = chunk(step) * C + w.place(0, 2) * HALF
                for term in range(w.terms):
                    plgpu.copy_gmem_to_smem(
                        g_g.at[term, batch, pl.ds(row, HALF), gate_head], half_s.at[term], half_loaded
                    )

            def gates(parts):
                return jnp.maximum(sum(parts), LOG_OF_ZERO)

            def form(slot):
                """The tokens' factors, in float32."""
                g = gates([read(g_s.at[slot, term], flat) for term in range(w.terms)])
                decay_s[...], key_s[...] = by_group(jnp.exp2(g * LOG2E)), by_group(read(k_s.at[slot], flat))
                value_s[...] = read(v_s.at[slot], plgpu.Layout.WG_STRIDED((TOKENS, COLUMNS), vec_size=2))
                if w.outputs:
                    query_s[...] = by_group(read(q_s.at[slot], flat))

            def row(ref, token):
                return plgpu.load(ref.at[token], layout=of_k, optimized=False)

            def operands(i):
                token = w.place(i, TOKENS)
                found = row(decay_s, token), row(key_s, token), plgpu.load(value_s.at[token], layout=of_v)
                return (*found, row(query_s, token)) if w.outputs else found

            def nothing():
                return plgpu.layout_cast(jnp.zeros((TOKENS, K), jnp.float32), flat)

            def summed(x):
                """The sum over tokens, through shared memory that is free."""
                key_s[...] = by_group(x)
                plgpu.commit_smem()
                found = tiles.zeros((*GROUPS, rows), of_k)
                return lax.fori_loop(0, TOKENS, lambda token, found: found + row(key_s, token), found)

            def decay_to_middle(step):
                """Return the decay from a chunk's begin to where its state is stored: the middle of a chunk that is in range."""
                plgpu.barrier_wait(half_loaded)
                near = jnp.where(chunk_out_of_range_g[batch, chunk(step), h] > 0, 0, HALF // TOKENS)

                def add(part, log):
                    here = pl.ds(part * TOKENS, TOKENS)
                    return log + gates([read(half_s.at[term, here], flat) for term in range(w.terms)])

                ahead = summed(lax.fori_loop(0, near, add, nothing()))
                plgpu.commit_smem()
                return along(jnp.exp2(ahead * LOG2E))

            def advance(i, S):
                step, part, slot = quotient(i, parts), remainder(i, parts), remainder(i, SLOTS)

                if w.states:

                    @pl.when((part == 0) & (step >= begin))
                    def _():
                        store(
                            states_g.at[batch, chunk(step), h, :, :, :, mine], (S * decay_to_middle(step)).astype(BF16)
                        )

                plgpu.barrier_wait(loaded.at[slot])
                form(slot)
                plgpu.commit_smem()

                def advance_token(token, S, decay, k, v, *q):
                    S = S * along(decay) + along(k) * across(v)
                    if w.outputs:
                        place = w.place(token, TOKENS)
                        store(shares_s.at[place], jnp.sum(S * along(*q), axis=2))
                    return S

                S = by_token(TOKENS, operands, advance_token, S)
                plgpu.commit_smem()  # all are done with the tiles
                fetch(i + SLOTS)
                if w.states:
                    pl.when((part == 0) & (step >= begin) & (step + 1 < count))(lambda: fetch_half(step + 1))
                if w.outputs:
                    place = chunk(step) * C + w.place(part, parts) * TOKENS

                    @pl.when((step >= begin) & (place < T))
                    def _():
                        shares = plgpu.load(shares_s, layout=SHARES, optimized=False)
                        output = factor * jnp.sum(jnp.sum(shares, axis=1), axis=1)
                        store(o_g.at[batch, pl.ds(place, TOKENS), h, mine], output.astype(BF16))

                return S

            def given_state():
                if not w.start:
                    return tiles.zeros(shape, state)
                return plgpu.load(start_g.at[e, h, :, :, :, mine], layout=state, optimized=False)

            def stored_state():
                stored = states_g.at[batch, chunk(begin - 1), h, :, :, :, mine]
                return plgpu.load(stored, layout=state, optimized=False).astype(jnp.float32)

            def entered(S):
                return S + (lax.cond(begin > 0, stored_state, given_state) if w.states else given_state())

            if w.states:
                fetch_half(begin)
            # Half of the chunk before the first that is out of range, and all behind it.
            middle = jnp.maximum(begin * parts - parts // 2, 0)
            least = jnp.maximum(begin - 1, 0) * parts
            for slot in range(SLOTS):
                fetch(least + slot)

            def phase(number, S):
                lower, upper = jnp.where(number > 0, middle, least), jnp.where(number > 0, count * parts, middle)
                S = lax.fori_loop(lower, upper, advance, S)
                return lax.cond(number > 0, lambda S: S, entered, S)

            S = lax.fori_loop(0, 2, phase, tiles.zeros(shape, state))
            w.leave(e, lambda place: store(last_g.at[place, h, :, :, :, mine], S))

    found = o, states, last

    def split(x, axis):
        """x with K at an axis, by groups."""
        return x.reshape(*x.shape[:axis], *GROUPS, -1, *x.shape[axis + 1 :])

    body.__name__ = "exact_scan"  # in profiles
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(blocks * H * E,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((SLOTS, TOKENS, K) if w.outputs else (8, 64), BF16),
            plgpu.SMEM((SLOTS, TOKENS, K), BF16),
            plgpu.SMEM((SLOTS, TOKENS, COLUMNS), BF16),
            plgpu.SMEM((SLOTS, w.terms, TOKENS, K), BF16),
            plgpu.SMEM((w.terms, HALF, K) if w.states else (8, 64), BF16),
            plgpu.SMEM((TOKENS, *GROUPS, rows) if w.outputs else (8, 64), jnp.float32),
            plgpu.SMEM((TOKENS, *GROUPS, rows), jnp.float32),
            plgpu.SMEM((TOKENS, *GROUPS, rows), jnp.float32),
            plgpu.SMEM((TOKENS, COLUMNS), jnp.float32),
            plgpu.SMEM((TOKENS, *GROUPS, COLUMNS) if w.outputs else (8, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=(3 if w.outputs else 2) + w.terms, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=w.terms),
        ],
        compiler_params=tiles.PARAMS,
    )

    def call(*operands):
        refs = [jax.new_ref(x) for x in operands[-len(found) :]]
        kernel(*operands[: -len(found)], *refs)
        return [ref[...] for ref in refs]

    operands = table, out_of_range, chunk_out_of_range, q, k, v, g, scale, split(start, 2) if w.start else start
    written = once(("exact_scan", w), call, *operands, o, split(states, 3), split(last, 2))
    return [x.reshape(before.shape) for x, before in zip(written, found, strict=True)]

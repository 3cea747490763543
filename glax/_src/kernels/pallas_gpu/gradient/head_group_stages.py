"""Define the three warpgroups of the gradient of groups of heads: one loads, one forms dq and the scores, and one forms dk and
dv."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.device import tiles
from glax._src.kernels.pallas_gpu.device.tiles import BY_COLUMN, BY_ROW, by_column, by_row, read, transposed, zeros
from glax._src.kernels.pallas_gpu.gradient.head_group_refs import (
    BEFORE,
    COLUMNS,
    EDGE,
    KEY_SIDE,
    QUERY_SIDE,
    STAGES,
    Program,
)
from glax._src.kernels.pallas_gpu.gradient.key_chunk import split
from glax._src.kernels.pallas_gpu.gradient.tiles import ScanOrder, half
from glax._src.kernels.pallas_gpu.plan import PAIRS, C, quotient, remainder

BF16 = jnp.bfloat16
VALUES = (C, COLUMNS)


def rows_of(chunk):
    """Return the rows of a chunk."""
    return pl.ds(chunk * C, C)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(p: Program):
    """Fetch the units of all items one ahead, and q and k of an item once the item before has been computed."""
    n, bar = p.plan, p.barriers
    program = lax.axis_index("cta")

    def step(i, _):
        item, unit, slot = quotient(i, n.units), remainder(i, n.units), remainder(i, STAGES)
        place = n.place(program + item * n.programs)
        pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(bar.consumed.at[slot]))
        load_unit(p, place, unit, slot)

        @pl.when(unit == 0)
        def _():
            pl.when(i > 0)(lambda: plgpu.barrier_wait(bar.finished))
            load_shared(p, place)

        return ()

    lax.fori_loop(0, n.items(program) * n.units, step, ())


def load_unit(p: Program, place, unit, slot):
    """Fetch v, d_output, gates and states of a unit, and what the other chunk of its run has of them. place: of
    `HeadGroups.place`."""
    n, x, t = p.plan, p.operands, p.tiles
    b, part, chunk = place
    head, piece = part * n.members + quotient(unit, n.pieces), remainder(unit, n.pieces)
    gate_head, value_head = n.blocks.head(head), n.blocks.of_values(head, n.H, n.HV) * n.pieces + piece
    own = part * n.units + unit
    loaded = p.barriers.loaded.at[slot]
    plgpu.copy_gmem_to_smem(x.gates.at[b, chunk, gate_head], t.gates.at[slot], loaded)
    fetch(
        p,
        b,
        chunk,
        (x.v, x.v_edges, value_head, t.v.at[slot]),
        (x.d_output, x.d_output_edges, own, t.d_output.at[slot]),
        loaded=loaded,
    )
    run, columns = quotient(chunk, n.run), pl.ds(piece * COLUMNS, COLUMNS)
    for i, states in enumerate((x.before, x.behind)):
        plgpu.copy_gmem_to_smem(states.at[b, run, head, :, columns], t.states.at[slot * 2 + i], loaded)
    if n.run > 1:
        other, is_first = other_chunk(chunk), n.is_first(chunk)
        plgpu.copy_gmem_to_smem(x.gates.at[b, other, gate_head], t.other_gates.at[slot], loaded)
        tile = t.other_values.at[slot]
        of_output, of_value = (x.d_output, x.d_output_edges, own, tile), (x.v, x.v_edges, value_head, tile)
        pl.when(is_first)(functools.partial(fetch, p, b, other, of_output, loaded=loaded))
        pl.when(jnp.logical_not(is_first))(functools.partial(fetch, p, b, other, of_value, loaded=loaded))


def load_shared(p: Program, place):
    """Fetch q and k of an item, and with runs of two chunks q or k of the other chunk."""
    n, x, t, loaded = p.plan, p.operands, p.tiles, p.barriers.shared_loaded
    b, part, chunk = place
    query_head, key_head = (quotient(part * n.members, n.H // heads) for heads in (n.HQ, n.HK))
    fetch(p, b, chunk, (x.q, x.q_edges, query_head, t.q.at[0]), (x.k, x.k_edges, key_head, t.k.at[0]), loaded=loaded)
    if n.run > 1:
        other, is_first = other_chunk(chunk), n.is_first(chunk)

        def fetch_halves(source, edges, head):
            halves = [(source, edges, (head, half(part)), t.other.at[part]) for part in range(n.halves)]
            fetch(p, b, other, *halves, loaded=loaded)

        pl.when(is_first)(functools.partial(fetch_halves, x.q, x.q_edges, query_head))
        pl.when(jnp.logical_not(is_first))(functools.partial(fetch_halves, x.k, x.k_edges, key_head))


def fetch(p: Program, b, chunk, *sources, loaded):
    """Fetch a chunk's rows. sources: tuples of an array of tokens, its copies or None, its head and maybe columns, and the
    tile."""

    def copy(from_edges: bool, rows):
        for array, edges, place, tile in sources:
            place = place if isinstance(place, tuple) else (place,)
            plgpu.copy_gmem_to_smem((edges if from_edges else array).at[(b, rows, *place)], tile, loaded)

    if not p.plan.edges:
        copy(False, rows_of(chunk))
        return
    block = p.operands.edges[chunk]
    pl.when(block < 0)(lambda: copy(False, rows_of(chunk)))
    pl.when(block >= 0)(lambda: copy(True, rows_of(block)))


def other_chunk(chunk):
    """Return the other chunk of a run of two."""
    return chunk + 1 - 2 * lax.rem(chunk, jnp.int32(2))


# ---- computing -------------------------------------------------------------------------------------------------------


def items(p: Program, item):
    """Run item(i) for every item of the program, once its q and k are loaded."""

    def step(i, _):
        plgpu.barrier_wait(p.barriers.shared_loaded)
        item(i)
        return ()

    lax.fori_loop(0, p.plan.items(lax.axis_index("cta")), step, ())
    plgpu.wait_smem_to_gmem(0)


def place_of(p: Program, i):
    """Return sequence, part of the heads and chunk of the program's i-th item.

    They are computed at each use, because the compiler would spill values that it holds throughout.
    """
    program, i = lax.optimization_barrier((lax.axis_index("cta"), i))
    return p.plan.place(program + i * p.plan.programs)


def hidden_zero():
    """Return 0 in a form that the compiler does not know. Otherwise it computes addresses of tiles ahead of all loops, and
    spills them."""
    return lax.optimization_barrier(jnp.int32(0))


def scale_of(p: Program, i):
    """Return the scale of the chunk of the program's i-th item."""
    b, _, chunk = place_of(p, i)
    return p.operands.scale[b, chunk]


def slot_of(p: Program, i, unit):
    """Return the slot of a unit of the program's i-th item."""
    return remainder(i * p.plan.units + unit, STAGES)


def send(p: Program, i, *stored):
    """Send an item's dq or dk to global memory. stored: pairs of a tile and a result [B, T, parts, its columns]."""
    b, part, chunk = place_of(p, i)
    plgpu.commit_smem()
    for tile, result in stored:
        plgpu.copy_smem_to_gmem(tile, result.at[b, rows_of(chunk), part])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(p.barriers.finished)


def note(p: Program, i, unit, row: int, x):
    """Write x [C] to a row of `Results.sums`."""
    b, part, chunk = place_of(p, i)
    tiles.store(p.results.sums.at[b, chunk, part * p.plan.units + unit, row], x)


def edge(p: Program, slot):
    """Return e^{G_last} sum_v S dS, [64], summed over rows 64 apart. It is a loop, because code without a loop needs too many
    registers."""

    def rows(i, total):
        return total + (
            read(p.tiles.states.at[slot * 2, half(i)]) * read(p.tiles.states.at[slot * 2 + 1, half(i)])
        ).sum(1)

    total = lax.fori_loop(0, p.plan.halves, rows, zeros((64,), BY_ROW))
    return total * jnp.exp2(p.tiles.gates[slot, p.plan.last_token])


def decayed_product(total, decay, values, state):
    """Return total + decay (values state^T), [C, 64] in float32. decay: [C, 64]. values, state: tiles [C, 64] and [64, 64].

    The barrier keeps the compiler from starting the next product before this one is added.
    """
    return lax.optimization_barrier(total + decay * tiles.product(VALUES, (values, transposed(state))))


def compute_queries(p: Program):
    """Form the scores of an item once. For every unit, form A and dA, and add its terms to dq and to the sum of dA."""
    n, t, bar = p.plan, p.tiles, p.barriers
    t.order[...] = plgpu.load(p.operands.order, layout=BY_COLUMN, optimized=False)
    plgpu.commit_smem()
    mask = ScanOrder(n.reverse, t.order)

    def decays(slot):
        """Return D [C, C]."""
        G = plgpu.load(t.gates.at[slot], layout=BY_ROW)
        to = plgpu.load(t.gates.at[slot], layout=BY_COLUMN, optimized=False)
        return jnp.exp2(jnp.where(mask.later(), by_row(G, PAIRS) - by_column(to, PAIRS), -jnp.inf))

    def store_pairs(x, at):
        """Store x [C, C] in two terms. Scores stay in shared memory while units are computed, because there are too few
        registers for them."""
        t.pairs_rest.at[at][...] = split(t.pairs.at[at], x)

    def item(i):
        at = hidden_zero()
        store_pairs(tiles.product(PAIRS, (t.q.at[at], transposed(t.k.at[at]))), at)

        def add(unit, carry):
            # dq: halves [C, 64], over the scale; pairs [C, C]: the sum of dA
            dq, pairs = carry
            slot = slot_of(p, i, unit)
            v, do = t.v.at[slot], t.d_output.at[slot]
            plgpu.barrier_wait(bar.loaded.at[slot])
            D = decays(slot)
            A = (read(t.pairs.at[0]) + read(t.pairs_rest.at[0])) * D
            t.scores_rest.at[slot][...] = split(t.scores.at[slot], A)
            dA = tiles.product(PAIRS, (do, transposed(v)))
            used = ((read(t.scores.at[slot]) + read(t.scores_rest.at[slot])) * dA).sum(1)
            pairs += dA * D
            p.meet()
            S = t.states.at[slot * 2]
            # [C, 64]
            drawn = tiles.product(VALUES, (t.q.at[0], S))
            up = by_row(jnp.exp2(plgpu.load(t.gates.at[slot], layout=BY_ROW)), VALUES)
            used += (read(do) * up * drawn).sum(1)
            dq = [decayed_product(y, up, do, S.at[half(part)]) for part, y in enumerate(dq)]
            plgpu.barrier_arrive(bar.consumed.at[slot])
            note(p, i, unit, QUERY_SIDE, used)
            return dq, pairs

        dq, pairs = lax.fori_loop(0, n.units, add, ([zeros((C, 64)) for _ in range(n.halves)], zeros(PAIRS)))
        scale, at = scale_of(p, i), hidden_zero()
        store_pairs(pairs * scale, at)
        p.meet()
        for part, y in enumerate(dq):
            k = t.k.at[at, :, half(part)]
            y = tiles.added(y * scale, (t.pairs.at[at], k), (t.pairs_rest.at[at], k))
            t.other.at[part][...] = y.astype(BF16)
        p.meet()
        send(p, i, *((t.other.at[part], p.results.dq.at[..., half(part)]) for part in range(n.halves)))

    items(p, item)


def compute_keys(p: Program):
    """For every unit, form the state that is not stored and dv, and add its terms to dk."""
    n, t, bar = p.plan, p.tiles, p.barriers

    def form_state(i, slot):
        """Form S behind the run's first chunk from the state before that chunk, or dL/dS before its last chunk from the
        gradient behind that chunk."""
        is_first = n.is_first(place_of(p, i)[2])
        G, last = plgpu.load(t.other_gates.at[slot], layout=BY_ROW), t.other_gates[slot, n.last_token]
        factor = jnp.where(is_first, scale_of(p, i), 1.0)
        values = t.other_values.at[slot]
        first = is_first.astype(jnp.float32)
        between = jnp.exp2(first * G + (1.0 - first) * (last - G)) * factor
        values[...] = (read(values) * by_row(between, VALUES)).astype(BF16)
        plgpu.commit_smem()
        for part in range(n.halves):
            state = t.states.at[slot * 2 + is_first.astype(jnp.int32), half(part)]
            found = tiles.product((64, COLUMNS), (transposed(t.other.at[part]), values))
            state[...] = (read(state) * jnp.exp2(last) + found).astype(BF16)

    def item(i):
        def add(unit, dk):
            slot = slot_of(p, i, unit)
            v, do, dS = t.v.at[slot], t.d_output.at[slot], t.states.at[slot * 2 + 1]
            plgpu.barrier_wait(bar.loaded.at[slot])
            if n.run > 1:
                form_state(i, slot)
            p.meet()
            G, last = plgpu.load(t.gates.at[slot], layout=BY_ROW), t.gates[slot, n.last_token]
            leaving = by_row(jnp.exp2(last - G), VALUES)
            # halves [C, 64]
            dk = [decayed_product(x, leaving, v, dS.at[half(part)]) for part, x in enumerate(dk)]
            around = edge(p, slot)
            # [C, 64]
            through = tiles.product(VALUES, (t.k.at[0], dS)) * leaving
            through, before = lax.optimization_barrier((through, (read(v) * through).sum(1)))
            scores = t.scores.at[slot], t.scores_rest.at[slot]
            inner = tiles.product(VALUES, *((transposed(term), do) for term in scores))
            pushed = (read(v) * inner).sum(1)
            note(p, i, unit, BEFORE, before)
            note(p, i, unit, KEY_SIDE, pushed)
            note(p, i, unit, EDGE, around)
            plgpu.barrier_arrive(bar.consumed.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            t.dv[...] = (through + scale_of(p, i) * inner).astype(BF16)
            plgpu.commit_smem()
            b, part, chunk = place_of(p, i)
            plgpu.copy_smem_to_gmem(t.dv, p.results.dv.at[b, rows_of(chunk), part * n.units + unit])
            return dk

        dk = lax.fori_loop(0, n.units, add, [zeros((C, 64)) for _ in range(n.halves)])
        p.meet()
        at = hidden_zero()
        terms = [transposed(x.at[at]) for x in (t.pairs, t.pairs_rest)]
        dk = [tiles.added(x, *((y, t.q.at[at, :, half(part)]) for y in terms)) for part, x in enumerate(dk)]
        p.meet()
        for part, x in enumerate(dk):
            t.scores.at[part][...] = x.astype(BF16)
        send(p, i, *((t.scores.at[part], p.results.dk.at[..., half(part)]) for part in range(n.halves)))

    items(p, item)

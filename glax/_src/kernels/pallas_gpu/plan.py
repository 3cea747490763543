"""Define the plans, the static sizes and options that scans are compiled for, and the results of scans without the delta
rule."""

import dataclasses
import functools
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

C = 64  # tokens a chunk: the rows of one warpgroup's product
PAIRS = (C, C)  # the shape of a matrix of pairs of a chunk's tokens
LOG_OF_RESET = -1e30  # the log decay of a state that a reset clears; finite, so that sums stay finite
BLOCK = 128  # the most rows, and columns, of a block of the state in registers
STRIPE = 64  # columns of the state that a warpgroup carries under the delta rule
ROWS = 8  # of which a tile in shared memory consists: it can be copied from every eighth row


def quotient(x, by: int):
    """Return x // by for x >= 0, in one operation. `//` of a traced number is ten operations, each of which Pallas lowers in
    Python."""
    return x if by == 1 else lax.div(x, jnp.int32(by))


def remainder(x, by: int):
    """Return x % by for x >= 0."""
    return 0 if by == 1 else lax.rem(x, jnp.int32(by))


def chunk_of(program, chunks: int, heads: int):
    """Return the indices (batch row, chunk, head) of a program that has one chunk of one head. Heads vary fastest, then chunks.

    program: the index of the program. chunks: the number of chunks of a row. heads: the number of heads. The index of the chunk
    is traced, also where there is one chunk: a slice known to pass the end of a short row is refused.
    """
    head, rest = remainder(program, heads), quotient(program, heads)
    return quotient(rest, chunks), lax.rem(rest, jnp.int32(chunks)), head


def span(start, size: int, width: int):
    """Return the slice of `size` columns from `start` in an axis that has `width` columns in memory. The copy engine loads
    zeros for the columns behind the axis, and stores none of them.

    A start whose slice passes the end is made a traced number, because Pallas refuses a slice known to do so. It must be a
    multiple of 64, and stays known to be one.
    """
    if not isinstance(start, jax.Array) and start + size > width:
        start = lax.optimization_barrier(jnp.int32(start // 64)) * 64
    return pl.ds(start, size)


def tile_columns(*widths: int) -> int:
    """Return the columns of a tile in shared memory: 64, or 32 if 64 does not divide all `widths`, those of arrays in memory.

    The copy engine counts an axis in whole tiles.
    """
    return 64 if all(width % 64 == 0 for width in widths) else 32


def program_indices(program, blocks: int, heads: int):
    """Return the indices (block, head, segment) of a program. Blocks vary fastest, then heads.

    program: the index of the program. blocks: the number of blocks of columns that a head is divided into. heads: the number of
    heads.
    """
    rest = quotient(program, blocks)
    return remainder(program, blocks), remainder(rest, heads), quotient(rest, heads)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Divide wide states into `rows` blocks of K and `columns` blocks of V, each computed as a head of its own.

    The recurrence of a block of S reads only the block's channels of k, q and per-key gates, and its columns of v. A kernel's
    head h stands for (head, block of K, block of V), of which the last varies fastest. Arrays in memory stay as they are: q, k
    and per-key gates have `rows` times as many narrower heads, and v and d_output `columns` times as many. Outputs and dv are
    sums over blocks of K. dq, dk and the gates' gradient are sums over blocks of V.
    """

    rows: int = 1
    columns: int = 1

    @functools.cached_property
    def count(self) -> int:
        """Return the number of blocks of a head."""
        return self.rows * self.columns

    def head(self, h):
        """Return the index of the caller's head that block h belongs to. h: the index of a block among those of all heads."""
        return quotient(h, self.count)

    def of_keys(self, h, H: int, heads: int):
        """Return the index, in an array of q, k or per-key gates, of the narrow head that block h reads.

        h: the index of a block among the H blocks of all heads. heads: the number of narrow heads of the array, `rows` for each
        of its heads.
        """
        group = H // (self.columns * heads)
        if self.rows == 1 or group == 1:
            return quotient(h, self.columns * group)
        return quotient(self.head(h), group) * self.rows + remainder(quotient(h, self.columns), self.rows)

    def of_values(self, h, H: int, heads: int):
        """Return the index, in an array of v or d_output, of the narrow head that block h reads.

        h: the index of a block among the H blocks of all heads. heads: the number of narrow heads of the array, `columns` for
        each of its heads.
        """
        group = H // (self.rows * heads)
        if self.columns == 1:
            return quotient(h, self.rows * group)
        if self.rows == 1 and group == 1:
            return h
        return quotient(self.head(h), group) * self.columns + remainder(h, self.columns)


WHOLE = Blocks()


@dataclasses.dataclass(frozen=True)
class Scan:
    """Hold the sizes and options that a scan without the delta rule is compiled for.

    H: the number of blocks of all heads. K, V: the widths of a block.
    in_memory: the columns of a block of keys, and of values, in memory. Where these are fewer than K and V the copy engine fills
        the tiles with zeros, and drops what it stores behind the columns. States in float32 have K and V.
    reverse: the recurrence goes from the last token to the first.
    adjoint: the scan computes dL/dS against time, and takes q and d_output in the places of k and v.
    two_way: one program serves both directions, and takes no scale. The fifth column of the table is `adjoint`.
    outputs: the scan forms o, from q. states: the scan stores states at chunks. start: segments begin from given states.
    columns: the columns of the state in a program, 64 or 128.
    terms: the arrays of bfloat16 of which per-key gates are the sum, 1 or 2.
    run: the chunks from one stored state to the next, a divisor of the chunks of a sequence; more than 1 only with per-head
        gates.
    parts: the segments of every sequence, one after the other in memory.
    lookback: the most chunks at a segment's end whose gates a `two_way` scan reads to find where it begins; 0 for a scan
        that begins at the segment's first chunk.
    blocks: the blocks that a head is divided into. The numbers of heads of q, k and v divide the number of whole heads.
    stored_by: the blocks into which a scan divides the states that it stores, each as a head of its own.
    packed: 0, or the most chunks of packed sequences. Their chunks begin at every eighth row of q, k, v and gates, and the first
        of a sequence may hold rows of the sequence before. The chunks of o and states lie one after another.
    edges: chunks that hold rows without a token are read from copies (`Edges`, `LastChunk` in rows.py); only with per-head gates.
    every: the chunks from one state of `Recurrence.states_every` to the next; 0 without such states. A row has num_behind of
        these states. An adjoint scan adds their gradients to dL/dS, and other scans store the states.
    resets: tokens that reset the state are marked (`rows.newest_resets`); only with per-key gates, because per-head gates are
        -inf there.
    rows: the number of rows of o, where q, k and v have fewer, because a plan with edges reads the last chunk from a copy
        (`LastChunk`); else 0.
    bounded: rows without a token, which may hold NaN, are cleared. The table has 7 columns, of which the last two are the row of
        the first token and the row behind the last; only with per-key gates.
    """

    H: int
    K: int
    V: int
    in_memory: tuple[int, int]
    reverse: bool = False
    adjoint: bool = False
    two_way: bool = False
    outputs: bool = True
    states: bool = False
    start: bool = False
    columns: int = 128
    terms: int = 1
    run: int = 1
    parts: int = 1
    lookback: int = 0
    blocks: Blocks = WHOLE
    stored_by: Blocks = WHOLE
    packed: int = 0
    edges: bool = False
    resets: bool = False
    bounded: bool = False
    rows: int = 0
    every: int = 0
    num_behind: int = 0

    @functools.cached_property
    def pads_columns(self) -> bool:
        """Return whether the tiles of a block are padded with columns of zeros, because the block has fewer columns in memory
        than K and V."""
        return self.in_memory != (self.K, self.V)

    @functools.cached_property
    def tile(self) -> int:
        """Return the columns of a tile in shared memory."""
        return tile_columns(*self.in_memory)

    @property
    def channels(self) -> slice | pl.Slice:
        """Return the slice of all K channels of a block of keys. It may pass the end of the channels in memory, for which zeros
        are loaded."""
        return span(0, self.K, self.in_memory[0])

    def rows_of_chunks(self, T: int) -> int:
        """Return the number of rows of o for operands of T rows. This number, divided by 64 and rounded up, is the number of
        chunks whose states are stored."""
        return self.packed * C or self.rows or T

    @functools.cached_property
    def clears(self) -> bool:
        """Return whether chunks may contain rows of other sequences or without a token, which the kernel sets to zero."""
        return self.packed > 0 or self.bounded

    @functools.cached_property
    def last_token(self) -> int:
        """Return the row within a chunk of the token by which the recurrence leaves the chunk."""
        return 0 if self.reverse else C - 1

    @functools.cached_property
    def to_edge(self) -> bool:
        """Return whether per-key gates scale tokens to the edge by which the scan leaves their chunk, which is exact for all
        gates.

        If not, gates scale tokens to the chunk's middle: where scores are formed, and where a gradient reads the states before
        chunks.
        """
        return self.adjoint or self.two_way

    @functools.cached_property
    def stages(self) -> int:
        """Return the number of chunks in shared memory: as many as 227 KB hold at widths of 128, or of K = 256 and 64 columns."""
        wide = self.outputs and self.K > 128
        return (3 if self.outputs or self.states else 4) - (self.terms - 1) - wide

    @functools.cached_property
    def state_stages(self) -> int:
        """Return the number of chunks' states in shared memory. It is 2 in scans that only store states, where one state is
        copied to global memory while the next is formed."""
        return 2 if self.states and not self.outputs and self.run == 1 else 1

    @functools.cached_property
    def has_lost_tiles(self) -> bool:
        """Return whether a scan with per-key gates has separate tiles for what q^ lost in rounding, and for outputs, in
        addition to those of q and gates. `scan/key.py` defines q^.

        With resets registers have no room for all its products together.
        """
        return self.outputs and self.columns == 64 and not self.resets

    @functools.cached_property
    def has_output_tile(self) -> bool:
        """Return whether outputs of a scan with per-key gates have a tile of their own, because the tile of q holds q^
        (`scan/key.py`), or is wider than the outputs."""
        return self.has_lost_tiles or (self.outputs and self.columns < self.K)

    @functools.cached_property
    def lost_stages(self) -> int:
        """Return the number of tiles for what q^ (`scan/key.py`) lost in rounding: 2, or 0 if there is no room for them. The
        lost part then lies in the gates' tiles, into which the next gates are loaded later."""
        return 2 if self.has_lost_tiles else 0

    def stored(self, chunk):
        """Return whether the state that enters this chunk is stored: the chunk is the first of its run in scan order. chunk:
        its index in the row."""
        return lax.rem(chunk, jnp.int32(self.run)) == (self.run - 1 if self.reverse != self.adjoint else 0)

    def state_behind(self, chunk, chunks: int):
        """Return (the index of the state of `states_every` that follows a chunk in scan order, whether such a state exists).

        chunk: the index of the chunk in the row. chunks: the number of chunks of the row.
        """
        behind = chunks - chunk if self.reverse else chunk + 1
        index = quotient(behind, self.every) - 1
        return index, (remainder(behind, self.every) == 0) & (index < self.num_behind)

    def behind_type(self, B: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the states of `states_every` of B rows, [B, num_behind, H, K, V] in float32."""
        return jax.ShapeDtypeStruct((B, self.num_behind, self.H, self.K, self.V), jnp.float32)

    @functools.cached_property
    def stores_behind(self) -> bool:
        """Return whether the scan stores the states of `states_every`."""
        return self.every > 0 and not self.adjoint

    @functools.cached_property
    def adds_behind(self) -> bool:
        """Return whether the scan adds the gradients of the states of `states_every` to dL/dS."""
        return self.every > 0 and self.adjoint

    def leave(self, segment, store):
        """Run store(n) if the state after the segment is a result, because the n-th sequence ends there.

        segment: the index of the segment, a row of the table. In a `two_way` scan every segment's state is a result, and n is
        `segment`.
        """
        if self.two_way:
            return store(segment)
        at_end = remainder(segment, self.parts) == (0 if self.reverse != self.adjoint else self.parts - 1)
        pl.when(at_end)(lambda: store(quotient(segment, self.parts)))

    def chunk_at(self, step, count, adjoint=None):
        """Return the index within its segment of the chunk that the scan takes at a step. step: the number of the chunk in scan
        order, from 0. count: the number of chunks of the segment. adjoint: 0 or 1, for a `two_way` scan, else not used."""
        if not self.two_way:
            return count - 1 - step if self.reverse != self.adjoint else step
        return jnp.where(adjoint == int(self.reverse), step, count - 1 - step)

    @functools.cached_property
    def consumers(self) -> int:
        """Return the number of warpgroups that multiply: one for the outputs and one for the state, or one for every 64
        columns of the state."""
        return 2 if self.outputs else self.columns // 64

    @functools.cached_property
    def carriers(self) -> int:
        """Return the number of warpgroups that carry the state."""
        return 1 if self.outputs else self.consumers

    @functools.cached_property
    def scalers(self) -> int:
        """Return the number of warpgroups that scale with per-key gates: one for every 64 channels."""
        return self.K // 64

    @functools.cached_property
    def registers(self) -> tuple[int, int]:
        """Return the registers of a thread in a warpgroup that scales with per-key gates, and of one in a warpgroup that
        computes.

        All threads of a program together must not have more than at launch.
        """
        if self.has_lost_tiles and self.columns < self.K:
            return 120, 136
        by_warpgroups = {(2, 2): (88, 168), (1, 2): (120, 192), (2, 1): (128, 240), (1, 1): (168, 240)}
        return by_warpgroups[self.scalers, self.consumers]

    def results(self, B: int, T: int, E: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes and dtypes of o, states and last of `ScanResults`. A result that the plan leaves out has one tile.

        B: the number of batch rows. T: the number of rows of o. E: the number of segments.
        """
        ends = E if self.two_way else E // self.parts
        (K, V), by = self.in_memory, self.stored_by
        o = (B, T, self.H, V) if self.outputs else (1, C, 1, 64)
        block = self.H * by.count, K // by.rows, V // by.columns
        states = (B, -(-T // C) // self.run, *block) if self.states else (1, 1, 1, 64, 64)
        each = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (o, states)]
        return *each, jax.ShapeDtypeStruct((ends, self.H, self.K, self.V), jnp.float32)


plan_of = functools.cache(Scan)  # one object for equal plans, so that their properties are computed once


class ScanResults(NamedTuple):
    """Hold the results of a scan. H counts the blocks of all heads, N sequences and E segments.

    o: [B, T, H, V] in bfloat16, the terms of each block in the outputs. states: [B, chunks / run, H, K, V] in bfloat16. last:
    the final states of sequences, [N, H, K, V] in float32, or in a `two_way` scan of segments, [E, H, K, V]. log: [E, H, K] or
    [E, H, 1] in float32, the natural log decays of segments, in a `two_way` scan, else None.

    out_of_range: [B, chunks, H] in int32, 1 where the gates of a chunk leave the range of the fast form, in a scan that stores
    states. The state of such a chunk is the state that enters it. With per-key gates the states of all other chunks are decayed
    to the chunk's middle. out_of_range is None with per-head gates, and where the scan reads it from the forward.

    behind: [B, num_behind, H, K, V] in float32, the states of `states_every`; None in a scan that does not store them.
    """

    o: jax.Array
    states: jax.Array
    last: jax.Array
    log: jax.Array | None = None
    out_of_range: jax.Array | None = None
    behind: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DeltaScan:
    """Hold the sizes and options that a scan under the delta rule is compiled for. `scan/delta.py` defines O, U, S, P, R, X and
    M.

    kind: the results of the scan beside the last states. "outputs": O. "states": S before each chunk and U, for the gradient.
    "residuals": both. "adjoint": dS' behind each chunk, dX and dV, in reverse. "ends", "adjoint ends", "transitions": nothing.
    The state of "transitions" has K more columns, which begin as I and to which no tokens add. At the end they are the matrix M
    by which the segment multiplies a state. H: the number of heads. K, V: the widths of a head. reverse: whether the recurrence
    goes from the last token to the first. start: whether segments begin from given states, else from zero. A sequence that is
    not cut is one segment. form: `Erasure.form`. together: whether a program that writes results of a forward carries two
    stripes, each 64 columns of the state.

    Up to K = 128 the state, and U or dX, are transposed. Wider states are [K, V].
    """

    STAGES: ClassVar[int] = 3  # chunks in shared memory: as many as 227 KB hold at widths of 128
    FEWER_STAGES: ClassVar[int] = 2  # for K above 128, and with w for K above 64
    # The time of a chunk for two stripes in one program, of that for one; measured with two chunks in shared memory.
    TIME_OF_TWO: ClassVar[float] = 1.8

    kind: Literal["outputs", "states", "residuals", "adjoint", "ends", "transitions", "adjoint ends"]
    H: int
    K: int
    V: int
    reverse: bool
    start: bool
    form: str = "beta"
    together: bool = False

    @property
    def has_erase(self) -> bool:
        """Return whether the erase vector e is given, else it is beta k."""
        return self.form != "beta"

    @property
    def has_write(self) -> bool:
        """Return whether there is a write gate w, which multiplies v."""
        return self.form == "erase+write"

    @property
    def is_adjoint(self) -> bool:
        """Return whether the scan is of dL/dS, against time."""
        return self.kind in ("adjoint", "adjoint ends")

    @property
    def has_results(self) -> bool:
        """Return whether the scan writes more than the last states."""
        return self.kind not in ("ends", "transitions", "adjoint ends")

    @property
    def writes_tokens(self) -> bool:
        """Return whether the scan writes an array of tokens: O, or dV (dX with an erase vector)."""
        return self.kind in ("outputs", "residuals", "adjoint")

    @property
    def reads_chunks(self) -> bool:
        """Return whether the role *output* reads tiles that are loaded for a chunk, or what overwrites them."""
        return self.writes_tokens or self.together

    @property
    def reads_queries(self) -> bool:
        """Return whether the scan reads q, and forms the scores P."""
        return self.writes_tokens or self.is_adjoint

    @property
    def reads_values(self) -> bool:
        """Return whether the scan reads v, and w if there is a write gate. The adjoint reads v for the gradient of beta."""
        return not self.is_adjoint or (self.kind == "adjoint" and not self.has_erase)

    @property
    def stores_states(self) -> bool:
        """Return whether the scan stores, at every chunk, the state and in the same array U or dX."""
        return self.kind in ("states", "residuals", "adjoint")

    @property
    def columns(self) -> int:
        """Return the number of columns of the state: V, or for transitions V + K rounded up to whole stripes."""
        return self.V + -(-self.K // STRIPE) * STRIPE if self.kind == "transitions" else self.V

    @property
    def tile(self) -> int:
        """Return the columns of a tile in shared memory."""
        return tile_columns(self.K)

    @property
    def wide(self) -> bool:
        """Return whether keys are wider than 128."""
        return self.K > 128

    @property
    def tight(self) -> bool:
        """Return whether v and the inverse R have one stage each in shared memory, and dV has no tile of its own, because
        shared memory is too small. It is so in a wide adjoint scan with beta."""
        return self.wide and self.kind == "adjoint" and not self.has_erase

    @property
    def has_output_tile(self) -> bool:
        """Return whether outputs have a tile of their own. dX is sent from the tile `tokens`, and dV in a tight plan from the
        tile `lost`."""
        return self.writes_tokens and not self.tight and not (self.is_adjoint and self.has_erase)

    def upright(self, columns, rows) -> tuple:
        """Return (columns, rows), or in a wide plan (rows, columns): the order in which the two last axes of a state lie in
        memory.

        columns: what belongs to the axis of V. rows: what belongs to the axis of K.
        """
        return (rows, columns) if self.wide else (columns, rows)

    @property
    def stages(self) -> int:
        """Return the number of chunks in shared memory."""
        if self.wide:
            return 1 if self.has_erase else self.FEWER_STAGES
        return self.FEWER_STAGES if self.has_write and self.K > 64 else self.STAGES

    @property
    def erase_stages(self) -> int:
        """Return the number of tiles of e, which the role *carry* alone reads."""
        return 1 if self.wide else 2

    @property
    def stripes(self) -> int:
        """Return the number of stripes of a program, each carried by a warpgroup."""
        return 2 if (self.together or self.kind in ("ends", "transitions")) and self.columns // STRIPE % 2 == 0 else 1

    def gains_together(self, segments: int, multiprocessors: int) -> bool:
        """Return whether a program should carry two stripes, which is faster if programs of one stripe need more rounds.

        A round is one program on every multiprocessor. segments: the number of segments of all sequences. multiprocessors:
        their number on the GPU.
        """
        if (
            self.kind not in ("outputs", "states", "residuals")
            or self.form != "beta"
            or self.wide
            or self.V % (2 * STRIPE)
        ):
            return False
        programs = self.V // STRIPE * self.H * segments
        alone, in_pairs = (-(-count // multiprocessors) for count in (programs, programs // 2))
        return alone > self.TIME_OF_TWO * in_pairs

    @property
    def scored(self) -> int:
        """Return the columns of P that are formed at a time: as many as registers have room for."""
        return C // 4 if self.together else C

    @property
    def roles(self) -> dict[str, int]:
        """Return the number of warpgroups of each role. There is a *carry* for each stripe."""
        roles = dict(carry=self.stripes, output=self.has_results, score=self.reads_queries, load=self.loading == "load")
        return {role: int(count) for role, count in roles.items() if count}

    @property
    def loading(self) -> str:
        """Return the role that loads: *score*, where a fifth warpgroup would leave *carry* too few registers."""
        return "score" if self.together and self.reads_queries else "load"

    @property
    def registers(self) -> dict[str, int]:
        """Return the registers of a thread by role. The sum over all threads of a program is at most the number that the
        program is launched with."""
        if self.together:
            return dict(carry=160, output=96, score=96, load=24)
        if len(self.roles) == 4:
            return dict(carry=248, output=112, score=112, load=40)
        return dict(carry=232 if self.stripes == 2 else 248, output=216, score=216, load=40)

    @property
    def descending(self) -> bool:
        """Return whether the scan goes from the last chunk to the first."""
        return self.reverse != self.is_adjoint

    @property
    def last_token(self) -> int:
        """Return the row within a chunk of the last token in the order of the recurrence."""
        return 0 if self.reverse else C - 1

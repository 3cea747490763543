"""Define the tunable numbers of the Triton kernels, and heuristics that derive them from the shapes."""

import dataclasses
import functools
import math
from typing import ClassVar, Self

from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config, check_field
from glax._src.core.stored_states import COMPACT
from glax._src.kernels.common.gpu import capability, multiprocessors
from glax._src.kernels.triton.segments import segment_count

DTYPES = ("bfloat16", "float16", "float32")  # of what the kernels without a decay read, and of x of the selective scan
WIDEST = 512
WIDEST_ALONG = 64
LONG_CHUNKS = ("constant", "none")  # forms of gates
MOST_COMPACT = 2**15  # most numbers of a state in 8 bits, which one program has, K and V rounded up to powers of two
HELD_BY_REPLAY = 32  # numbers of the state in a thread of a step of a `StatePool`
MOST_STATES = 2**33  # bytes of stored states that the heuristic lets the forward take


def precision(x: Array) -> str:
    """Return the constant PRECISION of products of x: for float32 "tf32x3", three TF32 products; for other dtypes "tf32", a
    single product."""
    return "tf32x3" if x.dtype == "float32" else "tf32"


def width(n: int) -> int:
    """Return the smallest block that holds n columns: a power of two, at least 16, the least that tensor cores take."""
    return max(16, 1 << (n - 1).bit_length())


def is_direct(r: Recurrence) -> bool:
    """Return whether the kernels of `delta_along` run r, a recurrence with an erasure: with `along`, per-key gates, and K and V
    up to WIDEST_ALONG. Wider heads would spill registers."""
    return r.erasing.along is not None and r.decay.form == "key" and max(r.state_shape[2:]) <= WIDEST_ALONG


def check_block(config, *names: str):
    """Raise ValueError unless each field of config that `names` lists is a size that a kernel can run: warps a power of two
    from 1 to 32, stages 1 to 16, and all other fields a power of two from 16 to 256. The end of a name says which of these the
    field is."""
    for name in names:
        if name.endswith("warps"):
            check_field(name, getattr(config, name), 1, 32, power_of_two=True)
        elif name.endswith("stages"):
            check_field(name, getattr(config, name), 1, 16)
        else:
            check_field(name, getattr(config, name), 16, 256, power_of_two=True)


def check_fields(config: "TritonChunkedConfig | GradientConfig", *tiles: str):
    """Raise ValueError unless every field of a chunked kernel's config is valid. tiles: the names of the fields that are sizes
    of a tile."""
    for name in tiles:
        check_field(name, getattr(config, name), 16, WIDEST, power_of_two=True)  # Triton's tiles are powers of two
    check_field("segment", config.segment, 0, 2**31 - 1)
    if config.segment % config.chunk:
        raise ValueError(f"segment must be a multiple of chunk, {config.chunk}, or 0, got {config.segment}")
    check_field("warps", config.warps, 1, 32, power_of_two=True)
    check_field("stages", config.stages, 1, 16)


def in_chunks(segment: int, chunk: int) -> int:
    """Return the least multiple of chunk that is at least segment."""
    return -(-segment // chunk) * chunk


def has_large_tiles() -> bool:
    """Return whether the GPU multiplies tiles of 64 x 64 at a time, and a program may have 160 KB of shared memory or more."""
    return capability()[0] in (9, 10)


def has_little_memory() -> bool:
    """Return whether a multiprocessor may have no more than 100 KB of shared memory: on all GPUs but those of capability 8.0 and
    those with large tiles."""
    return not has_large_tiles() and capability() != (8, 0)


def segment_for(r: Recurrence, chunk: int, programs: int) -> int:
    """Return the tokens of a segment, a multiple of `chunk`, or 0 for whole sequences. programs: the number of programs without
    segments.

    T is cut only where the programs of whole sequences leave the GPU idle, because a cut reads k, v and the gates twice. A cut
    pays off below three quarters of a program per multiprocessor. Two programs per multiprocessor, which run concurrently, are
    the best number then.
    """
    T, num_processors = r.q.shape[1], multiprocessors()
    parts = min(2 * num_processors // max(programs, 1), T // (16 * chunk))
    if parts < 2 or 4 * programs >= 3 * num_processors:
        return 0
    return in_chunks(-(-T // parts), chunk)


@dataclasses.dataclass(frozen=True)
class TritonChunkedConfig(Config):
    """Configure the chunked Triton kernels of the forward.

    chunk: the tokens of a chunk, a power of two from 16 to 512.
    block: 0 for one kernel, which computes outputs as it scans the state. A power of two from 16 to 512 for two kernels: the
        first scans the state and stores it at all chunks, with at most `block` rows and columns of a state in a program; the
        second computes the outputs of all chunks in parallel. With beta or erase, block has no effect.
    columns: the columns of V in a program that computes outputs, a power of two from 16 to 512.
    segment: the tokens that a program scans, with any block: a multiple of chunk, or 0 for all of T. With beta or erase a call
        raises ValueError for any but 0.
    warps: the warps of a program, a power of two from 1 to 32. stages: the stages of its software pipeline, 1 to 16.

    Raises ValueError, which names the field, for any other value.

    >>> glax.configs.TritonChunkedConfig(chunk=64).columns
    64
    """

    former_names: ClassVar[tuple[str, ...]] = ("ChunkedConfig",)

    chunk: int = 32
    columns: int = 64
    segment: int = 0
    warps: int = 4
    stages: int = 2
    block: int = 0

    def __post_init__(self):
        check_fields(self, "chunk", "columns")
        check_field("block", self.block, 0, WIDEST, power_of_two=True)
        if 0 < self.block < 16:
            raise ValueError(f"block must be 0 or a power of two from 16 to {WIDEST}, got {self.block}")

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the config for a call r by its dtype, K and V: the result of one of three class methods, or one formed here:

            the delta rule (r.erasure is given)      erasing(r)
            bfloat16, K up to 128                    the best config found on an H200 at widths of 128
            float16, K and V up to 128               scan(r)
            all others                               storing(r)

        The second has chunks of 64 tokens, the smallest full tile of the tensor cores, and a third pipeline stage where a
        multiprocessor has a single program.
        """
        if r.erasure is not None:
            return cls.erasing(r)
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        if r.q.dtype == "float16" and max(K, V) <= 128:
            return cls.scan(r)
        if r.q.dtype != "bfloat16" or K > 128:
            return cls.storing(r)
        columns = min(V, 64)
        programs = r.num_sequences * r.num_heads * -(-V // columns)
        segment = segment_for(r, 64, programs)
        return cls(64, columns, segment, stages=3 if not segment and programs <= multiprocessors() else 2)

    @classmethod
    def storing(cls, r: Recurrence) -> Self:
        """Return the config of two kernels, of which the first stores the states at all chunks. Where the states would take more
        than 2^33 bytes, return the config of `scan`.

        In bfloat16 chunks have 128 tokens with constant gates or none if `has_large_tiles`, and 64 otherwise. Chunks of 128
        halve the bytes of the states. With per-key gates such chunks would have more scores that are exact products, and with
        per-head gates they are not measured. Without large tiles, 4 warps would spill registers where V is at least 128 and no
        gates are per key; there a program has 8 warps.

        In other dtypes chunks have 64 tokens if `has_large_tiles`. Otherwise chunks of 32 tokens, and 32 rows and columns of a
        state in a program, are the most that spill no registers.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        large, form, narrow = has_large_tiles(), r.decay.form, r.q.dtype == "bfloat16"
        if narrow:
            chunk, block, columns = (128, 128, 128) if large and form in LONG_CHUNKS else (64, 64, 128)
            many_warps = chunk == 128 or not (large or form == "key" or V < 128)
        else:
            chunk, block, columns = (64, 64, 64) if large else (32, 32, 32)
            many_warps = not large
        number_bytes = 2 if narrow else 4
        if number_bytes * segment_count(r, chunk) * math.prod(r.state_shape[1:]) > MOST_STATES:
            return cls.scan(r)
        segment = segment_for(r, chunk, r.num_sequences * r.num_heads * -(-K // block) * -(-V // block))
        stages = 3 if chunk == 128 else 2
        return cls(chunk, min(V, columns), segment, 8 if many_warps else 4, stages, block)

    @classmethod
    def scan(cls, r: Recurrence) -> Self:
        """Return the config of one kernel, which computes outputs as it scans the state: for float16 up to 128 wide, and for
        wide heads and float32 whose states are too large to be stored. Tiles are smaller where K or the dtype is wide: larger
        ones would spill more registers."""
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        num_scans, wide = r.num_sequences * r.num_heads, r.q.dtype != "bfloat16"
        exact = r.q.dtype == "float32" and K == 128 and r.decay.form == "key"
        chunk = 16 if K >= 512 or (wide and K >= 256) or exact else 32
        columns = min(V, 32 if exact else 64, max(16, 2**13 // K))
        segment = segment_for(r, chunk, num_scans * -(-V // columns))
        return cls(chunk, columns, segment, warps=8 if K >= 256 else 4, stages=1 if wide or K >= 256 else 3)

    @classmethod
    def erasing(cls, r: Recurrence) -> Self:
        """Return the config of the delta rule. In float32 this is the result of `erasing_float32`, unless one kernel runs the
        whole recurrence (`is_direct`).

        A program holds all K rows of its columns of the state, so a program has fewer columns where K is large. On GPUs that
        multiply 64 columns at a time (`has_large_tiles`) the config has three stages, which their shared memory holds; two
        stages with `erase` or per-key gates, which are one operand more; and 32 columns where programs of 64 would leave half
        of the multiprocessors idle. On other GPUs the config has fewer columns and stages, as their shared memory is smaller.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        if r.q.dtype == "float32" and not is_direct(r):
            return cls.erasing_float32(r)
        if r.q.dtype != "bfloat16":
            return cls(32, 16, warps=4 if K <= 128 else 8, stages=1)
        if K > 128:
            return cls(32, min(V, 16), stages=2)
        if not has_large_tiles():
            return cls(64, min(V, 32), stages=2)
        few = r.num_sequences * r.num_heads * -(-V // 64) <= multiprocessors() // 2
        stages = 2 if r.decay.form == "key" or r.erasing.beta is None else 3
        return cls(64, min(V, 32 if few else 64), stages=stages)

    @classmethod
    def erasing_float32(cls, r: Recurrence) -> Self:
        """Return the config of the delta rule in float32, with chunks of 64 tokens if `has_large_tiles` and no gates are per key,
        and else of 32.

        Products have two terms of every operand in registers. A chunk is loaded while the one before is processed: chunks of 64
        take 144 KB of shared memory for that. With per-key gates the preparation of such chunks would spill registers.
        """
        if has_large_tiles() and r.decay.form != "key":
            return cls(64, 16, warps=8, stages=2)
        return cls(32, 16, warps=4, stages=2)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        guess = cls.heuristic(r)
        if r.erasure is not None and r.q.dtype == "float32":
            shapes = ((64, 8, 2), (32, 4, 2), (32, 4, 3))
            return list(dict.fromkeys((guess, *(cls(chunk, 16, 0, warps, n) for chunk, warps, n in shapes))))
        if r.erasure is not None:
            shapes = [(64, columns, n) for columns in (32, 64) for n in (2, 3)]
            shapes += [(32, 64, 2), (32, 32, 3)] if is_direct(r) else []
            return list(dict.fromkeys((guess, *(cls(chunk, columns, 0, 4, n) for chunk, columns, n in shapes))))
        if guess.block:
            return guess.other_forms(r)
        found = [guess]
        for chunk, columns, stages in ((64, 64, 2), (64, 64, 3), (64, 32, 2), (64, 32, 3), (32, 64, 2), (16, 64, 2)):
            for segment in dict.fromkeys((0, guess.segment, 1024)):
                if columns <= width(r.v.shape[3]) and segment < r.q.shape[1]:
                    found.append(cls(chunk, columns, in_chunks(segment, chunk), guess.warps, stages))
        return list(dict.fromkeys(found))

    def other_forms(self, r: Recurrence) -> list[Self]:
        """Return the configs that tuning measures if this one, which stores states, is the heuristic's: itself, some with other
        stages, warps, blocks or columns, some with chunks of 128 tokens where `storing` may have them, and `scan`."""
        large, change = has_large_tiles(), functools.partial(dataclasses.replace, self)
        found = [self, change(stages=5 - self.stages), change(warps=12 - self.warps), change(block=128)]
        found += [change(columns=columns, warps=4) for columns in (32, 64) if columns < width(r.v.shape[3])]
        if large and r.q.dtype == "bfloat16" and r.decay.form in LONG_CHUNKS:
            longer = change(chunk=128, segment=in_chunks(self.segment, 128), warps=8, stages=2)
            found += [dataclasses.replace(longer, block=block) for block in (64, 128)]
        return list(dict.fromkeys((*found, self.scan(r))))


@dataclasses.dataclass(frozen=True)
class GradientConfig(Config):
    """Configure the chunked Triton kernels of the gradient.

    State kernels first scan the states and their gradients, and store both at the ends of all chunks. Gradient kernels then
    compute the gradients of all chunks in parallel.

    chunk: the tokens of a chunk.
    segment, block: of the state kernels. segment: the tokens that a program scans, as in `TritonChunkedConfig`. block: a program
        has so many rows and columns of a state, or with beta or erase all rows and so many columns.
    warps, stages: of the gradient kernels, the warps of a program and the stages of its software pipeline.
    rows, columns: of the gradient kernels, the rows and columns of a state that a program processes at a time. With columns=0
        there is one kernel, whose programs go through the rows and take all columns. Otherwise there are two kernels. For dq, dk
        and the gates, a program has one block of rows and goes through the columns. For dv, it has one block of columns and
        goes through the rows.
        A call with beta or erase always has one kernel, whose programs go through the rows. `columns` counts in float32 alone,
        where programs go through blocks of so many columns, or take all for 0. There is an exception in float32: a call with
        erase_along, per-key gates and K and V up to 64 takes all columns. So do all other dtypes.

    The fields are checked as those of `TritonChunkedConfig`.

    >>> glax.configs.GradientConfig(rows=32).chunk
    64
    """

    chunk: int = 64
    rows: int = 64
    segment: int = 0
    block: int = 64
    warps: int = 4
    stages: int = 2
    columns: int = 0

    def __post_init__(self):
        check_fields(self, "chunk", "rows", "block")
        check_field("columns", self.columns, 0, WIDEST)
        if self.columns:
            check_field("columns", self.columns, 16, WIDEST, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the config for a call r. It is the result of one of three class methods, or is formed here:

            the delta rule (r.erasure is given)      erasing(r)
            dtypes other than bfloat16               in_blocks(r)
            bfloat16, V up to 128                    narrow(r)
            bfloat16, V above 128                    programs that take V in blocks of 64 columns

        The last has 64 rows, but 32 with key gates or in small tiles, where 64 would spill registers.
        """
        if r.erasure is not None:
            return cls.erasing(r)
        if r.q.dtype != "bfloat16":
            return cls.in_blocks(r)
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        if V < 256:
            return cls.narrow(r)
        block = min(64, K)
        segment = segment_for(r, 64, r.num_sequences * r.num_heads * (K // block) * (V // 64))
        rows = min(K, 64 if r.decay.form != "key" and has_large_tiles() else 32)
        return cls(64, rows, segment, block, warps=4, stages=3, columns=64)

    @classmethod
    def in_blocks(cls, r: Recurrence) -> Self:
        """Return the config of programs that take V in blocks of 32 columns, for dtypes other than bfloat16.

        The other gradient kernel, whose programs hold all of V, spills registers at every width. If `has_large_tiles`, chunks
        have 64 tokens and programs take 32 rows at a time. Otherwise chunks of 32 tokens and 16 rows are the most that spill no
        registers.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        chunk, rows, block, stages = (64, 32, 64, 3) if has_large_tiles() else (32, 16, 32, 2)
        # The states and their gradients are scanned side by side.
        programs = 2 * r.num_sequences * r.num_heads * -(-K // block) * -(-V // block)
        return cls(chunk, min(K, rows), segment_for(r, chunk, programs), block, 4, stages, columns=min(V, 32))

    @classmethod
    def narrow(cls, r: Recurrence) -> Self:
        """Return the config of programs that hold all of V.

        Few rows are processed together, so that two programs share a multiprocessor.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        wide, key = r.q.dtype != "bfloat16", r.decay.form == "key"
        exact = r.q.dtype == "float32" and V == 128 and not key  # smaller chunks avoid spills
        chunk = 32 if wide or V >= 256 else 64
        if (wide and V >= 256) or exact:
            chunk = 16
        block = min(64, K, V)
        rows = 16 if key or V >= 256 else min(K, 32)
        segment = segment_for(r, chunk, r.num_sequences * r.num_heads * (K // block) * (V // block))
        return cls(chunk, rows, segment, block, warps=4, stages=1 if wide or V >= 256 else 4)

    @classmethod
    def erasing(cls, r: Recurrence) -> Self:
        """Return the config for a call r with beta or erase. Its tiles are smaller where they would spill registers:

            per-key gates, `is_direct(r)`    `along`, of `narrow` of r without its erasure
            other per-key gates              `narrow` of r without its erasure, with at most 3 stages
            float32                          64 rows of a state, in blocks of 16 columns
            other dtypes                     all columns, 16 rows of a state

        At most 3 stages let two programs share a multiprocessor.
        """
        narrow = r.q.dtype == "bfloat16" and max(width(r.q.shape[3]), width(r.v.shape[3])) <= 128
        block = 16
        if narrow:
            block = 64 if has_large_tiles() else 32
        if r.decay.form == "key":
            plain = cls.narrow(r.replace(erasure=None))
            if is_direct(r):
                return cls.along(plain, r, block)
            columns = 16 if r.q.dtype == "float32" else 0
            return dataclasses.replace(plain, segment=0, block=block, stages=min(plain.stages, 3), columns=columns)
        if r.q.dtype == "float32":
            return cls(32, min(64, width(r.q.shape[3])), 0, block, warps=4, stages=2, columns=16)
        if r.q.dtype != "bfloat16":
            return cls(16, 16, 0, block, warps=8, stages=1)
        if not narrow:
            return cls(32, 16, 0, block, warps=8, stages=1)
        return cls(64, 16, 0, block, warps=4 if r.erasing.beta is not None or has_large_tiles() else 8, stages=1)

    @classmethod
    def along(cls, plain: Self, r: Recurrence, block: int) -> Self:
        """Return the config of a call for which `is_direct`: erase_along, per-key gates and narrow heads.

        plain: the config of r without an erasure. block: the columns of a state in a program of the state kernels. In bfloat16
        on sm_90 and sm_100, chunks have as many tokens as in `plain`. Otherwise they have half as many, where larger ones would
        spill registers. In bfloat16 on sm_90 a second stage loads the next rows of the states ahead, and two programs share a
        multiprocessor all the same; on sm_100 it would spill registers.
        """
        is_large = r.q.dtype == "bfloat16" and has_large_tiles()
        chunk = plain.chunk if is_large else plain.chunk // 2
        stages = 2 if is_large and capability()[0] == 9 else 1
        return dataclasses.replace(plain, chunk=chunk, segment=0, block=block, stages=stages)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        guess = cls.heuristic(r)
        if r.erasure is not None:
            others = [
                dataclasses.replace(guess, rows=rows, stages=n) for rows, n in ((16, 1), (16, 2), (32, 1), (32, 2))
            ]
            if is_direct(r):
                others += [dataclasses.replace(guess, chunk=32, stages=n) for n in (1, 2, 3)]
            return list(dict.fromkeys((guess, *others)))
        if guess.columns:
            shapes = ((32, 64, 4, 3), (64, 64, 4, 3), (64, 64, 8, 3), (128, 64, 8, 3), (32, 128, 4, 2), (32, 64, 4, 2))
            if r.q.dtype != "bfloat16":
                shapes = ((16, 32, 4, 2), (32, 32, 8, 2), (64, 32, 8, 2), (32, 16, 4, 2))
            others = (dict(rows=rows, columns=n, warps=warps, stages=m) for rows, n, warps, m in shapes)
            found = (guess, *(dataclasses.replace(guess, **each) for each in others), cls.narrow(r))
            return list(dict.fromkeys(x for x in found if x.rows <= width(r.q.shape[3])))
        found = [guess]
        for chunk, rows, warps in ((64, 16, 4), (64, 32, 4), (32, 16, 2), (32, 64, 4), (64, 64, 8)):
            if rows <= width(r.q.shape[3]):
                segment = in_chunks(guess.segment, chunk)
                found.append(dataclasses.replace(guess, chunk=chunk, rows=rows, segment=segment, warps=warps))
        return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class TokenConfig(Config):
    """Configure the Triton kernels that take the tokens one by one.

    columns: the columns of the state in a program, warps: its warps; both powers of two, warps at most 32. Raises ValueError,
    which names the field, for any other value.

    >>> glax.configs.TokenConfig(columns=32)
    TokenConfig(columns=32, warps=4)
    """

    columns: int = 16
    warps: int = 4

    def __post_init__(self):
        check_field("columns", self.columns, 1, WIDEST, power_of_two=True)
        check_field("warps", self.warps, 1, 32, power_of_two=True)

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the best config found on an H200: a tile of all K rows and some columns of the state in float32.

        A call of one token takes tiles of 16 KB, and of at least 32 columns, whose rows are whole lines of memory, if there are
        at least four such tiles for each multiprocessor. Other calls take tiles of 8 KB, and of at least 8 columns.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        large = min(V, max(32, 2**12 // K))
        if r.q.shape[1] == 1 and r.num_sequences * r.num_heads * (V // large) >= 4 * multiprocessors():
            return cls(columns=large, warps=16 if K >= 128 else 4)
        return cls(columns=min(V, max(8, 2**11 // K)), warps=4 if K >= 128 else 1)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        V = width(r.v.shape[3])
        return [cls(c, w) for c in (8, 16, 32, 64) for w in (1, 2, 4) if c <= V] + [cls(min(V, 32), 16)]


@dataclasses.dataclass(frozen=True)
class TritonReplayConfig(TokenConfig):
    """Configure the Triton kernel of a step of `glax.serving.StatePool`, with the fields and errors of `TokenConfig`.

    States in 8 bits need columns of at least V.

    >>> glax.configs.TritonReplayConfig(columns=64)
    TritonReplayConfig(columns=64, warps=4)
    """

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the config whose programs hold 4096 numbers of the state, in at least 32 columns if V has as many.

        Columns are halved, to no fewer than 16, while there are fewer than two programs for each multiprocessor. For a state in
        8 bits a program has all columns. A program has 4 to 16 warps: as many as give a thread 32 numbers.
        """
        K, V = width(r.q.shape[3]), width(r.v.shape[3])
        columns = min(V, max(32, 2**12 // K))
        if r.initial_state is not None and str(r.initial_state.dtype) in COMPACT:
            columns = V
        else:
            while columns > 16 and r.num_sequences * r.num_heads * (V // columns) < 2 * multiprocessors():
                columns //= 2
        return cls(columns, min(16, max(4, K * columns // (32 * HELD_BY_REPLAY))))

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        """Return the heuristic's config alone: a measurement would have to fill the rings of a pool."""
        return [cls.heuristic(r)]

"""Launch the kernel of device/replay.cu. It computes one token from a stored state and the tokens since that was written."""

import jax
from jax import Array

from glax._src.core.recurrence import Recurrence
from glax._src.core.ring import RingedStates
from glax._src.core.stored_states import scaled_rows
from glax._src.kernels.common.foreign import NONE
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.cuda import scan
from glax._src.kernels.cuda.config import COMPACT, STORED_BYTES, ReplayConfig
from glax._src.kernels.cuda.scan import ABSENT, SHARED_BYTES, dtype_of, tokens_of

MOST_STAGED = 16  # tokens of a ring
MOST_BLOCKS = 32_767  # of a sequence: the upper half of a slot's length counts those that have read it
MOST_NUMBERS = 2**31 - 1  # of the tokens' keys or values, whose offsets have 32 bits


def recurrent_replay(
    r: Recurrence, pool: RingedStates, slots: Array | None, config: ReplayConfig
) -> tuple[Array, RingedStates]:
    """Advance B sequences by one token; return the outputs [B, H, V] and the pool.

    slots: [B], the row of the pool of each sequence, where one outside of the pool stands for no sequence. None if sequence b
    has row b. The pool is updated in place if the caller donates it. Raises ValueError for a config that does not fit the
    states.
    """
    before = pool.arrays()
    operands = [*tokens_of(r), slots, *before]
    first = len(operands) - len(before)
    output = jax.ShapeDtypeStruct((r.q.shape[0], r.num_heads, r.v.shape[3]), r.q.dtype)
    results = [output, *(NONE if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before)]
    aliases = {first + i: 1 + i for i, x in enumerate(before) if x is not None}
    constants, blocks = plan(r, pool, config)
    numbers = pool.states.shape[0], pool.replay
    found = scan.launch_kernel("replay", constants, blocks, config.threads, operands, results, numbers, aliases)
    after = [None if x is None else y for x, y in zip(before, found[1:], strict=True)]
    return found[0], pool.with_arrays(after)


def plan(r: Recurrence, pool: RingedStates, config: ReplayConfig) -> tuple[dict[str, int], int]:
    """Return the constants of device/replay.cu, by name, and the number of blocks of threads. Raises ValueError for a config
    that does not fit (`unfit`)."""
    stored, ring = pool.arrays()[0], pool.ring
    constants, blocks = constants_of(r, config, stored)
    if (why := unfit(constants)) is not None:
        raise ValueError(f"{config} does not fit K={constants['K']} and V={constants['V']}: {why}")
    own = dict(PLACES=ring.key.shape[1], RING_KEY=dtype_of(ring.key), RING_VALUE=dtype_of(ring.value))
    own["TOKENS"] = staged_tokens(constants, own["PLACES"])
    return constants | own | dict(RESIDENT=resident_threads(constants | own)), blocks


def constants_of(r: Recurrence, config: ReplayConfig, stored: Array | None) -> tuple[dict[str, int], int]:
    """Return (the constants of device/replay.cu that follow from the tokens and states, by name; the number of blocks of
    threads). stored: the array of states; None for states in float32."""
    state = 0 if stored is None else dtype_of(stored)
    constants, blocks = scan.constants_of(r, config, STORED_BYTES[state])
    return constants | dict(STATE=state), blocks


def unfit(constants: dict[str, int]) -> str | None:
    """Return why a block of threads cannot process its columns of a state, or None. constants: the result of `constants_of`."""
    columns, V = constants["LANES"] * constants["VECTOR"], constants["V"]
    if constants["STATE"] in COMPACT.values() and columns < V:
        return f"a block must have all columns of a state in 8 bits, and has {columns}"
    if staged_tokens(constants, 1) == 0:
        return f"a block has {SHARED_BYTES} bytes of shared memory, which hold no token of a ring"
    return None


def resident_threads(constants: dict[str, int]) -> int:
    """Return RESIDENT, the number n of threads for which a multiprocessor should have room. Each thread gets 65,536 / n
    registers, and spills if it needs more. constants: those of device/replay.cu."""
    erases = constants["BETA"] != ABSENT or constants["ERASE"] != ABSENT
    if constants["STATE"] in COMPACT.values():
        if constants["PLACES"] > constants["TOKENS"]:
            return 256
        # On newer architectures the same program needs more registers.
        return 512 if erases or capability() >= (10, 0) else 768
    if constants["K"] > 256:
        return 512
    return 1024 if constants["KEY"] != ABSENT and constants["VALUE"] == ABSENT and not erases else 768


def staged_tokens(constants: dict[str, int], places: int) -> int:
    """Return the number of tokens of a ring that a block stages in shared memory at a time; 0 if not one fits. It is the most
    that fit, a power of two or `places`, up to MOST_STAGED, or to a quarter of this for rings of more than MOST_STAGED places.

    constants: those of device/replay.cu. places: the places of the ring.
    """
    K, columns, warps = constants["K"], constants["LANES"] * constants["VECTOR"], -(-constants["THREADS"] // 32)
    present = {name: constants[name] != ABSENT for name in ("KEY", "VALUE", "BETA", "ERASE", "ALONG")}
    erases, along = present["BETA"] or present["ERASE"], present["ALONG"]
    # Numbers of 4 bytes in `Staged` of device/replay.cu, without padding, for which SHARED_BYTES leaves room.
    whole = K * (7 + 2 * erases + along) + columns * (8 + warps * (1 + erases)) + warps + 8
    if constants["STATE"] in COMPACT.values():
        whole += 2 * (K // scaled_rows(K))
    each = (1 + along) * (K + columns + 2) + K * present["KEY"] + columns * present["VALUE"] + 1
    tokens = MOST_STAGED if places <= MOST_STAGED else MOST_STAGED // 4  # of several rounds, each takes fewer registers
    while tokens and 4 * (whole + each * tokens) > SHARED_BYTES:
        tokens //= 2
    return min(tokens, places)


def refusal(r: Recurrence) -> str | None:
    """Return why `recurrent_replay` does not support r, one token of each sequence, or None. The pool's states have the dtype
    of r's initial states, or float32 if there are none."""
    constants, blocks = constants_of(r, ReplayConfig.heuristic(r), r.initial_state)
    (N, H, K, V), why = r.state_shape, unfit(constants)
    if why is not None:
        stored = "float32" if r.initial_state is None else r.initial_state.dtype
        return f"takes states that a block of threads holds, got {K} x {V} in {stored}: {why}"
    if blocks > MOST_BLOCKS * N:
        return f"takes at most {MOST_BLOCKS} blocks of threads for a sequence, got {blocks // N}"
    if (numbers := N * H * max(K, V)) > MOST_NUMBERS:
        return f"takes tokens of at most {MOST_NUMBERS} numbers, got {numbers}"
    return None

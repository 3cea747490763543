"""Launch the kernel of device/replay.cu: one token, from a stored state and the tokens since it was written."""

import dataclasses
from typing import Any

import jax
from jax import Array

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence
from glax._src.core.ring import Ring, RingedStates
from glax._src.kernels.common.foreign import NONE
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.cuda import scan
from glax._src.kernels.cuda.config import WHOLE, WIDEST_WHOLE, ReplayConfig, is_compact
from glax._src.kernels.cuda.scan import ABSENT, SHARED_BYTES, STORED_COMPACT, States, dtype_of, tokens_of

MOST_STAGED = 16  # tokens of a ring
MOST_BLOCKS = 32_767  # of a sequence: the upper half of a slot's length counts those that have read it
MOST_NUMBERS = 2**31 - 1  # of the keys or values of the tokens, and of a slot's ring, whose offsets have 32 bits


def recurrent_replay(
    r: Recurrence, pool: RingedStates, slots: Array | None, config: ReplayConfig
) -> tuple[Array, RingedStates]:
    """Advance B sequences by one token; return the outputs [B, H, V] and the pool.

    A slot outside of the pool is no sequence. Without slots, sequence b is in row b. The pool is updated in place if the caller
    donates it.
    """
    before = arrays_of(pool)
    operands = [*tokens_of(r), slots, *before]
    first = len(operands) - len(before)
    output = jax.ShapeDtypeStruct((r.q.shape[0], r.num_heads, r.v.shape[3]), r.q.dtype)
    results = [output, *(NONE if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before)]
    aliases = {first + i: 1 + i for i, x in enumerate(before) if x is not None}
    constants, blocks = plan(r, pool, config)
    numbers = pool.states.shape[0], pool.replay
    found = scan.launch_kernel("replay", constants, blocks, config.threads, operands, results, numbers, aliases)
    after = [None if x is None else y for x, y in zip(before, found[1:], strict=True)]
    return found[0], with_arrays(pool, after)


def arrays_of(pool: RingedStates) -> list[Array | None]:
    """Return the arrays of a pool in the order of the kernel's arguments."""
    ring, stored = pool.ring, jax.tree.leaves(pool.states)
    stored += [None] * (3 - len(stored))  # of states in 8 bits there are values, rests and scale
    gates = ring.decay.head, ring.decay.key, ring.decay.value
    return [*stored, ring.key, ring.value, *gates, ring.along, ring.erased, pool.length, pool.drafted]


def with_arrays(pool: RingedStates, arrays: list[Any]) -> RingedStates:
    """Return the pool with other arrays, in that order."""
    *stored, key, value, head, row, column, along, erased, length, drafted = arrays
    states = jax.tree.unflatten(jax.tree.structure(pool.states), [x for x in stored if x is not None])
    ring = Ring(key, value, Decay(head=head, key=row, value=column), along, erased)
    return dataclasses.replace(pool, states=states, ring=ring, length=length, drafted=drafted)


def plan(r: Recurrence, pool: RingedStates, config: ReplayConfig) -> tuple[dict[str, int], int]:
    """Return the constants of device/replay.cu, and the number of blocks."""
    stored = arrays_of(pool)[0]
    flags = dict(STATE=dtype_of(stored), STATES=int(States.POOL_UPDATED), SINGLE=1)
    constants, blocks = scan.plan(r, config, flags)
    if is_compact(stored) and constants["LANES"] * constants["VECTOR"] < constants["V"]:
        raise ValueError(f"columns must be at least V={constants['V']} for states in 8 bits, got {config.columns}")
    ring = pool.ring
    own = dict(PLACES=ring.key.shape[1], RING_KEY=dtype_of(ring.key), RING_VALUE=dtype_of(ring.value))
    own["TOKENS"] = staged_tokens(constants, own["PLACES"])
    return constants | own | dict(RESIDENT=resident_threads(constants | own)), blocks


def resident_threads(constants: dict[str, int]) -> int:
    """Return how many threads are to share a multiprocessor. A thread has 65,536 registers divided by them, and spills with fewer
    than it needs."""
    erases = constants["BETA"] != ABSENT or constants["ERASE"] != ABSENT
    if constants["STATE"] in STORED_COMPACT.values():
        if constants["PLACES"] > constants["TOKENS"]:
            return 256
        # On newer architectures the same program needs more registers.
        return 512 if erases or capability() >= (10, 0) else 768
    return 1024 if constants["KEY"] != ABSENT and constants["VALUE"] == ABSENT and not erases else 768


def staged_tokens(constants: dict[str, int], places: int) -> int:
    """Return how many tokens of a ring are staged at a time: as many as fit in shared memory, at most MOST_STAGED."""
    K, columns, warps = constants["K"], constants["LANES"] * constants["VECTOR"], -(-constants["THREADS"] // 32)
    present = {name: constants[name] != ABSENT for name in ("KEY", "VALUE", "BETA", "ERASE", "ALONG")}
    erases, along = present["BETA"] or present["ERASE"], present["ALONG"]
    whole = K * (7 + 2 * erases + along) + columns * (8 + warps * (1 + erases)) + 8
    each = (1 + along) * (K + columns + 2) + K * present["KEY"] + columns * present["VALUE"] + 1
    tokens = MOST_STAGED if places <= MOST_STAGED else MOST_STAGED // 4  # of several rounds, each takes fewer registers
    while tokens > 1 and 4 * (whole + each * tokens) > SHARED_BYTES:
        tokens //= 2
    return min(tokens, places)


def refusal(r: Recurrence) -> str | None:
    """Return why `recurrent_replay` does not support tokens r of states of r's initial states' dtype, or None."""
    if r.q.shape[1] != 1:
        return f"takes one token of each sequence, got T={r.q.shape[1]}"
    (_, H, K, V), config = r.state_shape, ReplayConfig.heuristic(r)
    if is_compact(r.initial_state) and config.columns < V:
        return f"takes states in 8 bits of at most {WHOLE} numbers and {WIDEST_WHOLE} columns, got {K} x {V}"
    if (blocks := H * -(-V // config.columns)) > MOST_BLOCKS:
        return f"takes at most {MOST_BLOCKS} blocks of threads for a sequence, got {blocks}"
    if (numbers := r.num_sequences * H * max(K, V)) > MOST_NUMBERS:
        return f"takes tokens of at most {MOST_NUMBERS} numbers, got {numbers}"
    return None

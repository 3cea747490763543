"""Launch the token-by-token kernel of device/scan.cu: whole sequences, and tokens whose states lie in a pool."""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from glax._src.core.erasure import arrays_of
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.common.foreign import NONE, call
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.cuda.config import COMPACT, STORED, STORED_BYTES, CudaConfig, layout_of
from glax._src.kernels.cuda.images import image_of
from glax._src.kernels.cuda.library import TARGET

ABSENT = -1
SHARED_BYTES = 48_000  # for `Staged`; a block has 49,152 bytes, of which the compiler uses some
MOST_STAGED = 8  # tokens


class States(enum.IntEnum):
    """Name where the states lie. The values are those of `States` in device/scan.cu.

    APART: initial and final states are arrays of their own. POOL_UPDATED: in a pool, which is updated in place. POOL_READ: in a
    pool, which does not change.
    """

    APART = 0
    POOL_UPDATED = 1
    POOL_READ = 2


def recurrent(r: Recurrence, config: CudaConfig) -> Outputs:
    """Compute the outputs [B, T, H, V] and the final states [N, H, K, V] token by token."""
    results = [output_of(r), jax.ShapeDtypeStruct(r.state_shape, jnp.float32)]
    initial = readable(r.initial_state)
    operands = [*tokens_of(r), r.boundaries, None, initial]
    return Outputs(*launch(r, config, operands, results, flags_of(r, States.APART, initial)))


def recurrent_step(r: Recurrence, pool: Array, slots: Array, config: CudaConfig) -> tuple[Array, Array]:
    """Advance B sequences by T tokens; return the outputs [B, T, H, V] and the pool [P, H, K, V]. slots: [B], the row of the
    pool of each sequence, -1 for none.

    The pool is updated in place if the caller donates it. Otherwise XLA copies it first.
    """
    results = [output_of(r), jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    operands = [*tokens_of(r), None, slots, pool]
    flags = flags_of(r, States.POOL_UPDATED, pool)
    output, pool = launch(r, config, operands, results, flags, aliases={len(operands) - 1: 1})
    return output, pool


def recurrent_verify(r: Recurrence, pool: Array, slots: Array, config: CudaConfig) -> Array:
    """Compute the outputs [B, T, H, V] of T tokens of B sequences. The pool is read and not changed."""
    operands = [*tokens_of(r), None, slots, pool]
    output, _ = launch(r, config, operands, [output_of(r), NONE], flags_of(r, States.POOL_READ, pool))
    return output


def output_of(r: Recurrence) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the outputs."""
    return jax.ShapeDtypeStruct((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)


def flags_of(r: Recurrence, states: States, initial: Array | None) -> dict[str, int]:
    """Return the constants that say where the states lie (STATES), in which dtype they are stored (STATE), and whether the call
    has one token of each sequence in a pool (SINGLE). initial: the array of states, or None."""
    single = states is not States.APART and r.q.shape[1] == 1
    return dict(STATE=dtype_of(initial), STATES=int(states), SINGLE=int(single))


def tokens_of(r: Recurrence) -> list[Array | None]:
    """Return the first operands of the kernels: q, k, v, the head, key and value gates, the constant decay, the scale, beta,
    erase and write. Each is in a dtype that the kernels read, or None where it is absent. With `along`, that array takes the
    place of beta."""
    decay = r.decay
    constant = None if decay.constant is None else decay.constant.astype(jnp.float32)
    gates = map(readable, (decay.head, decay.key, decay.value))
    beta, erase, write = arrays_of(r.erasure)
    if r.erasure is not None and r.erasure.along is not None:
        beta = r.erasure.along  # `along` comes with `erase`, so beta's operand is free
    return [r.q, r.k, r.v, *gates, constant, r.scale.astype(jnp.float32), *map(readable, (beta, erase, write))]


def readable(x: Array | None) -> Array | None:
    """Return x in a dtype that the kernels read: its own if that is in STORED, else float32. None for None."""
    return x if x is None or str(x.dtype) in STORED else x.astype(jnp.float32)


def dtype_of(x: Array | None) -> int:
    """Return the number of x's dtype in device/values.cuh; ABSENT for None."""
    return ABSENT if x is None else (STORED | COMPACT)[str(x.dtype)]


def launch(
    r: Recurrence, config: CudaConfig, operands, results, flags: dict[str, int], aliases=None
) -> Sequence[Array]:
    """Run device/scan.cu with one block of threads for each sequence, head and group of columns. flags: the result of
    `flags_of`. aliases: {index of an operand: index of the result that shares its memory}."""
    constants, blocks = plan(r, config, flags)
    numbers = r.q.shape[1], r.num_sequences
    return launch_kernel("scan", constants, blocks, config.threads, operands, results, numbers, aliases)


def launch_kernel(
    kernel: str, constants: dict[str, int], blocks: int, threads: int, operands, results, numbers, aliases=None
) -> Sequence[Array]:
    """Run device/<kernel>.cu, compiled with these constants, on the operands; return the results.

    blocks, threads: the number of blocks, and the threads of each. results: the shapes and dtypes. numbers: the kernel's last
    arguments, int32. aliases: {index of an operand: index of the result that shares its memory}.
    """
    image = image_of(kernel, tuple(constants.items()), architecture())
    return call(
        TARGET,
        operands,
        results,
        input_output_aliases=aliases,
        key=image.key,
        image=np.frombuffer(image.code, np.uint8),
        name=kernel,
        blocks=np.int64(blocks),
        threads=np.int64(threads),
        numbers=np.array(numbers, np.int32),
    )


def plan(r: Recurrence, config: CudaConfig, flags: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the constants of device/scan.cu, by name, and the number of blocks of threads. flags: the result of `flags_of`."""
    apart = flags["STATES"] == States.APART  # final states are then in float32
    constants, blocks = constants_of(r, config, 4 if apart else STORED_BYTES[flags["STATE"]])
    columns = constants["LANES"] * constants["VECTOR"]
    own = dict(TOKENS=staged_tokens(r, columns, config.threads))
    own |= dict(PACKED=int(r.boundaries is not None), REVERSE=int(r.reverse))
    return constants | own | flags, blocks


def constants_of(r: Recurrence, config: CudaConfig, stored_bytes: int) -> tuple[dict[str, int], int]:
    """Return (the constants that every kernel has, by name; the number of blocks of threads). stored_bytes: the bytes of an
    element of a stored state."""
    (N, H, K, V), decay = r.state_shape, r.decay
    lanes, vector = layout_of(V, config.columns, stored_bytes)
    beta, erase, write = (dtype_of(readable(x)) for x in arrays_of(r.erasure))
    constants = dict(
        H=H, HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2], K=K, V=V,
        THREADS=config.threads, LANES=lanes, VECTOR=vector,
        DTYPE=dtype_of(r.q), CONSTANT=ABSENT if decay.constant is None else 0,
        HEAD=dtype_of(readable(decay.head)), KEY=dtype_of(readable(decay.key)), VALUE=dtype_of(readable(decay.value)),
        BETA=beta, ERASE=erase, WRITE=write, ALONG=ABSENT if r.erasure is None else dtype_of(readable(r.erasure.along)),
        BEFORE=int(r.erasure is not None and r.erasure.before_decay),
    )  # fmt: skip
    return constants, -(-V // (lanes * vector)) * H * N


def staged_tokens(r: Recurrence, columns: int, threads: int) -> int:
    """Return the number of tokens that a block of threads stages in shared memory at a time, with their q, k, v, factors and
    sums: the most that fit, a power of two of at most MOST_STAGED and less than 2 T. columns: the columns of the state in a
    block."""
    K = r.q.shape[3]
    numbers = 2 * K + (2 * K if r.decay.key is not None else 0) + 2
    numbers += columns * (1 + threads // 32 + (2 if r.decay.value is not None else 0))
    numbers += K if r.erasure is not None else 0
    numbers += K if r.erasure is not None and r.erasure.along is not None else 0
    whole = 2 * columns * (threads // 32) if r.erasure is not None else 0
    tokens = MOST_STAGED
    while tokens > 1 and (4 * (numbers * tokens + whole) > SHARED_BYTES or tokens >= 2 * r.q.shape[1]):
        tokens //= 2
    return tokens


def architecture() -> str:
    """Return the architecture of the GPU that the program is for. Without a GPU return a Hopper GPU's, to compile ahead of
    time."""
    return "sm_" + "".join(map(str, capability()))

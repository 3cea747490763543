"""Launch the token-by-token kernel of device/scan.cu: whole sequences, and one step of decoding in a pool."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from glax._src.core.backend import local_device
from glax._src.core.recurrence import Outputs, Recurrence, varying_like
from glax._src.kernels.cuda.config import CudaConfig
from glax._src.kernels.cuda.images import image_of
from glax._src.kernels.cuda.library import TARGET

STORED = {"float32": 0, "bfloat16": 1, "float16": 2}  # `Stored` in device/values.cuh
ABSENT = -1
SHARED_BYTES = 48_000  # for `Staged`; a block has 49,152, and the compiler takes some
MOST_STAGED = 8  # tokens
NONE = jax.ShapeDtypeStruct((0,), jnp.float32)  # stands for an absent operand


def recurrent(r: Recurrence, config: CudaConfig) -> Outputs:
    """Compute the outputs [B, T, H, V] and the final states [N, H, K, V] token by token."""
    (B, T), state = r.q.shape[:2], r.state_shape
    results = [jax.ShapeDtypeStruct((B, T, state[1], state[3]), r.q.dtype), jax.ShapeDtypeStruct(state, jnp.float32)]
    initial = readable(r.initial_state)
    flags = dict(STATE=dtype_of(initial), FINAL=STORED["float32"], POOLED=0, STEP=0)
    operands = [*tokens_of(r), r.boundaries, None, initial]
    return Outputs(*launch(r, config, operands, results, flags))


def recurrent_step(r: Recurrence, pool: Array, slots: Array, config: CudaConfig) -> tuple[Array, Array]:
    """Advance B sequences by one token; return the outputs [B, 1, H, V] and the pool [P, H, K, V].

    The pool is updated in place if the caller donates it. Otherwise XLA copies it first.
    """
    B, H, V = r.q.shape[0], r.num_heads, pool.shape[3]
    results = [jax.ShapeDtypeStruct((B, 1, H, V), r.q.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    flags = dict(STATE=dtype_of(pool), FINAL=dtype_of(pool), POOLED=1, STEP=1)
    operands = [*tokens_of(r), None, slots, pool]
    output, pool = launch(r, config, operands, results, flags, aliases={len(operands) - 1: 1})
    return output, pool


def tokens_of(r: Recurrence) -> list[Array | None]:
    """q, k, v, the gates by token, the constant decay and the scale: the first operands of `scan`."""
    decay = r.decay
    constant = None if decay.constant is None else decay.constant.astype(jnp.float32)
    gates = map(readable, (decay.head, decay.key, decay.value))
    return [r.q, r.k, r.v, *gates, constant, r.scale.astype(jnp.float32)]


def readable(x: Array | None) -> Array | None:
    """x in a dtype that the kernel reads."""
    return x if x is None or str(x.dtype) in STORED else x.astype(jnp.float32)


def dtype_of(x: Array | None) -> int:
    return ABSENT if x is None else STORED[str(x.dtype)]


def launch(
    r: Recurrence, config: CudaConfig, operands, results, flags: dict[str, int], aliases=None
) -> Sequence[Array]:
    """Run `scan` with one block of threads for each sequence, head and group of columns."""
    constants, blocks = plan(r, config, flags)
    image = image_of(tuple(constants.items()), architecture())
    like = r.q
    operands = [varying_like(jnp.zeros(NONE.shape, NONE.dtype) if x is None else x, like) for x in operands]
    kind = jax.typeof(like)
    if not kind.sharding.mesh.empty:  # types that vary over mesh axes must name the mesh
        sharding = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
        results = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, manual_axis_type=kind.mat) for x in results
        ]
    return jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
        *operands,
        key=image.key,
        image=np.frombuffer(image.code, np.uint8),
        name="scan",
        blocks=np.int64(blocks),
        threads=np.int64(config.threads),
        numbers=np.array([r.q.shape[1], r.num_sequences], np.int32),
    )


def plan(r: Recurrence, config: CudaConfig, flags: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the constants of device/scan.cu, and the number of blocks."""
    (N, H, K, V), decay = r.state_shape, r.decay
    stored_bytes = max(4 if flags[name] in (ABSENT, 0) else 2 for name in ("STATE", "FINAL"))
    vector = math.gcd(V, config.columns, 16 // stored_bytes)
    lanes = min(32, max(1, config.columns // vector), 1 << (-(-V // vector) - 1).bit_length())
    columns = lanes * vector
    constants = dict(
        H=H, HQ=r.q.shape[2], HK=r.k.shape[2], HV=r.v.shape[2], K=K, V=V,
        THREADS=config.threads, LANES=lanes, VECTOR=vector,
        TOKENS=staged_tokens(r, columns, config.threads),
        DTYPE=dtype_of(r.q), CONSTANT=ABSENT if decay.constant is None else 0,
        HEAD=dtype_of(readable(decay.head)), KEY=dtype_of(readable(decay.key)), VALUE=dtype_of(readable(decay.value)),
        PACKED=int(r.boundaries is not None), REVERSE=int(r.reverse),
    )  # fmt: skip
    return constants | flags, -(-V // columns) * H * N


def staged_tokens(r: Recurrence, columns: int, threads: int) -> int:
    """Return how many tokens' q, k, v, factors and sums fit in shared memory: a power of two, at most MOST_STAGED."""
    K = r.q.shape[3]
    numbers = 2 * K + (2 * K if r.decay.key is not None else 0) + 2
    numbers += columns * (1 + threads // 32 + (2 if r.decay.value is not None else 0))
    tokens = MOST_STAGED
    while tokens > 1 and (4 * numbers * tokens > SHARED_BYTES or tokens >= 2 * r.q.shape[1]):
        tokens //= 2
    return tokens


def architecture() -> str:
    """The architecture of the GPU that the program is for; a Hopper GPU's where there is none, to compile ahead of time."""
    capability = str(getattr(local_device(), "compute_capability", None) or "9.0")
    return f"sm_{capability.replace('.', '')}"

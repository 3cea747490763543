"""Define the configs of the TPU kernels and the calls that they refuse. This module does not load Pallas."""

import dataclasses
from typing import Self

import jax.numpy as jnp

from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config, check_field
from glax._src.kernels.common.refusals import XLA
from glax._src.kernels.pallas_tpu.sizes import SMEM_BYTES, VMEM_BYTES, packing, pool_block, unit_bytes


@dataclasses.dataclass(frozen=True)
class TPUChunkedConfig(Config):
    """Configure the TPU kernels of the forward.

    chunk: the tokens of a chunk, a power of two from 32 to 256. units: the tiles of 128 lanes that a program computes in
    parallel, 1 to 1024; fewer where fewer fit the memory. A tile is one head of 128 channels, or two of 64. Raises ValueError,
    which names the field, for any other value.

    >>> glax.configs.TPUChunkedConfig(chunk=64)
    TPUChunkedConfig(chunk=64, units=8)
    """

    chunk: int = 128
    units: int = 8

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the default config for every call."""
        return cls()

    def __post_init__(self):
        check_field("chunk", self.chunk, 32, 256, power_of_two=True)
        check_field("units", self.units, 1, 1024)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        """Return the configs that are measured for a call."""
        return [cls(chunk, units) for chunk in (64, 128) for units in (2, 4, 8)]


def supports(r: Recurrence) -> str | None:
    """Return why the TPU kernels cannot compute r, or None if they can."""
    if r.q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, query is {r.q.dtype}"
    if 0 in (r.q.shape[0], r.q.shape[1], r.num_sequences):
        return "there is nothing to compute"
    K, V = r.state_shape[2:]
    pack, K_lanes, V_lanes = packing((r.q.shape[2], r.k.shape[2], r.v.shape[2]), K, V)
    erases = r.erasure is not None
    if unit_bytes(128, pack * K_lanes, pack * V_lanes, r.q.dtype.itemsize, erases, gradient=True) > VMEM_BYTES:
        return f"blocks of one head with key (K) {K} wide and value (V) {V} wide in {r.q.dtype} do not fit VMEM"
    if r.boundaries is not None and 24 * (r.q.shape[1] // 128 + r.num_sequences + 3) > SMEM_BYTES:
        return f"the steps of T={r.q.shape[1]} rows in {r.num_sequences} sequences do not fit scalar memory"
    return None


def priority(r: Recurrence) -> int:
    """Return the kernel's priority: 5, above all XLA kernels, from 16 tokens on; 0 below, where a chunk would be mostly padding
    and XLA's `recurrent` takes the call."""
    return 5 if r.q.shape[1] >= 16 else 0


MOST_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class TPUPoolConfig(Config):
    """Configure the kernels on a pool of states. There are no fields."""


def pooled_refusal(r: Recurrence) -> str | None:
    """Return why the kernels on a pool of states do not support r, or None."""
    if r.boundaries is not None:
        return "takes the same number of tokens of each sequence, got cu_seqlens: `recurrent` takes packed sequences"
    if r.q.shape[1] > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens of each sequence, got T={r.q.shape[1]}: `recurrent` takes more"
    if r.q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, query is {r.q.dtype}"
    if r.initial_state is not None and r.initial_state.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes states in float32 and bfloat16, got {r.initial_state.dtype}: cast the pool, or {XLA}"
    if 0 in r.q.shape:
        return "there is nothing to compute"
    if pool_block_of(r) is None:
        (T, (K, V)) = r.q.shape[1], r.state_shape[2:]
        return f"blocks of a state with key (K) {K} wide and value (V) {V} wide, and of T={T} tokens, do not fit VMEM"
    return None


def pool_block_of(r: Recurrence) -> tuple[int, int] | None:
    """Return (heads, columns of their states) of a program on a pool of states, for the call r; None if no program fits
    VMEM."""
    erasure = r.erasure or Erasure()
    has_row_gates = not (r.decay.head is None and r.decay.key is None and r.decay.constant is None)
    by_key = 2 + has_row_gates + (r.erasure is not None) + (erasure.along is not None)
    by_value = 2 + (r.decay.value is not None) + (erasure.beta is not None or erasure.write is not None)
    return pool_block(*r.state_shape[1:], r.q.shape[1], by_key, by_value)


@dataclasses.dataclass(frozen=True)
class TPUGradientConfig(TPUChunkedConfig):
    """Configure the TPU kernels of the gradient, with the fields and errors of `TPUChunkedConfig`."""

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return chunks of 128 tokens and 8 units, or 4 units where their blocks are larger: in float32, with per-key gates, and
        with beta or erase."""
        small = r.q.dtype == jnp.bfloat16 and r.decay.key is None and r.erasure is None
        return cls(units=8 if small else 4)

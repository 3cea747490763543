"""Define the configs of the TPU kernels and the calls that they refuse. This module does not load Pallas."""

import dataclasses
from typing import Self

import jax.numpy as jnp

from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config, check_field
from glax._src.kernels.pallas_tpu.sizes import SMEM_BYTES, VMEM_BYTES, packing, unit_bytes


@dataclasses.dataclass(frozen=True)
class TPUChunkedConfig(Config):
    """Configure the forward.

    chunk: the tokens of a chunk. units: the tiles of 128 lanes that a program computes in parallel. A tile is one head of 128
    channels, or two of 64.
    """

    chunk: int = 128
    units: int = 8

    def __post_init__(self):
        check_field("chunk", self.chunk, 32, 256, power_of_two=True)
        check_field("units", self.units, 1, 1024)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        return [cls(chunk, units) for chunk in (64, 128) for units in (2, 4, 8)]


def supports(r: Recurrence) -> str | None:
    """Return why the TPU kernels cannot compute r, or None if they can."""
    if r.q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, query is {r.q.dtype}"
    if 0 in (r.q.shape[0], r.q.shape[1], r.num_sequences):
        return "there is nothing to compute"
    K, V = r.state_shape[2:]
    pack, K_lanes, V_lanes = packing((r.q.shape[2], r.k.shape[2], r.v.shape[2]), K, V)
    if unit_bytes(128, pack * K_lanes, pack * V_lanes, r.q.dtype.itemsize) > VMEM_BYTES:
        return f"blocks of one head with key (K) {K} wide and value (V) {V} wide in {r.q.dtype} do not fit VMEM"
    if r.boundaries is not None and 24 * (r.q.shape[1] // 128 + r.num_sequences + 3) > SMEM_BYTES:
        return f"the steps of T={r.q.shape[1]} rows in {r.num_sequences} sequences do not fit scalar memory"
    return None


def priority(r: Recurrence) -> int:
    """Return a priority above XLA's, or 0 where a chunk would be mostly padding: XLA's `recurrent` takes a few tokens."""
    return 5 if r.q.shape[1] >= 16 else 0


@dataclasses.dataclass(frozen=True)
class TPUGradientConfig(TPUChunkedConfig):
    """Configure the gradient, with the fields of the forward's config."""

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return fewer units where the blocks of a unit are larger: with per-key gates, and in float32."""
        return cls(units=8 if r.q.dtype == jnp.bfloat16 and r.decay.key is None else 4)

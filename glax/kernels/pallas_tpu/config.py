"""The tunables of the TPU kernels, and what they refuse; without Pallas, which only their use loads."""

import dataclasses

import jax.numpy as jnp

from glax.recurrence import Recurrence
from glax.registry import Config


@dataclasses.dataclass(frozen=True)
class TPUChunkedConfig(Config):
    """chunk: tokens a chunk. units: tiles of 128 lanes (one head of 128, two of 64) that a program works on side by side."""

    chunk: int = 128
    units: int = 8

    def __post_init__(self):
        if self.chunk not in (32, 64, 128, 256):
            raise ValueError(f"chunk must be 32, 64, 128 or 256, got {self.chunk!r}")
        if not isinstance(self.units, int) or self.units < 1:
            raise ValueError(f"units must be an int of at least 1, got {self.units!r}")

    @classmethod
    def candidates(cls, r: Recurrence) -> "list[TPUChunkedConfig]":
        return [cls(chunk, units) for chunk in (64, 128) for units in (2, 4, 8)]


def supports(r: Recurrence) -> str | None:
    if r.q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, query is {r.q.dtype}"
    if r.decay.value is not None:
        return "gates per value channel are not written: they would scale the other side of the state"
    if 0 in (r.q.shape[0], r.q.shape[1], r.num_sequences):
        return "there is nothing to compute"
    return None


@dataclasses.dataclass(frozen=True)
class TPUGradientConfig(TPUChunkedConfig):
    """As the forward's."""

    @classmethod
    def heuristic(cls, r: Recurrence) -> "TPUGradientConfig":
        """Fewer units where a block of one is larger: gates per key channel and their gradient, and float32."""
        return cls(units=8 if r.q.dtype == jnp.bfloat16 and r.decay.key is None else 4)

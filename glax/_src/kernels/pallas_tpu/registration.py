"""Register the TPU kernels, for v5e and newer. One program scans a sequence with the state in VMEM.

A function here loads the module with its kernel, and with it Pallas, when a call runs it.
"""

import functools

from glax._src.core.decay import ROW_FORMS
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels.pallas_tpu.config import (
    TPUChunkedConfig,
    TPUGradientConfig,
    TPUPoolConfig,
    pooled_refusal,
    priority,
    supports,
)


@kernel_registry.register(
    "chunked",
    Platform.PALLAS,
    Backend.TPU,
    config=TPUChunkedConfig,
    supports=supports,
    priority=priority,
    forms=ROW_FORMS,
    erases=True,
    mixes_segments=lambda r: True,
)
def chunked(r: Recurrence, *, config: TPUChunkedConfig) -> Outputs:
    """Compute the recurrence in chunks. It reads q, k, v and gates once, and writes the output once."""
    from glax._src.kernels.pallas_tpu import forward

    return forward.chunked(r, config=config)


@kernel_registry.register(
    "chunked.vjp",
    Platform.PALLAS,
    Backend.TPU,
    config=TPUGradientConfig,
    supports=supports,
    priority=priority,
    forms=ROW_FORMS,
    erases=True,
    mixes_segments=lambda r: True,
)
def chunked_vjp(r: Recurrence, d_output, d_final, *, config: TPUGradientConfig) -> Recurrence:
    """Compute the gradient of every input of r by two scans: one for the states, and one in the opposite order for all else."""
    from glax._src.kernels.pallas_tpu import vjp

    return vjp.chunked_vjp(r, d_output, d_final, config=config)


pooled = functools.partial(
    kernel_registry.register,
    platform=Platform.PALLAS,
    backend=Backend.TPU,
    config=TPUPoolConfig,
    supports=pooled_refusal,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
)


@pooled("recurrent.step")
def recurrent_step(r: Recurrence, pool, slots, *, config: TPUPoolConfig):
    """Advance each sequence by its T tokens: return the outputs [B, T, H, V] and the pool. Each state in the pool is read once
    and written once."""
    from glax._src.kernels.pallas_tpu import pool as pools

    return pools.recurrent_step(r, pool, slots)


@pooled("recurrent.verify")
def recurrent_verify(r: Recurrence, pool, slots, *, config: TPUPoolConfig):
    """Compute the outputs of each sequence's T tokens, [B, T, H, V]. Each state in the pool is read once, and the pool does not
    change."""
    from glax._src.kernels.pallas_tpu import pool as pools

    return pools.recurrent_verify(r, pool, slots)

"""Kernels in Pallas for TPUs, v5e and newer: one program walks a sequence with the state in VMEM."""

from glax.kernels.pallas_tpu import chunked, gradient

__all__ = ["chunked", "gradient"]

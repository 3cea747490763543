"""Kernels in plain JAX: they run everywhere, and the others are measured against them."""

from glax._src.kernels.xla import chunk_scan, recurrent

__all__ = ["chunk_scan", "recurrent"]

"""Kernels in plain JAX: they run everywhere, and the others are measured against them."""

from glax.kernels.xla import chunked, recurrent

__all__ = ["chunked", "recurrent"]

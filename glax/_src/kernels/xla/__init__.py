"""Register kernels in plain JAX. They run on every platform, and other kernels are measured against them."""

from glax._src.kernels.xla import chunk_scan, recurrent

__all__ = ["chunk_scan", "recurrent"]

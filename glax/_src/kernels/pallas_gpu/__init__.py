"""Provide kernels for Hopper GPUs, in Pallas Mosaic GPU."""

from glax._src.kernels.pallas_gpu import registration
from glax._src.kernels.pallas_gpu.config import HopperConfig

__all__ = ["HopperConfig", "registration"]

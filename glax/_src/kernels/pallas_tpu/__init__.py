"""Provide kernels for TPUs, v5e and newer, in Pallas."""

from glax._src.kernels.pallas_tpu import registration
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig, TPUGradientConfig

__all__ = ["TPUChunkedConfig", "TPUGradientConfig", "registration"]

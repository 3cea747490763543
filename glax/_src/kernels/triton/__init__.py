"""Provide kernels for NVIDIA GPUs from compute capability 8.0 on, in Triton."""

from glax._src.kernels.triton import registration
from glax._src.kernels.triton.config import GradientConfig, TokenConfig, TritonChunkedConfig, TritonReplayConfig

__all__ = ["GradientConfig", "TokenConfig", "TritonChunkedConfig", "TritonReplayConfig", "registration"]

"""Layers and a small language model in Flax NNX. Needs flax, which `import glax` does not."""

from glax.nn.layers import GatedLinearAttention
from glax.nn.model import ByteLM, ByteLMConfig

__all__ = ["ByteLM", "ByteLMConfig", "GatedLinearAttention"]

"""Provide the layers of this family's models in Flax NNX. It needs flax, which `import glax` does not."""

from glax.nn.attention import Attention
from glax.nn.convolution import ShortConvolution
from glax.nn.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from glax.nn.gla import GatedLinearAttention, SimpleGatedLinearAttention
from glax.nn.hgrn2 import HGRN2Attention
from glax.nn.mamba2 import Mamba2
from glax.nn.mlp import Experts, SparseMLP, SwiGLU
from glax.nn.norms import LayerNorm, RMSNorm, RMSNormGated
from glax.nn.retention import LightningAttention, MultiScaleRetention
from glax.nn.rwkv6 import RWKV6Attention, RWKV6FeedForward

__all__ = [
    "Attention", "DeltaNet", "Experts", "GatedDeltaNet", "GatedLinearAttention", "HGRN2Attention", "KimiDeltaAttention",
    "LayerNorm", "LightningAttention", "Mamba2", "MultiScaleRetention", "RMSNorm", "RMSNormGated", "RWKV6Attention",
    "RWKV6FeedForward", "ShortConvolution", "SimpleGatedLinearAttention", "SparseMLP", "SwiGLU",
]  # fmt: skip

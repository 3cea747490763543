"""Provide the layers of this family's models in Flax NNX. It needs flax, which `import glax` does not."""

from glax.nn.attention import Attention
from glax.nn.convolution import ShortConvolution
from glax.nn.delta import Comba, DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from glax.nn.gated_slot_attention import GatedSlotAttention
from glax.nn.gla import GatedLinearAttention, SimpleGatedLinearAttention
from glax.nn.hgrn import HGRN2Attention, HGRNAttention
from glax.nn.latent_attention import MultiHeadLatentAttention
from glax.nn.layer import with_signature as _with_signature
from glax.nn.mamba1 import Mamba1
from glax.nn.mamba2 import Mamba2
from glax.nn.mamba3 import Mamba3
from glax.nn.mlp import Experts, SparseMLP, SwiGLU
from glax.nn.mlstm import MLSTM
from glax.nn.norms import LayerNorm, RMSNorm, RMSNormGated
from glax.nn.retention import LightningAttention, MultiScaleRetention
from glax.nn.rg_lru import RGLRU
from glax.nn.rwkv4 import RWKV4Attention, RWKV4FeedForward
from glax.nn.rwkv6 import RWKV6Attention, RWKV6FeedForward
from glax.nn.rwkv7 import RWKV7Attention, RWKV7FeedForward

__all__ = [
    "MLSTM", "RGLRU", "Attention", "Comba", "DeltaNet", "Experts", "GatedDeltaNet", "GatedDeltaProduct", "GatedLinearAttention",
    "GatedSlotAttention", "HGRN2Attention", "HGRNAttention", "KimiDeltaAttention", "LayerNorm", "LightningAttention",
    "Mamba1", "Mamba2", "Mamba3", "MultiHeadLatentAttention", "MultiScaleRetention", "RMSNorm", "RMSNormGated",
    "RWKV4Attention", "RWKV4FeedForward", "RWKV6Attention", "RWKV6FeedForward",
    "RWKV7Attention", "RWKV7FeedForward", "ShortConvolution", "SimpleGatedLinearAttention", "SparseMLP", "SwiGLU",
]  # fmt: skip

for _name in __all__:
    _with_signature(globals()[_name])

"""The recurrent family of ejkernel by its names: change the import, keep the calls.

`g` of shape [B, T, H] is a gate a head, of shape [B, T, H, K] one a key channel. (ejkernel reads its `g` in either way, depending
on the platform.)
"""

import dataclasses

from glax.api import recurrent, recurrent_gla
from glax.api import recurrent_attention as _recurrent_attention
from glax.kernels.xla.chunked import ChunkedConfig
from glax.operation import RecurrentAttention
from glax.registry import Backend, Config, kernel_registry

__all__ = [
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "kernel_registry",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
]


@dataclasses.dataclass(frozen=True)
class RecurrentAttentionConfig:
    """ejkernel's config, as far as it can mean something here.

    block_q: tokens a chunk; platform: as in `recurrent`; backend: "any", or the one that JAX computes on. ejkernel's other
    fields never reached its kernels, and are not taken.
    """

    block_q: int = 64
    platform: str = "auto"
    backend: str = "any"

    def __post_init__(self):
        if self.backend not in (Backend.ANY, here := Backend.here()):
            raise ValueError(
                f"backend must be 'any' or {str(here)!r}, on which JAX computes here, got {self.backend!r}"
            )


def recurrent_attention(
    *args, cfg: RecurrentAttentionConfig | Config | None = None, platform: str | None = None, **kwargs
):
    """`glax.recurrent_attention`, whose cfg may be ejkernel's RecurrentAttentionConfig."""
    if isinstance(cfg, RecurrentAttentionConfig):
        platform = cfg.platform if platform is None else platform
        cfg = ChunkedConfig(cfg.block_q)
    return _recurrent_attention(*args, cfg=cfg, platform=platform, **kwargs)

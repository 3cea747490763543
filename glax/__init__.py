"""Exact, fast kernels for gated linear attention and the recurrent linear attentions around it, in JAX."""

from glax._version import __version__
from glax.api import (
    lightning_attention,
    recurrent,
    recurrent_attention,
    recurrent_gla,
    retention,
    simple_gla,
)
from glax.recurrence import Outputs
from glax.registry import UnsupportedError
from glax.step import recurrent_step

__all__ = [
    "Outputs",
    "UnsupportedError",
    "__version__",
    "lightning_attention",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "recurrent_step",
    "retention",
    "simple_gla",
]

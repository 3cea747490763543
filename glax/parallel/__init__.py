"""The functions of `glax` with their arrays spread over a mesh: batch, heads, and the sequence itself.

    recurrent(query, key, value, ..., mesh=mesh, batch_axis="data", head_axis="model", sequence_axis="sequence")

and every variant alike. Results and gradients are those of the function of the same name in `glax`; see `Spread` for what
moves between devices.
"""

from glax._src.parallel.ops import (
    lightning_attention,
    recurrent,
    recurrent_attention,
    recurrent_gla,
    retention,
    simple_gla,
)
from glax._src.parallel.sharding import Spread

__all__ = [
    "Spread",
    "lightning_attention",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "retention",
    "simple_gla",
]

"""Run the functions of `glax` on arrays that are sharded over a mesh: over the batch, the heads and the sequence.

    recurrent(query, key, value, ..., mesh=mesh, batch_axis="data", head_axis="model", sequence_axis="sequence")

Every variant takes the same options. Results and gradients equal those of the function of the same name in `glax`. `Spread`
states how many bytes move between devices.
"""

from glax._src.parallel.ops import (
    delta_rule,
    gated_delta_rule,
    kda,
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
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "lightning_attention",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "retention",
    "simple_gla",
]

"""Find the newest reset of every token within its chunk. A token draws on tokens from its newest reset on.

With r_i the position of token i's newest reset, in scan order, or -1 without a reset in the chunk at or before i:

    token i draws on token j of its chunk      if r_i <= j <= i
    token i draws on the state S that enters   if r_i = -1
    token j reaches the state that leaves      if r_last <= j, and S reaches it if r_last = -1

Gates stay as they are: their sums within a chunk cross a reset only between tokens of which neither draws on the other. So a
reset needs no gate of -inf, which would put its chunk out of range.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from glax._src.kernels.pallas_gpu.plan import C

LOG_OF_RESET = -1e30  # the log decay of a state that a reset clears; finite, so that sums stay finite


def newest_resets(resets: Bool[Array, "B T"], reverse: bool) -> Int[Array, "B chunks _"]:
    """Return r_i of every token, by its row in memory, [B, chunks, C]. It is a maximum over pairs: a cumulative maximum takes
    XLA several kernels."""
    order = np.arange(C, dtype=np.int32)
    order = order[::-1] if reverse else order
    # [B, chunks, C]
    marks = jnp.pad(resets, ((0, 0), (0, -resets.shape[1] % C))).reshape(resets.shape[0], -1, C)
    # [B, chunks, C, C]: token i, reset j
    counts = marks[:, :, None, :] & (order[None, :] <= order[:, None])
    return jnp.max(jnp.where(counts, order, np.int32(-1)), axis=3)

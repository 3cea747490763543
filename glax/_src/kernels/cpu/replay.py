"""Compute one token in native code, from a stored state and the tokens since it was written. native/replay.h has the formulas."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.recurrence import Recurrence
from glax._src.core.ring import RingedStates
from glax._src.kernels.common.foreign import NONE, call
from glax._src.kernels.cpu.delta import erasure_operands
from glax._src.kernels.cpu.operands import STORED, operands_of


def recurrent_replay(
    r: Recurrence, pool: RingedStates, slots: Int[Array, "B"] | None
) -> tuple[Float[Array, "B H V"], RingedStates]:
    """Advance B sequences by one token, in place in the pool and its rings. Return the outputs [B, H, V] and the pool.

    slots: the row of the pool of each sequence, where one outside of the pool stands for no sequence. None if sequence b has
    row b.
    """
    *tokens, _, _, scale = operands_of(r.replace(initial_state=None))
    state, *others = pool.arrays()
    along = None if r.erasure is None else r.erasure.along
    if along is not None and along.dtype not in STORED:
        along = along.astype(jnp.float32)
    operands = [*tokens, state, slots, scale, *erasure_operands(r), along, *others]
    # The places of the pool's arrays among the operands.
    places = [len(tokens), *range(len(operands) - len(others), len(operands))]
    before = [operands[i] for i in places]
    output = jax.ShapeDtypeStruct((r.q.shape[0], r.num_heads, r.v.shape[3]), r.q.dtype)
    results = [output, *(NONE if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before)]
    aliases = {place: 1 + i for i, place in enumerate(places) if operands[place] is not None}
    attributes = dict(replay=pool.replay, before_decay=r.erasure is not None and r.erasure.before_decay)
    found = call("glax_replay", operands, results, input_output_aliases=aliases, **attributes)
    return found[0], pool.with_arrays([None if x is None else y for x, y in zip(before, found[1:], strict=True)])

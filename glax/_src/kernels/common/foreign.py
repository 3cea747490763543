"""Call foreign code through XLA's foreign function interface."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.recurrence import varying_like
from glax._src.kernels.common.in_place import unfused

NONE = jax.ShapeDtypeStruct((0,), jnp.float32)  # stands for an absent operand or result


def call(
    target: str, operands: Sequence[Array | None], results: Sequence[jax.ShapeDtypeStruct], **options
) -> Sequence[Array]:
    """Return the results of the handler that is registered with XLA as `target`.

    operands: arrays; None is passed as an empty array, except for the first. results: the shape and dtype of each result.
    options: the handler's attributes by name, and input_output_aliases {index of an operand: index of the result that shares
    its memory}.

    Inside shard_map, all operands and results vary over the mesh axes of the first operand.
    """
    like = operands[0]
    assert like is not None
    given = [varying_like(jnp.zeros(NONE.shape, NONE.dtype) if x is None else x, like) for x in operands]
    kind = jax.typeof(like)
    if not kind.sharding.mesh.empty:  # types that vary over mesh axes must name the mesh
        sharding = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
        results = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, manual_axis_type=kind.mat) for x in results
        ]
    aliases = options.pop("input_output_aliases", None) or {}
    given = [unfused(x) if i in aliases else x for i, x in enumerate(given)]
    found = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*given, **options)
    return [unfused(x) if i in aliases.values() else x for i, x in enumerate(found)]

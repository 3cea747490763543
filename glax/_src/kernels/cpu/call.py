"""Call the library of native kernels on the arrays of a recurrence."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from glax._src.core.recurrence import Recurrence, varying_like

STORED = (jnp.float32, jnp.bfloat16, jnp.float16)
NONE = jax.ShapeDtypeStruct((0,), jnp.float32)  # stands for an absent operand or result


def call(
    target: str, operands: Sequence[Array | None], results: list[jax.ShapeDtypeStruct], **options
) -> Sequence[Array]:
    """Call the library's `target`. Inside shard_map, all operands and results vary over the mesh axes of q, the first operand."""
    like = operands[0]
    assert like is not None
    given = [varying_like(jnp.zeros(NONE.shape, NONE.dtype) if x is None else x, like) for x in operands]
    kind = jax.typeof(like)
    if not kind.sharding.mesh.empty:  # types that vary over mesh axes must name the mesh
        sharding = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
        results = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, manual_axis_type=kind.mat) for x in results
        ]
    aliases = options.pop("input_output_aliases", None)
    return jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*given, **options)


def operands_of(r: Recurrence) -> list[Array | None]:
    """Return the library's operands: gates in a dtype that it reads, constants and states in float32."""
    decay = r.decay
    gates = [
        x if x is None or x.dtype in STORED else x.astype(jnp.float32) for x in (decay.head, decay.key, decay.value)
    ]
    in_float32 = [None if x is None else x.astype(jnp.float32) for x in (decay.constant, r.initial_state)]
    boundaries = None if r.boundaries is None else r.boundaries.astype(jnp.int32)
    return [r.q, r.k, r.v, *gates, *in_float32, boundaries, r.scale.astype(jnp.float32)]

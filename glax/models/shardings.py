"""Choose the placement of a model's parameters on a mesh."""

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glax.nn.parts import EMBED, HEADS, MLP, VOCABULARY

# The axes of a mesh over which a logical axis is spread: the first that the mesh has, whose size divides the axis.
RULES: dict[str, tuple[str, ...]] = {
    VOCABULARY: ("model", "tensor"),
    HEADS: ("model", "tensor"),
    MLP: ("model", "tensor"),
    EMBED: ("fsdp",),
}


def partition_spec(axes: tuple[str | None, ...] | None, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return the PartitionSpec of a parameter with these logical axes. The mesh axes "model" or "tensor", and "fsdp", shard it
    where they divide it."""
    if axes is None:
        return PartitionSpec()
    taken, chosen = set(), []
    for axis, size in zip(axes, shape, strict=True):
        rules = () if axis is None else RULES.get(axis, ())
        fits = [x for x in rules if x in mesh.shape and size % mesh.shape[x] == 0 and x not in taken]
        chosen.append(fits[0] if fits else None)
        taken |= set(fits[:1])
    return PartitionSpec(*chosen)


def shard(model: nnx.Module, mesh: Mesh):
    """Move every parameter of `model` to the devices that `partition_spec` names."""
    for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spec = partition_spec(param.get_metadata().get("out_sharding"), param.shape, mesh)
        param[...] = jax.device_put(param[...], NamedSharding(mesh, spec))

"""Run functions with automatic axes where their arrays lie on a mesh with explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec


def spec_of(x) -> PartitionSpec:
    """Return the PartitionSpec in the type of x. None and arrays of NumPy count as replicated."""
    return jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else PartitionSpec()


def explicit_mesh(tree) -> AbstractMesh | None:
    """Return the context's mesh if it has explicit axes, else the first such mesh of an array of `tree`, or None."""
    types = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    meshes = (jax.sharding.get_abstract_mesh(), *types)
    return next((mesh for mesh in meshes if not mesh.empty and mesh.explicit_axes), None)


def with_automatic_axes(f: Callable, specs, *operands) -> Any:
    """Return f(*operands). If the operands lie on explicit axes, these axes are automatic inside of f, and the results are then
    sharded by `specs`, a tree of PartitionSpecs like f's results."""
    mesh = explicit_mesh(operands)
    if mesh is None:
        return f(*operands)
    leaves, structure = jax.tree.flatten(operands)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]

    def inside(*arrays):
        given = iter(arrays)
        return f(*structure.unflatten([next(given) if isinstance(x, jax.Array) else x for x in leaves]))

    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=placed)(*arrays)

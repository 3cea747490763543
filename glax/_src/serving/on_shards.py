"""Run a call on a pool of states whose heads are sharded along explicit axes of a mesh. Each device advances its own heads.

Every device has all slots of the pool, because any sequence may have any slot. So tokens that are sharded over the batch are
gathered, and every device reads all of them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glax._src.solve.partitioning import all_manual, flat_axes, is_spread_by_type

BY_HEAD = {"beta", "g_gamma"}  # arguments [..., H]
# Arguments [..., H, K] or [..., H, V].
BY_CHANNEL = {"query", "key", "value", "gk", "gv", "erase", "write", "erase_along"}
STATES = {"state", "pool"}  # [P, H, K, V]


def on_shards(run: Callable, arrays: dict[str, Any], results: Callable[[Any], Any]) -> Any:
    """Return run(arrays). If an array is sharded along an explicit axis, each device runs it on its own heads.

    arrays: the public arguments by name, with "query" and "slots" among them. If slots is None, there is no pool, and nothing
    is divided here. results: a function from the axis of heads to the PartitionSpecs of the results.

    Raises ValueError if a pool is sharded otherwise than by heads, or if the axis does not divide the heads.
    """
    if is_whole(arrays):
        return run(arrays)
    mesh, axis, specs = layout_of(arrays)

    def inside(given):
        key = given.get("rounding_key")
        if key is not None and axis is not None:  # else every device would draw the same bits for its heads
            given = given | dict(rounding_key=jax.random.fold_in(key, jax.lax.axis_index(axis)))
        return run(dict.fromkeys(arrays) | given)

    names = set(mesh.axis_names) - set(mesh.manual_axes)
    each = jax.shard_map(
        inside, mesh=mesh, in_specs=(specs,), out_specs=results(axis), check_vma=False, axis_names=names
    )
    return each(placed(mesh, arrays, specs))


def gathered(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays, resharded so that every device has the tokens of all sequences, for its own heads.

    The results are sharded by their types, over heads alone. arrays: the public arguments by name. Raises ValueError if a pool
    is sharded otherwise than by heads, or if the axis does not divide the heads.
    """
    if is_whole(arrays):
        return arrays
    mesh, _, specs = layout_of(arrays)
    return arrays | placed(mesh, arrays, specs)


def is_whole(arrays: dict[str, Any]) -> bool:
    """Return whether a call runs undivided: without a pool, in a shard_map, or with no array sharded along an explicit axis."""
    return arrays["slots"] is None or all_manual(jax.sharding.get_abstract_mesh()) or not is_spread_by_type(arrays)


def layout_of(arrays: dict[str, Any]) -> tuple[Any, Any, dict[str, P]]:
    """Return (the mesh, the axis of the heads, the PartitionSpec of each array that is not None)."""
    mesh = next(mesh for x in jax.tree.leaves(arrays) if not (mesh := jax.typeof(x).sharding.mesh).empty)
    axis, tokens = axis_of_heads(mesh, arrays), arrays["query"].ndim
    return mesh, axis, {name: head_spec(name, x, tokens, axis) for name, x in arrays.items() if x is not None}


def placed(mesh, arrays: dict[str, Any], specs: dict[str, P]) -> dict[str, Any]:
    """Return the arrays, resharded by their specs. Arrays without a spec are left out."""

    def place(name: str, spec: P):
        return jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, spec)), arrays[name])

    return {name: place(name, spec) for name, spec in specs.items()}


def axis_of_heads(mesh, arrays: dict[str, Any]):
    """Return the mesh axis, or axes, along which the heads of the pool are sharded.

    If the pool's heads are not sharded, these are the axes of the first other array whose heads are sharded; None if none are.
    Raises ValueError if a pool is sharded otherwise than by heads, or if the axis does not divide the heads.
    """
    found = None
    given = [
        (name, x, head_dimension(name, x.ndim, arrays["query"].ndim))
        for name, x in sorted(arrays.items(), key=lambda item: item[0] not in STATES)
        if x is not None
    ]
    for name, x, dimension in given:
        first = jax.tree.leaves(x)[0]  # of states in 8 bits, all arrays of which lie alike
        sharded = (*jax.typeof(first).sharding.spec, *[None] * x.ndim)[: x.ndim]
        if name in STATES:
            check_pool(name, sharded)
        if found is None and dimension is not None:
            found = sharded[dimension]
    size = math.prod(mesh.shape[name] for name in flat_axes(found))
    for name, x, dimension in given:
        if dimension is not None and x.shape[dimension] > 1 and x.shape[dimension] % size:
            raise ValueError(
                f"heads of {name} are sharded along the axis {found!r} of {size} devices, which must divide their number, "
                f"got {x.shape[dimension]}: shard the heads along a smaller axis, or leave them on every device"
            )
    return found


def check_pool(name: str, sharded: tuple):
    """Raise ValueError if a pool is sharded otherwise than by heads."""
    for letter, axis in zip("PHKV", sharded, strict=True):
        if axis is not None and letter != "H":
            raise ValueError(
                f"{name} [P, H, K, V] with slots may be sharded by heads alone, got the axis {axis!r} along {letter}: "
                f"any sequence may have any slot, so lay {name} out as PartitionSpec(None, ...) there"
            )


def head_dimension(name: str, ndim: int, query_ndim: int) -> int | None:
    """Return the dimension of an argument that has the heads, or None. query_ndim: the number of dimensions of the query."""
    if name in STATES:
        return 1
    if name in BY_CHANNEL or (name == "g" and ndim == query_ndim):
        return ndim - 2
    if name in BY_HEAD or name == "g":
        return ndim - 1
    return 0 if name == "bonus" else None


def head_spec(name: str, x, query_ndim: int, axis) -> P:
    """Return the PartitionSpec of an argument: its heads along `axis`, or a copy on each device if it has no heads, or one."""
    dimension = head_dimension(name, x.ndim, query_ndim)
    if dimension is None or (x.shape[dimension] == 1 and name not in STATES):
        return P()
    return P(*[None] * dimension, axis)

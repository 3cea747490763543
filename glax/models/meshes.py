"""Lay a training run over a mesh of named axes, on one process or many."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glax.models.shardings import Placement

# data: copies of the model, each with rows of its own. fsdp: shards of the parameters, each with rows of its own.
# expert: shards of experts, each with rows of its own. tensor: shards of heads, MLPs and vocabulary.
# sequence: shards of every row.
AXES = ("data", "fsdp", "tensor", "expert", "sequence")
ROWS = ("data", "fsdp", "expert")  # the axes that shard a batch's rows
TOKENS = P(ROWS, "sequence")


def check_one_open_axis(wanted: Mapping[str, int]) -> str | None:
    """Return the name of the axis of size -1 in `wanted`, {name: size}; None if there is none. Raises ValueError if there are
    several."""
    open_axes = [name for name, size in wanted.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(
            f"one axis alone may be -1, what is left of the devices, got {' and '.join(open_axes)}: give sizes"
        )
    return open_axes[0] if open_axes else None


def sizes_of(wanted: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return {name: size} of the axes. The axis of size -1 gets `devices` divided by the product of the other sizes.

    Raises ValueError if two axes are -1, if the quotient is no integer, or if the product of the sizes is above `devices`.
    """
    open_axis = check_one_open_axis(wanted)
    given = math.prod(size for size in wanted.values() if size != -1)
    product = " times ".join(wanted)
    if open_axis and devices % given:
        raise ValueError(
            f"{open_axis} = -1 needs other axes whose product divides the {devices} devices, got a product of {given}"
        )
    if given > devices:
        raise ValueError(f"{product} must be at most {devices}, the number of devices, got {given}")
    return {name: devices // given if size == -1 else size for name, size in wanted.items()}


def training_mesh(wanted: Mapping[str, int]) -> Mesh:
    """Return the mesh with the axes "data", "fsdp", "tensor", "expert" and "sequence", of the `wanted` sizes, over the first of
    `jax.devices()`, as many as the product of the sizes.

    wanted: {name: size} of all five axes; one size may be -1, for as many as the devices allow. Raises ValueError if there are
    fewer devices, and with several processes also if the mesh would not have every device.

    >>> from glax.models.meshes import training_mesh
    >>> dict(training_mesh(dict(data=1, fsdp=1, expert=1, sequence=1, tensor=1)).shape)["data"]
    1
    """
    sizes = sizes_of(wanted, jax.device_count())
    count = math.prod(sizes.values())
    if jax.process_count() > 1 and count != jax.device_count():
        raise ValueError(
            f"{' times '.join(AXES)} must be {jax.device_count()}, the devices of all {jax.process_count()} processes, got "
            f"{count}: set one axis to -1"
        )
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes[x] for x in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return x with `sharding`, over the devices of all processes. x: an array that every process has whole."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def on_mesh(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return x with `sharding`. An array of another sharding must be whole on every process."""
    return x if x.sharding.is_equivalent_to(sharding, x.ndim) else placed(np.asarray(x), sharding)


def rows_here(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Return the indices of the rows, on the first axis of an array of `shape` with `sharding`, of which a device of this
    process holds any part, in ascending order."""
    parts = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for part in parts if part is not None for row in range(*part[0].indices(shape[0]))})


def placed_rows(x: np.ndarray, rows: Sequence[int], count: int, sharding: NamedSharding) -> jax.Array:
    """Return an array [count, *shape of a row] with `sharding`, over the devices of all processes. x: the rows that this
    process's devices hold. rows: the index in the result of each row of x."""
    where = {row: i for i, row in enumerate(rows)}

    def part(index):
        chosen = [where[row] for row in range(*index[0].indices(count))]
        return x[chosen][:, index[1]]

    return jax.make_array_from_callback((count, *x.shape[1:]), sharding, part)


def shardings_of(model: nnx.Module, state: nnx.State, mesh: Mesh) -> nnx.State:
    """Return the shardings of a model's variables. Parameters are sharded by their logical axes; all other variables are
    replicated."""
    placement, everywhere = Placement(model, mesh), NamedSharding(mesh, P())
    flat = [
        (
            path,
            x.replace(
                placement.sharding(path, x) if issubclass(getattr(x, "type", type(x)), nnx.Param) else everywhere
            ),
        )
        for path, x in nnx.to_flat_state(state)
    ]
    placement.say()
    return nnx.from_flat_state(flat)


def shardings_like(tree, params: Mapping[str, NamedSharding], default: NamedSharding):
    """Return a sharding for each leaf of an optimizer's state: the sharding of the parameter whose path ends the leaf's path,
    or else `default`.

    An optimizer holds its moments in trees that repeat the parameters' paths. params: {path of a parameter: sharding}.
    """

    def chosen(path, x):
        name = jax.tree_util.keystr(path)
        found = [sharding for end, sharding in params.items() if name.endswith(end) and len(sharding.spec) <= x.ndim]
        return found[0] if found else default

    return jax.tree_util.tree_map_with_path(chosen, tree)


def is_first() -> bool:
    """Return whether this is process 0, which writes for all."""
    return jax.process_index() == 0


def gathered_texts(value: str) -> list[str]:
    """Return the `value` of each process, in the order of the processes. All processes must call it."""
    if jax.process_count() == 1:
        return [value]
    raw = np.frombuffer(value.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(raw.size)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: raw.size] = raw
    rows = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

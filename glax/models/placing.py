"""Copy arrays of mapped files to devices, shard by shard, without a second copy on the host.

A CPU's array takes over the buffer that the values are copied into. An accelerator is sent the values as the file has them, and
transposes and casts them itself. No array shares memory with a file, so a file may change once its values are placed.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

ALIGNMENT = 64  # bytes; a CPU's array takes over a buffer that begins at a multiple of 64 bytes, and copies any other
LINE = 64  # bytes of a cache line: a tile writes whole lines of its target
COLUMNS = 1024  # columns of a tile: the numbers of a row that are read together
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def placed(
    rows: Iterable[np.ndarray],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
    *,
    is_stacked: bool,
    release: Callable[[], None],
) -> jax.Array:
    """Return an array of `shape` and `dtype` on the devices of `sharding`, or on the default device if that is None. dtype: one
    that JAX has.

    rows: the values: one array of this shape, or with is_stacked one array for each index of the first axis. They are read
    once, in order. release: a function that is called after each array, when the pages of its file are not needed again.
    """
    if sharding is None:
        places = {None: tuple(slice(0, size) for size in shape)}
        platform = next(iter(jax.device_put(np.zeros(())).devices())).platform
    else:
        found = sharding.addressable_devices_indices_map(shape)
        places = {device: whole_slices(index, shape) for device, index in found.items()}
        platform = next(iter(places)).platform
    kind = HostShard if platform == "cpu" else DeviceShard
    shards = [kind(device, place, dtype, is_stacked) for device, place in places.items()]
    for i, row in enumerate(rows):
        for shard in shards:
            shard.add(i, row)
        release()
    arrays = [shard.array() for shard in shards]
    return arrays[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def whole_slices(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index as slices whose beginnings and ends are numbers. index: a tuple of slices into an array of `shape`."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


class HostShard:
    """Fill the shard of one CPU device in the memory that its array will have.

    place: the slices of the whole array that the shard holds. is_stacked: whether the whole array comes as one array for each
    index of its first axis. add(i, row) copies what belongs to the shard from array number i, and array() returns the shard.
    """

    def __init__(self, device, place: tuple[slice, ...], dtype: np.dtype, is_stacked: bool):
        self.device, self.place, self.is_stacked = device, place, is_stacked
        self.target = aligned(tuple(part.stop - part.start for part in place), dtype)

    def add(self, i: int, row: np.ndarray):
        if not self.is_stacked:
            fill(self.target, row[self.place])
        elif self.place[0].start <= i < self.place[0].stop:
            fill(self.target[i - self.place[0].start], row[self.place[1:]])

    def array(self) -> jax.Array:
        return jax.device_put(self.target, self.device)


class DeviceShard:
    """Send the values of a shard to its device as the file has them, and let the device transpose, stack and cast them. The
    arguments and methods are those of `HostShard`."""

    def __init__(self, device, place: tuple[slice, ...], dtype: np.dtype, is_stacked: bool):
        self.device, self.place, self.dtype, self.is_stacked = device, place, dtype, is_stacked
        self.parts: list[jax.Array] = []
        self.is_swapped = False

    def add(self, i: int, row: np.ndarray):
        if self.is_stacked and not self.place[0].start <= i < self.place[0].stop:
            return
        part = row[self.place[1:] if self.is_stacked else self.place]
        self.is_swapped = is_transposed(part)
        sent = jax.device_put(np.swapaxes(part, -2, -1) if self.is_swapped else part, self.device)
        self.parts.append(sent.block_until_ready())  # until then the device may read the file's pages

    def array(self) -> jax.Array:
        is_done = not (self.is_stacked or self.is_swapped) and self.parts[0].dtype == self.dtype
        return self.parts[0] if is_done else arranged(self.parts, self.is_swapped, self.is_stacked, self.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def arranged(parts: list[jax.Array], is_swapped: bool, is_stacked: bool, dtype: np.dtype) -> jax.Array:
    """Return the parts stacked, or the only part, in `dtype`. is_swapped: whether the last two axes of the parts are swapped,
    and must be swapped back."""
    parts = [(jnp.swapaxes(part, -2, -1) if is_swapped else part).astype(dtype) for part in parts]
    return jnp.stack(parts) if is_stacked else parts[0]


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose memory is aligned such that a JAX array of the CPU can take it over."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def is_transposed(x: np.ndarray) -> bool:
    """Return whether x [..., rows, columns] lies in memory column by column, as a transposed view of a file's matrix does."""
    return x.ndim > 1 and x.strides[-2] == x.itemsize and min(x.shape[-2:]) > 1


def fill(target: np.ndarray, source: np.ndarray):
    """Copy the values of `source` to `target`, cast to its dtype. A transposed matrix is copied in tiles that a cache holds."""
    if source.ndim != 2 or not is_transposed(source):
        np.copyto(target, source, casting="unsafe")
        return
    stored, bits = source.T, BITS[target.itemsize]
    rows, columns = stored.shape
    is_paired = target.itemsize == 2 and rows % 2 == 0
    words = target.view(np.uint32) if is_paired else target.view(bits)
    height = LINE // target.itemsize
    for row in range(0, rows, height):
        for column in range(0, columns, COLUMNS):
            tile = stored[row : row + height, column : column + COLUMNS]
            tile = tile.astype(target.dtype, copy=False).view(bits)
            place = row
            if is_paired:  # two rows of 16-bit numbers are one of 32-bit words: half as many writes
                tile, place = tile[1::2].astype(np.uint32) << 16 | tile[0::2], row // 2
            words[column : column + COLUMNS, place : place + len(tile)] = tile.T

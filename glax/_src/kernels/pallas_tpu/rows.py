"""Read rows of a pool of states, or write them. A prompt that continues from states in a pool needs both.

    rows[n] = pool[slots[n]]        pool[slots[n]] = rows[n]

Both are copies within HBM, of a whole row each, which pass no VMEM. All copies are under way together, and the program waits
for all at its end. A row of slot -1 has no copy: what is read there is undefined, and nothing is written.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def copy_rows(copy_of, slots):
    """Start one copy for each slot that is not -1, and wait for all. copy_of: a function (n, slot) that returns the copy of row
    n. slots: [N] in scalar memory."""
    num_rows = slots.shape[0]

    def of_each(act):
        @pl.loop(0, num_rows)
        def _(n):
            slot = slots[n]

            @pl.when(slot >= 0)
            def _():
                act(copy_of(n, slot))

    of_each(lambda copy: copy.start())
    of_each(lambda copy: copy.wait())


def read_body(slots, pool, rows, arrived):
    """Copy pool[slots[n]] to rows[n], within HBM, for every n whose slot is not -1. arrived: the semaphore of the copies."""
    copy_rows(lambda n, slot: pltpu.make_async_copy(pool.at[slot], rows.at[n], arrived), slots)


def write_body(slots, rows, _, pool, arrived):
    """Copy rows[n] to pool[slots[n]], within HBM, for every n whose slot is not -1. arrived: the semaphore of the copies."""
    copy_rows(lambda n, slot: pltpu.make_async_copy(rows.at[n], pool.at[slot], arrived), slots)


def call(body, name: str, result: jax.ShapeDtypeStruct, aliases: dict, slots, *arrays):
    """Run a kernel body of one program on arrays in HBM, and return its result. result: the result's shape and dtype. aliases:
    {the index of an operand, counted from slots: the index of the result that takes its memory}."""
    in_hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    moved = 2 * len(slots) * result.size // max(result.shape[0], 1) * result.dtype.itemsize
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[in_hbm] * len(arrays),
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=result,
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        name=name,
    )(slots, *arrays)


def like(x, shape):
    """Return the type of an array with this shape, x's dtype, and x's variation over the mesh axes of a shard_map."""
    return jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).mat)


def read_rows(pool, slots):
    """Return pool[slots], [N, ...], for a pool [P, ...] and slots [N]. Rows of slot -1 are undefined."""
    return call(read_body, "glax_read_rows", like(pool, (len(slots), *pool.shape[1:])), {}, slots, pool)


def write_rows(pool, slots, rows):
    """Return the pool, in the same memory, with pool[slots[n]] = rows[n]. rows: [N, ...], of the pool's dtype. Slots of -1
    write nothing."""
    return call(write_body, "glax_write_rows", like(pool, pool.shape), {2: 0}, slots, rows, pool)

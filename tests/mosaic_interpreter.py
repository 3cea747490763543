"""The interpreter of Pallas Mosaic GPU with a left side of products in registers, and with races between warpgroups and copies
raised as errors: accumulators are arrays here."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glax._src.kernels.pallas_gpu.chunks import inverse as delta_inverse
from glax._src.kernels.pallas_gpu.scan import exact


def parameters():
    return plgpu.InterpretGPUParams(detect_races=True)


class Accumulator:
    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self.value


def multiply(total, a, b):
    a = a if isinstance(a, jax.Array) else a[...]
    total.value = total.value + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))


def inverses_of_blocks(L, reverse: bool):
    """Substitute in blocks of 16 that are one below the other, as the kernel's shuffles do."""
    rows, size = L.shape
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), axis) for axis in (0, 1))
    L, X = jnp.where(i // size == j // size, jnp.tile(L, (1, rows // size)), 0.0), jnp.where(i == j, 1.0, 0.0)
    for step in range(size - 1):
        row = size - 1 - step if reverse else step
        factor = jnp.where(j % size == row, L, 0.0)
        X = X - jnp.dot(factor, X, precision="highest")
    return X.reshape(rows, -1, size).sum(1)


def install(monkeypatch):
    monkeypatch.setattr(delta_inverse, "inverses_of_blocks", inverses_of_blocks)
    monkeypatch.setattr(exact, "EXACT_GROUPS", 3)  # the interpreter runs idle programs, too
    run_scoped = pl.run_scoped

    def scoped(f, *types, **options):
        if types and all(isinstance(x, plgpu.ACC) for x in types):
            return f(*(Accumulator(jnp.zeros(x.shape, jnp.float32)) for x in types))
        return run_scoped(f, *types, **options)

    def run_state(f):
        def run(init):
            totals = jax.tree.map(Accumulator, init)
            f(totals)
            return jax.tree.map(lambda total: total.value, totals)

        return run

    one_proxy(monkeypatch)
    by_numpy(monkeypatch)
    monkeypatch.setattr(pl, "run_scoped", scoped)
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(plgpu, "wgmma", multiply)
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", lambda total, wait_n=0: total.value)
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda running: None)
    monkeypatch.setattr(plgpu.ACC, "init", staticmethod(lambda x: x))


def one_proxy(monkeypatch):
    """Barriers order copies behind what warpgroups have read before.

    The interpreter wants a fence there as well, which it rightly wants where a product or a copy reads what they wrote; those
    `commit_smem` are then not checked either.
    """
    memory = shared_memory.GPUSharedMemory
    bundle, increment = shared_memory.GpuClockBundle, memory.incr_clock
    update = bundle.update

    def updated(self, other):
        update(self, other)
        self.commit_smem()

    def incremented(self, thread, *arguments, **options):
        if increment(self, thread, *arguments, **options) is None:
            return None
        self.clocks[thread].commit_smem()
        return self.clocks[thread].copy()

    monkeypatch.setattr(bundle, "update", updated)
    monkeypatch.setattr(memory, "incr_clock", incremented)


def by_numpy(monkeypatch):
    """Call back with NumPy's arrays and scalars. The interpreter's thousands of callbacks take numbers from JAX's arrays, which
    each operand would be put on a device for: half of the time."""

    def called(*operands, callback, **others):
        return [np.asarray(x) for x in callback(*(np.array(x)[()] for x in operands))]

    to_int = shared_memory._to_int
    monkeypatch.setattr(callbacks, "io_callback_impl", called)
    monkeypatch.setattr(shared_memory, "_to_int", lambda x: int(x) if isinstance(x, np.generic) else to_int(x))

"""Compute on a pool of states by a kernel of one backend, and by XLA wherever that kernel cannot run."""

from collections.abc import Callable

import jax

from glax._src.core.registry import Backend, Platform
from glax._src.solve.lowering import Kernel


def by_kernel(kernel: Callable, by_xla: Callable, backend: Backend) -> Callable:
    """Return a function that calls `kernel` if the program is for one device of that backend, and else `by_xla`. Both compute
    the same.

    The operands and the results of both are trees of arrays. Gradients, vmap, and programs that XLA divides over devices take
    `by_xla`.
    """

    def again(platform: Platform | None, results, *operands):
        """Compute the results by XLA, in a program for another backend than predicted, or one that XLA divides over devices."""
        is_able = Backend.here() is backend and platform is not Platform.XLA
        return kernel(*operands) if is_able else by_xla(*operands)

    @jax.custom_batching.custom_vmap
    def run(*operands):
        return Kernel(kernel, again, opaque=True).placed_whole(*operands)

    @run.def_vmap
    def _(size: int, batched, *operands):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        results = jax.vmap(by_xla, axes, axis_size=size)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    def bwd(operands, d):
        return jax.vjp(by_xla, *operands)[1](d)

    differentiable = jax.custom_vjp(lambda *operands: run(*operands))
    differentiable.defvjp(lambda *operands: (run(*operands), operands), bwd)
    return differentiable

"""The kernels of one call, compiled side by side.

Triton takes 1 to 3 s a kernel, and JAX would have it compile them where it lowers them: one after the other. It holds no lock
while it compiles, so here each is lowered by itself in a thread once the call that launches it is traced; where the program
is lowered it finds them compiled.
"""

import contextvars
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future

import jax

from glax._src.core.registry import Backend
from glax._src.kernels.common.gpu import threads

waited_for: contextvars.ContextVar[list[Future] | None] = contextvars.ContextVar("glax_compiling", default=None)
compiled: dict[Hashable, Future] = {}


def side_by_side(f: Callable) -> Callable:
    """f, which returns once the kernels that it launches are compiled, and raises what their compiler does."""

    @functools.wraps(f)
    def run(*args, **options):
        kernels: list[Future] = []
        token = waited_for.set(kernels)
        try:
            result = f(*args, **options)
        finally:
            waited_for.reset(token)
        for kernel in kernels:
            kernel.result()
        return result

    return run


def compile_ahead(specialisation: Hashable, call: Callable, operands):
    """Begins to compile call(*operands), unless that is done or under way; operands: traced, else there is nothing ahead of.

    specialisation: what a kernel is compiled for; not the shapes of arrays.
    """
    kernels = waited_for.get()
    if (
        kernels is None
        or Backend.here() is not Backend.GPU
        or not any(isinstance(x, jax.core.Tracer) for x in operands)
    ):
        return
    kernel = compiled.get(specialisation)
    if kernel is None or (kernel.done() and kernel.exception()):  # what failed may be asked again
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        kernel = compiled[specialisation] = threads().submit(lower, call, shapes)
    kernels.append(kernel)


def lower(call: Callable, shapes: list[jax.ShapeDtypeStruct]):
    jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))

"""Compile the kernels of one call in parallel.

JAX compiles Triton kernels while it lowers a program, one after the other. Triton holds no lock while it compiles. So each
kernel is lowered by itself in a thread as soon as the call that launches it is traced. When JAX lowers the program, the
kernels are compiled already.
"""

import contextvars
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future

import jax
from jax.core import Tracer

from glax._src.core.registry import Backend
from glax._src.kernels.common.gpu import threads

# The compilations that the call being traced waits for; None outside of `compile_in_parallel`.
pending: contextvars.ContextVar[list[Future] | None] = contextvars.ContextVar("glax_compiling", default=None)
compiled: dict[Hashable, Future] = {}


def compile_in_parallel(f: Callable) -> Callable:
    """Return f, wrapped so that it returns only after the kernels that it launches are compiled. The wrapped function raises
    the compiler's errors."""

    @functools.wraps(f)
    def run(*args, **options):
        kernels: list[Future] = []
        token = pending.set(kernels)
        try:
            result = f(*args, **options)
        finally:
            pending.reset(token)
        for kernel in kernels:
            kernel.result()
        return result

    return run


def compile_ahead(specialisation: Hashable, call: Callable, operands):
    """Start to compile the kernel of call(*operands) in another thread, unless a compilation of it succeeded or is under way.

    Does nothing outside of `compile_in_parallel`, without a GPU, and where no operand is traced: such a call compiles and runs
    immediately. specialisation: the key of a compiled kernel. It does not include the shapes of arrays.
    """
    kernels = pending.get()
    if kernels is None or Backend.here() is not Backend.GPU or not any(isinstance(x, Tracer) for x in operands):
        return
    kernel = compiled.get(specialisation)
    if kernel is None or (kernel.done() and kernel.exception()):  # a failed compilation is tried again
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        kernel = compiled[specialisation] = threads().submit(lower, call, shapes)
    kernels.append(kernel)


def lower(call: Callable, shapes: list[jax.ShapeDtypeStruct]):
    """Lower call for arguments of these shapes and dtypes on CUDA, which compiles its kernel."""
    jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))

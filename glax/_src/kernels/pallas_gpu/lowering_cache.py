"""Lower each kernel once per process, and compile the kernels of a program in parallel.

Pallas lowers a kernel in Python, which takes up to two seconds, and does so again for every program that contains it. XLA
compiles the kernels of a program one after another. Here a kernel is lowered separately when a program first contains it, and
every later program reuses the result. A thread compiles a kernel while the next is lowered. Mosaic GPU caches compiled kernels
for the whole process, and XLA finds them there.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from glax._src.core.registry import Backend
from glax._src.kernels.common.gpu import threads


@dataclasses.dataclass(eq=False)
class Kernel:
    """Hold a traced function of arrays that launches one kernel, and lower it at its first use."""

    traced: jax.stages.Traced
    shapes: list[jax.ShapeDtypeStruct]
    lowering: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @functools.cached_property
    def results(self) -> list[ShapedArray]:
        """Return the shapes and dtypes of the results."""
        return [ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(self.traced.out_info)]

    @functools.cached_property
    def lowered(self) -> bytes:
        """Return the kernel's own module in MLIR's bytecode, and start to compile it in a thread."""
        found = in_no_trace(lambda: self.traced.lower(lowering_platforms=("cuda",)).compiler_ir())
        threads().submit(self.compile)
        return mlir.module_to_bytecode(found)

    def compile(self):
        """Compile the kernel, for Mosaic GPU's cache. An error here occurs again in the program, and is reported there."""

        def alone(*operands):
            return kernel_p.bind(*operands, kernel=self)

        jax.jit(alone).lower(*self.shapes).compile()


known: dict[Hashable, Kernel] = {}
kernel_p = Primitive("hopper_kernel")
kernel_p.multiple_results = True
kernel_p.def_abstract_eval(lambda *_, kernel: kernel.results)


def in_no_trace(f: Callable):
    """Return f(), called outside of the caller's traces and meshes."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(f).result()


def once(specialisation: Hashable, call: Callable, *operands) -> list[jax.Array]:
    """Return call(*operands), where `call` launches one kernel and does nothing else.

    specialisation: everything that the kernel depends on beside the operands' shapes and dtypes.
    """
    if Backend.here() is not Backend.GPU or not any(isinstance(x, Tracer) for x in operands):
        return call(*operands)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    key = specialisation, *((x.shape, x.dtype) for x in shapes)
    if key not in known:
        traced = in_no_trace(lambda: jax.jit(call, keep_unused=True).trace(*shapes))
        known.setdefault(key, Kernel(traced, shapes))
    return kernel_p.bind(*operands, kernel=known[key])


def lower(context, *operands, kernel: Kernel):
    """Emit the one custom call of the kernel's own module, with these operands."""
    with kernel.lowering:
        module = ir.Module.parse(kernel.lowered)
    functions: Any = module.body.operations  # of types that JAX does not export
    main = next(f for f in functions if f.sym_name.value == "main").entry_block
    call, end = main.operations
    copy = call.operation.clone()
    for i, operand in enumerate(call.operands):
        copy.operands[i] = operands[operand.arg_number]
    return [
        operands[x.arg_number] if isinstance(x, ir.BlockArgument) else copy.results[x.result_number]
        for x in end.operands
    ]


mlir.register_lowering(kernel_p, lower, platform="cuda")

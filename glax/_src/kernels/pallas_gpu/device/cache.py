"""Lower each kernel once, and compile the kernels of a program in parallel.

Pallas traces and lowers a kernel in Python, which takes seconds, and does so again for every program that contains it. XLA
compiles the kernels of a program one after another. Here a kernel is traced and lowered separately when the first program that
contains it is lowered. Later programs reuse the result. So do later processes, which find it in glax's cache folder. JAX traces
calls that no program will contain, such as the forward without residuals of a call that is differentiated: their kernels are
only recorded. A thread compiles a kernel while the next is lowered. Mosaic GPU caches compiled kernels for the whole process,
and XLA finds them there. A gradient's kernel that takes longest to compile, where it is marked, is lowered before the kernels
of the forward, so that it is compiled while all others are lowered.

Mosaic GPU infers the layout of every value of a kernel. JAX 0.11 sorts the values by their operations as text, and MLIR verifies
and numbers the whole kernel for the text of each: the time is quadratic in the kernel's size. JAX 0.12 sorts nothing, and the
layouts do not depend on the order. So `equal_variables` takes the place of JAX 0.11's own function.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from glax._src.core.backend import jax_option
from glax._src.core.files import is_edited, sources
from glax._src.core.known_miscompiles import version_of
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Backend
from glax._src.kernels.common.gpu import threads
from glax._src.kernels.common.stored import Code

replacing = threading.Lock()
KERNELS = Code("Hopper kernel", b"glax hopper kernel 1\n")  # a module in MLIR's bytecode
# Options of JAX that change what is traced.
OPTIONS = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_default_matmul_precision")


def equal_variables(system) -> dict:
    """Return a dict from each variable that an `Equals` constraint names to the other variables that are equal to it, directly
    or through others, in the constraints' order. system: Mosaic GPU's `ConstraintSystem`."""
    from jax.experimental.mosaic.gpu.constraints import Equals, Variable

    groups: dict[Variable, list[Variable]] = {}
    for x in system.constraints:
        if isinstance(x, Equals) and isinstance(x.lhs, Variable) and isinstance(x.rhs, Variable):
            one, other = (groups.setdefault(v, [v]) for v in (x.lhs, x.rhs))
            if one is not other:
                one += other
                groups |= dict.fromkeys(other, one)
    return {v: [x for x in group if x != v] for v, group in groups.items()}


@contextlib.contextmanager
def equal_variables_used_by_jax():
    """Replace JAX 0.11's function by `equal_variables` within the `with` block, in which a kernel is lowered. Do nothing for
    other versions.

    JAX looks the function up in its module, so the replacement counts for all threads. One thread at a time may enter the
    block: a second thread would save the replacement as JAX's own function, and restore the replacement at its end.
    """
    if jax.__version_info__[:2] != (0, 11):
        yield
        return
    from jax.experimental.mosaic.gpu import constraints

    with replacing:
        of_jax = constraints.compute_transitively_equal_vars
        constraints.compute_transitively_equal_vars = equal_variables
        try:
            yield
        finally:
            constraints.compute_transitively_equal_vars = of_jax


@dataclasses.dataclass(eq=False)
class Kernel:
    """Hold a function of arrays that launches one kernel. The kernel is traced and lowered at its first use.

    key: everything that the kernel depends on. call: the function. shapes: the shapes and dtypes of its arguments. types: the
    shapes and dtypes of its results. part_of: the call (`Current.call`) that recorded the kernel first, or None. lowering: a
    lock that `lowering_rule` holds while it reads `lowered`.
    """

    key: Hashable
    call: Callable
    shapes: list[jax.ShapeDtypeStruct]
    types: Sequence[jax.ShapeDtypeStruct]
    part_of: Hashable = None
    lowering: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """Return `call` traced for arguments of `shapes`."""
        return in_no_trace(lambda: jax.jit(self.call, keep_unused=True).trace(*self.shapes))

    @functools.cached_property
    def results(self) -> list[ShapedArray]:
        """Return the shapes and dtypes of the results as JAX's abstract arrays."""
        return [ShapedArray(x.shape, x.dtype) for x in self.types]

    @functools.cached_property
    def lowered(self) -> bytes:
        """Return the kernel's own module in MLIR's bytecode, from the cache folder or by `lower`, and start to compile the
        kernel in a thread."""
        path = in_no_trace(lambda: path_of(self.key))  # where the options of JAX are those of the lowering
        found = KERNELS.made_once(path, self.lower)
        threads().submit(self.compile)
        return found

    def lower(self) -> bytes:
        """Trace and lower the kernel, and return its module in MLIR's bytecode."""
        traced = self.traced  # outside of the lock, which tracing does not need
        with equal_variables_used_by_jax():
            module = in_no_trace(lambda: traced.lower(lowering_platforms=("cuda",)).compiler_ir())
        return mlir.module_to_bytecode(module)

    def compile(self):
        """Compile the kernel, so that Mosaic GPU's cache has the machine code. An error here occurs again in the program that
        contains the kernel, and is reported there."""

        def alone(*operands):
            return kernel_p.bind(*operands, kernel=self)

        jax.jit(alone).lower(*self.shapes).compile()


def path_of(key: Hashable) -> pathlib.PurePath | None:
    """Return the path of a kernel's file below the cache folder, or None if the kernel must not be stored.

    The file's name is a digest of the key, this package's code, and the versions and options of JAX. The result is None where
    the key's text may not stand for the key in another process, because it contains an address in memory; where the code has
    been edited since it was imported; and where an environment variable MOSAIC_GPU_DUMP... asks to see kernels.
    """
    text = repr(key)
    if " at 0x" in text or is_edited() or any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ):
        return None
    options = [jax_option(name) for name in OPTIONS]
    made_by = sources(), jax.__version__, version_of("jaxlib"), options
    digest = hashlib.sha256(repr((text, made_by)).encode()).hexdigest()[:32]
    return pathlib.PurePath("hopper", f"jax{jax.__version__}", f"{digest}.mlirbc")


class Current(threading.local):
    """Hold, for each thread, the call whose kernels are recorded, and whether the call is for a GPU. Both are None outside of
    `recording`.

    call: the structure of the call's recurrence, and the shape and dtype of each of its arrays.
    """

    call: Hashable = None
    on_gpu: bool | None = None


known: dict[Hashable, Kernel] = {}
longest: dict[Hashable, Kernel] = {}  # of gradients that were traced and not lowered, by `Current.call`
current = Current()
kernel_p = Primitive("hopper_kernel")
kernel_p.multiple_results = True
kernel_p.def_abstract_eval(lambda *_, kernel: kernel.results)


def in_no_trace(f: Callable):
    """Return f(), called in a fresh thread, outside of the traces and meshes that surround the caller."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(f).result()


@contextlib.contextmanager
def recording(r: Recurrence):
    """Record the kernels that are launched within the `with` block as those of one call: the forward of r with or without
    residuals, or its gradient.

    The structure and the shapes of r identify the call, and are equal in all three. Calls that JAX traces only to batch or
    divide them have other shapes. The forward without residuals counts, because it often is the first to record a kernel of
    both forwards.
    """
    leaves, structure = jax.tree.flatten(r)
    before = current.call, current.on_gpu
    current.call = structure, *((x.shape, x.dtype) for x in leaves)
    current.on_gpu = Backend.here() is Backend.GPU
    try:
        yield
    finally:
        current.call, current.on_gpu = before


def once(
    specialisation: Hashable,
    call: Callable,
    *operands,
    results: Sequence[jax.ShapeDtypeStruct],
    is_longest: bool = False,
) -> list[jax.Array]:
    """Return call(*operands), where `call` launches one kernel and does nothing else.

    If an operand is traced and the call is for a GPU, a primitive is bound, whose lowering reuses the kernel of an equal key.
    Otherwise `call` is called. specialisation: everything that the kernel depends on beside the operands' shapes and dtypes.
    results: the shapes and dtypes of what `call` returns. is_longest: whether the kernel takes longest to compile of those of
    its gradient.
    """
    on_gpu = Backend.here() is Backend.GPU if current.on_gpu is None else current.on_gpu
    if not (on_gpu and any(isinstance(x, Tracer) for x in operands)):
        return call(*operands)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    key = specialisation, *((x.shape, x.dtype) for x in shapes)
    if key not in known:
        kernel = known.setdefault(key, Kernel(key, call, shapes, results, current.call))
        if is_longest and current.call is not None:
            longest[current.call] = kernel
    return kernel_p.bind(*operands, kernel=known[key])


def lowering_rule(context, *operands, kernel: Kernel):
    """Emit the one custom call of the kernel's own module for these operands, and return the MLIR values of its results.

    This is the lowering rule of `kernel_p`. If a gradient's longest kernel waits in `longest` for the same call, that kernel is
    lowered first. context: JAX's lowering context, which is not used.
    """
    if (ahead := longest.pop(kernel.part_of, None)) is not None:
        with contextlib.suppress(Exception), ahead.lowering:  # an error occurs again in its own program
            _ = ahead.lowered
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


mlir.register_lowering(kernel_p, lowering_rule, platform="cuda")

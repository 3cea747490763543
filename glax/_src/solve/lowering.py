"""Insert a kernel into a program.

A kernel is chosen while tracing, for the predicted backend. It is chosen again while lowering if the backend is another one.
Only lowering knows the number of devices over which the program is sharded.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]  (JAX 0.12)
from jax.interpreters import mlir

from glax._src.core.backend import Backend, lowering_platform, sequences_apart
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Platform
from glax._src.solve.partitioning import (
    FreeAxis,
    by_compiler,
    by_type,
    check_shardy,
    is_on_one_device,
    is_spread_by_type,
    name_by_content,
)
from glax._src.tuning.executor import one_key


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """Hold the kernel that was chosen while tracing.

    run:   the kernel on a Recurrence and its other operands, see `glax._src.solve.partitioning.by_type`
    again: (platform, results, *operands) -> the same results, by the kernel for the backend of the lowering; by a kernel of
           `platform` unless that is None. results: the shapes that `run` returns
    opaque: whether `run` is foreign code, which XLA cannot partition
    saves_residuals: whether residuals are among the results
    is_divisible: whether the compiler may divide the kernel over devices. If not, a program for several runs `again`, by XLA
    backend: the backend for which the kernel was chosen. Inside of shard_map the mesh may be of other devices
    """

    run: Callable
    again: Callable
    opaque: bool
    saves_residuals: bool = False
    is_divisible: bool = True
    # A lambda, so that each call looks `here` up: tests replace it.
    backend: Backend = dataclasses.field(default_factory=lambda: Backend.here())

    def placed(self, r: Recurrence, *given):
        """Return the kernel's results on (r, *given), sharded as the operands are. `again` runs where the program is lowered
        for another backend."""
        if is_on_one_device():
            return self.alone(r, *given)
        if is_spread_by_type((r, *given)):
            with sequences_apart(True):
                return by_type(self.alone, self.saves_residuals, r, *given)
        several = max(jax.device_count(), jax.sharding.get_abstract_mesh().size) > 1
        with sequences_apart(several or sequences_apart.value):
            return self.bind(True, r, *given)

    def placed_whole(self, *operands):
        """Run the kernel on operands that are no Recurrence and that no explicit axis shards. They are not divided over
        devices."""
        return dataclasses.replace(self, is_divisible=False).bind(not is_on_one_device(), *operands)

    def alone(self, *operands):
        """Run the kernel on operands that lie on one device."""
        return self.bind(False, *operands)

    def bind(self, spreads: bool, *operands):
        """Return the kernel's results, as one operation `glax_kernel` of the program. spreads: whether the compiler may spread
        the operands over devices."""

        # JAX stores the trace as long as the traced function exists, and the parameters of kernel_p as long as the jaxpr
        # among them. A function of this call alone, and a jaxpr that nothing else holds, let go of both with the program.
        def run(*operands):
            return self.run(*operands)

        with one_key():
            traced = jax.jit(run).trace(*operands)
        leaves, structure = jax.tree.flatten(operands)
        call = Call(self, structure, traced.out_info, spreads)
        parameters = dict(call=call, jaxpr=traced.jaxpr, devices=asks_for_devices() if spreads else None)
        return jax.tree.structure(traced.out_info).unflatten(kernel_p.bind(*leaves, **parameters))


@functools.cache
def asks_for_devices() -> ClosedJaxpr:
    """Return a program that contains custom_partitioning, for a parameter of `glax_kernel`.

    JAX tells lowering rules the program's devices only where a program contains custom_partitioning.
    """
    from jax.experimental.custom_partitioning import custom_partitioning

    asks = custom_partitioning(jax.lax.neg)
    asks.def_partition(partition=None, sharding_rule="... -> ...")
    return jax.make_jaxpr(asks)(jax.ShapeDtypeStruct((), "float32"))


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Describe a kernel that was traced for one backend and one structure of operands. Its jaxpr is passed separately.

    structure: the tree of the operands. results: the shapes of its results. spreads: whether the compiler may spread the
    operands over devices.
    """

    kernel: Kernel
    structure: jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]  (JAX has no stub of it)
    results: object
    spreads: bool

    def lowered(
        self,
        jaxpr: ClosedJaxpr,
        platform: str,
        asks: bool = False,
        visible: bool = False,
        free: FreeAxis | None = None,
    ) -> Callable:
        """Return the call as a function from leaves to leaves, in a program for that platform.

        jaxpr: the traced kernel. asks: whether the compiler asks how to spread the call over devices. free: the one axis to
        spread it over, or None for all. visible: whether the call's operations must be inlined, so that XLA sees them.
        """
        insists = Platform.XLA if visible else None
        with lowering_platform(platform):
            as_traced = Backend.here() is self.kernel.backend and not (visible and self.kernel.opaque)
        if as_traced and not asks:
            return jaxpr_as_fun(jaxpr)
        run = self.kernel.run if as_traced else functools.partial(self.kernel.again, insists, self.results)

        def of_operands(*operands):
            with lowering_platform(platform), sequences_apart(asks or sequences_apart.value):
                return run(*operands)

        f = functools.partial(by_compiler, of_operands, self.kernel.saves_residuals, free=free) if asks else of_operands
        return lambda *leaves: jax.tree.leaves(f(*self.structure.unflatten(leaves)))


kernel_p = Primitive("glax_kernel")
kernel_p.multiple_results = True


def is_high(*_, **__) -> bool:
    return False


kernel_p.is_high = is_high  # JAX 0.12 asks; whatever the jaxpr holds, the kernel lowers it itself


@kernel_p.def_effectful_abstract_eval
def _(*_, call: Call, jaxpr: ClosedJaxpr, devices: ClosedJaxpr | None):
    return jaxpr.out_avals, jaxpr.effects  # the effects of Pallas's interpreter


@kernel_p.def_impl
def _(*leaves, call: Call, jaxpr: ClosedJaxpr, devices: ClosedJaxpr | None):
    """Run the kernel outside of any jit, on the device that the operands lie on.

    Each operation of the kernel is run by itself there, and jax_debug_infs would refuse the gates of -inf at resets.
    """
    with jax.debug_infs(False):
        return call.lowered(jaxpr, next(iter(leaves[0].devices())).platform)(*leaves)


def lower(context: mlir.LoweringRuleContext, *leaves, call: Call, jaxpr: ClosedJaxpr, devices: ClosedJaxpr | None):
    """Lower one `glax_kernel`: the rule that JAX calls for each platform of a program. Return the values of its results.

    Where the compiler may spread the operands over several devices, XLA asks for their shardings later if it can
    (`by_compiler`). Else XLA's own kernel is inserted, whose operations XLA partitions by itself.
    """
    module = context.module_context
    platform = (context.platforms or module.platforms)[0]
    where: Any = module.axis_context  # JAX has no public type for it
    # Inside shard_map over all axes, arrays belong to one device, and the context has no number of devices.
    free = FreeAxis.of(where)
    spread = call.spreads and (free is not None or getattr(where, "num_devices", 1) > 1)
    # An exported program has no callback that the compiler could ask, and TPUs have none.
    exports, is_asked = module.lowering_parameters.for_export, platform in ("cpu", "cuda", "rocm")
    asks = spread and is_asked and not exports and call.kernel.is_divisible
    visible = spread and not asks
    if visible and call.kernel.opaque and not exports and not is_asked:
        warn_of_automatic_axes(platform)
    if asks:
        check_shardy()
    results = mlir.lower_fun(call.lowered(jaxpr, platform, asks, visible, free))(context, *leaves)
    if asks:
        place = (free.mesh.devices, free) if free is not None else (where.device_assignment, where.abstract_mesh)
        about = platform, *place, call.structure, ADDRESS.sub("", str(jaxpr))
        name_by_content(module, results[0].owner, " ".join(map(str, about)))
    return results


@functools.cache
def warn_of_automatic_axes(platform: str):
    """Warn once that XLA's kernels run, because XLA divides the arrays over automatic axes by itself."""
    warnings.warn(
        f"glax runs XLA's kernels in a program for several devices of {platform}, because JAX cannot divide Pallas kernels over "
        "automatic axes there. The Pallas kernels run on a mesh of explicit axes, as jax.make_mesh makes it, inside "
        "jax.shard_map, and by glax.parallel",
        stacklevel=2,
    )


ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # addresses of functions among the parameters of a primitive


# A rule for each platform is called for that one alone, also where a program is lowered for many.
for platform in ("cpu", "cuda", "rocm", "tpu", None):
    mlir.register_lowering(kernel_p, lower, platform=platform)

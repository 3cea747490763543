"""Run the methods of models and layers with automatic axes, where the arrays lie on a mesh with explicit axes.

JAX types an array on explicit axes by its sharding, and refuses an operation whose result could have several. Inside of a
method that `automatic` decorates, the compiler chooses the shardings; the results have the ones that the decorator names.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from glax._src.core.explicit_axes import explicit_mesh, spec_of, with_automatic_axes

# (the arguments of a method by name) -> the PartitionSpecs of a result: a tree, or one for all of its arrays
Specs = Callable[[dict[str, Any]], Any]
Method = TypeVar("Method", bound=Callable)


def first_array(module: nnx.Module) -> jax.Array | None:
    """Return the first array among the module's variables; None if no variable holds an array rather than a
    `jax.ShapeDtypeStruct`. All arrays of a module lie on one mesh, so the first shows which."""
    variables = (x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable))
    return next((x[...] for x in variables if not isinstance(x.get_value(), jax.ShapeDtypeStruct)), None)


def replicated(arguments: dict[str, Any]) -> PartitionSpec:
    """Return the spec of a result that every device holds whole: a `Specs` that reads no argument."""
    return PartitionSpec()


def rows_of(name: str) -> Specs:
    """Return a `Specs` for a result whose row axes are sharded as those of the argument `name`, which is integer tokens [*rows]
    or floating-point activations [*rows, width]. The other axes are not sharded. Without a JAX array the result counts as
    replicated."""

    def specs(arguments: dict[str, Any]) -> PartitionSpec:
        x = arguments[name]
        if not isinstance(x, jax.Array):
            return PartitionSpec()
        rank = x.ndim - jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        return PartitionSpec(*spec_of(x)[:rank])

    return specs


def like(name: str) -> Specs:
    """Return a `Specs` for a result that is sharded as the argument `name`, array by array. The result counts as replicated if
    that argument is None."""

    def specs(arguments: dict[str, Any]) -> Any:
        return PartitionSpec() if arguments[name] is None else jax.tree.map(spec_of, arguments[name])

    return specs


def state_of(name: str, rows: str) -> Specs:
    """Return a `Specs` for a new state, sharded as the argument `name`, which is the state before. If that is None and
    cu_seqlens is None too, the state's axis N is sharded as the axis B of the argument `rows` [B, T, width]; else the state
    counts as replicated."""

    def specs(arguments: dict[str, Any]) -> Any:
        x = arguments[rows]
        if arguments[name] is None and isinstance(x, jax.Array) and x.ndim == 3 and arguments["cu_seqlens"] is None:
            return PartitionSpec(*spec_of(x)[:1])
        return like(name)(arguments)

    return specs


def automatic(result: Specs, *more: Specs) -> Callable[[Method], Method]:
    """Return a decorator that runs a method of a module with automatic axes, if the module, an argument or the context has a
    mesh with explicit axes; else the method runs as it is. result: the `Specs` of the method's only or first result. more: the
    `Specs` of its other results."""

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(self: nnx.Module, *args, **options):
            bound = signature.bind(self, *args, **options)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            del arguments["self"]
            if explicit_mesh((first_array(self), arguments)) is None:
                return method(self, *args, **options)
            graph, state = nnx.split(self)
            specs = tuple(each(arguments) for each in (result, *more)) if more else result(arguments)

            def run(state, arguments):
                return method(nnx.merge(graph, state), **arguments)

            return with_automatic_axes(run, specs, state, arguments)

        return call  # pyright: ignore[reportReturnType]  (functools.wraps keeps the signature)

    return decorate

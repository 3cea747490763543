"""Stack the parameters of equal layers, so that a scan over them compiles one layer for all.

A pattern is a number of blocks that follow one another, its period, and how often they repeat. In a model of patterns
`blocks` holds one block for each place in a pattern: a repeated block's arrays have one row for each of its layers.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glax.models.model import CausalLM, Pattern, layers_of_blocks
from glax.models.runs import by_name

# The name of an array in a block, as `by_name` gives it.
BLOCK = re.compile(r"(.*?\['blocks'\]\[)(\d+)(\].*)", re.DOTALL)


def patterns_of(forms: Sequence[Hashable]) -> tuple[Pattern, ...]:
    """Return the patterns that cover layers of these forms, in order: the pattern that stacks the most blocks into others, and
    recursively the patterns of the layers before and after that one. Layers of equal forms have equal entries in `forms`."""
    saved, first, period, repeats = 0, 0, len(forms), 1
    for start in range(len(forms)):
        for size in range(1, (len(forms) - start) // 2 + 1):
            end = start + size
            while end < len(forms) and forms[end] == forms[end - size]:
                end += 1
            count = (end - start) // size
            if size * (count - 1) > saved:
                saved, first, period, repeats = size * (count - 1), start, size, count
    if not saved:
        return (Pattern(period, 1),) if forms else ()
    rest = forms[first + period * repeats :]
    return (*patterns_of(forms[:first]), Pattern(period, repeats), *patterns_of(rest))


def forms_of(model: CausalLM, is_trained: Callable[[tuple, nnx.Variable], bool]) -> list[int]:
    """Return a number for each layer, equal for layers of equal form: equal graphs, arrays of equal shapes and dtypes, the same
    trained arrays, and further arguments of equal shapes.

    is_trained: a filter of flax.nnx for the model's variables.
    """
    numbers: dict[Hashable, int] = {}

    def form(layer: int, block: nnx.Module) -> Hashable:
        graph, state = nnx.split(block)
        arrays = tuple(
            (path, x.shape, x.dtype, is_trained(("blocks", layer, *path), x)) for path, x in nnx.to_flat_state(state)
        )
        return graph, arrays, str(jax.eval_shape(functools.partial(model.arguments, layer)))

    return [numbers.setdefault(form(layer, block), len(numbers)) for layer, block in enumerate(model.blocks)]


@dataclasses.dataclass(frozen=True)
class Layers:
    """Hold the patterns of a model's layers. They map a tree with an array for each layer, as checkpoints have it, to a tree of
    the model of patterns, with stacked arrays.

    reason: why no scan runs over layers; "" if one does.
    """

    patterns: tuple[Pattern, ...]
    reason: str

    @classmethod
    def of(cls, model: CausalLM, is_trained: Callable[[tuple, nnx.Variable], bool], wanted: bool | None) -> "Layers":
        """Return the patterns of a model; none repeats where `wanted` is False, or where it is None and the backend is no TPU, or
        for a model whose layers do not repeat.

        Raises ValueError, which says why, if `wanted` is True and no layers repeat.
        """
        alone = (Pattern(len(model.blocks), 1),)
        if wanted is False:
            return cls(alone, "scan_layers is false")
        if (reason := model.cannot_scan()) is None:
            patterns = patterns_of(forms_of(model, is_trained))
            if any(pattern.repeats > 1 for pattern in patterns):
                if wanted is None and jax.default_backend() != "tpu":
                    return cls(alone, "a step takes longer in a scan on CPUs and GPUs")
                return cls(patterns, "")
            reason = "no two layers that follow one another have one form"
        if wanted:
            raise ValueError(f"scan_layers must be false or left out for this model, got true: {reason}")
        return cls(alone, reason)

    @property
    def numbers(self) -> list[range]:
        """Return, for each block of the model of patterns, the numbers of the layers that it holds."""
        return layers_of_blocks(self.patterns)

    @property
    def description(self) -> str:
        """Return in words how many of the layers are compiled."""
        blocks, layers = len(self.numbers), sum(map(len, self.numbers))
        return f"each of {layers} compiled: {self.reason}" if self.reason else f"{blocks} of {layers} compiled"

    def filter(self, is_trained: Callable[[tuple, nnx.Variable], bool]) -> Callable[[tuple, nnx.Variable], bool]:
        """Return is_trained, a filter of the model's variables, as a filter of the variables of the model of patterns."""

        def of_pattern(path: tuple, variable: nnx.Variable) -> bool:
            if path[0] == "blocks":
                path = ("blocks", self.numbers[path[1]][0], *path[2:])
            return is_trained(path, variable)

        return of_pattern

    def model(self, model: CausalLM) -> CausalLM:
        """Return the model of patterns, with shapes in place of arrays. The axis of layers is not sharded."""
        graph, state = nnx.split(model)
        made = nnx.merge(graph, jax.eval_shape(lambda: state))
        if self.reason:
            return made
        blocks = []
        for layers in self.numbers:
            graph, state = nnx.split(made.blocks[layers[0]])
            if len(layers) > 1:
                flat = [(path, with_rows(x, len(layers))) for path, x in nnx.to_flat_state(state)]
                state = nnx.from_flat_state(flat)
            blocks.append(nnx.merge(graph, state))
        made.blocks, made.patterns = nnx.List(blocks), self.patterns
        return made

    def parts(self, name: str) -> list[str]:
        """Return the names of the layers' arrays that are stacked in the array `name` of the model of patterns; [name] if it is
        not stacked."""
        if (found := BLOCK.fullmatch(name)) is None:
            return [name]
        before, block, behind = found.groups()
        return [f"{before}{layer}{behind}" for layer in self.numbers[int(block)]]

    def shapes(self, tree: Any, shardings: Any) -> Any:
        """Return the shapes of `tree`, which has an array for each layer. Their shardings come from `shardings`, a tree of the
        model of patterns."""
        found: dict[str, NamedSharding] = {}
        for name, sharding in by_name(shardings).items():
            parts = self.parts(name)
            found |= dict.fromkeys(parts, sharding if len(parts) == 1 else of_row(sharding))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=found[name]) for name, x in by_name(tree).items()]
        return jax.tree.structure(tree).unflatten(shapes)

    def stacked(self, tree: Any, like: Any) -> Any:
        """Return `tree`, which has an array for each layer, in the structure of `like`, a tree of the model of patterns.

        Each array is stacked on its own, and its parts are deleted: no more than one array is in memory twice.
        """
        arrays, made = by_name(tree), []
        for name in by_name(like):
            parts = [arrays[part] for part in self.parts(name)]
            made.append(parts[0] if len(parts) == 1 else stack(parts))
        return jax.tree.structure(like).unflatten(made)

    def unstacked(self, tree: Any, like: Any) -> Any:
        """Return `tree`, of the model of patterns, in the structure of `like`, which has an array for each layer."""
        arrays: dict[str, jax.Array] = {}
        for name, x in by_name(tree).items():
            parts = self.parts(name)
            arrays |= zip(parts, [x] if len(parts) == 1 else unstack(x), strict=True)
        return jax.tree.structure(like).unflatten([arrays[name] for name in by_name(like)])


def with_rows(x: nnx.Variable, count: int) -> nnx.Variable:
    """Return the variable with a shape [count, *shape of x] in place of its array. The new axis, of layers, is not sharded."""
    axes = x.get_metadata().get("out_sharding")
    shape = jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
    return x.replace(shape) if axes is None else x.replace(shape, out_sharding=(None, *axes))


def of_row(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of one layer's array from the sharding of its stack."""
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def of_stack(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of a stack of layers from the sharding of one layer's array. The axis of layers is not sharded."""
    return NamedSharding(sharding.mesh, P(None, *sharding.spec))


def stack(parts: Sequence[jax.Array]) -> jax.Array:
    """Return the arrays of layers stacked along a new first axis, and delete them. The new axis is not sharded."""
    sharding = parts[0].sharding
    out = of_stack(sharding) if isinstance(sharding, NamedSharding) else None
    made = jax.jit(jnp.stack, out_shardings=out)(parts)
    for part in parts:
        part.delete()
    return made


def unstack(x: jax.Array) -> Sequence[jax.Array]:
    """Return the arrays of the layers of a stack, its rows along the first axis, each sharded as the stack's other axes are."""
    out = of_row(x.sharding) if isinstance(x.sharding, NamedSharding) else None
    return jax.jit(jnp.unstack, out_shardings=out)(x)

"""Divide a model into its structure, which programs are compiled for, and its arrays, which they are given."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from glax.models.model import CausalLM


@dataclasses.dataclass(frozen=True)
class Structure:
    """Hold all of a model but its arrays, as a static argument of jit.

    Models that differ in their arrays alone have equal structures. number: the hash. It is formed once, because hashing the graph
    of a deep model takes milliseconds, and jit hashes it at every call. graph: from nnx.split. tree: the tree of its state.

    >>> structure, arrays = Structure.of(model)
    >>> structure.model(arrays).vocabulary == model.vocabulary
    True
    """

    number: int
    graph: nnx.GraphDef
    tree: Any

    @classmethod
    def of(cls, model: CausalLM) -> tuple["Structure", list[Any]]:
        """Return the structure and the arrays of a model."""
        graph, state = nnx.split(model)
        arrays, tree = jax.tree.flatten(state)
        return cls(hash((graph, tree)), graph, tree), arrays

    def __hash__(self):
        return self.number

    def model(self, arrays: list[Any]) -> CausalLM:
        """Return the model with these arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))

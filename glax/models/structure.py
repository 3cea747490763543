"""Divide a model into its structure, which programs are compiled for, and its arrays, which they are given."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from glax.models.model import CausalLM


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """Hold all of a model but its arrays, as a static argument of jit.

    Models that differ in their arrays alone have equal structures. graph, tree: what nnx and JAX divide from the arrays. number:
    the hash. It is formed once, because hashing the graph of a deep model takes milliseconds, and jit hashes it at every call.

    >>> structure, arrays = Structure.of(model)
    >>> structure.model(arrays).vocabulary == model.vocabulary
    True
    """

    graph: nnx.GraphDef
    tree: Any
    number: int

    @classmethod
    def of(cls, model: CausalLM) -> tuple["Structure", list[Any]]:
        """Return the structure and the arrays of a model."""
        graph, state = nnx.split(model)
        arrays, tree = jax.tree.flatten(state)
        return cls(graph, tree, hash((graph, tree))), arrays

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        if self is other or not isinstance(other, Structure):
            return self is other
        return self.number == other.number and self.graph == other.graph and self.tree == other.tree

    def model(self, arrays: list[Any]) -> CausalLM:
        """Return the model with these arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))

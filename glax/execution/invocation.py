"""A call, as far as choosing a config goes: what is called and on which shapes, never the values."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Invocation:
    """kernel: a KernelSpec or a Kernel; args and kwargs: its arguments, shapes in the place of arrays."""

    kernel: Any
    args: tuple
    kwargs: dict
    override: Any = None

    @classmethod
    def of(cls, kernel, args: tuple, kwargs: dict, override=None) -> "Invocation":
        args, kwargs = jax.tree.map(shape_of, (args, kwargs))
        return cls(kernel, args, kwargs, override)

    @functools.cached_property
    def key(self) -> str:
        """What configs are remembered by."""
        return self.kernel.key(self)

    def config_from(self, name: str, fields: dict) -> Any:
        """The config that was stored as its class's name and its fields."""
        known = {
            type(c).__name__: type(c) for c in (self.kernel.heuristic_cfg(self), *self.kernel.candidate_cfgs(self))
        }
        return known[name](**fields)


def shape_of(x):
    """The shape of an array, in the dtype that JAX will give it; NumPy's are float64 by default. Anything else as it is."""
    if isinstance(x, type) or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))


def text_of(x) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else repr(x)


def described(args: tuple, kwargs: dict) -> str:
    """Arguments as text: the shape and dtype of each array, the rest by value."""
    named = jax.tree.leaves_with_path((args, kwargs))
    return " ".join(f"{jax.tree_util.keystr(path, simple=True, separator='.')}={text_of(x)}" for path, x in named)

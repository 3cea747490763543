"""Define `Invocation`: a kernel and the shapes of its arguments, on which the choice of a config may depend."""

import builtins
import dataclasses
import functools
import sys
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp

from glax._src.tuning.device import device_kind


@dataclasses.dataclass(frozen=True)
class Invocation:
    """Hold a call of a kernel, for which a config is chosen. `of` makes one from arrays.

    kernel:       a `KernelSpec` or a `Kernel`.
    args, kwargs: its arguments, with a jax.ShapeDtypeStruct in place of each array.
    override:     the config that the call names; None to choose one.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.Invocation.of(glax.RecurrentAttention(), (q, q, q), {}).args[0].shape
    (1, 8, 2, 4)
    """

    kernel: Any
    args: tuple
    kwargs: dict
    override: Any = None

    @classmethod
    def of(cls, kernel, args: tuple, kwargs: dict, override=None) -> "Invocation":
        """Return the Invocation of kernel(*args, **kwargs), whose arrays become shapes in the dtype that JAX gives them.

        kernel: a `KernelSpec` or a `Kernel`. args, kwargs: its arguments, arrays or jax.ShapeDtypeStruct among them. override: a
        config of the kernel, which the executor then runs; None to let its selectors choose one.
        """
        args, kwargs = jax.tree.map(shape_of, (args, kwargs))
        return cls(kernel, args, kwargs, override)

    @functools.cached_property
    def device(self) -> str:
        """Return the name of the device that the kernel is chosen for, as part of a file name."""
        return device_kind()

    @functools.cached_property
    def key(self) -> str:
        """Return the text under which configs are stored."""
        return self.kernel.key(self)

    def config_from(self, name: str, fields: dict) -> Any:
        """Return the config that is stored as the name and the fields of its class, such as ("ChunkedConfig", {"chunk": 64}).

        Raises ValueError or TypeError if they describe no config of the kernel.
        """
        configs = (self.kernel.heuristic_cfg(self), *self.kernel.candidate_cfgs(self))
        classes = {type(config).__name__: type(config) for config in configs}
        former = {old: found for found in classes.values() for old in getattr(found, "former_names", ())}
        if name not in former | classes:
            raise ValueError(f"{self.kernel.op_id} has no configs of class {name!r}, only {', '.join(classes)}")
        return from_json((former | classes)[name], fields)


def from_json(config: type, fields: dict) -> Any:
    """Return an instance of a dataclass from its fields as JSON holds them.

    Raises TypeError or ValueError if a field is missing, unknown, or of another type than its annotation: a bool for an int, a
    float for an int, or an int of more than 32 bits, which no kernel's index has.
    """
    names = {field.name for field in dataclasses.fields(config)}
    if unknown := fields.keys() - names:
        raise ValueError(f"{config.__name__} has no field {', '.join(sorted(unknown))}")
    try:
        hints = typing.get_type_hints(config)
    except NameError:  # a quoted annotation names a type that only its enclosing function sees
        hints = {}
    values = {}
    for name, value in fields.items():
        hint = hints.get(name, Any)
        values[name] = tuple(value) if typing.get_origin(hint) is tuple and isinstance(value, list) else value
        if not fits(values[name], hint):
            raise ValueError(
                f"{name} of {config.__name__} must be {getattr(hint, '__name__', hint)}, got {value!r:.80}"
            )
    return config(**values)


def fits(value, hint) -> bool:
    """Return whether a value that was read from JSON has the annotated type `hint`; True for types that JSON does not have."""
    match typing.get_origin(hint) or hint:
        case builtins.int:
            return type(value) is int and abs(value) < 2**31
        case builtins.float:
            return type(value) in (int, float) and abs(value) <= sys.float_info.max
        case builtins.bool | builtins.str | types.NoneType as kind:
            return type(value) is kind
        case typing.Literal:
            return any(value == x and type(value) is type(x) for x in typing.get_args(hint))
        case typing.Union | types.UnionType:
            return any(fits(value, option) for option in typing.get_args(hint))
        case builtins.tuple | builtins.list as kind:
            inner = [x for x in typing.get_args(hint) if x is not ...]
            return isinstance(value, kind) and all(any(fits(x, option) for option in inner) or not inner for x in value)
        case _:
            return True


def shape_of(x):
    """Return a jax.ShapeDtypeStruct for an array, with the dtype that JAX will give it: float32 for NumPy's float64 without
    x64.

    Other values are returned unchanged.
    """
    if isinstance(x, type) or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))


def text_of(x) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else repr(x)


def described(args: tuple, kwargs: dict) -> str:
    """Return arguments as text: the shape and dtype of each array, and other values as they print."""
    named = jax.tree.leaves_with_path((args, kwargs))
    return " ".join(f"{jax.tree_util.keystr(path, simple=True, separator='.')}={text_of(x)}" for path, x in named)

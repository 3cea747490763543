"""Check the arguments of layers before a constructor runs, by their annotations and names."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import ParamSpec

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from glax._src.core.bind import check_flag, check_real, known_number
from glax.nn.parts import check_sizes

P = ParamSpec("P")
DTYPES = ("dtype", "param_dtype")
# 0 is a value of these.
FROM_0 = (
    "norm_eps",
    "latent_norm_eps",
    "eps",
    "epsilon",
    "key_epsilon",
    "conv_init",
    "layer_idx",
    "dt_scale",
)
ABOVE_0 = ("A_floor", "dt_floor", "gate_cap", "limit", "sum_floor", "temperature")
BELOW_0 = ("lower_bound",)
FINITE = ("scale", "clamp_min", "scaling", "correction_factor")
RANGES = {
    "A_range": 0.0,
    "dt_range": np.finfo(np.float32).tiny,
    "dt_limit": 0.0,
}  # two numbers, the first at least this


def checked(init: Callable[P, None]) -> Callable[P, None]:
    """Return a constructor that first checks its arguments and then calls `init`.

    `check_argument` checks each argument by its name and by its annotation in `init`. An argument that is None is not checked
    if None is its default. Raises TypeError or ValueError, which names the argument.
    """
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def constructor(*args: P.args, **kwargs: P.kwargs):
        for name, value in (dict(zip(parameters, args, strict=False)) | kwargs).items():
            parameter = parameters.get(name)
            if parameter is None or name == "self" or (value is None and parameter.default is None):
                continue
            check_argument(name, value, parameter.annotation)
        init(*args, **kwargs)

    return constructor


def check_argument(name: str, value, annotation):
    """Raise TypeError or ValueError unless `value` suits an argument of this name and annotation.

    The name decides first, if it stands in one of this module's tables, such as DTYPES and RANGES. Otherwise the annotation
    decides: bool, int, nnx.Rngs, str or Callable, alone or as a member of a union. Any other argument passes unchecked.
    """
    kinds = (annotation, *typing.get_args(annotation))
    if name in DTYPES:
        check_float_dtype(name, value)
    elif name in RANGES:
        check_range(name, value, RANGES[name])
    elif name in FROM_0 + ABOVE_0 + BELOW_0 + FINITE:
        check_number(name, value)
    elif bool in kinds:
        check_flag(name, value)
    elif int in kinds:
        check_sizes(**{name: value})
    elif nnx.Rngs in kinds and not isinstance(value, nnx.Rngs):
        raise TypeError(f"{name} must be flax.nnx.Rngs, such as nnx.Rngs(0), got {value!r}")
    elif str in kinds and not isinstance(value, str) and value is not None:
        raise TypeError(f"{name} must be a str, got {value!r}")
    elif any(Callable in (kind, typing.get_origin(kind)) for kind in kinds) and not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def check_number(name: str, value):
    """Raise TypeError or ValueError unless value is a finite number, known while tracing, in the range that this module states
    for `name`."""
    check_real(name, value)
    if (known := known_number(value)) is None:
        raise TypeError(f"{name} must be known while tracing, got {value}")
    if known < 0 and name in FROM_0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    if known <= 0 and name in ABOVE_0:
        raise ValueError(f"{name} must be above 0, got {value}")
    if known >= 0 and name in BELOW_0:
        raise ValueError(f"{name} must be a number below 0 that is known while tracing, got {value}")


def check_float_dtype(name: str, value: DTypeLike):
    try:
        is_float = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:  # NumPy raises it for a value that names no dtype
        is_float = False
    if not is_float:
        raise TypeError(f"{name} must be a dtype of floating point, got {value!r}")


def check_range(name: str, value, least: float):
    """Raise TypeError unless `value` is two numbers, and ValueError unless least <= the first <= the second.

    For the name `dt_range` the two numbers may be in either order. Only for the name `dt_limit` may the second be inf.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, got {value!r}")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating):
            raise TypeError(f"{name} must be two numbers, got {value!r}")
    low, high = value
    if name == "dt_range" and high < low:  # either order gives the same steps
        low, high = high, low
    if not least <= low <= high or (high == np.inf and name != "dt_limit"):
        raise ValueError(f"{name} must be two numbers of at least {least:.3g}, the lower first, got {value}")

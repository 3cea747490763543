"""Every argument of every layer's constructor is checked, and named in the error."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glax import nn

SIZES = dict(width=16, num_heads=2, inside=8, count=4, top_k=2, latent_width=4, head_width=8, shared_width=4)
LAYERS = {name: getattr(nn, name) for name in nn.__all__}
NAN, INF = float("nan"), float("inf")
FLAG, NO_SIZE, NO_NUMBER = ("str", 1), (0, -1, 2.5, True, "3", np.uint8(2)), (NAN, INF, "x", True)
# What a parameter must refuse, by its name; by its annotation elsewhere.
REFUSED = {
    "theta": (-1.0, 0, *NO_NUMBER), "temperature": (-1.0, 0, *NO_NUMBER), "lower_bound": (1.0, 0, *NO_NUMBER),
    "dt_floor": (-1.0, 0, *NO_NUMBER), "A_floor": (-1.0, 0, *NO_NUMBER), "gate_cap": (-1.0, 0, *NO_NUMBER),
    "limit": (-1.0, 0, *NO_NUMBER), "sum_floor": (-1.0, 0, *NO_NUMBER), "correction_factor": NO_NUMBER,
    "scale": NO_NUMBER, "clamp_min": NO_NUMBER,
    "scaling": NO_NUMBER,
    "norm_eps": (-1.0, *NO_NUMBER), "epsilon": (-1.0, *NO_NUMBER), "eps": (-1.0, *NO_NUMBER),
    "key_epsilon": (-1.0, *NO_NUMBER), "latent_norm_eps": (-1.0, *NO_NUMBER), "conv_init": (-1.0, *NO_NUMBER),
    "dt_scale": (-1.0, *NO_NUMBER),
    "A_range": ((-1.0, 1.0), (2.0, 1.0), (NAN, 1.0), (1.0, INF), (1.0,), "ab", 3),
    "dt_range": ((0.0, 1.0), (1.0, INF), (NAN, 1.0), (1.0,), "ab", 3),
    "dt_limit": ((-1.0, 1.0), (2.0, 1.0), (NAN, 1.0), (1.0,), "ab", 3),
    "dtype": ("float33", jnp.int32, 3), "param_dtype": ("float33", jnp.int32, 3),
    "layer_idx": (-1, 2, 0.5, True, "x"), "frequencies": ((1.0,), "x", (NAN,) * 4),
    "slopes": ("other", (1.0, 2.0, 3.0)), "rngs": (3, "x"), "shared": (),
}  # fmt: skip


def parameters(layer) -> dict[str, inspect.Parameter]:
    """Return the parameters of a layer and of those that it passes its options to."""
    found: dict[str, inspect.Parameter] = {}
    for owner in layer.__mro__:
        if "__init__" in vars(owner) and owner.__module__.startswith("glax"):
            own = inspect.signature(owner.__init__).parameters
            found = {**own, **found}
            if "options" not in own:
                break
    return {name: x for name, x in found.items() if name not in ("self", "options")}


def refused(name: str, parameter: inspect.Parameter) -> tuple:
    if name in REFUSED:
        return REFUSED[name]
    kinds = (parameter.annotation, *typing.get_args(parameter.annotation))
    if bool in kinds:
        return FLAG
    return NO_SIZE if int in kinds else ("nope", 3)


@pytest.mark.parametrize("name", LAYERS)
def test_a_constructor_names_the_argument_that_it_refuses(name):
    layer, found = LAYERS[name], parameters(LAYERS[name])
    good = {size: value for size, value in SIZES.items() if size in found} | dict(rngs=nnx.Rngs(0))
    for argument, parameter in found.items():
        for value in refused(argument, parameter):
            try:
                layer(**good | {argument: value})
            except (TypeError, ValueError) as error:
                if "multiple values for keyword argument" in str(error):
                    break  # the layer sets this option itself
                assert str(error).startswith(f"{argument} must be"), (argument, value, str(error))
            else:
                raise AssertionError(f"{argument}={value!r} is accepted")


def test_a_class_has_the_signature_of_its_constructor_and_an_instance_that_of_its_call():
    """`jax.jit` looks there for the names of static arguments."""
    layer = nn.Attention(16, num_heads=2, rngs=nnx.Rngs(0))
    assert list(inspect.signature(nn.Attention).parameters)[:2] == ["width", "num_heads"]
    assert list(inspect.signature(layer).parameters) == ["x", "initial_state", "cu_seqlens", "segment_ids", "pad_id"]
    ids = jnp.zeros((1, 4), jnp.int32)
    jax.jit(layer, static_argnames="pad_id")(jnp.ones((1, 4, 16)), segment_ids=ids, pad_id=1)

"""Provide what layers share: parameters with shardings, projections, activations, and checks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from glax._src.core.bind import check_array, check_integer

# The logical axes of the parameters. `glax.models.shardings` gives them axes of a mesh.
EMBED, EXPERTS, HEADS, MLP, VOCABULARY = "embed", "experts", "heads", "mlp", "vocabulary"

Initializer = Callable[..., Array]
normal = nnx.initializers.normal


def annotated(*axes: str | None) -> dict:
    """Return the metadata of a parameter: the logical axis of each of its array's axes, or None. `flax.nnx.get_partition_spec`
    reads it."""
    return dict(out_sharding=axes, eager_sharding=False)


def parameter(value: Array, *axes: str | None) -> nnx.Param:
    """Return a parameter with these values. axes: the logical axis of each axis of the array, or None for an axis that is not
    sharded."""
    return nnx.Param(value, **annotated(*axes))


def linear(
    inputs: int,
    outputs: int,
    axes: tuple[str | None, str | None],
    *,
    bias: bool = False,
    dtype=None,
    param_dtype=jnp.float32,
    kernel_init: Initializer | None = None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Return an `nnx.Linear` that computes y = x kernel (+ bias), with kernel [inputs, outputs].

    axes: the logical axes of the kernel. bias: whether there is a bias [outputs].
    dtype: the dtype of the product; the dtype to which x and the parameters promote if None.
    kernel_init: a function (key, shape, dtype) that returns the kernel's first values; normal with a deviation of 0.02 if None.
    """
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=normal(0.02) if kernel_init is None else kernel_init,
        kernel_metadata=annotated(*axes),
        bias_metadata=annotated(axes[1]),
        rngs=rngs,
    )


def products(x: Float[Array, "*rows inputs"], *layers: nnx.Linear) -> list[Float[Array, "*rows outputs"]]:
    """Return the outputs of several layers that read x, in their order. The layers have equal sizes and dtypes.

    One product computes all outputs if x has more than `inputs` rows, no layer has a bias or is another class than
    `nnx.Linear`, and a kernel is cast for the product, as in training from float32. Otherwise each layer computes its own. With
    few rows, as in decoding, stacking kernels costs more than it saves. Kernels that need no cast would be copied for all
    layers of a model before the first begins, which takes their memory once more. The kernels are stacked on an axis of their
    own, so that a mesh may divide their outputs.
    """
    rows, inputs = math.prod(x.shape[:-1]), x.shape[-1]
    if rows <= inputs or any(type(layer) is not nnx.Linear or layer.bias is not None for layer in layers):
        return [layer(x) for layer in layers]
    kernels = [layer.kernel[...] for layer in layers]
    dtype = layers[0].dtype or jnp.result_type(x, *kernels)
    if all(kernel.dtype == dtype for kernel in kernels):
        return [layer(x) for layer in layers]
    kernel = jnp.stack([kernel.astype(dtype) for kernel in kernels], 1)
    y = jnp.einsum("...d,dnf->...nf", x.astype(dtype), kernel)
    return [y[..., i, :] for i in range(len(layers))]


def kernel_of(layer: Any) -> Float[Array, "inputs outputs"]:
    """Return the kernel W of a projection, or W + scale A B of one with low-rank terms (`nnx.LoRALinear`, `nnx.LoRA`)."""
    if isinstance(layer, nnx.LoRA):
        return with_term(kernel_of(layer.base_module), layer)
    kernel = layer.kernel[...]
    return with_term(kernel, layer.lora) if isinstance(layer, nnx.LoRALinear) else kernel


def with_term(kernel: Array, adapter: nnx.LoRA) -> Array:
    """Return kernel + the low-rank term of `adapter`, summed in float32 and in the kernel's dtype."""
    return (kernel.astype(jnp.float32) + low_rank(adapter)).astype(kernel.dtype)


def low_rank(adapter: nnx.LoRA) -> Float[Array, "inputs outputs"]:
    """Return the term that an adapter adds to a kernel, in float32: A B, times `scale` if the adapter is a `LowRank`."""
    a, b = (jnp.asarray(x[...], jnp.float32) for x in (adapter.lora_a, adapter.lora_b))
    product = jnp.matmul(a, b, precision="highest")
    return adapter.scale * product if isinstance(adapter, LowRank) else product


class LowRank(nnx.LoRA):
    """Compute the low-rank term of a projection, scale (x A) B, with scale = alpha / rank, or alpha / sqrt(rank) if
    rank_stabilized.

    layer: the projection. values: A [inputs, rank] and B [rank, outputs]; if None, A is drawn from rngs, uniformly between
    -1 / sqrt(inputs) and 1 / sqrt(inputs), and B is zeros.
    """

    def __init__(
        self,
        layer: nnx.Linear,
        rank: int,
        alpha: float,
        rank_stabilized: bool = False,
        *,
        values: tuple[Array, Array] | None = None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        first, second = (nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"), nnx.initializers.zeros)
        if values is not None:
            first, second = (lambda key, shape, dtype, value=value: value for value in values)
        axes = layer.kernel.get_metadata().get("out_sharding") or (None, None)
        super().__init__(
            layer.in_features,
            rank,
            layer.out_features,
            dtype=layer.dtype,
            param_dtype=param_dtype,
            a_initializer=first,
            b_initializer=second,
            a_metadata=annotated(axes[0], None),
            b_metadata=annotated(None, axes[1]),
            rngs=nnx.Rngs(0) if rngs is None else rngs,
        )
        self.rank, self.alpha, self.rank_stabilized = rank, alpha, rank_stabilized

    @property
    def scale(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) if rank_stabilized."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        return self.scale * super().__call__(x)


def squared_relu(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)


def elu_plus_one(x: Array) -> Array:
    return jax.nn.elu(x) + 1


def identity(x: Array) -> Array:
    return x


# "gelu" is the approximation by tanh, as in flash-linear-attention.
ACTIVATIONS: dict[str | None, Callable[[Array], Array]] = {
    None: identity,
    "identity": identity,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "sqrelu": squared_relu,
    "elu_plus_one": elu_plus_one,
    "leaky_relu": jax.nn.leaky_relu,
    "sigmoid": jax.nn.sigmoid,
    "logsigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "hardswish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "tanh": jnp.tanh,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": quick_gelu,
}


def activation(name: str, value: str | None) -> Callable[[Array], Array]:
    """Return the function that ACTIVATIONS has under the name `value`; the identity if None.

    Raises ValueError, which names the argument `name`, for an unknown name.
    """
    if value not in ACTIVATIONS:
        known = ", ".join(repr(x) for x in ACTIVATIONS)
        raise ValueError(f"{name} must be one of {known}, got {value!r}")
    return ACTIVATIONS[value]


def soft_cap(x: Array, cap: float | None) -> Array:
    """Return cap tanh(x / cap), or x if cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def for_rows(x: Array, param: Array, dtype=jnp.float32) -> Array:
    """Return param in `dtype`, with leading axes of length 1 added until it has as many axes as x.

    A user's jax_numpy_rank_promotion may forbid JAX to add them.
    """
    return jnp.expand_dims(param.astype(dtype), range(x.ndim - param.ndim))


def by_head(x: Float[Array, "*rows D"], heads: int) -> Float[Array, "*rows heads width"]:
    """Return x with its last axis divided into `heads` equal parts, [*rows, heads, D / heads]. `merged` is the inverse."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merged(x: Float[Array, "*rows heads width"]) -> Float[Array, "*rows D"]:
    """Return x with its last two axes merged into one, [*rows, heads * width]: the inverse of `by_head`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def check_floats(name: str, x, width: int | None = None):
    """Raise TypeError unless x is an array of floating point, and ValueError unless its last axis has `width` entries, if that
    is given."""
    check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if width is not None and (x.ndim == 0 or x.shape[-1] != width):
        raise ValueError(f"{name} must be [..., {width}], got shape {x.shape}")


def check_sizes(**sizes):
    """Raise TypeError or ValueError, which names the argument, unless every size is an integer of at least 1.

    sizes: the values by the names of the arguments. An integer of NumPy must have at least 32 bits.
    """
    for name, size in sizes.items():
        check_integer(name, size)
        if isinstance(size, np.integer) and size.dtype.itemsize < 4:
            raise TypeError(f"{name} must be an int, got {size.dtype}, in which products of sizes overflow")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_divides(name: str, size: int, by: str, whole: int):
    """Raise ValueError unless `size`, the argument `name`, divides `whole`, the argument `by`."""
    if whole % size:
        raise ValueError(f"{name} must divide {by}={whole}, got {size}")

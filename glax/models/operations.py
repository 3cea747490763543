"""Count the floating-point operations of a training step, for the share of the devices' peak that it reaches."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from glax.models.model import CausalLM
from glax.nn.attention import Attention
from glax.nn.convolution import ShortConvolution
from glax.nn.latent_attention import MultiHeadLatentAttention
from glax.nn.layer import Layer
from glax.nn.mlp import Experts

# Dense operations a second in bfloat16, by a part of the device's name, as its maker states them.
PEAKS = {
    "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "v5 lite": 197e12, "v5p": 459e12, "v6": 918e12,
}  # fmt: skip
# The states of which a token writes and reads every entry. `key` and `value`, the caches of softmax attention, are others: see
# `read_channels`.
RECURRENT = ("recurrent", "keys", "values", "normaliser")


def flops_per_token(model: CausalLM, length: int) -> float:
    """Return the floating-point operations of a training step, for each token of rows of `length` tokens:

        6 P + 6 sum over layers of (p E + h (K + V) n)

    P: the parameters that a matrix product reads; of experts, those that a token reads. E: the entries of a layer's recurrent
    states, over which a token passes p times, `state_passes` of the layer. h, K, V: the heads of softmax attention and the
    channels of their keys and values. n: the mean number of tokens that a token reads in a row of one document.

    A multiply and an add are two operations, and the gradient has twice those of the forward. In a model with low-rank terms
    the factor of P is 4 for all but the terms, because the gradient of those parameters is not formed. What a chunked form or
    remat computes beside this does not count.
    """
    modules = [module for block in model.blocks for _, module in nnx.iter_modules(block)]
    # The state of a convolution holds inputs, and its products are those of its parameters.
    layers = [x for x in modules if isinstance(x, Layer) and not isinstance(x, ShortConvolution)]
    passed = sum(layer.state_passes * entries(layer) + read_channels(layer, length) for layer in layers)
    params, terms = parameters_read(model, nnx.Param), parameters_read(model, nnx.LoRAParam)
    return (4.0 if terms else 6.0) * (params - terms) + 6.0 * terms + 6.0 * passed


def parameters_read(model: CausalLM, kind: type[nnx.Variable]) -> int:
    """Return the number of elements in variables of class `kind`, such as `nnx.Param`, that are read to compute one token's
    logits. A row of the embedding does not count.

    The embedding counts whole if it is the head too. Biases and weights of norms count, though no matrix product reads them: they
    are few. Of experts the share that a token is sent to counts, and a layer that several places share once for each of them.
    """
    outside = nnx.to_flat_state(nnx.state(model, kind))
    size = sum(x.size for path, x in outside if path[0] != "blocks")
    size += sum(x.size for block in model.blocks for x in jax.tree.leaves(nnx.state(block, kind)))
    if kind is nnx.LoRAParam:  # neither an embedding nor experts have terms
        return size
    if model.head is not None:
        size -= model.vocabulary * model.width
    for mixture, experts in mixtures(model):
        total = sum(x.size for x in jax.tree.leaves(nnx.state(experts, kind)))
        size -= total * (experts.count - mixture.top_k) // experts.count
    return size


def mixtures(model: CausalLM) -> Iterator[tuple[Any, Experts]]:
    """Yield each module that routes tokens, and its experts."""
    for block in model.blocks:
        for _, module in nnx.iter_modules(block):
            if isinstance(experts := getattr(module, "experts", None), Experts):
                yield module, experts


def entries(layer: Layer) -> int:
    """Return the number of entries of a layer's recurrent states, `RECURRENT`, for one sequence."""
    states = jax.eval_shape(lambda: layer.empty_state(1, 1))
    return sum(x.size for name, x in states.items() if name in RECURRENT)


def read_channels(layer: Layer, length: int) -> float:
    """Return h (K + V) n of the formula of `flops_per_token`, for rows of `length` tokens; 0 for a layer without softmax
    attention."""
    match layer:
        case Attention():
            window = length if layer.window is None else min(layer.window, length)
            mean = window - window * (window - 1) / (2 * length)  # of min(t, window) for t from 1 to length
            return layer.num_heads * 2 * layer.head_width * mean
        case MultiHeadLatentAttention():
            return layer.num_heads * (layer.head_width + layer.shared_width + layer.value_width) * (length + 1) / 2
    return 0.0


def utilisation(model: CausalLM, length: int, tokens_per_second: float) -> float | None:
    """Return the model FLOPs utilisation: the operations per second of training as a share of the peak in bfloat16 of the
    devices that hold the model. Return None if the peak is unknown.

    length: the tokens of a row. tokens_per_second: of all devices together.
    """
    peak = next((value for name, value in PEAKS.items() if name in jax.devices()[0].device_kind), None)
    devices = len(model.embedding.embedding[...].sharding.device_set)
    return None if peak is None else flops_per_token(model, length) * tokens_per_second / (peak * devices)

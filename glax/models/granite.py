"""Build Granite 4 hybrids: Mamba-2 and softmax attention, a shared gated MLP, and in some models experts beside the MLP."""

import functools

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    LINEAR,
    MIXERS,
    TRAINING,
    DenseMLP,
    ScaledLM,
    attention_sizes,
    experts_per_token,
    hidden_act,
    layer_kinds,
    mamba,
    mamba_options,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import Names, mixer_names, outer_names, transposed_layouts
from glax.models.rope import rotation
from glax.nn import RMSNorm
from glax.nn.mlp import SparseMLP

SHARED = {"input": "input_linear", "output": "output_linear"}


def mlp_names(experts: bool) -> tuple[tuple[str, str], ...]:
    """Return rules for the names of the shared MLP: `mlp`, or `mlp.shared` if the model has experts."""
    inside = r"\.mlp\.shared" if experts else r"\.mlp"
    shared = [(rf"{inside}\.{old}(?=\.)", f".shared_mlp.{new}") for old, new in SHARED.items()]
    return (
        *shared,
        (r"\.mlp\.router$", ".block_sparse_moe.router.layer.router"),
        (r"\.mlp\.experts\.input$", ".block_sparse_moe.input_linear.input"),
        (r"\.mlp\.experts\.down$", ".block_sparse_moe.output_linear.down"),
    )


def granite(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Granite 4 hybrid. It is dense if num_local_experts is 0. Raises UnsupportedOption for an option that is not
    supported.

    IBM 2025, https://huggingface.co/ibm-granite.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 32000)
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    kinds = layer_kinds(options, ("layers_block_type", "layer_types"), layers, [LINEAR] * layers)
    options.ignore(*TRAINING)
    sizes, rope = attention_sizes(options, width), rotation(options, 10000.0, 2048)
    rope = rope if options.choice("position_embedding_type", None, (None, "rope", "nope")) == "rope" else None
    bias, scale = options.flag("attention_bias", False), options.number("attention_multiplier", 1.0)
    multiplier = options.number("residual_multiplier", 1.0)
    scaled = dict(
        embedding_multiplier=options.number("embedding_multiplier", 1.0),
        logits_multiplier=1 / options.number("logits_scaling", 1.0, above=0),
    )
    arguments = mamba_options(options, width, eps=eps, act=act)
    count = options.integer("num_local_experts", 8, least=0)
    # A dense model's config may have 0 of both.
    top_k = experts_per_token(options, 2, "num_local_experts", count, least=min(count, 1))
    inside = options.integer("intermediate_size", 11008, least=min(count, 1))  # of the experts
    shared = options.integer("shared_intermediate_size", 1024)
    options.finish()

    def mixer(kind: str):
        if kind == LINEAR:
            return mamba(width, arguments, init, precision)
        more = dict(bias=bias, output_bias=bias, scale=scale)
        return softmax_attention(width, sizes, rope, init, precision, **more)

    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)

    def mlp():
        always = DenseMLP(width, shared, act=act, kernel_init=init, **precision.options)
        if not count:
            return always
        more = dict(form="fused", act=act, shared=always, kernel_init=init)
        return SparseMLP(width, inside, count, top_k, **more, **precision.options)

    blocks = [Block(norm(), mixer(kind), norm(), mlp(), multiplier) for kind in kinds]
    rules = (*mixer_names(kinds, MIXERS), *mlp_names(bool(count)), *outer_names())
    names = Names(rules, layouts=transposed_layouts("input", "down", "router"))
    return ScaledLM(config, blocks, norm(), names, width=width, **outer, **scaled)

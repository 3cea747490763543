"""Build the language model of Qwen3.5: Qwen3-Next with one projection for each input of the recurrence, dense or with experts."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import (
    LINEAR,
    SOFTMAX,
    TRAINING,
    attention_sizes,
    experts_per_token,
    hidden_act,
    layer_kinds,
    softmax_attention,
)
from glax.models.model import Block, CausalLM, Precision, outer_options
from glax.models.names import (
    GATED_MLP,
    NORMED_ATTENTION,
    Names,
    mixer_names,
    outer_names,
    stacked_experts,
    transposed_layouts,
)
from glax.models.qwen3_next import MLPS, FusedGatedDeltaNet, SharedExpert, delta_sizes
from glax.models.rope import rotation
from glax.nn import RMSNorm, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP
from glax.nn.parts import EMBED, HEADS, linear

MIXERS = {
    SOFTMAX: ("self_attn", NORMED_ATTENTION),
    LINEAR: (
        "linear_attn",
        {
            "qkv": "in_proj_qkv",
            "z": "in_proj_z",
            "b": "in_proj_b",
            "a": "in_proj_a",
            "conv": "conv1d",
            "output": "out_proj",
        },
    ),
}
# Both forms of folder are read. These turn names in a folder of the whole model into those of the language model's own; and back.
FROM_WHOLE = (r"^model\.language_model\.", "model.")
FROM_ALONE = (r"^model\.(?=(embed_tokens|layers|norm)\.)", "model.language_model.")
OTHERS = (r"^mtp\.", r"^model\.visual\.")


class SplitGatedDeltaNet(FusedGatedDeltaNet):
    """Compute `FusedGatedDeltaNet` with one projection for q, k and v of all heads, and one each for z, beta and the step
    size, as in checkpoints of Qwen3.5."""

    def make_projections(self, **options):
        sizes = self.sizes
        self.qkv = linear(self.width, 2 * sizes.keys + sizes.values, (EMBED, HEADS), **options)
        self.z = linear(self.width, sizes.values, (EMBED, HEADS), **options)
        self.b, self.a = (linear(self.width, sizes.num_heads, (EMBED, HEADS), **options) for _ in range(2))

    def projected(self, x: Float[Array, "*rows width"]) -> list[Array]:
        return [self.qkv(x), self.z(x), self.b(x), self.a(x)]


def qwen3_5(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build the language model of Qwen3.5, from a config of the whole model (`qwen3_5`, `qwen3_5_moe`) or of the language model
    alone (`qwen3_5_text`, `qwen3_5_moe_text`).

    Positions are those of text: its three rows of them are equal, so that `mrope_section` has no effect. The vision tower and
    the layers of multi-token prediction are not read. Raises UnsupportedOption for an option that is not supported.

    Qwen Team 2026, https://huggingface.co/Qwen/Qwen3.5-27B.
    """
    outermost = Options(config.values)
    kind = str(outermost.model_type)
    is_whole, has_experts = not kind.endswith("_text"), "moe" in kind
    options = outermost.model("text_config", f"{kind}_text") if is_whole else outermost
    width = options.integer("hidden_size", 2048 if has_experts else 4096)
    layers = options.integer("num_hidden_layers", 40 if has_experts else 32)
    outer, init = outer_options(options, precision, 248320)
    outer["tied"] = outermost.flag("tie_word_embeddings", False)  # whatever text_config says
    eps, act = options.number("rms_norm_eps", 1e-6, least=0), hidden_act(options)
    every = options.integer("full_attention_interval", 4)
    usual = [LINEAR if (layer + 1) % every else SOFTMAX for layer in range(layers)]
    kinds = layer_kinds(options, ("layer_types",), layers, usual)
    options.ignore(*TRAINING)
    sizes = attention_sizes(options, width, heads=16, kv_heads=2 if has_experts else 4, head_width=256)
    rope = rotation(options, 10000.0, 32768, 0.25, ignored=("mrope_interleaved", "mrope_section"))
    bias, delta = options.flag("attention_bias", False), delta_sizes(options)
    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    mlp = (sparse_mlp if has_experts else dense_mlp)(options, width, act, common)
    options.finish()
    if is_whole:
        outermost.finish()

    norm = functools.partial(RMSNorm, width, epsilon=eps, zero_centred=True, param_dtype=precision.param_dtype)

    def mixer(kind: str) -> Layer:
        if kind == LINEAR:
            return SplitGatedDeltaNet(width, delta, act=act, norm_eps=eps, **common)
        more = dict(bias=bias, output_bias=bias, gated=True, qk_norm=True, zero_centred=True, norm_eps=eps)
        return softmax_attention(width, sizes, rope, init, precision, **more)

    blocks = [Block(norm(), mixer(kind), norm(), mlp()) for kind in kinds]
    return CausalLM(config, blocks, norm(), names_of(kinds, is_whole), width=width, **outer)


def dense_mlp(options: Options, width: int, act: str, common: dict) -> Callable[[], SwiGLU]:
    """Return a function that makes a layer's gated MLP. act: the name of its activation. common: further arguments of
    SwiGLU."""
    inside = options.integer("intermediate_size", 12288)
    return lambda: SwiGLU(width, inside, activation=act, **common)


def sparse_mlp(
    options: Options, width: int, act: str, common: dict, *, count: int = 256, top_k: int = 8, normalize: bool = True
) -> Callable[[], SparseMLP]:
    """Return a function that makes a layer's MLP of experts, with a shared expert.

    count, top_k: num_experts and num_experts_per_tok for a config that lacks them. normalize: whether the weights of a token's
    experts are divided by their sum. act: the name of the activation. common: further arguments of the modules.
    """
    each, shared = (options.integer(f"{name}_intermediate_size", 512) for name in ("moe", "shared_expert"))
    count = options.integer("num_experts", count)
    top_k = experts_per_token(options, top_k, "num_experts", count)

    def sparse() -> SparseMLP:
        always = SharedExpert(width, SwiGLU(width, shared, activation=act, **common), **common)
        return SparseMLP(width, each, count, top_k, act=act, normalize=normalize, shared=always, **common)

    return sparse


def names_of(kinds: Sequence[str], is_whole: bool) -> Names:
    """Return the `Names` of the parameters. Published files hold all experts of a layer in two tensors, which are read too.
    is_whole: whether files have the vision tower's names."""
    prefix = "model.language_model" if is_whole else "model"
    outer = outer_names(*(f"{prefix}.{name}" for name in ("embed_tokens", "layers", "norm")))
    return Names(
        (*mixer_names(kinds, MIXERS), *MLPS, *outer),
        layouts=transposed_layouts("router", *GATED_MLP),
        aliases=(FROM_ALONE if is_whole else FROM_WHOLE,),
        stacked=stacked_experts(rf"{re.escape(prefix)}\.layers\.\d+\.mlp"),
        others=OTHERS,
    )

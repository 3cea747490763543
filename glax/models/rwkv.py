"""Build RWKV-4 from the configs of transformers."""

from typing import Any

from glax.models.config import WIDEST, ModelConfig, Options
from glax.models.fla import RWKV6Block
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import Layout, Names, outer_names, renamed
from glax.models.rwkv7 import initialise_outer, of_rows, row_of
from glax.nn import LayerNorm, RWKV4Attention, RWKV4FeedForward

LAYOUTS: tuple[tuple[str, Layout], ...] = tuple(
    (f"mix_{name}", (f"time_mix_{name}", of_rows, row_of)) for name in ("receptance", "key", "value")
)
RULES = (
    *renamed("attn", {"decay": "time_decay", "bonus": "time_first"}),
    (r"\.attn\.", ".attention."), (r"\.ffn\.", ".feed_forward."), (r"\.pre_norm\.", ".pre_ln."), (r"\.ffn_norm\.", ".ln2."),
    (r"^head\.kernel$", "head.weight"),
    *outer_names("rwkv.embeddings", "rwkv.blocks", "rwkv.ln_out", attn_norm="ln1")[:-1],
)  # fmt: skip
LAST_EPSILON = 1e-5  # of the last norm, whatever layer_norm_epsilon is


def rwkv(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build an RWKV-4 model. Peng et al. 2023, https://arxiv.org/abs/2305.13048.

    At inference the model's own code halves the residuals behind every rescale_every layers, and the outputs that are added to
    them. That changes results by the epsilons of norms alone, which are multiplied by 4 here for each halving.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, _ = outer_options(options, precision, 50277, has_padding=False)
    inside = options.integer("attention_hidden_size", None, optional=True) or width
    wide = options.integer("intermediate_size", None, optional=True) or 4 * width
    eps = options.number("layer_norm_epsilon", 1e-5, least=0)
    every = options.integer("rescale_every", 6, least=-WIDEST)  # 0 or less: none
    # The first two are the longest sequence of its CUDA kernel. It has no rotary positions.
    options.ignore("context_length", "max_position_embeddings", "rope_parameters", "rope_scaling")
    options.finish()

    def norm(layer: int, epsilon: float = eps) -> LayerNorm:
        halvings = layer // every if every > 0 else 0
        return LayerNorm(width, epsilon=epsilon * 4.0**halvings, param_dtype=precision.param_dtype)

    def block(layer: int) -> RWKV6Block:
        place: dict[str, Any] = dict(layer_idx=layer, num_layers=layers, **precision.options)
        attn, ffn = RWKV4Attention(width, inside=inside, **place), RWKV4FeedForward(width, wide, **place)
        return RWKV6Block(norm(0) if layer == 0 else None, norm(layer), attn, norm(layer), ffn)

    blocks = [block(layer) for layer in range(layers)]
    names = Names(RULES, layouts=LAYOUTS, float32=(r"\.time_decay$", r"\.time_first$"))
    model = CausalLM(config, blocks, norm(layers, LAST_EPSILON), names, width=width, **outer)
    initialise_outer(model, precision)
    return model

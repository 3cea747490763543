"""Build the delta rule's models of flash-linear-attention: delta_net, gated_deltanet and kda."""

from typing import Any

from flax import nnx

from glax.models.config import ModelConfig, Options, exact_width
from glax.models.fla import CONVOLUTIONS, assemble, widths_of_heads
from glax.models.model import CausalLM, Precision
from glax.nn import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from glax.nn.delta import QK_ACTIVATIONS, QK_NORMS

MODES = ("chunk", "fused_recurrent")  # modes that compute the same function

NAMES = CONVOLUTIONS | {"beta": "b_proj", "norm": "o_norm"}
OUTPUT_GATE = {"output_gate": "g_proj"}
KDA_GATES = {
    "gate_down": "f_proj.0",
    "gate_up": "f_proj.1",
    "output_gate_down": "g_proj.0",
    "output_gate_up": "g_proj.1",
}


def shared_options(options: Options) -> dict[str, Any]:
    """Return the arguments that all three layers share."""
    options.choice("attn_mode", "chunk", MODES)
    init = nnx.initializers.normal(options.number("initializer_range", 0.02, least=0))
    return dict(
        use_short_conv=options.flag("use_short_conv", True),
        conv_size=options.integer("conv_size", 4),
        allow_neg_eigval=options.flag("allow_neg_eigval", False),
        norm_eps=options.number("norm_eps", 1e-6, least=0),
        kernel_init=init,
        filter_init=init,
    )


def plain_norm(is_gated: bool) -> tuple[str, ...]:
    """Return the pattern of the output's norm, as in `Names.float32`. fla has it in float32 where no gate is fused into it."""
    return () if is_gated else (r"\.attn\.o_norm\.weight$",)


def grouped_heads(options: Options, *, heads: int, head_width: int, expand: float) -> dict[str, Any]:
    """Return num_heads, num_qk_heads, key_width and value_width of gated_deltanet and kda, whose values may have more heads."""
    qk_heads = options.integer("num_heads", heads)
    heads = options.integer("num_v_heads", None, optional=True) or qk_heads
    if heads % qk_heads:
        raise options.unsupported("num_v_heads", f"it must be a multiple of num_heads={qk_heads}")
    keys = options.integer("head_dim", head_width)
    values = exact_width("expand_v", keys, options.number("expand_v", expand), "head_dim")
    return dict(num_heads=heads, num_qk_heads=qk_heads, key_width=keys, value_width=values)


def delta_net(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a DeltaNet model. Its output is normalised whatever use_output_norm says, and norm_first of older configs has no
    effect, as in fla. Yang et al. 2024, https://arxiv.org/abs/2406.06484."""
    options = Options(config.values)
    width = options.integer("hidden_size", 2048)
    options.ignore("use_output_norm")
    more = dict(
        **widths_of_heads(options, width, 16, (1.0, 1.0)),
        **shared_options(options),
        use_beta=options.flag("use_beta", True),
        use_output_gate=options.flag("use_gate", False),
        qk_activation=options.choice("qk_activation", "silu", QK_ACTIVATIONS),
        qk_norm=options.choice("qk_norm", "l2", QK_NORMS),
    )

    def mixer(layer: int) -> DeltaNet:
        return DeltaNet(width, **more, **precision.options)

    float32 = plain_norm(more["use_output_gate"])
    return assemble(options, config, precision, mixer, NAMES | OUTPUT_GATE, ratio=4, width=width, float32=float32)


def gated_deltanet(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Gated DeltaNet model. Yang et al. 2024, https://arxiv.org/abs/2412.06464."""
    options = Options(config.values)
    width = options.integer("hidden_size", 2048)
    more = dict(
        **grouped_heads(options, heads=6, head_width=256, expand=2.0),
        **shared_options(options),
        use_output_gate=options.flag("use_gate", True),
        gate_fn=options.choice("output_gate_activation", "swish", ("swish", "silu", "sigmoid")),
    )

    def mixer(layer: int) -> GatedDeltaNet:
        return GatedDeltaNet(width, **more, **precision.options)

    names, float32 = NAMES | OUTPUT_GATE | {"gate": "a_proj"}, (r"\.attn\.A_log$", *plain_norm(more["use_output_gate"]))
    return assemble(options, config, precision, mixer, names, ratio=4, width=width, layers=21, float32=float32)


def kda(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Kimi Delta Attention model. Log gates are bounded if lower_bound is set. Kimi Team 2025,
    https://arxiv.org/abs/2510.26692."""
    options = Options(config.values)
    width, bound = options.integer("hidden_size", 2048), options.number("lower_bound", None, optional=True)
    is_safe = options.flag("safe_gate", False)
    if is_safe and bound is None:
        raise options.unsupported("safe_gate", "it must come with a lower_bound")
    if bound is not None and not bound < 0:
        raise options.unsupported("lower_bound", "it must be null or below 0")
    more = dict(
        **grouped_heads(options, heads=16, head_width=128, expand=1.0),
        **shared_options(options),
        lower_bound=bound,
        A_range=(1.0, 1.0) if is_safe else (1.0, 16.0),
    )

    def mixer(layer: int) -> KimiDeltaAttention:
        return KimiDeltaAttention(width, **more, **precision.options)

    float32 = (r"\.attn\.A_log$", r"\.attn\.dt_bias$")
    return assemble(options, config, precision, mixer, NAMES | KDA_GATES, ratio=4, width=width, float32=float32)

"""Build the language model of Kimi K3: the mixers of Kimi-Linear with gates of full rank, experts in a narrower width, and
attention over the sums that blocks of layers have left, in place of residuals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from glax.models.config import ModelConfig, Options
from glax.models.hybrids import LINEAR, SOFTMAX, TRAINING, hidden_act
from glax.models.kimi_linear import (
    DELTA,
    DENSE,
    EXPERTS,
    LATENT,
    LATENT_NORM_EPS,
    SPARSE,
    KimiOptions,
    delta_arguments,
    expert_arguments,
    expert_names,
    kimi_linear,
    latent_arguments,
    linear_options,
)
from glax.models.model import Block, CausalLM, Mixing, Precision, outer_options
from glax.models.names import GATED_MLP, Names, mixer_names, outer_names, renamed, transposed, transposed_layouts
from glax.nn import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm, SwiGLU
from glax.nn.layer import Layer
from glax.nn.mlp import SparseMLP
from glax.nn.norms import normalized
from glax.nn.parts import EMBED, for_rows, linear
from glax.nn.passes import Rows

# Options that Kimi-Linear's config does not have. Text models of either are of model_type "kimi_linear".
OWN = ("attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size")
KEYS = {
    "count": "num_experts", "top_k": "num_experts_per_token", "groups": "num_expert_group", "shared": "num_shared_experts",
    "normalize": "moe_renormalize",
}  # fmt: skip
# Its own code reads them, and they change nothing that it computes.
IGNORED = (
    "head_dim", "max_position_embeddings", "num_nextn_predict_layers", "rope_parameters", "rope_scaling", "rope_theta",
    "topk_method", "use_grouped_topk",
)  # fmt: skip
WHOLE = "language_model."  # before the names of the language model in a folder of the whole model
OTHERS = (r"^vision_tower\.", r"^mm_projector\.")
FLOAT32 = (r"\.A_log$", r"\.dt_bias$", r"\.e_score_correction_bias$", r"_conv1d\.weight$", r"\.o_norm\.weight$")
NARROW = tuple(
    (rf"\.mlp\.{old}\.", f".block_sparse_moe.routed_expert_{new}.")
    for old, new in (("into", "down_proj"), ("out_norm", "norm"), ("out_of", "up_proj"))
)


class AttentionResidual(nnx.Module):
    """Compute y = sum_n p_n v_n of the N rows v_n [D] of each token, p = softmax_n(w . (RMSNorm(v_n) * scale)), in float32.

    Kimi Team 2026, https://arxiv.org/abs/2603.15031.
    """

    def __init__(self, width: int, *, norm_eps: float, **options):
        self.norm = RMSNorm(width, epsilon=norm_eps, param_dtype=options["param_dtype"])
        self.score = linear(width, 1, (EMBED, None), **options)

    def __call__(self, values: Float[Array, "*rows N D"]) -> Float[Array, "*rows D"]:
        wide = values.astype(jnp.float32)
        keys = normalized(wide, self.norm.epsilon)
        assert self.norm.scale is not None
        scale = self.norm.scale[...].astype(jnp.float32) * self.score.kernel[...][:, 0].astype(jnp.float32)
        share = jax.nn.softmax((keys * for_rows(keys, scale)).sum(-1), -1)
        return (share[..., None] * wide).sum(-2).astype(values.dtype)


class ResidualBlock(nnx.Module):
    """Compute a mixer and an MLP, each of which reads an `AttentionResidual` over the sums of the blocks of layers so far and the
    running sum x of its own block. `mix` takes a pair: x [*rows, D], and the sums of whole blocks [*rows, N, D]. opens: whether
    a block of layers begins here: x then becomes the sum of a whole block, and a new x begins with the mixer's output."""

    def __init__(
        self,
        attn_residual: AttentionResidual,
        attn_norm: Any,
        attn: Mixing,
        mlp_residual: AttentionResidual,
        mlp_norm: Any,
        mlp: Any,
        *,
        opens: bool,
    ):
        self.attn_residual, self.attn_norm, self.attn = attn_residual, attn_norm, attn
        self.mlp_residual, self.mlp_norm, self.mlp, self.opens = mlp_residual, mlp_norm, mlp, opens

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.attn.empty_state(batch, max_length)

    def mix(self, pair: tuple[Array, Array], state: dict, rows: Rows) -> tuple[tuple[Array, Array], dict]:
        x, sums = pair
        read = self.attn_residual(with_last(sums, x)) if sums.shape[-2] else x  # the first layer reads the embedding
        sums = with_last(sums, x) if self.opens else sums
        y, after = self.attn.mix(self.attn_norm(read), state, rows)
        x = y if self.opens else x + y
        read = self.mlp_residual(with_last(sums, x))
        return (x + self.mlp(self.mlp_norm(read)), sums), dict(after)


def with_last(sums: Float[Array, "*rows N D"], x: Float[Array, "*rows D"]) -> Float[Array, "*rows N+1 D"]:
    return jnp.concatenate([sums, x[..., None, :]], -2)


class ResidualLM(CausalLM):
    """A CausalLM of `ResidualBlock`s, whose norm reads an `AttentionResidual` over the sums of all blocks of layers."""

    def __init__(self, *args, output_residual: AttentionResidual, **options):
        super().__init__(*args, **options)
        self.output_residual = output_residual

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> tuple[Array, Array]:
        x = super().begin(tokens, rows)
        return x, jnp.zeros((*x.shape[:-1], 0, x.shape[-1]), x.dtype)

    def through(self, x: tuple[Array, Array], states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        (last, sums), states = super().through(x, states, rows)
        return self.output_residual(with_last(sums, last)), states

    def cannot_scan(self) -> str | None:
        return "layers read the sums of all blocks of layers before them"


def kimi_k3(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build the language model of Kimi K3. Its vision tower is not read. Raises UnsupportedOption for an option that is not
    supported.

    Kimi Team 2026, https://arxiv.org/abs/2607.24653.
    """
    outermost = Options(config.values)
    inner = outermost.model("text_config", "kimi_k3_text")
    options = KimiOptions(
        inner.values, inside=inner.inside, model_type=inner.model_type, read=inner.read, outer=outermost
    )
    model = language_model(config, options, precision, WHOLE)
    outermost.ignore(
        "tie_word_embeddings", "vision_config"
    )  # the embeddings of the language model follow its own config
    outermost.finish()
    return model


def kimi_text(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a model of model_type "kimi_linear": a Kimi-Linear, or the language model of Kimi K3 where the config has its
    options. Raises UnsupportedOption for an option that is not supported.

    Kimi Team 2025, https://arxiv.org/abs/2510.26692.
    """
    values = config.values
    if values.get("hidden_act") != "situ" and all(values.get(key) is None for key in OWN):
        return kimi_linear(config, precision)
    return language_model(config, KimiOptions(values, code="kimi_k3_text"), precision, "")


def language_model(config: ModelConfig, options: KimiOptions, precision: Precision, prefix: str) -> CausalLM:
    """Return the model. prefix: before the names of its tensors."""
    width, layers = options.integer("hidden_size", 4096), options.integer("num_hidden_layers", 32)
    outer, init = outer_options(options, precision, 163840, pad=0)
    eps = options.number("rms_norm_eps", 1e-6, least=0)
    act, situ = activation_of(options)
    inner = linear_options(options)
    sizes, kinds = delta_arguments(options, inner, layers)
    bound = inner.number("gate_lower_bound", None, optional=True)
    if bound is not None and bound >= 0:
        raise options.unsupported("linear_attn_config", "gate_lower_bound must be below 0")
    low_rank = not inner.flag("use_full_rank_gate", False)
    inner.finish()
    latent = latent_arguments(options)
    options.choice("mla_use_nope", False, (True,))
    has_gate = options.flag("mla_use_output_gate", False)
    mlps = mlp_kinds(options, layers)
    experts, shared = sparse_arguments(options, eps) if SPARSE in mlps else ({}, 0)
    inside = options.integer("intermediate_size", 11008)
    every = options.integer("attn_res_block_size", None, optional=True)
    options.ignore(*TRAINING, *IGNORED)
    options.finish()

    common: dict[str, Any] = dict(kernel_init=init, **precision.options)
    norm = functools.partial(RMSNorm, width, epsilon=eps, param_dtype=precision.param_dtype)
    gated = functools.partial(SwiGLU, width, activation=act, situ=situ, **common)

    def mixer(kind: str) -> Layer:
        if kind == SOFTMAX:
            more = dict(theta=None, norm_eps=LATENT_NORM_EPS, gated_channels=has_gate)
            return MultiHeadLatentAttention(width, **more, **latent, **common)
        gate: dict[str, Any] = dict(lower_bound=bound, gate_bias=False, low_rank_output=low_rank)
        return KimiDeltaAttention(width, norm_eps=eps, filter_init=init, **gate, **sizes, **common)

    def mlp(kind: str) -> SwiGLU | SparseMLP:
        if kind == DENSE:
            return gated(inside)
        return SparseMLP(width, routing="sigmoid", act=act, situ=situ, shared=gated(shared), **experts, **common)

    def residual() -> AttentionResidual:
        return AttentionResidual(width, norm_eps=eps, **common)

    names = names_of(kinds, mlps, sizes["num_heads"], latent["query_rank"] is None, low_rank, prefix)
    if every is None:
        plain = [Block(norm(), mixer(kind), norm(), mlp(of)) for kind, of in zip(kinds, mlps, strict=True)]
        return CausalLM(config, plain, norm(), names, width=width, **outer)
    blocks = [
        ResidualBlock(residual(), norm(), mixer(kind), residual(), norm(), mlp(of), opens=layer % every == 0)
        for layer, (kind, of) in enumerate(zip(kinds, mlps, strict=True))
    ]
    return ResidualLM(config, blocks, norm(), names, width=width, output_residual=residual(), **outer)


def activation_of(options: Options) -> tuple[str, tuple[float, float | None] | None]:
    """Return (activation, situ) of `SwiGLU`."""
    beta = options.number("activation_situ_beta", None, optional=True, least=0)
    linear_beta = options.number("activation_situ_linear_beta", None, optional=True, above=0)
    if options.values.get("hidden_act") == "situ":
        options.ignore("hidden_act")
        return "silu", (beta or 1.0, linear_beta)
    return hidden_act(options), None


def mlp_kinds(options: Options, layers: int) -> list[str]:
    """Return whether each MLP is dense or sparse: every `moe_layer_freq`-th has experts, but for the first ones."""
    first, every = options.integer("first_k_dense_replace", 0, least=0), options.integer("moe_layer_freq", 1)
    if options.values.get("num_experts") is None:
        options.ignore(*KEYS.values(), "moe_intermediate_size", "routed_scaling_factor", "topk_group")
        options.ignore("latent_moe_use_norm", "moe_router_activation_func", "routed_expert_hidden_size")
        return [DENSE] * layers
    return [SPARSE if layer >= first and layer % every == 0 else DENSE for layer in range(layers)]


def sparse_arguments(options: KimiOptions, eps: float) -> tuple[dict[str, Any], int]:
    """Return the arguments of SparseMLP, and the width of the shared experts together."""
    options.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    experts, shared = expert_arguments(options, KEYS, inside=1024, count=256, groups=1, best=1, scaling=1.0)
    latent, has_norm = (
        options.integer("routed_expert_hidden_size", None, optional=True),
        options.flag("latent_moe_use_norm", False),
    )
    if latent is not None:
        experts |= dict(latent=latent, latent_norm_eps=eps if has_norm else None)
    return experts, shared


def rates_to_torch(x: np.ndarray) -> np.ndarray:
    """Return A_log [H] with zeros up to a multiple of 128, as the published files have it."""
    return np.pad(x, (0, -len(x) % 128))


def rates_from_torch(x: np.ndarray, heads: int) -> np.ndarray:
    """Return A_log [H] of a file. Raises ValueError unless zeros stand behind it."""
    if x.ndim != 1 or x[heads:].any():
        raise ValueError(f"A_log must have {heads} numbers, and zeros behind them, got shape {x.shape}")
    return x[:heads]


def names_of(kinds: list[str], mlps: list[str], heads: int, is_whole_query: bool, low_rank: bool, prefix: str) -> Names:
    """Return the names of the tensors. is_whole_query, low_rank: whether queries have one matrix, and output gates two."""
    gates = {} if low_rank else {"output_gate_up": "g_proj"}
    query = {"query": "q_proj" if is_whole_query else "q_b_proj", "gate": "g_proj"}
    mixers = {LINEAR: ("self_attn", DELTA | gates), SOFTMAX: ("self_attn", LATENT | query)}
    model = f"{prefix}model"
    residuals = tuple(
        (rf"{here}_residual\.{old}\.", f"{there}_{new}.")
        for here, there in (
            (r"^output", f"{model}.output_attn"), (r"\.attn", ".self_attention"), (r"\.mlp", ".mlp")
        )
        for old, new in (("norm", "res_norm"), ("score", "res_proj"))
    )  # fmt: skip
    outer = outer_names(*(f"{model}.{name}" for name in ("embed_tokens", "layers", "norm")))
    aliases = ((r"^(?=(model|lm_head)\.)", WHOLE),) if prefix else ((rf"^{WHOLE}".replace(".", r"\."), ""),)
    return Names(
        (
            *mixer_names(kinds, mixers), *renamed("mlp", GATED_MLP), *expert_names(mlps), *NARROW, *residuals, *outer,
            (r"^lm_head\.", f"{prefix}lm_head."),
        ),
        layouts=(
            *transposed_layouts("router"),
            *((old, (f"{new}.weight", transposed, transposed)) for old, new in EXPERTS.items()),
            ("A_log", ("A_log", rates_to_torch, functools.partial(rates_from_torch, heads=heads))),
        ),
        aliases=aliases,
        others=OTHERS,
        float32=FLOAT32,
    )  # fmt: skip

"""Build Zamba2: Mamba-2 layers, some behind a transformer block that several layers share, each with its own adapters."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.config import ModelConfig, Options, exact_width
from glax.models.hybrids import (
    TRAINING,
    DenseMLP,
    hidden_act,
    layer_kinds,
    mamba,
)
from glax.models.mamba2 import first_steps
from glax.models.model import CausalLM, Precision, outer_options
from glax.models.names import ATTENTION, MAMBA, Names, Rules, one_of, outer_names, renamed
from glax.models.rope import rotation
from glax.nn import Attention, RMSNorm
from glax.nn.layer import Layer
from glax.nn.parts import EMBED, HEADS, MLP, linear
from glax.nn.passes import Rows, State

PLAIN, HYBRID = "linear_attention", "hybrid"
KINDS = {PLAIN: PLAIN, "mamba": PLAIN, HYBRID: HYBRID}
USUAL = [PLAIN, *[*[PLAIN] * 5, HYBRID] * 7, *[PLAIN] * 4, HYBRID, *[PLAIN] * 3, HYBRID, *[PLAIN] * 2]
# Options without effect on the function that the model's own code computes, although it reads them.
IGNORED = ("chunk_size", "use_conv_bias", "use_mamba_kernels")

MLP_NAMES = {"input": "gate_up_proj", "output": "down_proj"}
ADAPTERS = {
    "query": "self_attn.linear_q_adapter_list",
    "key": "self_attn.linear_k_adapter_list",
    "value": "self_attn.linear_v_adapter_list",
    "mlp": "feed_forward.gate_up_proj_adapter_list",
}


class Adapter(nnx.Module):
    """Compute y = W_up W_down x, a term of low rank that is added to a shared projection. Hu et al. 2021,
    https://arxiv.org/abs/2106.09685.

    inputs, rank, outputs: the widths of x, W_down x and y. outputs_axis: the name of the logical axis of y, by which W_up is
    sharded. options: the arguments of `linear` that both matrices share, by name.
    """

    def __init__(self, inputs: int, rank: int, outputs: int, outputs_axis: str, options: dict):
        self.down = linear(inputs, rank, (EMBED, None), **options)
        self.up = linear(rank, outputs, (None, outputs_axis), **options)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        return self.up(self.down(x))


class SharedAttention(Attention):
    """Compute softmax attention whose output is half as wide as its input. Each layer adds its own adapters to q, k and v."""

    def __init__(self, width: int, **options):
        super().__init__(width, **options)
        given: dict[str, Any] = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
        self.output = linear(self.num_heads * self.head_width, width // 2, (HEADS, EMBED), **given)

    def adapted(self, x: Array, state: State, rows: Rows, adapters: dict[str, Adapter]) -> tuple[Array, State]:
        """Return what `mix` does, with W x + adapters[name](x) in place of the projections that `adapters` names, "query",
        "key" or "value"."""
        projected = dict(query=self.query(x), key=self.key(x), value=self.value(x))
        q, k, v = (y + adapters[name](x) if name in adapters else y for name, y in projected.items())
        return self.attend(q, k, v, state, rows)


class SharedMLP(DenseMLP):
    """Compute a gated MLP. Each layer adds its own adapter to the first projection."""

    def adapted(self, x: Float[Array, "*rows width"], adapter: Adapter) -> Float[Array, "*rows width"]:
        """Return the MLP's output, with adapter(x) added to the first projection of x."""
        return self.behind_input(self.input(x) + adapter(x))


class SharedBlock(nnx.Module):
    """Compute mlp(norm(attention(norm([x, e])))) from the layer's input x and the embedding e. There are no residuals.

    mlp: a SharedMLP, or any MLP if no layer has adapters. In `mix`, first is e, and adapters are those of the layer, by the
    names of ADAPTERS; {} for none.
    """

    def __init__(self, attn_norm: RMSNorm, attn: SharedAttention, mlp_norm: RMSNorm, mlp: Any):
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp

    def mix(
        self,
        x: Float[Array, "*rows width"],
        first: Float[Array, "*rows width"],
        state: State,
        rows: Rows,
        adapters: dict,
    ) -> tuple[Array, State]:
        both = self.attn_norm(jnp.concatenate([x, first], -1))
        y, state = self.attn.adapted(both, state, rows, adapters)
        y = self.mlp_norm(y)
        return self.mlp.adapted(y, adapters["mlp"]) if adapters else self.mlp(y), state


class ZambaBlock(nnx.Module):
    """Compute x + mamba(norm(x))."""

    def __init__(self, norm: RMSNorm, mamba: Layer):
        self.mixer_norm, self.mamba = norm, mamba

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.mamba.empty_state(batch)

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        y, after = self.mamba.mix(self.mixer_norm(x), state, rows)
        return x + y, dict(after)


class HybridBlock(nnx.Module):
    """Compute x + mamba(norm(x + W shared(x, e))) with the embedding e.

    adapters: the adapters of this layer, by the names of `ADAPTERS`. unread: adapters that a checkpoint holds and nothing
    reads, by the number of the hybrid layer that they belong to.
    """

    def __init__(
        self,
        norm: RMSNorm,
        mamba: Layer,
        linear: nnx.Linear,
        adapters: dict[str, Adapter],
        unread: dict[str, dict[str, Adapter]],
    ):
        self.mixer_norm, self.mamba, self.linear, self.adapters = norm, mamba, linear, nnx.Dict(adapters)
        self.unread = nnx.Dict({number: nnx.Dict(each) for number, each in unread.items()})

    def mix(
        self, x: Float[Array, "*rows width"], state: dict, rows: Rows, first: Array, shared: SharedBlock
    ) -> tuple[Array, dict]:
        y, attn = shared.mix(x, first, state.get("attn", {}), rows, dict(self.adapters))
        y, after = self.mamba.mix(self.mixer_norm(x + self.linear(y)), state.get("mamba", {}), rows)
        return x + y, dict(attn=dict(attn), mamba=dict(after))


class SharedBlocksLM(CausalLM):
    """Define a CausalLM with shared blocks. shared: the blocks that the hybrid layers use in turn. uses: for each layer, the
    number of its shared block, or None."""

    def __init__(self, *args, shared: list[SharedBlock], uses: list[int | None], **options):
        super().__init__(*args, **options)
        self.shared, self.uses = nnx.List(shared), tuple(uses)

    def cannot_scan(self) -> str | None:
        return "its hybrid layers share blocks"

    def through(self, x: Array, states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        first, after = x, []
        for block, use, state in zip(self.blocks, self.uses, states, strict=True):
            if use is None:
                x, state = self.rematerialised(block.mix, rows)(x, state)
            else:
                mix = functools.partial(block.mix, shared=self.shared[use])
                x, state = self.rematerialised(mix, rows)(x, state, first)
            after.append(state)
        return x, after

    def empty_states(self, batch: int, max_length: int | None = None) -> list[dict]:
        def of_layer(block, use):
            if use is None:
                return block.empty_state(batch, max_length)
            return dict(attn=self.shared[use].attn.empty_state(batch, max_length), mamba=block.mamba.empty_state(batch))

        return [of_layer(block, use) for block, use in zip(self.blocks, self.uses, strict=True)]


# ---- the config ------------------------------------------------------------------------------------------------------


def kinds_of(options: Options, layers: int) -> list[str]:
    """Return PLAIN or HYBRID for each layer. Raises UnsupportedOption if hybrid_layer_ids contradicts the list of kinds."""
    kinds = layer_kinds(options, ("layers_block_type", "layer_types"), layers, USUAL, KINDS)
    hybrid = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    if options.take("hybrid_layer_ids", hybrid) != hybrid:
        raise options.unsupported("hybrid_layer_ids", f"it must name the hybrid layers, {hybrid}")
    return kinds


def attention_arguments(options: Options, width: int) -> dict[str, Any]:
    """Return the arguments of SharedAttention, whose input is twice as wide as the model."""
    heads = options.integer("num_attention_heads", 32)
    kv_heads = options.divisor("num_key_value_heads", None, "num_attention_heads", heads, optional=True)
    rope, head_width = rotation(options, 10000.0, 4096), 2 * width // heads
    turns = options.flag("use_mem_rope", False)
    if options.flag("use_long_context", False) and turns:
        raise options.unsupported("use_long_context", "it must be false where use_mem_rope is true")
    check_derived(options, dict(attention_hidden_size=2 * width, attention_head_dim=head_width, head_dim=head_width))
    return dict(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        **(rope.arguments(head_width) if turns else dict(theta=None)),
        scale=(head_width / 2) ** -0.5,
    )


def mamba_arguments(options: Options, width: int) -> dict[str, Any]:
    """Return the arguments of Mamba2 but bias. width: the width of the model."""
    inside = exact_width("mamba_expand", width, options.number("mamba_expand", 2, above=0))
    heads = options.integer("n_mamba_heads", 8)
    if inside % heads:
        raise options.unsupported("n_mamba_heads", f"it must divide mamba_expand * hidden_size={inside}")
    check_derived(options, dict(mamba_headdim=inside // heads))
    return dict(
        num_heads=heads,
        head_width=inside // heads,
        state_width=options.integer("mamba_d_state", 64),
        groups=options.divisor("mamba_ngroups", 1, "n_mamba_heads", heads),
        conv_size=options.integer("mamba_d_conv", 4),
        dt_limit=(options.number("time_step_min", 0.001, above=0), math.inf),
        **first_steps(options),
    )


def check_derived(options: Options, derived: dict[str, int]):
    """Raise UnsupportedOption if the config has another value for an option that other options determine. derived: {option: the
    determined value}."""
    for key, value in derived.items():
        if options.take(key, value) != value:
            raise options.unsupported(key, f"the other options make it {value}")


def zamba2(config: ModelConfig, precision: Precision) -> CausalLM:
    """Build a Zamba2 model. Raises UnsupportedOption for an option that is not supported.

    Glorioso et al. 2024, https://arxiv.org/abs/2411.15242.
    """
    options = Options(config.values)
    width, layers = options.integer("hidden_size", 2560), options.integer("num_hidden_layers", 54)
    outer, init = outer_options(options, precision, 32000, tied=True, pad=0)
    eps, act = options.number("rms_norm_eps", 1e-5, least=0), hidden_act(options, default="gelu")
    bias, kinds = options.flag("add_bias_linear", False), kinds_of(options, layers)
    options.ignore(*IGNORED, *TRAINING)
    attention, arguments = attention_arguments(options, width), mamba_arguments(options, width) | dict(bias=bias)
    adapts = options.flag("use_shared_attention_adapter", False)
    if adapts and attention["num_kv_heads"] != attention["num_heads"]:
        raise options.unsupported("num_key_value_heads", "it must be num_attention_heads where adapters are added to k")
    inside = options.integer("intermediate_size", None, optional=True) or 4 * width
    rank, count = options.integer("adapter_rank", 128), options.integer("num_mem_blocks", 1)
    options.finish()
    built: dict[str, Any] = dict(kernel_init=init, **precision.options)

    def norm(size: int = width) -> RMSNorm:
        return RMSNorm(size, epsilon=eps, param_dtype=precision.param_dtype)

    def shared() -> SharedBlock:
        attn = SharedAttention(2 * width, **attention, **built)
        return SharedBlock(norm(2 * width), attn, norm(), SharedMLP(width, inside, act=act, bias=bias, **built))

    def adapters() -> dict[str, Adapter]:
        found = {"mlp": Adapter(width, rank, 2 * inside, MLP, built)}
        for name in ("query", "key", "value") if adapts else ():
            found[name] = Adapter(2 * width, rank, 2 * width, HEADS, built)
        return found

    hybrids, is_shared = kinds.count(HYBRID), outer["tied"]  # the models' own code ties all weights, or none
    uses = uses_of(kinds, count if is_shared else hybrids)

    def block(use: int | None) -> ZambaBlock | HybridBlock:
        mixer = mamba(width, arguments, init, precision)
        if use is None:
            return ZambaBlock(norm(), mixer)
        same_turn = () if is_shared else range(use % count, hybrids, count)
        unread = {str(number): adapters() for number in same_turn if number != use}
        return HybridBlock(norm(), mixer, linear(width, width, (EMBED, None), **built), adapters(), unread)

    blocks = [block(use) for use in uses]
    several = [shared() for _ in range(len(set(uses) - {None}))]
    return SharedBlocksLM(config, blocks, norm(), names_of(uses), width=width, shared=several, uses=uses, **outer)


def uses_of(kinds: list[str], count: int) -> list[int | None]:
    """Return for each layer the number of its shared block, or None for a plain layer. The hybrid layers use the `count` shared
    blocks in turn."""
    turns = itertools.count()
    return [next(turns) % count if kind == HYBRID else None for kind in kinds]


def names_of(uses: list[int | None]) -> Names:
    """Return the `Names` of the parameters. A shared block is stored in the first layer that uses it, with the adapters of all
    its layers by number."""
    rules, ignored, hybrids = [], [], [layer for layer, use in enumerate(uses) if use is not None]
    for number, layer in enumerate(hybrids):
        first = uses.index(uses[layer])
        prefix = rf"model.layers.{first}.shared_transformer"
        for name, stored in ADAPTERS.items():
            for part, place in (("down", 0), ("up", 1)):
                leaf = rf"{name}\.{part}\."
                rules.append((rf"^blocks\.{layer}\.adapters\.{leaf}", f"{prefix}.{stored}.{number}.{place}."))
                rules.append((rf"^blocks\.{layer}\.unread\.(\d+)\.{leaf}", rf"{prefix}.{stored}.\1.{place}."))
        if layer != first:  # a copy, which the model's own code also replaces by the first
            ignored.append(rf"^model\.layers\.{layer}\.shared_transformer\.")
    rules.append((rf"^(blocks\.{one_of(hybrids)})\.(?=mamba|mixer_norm)", r"\1.mamba_decoder."))
    for use in sorted({use for use in uses if use is not None}):
        rules.append((rf"^shared\.{use}\.", f"model.layers.{uses.index(use)}.shared_transformer."))
    return Names((*rules, *outer_rules("shared_transformer", MLP_NAMES, MAMBA)), ignored=tuple(ignored))


def outer_rules(shared: str, mlp: Mapping[str, str], mamba: Mapping[str, str]) -> Rules:
    """Return the rules for what lies inside of blocks and outside of them. They apply last.

    shared: what a checkpoint calls a shared block. mlp, mamba: {a part of the MLP or of the mixer: its name there}.
    """
    return (
        *renamed(f"{shared}.attn", ATTENTION),
        *renamed(f"{shared}.mlp", mlp),
        *renamed("mamba", mamba),
        (rf"\.{shared}\.attn\.", f".{shared}.self_attn."),
        (rf"\.{shared}\.mlp\.", f".{shared}.feed_forward."),
        (r"\.mixer_norm\.", ".input_layernorm."),
        *outer_names(norm="model.final_layernorm", mlp_norm="pre_ff_layernorm"),
    )

"""Make the parity fixtures in tests/models/fixtures from the models' own code, in PyTorch on a CPU.

    python -m venv env && env/bin/pip install torch==2.13.0 flash-linear-attention==0.6.0 triton==3.9.0 transformers einops
    env/bin/python tests/models/make_fixtures.py [NAME ...]

Each fixture is a folder as `save_pretrained` writes it, of a tiny model whose parameters are all random, and
expected.safetensors: tokens, logits, and the gradient of every parameter for the mean of sin(3 i) * logits_i.
Slow: fla's Triton kernels run in Triton's interpreter.
"""

import contextlib
import inspect
import pathlib
import sys
import tempfile

import fla_on_cpu  # noqa: F401, before fla

# isort: split

import fla.layers.attn
import fla.models.delta_net.modeling_delta_net
import fla.models.gated_deltanet.modeling_gated_deltanet
import fla.models.gla.modeling_gla
import fla.models.hgrn2.modeling_hgrn2
import fla.models.kda.modeling_kda
import fla.models.modeling_utils
import fla.models.retnet.modeling_retnet
import torch
import transformers.models.qwen3_next.modeling_qwen3_next as qwen3_next
from fla.layers import KimiDeltaAttention
from fla.models import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    HGRN2Config,
    KDAConfig,
    RetNetConfig,
    RWKV6Config,
)
from fla.models import Mamba2Config as FLAMamba2Config
from fla.models.delta_net import DeltaNetForCausalLM
from fla.models.gated_deltanet import GatedDeltaNetForCausalLM
from fla.models.gla import GLAForCausalLM
from fla.models.hgrn2 import HGRN2ForCausalLM
from fla.models.kda import KDAForCausalLM
from fla.models.mamba2 import Mamba2ForCausalLM as FLAMamba2ForCausalLM
from fla.models.retnet import RetNetForCausalLM
from fla.models.rwkv6 import RWKV6ForCausalLM
from fla.ops.attnres.naive import naive_attnres
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

FOLDER = pathlib.Path(__file__).parent / "fixtures"
TOKENS = (2, 21)
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # stored, though the config determines them
LAYERS = dict(num_hidden_layers=2, vocab_size=32)
SMALL = LAYERS | dict(hidden_size=16, num_heads=2, intermediate_size=24)
WINDOWED = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=True, window_size=5, rope_theta=500.0)
ATTENTION = LAYERS | dict(
    pad_token_id=None, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24
)
HYBRID = ATTENTION | dict(mamba_n_heads=4, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=8)
GRANITE = HYBRID | dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], shared_intermediate_size=20,
    embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.7, attention_multiplier=0.4)  # fmt: skip
FALCON = HYBRID | dict(mamba_d_ssm=24, mamba_n_heads=3, head_dim=8)
NEMOTRON = dict(
    pad_token_id=None, hidden_size=16, vocab_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=24, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8,
    moe_intermediate_size=12, moe_shared_expert_intermediate_size=10, n_routed_experts=4, num_experts_per_tok=2,
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"])  # fmt: skip
QWEN = LAYERS | dict(
    pad_token_id=None, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24,
    linear_key_head_dim=8, linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=10,
    layer_types=["linear_attention", "full_attention"])  # fmt: skip
ZAMBA = ATTENTION | dict(
    num_key_value_heads=None, num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"], adapter_rank=3,
    n_mamba_heads=4, mamba_d_state=8, chunk_size=8)  # fmt: skip
MAMBA = LAYERS | dict(hidden_size=16, state_size=8, head_dim=8, expand=2, chunk_size=8)

# name -> (config class, model class, options)
CASES = {
    "gla": (GLAConfig, GLAForCausalLM, SMALL),
    "gla_options": (GLAConfig, GLAForCausalLM, SMALL | dict(
        num_heads=4, num_kv_heads=2, use_short_conv=True, conv_size=3, clamp_min=-0.05, feature_map="relu", expand_k=1.0,
        expand_v=2.0, norm_eps=1e-4, fuse_norm=False)),
    "gla_plain": (GLAConfig, GLAForCausalLM, SMALL | dict(
        use_output_gate=False, elementwise_affine=False, tie_word_embeddings=True, feature_map="gelu")),
    "gla_hybrid": (GLAConfig, GLAForCausalLM, SMALL | dict(attn=WINDOWED)),
    "gla_attnres": (GLAConfig, GLAForCausalLM, SMALL | dict(attnres_block_size=2, num_hidden_layers=3)),
    "retnet": (RetNetConfig, RetNetForCausalLM, SMALL),
    "retnet_options": (RetNetConfig, RetNetForCausalLM, SMALL | dict(
        num_heads=4, num_kv_heads=2, expand_k=0.5, expand_v=1.0, feature_map="gelu", use_output_gate=False,
        elementwise_affine=False, attn=[dict(layers=[0], num_heads=2)])),
    "hgrn2": (HGRN2Config, HGRN2ForCausalLM, SMALL | dict(num_heads=None, expand_ratio=8)),
    "hgrn2_options": (HGRN2Config, HGRN2ForCausalLM, SMALL | dict(
        num_heads=4, expand_ratio=None, use_short_conv=True, use_lower_bound=False, hidden_act="powlu", norm_eps=1e-3,
        elementwise_affine=False, tie_word_embeddings=True)),
    "delta_net": (DeltaNetConfig, DeltaNetForCausalLM, SMALL),
    "delta_net_options": (DeltaNetConfig, DeltaNetForCausalLM, SMALL | dict(
        num_heads=4, expand_k=0.5, expand_v=2.0, use_gate=True, allow_neg_eigval=True, conv_size=3, qk_norm="sum",
        qk_activation="elu", norm_eps=1e-3, attn=WINDOWED)),
    "delta_net_plain": (DeltaNetConfig, DeltaNetForCausalLM, SMALL | dict(
        use_short_conv=False, use_beta=False, qk_activation="identity", tie_word_embeddings=True, attnres_block_size=2)),
    "gated_deltanet": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM, SMALL | dict(head_dim=8)),
    "gated_deltanet_options": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM, SMALL | dict(
        num_v_heads=4, head_dim=8, expand_v=1.5, allow_neg_eigval=True, conv_size=3, norm_eps=1e-3,
        output_gate_activation="sigmoid", attn=WINDOWED, num_hidden_layers=3)),
    "gated_deltanet_plain": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM, SMALL | dict(
        head_dim=6, expand_v=1.0, use_gate=False, use_short_conv=False, tie_word_embeddings=True, attnres_block_size=2)),
    "kda": (KDAConfig, KDAForCausalLM, SMALL | dict(head_dim=8)),
    "kda_options": (KDAConfig, KDAForCausalLM, SMALL | dict(
        num_v_heads=4, head_dim=8, expand_v=0.5, allow_neg_eigval=True, safe_gate=True, lower_bound=-3.0, conv_size=3,
        norm_eps=1e-3, attn=WINDOWED, num_hidden_layers=3)),
    "kda_plain": (KDAConfig, KDAForCausalLM, SMALL | dict(
        head_dim=8, use_short_conv=False, lower_bound=-5.0, tie_word_embeddings=True, attnres_block_size=2)),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, QWEN),
    "qwen3_next_options": (Qwen3NextConfig, Qwen3NextForCausalLM, QWEN | dict(
        num_hidden_layers=3, layer_types=None, full_attention_interval=2, linear_conv_kernel_dim=3, hidden_act="gelu",
        norm_topk_prob=False, mlp_only_layers=[1], attention_bias=True, rms_norm_eps=1e-3, partial_rotary_factor=0.5,
        rope_parameters=dict(rope_theta=300.0, rope_type="default"), tie_word_embeddings=True)),
    "qwen3_next_yarn": (Qwen3NextConfig, Qwen3NextForCausalLM, QWEN | dict(
        head_dim=16, max_position_embeddings=64, partial_rotary_factor=0.5, rope_parameters=dict(
            rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16))),
    "rwkv6": (RWKV6Config, RWKV6ForCausalLM, SMALL | dict(proj_low_rank_dim=4, gate_low_rank_dim=3)),
    "rwkv6_options": (RWKV6Config, RWKV6ForCausalLM, SMALL | dict(
        num_heads=4, expand_k=1.0, expand_v=2.0, proj_low_rank_dim=3, gate_low_rank_dim=5, norm_first=False, norm_bias=False,
        hidden_act="gelu", norm_eps=1e-3, fuse_norm=False, intermediate_size=None, hidden_ratio=2)),
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, MAMBA | dict(num_heads=4, n_groups=1)),
    "mamba2_options": (Mamba2Config, Mamba2ForCausalLM, MAMBA | dict(
        num_heads=4, n_groups=2, conv_kernel=3, use_bias=True, use_conv_bias=False, hidden_act="gelu", layer_norm_epsilon=1e-3,
        time_step_limit=(0.1, 0.9), residual_in_fp32=False, tie_word_embeddings=True)),
    "mamba2_fla": (FLAMamba2Config, FLAMamba2ForCausalLM, MAMBA | dict(D_has_hdim=True, norm_before_gate=True)),
    "mamba2_fla_options": (FLAMamba2Config, FLAMamba2ForCausalLM, MAMBA | dict(
        rmsnorm=False, dt_limit=(0.1, 0.9), use_bias=True, hidden_act="relu", norm_eps=1e-3, tie_word_embeddings=True)),
    "bamba": (BambaConfig, BambaForCausalLM, HYBRID | dict(attn_layer_indices=[1])),
    "bamba_options": (BambaConfig, BambaForCausalLM, HYBRID | dict(
        attn_layer_indices=[0], mamba_n_groups=2, mamba_d_conv=3, mamba_conv_bias=False, mamba_proj_bias=True,
        time_step_limit=(0.1, 0.9), attention_bias=True, mlp_bias=True, hidden_act="gelu", rms_norm_eps=1e-3,
        tie_word_embeddings=True, pad_token_id=3, rope_parameters=dict(rope_theta=300.0, rope_type="default"))),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE | dict(
        num_local_experts=5, num_experts_per_tok=2)),
    "granitemoehybrid_dense": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE | dict(
        num_local_experts=0, position_embedding_type="rope", attention_bias=True, tie_word_embeddings=True,
        mamba_n_groups=2)),
    "granitemoehybrid_longrope": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE | dict(
        num_local_experts=0, position_embedding_type="rope", max_position_embeddings=64, rope_parameters=dict(
            rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.5], long_factor=[2.0, 6.0],
            original_max_position_embeddings=16))),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, FALCON | dict(
        hidden_act="relu", rope_parameters=dict(rope_theta=300.0, rope_type="default", partial_rotary_factor=0.5))),
    "falcon_h1_options": (FalconH1Config, FalconH1ForCausalLM, FALCON | dict(
        mamba_rms_norm=True, mamba_norm_before_gate=False, hidden_act="gelu", projectors_bias=True, attention_bias=True,
        mlp_bias=True, lm_head_multiplier=0.6, embedding_multiplier=2.0, mlp_multipliers=[0.8, 1.3], key_multiplier=0.5,
        attention_out_multiplier=0.9, attention_in_multiplier=1.2, ssm_multipliers=[0.7, 1.1, 0.9, 1.3, 0.8],
        ssm_in_multiplier=1.4, ssm_out_multiplier=0.6, tie_word_embeddings=True)),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON),
    "nemotron_h_options": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON | dict(
        n_routed_experts=8, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=1.7, moe_latent_size=6,
        use_bias=True, mlp_bias=True, mlp_hidden_act="gelu", use_conv_bias=False, time_step_min=0.3, tie_word_embeddings=True)),
    "minimax": (MiniMaxConfig, MiniMaxForCausalLM, ATTENTION | dict(num_local_experts=4, head_dim=8, block_size=8)),
    "minimax_options": (MiniMaxConfig, MiniMaxForCausalLM, ATTENTION | dict(
        num_local_experts=3, num_experts_per_tok=2, block_size=6, sliding_window=5, hidden_act="gelu",
        layer_types=["linear_attention", "full_attention"], full_attn_alpha_factor=1.2, full_attn_beta_factor=0.7,
        linear_attn_alpha_factor=0.8, linear_attn_beta_factor=1.3, mlp_alpha_factor=0.9, mlp_beta_factor=1.1,
        tie_word_embeddings=True)),
    "zamba2": (Zamba2Config, Zamba2ForCausalLM, ZAMBA),
    "zamba2_options": (Zamba2Config, Zamba2ForCausalLM, ZAMBA | dict(
        num_hidden_layers=4, layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"],
        num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True, mamba_ngroups=2,
        mamba_d_conv=3, time_step_min=0.3, hidden_act="silu", rms_norm_eps=1e-3,
        rope_parameters=dict(rope_theta=300.0, rope_type="default"))),
    "zamba2_untied": (Zamba2Config, Zamba2ForCausalLM, ZAMBA | dict(num_key_value_heads=2, tie_word_embeddings=False)),
}  # fmt: skip


def plain_attention(q, k, v, causal, window_size):
    """What flash_attn_func computes: q [B, T, H, D], k and v [B, T, Hk, D]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    back = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = back >= 0
    if window_size[0] >= 0:
        seen &= back <= window_size[0]
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


fla.layers.attn.flash_attn_func = plain_attention
MODELS = (
    fla.models.delta_net.modeling_delta_net,
    fla.models.gated_deltanet.modeling_gated_deltanet,
    fla.models.gla.modeling_gla,
    fla.models.hgrn2.modeling_hgrn2,
    fla.models.kda.modeling_kda,
    fla.models.retnet.modeling_retnet,
)
for module in (fla.models.modeling_utils, *MODELS):
    module.fused_attnres = naive_attnres  # its kernel refuses tensors of a CPU


def randomise(model: torch.nn.Module):
    """Every parameter becomes random, those too that begin as zeros or ones, at a size that keeps the model lively."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim > 1 and "mu" not in name:
                parameter.normal_(0, 0.3 if "conv1d" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(0, 2)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))


def gradients_by_saved_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients under the names of a saved checkpoint, which may divide a parameter; 0 where nothing reads one."""
    values = {key: x.detach().clone() for key, x in model.named_parameters()}
    buffers = {key: x.clone() for key, x in model.named_buffers()}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for x in model.parameters():
            x.copy_(torch.zeros_like(x) if x.grad is None else x.grad)
        for x in model.buffers():
            x.zero_()
        model.save_pretrained(folder)
        found = load_file(pathlib.Path(folder) / "model.safetensors")
        for key, x in model.named_parameters():
            x.copy_(values[key])
        for key, x in model.named_buffers():
            x.copy_(buffers[key])
    return {key: x.clone() for key, x in found.items() if not key.endswith(DERIVED)}


@contextlib.contextmanager
def in_float64():
    """Make what a model's own code casts to float32 float64: in float32, sums that cancel differ by more than the bars."""
    to, single, cast = torch.Tensor.to, torch.Tensor.float, torch.Tensor.type

    def wider(function):
        def call(x, *args, **options):
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            options = {key: torch.float64 if arg is torch.float32 else arg for key, arg in options.items()}
            return function(x, *args, **options)

        return call

    torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = wider(to), torch.Tensor.double, wider(cast)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = to, single, cast
        torch.set_default_dtype(torch.float32)


# transformers calls fla's kernels where fla is installed. Its own code is the reference here, and takes float64.
qwen3_next.torch_chunk_gated_delta_rule = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)


def make(name: str):
    config_class, model_class, options = CASES[name]
    config = config_class(**options)
    config._experts_implementation = "eager"  # the grouped product takes no rows of fewer than 16 bytes
    torch.manual_seed(0)
    model = model_class(config).float()
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.safe_gate = (
                False  # chooses another kernel of the same function, which Triton's interpreter cannot run
            )
    randomise(model)
    model.eval()
    folder = FOLDER / name
    model.save_pretrained(folder)
    for other in folder.glob("generation_config.json"):
        other.unlink()
    tokens = torch.randint(0, options["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(1))
    is_plain = model_class.__module__.startswith("transformers")  # no kernel, so that float64 is possible
    with in_float64() if is_plain else contextlib.nullcontext():
        model = model.double() if is_plain else model
        logits = model(tokens, use_cache=False).logits
        weights = torch.sin(3.0 * torch.arange(logits.numel())).reshape(logits.shape)
        (weights * logits).mean().backward()
        gradients = gradients_by_saved_name(model)
    expected = {f"gradient.{key}": x.to(torch.float32) for key, x in gradients.items()}
    logits = logits.detach().to(torch.float32)
    save_file(expected | dict(tokens=tokens.int(), logits=logits), folder / "expected.safetensors")
    print(
        f"{name}: {sum(x.numel() for x in model.parameters()):,} parameters, logits about {logits.std():.3f}",
        flush=True,
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name)

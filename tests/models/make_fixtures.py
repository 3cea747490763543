"""Make the parity fixtures in tests/models/fixtures from the models' own code, in PyTorch on a CPU.

    python -m venv env && env/bin/pip install torch==2.13.0 flash-linear-attention==0.6.0 triton==3.9.0 transformers einops
    env/bin/python tests/models/make_fixtures.py [NAME ...]

Each fixture is a folder as `save_pretrained` writes it, of a tiny model whose parameters are all random, and
expected.safetensors: tokens, logits, and the gradient of every parameter for the mean of sin(3 i) * logits_i.
Slow: fla's Triton kernels run in Triton's interpreter. The fixtures of Mamba-3 need what mamba3_on_cpu.py describes.
"""

import contextlib
import inspect
import os
import pathlib
import re
import sys
import tempfile

import fla_on_cpu  # noqa: F401, before fla

# isort: split

import fla.layers.attn
import fla.layers.comba
import fla.layers.gated_deltaproduct
import fla.layers.hgrn
import fla.layers.rwkv7
import fla.models.comba.modeling_comba
import fla.models.delta_net.modeling_delta_net
import fla.models.gated_deltanet.modeling_gated_deltanet
import fla.models.gated_deltaproduct.modeling_gated_deltaproduct
import fla.models.gla.modeling_gla
import fla.models.gsa.modeling_gsa
import fla.models.hgrn.modeling_hgrn
import fla.models.hgrn2.modeling_hgrn2
import fla.models.kda.modeling_kda
import fla.models.modeling_utils
import fla.models.retnet.modeling_retnet
import fused_xlstm  # noqa: F401
import torch
import transformers.models.bailing_hybrid.modeling_bailing_hybrid as bailing_hybrid
import transformers.models.glm5_next.modeling_glm5_next as glm5_next
import transformers.models.kimi_linear.modeling_kimi_linear as kimi_linear
import transformers.models.lara_mini.modeling_lara_mini as lara_mini
import transformers.models.olmo_hybrid.modeling_olmo_hybrid as olmo_hybrid
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as qwen3_5_moe
import transformers.models.qwen3_next.modeling_qwen3_next as qwen3_next
import transformers.models.qwen4_exp.modeling_qwen4_exp as qwen4_exp
from fla.layers import KimiDeltaAttention
from fla.models import (
    CombaConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GLAConfig,
    GSAConfig,
    HGRN2Config,
    HGRNConfig,
    KDAConfig,
    Mamba3Config,
    RetNetConfig,
    RWKV6Config,
    RWKV7Config,
)
from fla.models import Mamba2Config as FLAMamba2Config
from fla.models import MambaConfig as FLAMambaConfig
from fla.models.comba import CombaForCausalLM
from fla.models.delta_net import DeltaNetForCausalLM
from fla.models.gated_deltanet import GatedDeltaNetForCausalLM
from fla.models.gated_deltaproduct import GatedDeltaProductForCausalLM
from fla.models.gla import GLAForCausalLM
from fla.models.gsa import GSAForCausalLM
from fla.models.hgrn import HGRNForCausalLM
from fla.models.hgrn2 import HGRN2ForCausalLM
from fla.models.kda import KDAForCausalLM
from fla.models.mamba import MambaForCausalLM as FLAMambaForCausalLM
from fla.models.mamba2 import Mamba2ForCausalLM as FLAMamba2ForCausalLM
from fla.models.mamba3 import Mamba3ForCausalLM
from fla.models.retnet import RetNetForCausalLM
from fla.models.rwkv6 import RWKV6ForCausalLM
from fla.models.rwkv7 import RWKV7ForCausalLM
from fla.ops.attnres.naive import naive_attnres
from fla.ops.comba.naive import naive_recurrent_comba
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from random_models import DERIVED, TOKENS, in_float64, randomise
from safetensors.torch import load_file, save_file
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LaraMiniConfig,
    LaraMiniForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)

FOLDER = pathlib.Path(__file__).parent / "fixtures"
VISION = "model.visual."  # tensors of other models in the folder: saved, and nothing here reads them
LAYERS = dict(num_hidden_layers=2, vocab_size=32)
SMALL = LAYERS | dict(hidden_size=16, num_heads=2, intermediate_size=24)
HGRN = {key: value for key, value in SMALL.items() if key != "num_heads"}
WINDOWED = dict(layers=[1], num_heads=4, num_kv_heads=2, qkv_bias=True, window_size=5, rope_theta=500.0)
ATTENTION = LAYERS | dict(
    pad_token_id=None, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24
)
LFM2_MOE = ATTENTION | dict(
    layer_types=["conv", "full_attention"], num_dense_layers=1, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2
)  # fmt: skip
LFM3 = ATTENTION | dict(
    num_hidden_layers=4, layer_types=["conv", "sliding_attention", "full_attention", "conv"], head_dim=8, sliding_window=5
)  # fmt: skip
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
LARA = {key: value for key, value in QWEN.items() if key not in ("intermediate_size", "layer_types")} | dict(
    num_hidden_layers=5, sliding_window=5, eos_token_id=None
)
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
QWEN35 = {key: value for key, value in QWEN.items() if key not in EXPERTS}
QWEN35_MOE = {key: value for key, value in QWEN.items() if key != "intermediate_size"}
QWEN4 = QWEN35_MOE | dict(
    layer_types=["linear_attention", "indexed_attention"], hc_count=3, hc_lowrank=6, ple_layer_ids=[1], ngram_size=3,
    heads_per_ngram=2, ngram_vocab_size_base=37, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=4, eos_token_id=5,
    indexer_n_heads=9, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)  # fmt: skip
QWEN35_OPTIONS = dict(
    num_hidden_layers=3,
    layer_types=["full_attention", "linear_attention", "linear_attention"],
    linear_conv_kernel_dim=3,
    hidden_act="gelu",
    attention_bias=True,
    rms_norm_eps=1e-3,
    tie_word_embeddings=True,
    pad_token_id=3,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=300.0,
        partial_rotary_factor=0.5,
        mrope_section=[1, 1, 0],
        mrope_interleaved=True,
    ),
)
KIMI = LAYERS | dict(
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=24,
    moe_intermediate_size=12,
    kv_lora_rank=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    qk_nope_head_dim=8,
    num_experts_per_tok=2,
    num_local_experts=4,
    linear_head_dim=8,
    linear_num_heads=2,
)
BAILING = {key: value for key, value in KIMI.items() if not key.startswith("linear")} | dict(
    num_hidden_layers=3, layer_group_size=2, head_dim=6, n_group=1, topk_group=1, kda_lower_bound=-3.0
)
GLM = {key: value for key, value in KIMI.items() if key not in ("num_local_experts", "qk_rope_head_dim")} | dict(
    layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"], n_routed_experts=4,
    q_lora_rank=7, index_topk=6, index_kpool=2, index_n_heads=8, index_head_dim=5
)  # fmt: skip
GLM_EYES = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=2, image_size=4, out_hidden_size=16,
    projection_intermediate_size=8, spatial_merge_size=1, temporal_patch_size=1
)  # fmt: skip
EYES = dict(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    patch_size=2,
    spatial_merge_size=1,
    temporal_patch_size=1,
    out_hidden_size=16,
    num_position_embeddings=4,
)
ZAMBA = ATTENTION | dict(
    num_key_value_heads=None, num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"], adapter_rank=3,
    n_mamba_heads=4, mamba_d_state=8, chunk_size=8)  # fmt: skip
ZAMBA1 = ATTENTION | dict(
    num_key_value_heads=4,
    num_hidden_layers=3,
    layers_block_type=["linear_attention", "hybrid", "hybrid"],
    mamba_d_state=8,
)
RWKV7 = LAYERS | dict(
    hidden_size=16, head_dim=8, intermediate_size=24, decay_low_rank_dim=4, a_low_rank_dim=5, v_low_rank_dim=3,
    gate_low_rank_dim=6)  # fmt: skip
GRIFFIN = LAYERS | dict(num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=50)
XLSTM = LAYERS | dict(hidden_size=16, num_heads=2, ffn_round_up_to_multiple_of=4)
MAMBA = LAYERS | dict(hidden_size=16, state_size=8, head_dim=8, expand=2, chunk_size=8)
MAMBA1 = LAYERS | dict(hidden_size=16, state_size=4)
JAMBA = ATTENTION | dict(mamba_d_state=4, mamba_dt_rank=3, num_experts=4, attn_layer_period=2, attn_layer_offset=1)

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
    "gsa": (GSAConfig, GSAForCausalLM, SMALL | dict(num_slots=6)),
    "gsa_options": (GSAConfig, GSAForCausalLM, SMALL | dict(
        num_heads=4, num_kv_heads=2, num_slots=5, exapnd_k=2.0, use_short_conv=True, conv_size=3, feature_map="t2r",
        gate_logit_normalizer=3, hidden_act="powlu", norm_eps=1e-3, attn=WINDOWED, num_hidden_layers=3)),
    "gsa_plain": (GSAConfig, GSAForCausalLM, SMALL | dict(
        num_slots=None, exapnd_v=2.0, feature_map="relu", elementwise_affine=False, use_norm=False, use_output_gate=True,
        tie_word_embeddings=True, attnres_block_size=2, fuse_norm=False)),
    "hgrn": (HGRNConfig, HGRNForCausalLM, HGRN),
    "hgrn_options": (HGRNConfig, HGRNForCausalLM, HGRN | dict(
        expand_ratio=1.5, use_short_conv=True, conv_size=3, norm_eps=1e-3, attn=WINDOWED, num_hidden_layers=4,
        attnres_block_size=2, attn_mode="chunk")),
    "hgrn_plain": (HGRNConfig, HGRNForCausalLM, HGRN | dict(
        use_lower_bound=False, elementwise_affine=False, hidden_act="powlu", tie_word_embeddings=True, pad_token_id=3,
        intermediate_size=None, hidden_ratio=2)),
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
    "gated_deltaproduct": (GatedDeltaProductConfig, GatedDeltaProductForCausalLM, SMALL | dict(
        head_dim=8, num_householder=2, use_forget_gate=True)),
    "gated_deltaproduct_options": (GatedDeltaProductConfig, GatedDeltaProductForCausalLM, SMALL | dict(
        num_heads=3, head_dim=6, expand_v=1.5, num_householder=3, allow_neg_eigval=True, use_forget_gate=True, conv_size=3,
        norm_eps=1e-3, fuse_norm=False, attn=WINDOWED, num_hidden_layers=3)),
    "gated_deltaproduct_plain": (GatedDeltaProductConfig, GatedDeltaProductForCausalLM, SMALL | dict(
        head_dim=6, expand_v=1.0, use_output_gate=False, use_short_conv=False, tie_word_embeddings=True,
        attnres_block_size=2)),
    "comba": (CombaConfig, CombaForCausalLM, SMALL | dict(head_dim=8)),
    "comba_options": (CombaConfig, CombaForCausalLM, SMALL | dict(
        num_v_heads=4, head_dim=8, expand_v=1.5, conv_size=3, norm_eps=1e-3, fuse_norm=False, attn=WINDOWED,
        num_hidden_layers=3)),
    "comba_plain": (CombaConfig, CombaForCausalLM, SMALL | dict(
        head_dim=6, expand_v=1.0, use_output_gate=False, use_short_conv=False, tie_word_embeddings=True,
        attnres_block_size=2)),
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
    "bailing_hybrid": (BailingHybridConfig, BailingHybridForCausalLM, BAILING),
    "bailing_hybrid_options": (BailingHybridConfig, BailingHybridForCausalLM, BAILING | dict(
        layer_types=["full_attention", "linear_attention", "full_attention"], mlp_layer_types=["sparse", "dense", "sparse"],
        q_lora_rank=7, attention_bias=True, num_local_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
        n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.7, short_conv_kernel_size=3, kda_safe_gate=False,
        hidden_act="gelu", rms_norm_eps=1e-3, pad_token_id=3, tie_word_embeddings=True, max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16, mscale=0.8,
            mscale_all_dim=0.6))),
    "glm5_next": (Glm5NextConfig, Glm5NextForConditionalGeneration, dict(text_config=GLM, vision_config=GLM_EYES)),
    "glm5_next_options": (Glm5NextConfig, Glm5NextForConditionalGeneration, dict(
        text_config=GLM | dict(
            num_hidden_layers=4, layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense", "sparse", "dense"], indexer_types=["full", "full", "shared", "shared"],
            attention_bias=True, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2,
            norm_topk_prob=False, routed_scaling_factor=1.7, linear_conv_kernel_dim=3, linear_lower_bound=None,
            hidden_act="gelu", rms_norm_eps=1e-3, pad_token_id=3, swiglu_limit=0.6, hc_mult=3, hc_eps=1e-3,
            hc_sinkhorn_iters=4, index_topk=8, index_kpool=1, index_kpool_always_select_tail=False, index_n_heads=8),
        vision_config=GLM_EYES, tie_word_embeddings=True)),
    "kimi_linear": (KimiLinearConfig, KimiLinearForCausalLM, KIMI | dict(
        num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"])),
    "kimi_linear_options": (KimiLinearConfig, KimiLinearForCausalLM, KIMI | dict(
        num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"], q_lora_rank=7, attention_bias=True, num_local_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=3, n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.7,
        linear_conv_kernel_dim=3, hidden_act="gelu", rms_norm_eps=1e-3, pad_token_id=3, tie_word_embeddings=True)),
    "lara_mini": (LaraMiniConfig, LaraMiniForCausalLM, LARA),
    "lara_mini_options": (LaraMiniConfig, LaraMiniForCausalLM, LARA | dict(
        num_hidden_layers=4, layer_types=["full_attention", "sliding_attention", "linear_attention", "linear_attention"],
        linear_conv_kernel_dim=3, hidden_act="gelu", norm_topk_prob=False, attention_bias=True, rms_norm_eps=1e-3,
        tie_word_embeddings=False, pad_token_id=3, sliding_window=7, max_position_embeddings=64, rope_parameters=dict(
            rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16))),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, ATTENTION | dict(full_attn_idxs=[1], block_multiple_of=4)),
    "lfm2_options": (Lfm2Config, Lfm2ForCausalLM, ATTENTION | dict(
        num_hidden_layers=3, layer_types=["full_attention", "conv", "conv"], head_dim=6, conv_bias=True, conv_L_cache=4,
        norm_eps=1e-3, block_auto_adjust_ff_dim=False, tie_word_embeddings=False, pad_token_id=3,
        rope_parameters=dict(rope_theta=300.0, rope_type="linear", factor=2.0))),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM, LFM2_MOE),
    "lfm2_moe_options": (Lfm2MoeConfig, Lfm2MoeForCausalLM, LFM2_MOE | dict(
        num_hidden_layers=4, layer_types=["full_attention", "conv", "conv", "full_attention"], num_dense_layers=1, head_dim=6,
        num_experts=5, num_experts_per_tok=3, conv_bias=True, conv_L_cache=4, norm_eps=1e-3, norm_topk_prob=False,
        routed_scaling_factor=1.7, tie_embedding=False, pad_token_id=3,
        rope_parameters=dict(rope_theta=300.0, rope_type="linear", factor=2.0))),
    "lfm2_moe_plain": (Lfm2MoeConfig, Lfm2MoeForCausalLM, LFM2_MOE | dict(
        num_dense_layers=0, use_expert_bias=False, routed_scaling_factor=0.6)),
    "lfm3": (Lfm3Config, Lfm3ForCausalLM, LFM3),
    "lfm3_options": (Lfm3Config, Lfm3ForCausalLM, LFM3 | dict(
        num_hidden_layers=3, layer_types=["full_attention", "conv", "sliding_attention"], head_dim=6, sliding_window=3,
        conv_bias=True, conv_L_cache=4, norm_eps=1e-3, use_sandwich_norm=False, use_attention_gate=False, attention_bias=True,
        tie_word_embeddings=False, pad_token_id=3, rope_parameters=dict(
            sliding_attention=dict(rope_type="linear", rope_theta=300.0, factor=2.0),
            full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.7, factor=1.5)))),
    "llama": (LlamaConfig, LlamaForCausalLM, ATTENTION),
    "llama_options": (LlamaConfig, LlamaForCausalLM, ATTENTION | dict(
        head_dim=6, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        pad_token_id=3, max_position_embeddings=64, rope_parameters=dict(
            rope_type="llama3", rope_theta=300.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0,
            original_max_position_embeddings=16))),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, ATTENTION | dict(head_dim=8)),
    "qwen3_options": (Qwen3Config, Qwen3ForCausalLM, ATTENTION | dict(
        num_hidden_layers=3, head_dim=6, hidden_act="relu", rms_norm_eps=1e-3, attention_bias=True, tie_word_embeddings=True,
        pad_token_id=3, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        rope_parameters=dict(rope_theta=300.0, rope_type="linear", factor=2.0))),
    "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM, ATTENTION | dict(rope_parameters=dict(rope_theta=None))),
    "olmo_hybrid_options": (OlmoHybridConfig, OlmoHybridForCausalLM, ATTENTION | dict(
        num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=3,
        linear_allow_neg_eigval=False, hidden_act="gelu", attention_bias=True, rms_norm_eps=1e-3, tie_word_embeddings=True,
        pad_token_id=3, rope_parameters=dict(rope_theta=300.0, rope_type="default"))),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, dict(text_config=QWEN35, vision_config=EYES)),
    "qwen3_5_options": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, dict(
        text_config=QWEN35 | QWEN35_OPTIONS, vision_config=EYES, tie_word_embeddings=True)),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, QWEN35 | dict(
        head_dim=16, max_position_embeddings=64, rope_parameters=dict(
            rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5))),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, dict(text_config=QWEN35_MOE, vision_config=EYES)),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, QWEN35_MOE | QWEN35_OPTIONS),
    "qwen4_exp": (Qwen4ExpConfig, Qwen4ExpForConditionalGeneration, dict(text_config=QWEN4, vision_config=EYES)),
    "qwen4_exp_text": (Qwen4ExpTextConfig, Qwen4ExpForCausalLM, QWEN4 | dict(
        num_hidden_layers=4, layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        ple_layer_ids=[4, 1], ple_embed_dim=12, ple_conv_kernel_size=2, ngram_size=4, heads_per_ngram=1, split_ngram_parts=7,
        make_ngram_vocab_size_divisible_by=5, seed=-4, ngram_vocab_size_base=19, eos_token_id=[7, 2], hc_count=2, hc_lowrank=5,
        indexer_n_heads=8, indexer_head_dim=9, indexer_budget=9, indexer_compress_ratio=3, hidden_act="gelu",
        output_gate_type="sigmoid", norm_topk_prob=False, linear_conv_kernel_dim=3, attention_bias=True, rms_norm_eps=1e-3,
        tie_word_embeddings=True, pad_token_id=3, max_position_embeddings=64, rope_parameters=dict(
            rope_type="yarn", rope_theta=300.0, factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5))),
    "rwkv6": (RWKV6Config, RWKV6ForCausalLM, SMALL | dict(proj_low_rank_dim=4, gate_low_rank_dim=3)),
    "rwkv6_options": (RWKV6Config, RWKV6ForCausalLM, SMALL | dict(
        num_heads=4, expand_k=1.0, expand_v=2.0, proj_low_rank_dim=3, gate_low_rank_dim=5, norm_first=False, norm_bias=False,
        hidden_act="gelu", norm_eps=1e-3, fuse_norm=False, intermediate_size=None, hidden_ratio=2)),
    "rwkv7": (RWKV7Config, RWKV7ForCausalLM, RWKV7 | dict(num_hidden_layers=3)),
    "rwkv7_options": (RWKV7Config, RWKV7ForCausalLM, RWKV7 | dict(
        head_dim=None, num_heads=4, decay_low_rank_dim=20, norm_first=False, norm_bias=False, hidden_act="gelu",
        norm_eps=1e-3, fuse_norm=False, intermediate_size=None, hidden_ratio=2, tie_word_embeddings=True, pad_token_id=3)),
    "rwkv7_ranks": (RWKV7Config, RWKV7ForCausalLM, LAYERS | dict(
        hidden_size=8, head_dim=8, intermediate_size=12, decay_low_rank_dim=None, a_low_rank_dim=None,
        v_low_rank_dim=None, gate_low_rank_dim=None)),
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, MAMBA | dict(num_heads=4, n_groups=1)),
    "mamba2_options": (Mamba2Config, Mamba2ForCausalLM, MAMBA | dict(
        num_heads=4, n_groups=2, conv_kernel=3, use_bias=True, use_conv_bias=False, hidden_act="gelu", layer_norm_epsilon=1e-3,
        time_step_limit=(0.1, 0.9), residual_in_fp32=False, tie_word_embeddings=True)),
    "mamba2_fla": (FLAMamba2Config, FLAMamba2ForCausalLM, MAMBA | dict(D_has_hdim=True, norm_before_gate=True)),
    "mamba2_fla_options": (FLAMamba2Config, FLAMamba2ForCausalLM, MAMBA | dict(
        rmsnorm=False, dt_limit=(0.1, 0.9), use_bias=True, hidden_act="relu", norm_eps=1e-3, tie_word_embeddings=True)),
    "mamba": (MambaConfig, MambaForCausalLM, MAMBA1),
    "mamba_options": (MambaConfig, MambaForCausalLM, MAMBA1 | dict(
        expand=3, time_step_rank=5, conv_kernel=3, use_bias=True, use_conv_bias=False, hidden_act="gelu",
        layer_norm_epsilon=1e-3, residual_in_fp32=False, tie_word_embeddings=False, pad_token_id=3)),
    "mamba_fla": (FLAMambaConfig, FLAMambaForCausalLM, MAMBA1),
    "mamba_fla_options": (FLAMambaConfig, FLAMambaForCausalLM, MAMBA1 | dict(
        expand=3, dt_rank=5, conv_kernel=3, use_bias=True, use_conv_bias=False, hidden_act="swish", norm_eps=1e-3,
        residual_in_fp32=True, tie_word_embeddings=True, pad_token_id=3)),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM, MAMBA1 | dict(time_step_rank=3)),
    "falcon_mamba_options": (FalconMambaConfig, FalconMambaForCausalLM, MAMBA1 | dict(
        intermediate_size=20, time_step_rank=4, conv_kernel=2, use_bias=True, use_conv_bias=False, hidden_act="relu",
        layer_norm_epsilon=1e-3, mixer_rms_eps=1e-2, residual_in_fp32=False, tie_word_embeddings=False)),
    "jamba": (JambaConfig, JambaForCausalLM, JAMBA),
    "jamba_options": (JambaConfig, JambaForCausalLM, JAMBA | dict(
        num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=0, expert_layer_period=3, expert_layer_offset=2,
        num_experts=5, num_experts_per_tok=3, num_key_value_heads=1, head_dim=6, mamba_d_conv=3, mamba_expand=1,
        mamba_dt_rank=5, mamba_conv_bias=False, mamba_proj_bias=True, hidden_act="gelu", rms_norm_eps=1e-3,
        tie_word_embeddings=True, pad_token_id=3)),
    "jamba_dense": (JambaConfig, JambaForCausalLM, JAMBA | dict(num_experts=1, num_experts_per_tok=1)),
    "mamba3": (Mamba3Config, Mamba3ForCausalLM, MAMBA),
    "mamba3_options": (Mamba3Config, Mamba3ForCausalLM, MAMBA | dict(
        num_hidden_layers=3, n_groups=2, rope_fraction=1.0, A_floor=0.8, is_outproj_norm=True, use_bias=True, norm_eps=1e-3,
        residual_in_fp32=False, tie_word_embeddings=True, expand=3, pad_token_id=3)),
    "mamba3_inputs": (Mamba3Config, Mamba3ForCausalLM, MAMBA | dict(is_mimo=True, mimo_rank=3)),
    "mamba3_inputs_options": (Mamba3Config, Mamba3ForCausalLM, MAMBA | dict(
        is_mimo=True, mimo_rank=2, n_groups=2, rope_fraction=1.0, is_outproj_norm=True, norm_eps=1e-3)),
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
    "rwkv": (RwkvConfig, RwkvForCausalLM, dict(vocab_size=32, hidden_size=16, num_hidden_layers=3)),
    "rwkv_options": (RwkvConfig, RwkvForCausalLM, dict(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, attention_hidden_size=24, intermediate_size=20,
        layer_norm_epsilon=1e-3, rescale_every=1, context_length=16)),
    "rwkv_plain": (RwkvConfig, RwkvForCausalLM, dict(
        vocab_size=32, hidden_size=12, num_hidden_layers=2, rescale_every=0, tie_word_embeddings=True)),
    "recurrent_gemma": (RecurrentGemmaConfig, RecurrentGemmaForCausalLM, GRIFFIN),
    "recurrent_gemma_options": (RecurrentGemmaConfig, RecurrentGemmaForCausalLM, GRIFFIN | dict(
        num_hidden_layers=4, block_types=["attention", "recurrent", "local"], lru_width=24, num_key_value_heads=1, head_dim=12,
        attention_window_size=5, conv1d_width=3, logits_soft_cap=1.5, rms_norm_eps=1e-3, hidden_activation="relu",
        attention_bias=True, tie_word_embeddings=False, pad_token_id=3,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0))),
    "xlstm": (xLSTMConfig, xLSTMForCausalLM, XLSTM),
    "xlstm_options": (xLSTMConfig, xLSTMForCausalLM, XLSTM | dict(
        num_hidden_layers=3, num_blocks=3, num_heads=4, use_bias=True, qk_dim_factor=1.0, v_dim_factor=1.5, norm_eps=1e-3,
        eps=1e-2, gate_soft_cap=12.0, output_logit_soft_cap=1.5, ffn_proj_factor=1.3, ffn_round_up_to_multiple_of=6,
        chunk_size=8, norm_reduction_force_float32=False)),
    "xlstm_parts_fused": (xLSTMConfig, xLSTMForCausalLM, XLSTM | dict(
        weight_mode="fused", use_bias=True, embedding_dim=16, norm_eps=1e-2)),
    "zamba": (ZambaConfig, ZambaForCausalLM, ZAMBA1),
    "zamba_options": (ZambaConfig, ZambaForCausalLM, ZAMBA1 | dict(
        num_hidden_layers=6, layers_block_type=None, attn_layer_period=2, attn_layer_offset=1, num_key_value_heads=2,
        attention_head_dim=12, n_mamba_heads=4, hidden_act="silu", hidden_mamba_act="relu", mamba_d_state=5, mamba_d_conv=3,
        mamba_expand=3, mamba_dt_rank=2, mamba_conv_bias=False, mamba_proj_bias=True, rms_norm_eps=1e-3, pad_token_id=3)),
    "zamba_untied": (ZambaConfig, ZambaForCausalLM, ZAMBA1 | dict(
        tie_word_embeddings=False, layers_block_type=["hybrid", "linear_attention", "hybrid"], n_mamba_heads=1)),
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


def recurrence_of_rwkv7(r, w, k, v, a, b, **options):
    """What chunk_rwkv7 computes, by fla's own recurrence over tokens, which scales r by its width ** -0.5."""
    r, w, k, v, a, b = (x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, w, k, v, a, b))
    return dplr_recurrence(r, k, v, a, b, w)[0].transpose(1, 2), None


def divided_by_norm(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def recurrence_of_comba(q, k, v, p, g, beta, **options):
    """What chunk_comba computes, by fla's own recurrence over tokens, which reads the state behind the decay."""
    q, k, p = (divided_by_norm(x).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k, p))
    return naive_recurrent_comba(q, k, v, p * (-g).exp()[..., None], beta, g)


def recurrence_of_products(q, k, v, g, beta, num_householder, **options):
    """What chunk_gated_delta_product computes, by fla's own recurrence over tokens."""
    q, k, scale = divided_by_norm(q), divided_by_norm(k), q.shape[-1] ** -0.5
    return naive_recurrent_gated_delta_product(q, k, v, g, beta, scale, num_householder=num_householder)


if "MAMBA" in os.environ:
    import mamba3_on_cpu  # noqa: F401
fla.layers.attn.flash_attn_func = plain_attention
fla.layers.comba.chunk_comba = recurrence_of_comba
fla.layers.gated_deltaproduct.chunk_gated_delta_product = recurrence_of_products
fla.layers.hgrn.chunk_hgrn = naive_recurrent_hgrn  # Triton's interpreter cannot run its kernel
fla.layers.rwkv7.chunk_rwkv7 = recurrence_of_rwkv7
MODELS = (
    fla.models.comba.modeling_comba,
    fla.models.delta_net.modeling_delta_net,
    fla.models.gated_deltanet.modeling_gated_deltanet,
    fla.models.gated_deltaproduct.modeling_gated_deltaproduct,
    fla.models.gla.modeling_gla,
    fla.models.gsa.modeling_gsa,
    fla.models.hgrn.modeling_hgrn,
    fla.models.hgrn2.modeling_hgrn2,
    fla.models.kda.modeling_kda,
    fla.models.retnet.modeling_retnet,
)
for module in (fla.models.modeling_utils, *MODELS):
    module.fused_attnres = naive_attnres  # its kernel refuses tensors of a CPU


# Types of fla whose recurrences run over tokens here. The chunks of its RWKV-7 in float32 are off by up to 8e-4.
RECURRENCES = ("comba", "gated_deltaproduct", "mamba", "mamba3", "rwkv7")


def as_published(found: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """The filters of q, k and v of OLMo-Hybrid by their widths; transformers 5.24.0 saves equal parts. The MLPs of Kimi-Linear
    without experts by their name; transformers saves them by the name of those with experts."""
    if config.model_type == "kimi_linear":
        dense = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)")
        return {dense.sub(".mlp.", name): x for name, x in found.items()}
    if config.model_type != "olmo_hybrid":
        return found
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [name for name in found if ".q_conv1d." in name]:
        names = [name.replace("q_conv1d", f"{x}_conv1d") for x in "qkv"]
        rows = torch.cat([found[one] for one in names])
        found |= {
            one: x.contiguous() for one, x in zip(names, rows.split([keys, keys, len(rows) - 2 * keys]), strict=True)
        }
    return found


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
        found = as_published(load_file(pathlib.Path(folder) / "model.safetensors"), model.config)
        for key, x in model.named_parameters():
            x.copy_(values[key])
        for key, x in model.named_buffers():
            x.copy_(buffers[key])
    return {key: x.clone() for key, x in found.items() if not key.endswith(DERIVED) and not key.startswith(VISION)}


# transformers calls fla's kernels where fla is installed. Its own code is the reference here, and takes float64.
for module in (bailing_hybrid, glm5_next, kimi_linear):
    module.chunk_kimi_delta_attention = inspect.unwrap(module.chunk_kimi_delta_attention)
for module in (lara_mini, olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next, qwen4_exp):
    module.torch_chunk_gated_delta_rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)


# With seed 0 the models' own gradients in float32 are 1e-4 from those in float64, at the bias of the gates, because the deviation
# of one head's h lies below the square root of the norm's epsilon. With 2 they are 1e-5, and those of other fixtures 4e-6.
SEEDS = dict(xlstm_parts_fused=2)


def without_ties(scores: torch.Tensor, *args, topk=torch.Tensor.topk, **options):
    """Return topk. Where an index calls it, of Qwen4-Exp along axis 0 and of GLM-5.3-Flash over [B, T, blocks], assert that no
    score left out equals one that counts."""
    found = topk(scores, *args, **options)
    axis = options.get("dim")
    if axis == 0 or scores.ndim == 3:
        lowest = found.values.amin(axis, keepdim=True)
        counted, hidden = (scores >= lowest).sum(axis), torch.finfo(scores.dtype).min
        is_full = lowest.squeeze(axis) > hidden
        assert bool((counted[is_full] == found.values.shape[axis]).all()), (
            "equal scores, of which any may count: change the fixture"
        )
    return found


torch.Tensor.topk = without_ties


def unscale(model: RwkvForCausalLM):
    """Undo what RWKV-4 does to the weights of outputs at inference: divide them by a power of 2, so that their gradients grow."""
    every = model.config.rescale_every
    for layer, block in enumerate(model.rwkv.blocks):
        for projection in (block.attention.output, block.feed_forward.value):
            projection.weight.grad /= 2 ** (layer // every if every > 0 else 0)


def make(name: str):
    config_class, model_class, options = CASES[name]
    config = config_class(**options)
    config.get_text_config()._experts_implementation = (
        "eager"  # the grouped product takes no rows of fewer than 16 bytes
    )
    torch.manual_seed(SEEDS.get(name, 0))
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
    if config.model_type in ("kimi_linear", "olmo_hybrid"):
        saved = as_published(load_file(folder / "model.safetensors"), config)
        save_file(saved, folder / "model.safetensors", metadata=dict(format="pt"))
    tokens = torch.randint(0, config.get_text_config().vocab_size, TOKENS, generator=torch.Generator().manual_seed(1))
    # No kernel of a recurrence, so that float64 is possible.
    is_plain = model_class.__module__.startswith("transformers") or config.model_type in RECURRENCES
    with in_float64() if is_plain else contextlib.nullcontext():
        model = model.double() if is_plain else model
        logits = model(tokens, use_cache=False).logits
        weights = torch.sin(3.0 * torch.arange(logits.numel())).reshape(logits.shape)
        (weights * logits).mean().backward()
        if config.model_type == "rwkv":
            unscale(model)
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

"""Write the table of docs/checkpoints.md that lists glax's parameters beside those of checkpoints.

python docs/parameter_names.py --write         replaces the table, of a few types
python docs/parameter_names.py bamba zamba2    prints the table of any types
"""

import pathlib
import sys
from collections.abc import Iterable

from flax import nnx

import glax.models
from glax.models.names import parameters

PAGE = pathlib.Path(__file__).parent / "checkpoints.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- end of parameters -->"
SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1)
FLA = SIZES | dict(num_heads=2, intermediate_size=24)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
HYBRID = SIZES | ATTENTION | dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
LATENT = ATTENTION | dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, kv_lora_rank=6,
    qk_rope_head_dim=4, v_head_dim=5, qk_nope_head_dim=8, num_experts=4, num_experts_per_token=2, moe_intermediate_size=12,
    pad_token_id=None,
)  # fmt: skip
QWEN = ATTENTION | dict(
    num_hidden_layers=2, full_attention_interval=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
QWEN_MOE = QWEN | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=12
)
QWEN4 = QWEN_MOE | dict(
    hc_count=2, hc_lowrank=4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
    indexer_compress_ratio=2, ple_layer_ids=[1], heads_per_ngram=2, ngram_vocab_size_base=19, split_ngram_parts=2, eos_token_id=0,
)  # fmt: skip
MODELS = {
    "gla": FLA | dict(use_short_conv=True),
    "retnet": FLA,
    "gsa": FLA | dict(num_slots=8),
    "hgrn": SIZES,
    "hgrn2": FLA | dict(expand_ratio=8),
    "rwkv6": FLA,
    "rwkv7": FLA | dict(head_dim=8),
    "delta_net": FLA,
    "gated_deltanet": FLA | dict(head_dim=8),
    "gated_deltaproduct": FLA | dict(head_dim=8),
    "comba": FLA | dict(head_dim=8),
    "kda": FLA | dict(head_dim=8),
    "mamba2": SIZES | dict(state_size=8, head_dim=8, num_heads=4, n_groups=1),
    "mamba": SIZES | dict(state_size=4),
    "falcon_mamba": SIZES | dict(state_size=4),
    "jamba": SIZES | ATTENTION | dict(
        num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=4, pad_token_id=None
    ),
    "mamba3": SIZES | dict(state_size=8, head_dim=8),
    "bamba": HYBRID | dict(num_hidden_layers=2, attn_layer_indices=[1]),
    "granitemoehybrid": HYBRID | dict(num_local_experts=4, shared_intermediate_size=20),
    "falcon_h1": HYBRID | dict(mamba_d_ssm=32),
    "nemotron_h": SIZES | ATTENTION | dict(
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe"], head_dim=8, mamba_num_heads=4,
        mamba_head_dim=8, ssm_state_size=8, n_groups=2, moe_intermediate_size=12, n_routed_experts=4,
        moe_shared_expert_intermediate_size=12,
    ),
    "minimax": SIZES | ATTENTION | dict(num_hidden_layers=2, num_local_experts=4),
    "zamba": SIZES | ATTENTION | dict(
        num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"], num_key_value_heads=4, pad_token_id=None,
    ),
    "zamba2": SIZES | ATTENTION | dict(
        num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"], num_key_value_heads=4, n_mamba_heads=4,
        mamba_d_state=8, adapter_rank=4, use_shared_attention_adapter=True,
    ),
    "kimi_linear": SIZES | LATENT | dict(linear_head_dim=8, linear_num_heads=2),
    "kimi_k3": dict(text_config=SIZES | LATENT | dict(
        layer_types=None, mla_use_nope=True, mla_use_output_gate=True, attn_res_block_size=2, q_lora_rank=7,
        first_k_dense_replace=1,
        routed_expert_hidden_size=8, latent_moe_use_norm=True, hidden_act="situ", linear_attn_config=dict(
            full_attn_layers=[2], kda_layers=[1], head_dim=8, num_heads=2, use_full_rank_gate=True),
    )),
    "bailing_hybrid": SIZES | LATENT | dict(head_dim=8, n_group=1, topk_group=1, first_k_dense_replace=1),
    "glm5_next": dict(text_config=SIZES | LATENT | dict(
        layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"], linear_head_dim=8,
        linear_num_heads=2, qk_rope_head_dim=0, q_lora_rank=7, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=2,
        index_head_dim=4, index_topk=16, index_kpool=4,
    )),
    "lara_mini": SIZES | ATTENTION | dict(
        num_hidden_layers=2, layer_types=["linear_attention", "sliding_attention"], head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12, shared_expert_intermediate_size=12,
    ),
    "lfm2": SIZES | ATTENTION | dict(num_hidden_layers=2, full_attn_idxs=[1]),
    "lfm2_moe": SIZES | ATTENTION | dict(
        num_hidden_layers=2, layer_types=["conv", "full_attention"], num_dense_layers=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12,
    ),
    "lfm3": SIZES | ATTENTION | dict(
        num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"], head_dim=8,
        pad_token_id=None,
    ),
    "llama": SIZES | ATTENTION,
    "qwen3": SIZES | ATTENTION | dict(head_dim=8),
    "olmo_hybrid": SIZES | ATTENTION | dict(num_hidden_layers=2, pad_token_id=None),
    "qwen3_5_text": SIZES | QWEN,
    "qwen3_5_moe_text": SIZES | QWEN_MOE,
    "qwen3_5": dict(text_config=SIZES | QWEN),
    "qwen3_5_moe": dict(text_config=SIZES | QWEN_MOE),
    "qwen3_next": SIZES | QWEN_MOE,
    "qwen4_exp_text": SIZES | QWEN4,
    "qwen4_exp": dict(text_config=SIZES | QWEN4),
    "recurrent_gemma": SIZES | dict(num_attention_heads=2, num_hidden_layers=3, pad_token_id=None),
    "rwkv": SIZES | dict(num_hidden_layers=2),
    "xlstm": SIZES | dict(num_heads=2),
}  # fmt: skip


SHOWN = ("gla", "gated_deltanet", "mamba2", "qwen3_next")  # on the page; the others have the same parts


def table(kinds: Iterable[str] = SHOWN) -> str:
    """One row for each parameter of a small model: its path here, its shape, and its name in the checkpoint; * is an expert."""
    rows = ["| model | here | shape | in the checkpoint |", "|---|---|---|---|"]
    for kind in kinds:
        model = nnx.eval_shape(lambda kind=kind: built(kind, MODELS[kind]))
        rows += [
            f"| {kind} | `{path}` | {list(param.shape)} | `{model.names(path)}` |" for path, param in parameters(model)
        ]
    return "\n".join(rows) + "\n"


def built(kind: str, config: dict):
    return glax.models.from_config(config | dict(model_type=kind), rngs=nnx.Rngs(0))


def between(text: str) -> str:
    return BEGIN + text + END


if __name__ == "__main__":
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + between(table()) + rest.split(END)[1])
    else:
        print(table(sys.argv[1:] or SHOWN), end="")

"""Make the fixtures ling_2_5* from the code that the repository of Ring-2.5 holds for its models, in PyTorch on a CPU.

    RING=CLONE env/bin/python tests/models/make_ling.py [NAME ...]
    RING=CLONE env/bin/python tests/models/make_ling.py count FILE    # prints the parameters of a config

CLONE is a clone of github.com/inclusionAI/Ring-V2.5. The environment has torch 2.13.0, einops, fla-core 0.6.0 and transformers
4.57.1, for which that code was written. Its Lightning Attention calls fla's kernels; here fla's recurrence over tokens stands in
for them, in float64.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import types

import torch
from random_models import TOKENS, in_float64, randomise
from safetensors.torch import save_file

FOLDER = pathlib.Path(__file__).parent / "fixtures"
SMALL = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=3, layer_group_size=3, num_attention_heads=4, num_key_value_heads=4,
    head_dim=8, partial_rotary_factor=0.5, group_norm_size=4, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    kv_lora_rank=6, intermediate_size=24, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, pad_token_id=None, eos_token_id=None,
)  # fmt: skip
CASES = {
    "ling_2_5": SMALL,
    # Four layers in groups of three: the layer behind the last whole group is of softmax attention, too.
    "ling_2_5_options": SMALL | dict(
        num_hidden_layers=4, head_dim=12, partial_rotary_factor=0.5, qk_rope_head_dim=6, num_attention_heads=3,
        num_key_value_heads=3, group_norm_size=2, q_lora_rank=7, use_qkv_bias=True, use_bias=True, use_qk_norm=False,
        num_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, num_shared_experts=2, routed_scaling_factor=1.7,
        first_k_dense_replace=2, hidden_act="gelu", rms_norm_eps=1e-3, rope_theta=300.0, pad_token_id=3,
        tie_word_embeddings=True, max_position_embeddings=64, rope_scaling=dict(
            type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=0.6)),
    "ling_2_5_one_expert": SMALL | dict(
        num_experts_per_tok=1, first_k_dense_replace=0, norm_topk_prob=False, num_nextn_predict_layers=1),
}  # fmt: skip


def file_of_fla(*parts: str) -> types.ModuleType:
    """Return the module of one file of fla-core, without its package, which needs a newer transformers."""
    path = importlib.metadata.distribution("fla-core").locate_file("/".join(("fla", *parts)) + ".py")
    spec = importlib.util.spec_from_file_location(parts[-1], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recurrence(q, k, v, g, initial_state=None, output_final_state=False):
    return file_of_fla("ops", "simple_gla", "naive").naive_recurrent_simple_gla(q, k, v, g)


def own_code() -> types.ModuleType:
    """Return the models' own code, whose kernels are `recurrence`."""
    kernels = {"fused_recurrent": "fused_recurrent_simple_gla", "chunk": "chunk_simple_gla"}
    for name in ("fla", "fla.ops", "fla.ops.simple_gla", *(f"fla.ops.simple_gla.{file}" for file in kernels)):
        sys.modules[name] = types.ModuleType(name)
    for file, function in kernels.items():
        setattr(sys.modules[f"fla.ops.simple_gla.{file}"], function, recurrence)
    sys.path.append(os.environ["RING"])
    code = importlib.import_module("models.modeling_bailing_moe_v2_5")
    code.BailingMoeV2_5Config.model_type = "bailing_hybrid"  # as in the published configs
    return code


def count(path: str, code: types.ModuleType) -> int:
    """Return the parameters of the published config in a file, with the routers' corrections, without layers of multi-token
    prediction."""
    values = json.loads(pathlib.Path(path).read_text()) | dict(num_nextn_predict_layers=0)
    with torch.device("meta"):
        model = code.BailingMoeV2_5ForCausalLM(code.BailingMoeV2_5Config(**values))
    buffers = [x for name, x in model.named_buffers() if name.endswith("expert_bias")]
    return sum(x.numel() for x in (*model.parameters(), *buffers))


def make(name: str, code: types.ModuleType):
    config = code.BailingMoeV2_5Config(**CASES[name])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = code.BailingMoeV2_5ForCausalLM(config).float()
    randomise(model)
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, config.vocab_size, TOKENS, generator=torch.Generator().manual_seed(1))
    with in_float64():
        model = model.double().train()  # its experts have no gradient while it does not train
        logits = model(tokens, use_cache=False).logits
        weights = torch.sin(3.0 * torch.arange(logits.numel())).reshape(logits.shape)
        (weights * logits).mean().backward()
    further = tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(config.num_nextn_predict_layers))
    tensors = [
        *model.named_parameters(),
        *((key, x) for key, x in model.named_buffers() if key.endswith("expert_bias")),
    ]
    expected = {
        f"gradient.{key}": (torch.zeros_like(x) if x.grad is None else x.grad).float()
        for key, x in tensors
        if not key.startswith(further)
    }
    expected |= dict(tokens=tokens.int(), logits=logits.detach().float())
    save_file(expected, folder / "expected.safetensors")
    print(f"{name}: logits about {logits.std():.3f}", flush=True)


if __name__ == "__main__":
    code = own_code()
    if sys.argv[1:2] == ["count"]:
        sys.exit(print(count(sys.argv[2], code)))
    for name in sys.argv[1:] or CASES:
        make(name, code)

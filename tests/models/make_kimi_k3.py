"""Make the fixtures kimi_k3* from NVIDIA's implementation of Kimi K3 in PyTorch on a CPU, which reads the published checkpoint.

    AUTOMODEL=CLONE env/bin/python tests/models/make_kimi_k3.py [NAME ...]
    AUTOMODEL=CLONE env/bin/python tests/models/make_kimi_k3.py count FILE    # prints the parameters of a config

CLONE is a clone of github.com/NVIDIA-NeMo/Automodel, whose model was compared with the published code and weights. The
environment is the one of make_fixtures.py. The model calls fla's kernels; here fla's recurrence over tokens stands in for them,
in float64, and PyTorch's operations for its convolution and its gated norm.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import types

import torch
import torch.nn.functional as F
from random_models import TOKENS, in_float64, randomise
from safetensors.torch import save_file
from torch import nn

FOLDER = pathlib.Path(__file__).parent / "fixtures"
LINEAR = dict(head_dim=8, num_heads=2, short_conv_kernel_size=4, gate_lower_bound=-5.0, use_full_rank_gate=True)
SMALL = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2,
    hidden_act="situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0, q_lora_rank=7, kv_lora_rank=6,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=5, mla_use_nope=True, mla_use_output_gate=True, num_experts=4,
    num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=12, routed_expert_hidden_size=10,
    latent_moe_use_norm=True, first_k_dense_replace=1, attn_res_block_size=2, rms_norm_eps=1e-5, pad_token_id=0,
    eos_token_id=1,
    linear_attn_config=LINEAR | dict(full_attn_layers=[3, 5], kda_layers=[1, 2, 4]),
)  # fmt: skip
CASES = {
    "kimi_k3": SMALL,
    "kimi_k3_options": SMALL | dict(
        num_hidden_layers=4, attn_res_block_size=3, activation_situ_beta=0.7, activation_situ_linear_beta=0.9,
        num_experts=8, num_expert_group=4, topk_group=2, num_experts_per_token=3, num_shared_experts=2, moe_renormalize=False,
        routed_scaling_factor=1.7, latent_moe_use_norm=False, first_k_dense_replace=0, rms_norm_eps=1e-3, pad_token_id=3,
        linear_attn_config=LINEAR | dict(
            full_attn_layers=[1, 4], kda_layers=[2, 3], num_heads=3, short_conv_kernel_size=3, gate_lower_bound=None)),
    "kimi_k3_plain": SMALL | dict(
        attn_res_block_size=None, activation_situ_linear_beta=None, q_lora_rank=None, mla_use_output_gate=False, moe_layer_freq=2,
        linear_attn_config=SMALL["linear_attn_config"] | dict(use_full_rank_gate=False)),
}  # fmt: skip


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size: int, kernel_size: int, activation: str | None = None, **_):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)
        assert activation == "silu"

    def forward(self, x, **_):
        size = self.kernel_size[0]
        y = F.conv1d(F.pad(x.transpose(1, 2), (size - 1, 0)), self.weight.to(x.dtype), groups=self.groups)
        return F.silu(y).transpose(1, 2), None


class FusedRMSNormGated(nn.Module):
    def __init__(self, hidden_size: int, eps: float, activation: str, **_):
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x, gate):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype) * gate.sigmoid()


def recurrence(q, k, v, g, beta, **_):
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/kda/naive.py")
    spec = importlib.util.spec_from_file_location("naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return module.naive_recurrent_kda(q, k, v, g, beta)[0], None


def own_code() -> types.ModuleType:
    """Return the module of the model, whose kernels are replaced."""
    sys.modules["fla"] = None
    sys.path.append(os.environ["AUTOMODEL"])
    code = importlib.import_module("nemo_automodel.components.models.kimi_k3.model")
    code.ShortConvolution, code.FusedRMSNormGated = ShortConvolution, FusedRMSNormGated
    code.chunk_kda = code.fused_recurrent_kda = recurrence
    code._require_fla = lambda: None
    return code


def made(code: types.ModuleType, text: dict) -> nn.Module:
    config = code.KimiK3TextConfig(**text, torch_dtype=torch.float32, kda_use_fused_gate=False)
    config._attn_implementation = "eager"
    backend = code.BackendConfig(attn="eager", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch")
    return code.KimiK3ForCausalLM(config, backend=backend)


def count(path: str, code: types.ModuleType) -> int:
    """Return the parameters of the language model of a published config."""
    text = json.loads(pathlib.Path(path).read_text())["text_config"]
    with torch.device("meta"):
        model = made(code, {key: value for key, value in text.items() if key != "quantization_config"})
    corrections = [x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(x.numel() for x in (*model.parameters(), *corrections))


def saved_names(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return values by the names of the published checkpoint."""
    return {name: x.detach().clone().contiguous() for name, x in model.state_dict_adapter.to_hf(values).items()}


def make(name: str, code: types.ModuleType):
    torch.manual_seed(0)
    model = made(code, CASES[name]).float()
    randomise(model)
    model.eval()
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    state = {key: x for key, x in model.state_dict().items()}
    save_file(saved_names(model, state), folder / "model.safetensors", metadata=dict(format="pt"))
    text = CASES[name] | dict(model_type="kimi_linear", dtype="float32")
    config = dict(model_type="kimi_k3", architectures=["KimiK3ForConditionalGeneration"], text_config=text)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokens = torch.randint(0, SMALL["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(1))
    with in_float64():
        model = model.double()
        logits = model(tokens).logits
        weights = torch.sin(3.0 * torch.arange(logits.numel())).reshape(logits.shape)
        (weights * logits).mean().backward()
    gradients = {key: torch.zeros_like(x) for key, x in model.state_dict().items()}
    gradients |= {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    expected = {f"gradient.{key}": x.float() for key, x in saved_names(model, gradients).items()}
    save_file(expected | dict(tokens=tokens.int(), logits=logits.detach().float()), folder / "expected.safetensors")
    print(f"{name}: {sum(x.numel() for x in model.parameters()):,} parameters, logits about {logits.std():.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["count"]:
        print(count(sys.argv[2], own_code()))
    else:
        for case in sys.argv[1:] or CASES:
            make(case, own_code())

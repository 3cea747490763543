"""Make tests/models/fixtures/mamba2_attention from mamba_ssm's own layer of softmax attention, in PyTorch on a CPU.

    env/bin/python tests/models/make_state_spaces.py

Use the environment of make_fixtures.py, with the files of mamba-ssm 2.3.2.post1 on the path; its kernels need a GPU, so the
layers of Mamba-2 are transformers'. flash_attn's rotary positions are written here, from the paper.
"""

import importlib.util
import json
import pathlib

import torch
from make_fixtures import FOLDER
from random_models import TOKENS, in_float64, randomise
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM

ATTENTION = dict(
    causal=True, d_conv=3, head_dim=6, num_heads=4, num_heads_kv=2, out_proj_bias=False, qkv_proj_bias=True,
    rotary_emb_dim=4, rotary_emb_base=300.0, softmax_scale=0.4)  # fmt: skip
SSM = dict(layer="Mamba2", d_state=8, headdim=8)
CONFIG = dict(
    d_model=16, n_layer=3, d_intermediate=0, vocab_size=31, pad_vocab_size_multiple=16, ssm_cfg=SSM, attn_layer_idx=[1],
    attn_cfg=ATTENTION, rms_norm=True, residual_in_fp32=True, fused_add_norm=True, tie_embeddings=False)  # fmt: skip


class RotaryEmbedding(torch.nn.Module):
    """Rotate the first dim channels of q [B, T, H, D] and of the keys of kv [B, T, 2, H, D], in halves. Su et al. 2021."""

    def __init__(self, dim, base, interleaved, device):
        super().__init__()
        self.dim, self.base = dim, base

    def turn(self, x):
        frequencies = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([self.dim // 2, self.dim // 2, x.shape[-1] - self.dim], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def forward(self, q, kv, seqlen_offset, max_seqlen):
        return self.turn(q), torch.stack([self.turn(kv[:, :, 0]), kv[:, :, 1]], 2)


def own_attention() -> type:
    """Return mamba_ssm's MHA, from its file alone: the package needs compiled kernels."""
    path = pathlib.Path(importlib.util.find_spec("mamba_ssm").origin).parent / "modules" / "mha.py"
    spec = importlib.util.spec_from_file_location("mamba_ssm_mha", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RotaryEmbedding = RotaryEmbedding
    return module.MHA


class Mixer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **_):
        return self.layer(x)


def stored(name: str) -> str:
    return name.replace("backbone.embeddings.", "backbone.embedding.").replace(".mixer.layer.", ".mixer.")


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=3, vocab_size=32, state_size=8, head_dim=8, expand=2)
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, n_groups=1, chunk_size=8))
    for layer in CONFIG["attn_layer_idx"]:
        model.backbone.layers[layer].mixer = Mixer(own_attention()(CONFIG["d_model"], layer_idx=layer, **ATTENTION))
    model = model.float()
    randomise(model)
    folder = FOLDER / "mamba2_attention"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    values = {stored(name): x.detach().clone() for name, x in model.named_parameters()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, 31, TOKENS, generator=torch.Generator().manual_seed(1))
    with in_float64():
        model = model.double().eval()
        logits = model(tokens, use_cache=False).logits
        weights = torch.sin(3.0 * torch.arange(logits.numel())).reshape(logits.shape)
        (weights * logits).mean().backward()
    expected = {f"gradient.{stored(name)}": x.grad.float() for name, x in model.named_parameters()}
    expected |= dict(tokens=tokens.int(), logits=logits.detach().float())
    save_file(expected, folder / "expected.safetensors")

"""Make tests/models/float8: fixtures with their projections and tables of n-grams in float8, and transformers' logits of them.

    env/bin/python tests/models/make_float8.py

Use the environment of make_fixtures.py without fla, with accelerate. transformers dequantizes the weights as it loads them.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

HERE = pathlib.Path(__file__).parent
BLOCK, LARGEST = 4, 448.0
SOURCES = ("qwen3_next", "qwen4_exp_text")


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in float8 and the scale of each block of 4 x 4."""
    rows, columns = weight.shape
    scale = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3)) / LARGEST
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight / wide).to(torch.float8_e4m3fn), scale


def table_scale(tensors: dict[str, torch.Tensor]) -> None:
    """Put every table of n-grams into float8, with one scale for all its tensors."""
    tables: dict[str, list[str]] = {}
    for name in tensors:
        if ".ngram_embedding.shard_" in name:
            tables.setdefault(name.partition(".shard_")[0], []).append(name)
    for table, names in tables.items():
        scale = torch.stack([tensors[name].abs().max() for name in names]).max() / LARGEST
        for name in names:
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{table}.weight_scale"] = scale[None]


def make(name: str):
    source, folder = HERE / "fixtures" / name, HERE / "float8" / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for key, weight in list(tensors.items()):
        if key.endswith("_proj.weight") and all(size % BLOCK == 0 for size in weight.shape):
            tensors[key], tensors[key + "_scale_inv"] = quantized(weight)
    table_scale(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    sizes = dict(weight_block_size=[BLOCK, BLOCK], modules_to_convert=["ngram_embedding"])
    kind = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3") | sizes
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=kind), indent=2) + "\n")
    own = FineGrainedFP8Config(dequantize=True, **sizes)
    options = dict(dtype=torch.float32, experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=own, **options).eval()
    tokens = load_file(source / "expected.safetensors")["tokens"]
    logits = model(tokens.long(), use_cache=False).logits.detach().contiguous()
    save_file(dict(tokens=tokens, logits=logits), folder / "expected.safetensors")


if __name__ == "__main__":
    for name in SOURCES:
        make(name)

"""Make tests/models/float8: the fixture qwen3_next with its projections in float8, and transformers' logits of it.

    env/bin/python tests/models/make_float8.py

Use the environment of make_fixtures.py without fla, with accelerate. transformers dequantizes the weights as it loads them.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

HERE = pathlib.Path(__file__).parent
SOURCE, FOLDER, BLOCK, LARGEST = HERE / "fixtures" / "qwen3_next", HERE / "float8", 4, 448.0


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in float8 and the scale of each block of 4 x 4."""
    rows, columns = weight.shape
    scale = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3)) / LARGEST
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight / wide).to(torch.float8_e4m3fn), scale


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    tensors = load_file(SOURCE / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight") and all(size % BLOCK == 0 for size in weight.shape):
            tensors[name], tensors[name + "_scale_inv"] = quantized(weight)
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((SOURCE / "config.json").read_text())
    kind = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[BLOCK, BLOCK])
    (FOLDER / "config.json").write_text(json.dumps(config | dict(quantization_config=kind), indent=2) + "\n")
    own = FineGrainedFP8Config(weight_block_size=[BLOCK, BLOCK], dequantize=True)
    options = dict(dtype=torch.float32, experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=own, **options).eval()
    tokens = load_file(SOURCE / "expected.safetensors")["tokens"]
    logits = model(tokens.long(), use_cache=False).logits.detach().contiguous()
    save_file(dict(tokens=tokens, logits=logits), FOLDER / "expected.safetensors")

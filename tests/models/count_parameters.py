"""Count the tensors' elements of the published configs by the models' own code, on PyTorch's meta device, into
published/index.json.

    env/bin/python tests/models/count_parameters.py [NAME ...]

Where an entry has `counted`, the script of this name counts.
The environment is the one of read_keys.py. A parameter that several layers share counts once. Buffers that a checkpoint holds
count, except those that the config determines. mamba_ssm needs a GPU's compiler: see `state_spaces`.
"""

import json
import pathlib
import sys

import fla_on_cpu  # noqa: F401, before fla

# isort: split

import fla.layers.attn
import fla.models  # registers its types
import torch
import transformers
from random_models import DERIVED
from read_keys import classes_of, number_or_object

FOLDER = pathlib.Path(__file__).parent / "published"
fla.layers.attn.flash_attn_func = len  # models are built, and their softmax attention never runs
OF_FLA = ("fuse_norm", "fuse_cross_entropy", "norm_eps")


def state_spaces(values: dict) -> int:
    """Return the parameters of a model of mamba_ssm, from the shapes that its modules give their parameters."""
    width, ssm = values["d_model"], values["ssm_cfg"]
    rows = -(-values["vocab_size"] // values["pad_vocab_size_multiple"]) * values["pad_vocab_size_multiple"]
    inside, states = ssm.get("expand", 2) * width, ssm.get("ngroups", 1) * ssm.get("d_state", 128)
    heads, mixed, size = inside // ssm.get("headdim", 64), inside + 2 * states, ssm.get("d_conv", 4)
    mamba = width * (2 * inside + 2 * states + heads) + mixed * (size + 1) + 3 * heads + inside + inside * width
    chosen, attn = values["attn_layer_idx"], values["attn_cfg"]
    attention = 0
    if chosen:
        kv_heads = attn.get("num_heads_kv", attn["num_heads"])
        qkv, out = attn["head_dim"] * (attn["num_heads"] + 2 * kv_heads), attn["head_dim"] * attn["num_heads"]
        attention = (
            width * qkv + qkv * attn.get("qkv_proj_bias", True) + out * width + width * attn.get("out_proj_bias", True)
        )
        attention += qkv * (attn["d_conv"] + 1) if attn.get("d_conv") else 0
    layers = values["n_layer"]
    blocks = (layers - len(chosen)) * mamba + len(chosen) * attention + layers * width
    return blocks + width + rows * width * (1 if values["tie_embeddings"] else 2)


def count(values: dict) -> int:
    # transformers' Mamba keeps the key, and reads others.
    if "ssm_cfg" in values and values.get("model_type") != "mamba":
        return state_spaces(values)
    kind = values["model_type"]
    kind += "_fla" if kind == "mamba2" and any(key in values for key in OF_FLA) else ""
    config_class, model_class = classes_of(kind)
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    config = config_class(**values)
    if kind == "glm5_next":  # the head belongs to the whole model
        model_class = transformers.Glm5NextTextModel
    with torch.device("meta"):
        model = model_class(config.get_text_config())
    model.tie_weights()
    head = 0 if kind != "glm5_next" or config.tie_word_embeddings else model.embed_tokens.weight.numel()
    return head + sum(x.numel() for x in (*model.parameters(), *stored_buffers(model)))


def stored_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and name not in DERIVED
    ]


if __name__ == "__main__":
    index = json.loads((FOLDER / "index.json").read_text())
    for name, entry in index.items():
        values = json.loads((FOLDER / f"{name}.json").read_text(), object_hook=number_or_object)
        if entry.keys().isdisjoint({"refused", "counted"}) and (not sys.argv[1:] or name in sys.argv[1:]):
            entry["parameters"] = count(values)
            print(name, f"{entry['parameters']:,}", file=sys.stderr, flush=True)
    (FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n")

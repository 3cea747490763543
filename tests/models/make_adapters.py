"""Make adapters by peft for the fixtures of test_adapters.py, and check in peft the adapters that glax saves.

TRITON_INTERPRET=1 env/bin/python tests/models/make_adapters.py   # writes tests/models/adapters
python -m tests.models.make_adapters OUT                      # with JAX: loads, changes and saves each adapter
env/bin/python tests/models/make_adapters.py OUT --compare    # its logits in peft beside those of glax

env: as make_fixtures.py describes, with peft 0.21.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
ADAPTERS, FIXTURES = HERE / "adapters", HERE / "fixtures"
PATTERNS = dict(rank_pattern={"q_proj": 5, r"layers\.1\..*\.v_proj": 2}, alpha_pattern={"v_proj": 3, "lm_head": 7})
# The name of an adapter: (its fixture, arguments of LoraConfig).
CASES = {
    "llama": ("llama", dict(r=4, lora_alpha=6, target_modules="all-linear")),
    "llama_patterns": ("llama", dict(r=3, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"], **PATTERNS)),
    "llama_rslora": ("llama", dict(r=4, lora_alpha=3, use_rslora=True, target_modules=r".*\.(k|up)_proj")),
    "gla": ("gla", dict(r=2, target_modules=["q_proj", "gk_proj.0", "gk_proj.1", "o_proj"], lora_dropout=0.5)),
    "qwen3_5_text": ("qwen3_5_text", dict(r=2, target_modules=["in_proj_qkv", "in_proj_z", "q_proj", "gate_proj"])),
    "mamba2": ("mamba2", dict(r=2, target_modules=["in_proj"])),
}


def base_model(fixture: str):
    import make_fixtures  # also makes fla run without a GPU

    config_class, model_class, _ = make_fixtures.CASES[fixture]
    folder = FIXTURES / fixture
    return model_class.from_pretrained(folder, config=config_class.from_pretrained(folder)).eval().float()


def logits_of(model, tokens):
    import torch

    with torch.no_grad():
        return model(tokens.long(), use_cache=False).logits.contiguous()


def make():
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    for name, (fixture, options) in CASES.items():
        torch.manual_seed(0)
        model = get_peft_model(base_model(fixture), LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        for key, value in model.named_parameters():
            if "lora_B" in key:  # which begins as zeros
                value.data.normal_(std=0.3)
        tokens = load_file(FIXTURES / fixture / "expected.safetensors")["tokens"]
        model.save_pretrained(ADAPTERS / name)
        (ADAPTERS / name / "README.md").unlink()
        path = ADAPTERS / name / "adapter_config.json"
        config = json.loads(path.read_text()) | dict(base_model_name_or_path=None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(dict(tokens=tokens, logits=logits_of(model, tokens)), ADAPTERS / name / "expected.safetensors")


def write(out: pathlib.Path):
    import jax
    import numpy as np
    from flax import nnx
    from safetensors.numpy import load_file, save_file

    import glax.models

    for name, (fixture, _) in CASES.items():
        model = glax.models.load_adapter(glax.models.from_pretrained(FIXTURES / fixture), ADAPTERS / name)
        graph, terms, rest = nnx.split(model, nnx.LoRAParam, ...)
        model = nnx.merge(graph, jax.tree.map(lambda x: 1.5 * x, terms), rest)
        glax.models.save_adapter(model, out / name)
        tokens = load_file(ADAPTERS / name / "expected.safetensors")["tokens"]
        save_file(dict(tokens=tokens, logits=np.asarray(model(tokens))), out / name / "expected.st")


def compare(out: pathlib.Path):
    from peft import PeftModel
    from safetensors.torch import load_file

    worst = 0.0
    for name, (fixture, _) in CASES.items():
        expected = load_file(out / name / "expected.st")
        base = base_model(fixture)
        before = logits_of(base, expected["tokens"])
        logits = logits_of(PeftModel.from_pretrained(base, out / name).eval(), expected["tokens"])
        error = float((logits - expected["logits"]).norm() / expected["logits"].norm())
        effect = float((logits - before).norm() / before.norm())
        worst = max(worst, error)
        print(f"{name}: {error:.1e}, where the adapter changes the logits by {effect:.1e}", flush=True)
        assert effect > 0.05
    assert worst <= 2e-5, worst


if __name__ == "__main__":
    if len(sys.argv) == 1:
        make()
    else:
        (compare if "--compare" in sys.argv else write)(pathlib.Path(sys.argv[1]))

"""Record what transformers computes in bfloat16 for Nemotron-H with large biases of its routers, as published models have.

    env/bin/python tests/models/make_router_bias.py      # with PyTorch: see make_fixtures.py

Writes router_bias.safetensors: for each fixture the tokens, the biases of about 14 by the names of the checkpoint, the logits in
float64, and those of the same model that is loaded in bfloat16; and the rows that its router reads, with the experts that it
chooses and their weights. Biases and router are float32 there.
"""

import pathlib
import tempfile

import make_fixtures
import torch
from safetensors.torch import load_file, save_file
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

NAMES, TOKENS = ("nemotron_h", "nemotron_h_options"), (4, 64)


def recorded(name: str) -> dict[str, torch.Tensor]:
    _, model_class, options = make_fixtures.CASES[name]
    weights, draws = load_file(make_fixtures.FOLDER / name / "model.safetensors"), torch.Generator().manual_seed(2)
    biases = {key: 14 + 0.3 * torch.randn(x.shape, generator=draws) for key, x in weights.items() if key.endswith("bias")
              and "e_score" in key}  # fmt: skip
    tokens = torch.randint(0, options["vocab_size"], TOKENS, generator=draws)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        save_file(weights | biases, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text((make_fixtures.FOLDER / name / "config.json").read_text())
        narrow, wide = (
            model_class.from_pretrained(folder, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32)
        )
    for model in (narrow, wide):
        model.config._experts_implementation = "eager"
    router, read = next(x for x in narrow.modules() if isinstance(x, NemotronHTopkRouter)), {}

    def remember(module, given, result):
        read["rows"], (_, read["weights"], read["experts"]) = given[0].flatten(0, -2), result

    router.register_forward_hook(remember)
    with torch.no_grad():
        rounded = narrow(tokens, use_cache=False).logits.float()
        with make_fixtures.in_float64():
            exact = wide.double()(tokens, use_cache=False).logits.float()
    error, same = (rounded - exact).norm() / exact.norm(), (rounded.argmax(-1) == exact.argmax(-1)).float().mean()
    print(f"{name}: bfloat16 is off by {error:.3f}, {same:.1%} of the likeliest tokens are the same")
    experts, order = read["experts"].int().sort(-1)
    chosen = dict(rows=read["rows"].float(), experts=experts, weights=read["weights"].gather(-1, order))
    return biases | chosen | dict(tokens=tokens.int(), exact=exact, bfloat16=rounded)


if __name__ == "__main__":
    found = {f"{name}/{key}": x for name in NAMES for key, x in recorded(name).items()}
    save_file(found, pathlib.Path(__file__).parent / "router_bias.safetensors")

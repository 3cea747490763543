"""Check that what glax saves loads in fla and transformers with the same logits: in two environments, one after the other.

python -m tests.models.check_saved OUT [NAME ...]            # with JAX: changes each fixture and saves it
env/bin/python tests/models/check_saved.py OUT --compare     # with PyTorch: see make_fixtures.py

OUT: a folder for the saved models. NAME: a fixture; all if none is named.
"""

import pathlib
import sys

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def write(out: pathlib.Path, names: list[str]):
    """Take one step of gradient descent on every fixture, and save the model with its logits."""
    import jax
    import numpy as np
    from flax import nnx
    from safetensors.numpy import load_file, save_file

    import glax.models

    for folder in [FIXTURES / name for name in names] or sorted(FIXTURES.iterdir()):
        model, tokens = glax.models.from_pretrained(folder), load_file(folder / "expected.safetensors")["tokens"]
        graph, params = nnx.split(model)
        step = jax.jit(lambda p, graph=graph, tokens=tokens: jax.grad(lambda p: nnx.merge(graph, p).loss(tokens))(p))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params))
        model = nnx.merge(graph, params)
        glax.models.save_pretrained(model, out / folder.name)
        logits = np.asarray(jax.jit(lambda p, graph=graph, tokens=tokens: nnx.merge(graph, p)(tokens))(params))
        save_file(dict(tokens=np.asarray(tokens), logits=logits), out / folder.name / "expected.st")


def compare(out: pathlib.Path):
    import make_fixtures  # also makes fla run without a GPU
    import torch
    from safetensors.torch import load_file

    worst = 0.0
    for folder in sorted(out.iterdir()):
        config_class, model_class, _ = make_fixtures.CASES[folder.name]
        config = config_class.from_pretrained(folder)
        config.get_text_config()._experts_implementation = "eager"  # as in make_fixtures
        model, info = model_class.from_pretrained(folder, config=config, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        expected = load_file(folder / "expected.st")
        with torch.no_grad():
            logits = model.eval().float()(expected["tokens"].long(), use_cache=False).logits
        error = float((logits - expected["logits"]).norm() / expected["logits"].norm())
        worst = max(worst, error)
        print(f"{folder.name}: {error:.1e}", flush=True)
    assert worst <= 2e-5, worst


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    if "--compare" in sys.argv:
        compare(folder)
    else:
        write(folder, sys.argv[2:])

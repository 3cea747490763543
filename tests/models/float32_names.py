"""Record which parameters the models' own code has in float32 when it loads, makes and saves them in bfloat16.

    env/bin/python tests/models/float32_names.py      # with PyTorch: see make_fixtures.py

Writes float32_names.json: for each fixture the names of its tensors that are float32 behind `from_pretrained(folder,
dtype=torch.bfloat16)`, and the digest of the versions that it ran with. Raises AssertionError where `save_pretrained` writes
other dtypes than the model has.
"""

import importlib.metadata
import json
import pathlib
import tempfile

import make_fixtures  # also makes fla run without a GPU
import torch
from safetensors.torch import load_file


def float32_names(name: str) -> list[str]:
    """Return the sorted names of the saved float32 tensors of a fixture that was loaded in bfloat16."""
    _, model_class, _ = make_fixtures.CASES[name]
    model = model_class.from_pretrained(make_fixtures.FOLDER / name, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(pathlib.Path(folder) / "model.safetensors")
    state = model.state_dict()
    for key, x in saved.items():
        assert key not in state or state[key].dtype == x.dtype, (key, x.dtype)
    return sorted(key for key, x in saved.items() if x.dtype == torch.float32)


if __name__ == "__main__":
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "fla-core", "torch")}
    names = {}
    for name in make_fixtures.CASES:
        names[name] = float32_names(name)
        print(name, names[name], flush=True)
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(dict(versions=versions, names=names), indent=1) + "\n")

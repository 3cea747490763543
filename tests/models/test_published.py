"""Published configs: each builds, with as many parameters as the models' own code counts.

published/index.json names the repository of each config, and where its text was found: "whole" is a file as it is quoted there,
"part" lacks keys or has keys added, as its source says, and "rebuilt" is composed from sizes and key names.
"""

import json
import math
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import glax.models
from glax.models.config import ModelConfig
from glax.models.load import abstract_model
from glax.models.names import parameters
from glax.models.quantization import without_quantization

FOLDER = pathlib.Path(__file__).parent / "published"
INDEX = json.loads((FOLDER / "index.json").read_text())
REFUSED = sorted(name for name, entry in INDEX.items() if "refused" in entry)


def read(name: str) -> ModelConfig:
    return without_quantization(ModelConfig.of(json.loads((FOLDER / f"{name}.json").read_text())))[0]


@pytest.mark.parametrize("name", sorted(set(INDEX) - set(REFUSED)))
def test_a_published_config_builds_with_all_parameters_of_its_own_code(name):
    model = abstract_model(read(name))
    assert sum(math.prod(param.shape) for _, param in parameters(model)) == INDEX[name]["parameters"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_its_own_code_cannot_run_is_refused_by_a_key_that_it_reads(name):
    with pytest.raises(glax.models.UnsupportedOption, match=f"^{INDEX[name]['refused']}="):
        abstract_model(read(name))


def test_every_config_has_a_source():
    assert set(INDEX) == {path.stem for path in FOLDER.glob("*.json")} - {"index"}
    assert all(entry["text"] in ("whole", "part", "rebuilt") and entry["source"] for entry in INDEX.values())
    types = {read(name).values.get("model_type", "mamba2") for name in INDEX}
    assert types == set(glax.models.MODEL_TYPES)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen4_exp_text"])
def test_logits_of_float8_weights_are_those_of_transformers(name):
    """transformers dequantizes them to float32, too: tests/models/make_float8.py."""
    expected = load_file(FOLDER.parent / "float8" / name / "expected.safetensors")
    model = glax.models.from_pretrained(FOLDER.parent / "float8" / name)
    logits = np.asarray(model(expected["tokens"]), np.float64)
    error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
    assert error < 2e-5

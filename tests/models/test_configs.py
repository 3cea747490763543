"""Values that no option can have are errors that name the key, for every type: never another exception, never a long wait."""

import json
import math
import pathlib

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import glax.models
from glax.models.config import KINDS, NO_EFFECT, ModelConfig
from glax.models.load import abstract_model

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
CONFIGS = {name: json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES}
FREE = (NO_EFFECT - KINDS.keys()) | {"model_type"}  # options of generation and names, of which any value passes
WRONG = {
    int: ["2", [2], {}],
    float: ["2", True, [2.0], {}],
    bool: ["true", 5, []],
    str: [5, True],
    list: ["2", 5, True],
}
EXTREME = {int: [10**11, 10**400, -(10**400)], float: [1e308, -1e308, 10**400, math.inf, math.nan]}
WRONG[int].append(True)
LIMITS = ("time_step_limit", "dt_limit")


def changed(config: dict, path: tuple[str, ...], value) -> dict:
    outer, *inner = path
    return config | {outer: changed(config[outer], tuple(inner), value) if inner else value}


def options(config: dict) -> list[tuple[str, ...]]:
    inside = [(key, *rest) for key, value in config.items() if isinstance(value, dict) for rest in options(value)]
    return [(key,) for key in config] + inside


@pytest.mark.parametrize("name", NAMES)
def test_options_of_another_kind_and_numbers_of_no_size_are_named(name):
    config = CONFIGS[name]
    for path in options(config):
        value = config
        for part in path:
            value = value[part]
        key = path[-1]
        if path[0] == "vision_config":  # of another model, which is not built
            continue
        if key in FREE or key == "vocab_size":
            continue
        extreme = [] if key in KINDS and key not in ("num_hidden_layers",) else EXTREME.get(type(value), [])
        # Factors of residuals and seeds: any number.
        extreme = [x for x in extreme if x != 10**11 or not (key.endswith("_factor") or key == "seed")]
        if name.startswith("nemotron_h") and key == "num_hidden_layers":
            extreme = []  # its own code takes the layers from their list
        for wrong in [*WRONG.get(type(value), []), *extreme]:
            with pytest.raises(ValueError) as caught:
                abstract_model(ModelConfig.of(changed(config, path, wrong)))
            assert key in str(caught.value), (path, wrong, caught.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**9, 10**11, 2**18 + 1, 10**400, -(10**400), 1e308, -1e308, 1e-320, math.inf, math.nan]),
    st.floats(allow_nan=True, width=32),
    st.text(max_size=3),
    st.recursive(st.integers(-1, 3) | st.text(max_size=2), lambda x: st.lists(x, max_size=2), max_leaves=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(data=st.data())
def test_any_value_of_any_option_builds_or_is_refused_by_the_name_of_an_option(data):
    config = CONFIGS[data.draw(st.sampled_from(NAMES))]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(options(config)))
        config = changed(config, path, data.draw(VALUES))
    try:
        abstract_model(ModelConfig.of(config))
    except ValueError as error:
        assert any(key in str(error) for key in (*config, "layer_types")), error


@pytest.mark.fast
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
@pytest.mark.parametrize("value", [10**9, 10**11, 10**400])
def test_sizes_beyond_all_models_are_refused_before_a_layer_is_built(monkeypatch, key, value):
    monkeypatch.setattr(nnx.Linear, "__init__", None)
    for name in ("gla", "mamba2", "qwen3_next", "zamba2", "rwkv6", "minimax", "bamba", "falcon_h1", "granitemoehybrid"):
        if key == "intermediate_size" and name == "mamba2":
            continue  # it must be the inner width
        with pytest.raises(ValueError, match=rf"{key} in config\.json must be at most "):
            glax.models.from_config(CONFIGS[name] | {key: value}, rngs=nnx.Rngs(0))


@pytest.mark.fast
def test_sizes_that_are_too_great_together_are_named():
    sizes = dict(hidden_size=2**16, vocab_size=2**22, model_type="gla")
    with pytest.raises(ValueError, match=r"at most \d+ parameters.*: vocab_size=4194304, hidden_size=65536"):
        glax.models.from_config(sizes | dict(num_hidden_layers=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"num_hidden_layers in config\.json must be at most 1024, got 1025"):
        glax.models.from_config(sizes | dict(num_hidden_layers=1025), rngs=nnx.Rngs(0))


@pytest.mark.fast
def test_a_config_with_more_layers_than_the_folder_has_tensors_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gla"] | dict(num_hidden_layers=1000)))
    (tmp_path / "model.safetensors").symlink_to(FIXTURES / "gla" / "model.safetensors")
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000 in config\.json is more than the \d+ tensors in"):
        glax.models.from_pretrained(tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize("value", [jnp.int32(16), 10**5000, {1, 2}], ids=["array", "long", "set"])
def test_values_that_json_cannot_hold_are_named(value):
    with pytest.raises(ValueError, match=r"hidden_size in config\.json must be a value of JSON: "):
        glax.models.from_config(CONFIGS["gla"] | dict(hidden_size=value), rngs=nnx.Rngs(0))


@pytest.mark.fast
@pytest.mark.parametrize("name", ["mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"])
def test_limits_of_steps_are_two_numbers_and_may_be_infinite(name):
    for limit in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0, 0.5]):
        abstract_model(ModelConfig.of(CONFIGS[name] | dict(time_step_limit=limit)))
    for wrong in (True, [True, 1.0], ["0", "1"], [0.0], "Infinity", [None, 1.0], 5):
        with pytest.raises(ValueError, match=r"time_step_limit in config\.json must be two numbers"):
            abstract_model(ModelConfig.of(CONFIGS[name] | dict(time_step_limit=wrong)))

"""Folders whose weights compressed-tensors and NVIDIA's Model Optimizer have quantized: tests/models/make_quantized.py."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax.models.dequantization import E2M1, THREADED_SIZE, packed_bits, unpacked, weight_of
from glax.models.folders import Weights
from glax.models.names import stacked_experts
from glax.models.quantization import DequantizedWeights, Scheme, without_quantization

FOLDER = pathlib.Path(__file__).parent / "quantized"
NAMES = sorted(path.name for path in FOLDER.iterdir())
GATE = "model.layers.1.mlp.gate_proj.weight"
COMPRESSED, OPTIMIZED = dict(quant_method="compressed-tensors"), dict(quant_method="modelopt", quant_algo="NVFP4")


def error(model, name: str):
    expected = load_file(FOLDER / name / "expected.safetensors")
    logits = np.asarray(model(expected["tokens"]), np.float64)
    return np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])


def changed(folder: pathlib.Path, name: str, change) -> pathlib.Path:
    """Return a copy of a folder, with `change(tensors)` of its weights."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    weights = Weights(folder)
    tensors = {key: weights.mapped(key) for key in weights.files}  # load_file reads no float8
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Return integers of 4 or 8 bits in words of 32, of which the lowest bits come first."""
    each = 32 // bits
    filled = np.pad(values + 2 ** (bits - 1), [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % each)])
    filled = filled.reshape(*values.shape[:-1], -1, each).astype(np.uint64) << bits * np.arange(each, dtype=np.uint64)
    return filled.sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


def dequantized(folder: pathlib.Path, tensors: dict[str, np.ndarray], scheme: Scheme) -> DequantizedWeights:
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return DequantizedWeights(folder, dict(dtype="float32"), scheme)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_weights_as_the_other_tool_dequantizes_them(name):
    assert error(glax.models.from_pretrained(FOLDER / name, dtype=jnp.float32), name) < 2e-5


@pytest.mark.core
def test_the_file_of_older_versions_of_model_optimizer_is_read_where_the_config_names_no_quantization(tmp_path):
    shutil.copytree(FOLDER / "modelopt_nvfp4", tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert error(glax.models.from_pretrained(tmp_path), "modelopt_nvfp4") < 2e-5


@pytest.mark.core
@pytest.mark.parametrize("place", ["config", "text_config"])
def test_the_quantization_in_the_config_wins_over_the_file_of_older_versions(place, tmp_path):
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(dict(quantization=dict(quant_algo="W4A16_AWQ"))))
    options = dict(quantization_config=OPTIMIZED)
    values = dict(model_type="kimi_k3") | (options if place == "config" else dict(text_config=options))
    found, scheme = without_quantization(glax.models.ModelConfig.of(values), tmp_path)
    assert scheme is not None
    assert "quantization_config" not in found.text
    with pytest.raises(glax.models.UnsupportedOption, match=r"^quantization\.quant_algo=.* in hf_quant_config\.json"):
        without_quantization(found, tmp_path)


@pytest.mark.core
@pytest.mark.parametrize("file", ["hf_quant_config.json", "config.json"])
def test_a_folder_of_quantized_cached_keys_alone_is_read_as_it_is(file, tmp_path):
    fixture = FOLDER.parent / "fixtures" / "qwen3"
    shutil.copytree(fixture, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{x}_proj.{x}_scale": np.float32([0.5]) for x in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    if file == "config.json":
        values = json.loads((tmp_path / file).read_text())
        content = values | dict(quantization_config=dict(quant_method="modelopt", kv_cache_scheme=dict(num_bits=8)))
    else:
        content = dict(quantization=dict(quant_algo=None, kv_cache_quant_algo="FP8"))
    (tmp_path / file).write_text(json.dumps(content))
    tokens = jnp.arange(5)[None]
    want = glax.models.from_pretrained(fixture)(tokens)
    np.testing.assert_array_equal(glax.models.from_pretrained(tmp_path)(tokens), want)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_fp8"])
def test_a_folder_is_saved_dequantized(name, tmp_path):
    model = glax.models.from_pretrained(FOLDER / name)
    glax.models.save_pretrained(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert not [key for key in saved if not key.endswith((".weight", ".A_log", ".dt_bias"))]
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = glax.models.from_pretrained(tmp_path)
    assert error(again, name) < 2e-5
    wide = glax.models.from_pretrained(FOLDER / name, dtype=jnp.bfloat16, only=r"layers\.1\.mlp")
    kernel = wide.blocks[1].mlp.gate.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, again.blocks[1].mlp.gate.kernel[...].astype(jnp.bfloat16))


def test_weights_are_formed_shard_by_shard():
    mesh = jax.make_mesh((1,), ("tensor",))
    assert error(glax.models.from_pretrained(FOLDER / "int4_asymmetric", mesh=mesh), "int4_asymmetric") < 2e-5


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    [
        "k_scale", "v_zero_point", "k_global_scale", "k_proj.k_bias", "q_proj.input_global_scale", "q_proj.output_scale",
        "q_proj.output_zero_point", "q_proj.output_global_scale",
    ],
)  # fmt: skip
def test_what_belongs_to_activations_and_cached_keys_is_not_read(name, tmp_path):
    name = f"model.layers.0.self_attn.{name}"
    tensors = {name: np.ones((2, 1, 1), np.float32), "model.layers.0.self_attn.k_proj.bias": np.ones(2, np.float32)}
    assert dequantized(tmp_path, tensors, Scheme(())).names() == {"model.layers.0.self_attn.k_proj.bias"}


# ---- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_rows_so_short_that_their_bits_are_unknown_are_refused():
    with pytest.raises(ValueError, match="must hold 4 integers of 4 or 8 bits a row, got 1 words"):
        packed_bits(1, 4)


@pytest.mark.core
def test_the_sizes_of_a_block_may_be_a_string_as_in_older_files():
    group = dict(targets=["Linear"], weights=dict(num_bits=8, type="float", strategy="block", block_structure="24x40"))
    values = dict(quantization_config=COMPRESSED | dict(format="fakequant", config_groups={"group_0": group}))
    _, scheme = without_quantization(glax.models.ModelConfig.of(values))
    assert scheme == Scheme(((24, 40),))


@pytest.mark.core
def test_floats_of_4_bits_are_those_of_ml_dtypes():
    byte = np.arange(256, dtype=np.uint8)
    lower, upper = ((byte >> shift & 15).view(ml_dtypes.float4_e2m1fn) for shift in (0, 4))
    np.testing.assert_array_equal(E2M1, np.stack([lower, upper], -1).astype(np.float32))


@pytest.mark.core
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [5, 7, 8, 33])
def test_packed_integers_are_read_from_the_lowest_bits_on(bits, columns):
    values = np.random.default_rng(columns).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, columns))
    words = packed(values, bits)
    assert packed_bits(words.shape[1], columns) == bits
    np.testing.assert_array_equal(unpacked(words, columns, bits), values)


@pytest.mark.core
def test_4_bit_floats_have_a_scale_of_16_columns_and_one_of_the_weight():
    """With a scale of each row and 16 columns, and one of the whole weight."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (10, 16), dtype=np.uint8)
    scale, whole = rng.uniform(0.5, 2, (10, 2)).astype(ml_dtypes.float8_e4m3fn), np.float32(0.7)
    found = weight_of(codes, {"_scale": scale, "_scale_2": np.array(whole)}, ()).rows(slice(2, 9), np.dtype(np.float32))
    want = E2M1[codes].reshape(10, 32) * np.repeat(scale.astype(np.float64), 16, -1) * float(whole)
    np.testing.assert_allclose(found, want[2:9], rtol=1e-6)


@pytest.mark.core
def test_blocks_that_do_not_divide_a_weight_of_several_threads():
    rows, columns = 1100, 1000
    assert rows * columns > THREADED_SIZE
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
    scale, zero = rng.uniform(0.5, 2, (9, 11)).astype(np.float32), rng.integers(-9, 9, (9, 11), dtype=np.int8)
    weight = weight_of(codes, {"_scale": scale, "_zero_point": zero}, ((128, 96),))
    at = np.arange(rows)[:, None] // 128, np.arange(columns)[None] // 96
    want = ((codes - zero.astype(np.float64)[at]) * scale[at]).astype(np.float32)
    np.testing.assert_array_equal(weight.rows(slice(5, 1098), np.dtype(np.float32)), want[5:1098])


@pytest.mark.core
def test_packed_experts_of_one_tensor_are_read_whole_and_one_by_one(tmp_path):
    rng = np.random.default_rng(2)
    codes, zero = rng.integers(-8, 8, (3, 10, 70)), rng.integers(-8, 8, (3, 10, 3))
    scale, name = rng.uniform(0.5, 2, (3, 10, 3)).astype(np.float32), "model.layers.0.mlp.experts.gate_up_proj"
    beside = {
        "_scale": scale,
        "_zero_point": packed(zero.swapaxes(1, 2), 4).swapaxes(1, 2),
        "_shape": np.array([3, 10, 70]),
    }
    tensors = {name + end: x for end, x in ({"_packed": packed(codes, 4)} | beside).items()}
    weights = dequantized(tmp_path, tensors, Scheme(((1, 32),), has_zeros=True))
    group = np.arange(70) // 32
    want = ((codes - zero[..., group]) * scale[..., group]).astype(np.float32)
    assert weights.header(name).get_shape() == [3, 10, 70]
    np.testing.assert_array_equal(weights.read(name), want)
    weights.divide(stacked_experts(r"model\.layers\.\d+\.mlp"))
    np.testing.assert_array_equal(weights.read("model.layers.0.mlp.experts.1.up_proj.weight"), want[1, 5:])


@pytest.mark.core
@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_leading_axes_of_weights_number_matrices_of_their_own(leading, tmp_path):
    rng, name = np.random.default_rng(3), "model.visual.patch_embed.proj.weight"
    codes = rng.standard_normal((2, 3, 4, 6)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (*leading, 1, 1)).astype(np.float32)
    weights = dequantized(tmp_path, {name: codes, name + "_scale": scale}, Scheme(()))
    assert weights.header(name).get_shape() == [2, 3, 4, 6]
    np.testing.assert_array_equal(weights.read(name), codes.astype(np.float32) * scale)


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (COMPRESSED | dict(format="marlin-24"), "quantization_config.format='marlin-24'"),
        (COMPRESSED | dict(format="mxfp6-pack-quantized"), "quantization_config.format='mxfp6-pack-quantized'"),
        (COMPRESSED | dict(config_groups={"a": dict(format="sparse-24-bitmask")}), "config_groups.a.format='sparse"),
        (
            COMPRESSED | dict(sparsity_config=dict(format="sparse-24-bitmask")),
            "quantization_config.sparsity_config={'format'",
        ),
        (
            COMPRESSED | dict(transform_config=dict(config_groups={"R1": {}})),
            "quantization_config.transform_config={'config",
        ),
        (
            COMPRESSED | dict(config_groups={"a": dict(weights=dict(block_structure=[0, 8]))}),
            "quantization_config.config_groups.a.weights.block_structure=[0, 8]",
        ),
        (
            COMPRESSED | dict(moe_sparsity_config=dict(method="novice", num_experts=[3])),
            "quantization_config.moe_sparsity_config={'method'",
        ),
        (COMPRESSED | dict(config_groups={"W8A8": ["Linear"]}), "quantization_config.config_groups.W8A8=['Linear']"),
        (dict(quant_method="fp8", weight_block_size="0x8"), "quantization_config.weight_block_size='0x8'"),
        (dict(quant_method="fp8", weight_block_size=128), "quantization_config.weight_block_size=128 in config.json"),
        (
            COMPRESSED | dict(config_groups={"a": dict(weights=dict(num_bits=7))}),
            "quantization_config.config_groups.a.weights.num_bits=7",
        ),
        (COMPRESSED | dict(config_groups=[1]), "it must hold JSON objects"),
        (OPTIMIZED | dict(quant_algo="W4A16_AWQ"), "quantization_config.quant_algo='W4A16_AWQ'"),
        (
            OPTIMIZED | dict(quantized_layers={"x": dict(quant_algo="NVFP4_AWQ")}),
            "quantized_layers.x.quant_algo='NVFP4_AWQ'",
        ),
        (
            dict(quant_method="gptq"),
            "must be one of 'fp8', 'compressed-tensors', 'modelopt'. Otherwise load",
        ),
        (dict(quant_method=["fp8"]), "quantization_config.quant_method=['fp8'] in config.json"),
    ],
    ids=str,
)
def test_other_quantizations_are_refused_by_name(quantization, text):
    values = json.loads((FOLDER / "nvfp4" / "config.json").read_text()) | dict(quantization_config=quantization)
    with pytest.raises(glax.models.UnsupportedOption) as caught:
        glax.models.from_config(values, rngs=nnx.Rngs(0))
    assert text in str(caught.value)


@pytest.mark.core
def test_an_option_within_text_config_is_refused_by_its_path():
    config = glax.models.ModelConfig.of(dict(text_config=dict(quantization_config=dict(quant_method="awq"))))
    with pytest.raises(glax.models.UnsupportedOption, match=r"^text_config\.quantization_config\.quant_method="):
        without_quantization(config)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("nvfp4", {GATE + "_scale": None}, "gate_proj.weight_packed in .* is quantized and must come with"),
        ("float8_tensor", {GATE + "_scale": None}, "is quantized and must come with"),
        (
            "float8_block",
            {GATE + "_scale": np.ones((3, 7), np.float32)},
            r"its scales must be one number, or fit blocks of \[24, 40\]",
        ),
        (
            "int4_group",
            {GATE + "_shape": np.array([96, 640])},
            "its codes must hold 640 integers of 4 or 8 bits a row, got 8 words",
        ),
        (
            "int4_group",
            {GATE + "_shape": None},
            r"gate_proj\.weight_packed in .* cannot be dequantized: what is called _shape",
        ),
        ("int4_asymmetric", {GATE + "_zero_point": np.zeros((3, 2), np.int32)}, "cannot be dequantized"),
        ("modelopt_nvfp4", {"x.pre_quant_scale": np.ones(3, np.float32)}, r"x\.pre_quant_scale in .* is not supported"),
        (
            "nvfp4",
            {GATE + "_global_scale": None},
            "one of _scale_2 and _global_scale with scales of float8_e4m3fn, got none",
        ),
        ("nvfp4", {GATE + "_scale_2": np.ones(1, np.float32)}, "got _scale_2 and _global_scale"),
        ("mxfp4", {GATE + "_scale_2": np.ones(1, np.float32)}, "none of _scale_2 and .* scales of uint8, got _scale_2"),
        ("int4_group", {GATE + "_scale_inv": np.ones((96, 4), np.float32)}, "one of _scale_inv and _scale, got both"),
        ("int4_group", {GATE + "_scale": np.ones((96, 4), np.int64)}, "the scales of int32 must be of float16 or"),
        ("int4_asymmetric", {GATE + "_zero_point": None}, "must come with .*gate_proj.weight_zero_point"),
        (
            "nvfp4",
            {GATE + "_packed": np.ones((96, 64), np.float32)},
            "weight_packed in .* must be of U8 or I32, got F32",
        ),
        ("nvfp4", {GATE: np.ones((96, 64), np.float32)}, "gate_proj.weight in .* exclude each other"),
        ("float8_channel", {GATE + "_scale": np.ones((96, 0), np.float32)}, "its scales must be one number, or fit"),
        ("float8_channel", {GATE: np.ones((0, 64), ml_dtypes.float8_e4m3fn)}, "must have at least 2 axes, .*, got "),
        ("float8_channel", {GATE: np.ones(64, ml_dtypes.float8_e4m3fn)}, "must have at least 2 axes, .*, got "),
        ("float8_channel", {GATE: np.ones((), ml_dtypes.float8_e4m3fn)}, "must have at least 2 axes, .*, got "),
        ("int4_group", {GATE + "_shape": np.array([96, np.inf], np.float32)}, "must be integers"),
        ("int4_group", {GATE + "_g_idx": np.zeros(64, np.int32)}, r"weight_g_idx in .* is not supported"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_named(name, change, text, tmp_path):
    def apply(tensors):
        for key, value in change.items():
            tensors.pop(key, None)
            if value is not None:
                tensors[key] = value

    folder = changed(tmp_path, name, apply)
    with pytest.raises(ValueError, match=text):
        glax.models.from_pretrained(folder)

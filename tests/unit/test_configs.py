"""Configs of published kinds: keys that the models' own code does not read, values that are off, and rotary positions."""

import json
import logging
import pathlib

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import glax.models
from glax.models.config import ModelConfig
from glax.models.load import abstract_model
from glax.models.read_keys import READ_KEYS
from glax.nn import Attention, MultiHeadLatentAttention
from glax.nn.passes import Parallel, Step
from glax.nn.rotary import Rotation

pytestmark = pytest.mark.fast
MODELS = pathlib.Path(__file__).parents[1] / "models"
TINY = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1)
GLA = dict(model_type="gla", num_heads=2, intermediate_size=16, **TINY)
BAMBA = dict(
    model_type="bamba", num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=4, attn_layer_indices=[0], **TINY
)


def built(config: dict) -> glax.models.CausalLM:
    return nnx.eval_shape(lambda: glax.models.from_config(config, rngs=nnx.Rngs(0)))


def test_a_key_that_the_models_own_code_does_not_read_is_named_once_and_saved(caplog, tmp_path):
    extra = dict(share_conv_kernel=True, init_method="mup", shared_moe_mode="sigmoid")
    with caplog.at_level(logging.INFO, logger="glax"):
        model = glax.models.from_config(GLA | extra, rngs=nnx.Rngs(0))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "does not read: init_method, share_conv_kernel, shared_moe_mode" in caplog.text
    glax.models.save_pretrained(model, tmp_path)
    assert extra.items() <= json.loads((tmp_path / "config.json").read_text()).items()


@pytest.mark.parametrize(
    ("config", "extra", "named"),
    [
        (GLA, dict(rope_scaling=dict(type="linear", factor=2.0)), "'gla': rope_scaling={'factor'"),
        (GLA, dict(per_layer_config={"0": dict(num_heads=4)}), "'gla': per_layer_config={'0'"),
        (BAMBA, dict(is_causal=False), "'bamba': is_causal=False"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_key_that_it_reads_is_refused_by_name(config, extra, named):
    with pytest.raises(glax.models.UnsupportedOption) as caught:
        built(config | extra)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("config", "inside", "names"),
    [
        (GLA, dict(attn=[dict(layers=[0], num_heads=2, head_dim=8, qk_norm=True)]), "attn.head_dim, attn.qk_norm, zz"),
        (BAMBA, dict(rope_parameters=dict(rope_type="default", full_attention=None)), "zz"),
        (
            BAMBA,
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0, finetuned=True, mrope_section=[1, 1], zz=None)),
            "rope_scaling.finetuned, rope_scaling.mrope_section, rope_scaling.zz, zz",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_name_inside_an_option_that_no_code_reads_is_named_once_and_saved(config, inside, names, caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="glax"):
        model = glax.models.from_config(config | inside | dict(zz=1), rngs=nnx.Rngs(0))
    assert [record.getMessage().partition("does not read: ")[2] for record in caplog.records] == [names]
    glax.models.save_pretrained(model, tmp_path)
    assert inside.items() <= json.loads((tmp_path / "config.json").read_text()).items()


@pytest.mark.parametrize(
    "name",
    [
        "comba",
        "delta_net",
        "gated_deltanet",
        "gated_deltaproduct",
        "gla",
        "gsa",
        "hgrn",
        "hgrn2",
        "kda",
        "mamba2_fla",
        "retnet",
        "rwkv6",
        "rwkv7",
    ],
)
def test_the_older_name_of_an_epsilon_is_not_read(name, caplog):
    """fla-core 0.6.0 reads norm_eps alone, in all its types."""
    config = ModelConfig.read(MODELS / "fixtures" / name).values
    with caplog.at_level(logging.INFO, logger="glax"):
        model = abstract_model(ModelConfig.of(config | dict(rms_norm_eps=1e-3)))
    assert "rms_norm_eps" in caplog.text
    norms = {module.epsilon for _, module in nnx.iter_modules(model) if hasattr(module, "epsilon")}
    assert norms and 1e-3 not in norms


@pytest.mark.parametrize("name", sorted(glax.models.MODEL_TYPES.keys() | {"mamba2_fla", "mamba2_attention"}))
def test_every_type_follows_the_rule(name, caplog):
    config = ModelConfig.read(MODELS / "fixtures" / name).values
    unread = dict(zz_number=0.5, zz_list=[1], zz_object=dict(a=dict(b=None)), zz_none=None, zz_word="x")
    with caplog.at_level(logging.INFO, logger="glax"):
        abstract_model(ModelConfig.of(config | unread))
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("zz_list, zz_none, zz_number, zz_object, zz_word")
    read = dict(d_intermediate=8) if "ssm_cfg" in config else dict(per_layer_config={"0": dict(hidden_size=8)})
    if "text_config" in config:
        read = dict(text_config=config["text_config"] | read)
    with pytest.raises(glax.models.UnsupportedOption, match=next(iter(read))):
        abstract_model(ModelConfig.of(config | read))


def test_a_value_that_is_off_is_accepted():
    off = dict(rope_scaling=None, per_layer_config={}, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    built(GLA | off)
    built(BAMBA | dict(is_causal=True, vision_feature_layer=None, number_of_conv_states=0))


@pytest.mark.parametrize("name", ["bamba", "falcon_h1"])
def test_a_list_of_kinds_that_other_options_determine_must_agree(name):
    """transformers 5.24.0 raises for such a list of these two types, for it derives the kinds."""
    config = ModelConfig.read(MODELS / "fixtures" / name).values
    layers, chosen = config["num_hidden_layers"], config.get("attn_layer_indices") or []
    words = ["hybrid"] * layers if name == "falcon_h1" else ["mamba"] * layers
    words = ["attention" if layer in chosen else word for layer, word in enumerate(words)]
    for key in ("layer_types", "layers_block_type"):
        abstract_model(ModelConfig.of(config | {key: words}))
        with pytest.raises(glax.models.UnsupportedOption, match=f"^{key}="):
            abstract_model(ModelConfig.of(config | {key: ["attention"] * layers}))


def test_lists_of_layers_of_jamba_must_agree_with_its_periods():
    config = ModelConfig.read(MODELS / "fixtures" / "jamba").values
    config |= dict(num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2)
    config |= dict(expert_layer_offset=0, num_experts=4, num_experts_per_tok=2)
    words = dict(layers_block_type=["mamba", "attention", "mamba", "mamba"], layers_num_experts=[4, 1, 4, 1])
    words |= dict(layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"])
    abstract_model(ModelConfig.of(config | words))
    for key, wrong in words.items():
        with pytest.raises(glax.models.UnsupportedOption, match=f"^{key}="):
            abstract_model(ModelConfig.of(config | {key: wrong[::-1]}))


@pytest.mark.parametrize(("key", "value"), [("norm_eps", 1), ("fuse_norm", True), ("dt_rank", 1)])
def test_a_config_of_mamba_1_of_fla_has_its_defaults_and_its_activations(key, value):
    config = dict(model_type="mamba", hidden_size=16, num_hidden_layers=1, vocab_size=32)
    assert abstract_model(ModelConfig.of(config)).head is None  # transformers ties it
    config |= {key: value}
    assert abstract_model(ModelConfig.of(config)).head is not None
    with pytest.raises(glax.models.UnsupportedOption, match=r"^hidden_act='gelu' "):
        abstract_model(ModelConfig.of(config | dict(hidden_act="gelu")))


@pytest.mark.parametrize("ssm", [{}, dict(layer="Mamba1")])
def test_a_folder_of_mamba_1_of_state_spaces_names_the_folders_that_load(ssm):
    config = dict(d_model=16, n_layer=1, vocab_size=32, ssm_cfg=ssm, rms_norm=True, fused_add_norm=True)
    with pytest.raises(glax.models.UnsupportedOption, match=r"^ssm_cfg\.layer='Mamba1' .* on the Hub end in -hf"):
        abstract_model(ModelConfig.of(config))


@pytest.mark.parametrize("value", [2.5, 3])
def test_the_divisor_of_log_gates_of_gsa_may_be_any_number_above_0(value):
    config = ModelConfig.read(MODELS / "fixtures" / "gsa").values
    model = abstract_model(ModelConfig.of(config | dict(gate_logit_normalizer=value)))
    assert model.blocks[0].attn.temperature == value
    for wrong in (0, 0.0, -1.5, "8"):
        with pytest.raises(ValueError, match=r"gate_logit_normalizer in config\.json must be"):
            abstract_model(ModelConfig.of(config | dict(gate_logit_normalizer=wrong)))


def test_null_is_false_for_flags_that_may_be_null_in_transformers():
    config = ModelConfig.read(MODELS / "fixtures" / "falcon_h1").values
    null = ("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias")
    model, want = (abstract_model(ModelConfig.of(config | dict.fromkeys(null, value))) for value in (None, False))
    assert nnx.graphdef(model.blocks) == nnx.graphdef(want.blocks)


def test_a_granite_without_experts_may_have_any_width_for_them():
    config = ModelConfig.read(MODELS / "fixtures" / "granitemoehybrid").values
    abstract_model(ModelConfig.of(config | dict(num_local_experts=0, num_experts_per_tok=0, intermediate_size=0)))


def test_a_model_without_experts_may_have_any_values_for_them():
    sizes = dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, mamba_num_heads=2, mamba_head_dim=8, n_groups=1
    )
    config = dict(model_type="nemotron_h", hybrid_override_pattern="M*-", intermediate_size=24, **sizes, **TINY)
    built(
        config | dict(n_routed_experts=None, moe_intermediate_size=0, num_experts_per_tok=0, num_nextn_predict_layers=1)
    )


def test_both_spellings_of_an_option_take_the_value_that_its_own_code_takes():
    """Nemotron-H's code prefers the names that begin with mamba_."""
    sizes = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, mamba_num_heads=4, mamba_head_dim=8)
    config = dict(model_type="nemotron_h", hybrid_override_pattern="M", **sizes, **TINY)
    assert built(config | dict(n_groups=4, mamba_n_groups=2)).blocks[0].mixer.groups == 2


def test_the_kinds_of_minimax_come_from_layer_types_and_else_from_the_original_list():
    config = dict(model_type="minimax", num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, **TINY)
    config |= dict(num_hidden_layers=2, attn_type_list=[1, 0])
    assert built(config).kinds == ("full_attention", "linear_attention")
    words = ["linear_attention", "full_attention"]
    assert built(config | dict(layer_types=words)).kinds == tuple(words)


def test_every_type_has_its_keys():
    inner = {
        "glm5_next_text",
        "kimi_k3_text",
        "bailing_moe_v2_5",
    }  # a part of another type's config, and older code of a type
    assert {code.split("_fla")[0].split("_state")[0] for code in READ_KEYS} - inner == set(glax.models.MODEL_TYPES)
    assert all("vocab_size" in keys or "text_config" in keys for keys in READ_KEYS.values())


# ---- rotary positions ------------------------------------------------------------------------------------------------

ROTARY = json.loads((MODELS / "rotary.json").read_text())


@pytest.mark.parametrize("case", ROTARY, ids=lambda case: f"{case['config']['model_type']}-{case['kind']}")
def test_inverse_frequencies_are_those_of_transformers(case):
    """The expected numbers are float32."""
    model = built(case["config"])
    [rotation] = {layer.rotation for _, layer in nnx.iter_modules(model) if isinstance(layer, Attention)}
    np.testing.assert_allclose(rotation.frequencies, case["frequencies"], rtol=5e-7)
    assert rotation.factor == pytest.approx(case["factor"], rel=1e-12)
    if case["long"] is not None:
        np.testing.assert_allclose(rotation.long, case["long"], rtol=5e-7)


def rotations(name: str, **more) -> list[Rotation | None]:
    config = ModelConfig.read(MODELS / "fixtures" / name).values
    config = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    model = abstract_model(ModelConfig.of(config | more))
    return [
        layer.rotation
        for _, layer in nnx.iter_modules(model)
        if isinstance(layer, Attention | MultiHeadLatentAttention)
    ]


def test_a_theta_of_null_counts_only_where_positions_rotate():
    """In transformers 5.24.0 the theta of rope_parameters replaces it, and granite's models without rotation do not read it."""
    assert set(rotations("granitemoehybrid", rope_theta=None, position_embedding_type="nope")) == {None}
    inside = dict(rope_theta=77.0, rope_type="default")
    given = rotations("falcon_h1", rope_theta=None, rope_parameters=inside)
    assert given == rotations("falcon_h1", rope_theta=77.0)
    for name in ("bamba", "falcon_h1", "minimax", "qwen3_next"):
        with pytest.raises(ValueError, match=r"^rope_theta in config\.json must be a finite number, got None"):
            rotations(name, rope_theta=None)


def test_a_rotary_share_of_null_is_the_whole_head_unless_the_type_fixes_it():
    """As in transformers 5.24.0, whose Qwen3-Next then rotates all channels, and whose Bamba half of them."""
    assert rotations("qwen3_next", partial_rotary_factor=None) == rotations("qwen3_next", partial_rotary_factor=1.0)
    assert rotations("bamba", partial_rotary_factor=None) == rotations("bamba")
    assert rotations("falcon_h1", partial_rotary_factor=None) == rotations("falcon_h1")


def test_the_longest_sequence_scales_positions_under_the_name_that_transformers_saves():
    """transformers 5.24.0 saves Ling-3's max_position_embeddings as model_max_length. It does not take the original length from
    there."""
    longrope = dict(rope_type="longrope", short_factor=[1.0] * 2, long_factor=[2.0] * 2)
    for original in (dict(original_max_position_embeddings=16), {}):
        [found] = rotations("bailing_hybrid", rope_scaling=longrope | original, model_max_length=2**20)
        assert found is not None
        first = original.get("original_max_position_embeddings", 262144)
        assert found.factor == pytest.approx(np.sqrt(1 + np.log(2**20 / first) / np.log(first)))


def test_only_sequences_that_are_long_take_the_long_frequencies():
    """Four sequences, of 3, 5, 0 and 2 tokens, by cu_seqlens and by segment_ids; and single tokens."""
    rotation = Rotation((1.0, 0.1), 2.0, (0.5, 0.01), 4)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]], np.int32)
    is_long = np.array([0, 0, 0, 1, 1, 1, 1, 1, 0, 0], bool)[None, :, None]
    angles = positions[..., None] * np.where(is_long, rotation.long, rotation.frequencies)
    want = np.angle(np.exp(1j * angles))
    packed = Parallel((1, 10), cu_seqlens=np.array([0, 3, 8, 8, 10]))
    np.testing.assert_allclose(rotation.angles(positions, packed.last_positions), want, atol=1e-6)
    segments = Parallel((1, 10), segment_ids=np.array([[3, 3, 3, 7, 7, 7, 7, 7, 1, 1]]))
    np.testing.assert_allclose(rotation.angles(positions, segments.last_positions), want, atol=1e-6)
    np.testing.assert_allclose(rotation.angles(positions[0], Step().last_positions)[7], want[0, 7], atol=1e-6)
    last = Parallel((2, 5)).last_positions(np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]))
    np.testing.assert_array_equal(last, [[4] * 5, [7] * 5])


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (
            dict(rope_type="dynamic", factor=2.0),
            "rope_type must be one of 'default', 'linear', 'llama3', 'longrope', 'proportional', 'yarn'",
        ),
        (dict(rope_type="linear"), "rope_type 'linear' must come with factor"),
        (dict(rope_type="linear", factor=0), "rope_scaling.factor in config.json must be above 0, got 0"),
        (dict(rope_type="longrope", short_factor=[1.0, 2.0], long_factor=[1.0]), "it must be 1 numbers above 0"),
        (
            dict(rope_type="llama3", factor=2.0, low_freq_factor=4, high_freq_factor=1),
            "must be below high_freq_factor=1",
        ),
    ],
    ids=lambda x: x["rope_type"] if isinstance(x, dict) else "",
)
def test_scalings_that_are_not_supported_are_named(inside, text):
    with pytest.raises(ValueError) as caught:
        built(BAMBA | dict(rope_scaling=inside))
    assert text in str(caught.value)


LFM3 = dict(TINY, model_type="lfm3", num_hidden_layers=5, intermediate_size=8, head_dim=8, pad_token_id=None)
YARN = dict(rope_type="yarn")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (dict(rope_parameters={}), "rope_parameters.sliding_attention=None in config.json is not supported"),
        (dict(rope_parameters=dict(rope_type="default")), "rope_parameters.sliding_attention=None"),
        (dict(rope_scaling=YARN | dict(factor=2.0)), "rope_scaling.sliding_attention=None"),
        (dict(rope_parameters=dict(full_attention=YARN, sliding_attention={})), "'yarn' must come with factor"),
        (dict(head_dim=7), "a head must have an even number of channels, got 7"),
        (dict(sliding_window=None), "sliding_window in config.json must be an integer of at least 1, got None"),
    ],
)
def test_positions_by_kind_of_layer_that_are_not_supported_are_named(more, text):
    with pytest.raises(ValueError) as caught:
        built(LFM3 | more)
    assert text in str(caught.value)


def test_what_the_code_of_positions_by_kind_does_not_read_has_no_effect():
    """It reads `truncate` beside the kinds alone, and the share of a head for one rope_type."""
    own = (
        dict(rope_type="default", partial_rotary_factor=None),
        dict(rope_type="proportional", partial_rotary_factor=0.0),
    )
    model = built(LFM3 | dict(rope_parameters=dict(zip(("sliding_attention", "full_attention"), own, strict=True))))
    turns = [np.asarray(block.attn.rotation.frequencies) for block in model.blocks if isinstance(block.attn, Attention)]
    assert [int((each != 0).sum()) for each in turns] == [0, 4]
    scaled = YARN | dict(rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    found = []
    for inside, beside in (({}, {}), (dict(truncate=False), {}), ({}, dict(truncate=False))):
        parts = dict(full_attention=scaled | inside, **beside)
        model = built(LFM3 | dict(rope_parameters=parts, layer_types=["full_attention"] * 5))
        found.append(model.blocks[0].attn.rotation.frequencies)
    assert found[0] == found[1] != found[2]


def test_positions_of_kinds_that_no_layer_has_are_not_asked_for():
    built(LFM3 | dict(rope_parameters={}, sliding_window=None, layer_types=["conv"] * 5))
    built(LFM3 | dict(rope_parameters=dict(full_attention={}), layer_types=["conv"] * 4 + ["full_attention"]))


# ---- float8 ----------------------------------------------------------------------------------------------------------


def test_float8_weights_are_read_with_the_scale_of_each_block(tmp_path, caplog):
    """Blocks of 8 x 12 do not divide the weights. The product is formed in float64 and rounded once to float32."""
    model = glax.models.from_config(GLA, rngs=nnx.Rngs(0))
    glax.models.save_pretrained(model, tmp_path)
    rng, tensors, want = np.random.default_rng(0), load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = weight = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.5, 2, (-(-rows // 8), -(-columns // 12))).astype(np.float32)
        tensors[name + "_scale_inv"] = scale
        at = np.arange(rows)[:, None] // 8, np.arange(columns)[None] // 12
        want[name] = (weight.astype(np.float64) * scale.astype(np.float64)[at]).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[8, 12])
    quantization |= dict(load_in_8bit=False, act_per_tensor=True, kv_cache_scheme={"num_bits": 8})  # none is read or on
    (tmp_path / "config.json").write_text(json.dumps(GLA | dict(dtype="float32", quantization_config=quantization)))
    with caplog.at_level(logging.INFO, logger="glax"):
        read = glax.models.from_pretrained(tmp_path)
    assert "does not read: quantization_config.act_per_tensor, quantization_config.kv_cache_scheme" in caplog.text
    np.testing.assert_array_equal(read.blocks[0].attn.query.kernel[...].T, want["model.layers.0.attn.q_proj.weight"])
    glax.models.save_pretrained(read, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not [name for name in saved if "scale" in name]
    for name, value in want.items():
        np.testing.assert_array_equal(saved[name], value)


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (
            dict(quant_method="awq"),
            "quantization_config.quant_method='awq' in config.json is not supported for model_type 'gla': it must be one of "
            "'fp8', 'compressed-tensors', 'modelopt'. Otherwise",
        ),
        (dict(quant_method="fp8", activation_scheme="static"), "quantization_config.activation_scheme='static'"),
        (
            dict(quant_method="fp8", weight_block_size=[0, 1]),
            "weight_block_size=[0, 1] in config.json is not supported",
        ),
        (dict(quant_method="fp8", load_in_8bit=True), "quantization_config.load_in_8bit=True"),
    ],
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_other_quantizations_are_refused_with_the_remedy(quantization, text):
    with pytest.raises(glax.models.UnsupportedOption) as caught:
        built(GLA | dict(quantization_config=quantization))
    assert text in str(caught.value)


# ---- softmax attention of the state-spaces repository ----------------------------------------------------------------

STATE_SPACES = dict(d_model=16, n_layer=2, vocab_size=32, ssm_cfg=dict(layer="Mamba2", d_state=8, headdim=8))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (dict(attn_layer_idx=[2]), "attn_layer_idx=[2] in config.json is not supported"),
        (dict(attn_layer_idx=[1], attn_cfg=dict(num_heads=2)), "attn_cfg.causal=False in config.json is not supported"),
        (dict(attn_layer_idx=[1], attn_cfg=dict(num_heads=2, causal=True, mlp_dim=8)), "attn_cfg.mlp_dim=8"),
        (dict(attn_layer_idx=[1], attn_cfg=dict(num_heads=2, causal=True, made_up=1)), "attn_cfg.made_up=1"),
        (dict(d_intermediate=8), "d_intermediate=8 in config.json is not supported for model_type 'mamba2'"),
    ],
    ids=str,
)
def test_options_of_state_spaces_that_are_not_supported_are_named(more, text):
    with pytest.raises(ValueError) as caught:
        built(STATE_SPACES | more)
    assert text in str(caught.value)

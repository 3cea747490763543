"""Write tests/models/rotary.json: the inverse frequencies that transformers forms for scaled rotary positions, in float32.

env/bin/python tests/models/make_rotary.py, in the environment of make_fixtures.py
"""

import copy
import importlib
import json
import pathlib

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TINY = dict(vocab_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MAMBA = TINY | dict(mamba_n_heads=4)
BAMBA = MAMBA | dict(model_type="bamba", hidden_size=128, attn_layer_indices=[1])
QWEN = TINY | dict(
    model_type="qwen3_next", num_hidden_layers=4, hidden_size=128, head_dim=64, partial_rotary_factor=0.5
)
FALCON = MAMBA | dict(model_type="falcon_h1", hidden_size=128, head_dim=32, mamba_d_ssm=None)
GRANITE = MAMBA | dict(
    model_type="granitemoehybrid", hidden_size=64, position_embedding_type="rope", layer_types=["full_attention"] * 2
)
MINIMAX = TINY | dict(model_type="minimax", hidden_size=64, head_dim=16)
ZAMBA = TINY | dict(
    model_type="zamba2", hidden_size=64, use_mem_rope=True, layers_block_type=["linear_attention", "hybrid"]
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
PROPORTIONAL = dict(rope_type="proportional", rope_theta=1e5, partial_rotary_factor=0.3)
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
CASES = (
    BAMBA | dict(rope_scaling=dict(type="yarn", factor=4.0), max_position_embeddings=4096),
    BAMBA | dict(rope_scaling=dict(rope_type="linear", factor=2.5), rope_theta=5e5),
    QWEN | dict(
        rope_theta=1e7, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=262144)),
    QWEN | dict(max_position_embeddings=32768, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=8.0, beta_fast=20, beta_slow=2, mscale=0.7, mscale_all_dim=0.3,
        truncate=False, partial_rotary_factor=0.25)),
    FALCON | dict(rope_theta=1e5, rope_scaling=LLAMA3 | dict(original_max_position_embeddings=8192)),
    FALCON | dict(
        rope_theta=1e11, rope_scaling=dict(type="yarn", factor=None, attention_factor=0.9),
        original_max_position_embeddings=1024, max_position_embeddings=16384),
    GRANITE | dict(max_position_embeddings=64, rope_scaling=dict(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=16)),
    MINIMAX | dict(max_position_embeddings=64, rope_scaling=dict(
        rope_type="longrope", factor=3.0, short_factor=[1.0] * 8, long_factor=LONG)),
    ZAMBA | dict(max_position_embeddings=512, rope_scaling=LLAMA3),
    BAMBA | dict(rope_parameters=PROPORTIONAL),
    QWEN | dict(rope_parameters=PROPORTIONAL | dict(factor=2.0)),
    QWEN | dict(rope_scaling=dict(rope_type="proportional")),
    FALCON | dict(rope_parameters=PROPORTIONAL, rope_theta=1e4),
    FALCON | dict(rope_scaling=dict(rope_type="proportional", factor=3.0), partial_rotary_factor=0.4),
    MINIMAX | dict(rope_parameters=PROPORTIONAL),
    ZAMBA | dict(rope_scaling=dict(rope_type="proportional"), rope_theta=300.0),
)  # fmt: skip


def expected(values: dict) -> dict:
    kind = values["model_type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    [rotary] = [
        x for name, x in vars(module).items() if name.endswith("RotaryEmbedding") and x.__module__ == module.__name__
    ]
    config = CONFIG_MAPPING[kind](**copy.deepcopy(values))
    made, long = rotary(config), None
    if made.rope_type == "longrope":
        length = config.rope_parameters["original_max_position_embeddings"] + 1
        long = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)[0].tolist()
    found = dict(frequencies=made.inv_freq.tolist(), factor=float(made.attention_scaling), long=long)
    return dict(kind=made.rope_type, config=values, **found)


if __name__ == "__main__":
    path = pathlib.Path(__file__).parent / "rotary.json"
    path.write_text(json.dumps([expected(values) for values in CASES], indent=1) + "\n")

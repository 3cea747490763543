"""The folders that checkpoints.py measures: configs of published sizes, random weights in bfloat16, and tokenizers."""

import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from glax.models.config import ModelConfig
from glax.models.load import abstract_model
from glax.models.model import CausalLM
from glax.models.names import checkpoint_name, parameters, stored_names

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DRAWN = 4194301  # a prime below 2^22: rows of tensors that go round the drawn values never begin at the same one
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")
SHARD_BYTES = 2 * 10**9
WORDS = "words.json"  # a tokenizer with a word for each token, beside tokenizer.json with the bytes alone


def qwen3_5(layers: int, **sizes) -> dict[str, Any]:
    """Return the config of a language model of Qwen3.5. Every fourth layer has softmax attention."""
    kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(layers)]
    rope = dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25)
    rope |= dict(mrope_interleaved=True, mrope_section=[11, 11, 10])
    config: dict[str, Any] = dict(
        architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", dtype="bfloat16", hidden_act="silu",
        rms_norm_eps=1e-6, attention_bias=False, attn_output_gate=True, tie_word_embeddings=True,
        full_attention_interval=4, num_hidden_layers=layers, layer_types=kinds, linear_conv_kernel_dim=4,
        rope_parameters=rope, max_position_embeddings=262144,
    )  # fmt: skip
    return config | sizes


def kimi_linear(layers: int, *, heads: int, linear_width: int, **sizes) -> dict[str, Any]:
    """Return the config of a Kimi-Linear model. Every fourth layer has latent attention, and all but the first have experts."""
    softmax = [layer for layer in range(1, layers + 1) if layer % 4 == 0]
    linear = dict(
        full_attn_layers=softmax,
        kda_layers=[layer for layer in range(1, layers + 1) if layer not in softmax],
        head_dim=linear_width,
        num_heads=heads,
        short_conv_kernel_size=4,
    )
    config: dict[str, Any] = dict(
        architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", torch_dtype="bfloat16", hidden_act="silu",
        rms_norm_eps=1e-5, tie_word_embeddings=False, first_k_dense_replace=1, moe_layer_freq=1, moe_renormalize=True,
        moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1, num_shared_experts=1,
        routed_scaling_factor=2.446, use_grouped_topk=True, mla_use_nope=True, q_lora_rank=None, num_hidden_layers=layers,
        linear_attn_config=linear, num_attention_heads=heads, num_key_value_heads=heads, model_max_length=1048576,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return config | sizes


def qwen4_exp(layers: int, **sizes) -> dict[str, Any]:
    """Return the config of a language model of Qwen4-Exp. The second layer has n-grams, and every fourth softmax attention."""
    own = qwen3_5(layers) | dict(
        architectures=["Qwen4ExpForCausalLM"], model_type="qwen4_exp_text", tie_word_embeddings=False, hc_count=4, ngram_size=3,
        output_gate_type="sigmoid", ple_conv_kernel_size=4, ple_layer_ids=[2], heads_per_ngram=8, indexer_kv_heads=1,
        make_ngram_vocab_size_divisible_by=128, eos_token_id=0,
    )  # fmt: skip
    own.pop("attn_output_gate")
    return own | sizes


# Qwen3.5-4B has no config in tests/models/published: these are its sizes as public pages name them, which was not checked against
# its own config, and the other values are those of Qwen3.5-27B there. "kimi" has the published layers of Kimi-Linear-48B-A3B, 8
# of 27, with 64 of 256 experts. "qwen4-exp" has those of Qwen3.8-Flash-Next, 8 of 48, with 64 of 512 experts and a hundredth of
# the rows of n-grams.
QWEN_4B = dict(
    hidden_size=2560, intermediate_size=9216, vocab_size=248320, num_attention_heads=16, num_key_value_heads=4,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128,
)  # fmt: skip
QWEN_TINY = dict(
    hidden_size=64, intermediate_size=96, vocab_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
KIMI = dict(
    hidden_size=2304, intermediate_size=9216, moe_intermediate_size=1024, vocab_size=163840, num_experts=64,
    num_experts_per_token=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=72,
)  # fmt: skip
KIMI_TINY = dict(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=32, vocab_size=512, num_experts=8,
    num_experts_per_token=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=16,
)  # fmt: skip
QWEN4 = dict(
    hidden_size=2560, vocab_size=248320, num_attention_heads=24, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=64, num_experts_per_tok=10,
    moe_intermediate_size=640, shared_expert_intermediate_size=640, hc_lowrank=320, indexer_n_heads=4, indexer_head_dim=128,
    indexer_budget=2048, indexer_compress_ratio=4, ple_embed_dim=2560, ngram_vocab_size_base=200000, split_ngram_parts=128,
)  # fmt: skip
QWEN4_TINY = {key: value for key, value in QWEN_TINY.items() if key != "intermediate_size"} | dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, hc_lowrank=8,
    indexer_n_heads=4, indexer_head_dim=16, indexer_budget=32, indexer_compress_ratio=4, ple_embed_dim=64,
    ngram_vocab_size_base=500, split_ngram_parts=2,
)  # fmt: skip
CONFIGS = {
    "qwen3.5-4b": qwen3_5(32, **QWEN_4B),
    "qwen3.5-1.5b": qwen3_5(8, **QWEN_4B),
    "qwen4-exp": qwen4_exp(8, **QWEN4),
    "tiny-qwen4-exp": qwen4_exp(4, **QWEN4_TINY),
    "kimi": kimi_linear(8, heads=32, linear_width=128, **KIMI),
    "tiny-qwen3.5": qwen3_5(8, **QWEN_TINY),
    "tiny-qwen3.5-4-layers": qwen3_5(4, **QWEN_TINY),
    "tiny-kimi": kimi_linear(8, heads=4, linear_width=16, **KIMI_TINY),
}


def narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose recurrences have the same heads, with four layers of little else, for compiling their kernels."""
    sizes: dict[str, Any] = dict(hidden_size=256, intermediate_size=256, vocab_size=1024, num_hidden_layers=4)
    if config["model_type"] == "qwen3_5_text":
        return dict(config) | sizes | dict(layer_types=config["layer_types"][:4])
    if config["model_type"] == "qwen4_exp_text":
        small = dict(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, ple_embed_dim=256, ngram_vocab_size_base=500
        )
        return dict(config) | sizes | small | dict(layer_types=config["layer_types"][:4])
    inner = config["linear_attn_config"] | dict(full_attn_layers=[4], kda_layers=[1, 2, 3])
    return dict(config) | sizes | dict(linear_attn_config=inner, num_experts=8, moe_intermediate_size=64)


# ---- weights ---------------------------------------------------------------------------------------------------------


def tensors_of(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by name, from a model of shapes."""
    found = {}
    for path, param in parameters(model):
        name, (_, to, _) = checkpoint_name(model, path)
        shape = param.shape[1:] if "*" in name else param.shape
        stored = to(np.broadcast_to(np.zeros((), np.float32), shape)).shape
        found |= dict.fromkeys(stored_names(name, param), stored)
    return found


def distribution(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean and the deviation of a tensor's values, with which activations and logits are of order 1."""
    if name.endswith("A_log"):
        return 1.0, 0.5
    if name.endswith("dt_bias"):
        return -2.0, 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.1
    if "norm" in name.split(".")[-2]:  # Qwen3.5 and Qwen4-Exp multiply by 1 + weight, but behind a recurrence
        is_centred = config["model_type"] in ("qwen3_5_text", "qwen4_exp_text") and ".linear_attn." not in name
        return (0.0 if is_centred else 1.0), 0.1
    if "conv1d" in name:
        return 0.0, 0.3
    if "embed_tokens" in name:
        return 0.0, 0.02 if config["tie_word_embeddings"] else 0.5
    # A layer adds little to its input, so that the roundings of bfloat16 do not grow from layer to layer.
    return 0.0, (0.25 if name.endswith(OUTPUTS) else 1.0) * shape[-1] ** -0.5


class Drawn:
    """Hold normal values in bfloat16, by mean and deviation. Tensors are made of them in turn, since drawing each of billions of
    values would take minutes."""

    def __init__(self, seed: int):
        self.values, self.scaled, self.place = np.random.default_rng(seed).standard_normal(DRAWN, np.float32), {}, 0

    def write(self, file: BinaryIO, count: int, mean: float, deviation: float):
        if (mean, deviation) not in self.scaled:
            self.scaled[mean, deviation] = (self.values * deviation + mean).astype(BFLOAT16).view(np.uint16)
        source = self.scaled[mean, deviation]
        while count:
            part = source[self.place : self.place + count]
            file.write(part.data)
            self.place, count = (self.place + len(part)) % DRAWN, count - len(part)


def shards_of(tensors: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of each file, of at most SHARD_BYTES or one tensor."""
    shard, size = {}, 0
    for name, shape in tensors.items():
        more = 2 * math.prod(shape)
        if shard and size + more > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = shape, size + more
    yield shard


def write_shard(path: Path, shard: Mapping[str, tuple[int, ...]], seed: int, config: Mapping[str, Any]):
    """Write a file of safetensors: the length of the header in 8 bytes, the header in JSON, and the values."""
    drawn, header, end = Drawn(seed), dict[str, Any](__metadata__=dict(format="pt")), 0
    for name, shape in shard.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shard.items():
            drawn.write(file, math.prod(shape), *distribution(name, shape, config))


def write_folder(folder: Path, config: Mapping[str, Any]) -> int:
    """Write config.json, weights and tokenizers, unless the folder has them. Return the bytes of the weights.

    The config is written last, so that a folder that has it is whole.
    """
    tensors = tensors_of(abstract_model(ModelConfig.of(config)))
    size, text = 2 * sum(map(math.prod, tensors.values())), json.dumps(config, indent=1) + "\n"
    if (folder / "config.json").exists() and (folder / "config.json").read_text() == text:
        return size
    folder.mkdir(parents=True, exist_ok=True)
    shards, files = list(shards_of(tensors)), {}
    with ThreadPoolExecutor() as threads:  # NumPy and the system release the lock
        written = []
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05}-of-{len(shards):05}.safetensors"
            written.append(threads.submit(write_shard, folder / file, shard, i, config))
            files |= dict.fromkeys(shard, file)
        for each in written:
            each.result()
    index = dict(metadata=dict(total_size=size), weight_map=files)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizers(folder, config["vocab_size"])
    (folder / "config.json").write_text(text)
    return size


def write_tokenizers(folder: Path, vocabulary: int):
    """Write tokenizer.json, whose tokens are bytes, and WORDS, in which the text of each token is its number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte.decoder = decoders.ByteLevel()
    byte.save(str(folder / "tokenizer.json"))
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / WORDS))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))

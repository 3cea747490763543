"""Make tests/models/quantized: tiny models in the formats of compressed-tensors and of NVIDIA's Model Optimizer, and logits.

    env/bin/python tests/models/make_quantized.py [NAME ...]

Use the environment of make_fixtures.py without fla, with accelerate, compressed-tensors and nvidia-modelopt. The two packages
quantize and write the weights. Logits are those of the weights as transformers dequantizes them as it loads, which calls
compressed-tensors, and as Model Optimizer's own code does; no activations are rounded.
"""

import copy
import functools
import json
import pathlib
import re
import shutil
import sys

import compressed_tensors.compressors.nvfp4.base as nvfp4
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from random_models import TOKENS, randomise
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

# compressed-tensors forms these weights in bfloat16, which would hide errors below its rounding.
nvfp4.unpack_fp4_from_uint8 = functools.partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)

FOLDER = pathlib.Path(__file__).parent / "quantized"
# Rows of most projections are no multiple of 24 or 32, and columns are multiples of 32.
SIZES = dict(
    vocab_size=40, hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip
NEMOTRON = dict(
    vocab_size=40, hidden_size=64, num_hidden_layers=3, layers_block_type=["mamba", "moe", "attention"], num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1,
    topk_group=1, intermediate_size=32, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
FLOAT8 = dict(num_bits=8, type="float")
FLOAT4 = dict(num_bits=4, type="float")
INTEGERS = dict(type="int", strategy="group", group_size=32)
# By name: the formats of weights, each with the layers that have it.
COMPRESSED = {
    "float8_tensor": [(FLOAT8 | dict(strategy="tensor"), ["Linear"])],
    "float8_channel": [(FLOAT8 | dict(strategy="channel"), ["Linear"])],
    "float8_block": [(FLOAT8 | dict(strategy="block", block_structure=[24, 40]), ["Linear"])],
    "nvfp4": [(FLOAT4 | dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), ["Linear"])],
    "mxfp4": [(FLOAT4 | dict(strategy="group", group_size=32, scale_dtype="torch.uint8"), ["Linear"])],
    "mxfp8": [(FLOAT8 | dict(strategy="group", group_size=32, scale_dtype="torch.uint8"), ["Linear"])],
    "int8_channel": [(dict(num_bits=8, type="int", strategy="channel"), ["Linear"])],
    "int8_group": [(INTEGERS | dict(num_bits=8), ["Linear"])],
    "int4_group": [(INTEGERS | dict(num_bits=4), ["Linear"])],
    "int4_asymmetric": [(INTEGERS | dict(num_bits=4, symmetric=False), ["Linear"])],
    "mixed": [
        (FLOAT4 | dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"), ["re:.*mlp.*"]),
        (FLOAT8 | dict(strategy="channel"), ["re:.*self_attn.*", "re:.*linear_attn.*"]),
    ],
}  # fmt: skip
MODELOPT = {
    "modelopt_fp8": "FP8_DEFAULT_CFG",
    "modelopt_nvfp4": "NVFP4_DEFAULT_CFG",
    "modelopt_nvfp4_weights": "W4A16_NVFP4_CFG",
    "modelopt_mixed": "NVFP4_MLP_ONLY_CFG",  # with attention in float8
    "modelopt_mxfp8": "MXFP8_DEFAULT_CFG",
    "modelopt_nemotron": "NVFP4_DEFAULT_CFG",
}


def source(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "modelopt_nemotron":
        model = NemotronHForCausalLM(NemotronHConfig(**NEMOTRON, architectures=["NemotronHForCausalLM"]))
        model.config._experts_implementation = "eager"
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, architectures=["Qwen3_5ForCausalLM"]))
    model = model.float().eval()
    randomise(model)
    return model


def in_blocks(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the weight as [rows of scales, columns of scales, numbers that share a scale], without what is filled up."""
    rows, columns = weight.shape
    high, wide = {
        "tensor": (rows, columns), "channel": (1, columns), "block": args.block_structure, "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
    }[args.strategy]  # fmt: skip
    filled = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    return filled.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)


def calibrate(model: torch.nn.Module):
    """Give every quantized layer the scales of its weight."""
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        args, weight, whole = scheme.weights, module.weight.data, None
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.min(), weight.max())[None]
            module.weight_global_scale.data = whole
        found = in_blocks(weight, args)
        scale, zero = calculate_qparams(found.amin(-1), found.amax(-1), args, whole)
        shape = module.weight_scale.shape
        module.weight_scale.data = scale.reshape(shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(shape).to(module.weight_zero_point.dtype)


def expected(model: torch.nn.Module, folder: pathlib.Path):
    tokens = torch.randint(0, SIZES["vocab_size"], TOKENS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.float().contiguous()
    save_file(dict(tokens=tokens.int(), logits=logits), folder / "expected.safetensors")


def make_compressed(name: str):
    model, folder = source(name), FOLDER / name
    groups = {
        f"group_{i}": QuantizationScheme(
            targets=targets,
            format="nvfp4-pack-quantized" if weights["strategy"] == "tensor_group" else None,
            weights=QuantizationArgs(**weights),
            input_activations=QuantizationArgs(
                num_bits=weights["num_bits"], type=weights["type"], strategy="token", dynamic=True
            )
            if weights["strategy"] == "channel"
            else None,
        )
        for i, (weights, targets) in enumerate(COMPRESSED[name])
    }
    # Two narrow projections stay as they are, as in published folders.
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head", "re:.*in_proj_[ab]$"])
    apply_quantization_config(model, config)
    calibrate(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    if name == "mixed":  # which transformers 5.24 takes for one format
        compressor.decompress_model(model)
        for module in model.modules():
            module.quantization_enabled = False
        expected(model.float(), folder)
        return
    own = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=own, dtype=torch.float32)
    expected(loaded.eval(), folder)


def make_modelopt(name: str):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import tensor_quant

    tensor_quant._dynamic_block_quantize_impl = lambda x, *_: x  # which runs on a GPU alone, in calibration too
    model, folder = source(name), FOLDER / name
    tokens = torch.randint(0, SIZES["vocab_size"], TOKENS)
    config = copy.deepcopy(getattr(mtq, MODELOPT[name]))
    if name == "modelopt_fp8":
        config["quant_cfg"] += mtq.FP8_KV_CFG[
            "quant_cfg"
        ]  # cached keys and values in float8, too, as NVIDIA publishes them
    if name == "modelopt_mixed":
        float8 = dict(num_bits=[4, 3], axis=None)
        config["quant_cfg"] += [
            dict(quantizer_name=f"*self_attn*{x}_quantizer", cfg=float8) for x in ("weight", "input")
        ]
    mtq.quantize(model, config, lambda model: model(tokens))
    export_hf_checkpoint(model, export_dir=folder)
    plain, tensors = source(name), load_file(folder / "model.safetensors")
    with torch.no_grad():
        for key, x in (*plain.named_parameters(), *plain.named_buffers()):
            published = exported_name(name, key)
            if ".experts." in key:
                start, part = published.rsplit(".", 1)
                each = [from_modelopt(tensors, f"{start}.{i}.{part}.weight", x[i]) for i in range(len(x))]
                x.copy_(torch.stack(each))
            elif published in tensors:
                x.copy_(from_modelopt(tensors, published, x))
    expected(plain, folder)


def exported_name(name: str, key: str) -> str:
    """Return the name that Model Optimizer gives a parameter of transformers in a folder."""
    if name == "modelopt_nemotron":
        for old, new in (
            ("model.", "backbone."),
            ("embed_tokens", "embeddings"),
            ("backbone.norm.", "backbone.norm_f."),
        ):
            key = key.replace(old, new, 1)
        return key
    return re.sub(r"^model\.", "model.language_model.", key)


def from_modelopt(tensors: dict[str, torch.Tensor], key: str, like: torch.Tensor) -> torch.Tensor:
    """Return a weight of an exported folder, by Model Optimizer's own code."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    stored, scale = tensors[key], tensors.get(key + "_scale")
    if scale is None:
        return stored
    if stored.dtype == torch.uint8:
        whole = NVFP4QTensor(like.shape, torch.float32, stored)
        return whole.dequantize(scale=scale, double_scale=tensors[key + "_scale_2"], block_sizes={-1: 16})
    if scale.dtype == torch.uint8:
        whole = MXFP8QTensor(like.shape, torch.float32, stored)
        return whole.dequantize(scale=scale, block_sizes={-1: 32})
    return FP8QTensor(like.shape, torch.float32, stored).dequantize(scale=scale)


def make(name: str):
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (make_modelopt if name in MODELOPT else make_compressed)(name)
    for other in (FOLDER / name).iterdir():
        if other.name not in ("config.json", "hf_quant_config.json", "model.safetensors", "expected.safetensors"):
            other.unlink()
    kinds = {x.dtype for x in load_file(FOLDER / name / "model.safetensors").values()}
    found = json.loads((FOLDER / name / "config.json").read_text())["quantization_config"]
    print(name, found.get("format", found.get("quant_algo")), kinds, flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or (*COMPRESSED, *MODELOPT):
        make(name)

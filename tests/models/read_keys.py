"""Derive which keys of a config the models' own code reads, and write glax/models/read_keys.py.

    RING=CLONE env/bin/python tests/models/read_keys.py [--write]

CLONE is as in make_ling.py. Use the environment of make_fixtures.py, with fla-core instead of flash-linear-attention where one
likes. For each type:

1. Attributes: the names that the type's modelling files read from a config (by their syntax trees), and those that any other
   code reads while the fixtures' configs are built and run (by a recording `__getattribute__`). Reads by code of configs do not
   count, for storing a value is not reading it.
2. Keys: a key is read if it is such an attribute, or if setting it changes one. Candidates are all names in the code of the
   configs: fields, arguments, what is popped from further arguments, and the map of attributes.
"""

import ast
import contextlib
import copy
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import pathlib
import sys
import textwrap
import warnings
from collections.abc import Iterator

import fla_on_cpu  # noqa: F401, before fla

# isort: split

import fla.layers.attn
import fla.models  # registers its types
import fused_xlstm  # noqa: F401
import torch
import transformers
import transformers.quantizers.auto
from fla.models.mamba import MambaConfig as FLAMambaConfig
from fla.models.mamba import MambaForCausalLM as FLAMambaForCausalLM
from fla.models.mamba2 import Mamba2Config as FLAMamba2Config
from fla.models.mamba2 import Mamba2ForCausalLM as FLAMamba2ForCausalLM
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

HERE = pathlib.Path(__file__).parent
TABLE = HERE.parents[1] / "glax" / "models" / "read_keys.py"
FLA = (
    "comba",
    "delta_net",
    "gated_deltanet",
    "gated_deltaproduct",
    "gla",
    "gsa",
    "hgrn",
    "hgrn2",
    "kda",
    "retnet",
    "rwkv6",
    "rwkv7",
)
TRANSFORMERS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next_text", "granitemoehybrid", "jamba", "kimi_linear",
    "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv",
    "xlstm", "zamba", "zamba2",
)  # fmt: skip
# Kimi K3's modeling code is in no package. These are the arguments of the config's classes in its repository, but for those that
# no code reads, and what transformers' own class reads.
KIMI_K3 = {
    "kimi_k3": "quantization_config text_config tie_word_embeddings vision_config",
    "kimi_k3_text": """
        @transformers activation_situ_beta activation_situ_linear_beta attention_dropout attn_res_block_size
        first_k_dense_replace head_dim hidden_act intermediate_size kv_lora_rank latent_moe_use_norm linear_attn_config
        max_position_embeddings mla_use_nope mla_use_output_gate moe_intermediate_size moe_layer_freq moe_renormalize
        moe_router_activation_func num_attention_heads num_expert_group num_experts num_experts_per_token
        num_hidden_layers num_key_value_heads num_nextn_predict_layers num_shared_experts pad_token_id q_lora_rank
        qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_theta routed_expert_hidden_size routed_scaling_factor
        topk_group topk_method use_grouped_topk v_head_dim
    """,
}
HEADLESS = ("glm5_next_text",)  # models of a whole one that have no head of their own
WHOLE = ("glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")  # configs that hold the config of a language model
PROBES = (
    1, 3, 0.5, True, False, "probe", [1], [0.5, 0.7], {"0": {"hidden_size": 4}},
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
)  # fmt: skip


fla.layers.attn.flash_attn_func = len  # models are built, and their softmax attention never runs


def classes_of(kind: str) -> tuple[type, type]:
    if kind == "mamba_fla":
        return FLAMambaConfig, FLAMambaForCausalLM
    if kind == "mamba2_fla":
        return FLAMamba2Config, FLAMamba2ForCausalLM
    if kind == "mamba":  # fla registers types of its and the next name
        return transformers.MambaConfig, transformers.MambaForCausalLM
    if kind == "mamba2":
        return transformers.Mamba2Config, transformers.Mamba2ForCausalLM
    config = CONFIG_MAPPING[kind]
    if kind == "glm5_next":
        return config, transformers.Glm5NextForConditionalGeneration
    return config, (MODEL_MAPPING if kind in HEADLESS else MODEL_FOR_CAUSAL_LM_MAPPING)[config]


def number_or_object(values: dict) -> dict | float:
    """Return a float that JSON cannot hold, from the form that transformers gives it, and any other object as it is."""
    return float(values["__float__"]) if set(values) == {"__float__"} else values


def fixtures_of(kind: str) -> list[dict]:
    """Return the configs of the fixtures of a type."""
    found = []
    for path in sorted((HERE / "fixtures").glob("*/config.json")):
        name, values = path.parent.name, json.loads(path.read_text(), object_hook=number_or_object)
        values = values["text_config"] if kind in HEADLESS and "text_config" in values else values
        if values.get("model_type") != kind.removesuffix("_fla") or ("_fla" in name) != kind.endswith("_fla"):
            continue
        found.append(values)
    return found


# ---- attributes that modelling code reads ----------------------------------------------------------------------------


def is_config(node: ast.expr) -> bool:
    """Return whether an expression is a config by its name: config, self.config, text_config."""
    if isinstance(node, ast.Name):
        return node.id.endswith("config")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get_text_config"
    return isinstance(node, ast.Attribute) and node.attr.endswith("config")


def attributes_in(path: str, classes: set[str] | None = None) -> set[str]:
    """Return the names that a file's code reads from a config. classes: the classes whose code counts; all if None."""
    found, tree = set(), ast.parse(pathlib.Path(path).read_text())
    if classes is not None:
        tree.body = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in classes]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_config(node.value):
            found.add(node.attr)
        is_getattr = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        )
        if is_getattr and is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return found


@contextlib.contextmanager
def recording(found: set[str], of: type = PreTrainedConfig):
    """Add the names of attributes that code outside of configs reads from configs of class `of`."""
    original = PreTrainedConfig.__getattribute__

    def read(self, name):
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        is_own = any(part in file for part in ("configuration_", "dataclasses.py", "heterogeneity", "generation/"))
        if issubclass(type(self), of) and not is_own:
            found.add(name)
        return original(self, name)

    PreTrainedConfig.__getattribute__ = read
    try:
        yield
    finally:
        PreTrainedConfig.__getattribute__ = original


def own_classes(model: torch.nn.Module) -> dict[str, set[str]]:
    """Return the classes of the model, its bases and its modules, by the file of modelling code that holds them."""
    found: dict[str, set[str]] = {}
    for module in model.modules():
        for base in type(module).__mro__:
            file = inspect.getsourcefile(base) if base.__module__.split(".")[0] in ("fla", "transformers") else None
            if file is not None and "/models/" in file and "modeling_" in file:
                found.setdefault(file, set()).add(base.__name__)
    return found


def attributes_of(kind: str) -> set[str]:
    config_class, model_class = classes_of(kind)
    found, files = set(), {}
    for values in fixtures_of(kind):
        config = config_class(**copy.deepcopy(values))
        config._experts_implementation = "eager"  # the others need widths that the fixtures do not have
        with recording(found):
            model = model_class(config)
            if config_class.__module__.startswith("transformers"):
                tokens = torch.arange(10)[None] % config.vocab_size
                model(tokens, use_cache=False, **({} if kind in HEADLESS else dict(labels=tokens)))
                if kind not in (
                    "recurrent_gemma",
                    "rwkv",
                    "xlstm",
                ):  # two return no cache, the other's needs other widths
                    cache = model.eval()(tokens, use_cache=True).past_key_values
                    model(tokens[:, :1], past_key_values=cache, use_cache=True)
        for path, classes in own_classes(model).items():
            files[path] = files.get(path, set()) | classes
    for path, classes in files.items():
        found |= attributes_in(path, classes)
    found |= attributes_in(transformers.quantizers.auto.__file__)
    methods = {name for name in dir(config_class) if callable(getattr(config_class, name, None))}
    return {name for name in found if not name.startswith("__")} - methods


# ---- keys that reach them --------------------------------------------------------------------------------------------


def candidates_of(config_class: type) -> set[str]:
    """Return every name in the code of a config's classes that could be a key."""
    found = set()
    for base in config_class.__mro__:
        if base.__module__.split(".")[0] not in ("fla", "transformers"):
            continue
        found |= set(getattr(base, "attribute_map", {})) | set(getattr(base, "__annotations__", {}))
        for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    methods = {name for name in found if callable(getattr(config_class, name, None))}
    return {name for name in found - methods if not name.startswith("__") and name not in ("self", "kwargs")}


def seen(config: PreTrainedConfig, attributes: set[str]) -> dict[str, str]:
    """Return what modelling code reads from a config."""
    found = {}
    if "rope_parameters" in attributes:
        config.standardize_rope_params()  # as each function that forms inverse frequencies does
    for name in attributes:
        try:
            value = repr(getattr(config, name))
        except Exception as error:  # some attributes are properties of other types
            value = type(error).__name__
        found[name] = value.partition(" object at ")[0]
    return found


def changes(config_class: type, base: dict, key: str, attributes: set[str]) -> bool:
    """Return whether some value of a key changes what modelling code reads, or lacks keys that the code of configs looks for."""
    before = seen(config_class(**copy.deepcopy(base)), attributes)
    value = base.get(key, getattr(config_class, key, None))
    likely = [not value] if isinstance(value, bool) else []
    likely += [value + 1, value * 2] if isinstance(value, int | float) and not isinstance(value, bool) else []
    for probe in (*likely, *PROBES):
        try:
            after = seen(config_class(**copy.deepcopy(base | {key: probe})), attributes)
        except KeyError:  # the code of the config looked for keys inside the value
            return True
        except Exception:  # a value that this key cannot have
            continue
        if after != before:
            return True
    return False


def keys_of(kind: str) -> list[str]:
    """Return the keys that the code of a type reads."""
    config_class, _ = classes_of(kind)
    attributes = attributes_of(kind)
    aliases = {alias for alias, name in config_class.attribute_map.items() if name in attributes}
    direct = attributes | aliases
    bases = fixtures_of(kind)[:2]
    if "rope_parameters" in attributes:
        plain = {key: value for key, value in bases[0].items() if key != "rope_parameters"}
        scaled = plain | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
        bases += [plain, scaled] if hasattr(config_class(), "max_position_embeddings") else [plain]
    indirect = {
        key
        for key in sorted(candidates_of(config_class) - direct)
        if any(changes(config_class, base, key, attributes) for base in bases)
    }
    return sorted(key for key in direct | indirect if not key.startswith("_") and not key.endswith("_plan"))


def keys_of_whole(kind: str) -> list[str]:
    """Return the keys that are read beside those of `text_config` when a config makes a language model."""
    config_class, _ = classes_of(kind)
    found = {"text_config", "tie_word_embeddings"}  # the second by the whole model, which the files are written by
    with recording(found, config_class):
        if kind == "glm5_next":  # which AutoModelForCausalLM does not make
            transformers.Glm5NextForConditionalGeneration(config_class(**fixtures_of(kind)[0]))
        else:
            transformers.AutoModelForCausalLM.from_config(config_class(**fixtures_of(kind)[0]))
    return sorted(
        key for key in found & candidates_of(config_class) if not key.startswith("_") and not key.endswith("_plan")
    )


def ring_keys() -> list[str]:
    """Return the names that the own code of Ring-2.5 reads from a config, by its file in a clone that the variable RING names."""
    files = pathlib.Path(os.environ["RING"], "models").glob("modeling_*.py")
    found = set().union(*(attributes_in(str(path)) for path in files))
    # Read by transformers' initialisation of rotary positions.
    rotary = "partial_rotary_factor rope_theta rope_scaling max_position_embeddings head_dim hidden_size"
    found |= set(rotary.split())
    properties = {"use_return_dict"}  # of the class, and no keys of a file
    return sorted(name for name in found - properties if not name.startswith("_"))


def state_spaces_keys() -> list[str]:
    """Return the fields of the config of mamba_ssm, whose class refuses all other keys."""
    path = pathlib.Path(importlib.util.find_spec("mamba_ssm").origin).parent / "models" / "config_mamba.py"
    return sorted(node.target.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign))


def table() -> str:
    """Return the text of glax/models/read_keys.py."""
    keys = {"mamba2_state_spaces": set(state_spaces_keys()), "bailing_moe_v2_5": set(ring_keys())}
    for kind in (*FLA, *TRANSFORMERS, "mamba_fla", "mamba2_fla", "mamba3"):
        keys[kind] = set(keys_of(kind))
        print(kind, len(keys[kind]), file=sys.stderr)
    for kind in WHOLE:
        keys[kind] = set(keys_of_whole(kind))
        print(kind, sorted(keys[kind]), file=sys.stderr)
    keys |= {kind: set(words.split()) for kind, words in KIMI_K3.items()}
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "fla-core", "mamba-ssm"))
    return text_of(keys, ", ".join(versions))


def text_of(keys: dict[str, set[str]], versions: str) -> str:
    """Return the text of glax/models/read_keys.py, with the keys that all types of a family read stated once."""
    families = {"@fla": FLA, "@transformers": TRANSFORMERS}
    shared = {name: set.intersection(*(keys[kind] for kind in kinds)) for name, kinds in families.items()}
    own = {kind: words for kind, words in keys.items() if kind not in (*FLA, *TRANSFORMERS)}
    own |= {kind: {name} | (keys[kind] - shared[name]) for name, kinds in families.items() for kind in kinds}
    head = f"""List the keys of a config that the models' own code reads: {versions}.

tests/models/read_keys.py writes this file.
"""
    lines = [f'"""{head}"""', "", "# What all types of a family read.", "SHARED = {", *entries(shared), "}"]
    lines += ["READ_WORDS = {", *entries(own), "}", "READ_KEYS = {"]
    lines += ['    code: frozenset(" ".join(SHARED.get(word, word) for word in words.split()).split())']
    return "\n".join([*lines, "    for code, words in READ_WORDS.items()", "}", ""])


def entries(words_of: dict[str, set[str]]) -> Iterator[str]:
    for name, words in sorted(words_of.items()):
        yield f'    "{name}": """'
        yield from (f"        {line}" for line in textwrap.wrap(" ".join(sorted(words)), 110, break_on_hyphens=False))
        yield '    """,'


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    text = table()
    if sys.argv[1:] == ["--write"]:
        TABLE.write_text(text)
    elif text != TABLE.read_text():
        sys.exit(f"{TABLE} differs from what the packages give: run this script with --write")

"""Read `config.json`. Each option of a checkpoint is used, has no effect on the function that the
model's own code computes, or raises an error."""

import contextlib
import contextvars
import dataclasses
import json
import logging
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from glax.models.folders import CONFIG, read_config
from glax.models.read_keys import READ_KEYS

logger = logging.getLogger(__name__)
REQUIRED = object()
SILENT = contextvars.ContextVar("SILENT", default=False)  # whether options that no code reads are not named
# Bounds of integers by key. Each is far beyond what is published, and small enough to be refused before anything is built.
WIDEST, LAYERS, FLOAT32 = 2**18, 1024, 3.4028235e38
MOST = {
    "block_size": 2**14,  # MiniMax stores arrays of its square
    "max_position_embeddings": 2**31 - 1,
    "model_max_length": 2**31 - 1,
    "n_layer": LAYERS,
    "ngram_vocab_size_base": 2**31 - 1,
    "num_blocks": LAYERS,
    "num_hidden_layers": LAYERS,
    "original_max_position_embeddings": 2**31 - 1,
    "seed": 2**63 - 1,
    "sliding_window": 2**31 - 1,
    "vocab_size": 2**22,
    "window_size": 2**31 - 1,
}

# Options that transformers writes for every model, or that name tokens, choose kernels, or concern training alone.
NO_EFFECT_WORDS = (
    "_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures "
    "attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size eos_token_id experts_implementation exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu "
    "gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length "
    "max_position_embeddings min_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams "
    "num_labels num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix "
    "problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
    "torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache use_l2warp "
)
NO_EFFECT = frozenset(NO_EFFECT_WORDS.split())
# Values, beside those that are false, by which the models' own code switches off what an option of this name does.
OFF = {"is_causal": (None, True)}


class UnsupportedOption(ValueError):
    """Say that a config has an option, or a value of one, that glax does not support: a ValueError that names the key and its
    value. `from_config`, `from_pretrained` and `load_adapter` raise it."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hold the content of a model's config.json as text. It is hashable, and `save_pretrained` writes the text unchanged.

    text: the text of a JSON object, which the constructor does not check. `of` makes a config of a dict, and `read` of a
    folder; `values` is the dict.

    >>> config = glax.models.ModelConfig.of(dict(model_type="gla", hidden_size=64))
    >>> config.values["hidden_size"]
    64
    """

    text: str

    @classmethod
    def of(cls, values: Mapping) -> "ModelConfig":
        """Return a config of {key: value}. Raises ValueError, which names the key, for values that JSON cannot hold."""
        for key, value in values.items():
            try:
                json.dumps({key: value}, sort_keys=True)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{key} in config.json must be a value of JSON: {error}") from None
        return cls(json.dumps(dict(values), indent=2, sort_keys=True))

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        """Return the config.json of a folder. Raises OSError if it cannot be read, and ValueError if it holds no JSON object."""
        return cls.of(read_config(Path(folder)))

    @property
    def values(self) -> dict:
        """Return the content as a new dict."""
        return json.loads(self.text)

    @property
    def text_values(self) -> dict:
        """Return the values of the language model: where a config describes several models, those in its `text_config`."""
        values = self.values
        inside = values.get("text_config")
        return inside if isinstance(inside, dict) else values


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress, inside the context, the log of options that the model's own code does not read. It serves where the same config
    is built a second time."""
    before = SILENT.set(True)
    try:
        yield
    finally:
        SILENT.reset(before)


def is_number(value: Any) -> bool:
    """Return whether the value of an option is a number and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether the value of an option is a number that is finite in float32."""
    return is_number(value) and -FLOAT32 <= value <= FLOAT32


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message, at most 100 characters of it."""
    return f"{value!r:.100}"


class Options:
    """Hold the options of a config, which are taken one by one. `finish` decides on options that were never taken.

    values: {option: value}. no_effect: options that count as taken. inside: for the options within another option, the name of
    that option with a point behind it; "" for config.json itself. code: the row of `READ_KEYS`; model_type if None. read: the
    names that the model's own code reads; every name if None. outer: the options that contain that option. file: the name of
    the file that holds the options; the file of `outer` if None.
    """

    def __init__(
        self,
        values: Mapping,
        no_effect: frozenset[str] = NO_EFFECT,
        inside: str = "",
        model_type: Any = None,
        code: str | None = None,
        read: frozenset[str] | None = None,
        outer: "Options | None" = None,
        file: str | None = None,
    ):
        self.values, self.left, self.inside = dict(values), set(values) - no_effect, inside
        self.model_type = model_type or values.get("model_type")
        self.read, self.outer, self.unread = read, outer, set()
        self.file: str = file or (CONFIG if outer is None else outer.file)
        if outer is None and read is None:
            self.read = READ_KEYS.get(str(self.model_type if code is None else code))

    def part(self, key: str, values: Any, read: frozenset[str] | None = None) -> "Options":
        """Return `values`, the value of `key` or a part of it, as Options. Raises UnsupportedOption unless it is an object.

        read: the names in it that the model's own code reads; every name if None.
        """
        if not isinstance(values, Mapping):
            raise self.unsupported(key, f"it must hold JSON objects, got {values!r}")
        return Options(values, frozenset(), f"{self.inside}{key}.", self.model_type, read=read, outer=self)

    def model(self, key: str, model_type: str) -> Self:
        """Return the value of `key`, the config of a model of `model_type`, as Options. Raises UnsupportedOption unless it is
        an object."""
        values = self.take(key)
        if not isinstance(values, Mapping):
            raise self.unsupported(key, f"it must hold a JSON object, got {values!r}")
        check_kinds(values, f"{self.inside}{key}.")
        read = READ_KEYS[model_type]
        return type(self)(values, inside=f"{self.inside}{key}.", model_type=model_type, read=read, outer=self)

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, or `default` if it is missing. Raises ValueError if there is no default."""
        self.left.discard(key)
        if key in self.values:
            return self.values[key]
        if default is REQUIRED:
            raise ValueError(f"{self.file} must have {self.inside + key!r}")
        return default

    def integer(self, key: str, default: Any = REQUIRED, *, optional: bool = False, least: int = 1) -> Any:
        """Return the value of `key`, an integer from `least` to MOST[key], or to WIDEST if there is none. Return None if it is
        null and `optional`. Raises ValueError for any other value."""
        value = self.take(key, default)
        if optional and value is None:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}", value)
        if value > (most := MOST.get(key, WIDEST)):
            raise self.wrong(key, f"at most {most}", value)
        return value

    def divisor(self, key: str, default: int | None, by: str, whole: int, *, optional: bool = False) -> int:
        """Return the value of `key`, a divisor of `whole`; `whole` itself if it is null and `optional`. by: the name of `whole`
        in the config. Raises UnsupportedOption for any other value."""
        value = self.integer(key, default, optional=optional)
        value = whole if value is None else value
        if whole % value:
            raise self.unsupported(key, f"it must divide {by}={whole}")
        return value

    def number(
        self,
        key: str,
        default: Any = REQUIRED,
        *,
        optional: bool = False,
        least: float | None = None,
        above: float | None = None,
    ) -> Any:
        """Return the value of `key` as a finite float, at least `least` and above `above`, or None if `optional`. Raises
        ValueError for any other value."""
        value = self.take(key, default)
        if optional and value is None:
            return value
        if not is_finite(value):
            kind = "a finite number in float32" if is_number(value) and value == value else "a finite number"
            raise self.wrong(key, kind, value)
        if least is not None and value < least:
            raise self.wrong(key, f"at least {least:g}", value)
        if above is not None and np.float32(value) <= above:
            raise self.wrong(key, f"above {above:g}", value)
        return float(value)

    def pair(self, key: str, default: tuple[float, float], *, above: float) -> tuple[float, float]:
        """Return the value of `key`, two finite numbers above `above` in ascending order. Raises ValueError for any other
        value."""
        value = self.take(key, default)
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not (is_pair and all(map(is_finite, value)) and above < value[0] <= value[1]):
            raise self.wrong(key, f"two numbers above {above:g} in ascending order", value)
        return float(value[0]), float(value[1])

    def flag(self, key: str, default: Any = REQUIRED, *, optional: bool = False) -> bool:
        """Return the value of `key`, which is false if it is null and `optional`. Raises ValueError for any other value."""
        value = self.take(key, default)
        if optional and value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def choice(self, key: str, default, supported):
        """Return the value of `key`. Raises UnsupportedOption unless it is one of `supported`."""
        value = self.take(key, default)
        if not any(value == x and type(value) is type(x) for x in supported):
            raise UnsupportedOption(
                f"{self.inside}{key}={value!r} in {self.file} is not supported for model_type {self.model_type!r}: "
                f"supported are {', '.join(map(repr, supported))}"
            )
        return value

    def wrong(self, key: str, wanted: str, value: Any) -> ValueError:
        """Return a ValueError for the value of `key`. wanted: what the value must be, for the message."""
        return ValueError(f"{self.inside}{key} in {self.file} must be {wanted}, got {shown(value)}")

    def ignore(self, *keys: str):
        """Accept `keys`, which have no effect on the function of this kind of model, in the model's own code too.

        Raises ValueError, which names the key, for a value of another type than `KINDS` has for the key.
        """
        self.left -= set(keys)
        check_kinds({key: self.values[key] for key in keys if key in self.values}, self.inside)

    def unsupported(self, key: str, why: str) -> UnsupportedOption:
        """Return an UnsupportedOption for the value of `key`. why: the end of its message."""
        given = f"{self.inside}{key}={self.values.get(key)!r} in {self.file}"
        return UnsupportedOption(f"{given} is not supported for model_type {self.model_type!r}: {why}")

    def finish(self):
        """Raise UnsupportedOption for options that were never taken, that the model's own code reads, and whose value has an
        effect.

        Other options that were never taken are logged once at INFO, with those inside of other options. Raises ValueError for
        an option whose value is of another type than `KINDS` has for it. `READ_KEYS` lists which options of config.json the
        models' own code reads, by the versions named there.
        """
        if self.outer is None:
            check_kinds(self.values)
        unread = {key for key in self.left if not self.is_read(key)}
        if refused := sorted(key for key in self.left - unread if not self.is_off(key)):
            rest = ", ".join(f"{self.inside}{key}={self.values[key]!r}" for key in refused)
            raise UnsupportedOption(
                f"{self.file} has options that are not supported for model_type {self.model_type!r}: {rest}"
            )
        self.unread |= {f"{self.inside}{key}" for key in unread}
        if self.outer is not None:
            self.outer.unread |= self.unread
        elif self.unread and not SILENT.get():
            names = ", ".join(sorted(self.unread))
            logger.info("%s has options that the code of %r does not read: %s", self.file, self.model_type, names)

    def is_read(self, key: str) -> bool:
        """Return whether the model's own code reads an option."""
        return self.read is None or key in self.read

    def is_off(self, key: str) -> bool:
        """Return whether an option has a value without effect: null, 0, false, empty, or "default". No value is without effect
        if the model's own code reads every name."""
        value = self.values[key]
        if key in OFF:
            return value in OFF[key]
        if isinstance(value, Mapping) and key.startswith("rope_"):
            value = value.get("rope_type", value.get("type", "default"))
        return self.read is not None and (not value or value == "default")


def rounded_width(key: str, width: int, ratio: float, of: str = "hidden_size") -> int:
    """Return the integer part of width * ratio. key, of: the options with `ratio` and `width`, for the message. Raises
    ValueError if the product is above WIDEST."""
    if width * ratio > WIDEST:
        raise ValueError(
            f"{key}={ratio!r} in config.json must make {of}={width} at most {WIDEST}, got {width * ratio:g}"
        )
    return int(width * ratio)


def exact_width(key: str, width: int, ratio: float, of: str = "hidden_size") -> int:
    """Return width * ratio, an integer. key, of: the options with `ratio` and `width`, for the message.

    Raises ValueError unless the product is an integer from 1 to WIDEST.
    """
    exact = width * ratio
    if abs(exact) > WIDEST:
        raise ValueError(f"{key}={ratio!r} in config.json must make {of}={width} at most {WIDEST}, got {exact:g}")
    if abs(exact - round(exact)) > 1e-9 * max(exact, 1.0):
        raise ValueError(f"{key}={ratio!r} in config.json must make {of}={width} an integer, got {exact}")
    if exact < 0.5:
        raise ValueError(f"{key}={ratio!r} in config.json must make {of}={width} at least 1, got {exact}")
    return round(exact)


def padding(options: Options, default: int | None = None) -> int | None:
    """Return the padding token, from 0 to vocab_size - 1, or None. default: its value in a config without pad_token_id.

    A negative token counts from the end, as in PyTorch. Raises ValueError for a value that is no token of the vocabulary.
    """
    value = options.take("pad_token_id", default)
    if value is None:
        return None
    vocabulary = options.integer("vocab_size", None, optional=True)
    is_token = isinstance(value, int) and not isinstance(value, bool)
    if not is_token or (vocabulary is not None and not -vocabulary <= value < vocabulary):
        raise ValueError(
            f"{options.inside}pad_token_id in config.json must be a token of the vocabulary of {vocabulary}, got {value!r}"
        )
    return value if value >= 0 or vocabulary is None else value + vocabulary


# ---- kinds of options, those without effect included: a config with another kind is damaged, or of another program -----------

COUNTS = """
    bos_token_id chunk_size context_length conv_size expand ffn_hidden_size head_dim image_end_token_id
    image_start_token_id image_token_id kv_channels mamba_chunk_size max_inference_chunksize max_position_embeddings
    max_window_layers model_max_length n_shared_experts num_hidden_layers num_logits_to_keep num_nextn_predict_layers
    num_query_groups number_of_conv_states pretraining_tp qk_head_dim sep_token_id sliding_window video_end_token_id
    video_start_token_id video_token_id vision_end_token_id vision_start_token_id
"""
FLAGS = """
    add_out_norm attention_bias fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu fused_add_norm
    is_decoder is_encoder_decoder linear_silu mamba_proj_bias moe_router_enable_expert_bias
    moe_shared_expert_overlap mrope_interleaved norm_first output_router_logits rescale_prenorm_residual
    residual_in_fp32 return_last_states seq_aux tie_word_embeddings use_associative_scan use_cache use_conv_bias
    use_falcon_mambapy use_gk use_gv use_inner_decay use_l2warp use_mamba_kernels use_mambapy use_mem_eff_path
    use_output_correction use_output_norm use_shared_mlp_adapter use_short_conv use_sliding_window
"""
NUMBERS = """
    attention_dropout correction_factor embedding_dropout hidden_dropout initializer_range mtp_loss_scaling_factor
    output_dropout router_aux_loss_coef router_jitter_noise time_step_floor time_step_max time_step_min
    z_loss_coefficient
"""
WORDS = """
    autocast_kernel_dtype chunkwise_kernel hidden_act mamba_ssm_cache_dtype mtp_hybrid_override_pattern router_dtype
    score_function scoring_func sequence_kernel step_kernel tokenizer_class topk_method transformers_version
"""
LISTS = "architectures full_attn_idxs layer_types layers_block_type mrope_section mtp_layers_block_type"


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count_or_auto(value: Any) -> bool:
    return is_count(value) or value == "auto"


def is_limit(value: Any) -> bool:
    """Return whether a value is a number, or an object {"__float__": word}, as transformers writes an infinite number."""
    return is_number(value) or (isinstance(value, Mapping) and set(value) == {"__float__"})


def is_limits(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_limit, value))


def of_class(*classes: type) -> Callable[[Any], bool]:
    """Return a function that says whether a value is an instance of one of `classes`."""
    return lambda value: isinstance(value, classes)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS.split(), (is_count, "an integer")),
    **dict.fromkeys(FLAGS.split(), (of_class(bool), "true or false")),
    **dict.fromkeys(NUMBERS.split(), (is_number, "a number")),
    **dict.fromkeys(WORDS.split(), (of_class(str), "a string")),
    **dict.fromkeys(LISTS.split(), (of_class(list, tuple), "a list")),
    "time_step_rank": (is_count_or_auto, "an integer or 'auto'"),
    "time_step_limit": (is_limits, "two numbers"),
}


def check_kinds(values: Mapping, inside: str = ""):
    """Raise ValueError, which names the key, for a value of another type than `KINDS` has for its key. None passes, and so do
    keys that `KINDS` lacks. inside: the text before each key in messages."""
    for key in values.keys() & KINDS.keys():
        fits, kind = KINDS[key]
        if values[key] is not None and not fits(values[key]):
            raise ValueError(f"{inside}{key} in config.json must be {kind}, got {values[key]!r:.100}")

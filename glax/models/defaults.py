"""Read generation_config.json: the tokens that end a text, and how its tokens are drawn."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glax._src.core.files import ContentError, newest, read_json
from glax.models.model import CausalLM

FILE = "generation_config.json"
MOST = 1e6  # the most that `glax generate` takes as a temperature; more tokens than a vocabulary has
# Options that change what is generated and that glax does not have, with the values that change nothing. None never does.
NEUTRAL: dict[str, tuple] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Hold what a checkpoint says about generating from it.

    eos: the tokens that end a text. temperature: 0 unless the file has do_sample. top_k, top_p: None for no limit. unsupported:
    options of the file that would change what is generated, as "name=value".
    """

    eos: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    unsupported: tuple[str, ...] = ()


def generation_defaults(model: CausalLM) -> GenerationDefaults:
    """Return the defaults of the generation_config.json in the folder that the model was loaded from.

    End tokens are those of that file, else those of config.json. Tokens that the vocabulary does not have are left out. Raises
    OSError if the file cannot be read, and ValueError, which names the key, for a value of another kind or range.
    """
    path = None if model.folder is None else newest(Path(model.folder), FILE)
    values: Any = {}
    if path is not None and os.path.lexists(path):
        try:
            _, values = read_json(path)
        except ContentError as error:
            raise ValueError(f"{path} holds no JSON: {error}") from None
        if not isinstance(values, Mapping):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    eos = tokens_of(path, values.get("eos_token_id"))
    if eos is None:
        eos = tokens_of("config.json", model.config.values.get("eos_token_id")) or []
    temperature = number(path, values, "temperature", 1.0)
    top_k, top_p = number(path, values, "top_k", 0), number(path, values, "top_p", 1.0)
    if not (isinstance(top_k, int) and top_k >= 0):
        raise ValueError(f"top_k in {path} must be an integer of at least 0, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p in {path} must be above 0 and at most 1, got {top_p!r}")
    if temperature < 0:
        raise ValueError(f"temperature in {path} must be at least 0, got {temperature!r}")
    sampled = values.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ValueError(f"do_sample in {path} must be true or false, got {sampled!r:.80}")
    others = {name: values.get(name) for name in NEUTRAL}
    return GenerationDefaults(
        tuple(token for token in eos if 0 <= token < model.vocabulary),
        float(temperature) if sampled else 0.0,
        top_k or None,
        float(top_p) if top_p < 1 else None,
        tuple(f"{name}={x!r:.40}" for name, x in others.items() if x is not None and x not in NEUTRAL[name]),
    )


def end_tokens(model: CausalLM) -> tuple[int, ...]:
    """Return the tokens that end a text: `eos` of `generate` and `stream`. See `generation_defaults`."""
    return generation_defaults(model).eos


def tokens_of(path: Path | str | None, value: Any) -> list[int] | None:
    """Return the tokens of an eos_token_id, which is a token, a list of tokens or None."""
    if value is None:
        return None
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise ValueError(f"eos_token_id in {path} must be a token or a list of tokens, got {value!r:.80}")
    return found


def number(path: Path | None, values: Mapping[str, Any], key: str, default: float) -> Any:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{key} in {path} must be a number of at most {MOST:g}, got {value!r:.80}")
    return value

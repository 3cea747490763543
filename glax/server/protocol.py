"""Read the bodies of OpenAI's completions and chat completions as requests; say as its errors what is refused."""

import dataclasses
import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glax._src.core.files import ContentError, parse
from glax.models.generation import GenerationDefaults
from glax.models.tokens import Tokenizer
from glax.server.request import MOST_LOGPROBS, SEEDS, Request, as_tokens
from glax.server.templates import ChatTemplate
from glax.server.text import WINDOW, TokenBytes

MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256  # each new token is searched for all of them
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens, where there is no chat
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of samples, so that those of neighbouring seeds differ

# Fields that change no answer.
IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "parallel_tool_calls",
    ]
)
# Fields that are not supported, each with the values that change nothing. None, too, changes nothing.
NEUTRAL: dict[str, tuple] = dict(
    logit_bias=({},),
    min_p=(0,),
    min_tokens=(0,),
    ignore_eos=(False,),
    stop_token_ids=([],),
    skip_special_tokens=(True,),
)
COMPLETION_NEUTRAL = NEUTRAL | dict(best_of=(1,), echo=(False,), suffix=("",))
CHAT_NEUTRAL = NEUTRAL | dict(
    tools=([],),
    tool_choice=("none", "auto"),
    functions=([],),
    function_call=("none", "auto"),
    response_format=({"type": "text"},),
    modalities=(["text"],),
    audio=(),
    reasoning_effort=(),
    verbosity=(),
    web_search_options=(),
    add_generation_prompt=(True,),
    continue_final_message=(False,),
)
SUPPORTED = frozenset(
    [
        "model",
        "stream",
        "stream_options",
        "n",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
        "logprobs",
    ]
)
COMPLETION_SUPPORTED = SUPPORTED | {"prompt"}
CHAT_SUPPORTED = SUPPORTED | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
MESSAGE_NEUTRAL: dict[str, tuple] = dict(tool_calls=([],), function_call=(), audio=(), annotations=([],), refusal=())
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refusal(Exception):
    """Say why a call has no answer, as the error object of OpenAI's interface.

    message: for people. param: the field of the body that is wrong, or None. status: the HTTP status. code: a word for
    programs.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.type = "invalid_request_error" if status < 500 and status != 429 else "server_error"
        if status == 429:
            self.type, self.code = "rate_limit_error", code or "queue_full"

    def content(self) -> dict:
        """Return the error object."""
        return {"error": dict(message=self.message, type=self.type, param=self.param, code=self.code)}


@dataclasses.dataclass(frozen=True)
class Served:
    """Hold the properties that all calls share: the model's name, its tokenizer and template, and the limits of a request.

    most_samples: the most answers of one call. timeout: seconds until a request ends. defaults: how tokens are drawn where a
    body does not say.
    """

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    template: ChatTemplate | None
    defaults: GenerationDefaults
    max_length: int
    most_samples: int
    timeout: float
    token_bytes: TokenBytes


@dataclasses.dataclass(frozen=True)
class Call:
    """Hold one call: its requests, and the options of its answer.

    requests: `samples` for each of the prompts, in the order of the choices. context: for each request, the tokens on which the
    text of its first token may depend. stops: the texts that end an answer. include_usage: whether a stream ends with the
    numbers of tokens. logprobs: how many likeliest tokens come with each token; None for no logprobs.
    """

    is_chat: bool
    requests: tuple[Request, ...]
    context: tuple[Sequence[int], ...]
    prompt_tokens: int
    samples: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None


def read_call(served: Served, raw: bytes, *, is_chat: bool) -> Call:
    """Return the call that a body describes. raw: the body in JSON. Raises Refusal, which names the field."""
    body = read_body(raw)
    check_fields(
        body, CHAT_SUPPORTED if is_chat else COMPLETION_SUPPORTED, CHAT_NEUTRAL if is_chat else COMPLETION_NEUTRAL
    )
    check_model(served, body)
    stream = boolean(body, "stream")
    options = of_kind(body, "stream_options", dict, "an object", {})
    if options and not stream:
        raise Refusal("stream_options must be left out unless stream is true", "stream_options")
    if unknown := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise Refusal(f"stream_options.{unknown[0]:.80} is not supported", "stream_options")
    samples = integer(body, "n", 1, served.most_samples, 1)
    stops, ends = read_stops(served, body)
    logprobs = read_logprobs(body, is_chat)
    prompts = [read_messages(served, body)] if is_chat else read_prompts(served, body)
    if samples * len(prompts) > served.most_samples:
        got = f"{len(prompts)} prompts and n={samples}"
        raise Refusal(f"the prompts times n must be at most {served.most_samples}, got {got}", "n")
    common: dict[str, Any] = dict(logprobs=logprobs, ends=ends, deadline=served.timeout) | read_drawing(served, body)
    seeds = read_seeds(body, samples)
    try:
        requests = [
            Request(prompt, read_max_tokens(served, body, len(prompt), is_chat), seed=seed, **common)
            for prompt in [as_tokens("prompt", each) for each in prompts]  # samples share one conversion
            for seed in seeds
        ]
    except ValueError as error:
        raise Refusal(str(error)) from None
    return Call(
        is_chat=is_chat,
        requests=tuple(requests),
        context=tuple(() if is_chat else [int(token) for token in request.prompt[-WINDOW:]] for request in requests),
        prompt_tokens=sum(map(len, prompts)),
        samples=samples,
        stops=stops,
        stream=stream,
        include_usage=boolean(options, "include_usage"),
        logprobs=logprobs,
    )


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the object in the body's JSON. Raises Refusal for anything else."""
    try:
        body = parse(raw)
    except ContentError as error:
        raise Refusal(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body must be an object, got {shown(body)}")
    return body


def shown(value) -> str:
    """Return a value as a short text for messages, whatever its size and depth."""
    return reprlib.repr(value)


def check_fields(body: Mapping[str, Any], supported: frozenset[str], neutral: Mapping[str, tuple], of: str = ""):
    """Raise Refusal for a field that is neither in `supported` nor has a value of `neutral`, {name: values without effect}. of:
    the name before each field in messages."""
    for name, value in body.items():
        if name in supported or name in IGNORED or value is None:
            continue
        if name not in neutral:
            raise Refusal(f"{of}{name:.80} is not a known field: leave it out", f"{of}{name:.80}", code="unknown_field")
        if value not in neutral[name]:
            raise Refusal(
                f"{of}{name} is not supported: leave it out, got {shown(value)}", of + name, code="unsupported_field"
            )


def check_model(served: Served, body: Mapping[str, Any]):
    name = body.get("model")
    if not isinstance(name, str):
        raise Refusal(f"model must be the name of a model, {served.name!r}, got {shown(name)}", "model")
    if name != served.name:
        message = f"model must be {served.name!r}, which is served here, got {shown(name)}"
        raise Refusal(message, "model", status=404, code="model_not_found")


def of_kind(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], wanted: str, default=None) -> Any:
    """Return the field `name`, or the default if it is missing or null. Raises Refusal unless it is of type `kind`. wanted: the
    type in words."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Refusal(f"{name} must be {wanted}, got {shown(value)}", name)
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """Return the field `name`, False if it is missing or null. Raises Refusal unless it is a boolean."""
    return of_kind(body, name, bool, "true or false", False)


def integer(body: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> Any:
    """Return the field `name`, or the default if it is missing or null. Raises Refusal unless it is an integer from least to
    most."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refusal(f"{name} must be an integer from {least} to {most}, got {shown(value)}", name)
    return value


def number(body: Mapping[str, Any], name: str, least: float, most: float, default: float) -> float:
    """Return the field `name` as a float, or the default if it is missing or null. Raises Refusal unless it is from least to
    most."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise Refusal(f"{name} must be a number from {least:g} to {most:g}, got {shown(value)}", name)
    return float(value)


def read_drawing(served: Served, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Request` that say how tokens are drawn: from the body, else from generation_config.json, else
    OpenAI's defaults."""
    defaults = served.defaults
    top_p = number(body, "top_p", 0, 1, defaults.top_p or 1.0)
    return dict(
        temperature=number(body, "temperature", 0, 2, defaults.temperature or 1.0),
        top_k=max(integer(body, "top_k", -1, 2**31 - 1, defaults.top_k or 0), 0),
        top_p=max(top_p, 1e-6),  # 0 takes the likeliest token, too
        repetition_penalty=number(body, "repetition_penalty", 0.01, 100, defaults.repetition_penalty or 1.0),
        presence_penalty=number(body, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=number(body, "frequency_penalty", -2, 2, 0.0),
    )


def read_seeds(body: Mapping[str, Any], samples: int) -> list[int | None]:
    """Return the seed of each sample, an integer of 64 bits or None. The first sample has the seed of the body."""
    seed = integer(body, "seed", -SEEDS, SEEDS - 1)
    if seed is None:
        return [None] * samples
    return [(seed + i * SEED_STEP + SEEDS) % (2 * SEEDS) - SEEDS for i in range(samples)]


def read_stops(served: Served, body: Mapping[str, Any]) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return (the texts that end an answer, the tokens that end it: the model's end tokens, and special tokens among the
    texts).

    A special token's text stays among the texts, because ordinary tokens may spell it.
    """
    stop = of_kind(body, "stop", (str, list), "a text or a list of texts", list(served.defaults.stop))
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MOST_STOPS:
        raise Refusal(f"stop must be at most {MOST_STOPS} texts, got {len(texts)}", "stop")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MOST_STOP_CHARACTERS:
            raise Refusal(f"stop must be texts of 1 to {MOST_STOP_CHARACTERS} characters, got {shown(text)}", "stop")
    special = served.token_bytes.special
    ends = {special[text] for text in texts if text in special}
    return tuple(texts), frozenset(ends) | frozenset(served.defaults.eos)


def read_logprobs(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Return how many likeliest tokens the answer lists with each token, or None for no logprobs."""
    if not is_chat:
        return integer(body, "logprobs", 0, MOST_LOGPROBS)
    most = integer(body, "top_logprobs", 0, MOST_LOGPROBS)
    if boolean(body, "logprobs"):
        return most or 0
    if most is not None:
        raise Refusal("top_logprobs must be left out unless logprobs is true", "top_logprobs")
    return None


def read_max_tokens(served: Served, body: Mapping[str, Any], length: int, is_chat: bool) -> int:
    """Return the most tokens of the answer to a prompt of `length` tokens, by the body and the model's length."""
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    room = served.max_length - length
    count = integer(body, name, 1, 2**31 - 1)
    if count is None:
        most = served.defaults.max_new_tokens or (room if is_chat else COMPLETION_TOKENS)
        count = max(min(most, room), 1)  # a prompt that leaves no room is refused below
    if count > room:
        raise Refusal(
            f"the prompt and {name} must be at most {served.max_length} tokens together, got {length} and {count}",
            "messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )
    return count


def read_prompts(served: Served, body: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of each prompt of a completion. The body has a text, a list of tokens, or a list of either."""
    prompt = of_kind(body, "prompt", (str, list), "a text, a list of tokens, or a list of these")
    if prompt is None:
        raise Refusal("prompt must be given: a text, a list of tokens, or a list of these", "prompt")
    is_one = isinstance(prompt, str) or all(isinstance(x, int) for x in prompt)
    prompts = [prompt] if is_one else prompt
    if len(prompts) > served.most_samples:
        raise Refusal(f"prompt must be at most {served.most_samples} prompts, got {len(prompts)}", "prompt")
    return [read_prompt(served, each) for each in prompts]


def read_prompt(served: Served, prompt: Any) -> list[int]:
    """Return the tokens of one prompt, a text or a list of tokens. Raises Refusal for anything else, and for no tokens."""
    if isinstance(prompt, str):
        return encoded(served, prompt, "prompt", add_special_tokens=True)
    if not isinstance(prompt, list):
        raise Refusal(f"prompt must be a text, a list of tokens, or a list of these, got {shown(prompt)}", "prompt")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < served.vocabulary:
            raise Refusal(f"prompt must hold tokens from 0 to {served.vocabulary - 1}, got {shown(token)}", "prompt")
    if not prompt:
        raise Refusal("prompt must have at least one token, got none", "prompt")
    return prompt


def encoded(served: Served, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text. field: its name in messages. Raises Refusal for a text without tokens, or that UTF-8 cannot
    hold."""
    try:
        tokens = served.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise Refusal(f"{field} must be text that UTF-8 can hold: {error}", field) from None
    if not tokens:
        raise Refusal(f"{field} must have at least one token, got {shown(text)}", field)
    return tokens


def read_messages(served: Served, body: Mapping[str, Any]) -> list[int]:
    """Return the tokens of the prompt that the chat template renders from the body's messages."""
    if served.template is None:
        raise Refusal("this model has no chat template: use /v1/completions", "messages", code="no_chat_template")
    messages = of_kind(body, "messages", list, "a list of messages", [])
    if not messages:
        raise Refusal("messages must be a list of at least one message", "messages")
    variables = of_kind(body, "chat_template_kwargs", dict, "an object", {})
    if reserved := sorted({"messages", "self"} & set(variables)):
        raise Refusal(f"chat_template_kwargs must not have {reserved[0]!r}", "chat_template_kwargs")
    checked = [read_message(served.template, message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        text = served.template.render(checked, **variables)
    except ValueError as error:
        raise Refusal(str(error), "messages") from None
    return encoded(served, text, "messages", add_special_tokens=False)  # the template has written those


def read_message(template: ChatTemplate, message: Any, field: str) -> dict[str, str]:
    """Return a message of a chat as the template takes it: role, content, and name and tool_call_id if it has them.

    field: its name in messages of errors. Raises Refusal for anything else.
    """
    if not isinstance(message, dict):
        raise Refusal(f"{field} must be an object, got {shown(message)}", field)
    check_fields(message, frozenset(("role", "content", "name", "tool_call_id")), MESSAGE_NEUTRAL, f"{field}.")
    role = message.get("role")
    if role not in ROLES:
        raise Refusal(f"{field}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{field}.role")
    if role == "developer" and role not in template.source:
        role = "system"
    read = dict(role=role, content=read_content(message.get("content"), f"{field}.content"))
    for name in ("name", "tool_call_id"):
        if (value := of_kind(message, name, str, "a text")) is not None:
            read[name] = value
    return read


def read_content(content: Any, field: str) -> str:
    """Return the text of a message's content: a text, or parts, which are joined by line breaks. field: its name, for a
    Refusal."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise Refusal(f"{field} must be a text, or a list of parts of text, got {shown(content)}", field)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise Refusal(f'{field} must have parts of the type "text" alone, got {shown(kind or part)}', field)
        if not isinstance(part.get("text"), str):
            raise Refusal(f"{field} must have the text of each part, got {shown(part.get('text'))}", field)
        texts.append(part["text"])
    return "\n".join(texts)


def name_of(folder: Path) -> str:
    """Return the name under which the model of a folder is served."""
    return folder.resolve().name


def finite(logprob: float) -> float:
    """Return a logprob, with -9999 for minus infinity, as in OpenAI's interface, because JSON has no infinity."""
    return logprob if math.isfinite(logprob) else -9999.0

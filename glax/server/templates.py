"""Render messages as the prompt of a model, by the chat template in its tokenizer's folder."""

import datetime
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from glax._src.core.files import newest, read_regular
from glax.models.folders import read_optional_object

CONFIG, FILE, SPECIAL = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
# The special tokens that a template may name.
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Generation(jinja2.ext.Extension):
    """Parse jinja's tag `generation`, which marks an assistant's words for training, and render its content unchanged."""

    tags = {"generation"}  # noqa: RUF012  the type is jinja2's

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Render messages by a template that a checkpoint has, in jinja2's sandbox, as transformers does.

    source: the template's text. tokens: the special tokens that it may name. Raises ValueError if the text is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str = FILE):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self.source, self.tokens = source, dict(tokens)
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{origin} holds no template of jinja2: line {error.lineno}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables) -> str:
        """Return the prompt, which ends where the assistant's answer begins. It already contains its special tokens.

        variables: other variables of the template. Raises ValueError, with the template's own words, for messages that it
        refuses.
        """
        given = dict(tools=None, documents=None, add_generation_prompt=True) | self.tokens | variables
        try:
            return self.template.render(messages=messages, **given)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error!s:.200}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"the chat template cannot read the messages: {type(error).__name__}: {error!s:.200}"
            ) from None


def raise_exception(message):
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return JSON without jinja2's escapes of HTML, as templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def find_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a folder, or None if it has none.

    The file chat_template.jinja comes before `chat_template` of tokenizer_config.json, a text or a list of texts with names, of
    which the one with the name "default" is taken. Warns if no template has this name. Raises ValueError for what is no
    template, and OSError if a file cannot be read.
    """
    config, special = (read_optional_object(newest(folder, name)) for name in (CONFIG, SPECIAL))
    tokens = {name: text for name in TOKENS if (text := token_text(config.get(name, special.get(name)))) is not None}
    path = newest(folder, FILE)
    if os.path.lexists(path):
        _, raw = read_regular(path)
        try:
            return ChatTemplate(raw.decode(), tokens, str(path))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8, and is not at byte {error.start}") from None
    found, origin = config.get("chat_template"), f"chat_template in {newest(folder, CONFIG)}"
    if isinstance(found, list):
        named = all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in found)
        templates = {x["name"]: x.get("template") for x in found} if named else {}
        if templates and "default" not in templates:
            warnings.warn(f"{origin} has no template 'default', but {sorted(templates)}: no chat", stacklevel=2)
            return None
        found = templates.get("default", found)
    if found is None:
        return None
    if not isinstance(found, str):
        raise ValueError(f"{origin} must be a text, or a list of objects with name and template, got {found!r:.80}")
    return ChatTemplate(found, tokens, origin)


def token_text(value) -> str | None:
    """Return the text of a special token: the value, or its "content" if it is an object; None for anything else."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None

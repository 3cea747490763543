"""Write the table of docs/checkpoints.md that says what runs and what is refused, by type, from the functions that build models.

python docs/model_types.py            prints the table
python docs/model_types.py --write    replaces it in the page

Each type is built from the configs of its fixtures (tests/models/fixtures), in which every option that it has is set. What the
models' own code reads (`glax.models.read_keys`) and no build takes is then set, to see whether the config is refused.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from unittest import mock

from flax import nnx

import glax.nn
from glax.models.config import NO_EFFECT, ModelConfig, Options, UnsupportedOption, silent
from glax.models.load import MODEL_TYPES, abstract_model
from glax.models.model import CausalLM
from glax.models.names import FLA, TRANSFORMERS
from glax.models.read_keys import READ_KEYS, READ_WORDS
from glax.nn import Experts, ShortConvolution
from glax.nn.layer import Layer

PAGE = pathlib.Path(__file__).parent / "checkpoints.md"
FIXTURES = PAGE.parents[1] / "tests" / "models" / "fixtures"
BEGIN, END = "<!-- model types: begin -->\n", "<!-- model types: end -->"
# Codes whose row of READ_WORDS does not name its package.
WRITERS = {
    "bailing_moe_v2_5": "Ring-V2.5",
    "kimi_k3": "Kimi-K3",
    "kimi_k3_text": "Kimi-K3",
    "mamba_fla": "fla",
    "mamba2_fla": "fla",
    "mamba3": "fla",
    "mamba2_state_spaces": "state-spaces",
}
PROBES = ("never", 3, True, ["never"])
OTHERWISE = {"quantization_config"}  # read before the model is built
# Choices that leave little out: every activation of a package, and both values of a flag.
ALL = (set(FLA), set(TRANSFORMERS), {True, False})


@dataclasses.dataclass
class Code:
    """Hold what builds by one code (a row of `READ_KEYS`) of a model type did. config: one that it built.

    unread: the beginnings of tensors of other models. taken: the options of config.json that the builds took. choices: the
    values that an option may have, by its name.
    """

    kind: str
    name: str
    config: dict
    layers: set[str] = dataclasses.field(default_factory=set)
    unread: set[str] = dataclasses.field(default_factory=set)
    taken: set[str] = dataclasses.field(default_factory=set)
    choices: dict[str, list] = dataclasses.field(default_factory=dict)

    @property
    def writer(self) -> str:
        return WRITERS.get(self.name) or ("fla" if "@fla" in READ_WORDS[self.name] else "transformers")

    @functools.cached_property
    def refused(self) -> set[str]:
        """Return the options that the own code reads and whose name a refusal gives."""
        return {
            key for key in READ_KEYS[self.name] - NO_EFFECT - OTHERWISE - self.taken if is_refused(self.config, key)
        }


def is_refused(config: dict, key: str) -> bool:
    """Return whether a config is refused for having an option, whatever its value."""
    for value in PROBES:
        try:
            abstract_model(ModelConfig.of(config | {key: value}))
        except UnsupportedOption as error:
            return re.match(rf"config.json has options that are not supported for .*: {key}=", str(error)) is not None
        except ValueError:  # a value that this option cannot have
            continue
        return False
    return False


@contextlib.contextmanager
def recorded(into: list[tuple[Options, str, list | None]]) -> Iterator[None]:
    """Add (the options, a name, the values of a choice or None) for each option that a build takes."""
    take, ignore, choice = Options.take, Options.ignore, Options.choice

    def taking(self, key, *rest):
        into.append((self, key, None))
        return take(self, key, *rest)

    def ignoring(self, *keys):
        into.extend((self, key, None) for key in keys)
        return ignore(self, *keys)

    def choosing(self, key, default, supported):
        into.append((self, key, list(supported)))
        return choice(self, key, default, supported)

    with mock.patch.multiple(Options, take=taking, ignore=ignoring, choice=choosing):
        yield


def configs() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/config.json"))]


def codes() -> list[Code]:
    """Return what the builds of all configs did, by type and code."""
    found: dict[tuple[str, str], Code] = {}
    rows = {id(keys): name for name, keys in READ_KEYS.items()}
    for config in configs():
        taken: list[tuple[Options, str, list | None]] = []
        with silent(), recorded(taken):
            model = abstract_model(ModelConfig.of(config))
        kind = config.get("model_type", "mamba2")
        outermost = next(options for options, _, _ in taken if options.outer is None)
        code = found.setdefault((kind, name := rows[id(outermost.read)]), Code(kind, name, config))
        code.layers |= layers_of(model)
        code.unread |= {
            re.sub(r"\d+", "N", pattern.strip("^").replace("\\", "")) + "*" for pattern in model.names.others
        }
        code.taken |= {key for options, key, _ in taken if options.outer is None}
        code.choices |= {f"{options.inside}{key}": values for options, key, values in taken if values is not None}
    return [found[key] for key in sorted(found)]


def layers_of(model: CausalLM) -> set[str]:
    """Return the names of a model's layers with a state, and of its experts: the public names where there are any."""
    found = set()
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts | Layer) and type(module) is not ShortConvolution:
            public = [base.__name__ for base in type(module).__mro__ if base.__name__ in glax.nn.__all__]
            found.add([*public, type(module).__name__][0])
    return found


def paper(kind: str) -> str:
    """Return a link to the paper or page that the function of a type names."""
    (address,) = re.findall(r"https://\S+?(?=[.,]?(?:\s|$))", MODEL_TYPES[kind].__doc__ or "")
    number = re.search(r"arxiv\.org/abs/(.+)", address)
    return f"[{number[1] if number else 'page'}]({address})"


def quoted(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def usual(found: list[Code], writer: str) -> set[str]:
    """Return the keys that more than half of a package's types refuse."""
    counts = collections.Counter(key for code in found if code.writer == writer for key in code.refused)
    return {key for key, count in counts.items() if 2 * count > sum(code.writer == writer for code in found)}


def table() -> str:
    """Return a table of what each type and code has, one of what it refuses, and a sentence on each package's usual refusals."""
    found = codes()
    shared = {writer: usual(found, writer) for writer in ("fla", "transformers")}
    types, refusals = [], []
    for code in found:
        few = [
            f"`{name}`: {', '.join(f'`{json.dumps(value)}`' for value in values)}"
            for name, values in sorted(code.choices.items())
            if not any(all(value in values for value in every) for every in ALL)
        ]
        own = code.refused - shared.get(code.writer, set())
        name = (f"`{code.kind}`", code.writer)
        types.append((*name, paper(code.kind), quoted(code.layers), quoted(code.unread)))
        if few or own:
            refusals.append((*name, "; ".join(few), quoted(own)))
    head = ("`model_type`", "of")
    lines = rows((*head, "paper", "layers", "not read"), types)
    lines += ["", *rows((*head, "of these options, these values alone", "refused"), refusals)]
    sentences = [
        f"- Refused by each type of {writer} whose code reads it: {quoted(keys)}." for writer, keys in shared.items()
    ]
    return "\n".join([*lines, "", *sentences, ""])


def rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body)]


def between(text: str) -> str:
    return f"{BEGIN}{text}{END}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + between(table()) + rest.split(END)[1])
    else:
        print(table())

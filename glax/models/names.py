"""Map the names and layouts of parameters to those of checkpoints, and the names of functions to those of glax.nn."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

Rules = tuple[tuple[str, str], ...]  # (pattern, replacement) of re.sub

# The last part of a parameter's path, and what it is in a checkpoint: (name, from glax's layout to the checkpoint's, and from
# the checkpoint's to glax's).
Layout = tuple[str, Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def same(x: np.ndarray) -> np.ndarray:
    """Return x unchanged, for layouts that are equal here and in a checkpoint."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """Return x [..., a, b] as [..., b, a]."""
    return np.swapaxes(x, -2, -1)


def filter_to_torch(x: np.ndarray) -> np.ndarray:
    """Return a filter [size, width] as [width, 1, size]."""
    return x.T[:, None, :]


def filter_from_torch(x: np.ndarray) -> np.ndarray:
    """Return a filter [width, 1, size] as [size, width], the inverse of `filter_to_torch`."""
    return x[:, 0, :].T


LEAVES: dict[str, Layout] = {
    "kernel": ("weight", transposed, transposed),
    "embedding": ("weight", same, same),
    "scale": ("weight", same, same),
    "filter": ("weight", filter_to_torch, filter_from_torch),
}


@dataclasses.dataclass(frozen=True)
class Names:
    """Map the path of a parameter, such as "blocks.3.attn.query.kernel", to its name in a checkpoint.

    rules: (pattern, replacement) of re.sub, applied to the path in order. Then `LEAVES` renames the last part of the path.
    layouts: further entries like those of LEAVES. aliases: (pattern of another name that files have, the name by the rules) of
    re.sub. stacked: (pattern of a tensor that holds all experts, the names of its equal parts with `*` for the expert), for
    files that have such tensors in place of one for each expert. stacked_rows: (pattern of a tensor [rows, columns], the names
    of its rows), for files that have such tensors in place of one for each row. joined: names of the parts of one tensor, in
    order, which files may divide otherwise: "q_conv1d" for (...).q_conv1d.weight. ignored: patterns of tensors that belong to
    no parameter. others: patterns of tensors of other models in the checkpoint, such as a vision tower: not read, and saved
    again. float32: patterns of tensors that the model's own code has in float32, in a model of narrower parameters too.
    table_rows: (the name of a parameter with `*`, the rows of its tensors together), for tables whose last tensor may have fewer
    rows. scales: (pattern, replacement) of re.sub, which turn the name of a tensor in float8 into the name of the one number that
    scales it. The scales of other quantized tensors stand beside them, as `glax.models.quantization` says.
    """

    rules: Rules
    layouts: tuple[tuple[str, Layout], ...] = ()
    aliases: Rules = ()
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stacked_rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    joined: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    table_rows: tuple[tuple[str, int], ...] = ()
    scales: Rules = ()

    def __call__(self, path: str) -> str:
        for pattern, replacement in self.rules:
            path = compiled(pattern).sub(replacement, path)
        front, _, last = path.rpartition(".")
        name = self.layout(last)[0] or last
        return f"{front}.{name}" if front else name

    def is_ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)

    def other(self, name: str) -> str:
        """Return the part of a tensor's name that assigns it to another model (`others`); "" for a tensor of this model."""
        found = (re.search(pattern, name) for pattern in self.others)
        return next((match.group() for match in found if match), "")

    def dtype(self, name: str, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the parameter called `name` in a model whose parameters have `dtype`."""
        is_wide = dtype.itemsize < 4 and any(re.search(pattern, name) for pattern in self.float32)
        return np.dtype(np.float32) if is_wide else dtype

    def last_rows(self, name: str, param: Any) -> int | None:
        """Return the number of rows of the last tensor of a table `param` [tensors, rows, ...]; None for a parameter that is
        not in `table_rows`."""
        rows = dict(self.table_rows).get(name)
        return None if rows is None else rows - (param.shape[0] - 1) * param.shape[1]

    def layout(self, last: str) -> Layout:
        """Return the `Layout` of a parameter whose path ends in `last`: from `layouts`, else from LEAVES, else the name `last`
        and no change."""
        return dict(self.layouts).get(last) or LEAVES.get(last) or (last, same, same)


@functools.cache
def compiled(pattern: str) -> re.Pattern:
    """Return the compiled pattern, and cache it. A deep model has more rules than the cache of `re` holds."""
    return re.compile(pattern)


def renamed(inside: str, table: Mapping[str, str]) -> Rules:
    """Return rules that rename the parts of a module of each block. inside: a pattern of the module's name. table: {a part: its
    name in the checkpoint}, such as {"query": "q_proj"}."""
    return tuple((rf"(\.{inside})\.{re.escape(old)}(?=\.|$)", rf"\1.{new}") for old, new in table.items())


def parameters(model: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yield (the path, such as "blocks.0.attn.query.kernel"; the parameter) for each parameter."""
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield ".".join(map(str, path)), param


def checkpoint_name(model: Any, path: str) -> tuple[str, Layout]:
    """Return the name of a parameter of a CausalLM in the checkpoint, and its `Layout`."""
    return model.names(path), model.names.layout(path.rpartition(".")[2])


def stored_names(name: str, param: nnx.Param | np.ndarray | jax.Array) -> list[str]:
    """Return the names of the tensors that hold a parameter: one, or for a name with `*` one for each row of its first axis."""
    return [name.replace("*", str(i)) for i in range(param.shape[0])] if "*" in name else [name]


def one_of(layers: Iterable[int]) -> str:
    """Return a pattern that matches exactly the number of one of `layers`; one that matches nothing for no layers."""
    numbers = "|".join(map(str, layers))
    return rf"\b(?:{numbers})\b" if numbers else "(?!)"


def mixer_names(kinds: Sequence[str], tables: Mapping[str, tuple[str, Mapping[str, str]]], part: str = "attn") -> Rules:
    """Return rules for the names of each block's mixer and its parts.

    kinds: the kind of each block. tables: {a kind: (the mixer's name in the checkpoint, {a part of the mixer: its name
    there})}. part: the attribute of a block that holds its mixer.
    """
    rules: list[tuple[str, str]] = []
    # Every path passes every rule: with rules for each layer, names would cost the square of the number of layers.
    for kind in dict.fromkeys(kinds):
        name, table = tables[kind]
        layers = one_of(layer for layer, other in enumerate(kinds) if other == kind)
        rules += (*renamed(rf"{layers}\.{part}", table), (rf"(\.{layers})\.{part}(?=\.)", rf"\1.{name}"))
    return tuple(rules)


def outer_names(
    embedding: str = "model.embed_tokens",
    blocks: str = "model.layers",
    norm: str = "model.norm",
    attn_norm: str = "input_layernorm",
    mlp_norm: str = "post_attention_layernorm",
) -> Rules:
    """Return rules for the names of parameters outside of mixers and MLPs. They apply last. The arguments are names in the
    checkpoint."""
    return (
        (r"\.attn_norm\.", f".{attn_norm}."),
        (r"\.mlp_norm\.", f".{mlp_norm}."),
        (r"^embedding\.", f"{embedding}."),
        (r"^blocks\.", f"{blocks}."),
        (r"^norm\.", f"{norm}."),
        (r"^head\.", "lm_head."),
    )


def transposed_layouts(*names: str) -> tuple[tuple[str, Layout], ...]:
    """Return the entries of `Names.layouts` for weights [..., inputs, outputs] that a checkpoint stores as [..., outputs,
    inputs], under the name "weight". names: the last parts of their paths."""
    return tuple((name, ("weight", transposed, transposed)) for name in names)


def stacked_experts(prefix: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the value of `Names.stacked` for files that hold the gated experts of a layer in two tensors, as the modules of
    transformers do.

    prefix: a pattern of the part of the name before `.experts`.
    """
    found = rf"^({prefix}\.experts)"
    return (
        (rf"{found}\.gate_up_proj$", (r"\1.*.gate_proj.weight", r"\1.*.up_proj.weight")),
        (rf"{found}\.down_proj$", (r"\1.*.down_proj.weight",)),
    )


# ---- the parts of layers, as the checkpoints of fla and transformers call them ---------------------------------------------

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
NORMED_ATTENTION = ATTENTION | {"query_norm": "q_norm", "key_norm": "k_norm"}
CONVOLUTIONS = {"query_conv": "q_conv1d", "key_conv": "k_conv1d", "value_conv": "v_conv1d"}
MAMBA = {"input": "in_proj", "conv": "conv1d", "output": "out_proj"}
GATED_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

# ---- functions: the names of configs, and those of `glax.nn.parts.ACTIVATIONS` ---------------------------------------------

FLA = {
    name: name for name in ("relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu")
}  # gelu here is the approximation by tanh
TRANSFORMERS = {
    name: name for name in ("hardswish", "leaky_relu", "mish", "quick_gelu", "relu", "relu6", "sigmoid", "silu", "tanh")
} | {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "linear": "identity",
    "relu2": "sqrelu",
    "swish": "silu",
}

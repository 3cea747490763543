"""Map the names and layouts of parameters to those of checkpoints."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np

# The last part of a parameter's path, and what it is in a checkpoint: (name, to the checkpoint's layout, and back).
Layout = tuple[str, Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def same(x: np.ndarray) -> np.ndarray:
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """Return x [..., a, b] as [..., b, a]."""
    return np.swapaxes(x, -2, -1)


def filter_to_torch(x: np.ndarray) -> np.ndarray:
    """Return a filter [size, width] as [width, 1, size]."""
    return x.T[:, None, :]


def filter_from_torch(x: np.ndarray) -> np.ndarray:
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
    layouts: further entries like those of LEAVES. aliases: (another name that files have, the name by the rules). ignored:
    patterns of tensors that belong to no parameter. float32: patterns of tensors that the model's own code has in float32, in a
    model of narrower parameters too.
    """

    rules: tuple[tuple[str, str], ...]
    layouts: tuple[tuple[str, Layout], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()

    def __call__(self, path: str) -> str:
        for pattern, replacement in self.rules:
            path = re.sub(pattern, replacement, path)
        front, _, last = path.rpartition(".")
        name = self.layout(last)[0] or last
        return f"{front}.{name}" if front else name

    def is_ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)

    def dtype(self, name: str, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the parameter called `name` in a model whose parameters have `dtype`."""
        is_wide = dtype.itemsize < 4 and any(re.search(pattern, name) for pattern in self.float32)
        return np.dtype(np.float32) if is_wide else dtype

    def layout(self, last: str) -> Layout:
        return dict(self.layouts).get(last) or LEAVES.get(last) or (last, same, same)


def renamed(inside: str, table: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return rules that rename the parts of the module `inside` of a block, such as {"query": "q_proj"}."""
    return tuple((rf"(\.{inside})\.{re.escape(old)}(?=\.|$)", rf"\1.{new}") for old, new in table.items())

"""Fold the arguments of the delta rule, `beta` and those of `erase`, into one value, `Erasure`."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Erasure:
    """Hold the erase vector e and the write gate w of the delta rule: S = S_bar + k (w * v - S_bar^T e)^T.

    S_bar is the decayed state before the token. `form` names the arrays that are given: `beta` (e = beta k and w = beta),
    `erase` (w = 1) or `erase+write`, the last two also with `+along`. A form is a part of the tree's structure, so it is known
    while tracing.

    With `before_decay` e reads the state before the token's own decay: S = S_bar + k (w * v - S_{t-1}^T e)^T. Only this read
    changes. In a chunk, where G_i is the sum of log decays through token i, the read takes the decay e^{G_{i-1}} and not
    e^{G_i}. No decay is divided out, so decays of 0 are exact. The first token of a sequence or of a segment reads the initial
    state of this sequence or segment.

    With `along`, what e reads is subtracted along another key than k: S = S_bar + k (w * v)^T - along (S_bar^T e)^T.
    """

    beta: Float[Array, "B T H"] | None = None
    erase: Float[Array, "B T H K"] | None = None
    write: Float[Array, "B T H V"] | None = None
    along: Float[Array, "B T H K"] | None = None
    before_decay: bool = dataclasses.field(default=False, metadata=dict(static=True))

    replace = dataclasses.replace

    @classmethod
    def from_arguments(cls, beta, erase, write, along=None, before_decay: bool = False) -> "Erasure | None":
        """Return the `Erasure` of the arguments of `recurrent` with these names (along: `erase_along`, before_decay:
        `erase_before_decay`). Return None if beta and erase are None.

        Raises ValueError if `beta` comes with `erase` or `write`, or if another argument comes without `erase`.
        """
        if beta is not None and not (erase is None and write is None):
            other = "write" if erase is None else "erase"
            raise ValueError(
                f"beta must come without erase and write, for it stands for erase = beta * key and write = beta; got {other} "
                "with it: pass beta alone, or erase and write"
            )
        if write is not None and erase is None:
            raise ValueError("write must come with erase, got write alone: pass erase, zeros where nothing is erased")
        for name, is_given in dict(erase_along=along is not None, erase_before_decay=before_decay).items():
            if is_given and erase is None:
                raise ValueError(f"{name} must come with erase, got it without: pass erase, such as beta * key")
        if beta is None and erase is None:
            return None
        return cls(beta, erase, write, along, before_decay)

    @property
    def form(self) -> str:
        """Return the name of the form: "beta", "erase" or "erase+write", and "+along"."""
        return "+".join(name for name, x in self.arrays.items() if x is not None)

    @property
    def arrays(self) -> dict[str, Array | None]:
        """Return beta, erase, write and along by name, None for each that is absent."""
        return dict(beta=self.beta, erase=self.erase, write=self.write, along=self.along)

    def vectors(self, k: Float[Array, "*rows K"]) -> tuple[Array, Array | None]:
        """Return (e [*rows, K], w) for the keys k. w is [*rows, V] or [*rows, 1], or None where it is 1.

        A row is one token of one head. The erasure's arrays must have the same rows as k: [*rows, width], with beta as
        [*rows, 1].
        """
        if self.beta is not None:
            return self.beta * k, self.beta
        assert self.erase is not None
        return self.erase, self.write

    def gradient(self, de: Float[Array, "*rows K"], d_written: Float[Array, "*rows V"], k, v):
        """Return (an `Erasure` of the gradients of beta, erase and write; the term that the erasure adds to the gradient of k).

        de: the gradient of e. d_written: the gradient of the written value w * v. Every array has the rows of k [*rows, K] and
        v [*rows, V], with beta as [*rows, 1]. The term of dk is beta * de for the form "beta", and None for the other forms.
        `along` of the result is no gradient: the result holds this erasure's own `along`, which callers replace.
        """
        if self.beta is not None:
            d_beta = (de * k).sum(-1, keepdims=True) + (d_written * v).sum(-1, keepdims=True)
            return self.replace(beta=d_beta), self.beta * de
        return self.replace(erase=de, write=None if self.write is None else d_written * v), None


def arrays_of(erasure: Erasure | None) -> tuple[Array | None, Array | None, Array | None]:
    """Return beta, erase and write, with None for each that is absent; three times None without an erasure.

    `along` is not among them. A kernel that takes it reads `erasure.along`.
    """
    return (None, None, None) if erasure is None else (erasure.beta, erasure.erase, erasure.write)

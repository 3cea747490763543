"""Fold the arguments `beta`, `erase` and `write` of the delta rule into one value, `Erasure`."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Erasure:
    """Hold the erase vector e and the write gate w of the delta rule: S = S_bar + k (w * v - S_bar^T e)^T.

    S_bar is the decayed state before the token. There are three forms: `beta` (e = beta k and w = beta), `erase` (w = 1), and
    `erase` with `write`. The form is part of the tree's structure, so it is known while tracing.
    """

    beta: Float[Array, "B T H"] | None = None
    erase: Float[Array, "B T H K"] | None = None
    write: Float[Array, "B T H V"] | None = None

    replace = dataclasses.replace

    @classmethod
    def from_arguments(cls, beta, erase, write) -> "Erasure | None":
        """Return the erasure that `beta`, `erase` and `write` of `recurrent` describe. Return None if all three are None.

        Raises ValueError if `beta` comes with `erase` or `write`, or if `write` comes without `erase`.
        """
        if beta is not None and not (erase is None and write is None):
            other = "write" if erase is None else "erase"
            raise ValueError(
                f"beta must come without erase and write, for it stands for erase = beta * key and write = beta; got {other} "
                "with it: pass beta alone, or erase and write"
            )
        if write is not None and erase is None:
            raise ValueError("write must come with erase, got write alone: pass erase, zeros where nothing is erased")
        if beta is None and erase is None:
            return None
        return cls(beta, erase, write)

    @property
    def form(self) -> str:
        """Return the name of the form: "beta", "erase" or "erase+write"."""
        names = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        return "+".join(names)

    def vectors(self, k: Float[Array, "*rows K"]) -> tuple[Array, Array | None]:
        """Return e [*rows, K] and w. The shape of w is [*rows, V] or [*rows, 1], and w is None where it is 1.

        Every array has the rows of k, and beta is [*rows, 1].
        """
        if self.beta is not None:
            return self.beta * k, self.beta
        assert self.erase is not None
        return self.erase, self.write

    def gradient(self, de: Float[Array, "*rows K"], d_written: Float[Array, "*rows V"], k, v):
        """Return the gradient of the erasure and the term that it adds to the gradient of k.

        de: the gradient of e. d_written: the gradient of the written value w * v. Every array has the rows of k, and beta is
        [*rows, 1]. The term of dk is beta * de for the form "beta", and None for the other forms.
        """
        if self.beta is not None:
            d_beta = (de * k).sum(-1, keepdims=True) + (d_written * v).sum(-1, keepdims=True)
            return Erasure(beta=d_beta), self.beta * de
        return Erasure(erase=de, write=None if self.write is None else d_written * v), None


def arrays_of(erasure: Erasure | None) -> tuple[Array | None, Array | None, Array | None]:
    """Return beta, erase and write, with None for each that is absent; three times None without an erasure."""
    return (None, None, None) if erasure is None else (erasure.beta, erasure.erase, erasure.write)

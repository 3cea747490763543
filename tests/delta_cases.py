"""The calls of the delta rule that every kernel which erases is held to, as data."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.recurrence import Recurrence
from glax.testing.cases import FORMS, gate

ERASURES = (("beta",), ("erase",), ("erase", "write"))
STRENGTHS = ("log-sigmoid", "0", "-1e-6", "-20", "-120", "-inf", "+0.05", "-100 on 5%", "-inf on 5%")
BETAS = ("random", "to 2", "0", "1", "2", "1e-3")
KEYS = ("normalised", "repeated", "zero", "some zero")
PACKED = dict(cuts=(0, 0, 30, 31, 31, 64, 131, 131), T=137)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The values of one set of inputs; all draws of a case share its shapes, and so one compilation."""

    strength: str = "log-sigmoid"
    beta: str = "random"
    keys: str = "normalised"

    def __str__(self):
        return f"gates {self.strength}, beta {self.beta}, keys {self.keys}"


DRAWS = (
    *(Draw(strength=strength) for strength in STRENGTHS),
    *(Draw("mild", beta, keys) for beta in BETAS for keys in KEYS if (beta, keys) != ("random", "normalised")),
    *(Draw("0", beta, "repeated") for beta in ("1", "2", "to 2")),
)
BEFORE_DECAY = tuple(Draw(strength) for strength in STRENGTHS)
FEW = (Draw(), Draw("-100 on 5%", "to 2"), Draw("mild", "2", "repeated"))


@dataclasses.dataclass(frozen=True)
class DeltaCase:
    """One set of shapes. `cuts` packs sequences; rows behind the last cut are padding, and hold NaN. before_decay: whether erase
    reads the state before the token's decay. along: whether it takes what it reads along another key."""

    name: str
    gates: tuple[str, ...] = ("gk",)
    erasure: tuple[str, ...] = ("beta",)
    B: int = 1
    T: int = 137
    heads: tuple[int, int, int] = (2, 2, 2)
    K: int = 16
    V: int = 24
    dtype: str = "float32"
    gate_dtype: str = "float32"
    cuts: tuple[int, ...] | None = None
    reverse: bool = False
    state: bool = True
    before_decay: bool = False
    along: bool = False
    draws: tuple[Draw, ...] = FEW

    def __str__(self):
        return self.name

    def recurrence(self, draw: Draw, seed: int = 0) -> Recurrence:
        options = dict(reverse=self.reverse, erase_before_decay=self.before_decay)
        return bind(**self.inputs(draw, seed), cu_seqlens=self.boundaries, **options)

    @property
    def boundaries(self):
        return None if self.cuts is None else jnp.asarray(self.cuts, jnp.int32)

    def inputs(self, draw: Draw, seed: int = 0) -> dict[str, jax.Array]:
        """The arguments of `glax.recurrent`, without cu_seqlens and reverse."""
        rng = np.random.default_rng(seed)
        B, T, (Hq, Hk, Hv), K, V, H = self.B, self.T, self.heads, self.K, self.V, max(self.heads)
        N = B if self.cuts is None else len(self.cuts) - 1
        key = keys(rng, (B, T, Hk, K), draw.keys)
        arrays = dict(query=rng.normal(size=(B, T, Hq, K)), key=key, value=rng.normal(size=(B, T, Hv, V)))
        shapes = dict(g=(B, T, H), g_gamma=(N, H), gk=(B, T, H, K), gv=(B, T, H, V))
        gates = {name: gate(rng, shapes[name], draw.strength) for name in self.gates}
        shapes = dict(beta=(B, T, H), erase=(B, T, H, 1), write=(B, T, H, V))
        arrays |= {name: betas(rng, shapes[name], draw.beta) for name in self.erasure}
        if "erase" in arrays:
            arrays["erase"] = arrays["erase"] * np.repeat(key, H // Hk, axis=2)
        if self.along:
            arrays["erase_along"] = keys(rng, (B, T, H, K), "normalised")
        arrays |= gates
        if self.cuts is not None:
            for name in arrays.keys() - {"g_gamma"}:
                arrays[name][:, self.cuts[-1] :] = np.nan
        if self.state:
            arrays["initial_state"] = rng.normal(size=(N, H, K, V))
        dtypes = dict.fromkeys(gates, self.gate_dtype) | dict(initial_state=self.gate_dtype)
        return {name: jnp.asarray(x.astype(dtypes.get(name, self.dtype))) for name, x in arrays.items()}

    def cotangents(self, r: Recurrence, seed: int = 1):
        """dL/doutput and dL/dfinal_state; NaN in padding rows, which nobody may read."""
        rng = np.random.default_rng(seed)
        d_output = rng.normal(size=(*r.q.shape[:2], *r.state_shape[1::2]))
        if self.cuts is not None:
            d_output[:, self.cuts[-1] :] = np.nan
        return jnp.asarray(d_output.astype(r.q.dtype)), jnp.asarray(rng.normal(size=r.state_shape).astype(r.dtype))


def keys(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    x = rng.normal(size=shape)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    match kind.split():
        case ["repeated"]:  # 64 times in a row, the worst case of a chunk's inverse
            return x[:, np.arange(shape[1]) // 64]
        case ["zero"]:
            return np.zeros(shape)
        case ["some", "zero"]:
            return np.where(rng.random((*shape[:-1], 1)) < 0.2, 0, x)
        case ["norm", norm]:
            return float(norm) * x
    return x


def betas(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind in ("random", "to 2"):
        return rng.random(shape) * (1 if kind == "random" else 2)
    return np.full(shape, float(kind))


def all_cases() -> Iterator[DeltaCase]:
    for form in ("none", "head", "key"):
        yield DeltaCase(form, FORMS[form], draws=DRAWS)
    for form in ("constant", "value", "key+value"):
        yield DeltaCase(f"{form}-packed", FORMS[form], **PACKED)
    yield DeltaCase("erase-head", ("g",), ("erase",), B=2, T=70)
    yield DeltaCase("erase-write-key-packed-reverse", ("gk",), ("erase", "write"), reverse=True, **PACKED)
    yield DeltaCase("head-packed-reverse", ("g",), reverse=True, **PACKED)
    yield DeltaCase("heads1-2-4", ("g",), heads=(1, 2, 4), T=40, K=8, V=6)
    yield DeltaCase("heads4-2-2", ("gk",), heads=(4, 2, 2), T=17, K=8, V=6, state=False)
    for T in (1, 65):
        yield DeltaCase(f"T{T}", ("gk",), T=T, K=8, V=8, heads=(1, 1, 1))
    for K, V in ((1, 1), (128, 60)):
        yield DeltaCase(f"K{K}V{V}", ("gk",), T=70, K=K, V=V, heads=(1, 1, 1))
    yield DeltaCase("T2600", ("g",), T=2600, K=8, V=8, heads=(1, 1, 1), draws=(Draw("-1e-6", "1e-3"), Draw("mild")))
    yield DeltaCase("bfloat16-head", ("g",), dtype="bfloat16", draws=FEW[:2])
    yield DeltaCase(
        "float16-packed", ("gk",), ("erase", "write"), dtype="float16", state=False, **PACKED, draws=FEW[:2]
    )
    yield DeltaCase("all-padding", ("g",), cuts=(0, 0, 0), T=10)
    before = dict(erasure=("erase", "write"), before_decay=True, draws=BEFORE_DECAY)
    for form in ("head", "key"):
        yield DeltaCase(f"before-decay-{form}", FORMS[form], **before)
        yield DeltaCase(f"before-decay-{form}-packed-reverse", FORMS[form], reverse=True, **PACKED, **before)
    for form in ("constant", "key+value"):
        yield DeltaCase(f"before-decay-{form}-packed", FORMS[form], **PACKED, **before | dict(draws=FEW[:2]))
    yield DeltaCase("along-head-packed", ("g",), ("erase",), along=True, **PACKED)
    for form in ("none", "key"):
        yield DeltaCase(f"along-before-decay-{form}", FORMS[form], along=True, **before)
    yield DeltaCase("along-before-decay-key-packed-reverse", ("gk",), along=True, reverse=True, **PACKED, **before)
    yield DeltaCase("before-decay-T1", ("gk",), T=1, heads=(4, 2, 2), **before)
    yield DeltaCase("before-decay-bfloat16", ("gk",), dtype="bfloat16", **before | dict(draws=FEW[:2]))


def growing_cases() -> Iterator[DeltaCase]:
    """Keys that are not normalised: the state grows, and T is short enough that the reference stays below 1e30."""
    draws = tuple(Draw(strength, beta, f"norm {norm}") for strength, beta, norm in
                  (("mild", "random", 2), ("mild", "to 2", 1.5), ("log-sigmoid", "random", 3), ("0", "to 2", 2)))  # fmt: skip
    for form in ("head", "key"):
        yield DeltaCase(f"growing-{form}", FORMS[form], T=48, K=16, V=16, draws=draws)

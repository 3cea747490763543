"""The calls that every kernel is held to, as data."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glax.bind import bind
from glax.recurrence import Recurrence

# Gates of one strength are one set of inputs; all strengths of a case share its shapes, and so one compilation.
STRENGTHS = ("log-sigmoid", "mild", "0", "-1e-6", "-20", "-120", "-inf", "+0.05", "-100 on 5%", "-inf on 5%")
EXTREME = ("-100 on 5%", "-inf on 5%")
GATE_SUBSETS = [tuple(n for i, n in enumerate(("g", "g_gamma", "gk", "gv")) if bits >> i & 1) for bits in range(16)]
FORMS = dict(none=(), constant=("g_gamma",), head=("g",), key=("gk",), value=("gv",), both=("gk", "gv"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of shapes. `cuts` packs sequences; rows behind the last cut are padding, and hold NaN."""

    name: str
    B: int = 1
    T: int = 100
    heads: tuple[int, int, int] = (2, 2, 2)
    K: int = 16
    V: int = 24
    gates: tuple[str, ...] = ("gk",)
    dtype: str = "float32"
    gate_dtype: str = "float32"
    state_dtype: str | None = "float32"
    cuts: tuple[int, ...] | None = None
    reverse: bool = False
    strengths: tuple[str, ...] = ("log-sigmoid",)
    chunk: int | None = None

    def __str__(self):
        return self.name

    @property
    def num_sequences(self) -> int:
        return self.B if self.cuts is None else len(self.cuts) - 1


def gate(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
    logs = -np.log1p(np.exp(-rng.normal(size=shape)))
    match strength.split():
        case ["log-sigmoid"]:
            return logs
        case ["mild"]:  # as learned gates are: GLA divides by 16
            return logs / 16
        case [value, "on", "5%"]:
            return np.where(rng.random(shape) < 0.05, float(value), logs)
        case [value]:
            return np.full(shape, float(value))


def inputs(case: Case, strength: str, seed: int = 0) -> dict[str, jax.Array]:
    """The arguments of `glax.recurrent`, without cu_seqlens and reverse."""
    rng = np.random.default_rng(seed)
    B, T, (Hq, Hk, Hv), K, V, H = case.B, case.T, case.heads, case.K, case.V, max(case.heads)
    arrays = dict(
        query=rng.normal(size=(B, T, Hq, K)), key=rng.normal(size=(B, T, Hk, K)), value=rng.normal(size=(B, T, Hv, V))
    )
    shapes = dict(g=(B, T, H), g_gamma=(case.num_sequences, H), gk=(B, T, H, K), gv=(B, T, H, V))
    arrays |= {name: gate(rng, shapes[name], strength) for name in case.gates}
    if case.cuts is not None:
        for name in arrays.keys() - {"g_gamma"}:
            arrays[name][:, case.cuts[-1] :] = np.nan
    if case.state_dtype is not None:
        arrays["initial_state"] = rng.normal(size=(case.num_sequences, H, K, V))
    dtypes = dict.fromkeys(("query", "key", "value"), case.dtype) | dict(initial_state=case.state_dtype)
    return {name: jnp.asarray(x.astype(dtypes.get(name, case.gate_dtype))) for name, x in arrays.items()}


def cotangents(case: Case, r: Recurrence, seed: int = 1):
    """dL/doutput and dL/dfinal_state; NaN in padding rows, which nobody may read."""
    rng = np.random.default_rng(seed)
    d_output = rng.normal(size=(*r.q.shape[:2], *r.state_shape[1::2]))
    if case.cuts is not None:
        d_output[:, case.cuts[-1] :] = np.nan
    return jnp.asarray(d_output.astype(r.q.dtype)), jnp.asarray(rng.normal(size=r.state_shape).astype(r.dtype))


def recurrence(case: Case, strength: str, seed: int = 0) -> Recurrence:
    cuts = None if case.cuts is None else jnp.asarray(case.cuts, jnp.int32)
    return bind(**inputs(case, strength, seed), cu_seqlens=cuts, reverse=case.reverse)


def all_cases() -> Iterator[Case]:
    # Empty sequences first, in the middle and last, one token, cuts inside chunks, padding behind.
    packed = dict(cuts=(0, 0, 30, 31, 31, 64, 91, 91), T=97)
    for form, gates in FORMS.items():
        strengths = STRENGTHS if gates else ("log-sigmoid",)
        yield Case(f"{form}", B=2, gates=gates, strengths=strengths)
        yield Case(f"{form}-reverse", gates=gates, strengths=strengths, reverse=True, T=64)
        yield Case(f"{form}-packed", gates=gates, strengths=strengths, **packed)
        yield Case(f"{form}-packed-reverse", gates=gates, strengths=strengths, reverse=True, **packed)
    for T in (1, 2, 63, 64, 65, 1000):
        yield Case(f"T{T}", B=2, T=T, heads=(1, 1, 1), K=8, V=8, strengths=("log-sigmoid", "-100 on 5%"))
        yield Case(f"T{T}-head", T=T, heads=(1, 1, 1), K=8, V=8, gates=("g",), strengths=("log-sigmoid", "-100 on 5%"))
    for form in ("constant", "head", "key"):  # equal gates must not round alike at every token
        yield Case(f"T2600-{form}", T=2600, heads=(1, 1, 1), K=8, V=8, gates=FORMS[form], strengths=("-1e-6", "mild"))
    for form in ("none", "constant", "head", "key"):  # lengths that XLA's chunks take all at once on CPUs
        gates = FORMS[form]
        strengths = STRENGTHS if gates else ("log-sigmoid",)
        yield Case(f"T512-{form}", B=2, T=512, heads=(4, 2, 1), K=8, V=12, gates=gates, strengths=strengths)
        yield Case(f"T512-{form}-reverse", T=512, K=12, V=8, gates=gates, strengths=strengths, reverse=True)
        yield Case(f"T512-{form}-bfloat16", T=512, K=8, V=8, gates=gates, dtype="bfloat16", state_dtype=None)
    for K, V in ((1, 1), (1, 64), (60, 16), (64, 64), (128, 60), (256, 128), (64, 256)):
        yield Case(
            f"K{K}V{V}", T=70, K=K, V=V, gates=("gk", "gv") if K == 60 else ("gk",), strengths=("log-sigmoid", "-20")
        )
    for heads in ((4, 2, 2), (2, 2, 4), (4, 2, 1), (1, 4, 2), (2, 3, 6)):
        name = "heads" + "-".join(map(str, heads))
        yield Case(name, B=2, T=40, heads=heads, gates=("gk", "gv"), K=8, V=6)
        yield Case(f"{name}-packed", heads=heads, gates=("g",), K=8, V=6, **packed)
    for dtype in ("bfloat16", "float16"):
        for form, gates in FORMS.items():
            yield Case(
                f"{dtype}-{form}", dtype=dtype, state_dtype=dtype, gates=gates, strengths=("log-sigmoid", "mild")
            )
        yield Case(f"{dtype}-packed", dtype=dtype, state_dtype=None, heads=(4, 2, 2), **packed)
    yield Case("bfloat16-gates", dtype="bfloat16", gate_dtype="bfloat16", strengths=("log-sigmoid", "-100 on 5%"))
    yield Case("float16-gates", gate_dtype="float16")
    yield Case("no-state", state_dtype=None)
    yield Case("no-state-packed", state_dtype=None, **packed)
    yield Case("all-padding", cuts=(0, 0, 0), T=10)
    for chunk in (1, 7, 16, 48, 64, 128):
        yield Case(f"chunk{chunk}", B=2, chunk=chunk, strengths=("log-sigmoid", "-20", "-100 on 5%"))
        yield Case(f"chunk{chunk}-packed", chunk=chunk, gates=("g_gamma",), **packed)

"""Define the calls on which kernels are compared with the reference: shapes and strengths of gates as data, and random arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.recurrence import Recurrence

# The gates of each form of decay.
FORMS = dict(none=(), constant=("g_gamma",), head=("g",), key=("gk",), value=("gv",), **{"key+value": ("gk", "gv")})
# Strengths for which the bars of float32 are wider: gates of -100 or -inf stand among mild ones.
EXTREME = ("-100 on 5%", "-inf on 5%", "extreme")


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold one call for `check_kernel`: its shapes and dtypes, and gates of one or more strengths. Arrays are drawn at random.

    name: what results call it. B, T: the number of sequences in the batch, and of tokens in each. K, V: the widths of a head's
        keys and values.
    heads: the heads of query, key and value.
    gates: the gates that are given, of g, g_gamma, gk and gv.
    dtype, gate_dtype, state_dtype: the dtype of query, key and value; of the gates; of the initial state, None for no initial
        state.
    cuts: cu_seqlens of packed sequences, for B = 1; None if not packed. Tokens before the first cut and behind the last are
        padding and hold NaN.
    reverse: whether the scan goes from the last token to the first.
    strengths: how strong gates are, a trial each: "log-sigmoid", "mild", "extreme" (-inf on 5% and -100 on 5%), "-inf on 5%", a
        number such as "-20", or another that `glax.testing.cases.gate` lists.
    ids: segment ids, [B, T], with pad_id=0; None for none. Tokens with the id 0 are padding and hold NaN.
    erasure: the arguments of the delta rule that are given, of beta, erase and write; () without a delta rule. Keys then have
        norm 1, and beta is up to 2.
    chunk: the tokens of a chunk, for kernels whose config has such a field; None for the kernel's own choice.

    >>> case = glax.testing.Case("two heads", T=70, gates=("g",))
    >>> case.T
    70
    """

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
    ids: tuple[tuple[int, ...], ...] | None = None
    erasure: tuple[str, ...] = ()

    def __str__(self):
        return self.name

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences: B, or with cuts the number of packed sequences."""
        return self.B if self.cuts is None else len(self.cuts) - 1


def gate(rng: np.random.Generator, shape: tuple[int, ...], strength: str) -> np.ndarray:
    """Return random log decays of one strength: log_sigmoid of normal numbers for "log-sigmoid", else as `strength` says."""
    logs = -np.log1p(np.exp(-rng.normal(size=shape)))
    match strength.split():
        case ["log-sigmoid"]:
            return logs
        case ["log-sigmoid", "of", mean]:
            return -np.log1p(np.exp(-rng.normal(float(mean), size=shape)))
        case [value, "in", "one"]:  # one channel of each head, or one head; the others are mild
            return np.where(np.arange(shape[-1]) == 0, float(value), logs / 16)
        case ["log-sigmoid", "/", divisor]:
            return logs / float(divisor)
        case ["to", bound]:  # as KDA's layers with a lower bound have them, "to -5"
            return float(bound) * np.exp(logs)
        case ["mild"]:  # like learned gates, which GLA divides by 16
            return logs / 16
        case [value, "on", "5%"]:
            return np.where(rng.random(shape) < 0.05, float(value), logs)
        case ["extreme"]:  # -inf on 5% and -100 on 5%
            dice = rng.random(shape)
            return np.where(dice < 0.05, -np.inf, np.where(dice < 0.1, -100.0, logs))
        case [value]:
            return np.full(shape, float(value))
        case _:
            raise ValueError(f"strength must be one that `gate` lists, got {strength!r}")


def inputs(case: Case, strength: str, seed: int = 0) -> dict[str, jax.Array]:
    """Return the arrays of a case, drawn at random: the arguments of `glax.recurrent` except cu_seqlens, segment_ids, pad_id
    and reverse.

    strength: the strength of the gates, as `gate` takes it.
    """
    rng = np.random.default_rng(seed)
    B, T, (Hq, Hk, Hv), K, V, H = case.B, case.T, case.heads, case.K, case.V, max(case.heads)
    arrays = dict(
        query=rng.normal(size=(B, T, Hq, K)), key=rng.normal(size=(B, T, Hk, K)), value=rng.normal(size=(B, T, Hv, V))
    )
    shapes = dict(g=(B, T, H), g_gamma=(case.num_sequences, H), gk=(B, T, H, K), gv=(B, T, H, V))
    arrays |= {name: gate(rng, shapes[name], strength) for name in case.gates}
    if case.erasure:
        arrays |= erasures(rng, case, arrays["key"])
    if case.cuts is not None:
        for name in arrays.keys() - {"g_gamma"}:
            arrays[name][:, case.cuts[-1] :] = arrays[name][:, : case.cuts[0]] = np.nan
    if case.ids is not None:
        for name in arrays.keys() - {"g_gamma"}:
            arrays[name][np.array(case.ids) == 0] = np.nan
    if case.state_dtype is not None:
        arrays["initial_state"] = rng.normal(size=(case.num_sequences, H, K, V))
    dtypes = dict.fromkeys(("query", "key", "value", *case.erasure), case.dtype) | dict(initial_state=case.state_dtype)
    return {name: jnp.asarray(x.astype(dtypes.get(name, case.gate_dtype))) for name, x in arrays.items()}


def erasures(rng: np.random.Generator, case: Case, key: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arguments of the delta rule, drawn at random, and keys of norm 1. erase is a multiple of the key, as beta *
    key is."""
    B, T, Hk, _ = key.shape
    H, key = max(case.heads), key / np.linalg.norm(key, axis=-1, keepdims=True)
    shapes = dict(beta=(B, T, H), erase=(B, T, H, 1), write=(B, T, H, case.V))
    arrays = {name: 2 * rng.random(size=shapes[name]) for name in case.erasure}
    if "erase" in arrays:
        arrays["erase"] = arrays["erase"] * np.repeat(key, H // Hk, axis=2)
    return arrays | dict(key=key)


def recurrence(case: Case, strength: str, seed: int = 0) -> Recurrence:
    """Return the arrays of `inputs(case, strength, seed)` bound to the `Recurrence` that a kernel takes."""
    cuts = None if case.cuts is None else jnp.asarray(case.cuts, jnp.int32)
    arrays: dict[str, Any] = inputs(case, strength, seed) | dict(cu_seqlens=cuts)
    ids = None if case.ids is None else jnp.asarray(case.ids, jnp.int32)
    return bind(**arrays, segment_ids=ids, pad_id=None if ids is None else 0, reverse=case.reverse)


def cotangents(case: Case, r: Recurrence, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return dL/doutput and dL/dfinal_state, drawn at random. Padding rows hold NaN, because no kernel may read them."""
    rng = np.random.default_rng(seed)
    d_output = rng.normal(size=(*r.q.shape[:2], *r.state_shape[1::2]))
    if case.cuts is not None:
        d_output[:, case.cuts[-1] :] = d_output[:, : case.cuts[0]] = np.nan
    if case.ids is not None:
        d_output[np.array(case.ids) == 0] = np.nan
    return jnp.asarray(d_output.astype(r.q.dtype)), jnp.asarray(rng.normal(size=r.state_shape).astype(r.dtype))


# ---- the cases of `glax check`: few, and telling ---------------------------------------------------------------------

WIDE: dict[str, Any] = dict(B=2, T=150, K=32, V=32)
PACKED: dict[str, Any] = WIDE | dict(
    B=1, cuts=(0, 0, 40, 41, 41, 110, 141, 141)
)  # empty sequences, a sequence of one token, and padding behind
ALL_GATES = ("g", "g_gamma", "gk", "gv")
HALF: dict[str, Any] = dict(dtype="bfloat16", gate_dtype="bfloat16")
CASES = (
    Case("key", **WIDE),
    Case("key, extreme", **WIDE, strengths=("extreme",)),
    Case("key, all gates", **WIDE, strengths=("-20", "0")),
    Case("none", **WIDE, gates=()),
    Case("constant", **WIDE, gates=("g_gamma",)),
    Case("head", **WIDE, gates=("g",)),
    Case("head, extreme", **WIDE, gates=("g",), strengths=("extreme",)),
    Case("value", **WIDE, gates=("gv",)),
    Case("key and value, reverse, extreme", **WIDE, gates=("gk", "gv"), strengths=("extreme",), reverse=True),
    Case("key, packed", **PACKED),
    Case("key, packed, extreme", **PACKED, strengths=("extreme",)),
    Case("all gates, packed, reverse", **PACKED, gates=ALL_GATES, reverse=True),
    Case("constant, packed", **PACKED, gates=("g_gamma",)),
    Case("head, 4 queries, 2 keys, 1 value", B=2, T=150, K=64, V=32, gates=("g",), heads=(4, 2, 1)),
    Case("key, K=24 V=40, one token", B=2, K=24, V=40, T=1),
    Case("key, T=1000", T=1000, K=64, V=64),
    Case("bfloat16, key", B=2, T=150, K=64, V=64, **HALF),
    Case("bfloat16, head, 4 queries, packed, reverse", **PACKED, dtype="bfloat16", gates=("g",), heads=(4, 2, 2), reverse=True),
    Case("float16, key, extreme", **WIDE, dtype="float16", strengths=("extreme",)),
    Case("delta rule", **WIDE, gates=(), erasure=("beta",)),
    Case("delta rule, head, extreme, packed", **PACKED, gates=("g",), erasure=("beta",), strengths=("extreme",)),
    Case("delta rule, key, extreme, reverse", **WIDE, erasure=("erase", "write"), strengths=("extreme",), reverse=True),
    Case("delta rule, key, 4 queries, one token", B=2, T=1, K=24, V=40, heads=(4, 2, 4), erasure=("beta",)),
    Case("delta rule, bfloat16, key, packed", **PACKED, dtype="bfloat16", erasure=("beta",)),
    Case("delta rule, bfloat16, head, 2 keys", B=2, T=150, K=64, V=64, gates=("g",), heads=(2, 2, 4), erasure=("beta",), **HALF),
)  # fmt: skip
QUICK = ("key", "key, extreme", "constant", "all gates, packed, reverse", "bfloat16, key")

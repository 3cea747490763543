"""The named recurrences: a loop over tokens for each, written from its formula alone, and the calls that they are held to."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import glax
from glax.testing.cases import gate

IDS = tuple(tuple(int(i) for i in np.repeat(row, [7, 1, 30, 12, 27])) for row in ([3, 2, 1, 0, 4], [0, 1, 1, 2, 2]))
PACKED = dict(cuts=(0, 0, 30, 31, 31, 64, 71, 71), T=77)
STRENGTHS = ("log-sigmoid", "0", "-120", "-inf on 5%", "+0.05", "-inf", "-20")


def read(S, x):
    return jnp.einsum("hkv,hk->hv", S, x)


def outer(x, y):
    return x[:, :, None] * y[:, None, :]


def normed(x):
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


# ---- a token of each: (state [H, K, V], the token's arrays, scale) -> (state, output [H, V]) -----------------------------


def gated_delta_rule_2(S, t, scale):
    S = S * jnp.exp(t["g"])[:, :, None]
    S = S + outer(t["key"], t["write_gate"] * t["value"] - read(S, t["erase_gate"] * t["key"]))
    return S, scale * read(S, t["query"])


def comba(S, t, scale):
    u = t["beta"][:, None] * (t["value"] - read(S, t["erase_key"]))
    S = S * jnp.exp(t["g"])[:, None, None] + outer(t["key"], u)
    return S, scale * read(S, t["query"])


def rwkv7(S, t, scale):
    S_read = read(S, t["a"])
    S = S * jnp.exp(t["log_decay"])[:, :, None] + outer(t["b"], S_read) + outer(t["key"], t["value"])
    return S, scale * read(S, t["receptance"])


UPDATES = 3  # of a token of gated_delta_product


def gated_delta_product(S, t, scale):
    S = S * jnp.exp(t["g"]).reshape(*t["g"].shape[:1], -1, 1)
    for j in range(UPDATES):
        k, v, beta = (t[name][j] for name in ("key", "value", "beta"))
        S = S + outer(k, beta[:, None] * (v - read(S, k)))
    return S, scale * read(S, t["query"])


@dataclasses.dataclass(frozen=True)
class Named:
    """A named recurrence. arrays: the dimensions of each array behind B and T; those that begin with n
    have T * n rows. normalises: what use_qk_l2norm divides.
    decode: its step, if it has one of its own."""

    run: Callable
    step: Callable
    arrays: dict[str, str]
    normalises: tuple[str, ...] = ("query", "key")
    decode: Callable | None = None

    def draw(self, rng, name: str, shape: tuple[int, ...], strength: str) -> np.ndarray:
        """Random values of an array: gates by their strength, keys of norm 1, what scales from 0 to 1."""
        if name in ("g", "log_decay"):
            return gate(rng, shape, strength)
        if name in ("beta", "erase_gate", "write_gate"):
            return rng.random(shape)
        x = rng.normal(size=shape)
        if name in ("a", "b"):  # of a norm that is not 1, and so small that the state stays bounded
            return x * 0.6 / shape[-1] ** 0.5
        return x / np.linalg.norm(x, axis=-1, keepdims=True) if name in ("key", "erase_key") else x


NAMED = dict(
    gated_delta_rule_2=Named(
        glax.gated_delta_rule_2,
        gated_delta_rule_2,
        dict(query="HK", key="HK", value="HV", g="HK", erase_gate="HK", write_gate="HV"),
    ),
    comba=Named(
        glax.comba,
        comba,
        dict(query="HK", key="HK", value="HV", erase_key="HK", g="H", beta="H"),
        ("query", "key", "erase_key"),
    ),
    rwkv7=Named(
        glax.rwkv7,
        rwkv7,
        dict(receptance="HK", log_decay="HK", key="HK", value="HV", a="HK", b="HK"),
        (),
        glax.rwkv7_step,
    ),
    gated_delta_product=Named(
        functools.partial(glax.gated_delta_product, num_updates=UPDATES),
        gated_delta_product,
        dict(query="HK", key="nHK", value="nHV", g="H", beta="nH"),
        decode=functools.partial(glax.gated_delta_product_step, num_updates=UPDATES),
    ),
    gated_delta_product_per_key=Named(
        functools.partial(glax.gated_delta_product, num_updates=UPDATES),
        gated_delta_product,
        dict(query="HK", key="nHK", value="nHV", g="HK", beta="nH"),
    ),
)


@dataclasses.dataclass(frozen=True)
class NamedCase:
    """One set of shapes of a named recurrence. cuts, ids: packing; padding rows hold NaN. nonzero: the share of keys not 0."""

    name: str
    recurrence: str
    B: int = 1
    T: int = 77
    H: int = 2
    K: int = 8
    V: int = 6
    dtype: str = "float32"
    cuts: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None
    reverse: bool = False
    use_qk_l2norm: bool = False
    strengths: tuple[str, ...] = ("log-sigmoid", "-inf on 5%")
    nonzero: float = 1.0

    def __str__(self):
        return f"{self.recurrence}-{self.name}"

    @property
    def named(self) -> Named:
        return NAMED[self.recurrence]

    @property
    def options(self) -> dict:
        options = dict(reverse=self.reverse)
        if self.use_qk_l2norm:
            options |= dict(use_qk_l2norm=True)
        if self.cuts is not None:
            options |= dict(cu_seqlens=jnp.asarray(self.cuts, jnp.int32))
        if self.ids is not None:
            options |= dict(segment_ids=jnp.asarray(self.ids), pad_id=0)
        return options

    def arrays(self, strength: str, seed: int = 0) -> dict[str, np.ndarray]:
        """The arrays by token in the case's dtype, as float64, and the initial state."""
        rng, sizes = np.random.default_rng(seed), dict(H=self.H, K=self.K, V=self.V, n=UPDATES)
        arrays = {}
        for name, letters in self.named.arrays.items():
            shape = (self.B, self.T, *(sizes[letter] for letter in letters))
            arrays[name] = self.named.draw(rng, name, shape, strength)
        if self.nonzero < 1:
            arrays["key"] *= rng.random((*arrays["key"].shape[:-1], 1)) < self.nonzero
        N = self.B if self.cuts is None else len(self.cuts) - 1
        arrays["initial_state"] = rng.normal(size=(N, self.H, self.K, self.V))
        return {name: x.astype(self.dtype_of(name)).astype(np.float64) for name, x in arrays.items()}

    def dtype_of(self, name: str):
        narrow = name in ("g", "log_decay", "initial_state") and self.dtype != "float64"
        return jnp.dtype("float32" if narrow else self.dtype)

    def given(self, strength: str) -> dict[str, jax.Array]:
        """The arrays as the function takes them, with NaN in padding."""
        arrays = self.arrays(strength)
        for name in self.named.arrays:
            arrays[name][~self.is_token] = np.nan
        return {name: jnp.asarray(self.by_row(name, x), self.dtype_of(name)) for name, x in arrays.items()}

    def by_row(self, name: str, x):
        """The array [B, T, n, ...] as the function takes it, [B, T * n, ...]."""
        return x.reshape(self.B, -1, *x.shape[3:]) if self.named.arrays.get(name, "").startswith("n") else x

    @property
    def is_token(self) -> np.ndarray:
        if self.ids is not None:
            return np.asarray(self.ids) != 0
        rows = np.arange(self.T)
        last = self.T if self.cuts is None else self.cuts[-1]
        return np.broadcast_to(rows < last, (self.B, self.T))

    def sequences(self) -> list[tuple[int, int, np.ndarray, bool]]:
        """(the state's index, the batch row, the rows in scan order, whether they begin from zeros) of each run of tokens."""
        if self.cuts is not None:
            found = [(n, 0, np.arange(*self.cuts[n : n + 2]), False) for n in range(len(self.cuts) - 1)]
        elif self.ids is None:
            found = [(b, b, np.arange(self.T), False) for b in range(self.B)]
        else:
            found = [run for b, row in enumerate(np.asarray(self.ids)) for run in runs_of(b, row, self.reverse)]
        return [(n, b, rows[::-1] if self.reverse else rows, fresh) for n, b, rows, fresh in found]

    def wanted(self, arrays: dict[str, jax.Array]):
        """The loop over tokens: (output [B, T, H, V], final states). Runs under jax_enable_x64."""
        scale = 1.0 if self.recurrence == "rwkv7" else self.K**-0.5
        states = list(arrays["initial_state"])
        output = jnp.zeros((self.B, self.T, self.H, self.V))
        by_token = {name: x for name, x in arrays.items() if name != "initial_state"}
        if self.use_qk_l2norm:
            by_token |= {name: normed(by_token[name]) for name in self.named.normalises}
        for n, b, rows, fresh in self.sequences():
            S = jnp.zeros_like(states[n]) if fresh else states[n]
            tokens = {name: x[b, rows] for name, x in by_token.items()}
            states[n], found = jax.lax.scan(functools.partial(self.named.step, scale=scale), S, tokens)
            output = output.at[b, rows].set(found)
        return output, jnp.stack(states)


def runs_of(b: int, ids: np.ndarray, reverse: bool):
    """The runs of one id in a row, in scan order; the first continues the initial state, the others begin from zeros."""
    edges = np.flatnonzero(np.diff(ids)) + 1
    runs = [rows for rows in np.split(np.arange(len(ids)), edges) if ids[rows[0]] != 0]
    for i, rows in enumerate(runs[::-1] if reverse else runs):
        yield b, b, rows, i > 0


def all_named_cases() -> list[NamedCase]:
    ids = tuple(tuple(int(i) for i in np.repeat(row, [7, 1, 30, 12, 27])) for row in ([3, 2, 1, 0, 4], [1, 0, 1, 2, 2]))
    found = []
    for name in NAMED:
        if name == "gated_delta_product_per_key":  # the form of the gate is what differs from gated_delta_product
            found.append(NamedCase("packed-reverse", name, reverse=True, **PACKED))
            continue
        case = functools.partial(NamedCase, recurrence=name)
        found += [
            case("gates", strengths=STRENGTHS),
            case("packed-reverse", reverse=True, **PACKED),
            case("packed", strengths=("log-sigmoid", "-inf on 5%", "+0.05"), **PACKED),
            case("segments", B=2, ids=ids),
            case("segments-reverse", B=2, ids=ids, reverse=True, strengths=("-inf on 5%",)),
            case("one-token", B=2, T=1, K=5, V=9),
            case("zero-keys", nonzero=0.5, strengths=("log-sigmoid",)),
            case("bfloat16", dtype="bfloat16", strengths=("log-sigmoid", "-inf on 5%")),
            case("float64", dtype="float64", strengths=("log-sigmoid", "-inf on 5%"), **PACKED),
        ]
        if NAMED[name].normalises:
            found.append(case("normalised", use_qk_l2norm=True, strengths=("log-sigmoid",)))
    return found

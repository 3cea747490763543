"""Mamba-3 with one and with several inputs against a loop over tokens in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.api.mamba3 import GROUP, SHAPES, running_sums
from glax.testing.cases import gate
from glax.testing.tolerances import ERASING_BARS, EXTREME_GATES
from tests.close import assert_close
from tests.named_cases import IDS, PACKED, NamedCase
from tests.suite import at_each

FIELDS = ("angle", "S", "key", "value")
WIDE = ("ADT", "DT", "Q_bias", "K_bias", "D", "MIMO_V", "MIMO_Z", "MIMO_Out", *FIELDS)


@dataclasses.dataclass(frozen=True)
class Mamba3Case:
    """One set of shapes. rows: the packing, its B, T, H, K, V and dtype. rank: None for one input. G: the heads of Q and K."""

    rows: NamedCase
    rank: int | None = None
    G: int = 1
    A: int = 3
    without: tuple[str, ...] = ()
    strengths: tuple[str, ...] = ("log-sigmoid", "-inf on 5%")

    def __str__(self):
        return f"{self.rows.name}-rank{self.rank}"

    @property
    def sizes(self) -> dict:
        r = self.rows
        return dict(B=r.B, T=r.T, H=r.H, K=r.K, V=r.V, G=self.G, A=self.A, R=self.rank)

    def dtype_of(self, name: str):
        return jnp.dtype("float32" if name in WIDE and self.rows.dtype != "float64" else self.rows.dtype)

    def drawn(self, strength: str) -> dict[str, np.ndarray]:
        """The arrays in the dtypes of the call, as float64."""
        rng, arrays, sizes = np.random.default_rng(0), {}, self.sizes
        N = sizes["B"] if self.rows.cuts is None else len(self.rows.cuts) - 1
        names = [x for x in SHAPES if x not in self.without and (self.rank or not x.startswith("MIMO"))]
        rank = ["R"] if self.rank else []
        states = dict(angle="N H A", S="N H K V", key=" ".join(["N H", *rank, "K"]), value="N H V")
        for name, dims in {**{name: SHAPES[name] for name in names}, **states}.items():
            shape = [(sizes | dict(N=N))[letter] for letter in dims.split() if letter != "R" or self.rank]
            x = rng.normal(size=shape)
            if name == "ADT":
                x = gate(rng, tuple(shape), strength)
            elif name == "DT":
                x = np.log1p(np.exp(x))
            elif name in ("K", "K_bias"):
                x = x / shape[-1] ** 0.5
            arrays[name] = x.astype(self.dtype_of(name)).astype(np.float64)
        return arrays

    def given(self, strength: str) -> dict[str, jax.Array]:
        """The same as the function takes them, with NaN in padding."""
        arrays, is_token = self.drawn(strength), self.rows.is_token
        for name in ("Q", "K", "V", "Angles", "Z"):
            if name in arrays:
                arrays[name][~is_token] = np.nan
        for name in ("ADT", "DT", "Trap"):
            np.moveaxis(arrays[name], 1, 2)[~is_token] = np.nan
        return {name: jnp.asarray(x, self.dtype_of(name)) for name, x in arrays.items()}

    def called(self, arrays: dict):
        arrays = dict(arrays)
        state = glax.Mamba3State(*(arrays.pop(name) for name in FIELDS))
        output, final = glax.mamba3(**arrays, initial_state=state, **self.rows.options)
        return output, *final

    def wanted(self, arrays: dict):
        """The loop: (output, angle, S, key, value)."""
        states = [tuple(x) for x in zip(*(arrays[name] for name in FIELDS), strict=True)]
        by_token = {name: arrays[name] for name in ("Q", "K", "V", "Angles", "Z") if name in arrays}
        by_token |= {name: jnp.moveaxis(arrays[name], 1, 2) for name in ("ADT", "DT", "Trap")}
        weights = {name: x for name, x in arrays.items() if name in SHAPES and name not in by_token}
        rank = () if self.rank is None or "MIMO_Out" in arrays else (self.rank,)
        output = jnp.zeros((self.rows.B, self.rows.T, *rank, self.rows.H, self.rows.V))
        for n, b, rows, fresh in self.rows.sequences():
            start = jax.tree.map(jnp.zeros_like, states[n]) if fresh else states[n]
            step = functools.partial(token, weights=weights)
            states[n], found = jax.lax.scan(step, start, {name: x[b, rows] for name, x in by_token.items()})
            output = output.at[b, rows].set(found)
        return output, *(jnp.stack(x) for x in zip(*states, strict=True))


def rotated(x, angle):
    A = angle.shape[-1]
    even, odd, rest = x[..., 0 : 2 * A : 2], x[..., 1 : 2 * A : 2], x[..., 2 * A :]
    turned = jnp.stack([even * jnp.cos(angle) - odd * jnp.sin(angle), even * jnp.sin(angle) + odd * jnp.cos(angle)], -1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], -1), rest], -1)


def token(state, t, weights):
    """One token: arrays without B and T; inputs of a rank are [R, ...], and are made so for one input."""
    (angle, S, key, value), has_rank = state, t["Q"].ndim == 3
    H = value.shape[0]

    def heads(x, bias):  # [R, G, K] and [H, R, K] -> [H, R, K]
        x = x if has_rank else x[None]
        return jnp.repeat(x, H // x.shape[1], 1).transpose(1, 0, 2) + (bias if has_rank else bias[:, None])

    def up(x, name):  # [H, V] -> [H, R, V]
        return x[:, None] * weights[name] if has_rank else x[:, None]

    angle = angle + math.pi * jnp.tanh(t["Angles"]) * t["DT"][:, None]
    angle = angle - 2 * math.pi * jax.lax.stop_gradient(jnp.floor(angle / (2 * math.pi)))
    q = rotated(heads(t["Q"], weights["Q_bias"]), angle[:, None])
    k = rotated(heads(t["K"], weights["K_bias"]), angle[:, None])
    v, v_before, k_before = up(t["V"], "MIMO_V"), up(value, "MIMO_V"), key if has_rank else key[:, None]
    trap, alpha = jax.nn.sigmoid(t["Trap"]), jnp.exp(t["ADT"])
    S = alpha[:, None, None] * S
    S = S + ((1 - trap) * t["DT"] * alpha)[:, None, None] * jnp.einsum("hrk,hrv->hkv", k_before, v_before)
    S = S + (trap * t["DT"])[:, None, None] * jnp.einsum("hrk,hrv->hkv", k, v)
    out = jnp.einsum("hkv,hrk->hrv", S, q)
    if "D" in weights:
        out = out + weights["D"][:, None, None] * v
    if "Z" in t:
        out = out * jax.nn.silu(up(t["Z"], "MIMO_Z"))
    state = (angle, S, k if has_rank else k[:, 0], t["V"])
    if "MIMO_Out" in weights:
        return state, (out * weights["MIMO_Out"]).sum(1)
    return state, out.transpose(1, 0, 2) if has_rank else out[:, 0]


def case(
    name: str,
    rank: int | None = None,
    G: int = 1,
    A: int = 3,
    without=(),
    strengths=("log-sigmoid", "-inf on 5%"),
    **rows,
):
    return Mamba3Case(NamedCase(name, "mamba3", **rows), rank, G, A, without, strengths)


HOSTILE = ("log-sigmoid", "0", "-120", "-inf on 5%", "+0.05", "-inf")
CASES = [
    case("gates", strengths=HOSTILE),
    case("gates", rank=3, strengths=HOSTILE),
    case("packed", **PACKED),
    case("packed-reverse", rank=2, reverse=True, **PACKED),
    case("segments", B=2, ids=IDS, G=2),
    case("segments-reverse", rank=2, B=2, ids=IDS, reverse=True),
    case("one-token", B=2, T=1, K=4, V=9, A=2, without=("D", "Z")),
    case("no-output-projection", rank=2, T=9, A=1, without=("D", "Z", "MIMO_Z", "MIMO_Out")),
    case("bfloat16", dtype="bfloat16"),
    case("float64", rank=2, dtype="float64", **PACKED),
]


@functools.cache
def with_gradient(run, case: Mamba3Case):
    def value(arrays, d):
        found = run(case, arrays)
        return sum((x * dx).sum() for x, dx in zip(found, d, strict=True)), found

    return jax.jit(jax.value_and_grad(value, has_aux=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_loop_over_tokens(case):
    at_each(case.strengths, functools.partial(check, case))


def check(case: Mamba3Case, strength: str):
    rng, wide = np.random.default_rng(1), case.rows.dtype == "float64"
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in case.drawn(strength).items()}
        shapes = [x.shape for x in jax.eval_shape(case.wanted, arrays)]
        d = [rng.normal(size=shape).astype("float32") for shape in shapes]
        masked = np.where(case.rows.is_token.reshape(*shapes[0][:2], *[1] * (len(shapes[0]) - 2)), d[0], 0)
        cotangents = [jnp.asarray(x, "float64") for x in (masked, *d[1:])]
        (_, want), want_gradient = with_gradient(Mamba3Case.wanted, case)(arrays, cotangents)
    with jax.enable_x64(wide):
        cotangents = [jnp.asarray(x, "float64" if wide else "float32") for x in d]
        (_, got), got_gradient = with_gradient(Mamba3Case.called, case)(case.given(strength), cotangents)
    bars, extreme = (
        ERASING_BARS[case.rows.dtype],
        EXTREME_GATES if "inf" in strength and case.rows.dtype == "float32" else 1,
    )
    for name, x, y in zip(("output", *FIELDS), got, want, strict=True):
        assert_close(name, x, y, bars[0] * extreme)
    assert not np.asarray(got[0])[~case.rows.is_token].any()
    for name, y in want_gradient.items():
        assert_close(f"d {name}", got_gradient[name], y, bars[1] * extreme)


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, GROUP, 2 * GROUP + 3, GROUP**2 + 7])
def test_running_sums_begin_anew_at_resets_alone(T, reverse):
    rng = np.random.default_rng(T)
    x, resets = rng.normal(size=(2, T, 3)), rng.random((2, T)) < 0.05
    x[0, T // 2] = np.nan
    resets[0, T // 2 - (T // 2 > 0)] = resets[0, min(T // 2 + 1, T - 1)] = True
    order = range(T)[::-1] if reverse else range(T)
    want, reached = np.zeros_like(x), np.zeros((2, T, T))  # reached[b, t, s]: whether token t's sum has the row s
    for before, t in zip([None, *order], order, strict=False):
        goes_on = ~resets[:, t] & (before is not None)
        reached[:, t] = np.where(goes_on[:, None], reached[:, 0 if before is None else before], 0)
        reached[:, t, t] = 1
        want[:, t] = x[:, t] + np.where(goes_on[:, None], want[:, 0 if before is None else before], 0)
    with jax.enable_x64(True):
        got, pull = jax.vjp(lambda x: running_sums(reverse, False, x, jnp.asarray(resets[..., None])), jnp.asarray(x))
        np.testing.assert_allclose(got, want, atol=1e-12)
        d = rng.normal(size=x.shape)
        np.testing.assert_allclose(pull(jnp.asarray(d))[0], np.einsum("bts,bth->bsh", reached, d), atol=1e-12)
        angles = np.asarray(running_sums(reverse, True, jnp.asarray(x), jnp.asarray(resets[..., None])))
    turns = (angles - want) / (2 * math.pi)
    assert np.nanmax(abs(angles)) <= math.pi + 1e-9
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-9)


@pytest.mark.parametrize("rank", [None, 2])
def test_steps_equal_the_loop(rank):
    whole, bar = case("", rank=rank, B=2, T=6), ERASING_BARS["float32"][0]
    arrays = whole.given("-inf on 5%")
    with jax.enable_x64(True):
        output, *final = whole.wanted({name: jnp.asarray(x) for name, x in whole.drawn("-inf on 5%").items()})
    slots = jnp.array([2, 0])
    state = glax.Mamba3State(
        *(jnp.full((4, *arrays[name].shape[1:]), 7.0).at[slots].set(arrays[name]) for name in FIELDS)
    )
    for t in range(6):
        own = {name: arrays[name][:, t] for name in ("Q", "K", "V", "Angles", "Z")}
        own |= {name: arrays[name][:, :, t] for name in ("ADT", "DT", "Trap")}
        own |= {name: x for name, x in arrays.items() if name in SHAPES and name not in own}
        found, state = glax.mamba3_step(**own, state=state, slots=slots)
        assert_close("output", found, output[:, t], bar)
    for name, x, y in zip(FIELDS, state, final, strict=True):
        assert_close(name, x[slots], y, bar)
        assert (np.asarray(x)[[1, 3]] == 7).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(ADT="Q"), ValueError, r"ADT must be \[B, H, T\]=\[1, 2, 77\]"),
        (dict(MIMO_V="V"), ValueError, "MIMO_V must be None without a rank"),
        (dict(initial_state="V"), TypeError, "initial_state must be a Mamba3State"),
    ],
)
def test_an_argument_of_another_shape_is_named(change, error, message):
    arrays = {name: x for name, x in case("").given("0").items() if name in SHAPES}
    with pytest.raises(error, match=message):
        glax.mamba3(**arrays | {name: arrays[other] for name, other in change.items()})

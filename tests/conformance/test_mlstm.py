"""The mLSTM against a loop over tokens in float64, with input gates of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.testing.cases import gate
from glax.testing.tolerances import ERASING_BARS, EXTREME_GATES, norm
from tests.close import assert_close
from tests.named_cases import IDS, PACKED, NamedCase
from tests.suite import at_each

# The mean and the spread of the input gates, and the strength of the forget gates.
DRAWS = (
    *((0, 1, strength) for strength in ("log-sigmoid", "0", "-120", "-inf on 5%", "+0.05", "-inf")),
    *((mean, spread, "log-sigmoid") for mean, spread in ((300, 200), (-300, 200), (0, 200), (300, 0), (-40, 1))),
    (300, 200, "-inf on 5%"),
)
FEW = ((0, 1, "log-sigmoid"), (300, 200, "log-sigmoid"), (0, 30, "-inf on 5%"))
CASES = {
    case.name: (case, draws)
    for case, draws in (
        (NamedCase("gates", "mlstm"), DRAWS),
        (NamedCase("packed", "mlstm", **PACKED), FEW),
        (NamedCase("packed-reverse", "mlstm", reverse=True, **PACKED), FEW),
        (NamedCase("segments", "mlstm", B=2, ids=IDS), FEW),
        (NamedCase("segments-reverse", "mlstm", B=2, ids=IDS, reverse=True), FEW),
        (NamedCase("one-token", "mlstm", B=2, T=1, K=5, V=9), FEW),
        (NamedCase("bfloat16", "mlstm", dtype="bfloat16"), FEW[:2]),
        (NamedCase("large-eps", "mlstm"), FEW),
        (NamedCase("large-eps-packed-reverse", "mlstm", reverse=True, **PACKED), FEW),
        (NamedCase("large-eps-segments", "mlstm", B=2, ids=IDS), FEW),
        (NamedCase("float64", "mlstm", dtype="float64", **PACKED), FEW),
    )
}


def drawn(case: NamedCase, draw) -> dict:
    """The arrays of a call in its dtypes, as float64."""
    mean, spread, strength = draw
    rng = np.random.default_rng(0)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    N = B if case.cuts is None else len(case.cuts) - 1
    arrays = {name: rng.normal(size=(B, T, H, D)) for name, D in dict(query=K, key=K, value=V).items()}
    arrays |= dict(input_gate=mean + spread * rng.normal(size=(B, T, H)), g=gate(rng, (B, T, H), strength))
    arrays |= dict(C=rng.normal(size=(N, H, K, V)), n=rng.normal(size=(N, H, K)), m=rng.normal(size=(N, H)))
    return {name: x.astype(dtype_of(case, name)).astype(np.float64) for name, x in arrays.items()}


def dtype_of(case: NamedCase, name: str):
    narrow = name in ("query", "key", "value") or case.dtype == "float64"
    return jnp.dtype(case.dtype if narrow else "float32")


def given(case: NamedCase, draw) -> dict:
    """The same as the function takes them, with NaN in padding."""
    arrays = drawn(case, draw)
    for name in ("query", "key", "value", "input_gate", "g"):
        arrays[name][~case.is_token] = np.nan
    return {name: jnp.asarray(x, dtype_of(case, name)) for name, x in arrays.items()}


def eps_of(case: NamedCase) -> float:
    return 0.5 if case.name.startswith("large-eps") else 1e-6


def step(state, t, scale, eps):
    C, n, exact_m = state  # its gradient counts for eps alone: C and n are those that belong to the m that is returned
    exact_new = jnp.maximum(t["g"] + exact_m, t["input_gate"])
    m, new = jax.lax.stop_gradient((exact_m, exact_new))
    decay, weight = jnp.exp(t["g"] + m - new), jnp.exp(t["input_gate"] - new)
    C = decay[:, None, None] * C + weight[:, None, None] * t["key"][:, :, None] * t["value"][:, None, :]
    n = decay[:, None] * n + weight[:, None] * t["key"]
    numerator, read = jnp.einsum("hkv,hk->hv", C, t["query"]), jnp.einsum("hk,hk->h", n, t["query"])
    below = jnp.maximum(jnp.abs(scale * read), jnp.exp(-new)) + eps * jnp.exp(exact_new - new)
    return (C, n, exact_new), scale * numerator / below[:, None]


def wanted(case: NamedCase, arrays: dict):
    """(h, C, n, m) of the loop."""
    states = [tuple(x) for x in zip(arrays["C"], arrays["n"], jax.lax.stop_gradient(arrays["m"]), strict=True)]
    output = jnp.zeros((case.B, case.T, case.H, case.V))
    tokens = {name: arrays[name] for name in ("query", "key", "value", "input_gate", "g")}
    for n, b, rows, fresh in case.sequences():
        start = jax.tree.map(jnp.zeros_like, states[n]) if fresh else states[n]
        each = functools.partial(step, scale=case.K**-0.5, eps=eps_of(case))
        states[n], found = jax.lax.scan(each, start, {name: x[b, rows] for name, x in tokens.items()})
        output = output.at[b, rows].set(found)
    return output, *(jnp.stack(x) for x in zip(*states, strict=True))


def called(case: NamedCase, arrays: dict):
    tokens = {name: arrays[name] for name in ("query", "key", "value", "input_gate", "g")}
    state = glax.MLSTMState(arrays["C"], arrays["n"], arrays["m"])
    output, final = glax.mlstm(**tokens, initial_state=state, eps=eps_of(case), **case.options)
    return output, *final


@functools.cache
def with_gradient(run, case: NamedCase):
    def value(arrays, d_output, d_C, d_n):
        found = run(case, arrays)
        output, C, n, _ = found
        return (output * d_output).sum() + (C * d_C).sum() + (n * d_n).sum(), found

    return jax.jit(jax.value_and_grad(value, has_aux=True))


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_loop_over_tokens(name):
    case, draws = CASES[name]
    at_each(draws, functools.partial(check, case))


def check(case: NamedCase, draw):
    rng, wide = np.random.default_rng(1), case.dtype == "float64"
    shapes = {name: x.shape for name, x in drawn(case, draw).items()}
    d = [
        rng.normal(size=shape).astype("float32")
        for shape in ((*shapes["input_gate"], case.V), shapes["C"], shapes["n"])
    ]
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in drawn(case, draw).items()}
        masked = [jnp.asarray(x, "float64") for x in (d[0] * case.is_token[..., None, None], *d[1:])]
        (_, want), want_gradient = with_gradient(wanted, case)(arrays, *masked)
    with jax.enable_x64(wide):
        cotangents = [jnp.asarray(x, "float64" if wide else "float32") for x in d]
        (_, got), got_gradient = with_gradient(called, case)(given(case, draw), *cotangents)
        narrow, masked = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, cotangents[0].dtype)), (arrays, masked))
        (_, plain), plain_gradient = with_gradient(wanted, case)(narrow, *masked)

    bars, extreme = ERASING_BARS[case.dtype], EXTREME_GATES if "inf" in draw[2] and case.dtype == "float32" else 1

    def bar(x, y, least: float) -> float:
        """A multiple of the error of the loop in the dtype of sums: where n^T q is almost 0 and where one token outweighs all
        others, both divide small differences of long sums, and no bar but this holds."""
        times = 10 if draw[1] >= 200 else 3
        error, size = norm(np.asarray(x, np.float64) - np.asarray(y)), norm(np.asarray(y))
        return max(times * error / size if size else 0.0, least * extreme)

    got, want = tuple(map(np.asarray, got)), tuple(map(np.asarray, want))
    (output, C, n, m), of_m = got, np.exp(got[3].astype(np.float64) - want[3])
    # C and n belong to their m, which float32 may round by 3e-5 where it is in the hundreds.
    found = (output, (C * of_m[..., None, None]).astype(C.dtype), (n * of_m[..., None]).astype(n.dtype), m)
    for name, x, y, z in zip(("output", "C", "n", "m"), found, want, plain, strict=True):
        assert_close(name, x, y, bar(z, y, bars[0]))
    assert not np.asarray(got[0])[~case.is_token].any()
    for name, y in want_gradient.items():
        if name != "m":
            assert_close(f"d {name}", got_gradient[name], y, bar(plain_gradient[name], y, bars[1]))
    assert not np.asarray(got_gradient["m"]).any()


@pytest.mark.parametrize("slots", [None, (2, 0)])
def test_steps_equal_the_loop(slots):
    case, draw = NamedCase("", "mlstm", B=2, T=6), (300, 200, "-inf on 5%")
    arrays, bar = given(case, draw), ERASING_BARS["float32"][0]
    with jax.enable_x64(True):
        output, C, n, m = wanted(case, {name: jnp.asarray(x) for name, x in drawn(case, draw).items()})
    state, options = glax.MLSTMState(arrays["C"], arrays["n"], arrays["m"]), {}
    if slots is not None:
        at, options = jnp.asarray(slots), dict(slots=jnp.asarray((*slots, -1)))
        state = jax.tree.map(lambda x: jnp.full((4, *x.shape[1:]), 7.0).at[at].set(x), state)
    for t in range(case.T):
        token = {name: arrays[name][:, t] for name in ("query", "key", "value", "input_gate", "g")}
        if slots is not None:  # the last row has no slot
            token = {name: jnp.concatenate([x, x[:1]]) for name, x in token.items()}
        found, state = glax.mlstm_step(**token, state=state, **options)
        assert_close("output", found[:2], output[:, t], bar)
        assert not np.asarray(found[2:]).any()
    if slots is not None:
        assert all((np.asarray(x)[[1, 3]] == 7).all() for x in state)
        state = jax.tree.map(lambda x: x[at], state)
    of_m = np.exp(np.asarray(state.m, np.float64) - np.asarray(m))
    for name, x, y in zip(
        "Cnm", (state.C * of_m[..., None, None], state.n * of_m[..., None], state.m), (C, n, m), strict=True
    ):
        assert_close(name, x, y, 2 * bar)


def test_a_prompt_in_two_parts_equals_one():
    case, draw = NamedCase("", "mlstm"), (300, 200, "log-sigmoid")
    arrays = {name: x for name, x in given(case, draw).items() if name not in "Cnm"}
    whole = glax.mlstm(**arrays)
    first = glax.mlstm(**{name: x[:, :30] for name, x in arrays.items()})
    second = glax.mlstm(**{name: x[:, 30:] for name, x in arrays.items()}, initial_state=first.final_state)
    parts = np.concatenate([first.output, second.output], axis=1)
    assert_close("output", parts, np.asarray(whole.output, np.float64), 2e-5)


WRONG_N = (jnp.zeros((1, 2, 8, 6)), jnp.zeros((1, 2, 6)), jnp.zeros((1, 2)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(initial_state=jnp.zeros((1, 2, 8, 6))), TypeError, "initial_state must be an MLSTMState"),
        (dict(initial_state=WRONG_N), ValueError, "initial_state.n must be"),
        (dict(states_every=64), TypeError, "got states_every"),
        (dict(eps="small"), TypeError, "eps must be a number"),
    ],
)
def test_arguments_that_it_refuses(options, error, message):
    arrays = {name: x for name, x in given(NamedCase("", "mlstm"), FEW[0]).items() if name not in "Cnm"}
    with pytest.raises(error, match=message):
        glax.mlstm(**arrays, **options)


def test_a_poisoned_sequence_harms_no_other():
    """m is a maximum over tokens, and its gradient a sum over them: neither passes a boundary, whatever lies before it."""
    x = jnp.sin(jnp.arange(30 * 2 * 8.0)).reshape(1, 30, 2, 8)
    others = np.r_[0:9, 20:30]

    def run(x):
        def f(x):
            gate = x[..., 0]
            return glax.mlstm(x, x, x, 3 * gate, -abs(gate), eps=0.5, cu_seqlens=jnp.array([0, 9, 20, 30]))[0]

        output, pull = jax.vjp(f, x)
        return output, pull(jnp.ones_like(output))[0]

    clean = run(x)
    for value in (jnp.nan, jnp.inf):
        for got, want in zip(run(x.at[0, 12].set(value)), clean, strict=True):
            assert not np.isfinite(got[0, 12]).all()
            assert_close("other sequences", got[0, others], want[0, others], 1e-6)

"""The selective scan of Mamba-1, of XLA and in native code, against a loop over tokens in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax.testing.tolerances import BARS
from tests.close import assert_close
from tests.named_cases import IDS, PACKED, NamedCase
from tests.suite import at_each

PLATFORMS = pytest.mark.parametrize("platform", ["xla", "cpp"])
ROWWISE = ("x", "dt", "B", "C")
# What the steps dt are multiplied by, and the sign of A.
DRAWS = ((1, -1), (0, -1), (1000, -1), ((1, 1000, 0), -1), (0.05, 1))
FEW = ((1, -1), ((1, 1000, 0), -1))
LONG = tuple(int(i) for i in np.repeat([4, 5, 0, 6, 6, 5, 5], [100, 37, 30, 1, 140, 63, 29]))
CASES = {
    case.name: (case, draws)
    for case, draws in (
        (NamedCase("steps", "selective_scan", B=2), DRAWS),
        (NamedCase("reverse", "selective_scan", B=2, T=64, reverse=True), FEW),
        (NamedCase("packed", "selective_scan", **PACKED), DRAWS),
        (NamedCase("packed-reverse", "selective_scan", reverse=True, **PACKED), FEW),
        (NamedCase("segments", "selective_scan", B=2, ids=IDS), DRAWS),
        (NamedCase("segments-reverse", "selective_scan", B=2, ids=IDS, reverse=True), FEW),
        (NamedCase("long", "selective_scan", T=1000, K=3, V=16), FEW),
        (NamedCase("long-segments", "selective_scan", T=400, K=3, V=16, ids=(LONG,)), FEW),
        (NamedCase("long-packed", "selective_scan", T=400, cuts=(0, 130, 130, 131, 290, 390)), FEW),
        (NamedCase("one-token", "selective_scan", B=2, T=1, K=5, V=1), FEW),
        (NamedCase("one-channel", "selective_scan", T=5, K=1, V=3), FEW),
        (NamedCase("wide", "selective_scan", B=2, T=70, K=150, V=20, reverse=True), FEW),
        (NamedCase("many-channels", "selective_scan", T=40, K=1100, V=2, cuts=(0, 33, 40)), FEW[:1]),
        (NamedCase("bfloat16", "selective_scan", dtype="bfloat16"), FEW),
        (NamedCase("float16", "selective_scan", dtype="float16", **PACKED), FEW[:1]),
        (NamedCase("float64", "selective_scan", dtype="float64", **PACKED), FEW),
    )
}


def drawn(case: NamedCase, draw) -> dict:
    """The arrays of a call in its dtypes, as float64. K is the number of channels, and V the width of a state."""
    times, sign = draw
    rng = np.random.default_rng(0)
    B, T, D, N = case.B, case.T, case.K, case.V
    count = B if case.cuts is None else len(case.cuts) - 1
    arrays = {name: rng.normal(size=(B, T, width)) for name, width in dict(x=D, dt=D, B=N, C=N).items()}
    factor = rng.choice(times, size=(B, T, 1)) if isinstance(times, tuple) else times
    arrays["dt"] = np.log1p(np.exp(arrays["dt"])) * factor
    arrays |= dict(A=sign * np.exp(rng.normal(size=(D, N))), D=rng.normal(size=D), state=rng.normal(size=(count, D, N)))
    return {name: x.astype(dtype_of(case, name)).astype(np.float64) for name, x in arrays.items()}


def dtype_of(case: NamedCase, name: str):
    return jnp.dtype(case.dtype if name in ("x", "B", "C") or case.dtype == "float64" else "float32")


def given(case: NamedCase, draw) -> dict:
    """The same as the function takes them, with NaN in padding."""
    arrays = drawn(case, draw)
    for name in ROWWISE:
        arrays[name][~case.is_token] = np.nan
    return {name: jnp.asarray(x, dtype_of(case, name)) for name, x in arrays.items()}


def wanted(case: NamedCase, arrays: dict):
    """(y, final states) of the loop."""

    def step(h, t):
        h = jnp.exp(t["dt"][:, None] * arrays["A"]) * h + jnp.outer(t["dt"] * t["x"], t["B"])
        return h, h @ t["C"] + arrays["D"] * t["x"]

    states, y = list(arrays["state"]), jnp.zeros(arrays["x"].shape)
    for n, b, rows, fresh in case.sequences():
        start = jnp.zeros_like(states[n]) if fresh else states[n]
        states[n], found = jax.lax.scan(step, start, {name: arrays[name][b, rows] for name in ROWWISE})
        y = y.at[b, rows].set(found)
    return y, jnp.stack(states)


def called(case: NamedCase, arrays: dict, platform="xla"):
    given = {name: x for name, x in arrays.items() if name != "state"}
    return glax.selective_scan(**given, initial_state=arrays["state"], platform=platform, **case.options)


RUNS = dict(xla=called) | {name: functools.partial(called, platform=name) for name in ("cpp", "triton")}


@functools.cache
def with_gradient(run, case: NamedCase):
    def value(arrays, d_y, d_final):
        y, final = found = run(case, arrays)
        return (y * d_y).sum() + (final * d_final).sum(), found

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def checked(case: NamedCase, platform: str, draw):
    rng, wide = np.random.default_rng(1), case.dtype == "float64"
    arrays = drawn(case, draw)
    d_y, d_final = (rng.normal(size=arrays[name].shape).astype("float32") for name in ("x", "state"))
    with jax.enable_x64(True):
        masked = d_y * case.is_token[..., None]
        cotangents = [jnp.asarray(x, "float64") for x in (masked, d_final)]
        (_, want), want_gradient = with_gradient(wanted, case)(
            {k: jnp.asarray(x) for k, x in arrays.items()}, *cotangents
        )
    with jax.enable_x64(wide):
        cotangents = [jnp.asarray(x, "float64" if wide else "float32") for x in (d_y, d_final)]
        (_, got), got_gradient = with_gradient(RUNS[platform], case)(given(case, draw), *cotangents)
    bars = BARS[case.dtype]
    assert got[0].dtype == case.dtype and got[1].dtype == ("float64" if wide else "float32")
    assert_close("y", got[0], want[0], bars[0])
    assert_close("final state", got[1], want[1], bars[0])
    assert not np.asarray(got[0], np.float64)[~case.is_token].any()
    for name, x in want_gradient.items():
        assert_close(f"d {name}", got_gradient[name], x, bars[1])
        assert got_gradient[name].dtype == dtype_of(case, name)


@PLATFORMS
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_loop_over_tokens(name, platform):
    case, draws = CASES[name]
    if (platform, case.dtype) == ("cpp", "float64"):
        with (
            jax.enable_x64(True),
            pytest.raises(glax.UnsupportedError, match="takes float32, bfloat16 and float16, x is"),
        ):
            called(case, given(case, draws[0]), platform)
        return
    at_each(draws, functools.partial(checked, case, platform))


@PLATFORMS
@pytest.mark.parametrize("width", [3, 16, 21])
@pytest.mark.parametrize("slots", [None, (2, 0)])
def test_steps_equal_the_loop(slots, width, platform):
    case, draw = NamedCase("", "selective_scan", B=2, T=6, K=70, V=width), FEW[1]
    arrays, state, options = given(case, draw), None, dict(platform=platform)
    with jax.enable_x64(True):
        y, final = wanted(case, {name: jnp.asarray(x) for name, x in drawn(case, draw).items()})
    state, constant = arrays["state"], dict(A=arrays["A"], D=arrays["D"])
    if slots is not None:
        at, options = jnp.asarray(slots), options | dict(slots=jnp.asarray((*slots, -1)))
        state = jnp.full((4, *state.shape[1:]), 7.0).at[at].set(state)
    for t in range(case.T):
        token = {name: arrays[name][:, t] for name in ROWWISE}
        if slots is not None:  # the last row has no slot
            token = {name: jnp.concatenate([x, x[:1]]) for name, x in token.items()}
        found, state = glax.selective_scan_step(**token, **constant, state=state, **options)
        assert_close("y", found[:2], y[:, t], BARS["float32"][0])
        assert not np.asarray(found[2:]).any()
    if slots is not None:
        assert (np.asarray(state)[[1, 3]] == 7).all()
        state = state[at]
    assert_close("state", state, final, BARS["float32"][0])


@PLATFORMS
@pytest.mark.parametrize("slots", [None, (3, -1, 0)])
def test_the_gradient_of_a_step_is_that_of_the_scan(slots, platform):
    case = NamedCase("", "selective_scan", B=3, T=1, K=5, V=3)
    arrays, at = given(case, FEW[0]), slots and jnp.asarray(slots)
    used = np.ones(3, bool) if slots is None else np.asarray(slots) >= 0

    def step(arrays):
        token = {name: x[:, 0] if name in ROWWISE else x for name, x in arrays.items()}
        pool = token.pop("state")
        if slots is None:
            return glax.selective_scan_step(**token, state=pool, platform=platform)
        pool = jnp.zeros((4, *pool.shape[1:])).at[jnp.where(at < 0, 4, at)].set(pool, mode="drop")
        y, pool = glax.selective_scan_step(**token, state=pool, slots=at, platform=platform)
        return y[used], pool[at[used]]

    def whole(arrays):
        y, final = called(case, arrays)
        return y[used, 0], final[used]

    def loss(run):
        return lambda arrays: sum((x**2).sum() for x in run(arrays))

    got, want = (jax.grad(loss(run))(arrays) for run in (step, whole))
    for name, x in want.items():
        assert_close(f"d {name}", got[name], x, 1e-5)


def test_a_state_in_bfloat16_is_rounded_to_nearest_or_at_random():
    case = NamedCase("", "selective_scan", B=2, T=1)
    token = {name: x[:, 0] if name in ROWWISE else x for name, x in given(case, FEW[0]).items()}
    state = token.pop("state").astype(jnp.bfloat16)
    step = functools.partial(glax.selective_scan_step, **token, state=state)
    exact = np.asarray(glax.selective_scan_step(**token, state=state.astype(jnp.float32))[1])
    assert (np.asarray(step()[1]) == exact.astype(jnp.bfloat16)).all()
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: step(rounding_key=key)[1]))(keys), np.float32)
    assert len(np.unique(drawn[:, 0, 0, 0])) == 2
    np.testing.assert_allclose(drawn.mean(0), exact, atol=6 * 2**-9 * np.abs(exact).max() / 4000**0.5)


@PLATFORMS
def test_a_prompt_in_two_parts_equals_one(platform):
    case = NamedCase("", "selective_scan", T=300)
    arrays = given(case, FEW[0])
    state, A, D = (arrays.pop(name) for name in ("state", "A", "D"))
    run = functools.partial(glax.selective_scan, A=A, D=D, platform=platform)
    whole = run(**arrays, initial_state=state)
    first = run(**{name: x[:, :77] for name, x in arrays.items()}, initial_state=state)
    second = run(**{name: x[:, 77:] for name, x in arrays.items()}, initial_state=first.final_state)
    assert_close("y", np.concatenate([first.output, second.output], 1), whole.output, 2e-6)
    assert_close("final state", second.final_state, whole.final_state, 2e-6)


@PLATFORMS
def test_rows_without_a_batch_and_empty_calls(platform):
    case = NamedCase("", "selective_scan", cuts=(0, 30, 60), T=70)
    arrays = given(case, FEW[0])
    state, scan = arrays.pop("state"), functools.partial(glax.selective_scan, platform=platform)
    flat = {name: x[0] if name in ROWWISE else x for name, x in arrays.items()}
    for options in (dict(cu_seqlens=jnp.array([0, 30, 60])), dict(segment_ids=jnp.arange(70) // 30, pad_id=2)):
        whole = {name: x[None] if name == "segment_ids" else x for name, x in options.items()}
        states = state if "cu_seqlens" in options else state[:1]
        got = scan(**flat, initial_state=states, **options)
        want = scan(**arrays, initial_state=states, **whole)
        assert got.output.shape == (70, case.K) and (got.output == want.output[0]).all()
    empty = {name: x[:, :0] if name in ROWWISE else x for name, x in arrays.items()}
    for options in ({}, dict(reverse=True), dict(segment_ids=jnp.zeros((1, 0), int))):
        y, final = scan(**empty, initial_state=state[0], **options)
        assert y.shape == (1, 0, case.K) and (final[0] == state[0]).all()
    y, final = scan(**arrays, cu_seqlens=jnp.array([0]))
    assert not y.any() and final.shape == (0, case.K, case.V)


@PLATFORMS
@pytest.mark.parametrize("T", [64, 67])  # the second is no multiple of a chunk
def test_a_channel_that_keeps_nothing(T, platform):
    """A of -inf: the state is the last token's term, all results are finite, and so are the gradients."""
    rng = np.random.default_rng(0)
    x, dt = (jnp.asarray(rng.uniform(0.1, 1, (1, T, 4)), jnp.float32) for _ in range(2))
    B, C = (jnp.asarray(rng.normal(size=(1, T, 3)), jnp.float32) for _ in range(2))
    A = jnp.asarray(-rng.uniform(0.5, 1, (4, 3)), jnp.float32).at[1, 2].set(-jnp.inf)

    def call(x, dt, A, B, C):
        return tuple(glax.selective_scan(x, dt, A, B, C, platform=platform))[:2]

    y, final = call(x, dt, A, B, C)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(final[0, 1, 2], x[0, -1, 1] * dt[0, -1, 1] * B[0, -1, 2])
    others, _ = call(x, dt, A.at[1, 2].set(0), B.at[..., 2].set(0), C)  # of channel 1 those with a memory
    close(y[..., 1] - others[..., 1], (x * dt)[..., 1] * (B * C)[..., 2], atol=1e-5)
    gradient = jax.grad(lambda *arrays: sum(each.sum() for each in call(*arrays)), range(5))(x, dt, A, B, C)
    assert all(np.isfinite(each).all() for each in gradient)
    after, _ = glax.selective_scan_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state=final, platform=platform)
    assert np.isfinite(after).all()


# ---- documents stay apart ----------------------------------------------------------------------------------------------

CUTS, POISONS, POISONED = (0, 40, 41, 90), (np.nan, np.inf, 3e38), 40
ROWS = np.r_[0:40, 41:90]  # those of the first and the last document


@functools.cache
def results(packing: str, reverse: bool, platform: str):
    """jit of (arrays, cotangents) -> the results and gradients of the first and the last of three documents."""

    def run(x, dt, A, B, C, states, d_y, d_final):
        options = dict(cu_seqlens=jnp.asarray(CUTS), initial_state=states)
        if packing == "segments":
            options = dict(segment_ids=jnp.asarray(np.repeat([1, 2, 1], np.diff(CUTS)))[None], initial_state=states[:1])

        def call(x, dt, B, C, states):
            own = dict(initial_state=states, reverse=reverse, platform=platform)
            y, final = glax.selective_scan(x, dt, A, B, C, **options | own)
            return y, final

        states = options["initial_state"]
        (y, final), pull = jax.vjp(call, x, dt, B, C, states)
        *gradient, d_states = pull((d_y, d_final[: len(states)]))
        others = [] if packing == "segments" else [final[::2], d_states[::2]]
        return [y[:, ROWS], *(x[:, ROWS] for x in gradient), *others]

    return jax.jit(run)


@PLATFORMS
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packing", ["cuts", "segments"])
def test_a_poisoned_document_harms_no_other(packing, reverse, platform):
    rng = np.random.default_rng(0)
    B, T, D, N = 1, CUTS[-1], 4, 3
    arrays = [rng.normal(size=(B, T, D)), rng.random((B, T, D)), -rng.random((D, N))]
    arrays += [rng.normal(size=(B, T, N)), rng.normal(size=(B, T, N)), rng.normal(size=(3, D, N))]
    arrays += [rng.normal(size=(B, T, D)), rng.normal(size=(3, D, N))]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    run = results(packing, reverse, platform)
    clean = run(*arrays)
    for i, x in enumerate(arrays):
        if i == 2 or (packing == "segments" and len(x) == 3):  # A is no document's; these states are another document's
            continue
        for poison in POISONS:
            spoiled = x.at[1].set(poison) if len(x) == 3 else x.at[0, POISONED].set(poison)
            for name, got, want in zip(range(7), run(*arrays[:i], spoiled, *arrays[i + 1 :]), clean, strict=False):
                np.testing.assert_array_equal(got, want, err_msg=f"argument {i}, {poison}, result {name}")


# ---- what the program holds, and transformations -----------------------------------------------------------------------


def sizes_of(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from sizes_of(inner)


@PLATFORMS
@pytest.mark.parametrize("options", [{}, dict(cu_seqlens=jnp.array([0, 1000, 4096]))])
def test_the_gradient_holds_no_state_of_every_token(options, platform):
    (B, T, D, N), token = (1, 4096, 8, 16), jax.ShapeDtypeStruct
    rows = [token((B, T, width), jnp.float32) for width in (D, D, N, N)]
    A = token((D, N), jnp.float32)

    def loss(x, dt, B, C, A):
        return sum(out.sum() for out in glax.selective_scan(x, dt, A, B, C, platform=platform, **options))

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*rows, A)
    assert max(sizes_of(traced.jaxpr)) <= B * T * D * N // 4


@PLATFORMS
def test_vmap_and_second_derivatives(platform):
    case = NamedCase("", "selective_scan", T=20, K=2, V=3)
    arrays = given(case, FEW[0])

    def loss(run):
        return lambda arrays: sum((x**2).sum() for x in run(case, arrays))

    gradients = [jax.grad(loss(run)) for run in (called, wanted)]
    got, want = (jax.grad(lambda x, g=g: sum((y**2).sum() for y in g(x).values()))(arrays) for g in gradients)
    for name, x in want.items():
        assert_close(f"d2 {name}", got[name], x, 1e-4)

    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arrays)
    for got, *want in zip(jax.vmap(functools.partial(RUNS[platform], case))(several), *(
        called(case, jax.tree.map(lambda x, i=i: x[i], several)) for i in range(2)
    ), strict=True):  # fmt: skip
        assert_close("mapped", got, jnp.stack(want), 1e-6)


def test_programs_of_any_length_are_exported():
    b, t = jax.export.symbolic_shape("b, t")
    shapes = [(b, t, 4), (b, t, 4), (4, 3), (b, t, 3), (b, t, 3)]
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(*arrays):
        return jax.value_and_grad(lambda *arrays: glax.selective_scan(*arrays).output.sum())(*arrays)

    program = jax.export.export(jax.jit(run))(*abstract)
    for B, T in ((1, 5), (2, 100)):
        case = NamedCase("", "selective_scan", B=B, T=T, K=4, V=3)
        arrays = given(case, FEW[0])
        operands = [arrays[name] for name in ("x", "dt", "A", "B", "C")]
        for got, want in zip(program.call(*operands), run(*operands), strict=True):
            assert_close("exported", got, want, 1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(x=[1.0]), TypeError, "x must be an array, got list"),
        (dict(x=jnp.ones((1, 8, 6), int)), TypeError, "x must be floating point, got int32"),
        (dict(dt=jnp.ones((1, 8, 5))), ValueError, r"dt must be \[B, T, D\] with B=1 as before, T=8 as before, D=6"),
        (dict(A=jnp.ones((4, 6))), ValueError, r"A must be \[D, N\]"),
        (dict(B=jnp.ones((1, 8, 2, 4))), ValueError, r"B must be \[B, T, N\]"),
        (dict(D=jnp.ones(5)), ValueError, r"D must be \[D\]"),
        (dict(initial_state=jnp.ones((2, 6, 4))), ValueError, "initial_state must be .* with sequences=1, D=6, N=4"),
        (dict(cu_seqlens=jnp.array([0, 9])), ValueError, "cu_seqlens must not pass T=8 as in x"),
        (dict(segment_ids=jnp.ones((1, 7), int)), ValueError, r"segment_ids must be \[B, T\] with B=1 and T=8"),
        (dict(pad_id=0), ValueError, "pad_id must be None without segment_ids"),
        (dict(reverse=1), TypeError, "reverse must be True or False"),
        (dict(softmax_scale=1.0), TypeError, "options must be of .*; got softmax_scale"),
    ],
)
def test_arguments_that_it_refuses(changes, error, message):
    x, B = jnp.ones((1, 8, 6)), jnp.ones((1, 8, 4))
    with pytest.raises(error, match=message):
        glax.selective_scan(**dict(x=x, dt=x, A=-jnp.ones((6, 4)), B=B, C=B) | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(state=jnp.ones((2, 6, 4))), ValueError, r"state must be \[B, D, N\]"),
        (dict(state=jnp.ones((1, 6, 4), int)), TypeError, "state must be floating point"),
        (dict(slots=jnp.array([3])), ValueError, "slots must be from -1 to 0"),
        (dict(slots=jnp.array([0, 1])), ValueError, "slots must be"),
        (dict(x=jnp.ones((1, 1, 6))), ValueError, r"x must be \[B, D\]"),
        (dict(rounding_key=3), TypeError, "rounding_key must be a key"),
        (dict(reverse=True), TypeError, "got reverse"),
    ],
)
def test_arguments_that_a_step_refuses(changes, error, message):
    x, B = jnp.ones((1, 6)), jnp.ones((1, 4))
    arrays = dict(x=x, dt=x, A=-jnp.ones((6, 4)), B=B, C=B, state=jnp.ones((1, 6, 4)))
    with pytest.raises(error, match=message):
        glax.selective_scan_step(**arrays | changes)

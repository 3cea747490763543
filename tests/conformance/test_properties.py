"""What must hold for any input: drawn by hypothesis, every draw reusing a few compiled shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glax
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from tests.cases import Case, inputs
from tests.close import assert_close

T = 48
CASE = Case("", T=T, heads=(2, 1, 2), K=5, V=3, gates=("g", "gk", "gv"))
BAR = 5e-6
seeds = st.integers(0, 2**31)
strengths = st.sampled_from(["log-sigmoid", "mild", "0", "-20", "-inf on 5%", "-100 on 5%"])
# The chunked kernel on purpose, in small chunks: at this size the automatic choice would be the recurrent one.
run = jax.jit(functools.partial(glax.recurrent, cfg=ChunkedConfig(16)), static_argnames="reverse")
examples = settings(max_examples=25, deadline=None, derandomize=True)


def same(got, want):
    for name, x, y in zip(got._fields, got, want, strict=True):
        assert_close(name, x, y, BAR)


def rows(arguments, low, high):
    return {name: x if name == "initial_state" else x[:, low:high] for name, x in arguments.items()}


@examples
@given(seeds, strengths, st.integers(0, T), st.booleans())
def test_whole_equals_any_split_through_the_state(seed, strength, cut, reverse):
    """Split by packing's padding, so that one compilation serves every cut."""
    arguments = inputs(CASE, strength, seed)
    whole = run(**arguments, reverse=reverse)
    first = glue(arguments, 0, cut) if not reverse else glue(arguments, cut, T)
    second = glue(arguments, cut, T) if not reverse else glue(arguments, 0, cut)
    a = packed_run(first, reverse)
    b = packed_run(second | {"initial_state": a.final_state}, reverse)
    left, right = (a, b) if not reverse else (b, a)
    output = np.concatenate([left.output[:, :cut], right.output[:, : T - cut]], axis=1)
    same(glax.Outputs(output, b.final_state), whole)


def glue(arguments, low, high):
    """Rows low to high, moved to the front and padded to T with NaN. In NumPy: JAX would compile every cut's slices."""

    def move(x):
        x = np.asarray(x)
        return np.concatenate([x[:, low:high], np.full_like(x[:, : T - (high - low)], np.nan)], axis=1)

    parts = {name: x if name == "initial_state" else move(x) for name, x in arguments.items()}
    return parts | {"cu_seqlens": jnp.array([0, high - low])}


def packed_run(arguments, reverse):
    return jax.tree.map(np.asarray, run(**arguments, reverse=reverse))


@examples
@given(seeds, strengths)
def test_reverse_equals_flip(seed, strength):
    arguments = inputs(CASE, strength, seed)
    flipped = {name: x if name == "initial_state" else x[:, ::-1] for name, x in arguments.items()}
    forwards = run(**flipped)
    same(run(**arguments, reverse=True), forwards._replace(output=forwards.output[:, ::-1]))


@examples
@given(seeds, strengths, st.lists(st.integers(0, T), min_size=3, max_size=3).map(sorted), st.booleans())
def test_packed_equals_separate(seed, strength, cuts, reverse):
    case = Case("", T=T, heads=(2, 1, 2), K=5, V=3, gates=("g", "gk", "gv"), cuts=(0, *cuts))
    arguments = inputs(case, strength, seed)
    packed = packed_run(arguments | {"cu_seqlens": jnp.array([0, *cuts])}, reverse)
    for n, (low, high) in enumerate(zip((0, *cuts[:2]), cuts, strict=True)):
        alone = glue(arguments | {"initial_state": np.asarray(arguments["initial_state"])[n : n + 1]}, low, high)
        one = packed_run(alone, reverse)
        assert_close("output", packed.output[:, low:high], one.output[:, : high - low], BAR)
        assert_close("final_state", packed.final_state[n], one.final_state[0], BAR)
    assert not packed.output[:, cuts[-1] :].any()


@examples
@given(seeds, strengths)
def test_gate_a_channel_by_either_name(seed, strength):
    case = Case("", T=T, K=5, V=3, gates=("gk",))
    arguments = inputs(case, strength, seed)
    renamed = {("g" if name == "gk" else name): x for name, x in arguments.items()}
    for x, y in zip(run(**arguments), run(**renamed), strict=True):
        np.testing.assert_array_equal(x, y)


@examples
@given(seeds, st.sampled_from([("g",), ("g_gamma",), ("gk",), ("gv",), ("gk", "gv")]))
def test_zero_gates_equal_no_gates(seed, gates):
    arguments = inputs(Case("", T=T, K=5, V=3, gates=gates), "0", seed)
    bare = {name: x for name, x in arguments.items() if name not in gates}
    same(run(**arguments), run(**bare))


@examples
@given(seeds, strengths, st.floats(0.0, 3.0))
def test_linear_in_value_and_state(seed, strength, factor):
    arguments = inputs(CASE, strength, seed)
    scaled = arguments | {name: arguments[name] * factor for name in ("value", "initial_state")}
    outputs = run(**arguments)
    same(run(**scaled), glax.Outputs(*(x * factor for x in outputs)))


@pytest.mark.fast
def test_minus_infinity_forgets_everything_before():
    """A reset in the middle equals starting afresh there: how packing is emulated by gates."""
    arguments = inputs(Case("", T=T, K=5, V=3, gates=("g",)), "log-sigmoid")
    arguments["g"] = arguments["g"].at[:, 20].set(-jnp.inf)
    whole = run(**arguments)
    afresh = rows(arguments, 20, T) | {"initial_state": jnp.full_like(arguments["initial_state"], 7.0)}
    alone = jax.jit(glax.recurrent)(**afresh)
    assert_close("output", whole.output[:, 20:], alone.output, BAR)
    assert_close("final_state", whole.final_state, alone.final_state, BAR)
    d = jax.grad(lambda s: run(**arguments | {"initial_state": s}).final_state.sum())(arguments["initial_state"])
    np.testing.assert_array_equal(d, jnp.zeros_like(d))

"""Chunks that XLA solves many at once on CPUs: which, in what blocks, and that others are left to the walk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax.kernels.xla import at_once, chunked
from glax.kernels.xla.chunked import ChunkedConfig
from glax.recurrence import Recurrence
from tests.cases import Case, cotangents, recurrence
from tests.compiling import quick_jit

C = 16
CASE = Case("", B=2, T=128, heads=(4, 2, 1), K=8, V=12)
needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a form for CPUs")


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())


def same_as_the_walk(case: Case, strength: str = "log-sigmoid"):
    r, config = recurrence(case, strength), ChunkedConfig(C)
    cotangent = cotangents(case, r)
    outputs, states = quick_jit(lambda r: at_once.solve(r, C))(r)
    close((outputs, states), quick_jit(lambda r: chunked.by_walk(r, config, keep=True))(r))
    vjp = quick_jit(lambda r, kept: at_once.vjp(r, C, *cotangent, kept))
    want = quick_jit(lambda r: chunked.vjp_by_walk(r, config, *cotangent, None))(r)
    for kept in (states, None):
        close(vjp(r, kept), want)


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("gates", [(), ("g_gamma",), ("g",), ("gk",)], ids=str)
def test_block_after_block(gates, reverse, monkeypatch):
    monkeypatch.setattr(at_once, "BLOCK", 1)
    case = dataclasses.replace(CASE, gates=gates, reverse=reverse)
    assert at_once.block(recurrence(case, "log-sigmoid"), C) == at_once.GROUPS * C < case.T
    same_as_the_walk(case)


def test_memory_follows_the_block(monkeypatch):
    """Not the length: beside the states that are kept, a longer problem needs no more."""
    monkeypatch.setattr(at_once, "BLOCK", 2**13)
    needs = []
    for T in (1024, 4096):
        r = recurrence(dataclasses.replace(CASE, T=T, heads=(2, 2, 2)), "mild")
        cotangent = cotangents(CASE, r)
        kept = at_once.solve(r, C)[1]
        run = quick_jit(lambda r, kept, *cotangent: at_once.vjp(r, C, *cotangent, kept))
        needs.append(run.lower(r, kept, *cotangent).compile().memory_analysis().temp_size_in_bytes)
    assert needs[1] < 1.1 * needs[0] < 40 * 4 * at_once.BLOCK


@pytest.mark.fast
def test_all_in_one_block():
    assert at_once.block(recurrence(CASE, "log-sigmoid"), C) == CASE.T
    same_as_the_walk(CASE)


@pytest.mark.fast
def test_blocks_are_small_and_whole():
    for T, H, D in ((2048, 4, 64), (4096, 8, 128), (64 * 4 * 7, 8, 128), (64 * 4 * 60, 4, 64)):
        x = jax.ShapeDtypeStruct((1, T, H, D), jnp.float32)
        r = Recurrence(x, x, x, recurrence(CASE, "mild").decay, None, None, jax.ShapeDtypeStruct((1,), jnp.float32))
        L = at_once.block(r, 64)
        assert T % L == 0 and L % (at_once.GROUPS * 64) == 0
        assert at_once.elements(r, 64, L) <= at_once.BLOCK
        assert at_once.suits(r)


@needs_cpu
@pytest.mark.fast
@pytest.mark.parametrize(
    "changes",
    [dict(gates=("gv",)), dict(gates=("gk", "gv")), dict(cuts=(0, 128), B=1), dict(T=120), dict(B=2**12)],
    ids=str,
)
def test_who_is_left_to_the_walk(changes):
    if "B" in changes and "cuts" not in changes:
        r = recurrence(CASE, "mild")
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((changes["B"], *x.shape[1:]), x.dtype), (r.q, r.k, r.v))
        r = r.replace(q=wide[0], k=wide[1], v=wide[2])
    else:
        r = recurrence(dataclasses.replace(CASE, **changes), "mild")
    assert not at_once.suits(r, C)
    assert at_once.suits(recurrence(CASE, "mild"), C)


@needs_cpu
@pytest.mark.parametrize("gate", ["gk", "g"])
@pytest.mark.parametrize("strength", ["log-sigmoid", "+0.05", "-20", "-inf on 5%"])
def test_out_of_reach_is_left_to_the_walk(gate, strength, monkeypatch):
    """One compiled function: the gates tell at run time. The form itself is made wrong, to see where it is taken."""
    case = dataclasses.replace(CASE, gates=(gate,))
    r, config, solve = recurrence(case, strength), ChunkedConfig(C), at_once.solve
    mild = strength in ("log-sigmoid", "+0.05")
    assert bool(at_once.within(r, C)) == mild

    def wrong(r, size):
        outputs, states = solve(r, size)
        return outputs._replace(output=outputs.output + 1e6), states

    monkeypatch.setattr(at_once, "solve", wrong)
    (output, _), states, blank = quick_jit(lambda r: chunked.solve(r, config, keep=True))(r)
    assert bool(blank) != mild and bool((states != 0).any()) == mild
    assert bool((output > 5e5).all()) == mild and bool((output > 5e5).any()) == mild

"""Kernels of one call are compiled side by side, each once, and only where they will run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from glax._src.core.registry import Backend
from glax._src.kernels.triton import compile_ahead

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(compile_ahead, "compiled", {})
    three = ThreadPoolExecutor(3)
    monkeypatch.setattr(compile_ahead, "threads", lambda: three)


def traced(kernels, *operands):
    """A call that launches all of them, traced."""

    @compile_ahead.side_by_side
    def call(*operands):
        for name, kernel in kernels.items():
            compile_ahead.compile_ahead(name, kernel, operands)
        return operands[0]

    return jax.jit(call).trace(*operands)


def test_side_by_side_and_once():
    lowered, together = [], threading.Barrier(3, timeout=60)

    def kernel(name):
        def lower(x):
            together.wait()  # for the other two
            lowered.append((name, x.shape))
            return x

        return lower

    kernels = {name: kernel(name) for name in "abc"}
    traced(kernels, jnp.ones(3))
    assert sorted(lowered) == [("a", (3,)), ("b", (3,)), ("c", (3,))]
    traced(kernels, jnp.ones(5))  # shapes are no part of what a kernel is compiled for
    assert len(lowered) == 3


def test_what_the_compiler_raises_is_raised():
    """And it is asked again, as JAX would ask it."""
    asked = []

    def kernel(x):
        asked.append(x)
        if len(asked) == 1:
            raise ValueError("no such instruction")
        return x

    with pytest.raises(ValueError, match="no such instruction"):
        traced(dict(kernel=kernel), jnp.ones(3))
    traced(dict(kernel=kernel), jnp.ones(3))
    assert len(asked) == 2


def test_nothing_is_compiled_elsewhere(monkeypatch):
    """Out of a call that waits, untraced, or on another backend."""

    def kernel(x):
        raise AssertionError

    jax.jit(lambda x: [x, compile_ahead.compile_ahead("outside", kernel, [x])][0]).trace(jnp.ones(3))
    compile_ahead.side_by_side(lambda x: compile_ahead.compile_ahead("untraced", kernel, [x]))(jnp.ones(3))
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.CPU))
    traced(dict(kernel=kernel), jnp.ones(3))
    assert not compile_ahead.compiled

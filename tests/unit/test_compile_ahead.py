"""Kernels of one call are compiled in parallel, each once, and only where they will run."""

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
    """Trace a call that launches all of these kernels."""

    @compile_ahead.compile_in_parallel
    def call(*operands):
        for name, kernel in kernels.items():
            compile_ahead.compile_ahead(name, kernel, operands)
        return operands[0]

    return jax.jit(call).trace(*operands)


def test_kernels_compile_in_parallel_and_once():
    lowered, together = [], threading.Barrier(3, timeout=60)

    def kernel(name):
        def lower(x):
            together.wait()  # for the other two kernels
            lowered.append((name, x.shape))
            return x

        return lower

    kernels = {name: kernel(name) for name in "abc"}
    traced(kernels, jnp.ones(3))
    assert sorted(lowered) == [("a", (3,)), ("b", (3,)), ("c", (3,))]
    traced(kernels, jnp.ones(5))  # shapes are not part of a kernel's specialisation
    assert len(lowered) == 3


def test_compiler_errors_are_raised():
    """A later call compiles the kernel again, as JAX would."""
    attempts = []

    def kernel(x):
        attempts.append(x)
        if len(attempts) == 1:
            raise ValueError("no such instruction")
        return x

    with pytest.raises(ValueError, match="no such instruction"):
        traced(dict(kernel=kernel), jnp.ones(3))
    traced(dict(kernel=kernel), jnp.ones(3))
    assert len(attempts) == 2


def test_nothing_is_compiled_elsewhere(monkeypatch):
    """That is: outside of `compile_in_parallel`, untraced, or on another backend."""

    def kernel(x):
        raise AssertionError

    jax.jit(lambda x: [x, compile_ahead.compile_ahead("outside", kernel, [x])][0]).trace(jnp.ones(3))
    compile_ahead.compile_in_parallel(lambda x: compile_ahead.compile_ahead("untraced", kernel, [x]))(jnp.ones(3))
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.CPU))
    traced(dict(kernel=kernel), jnp.ones(3))
    assert not compile_ahead.compiled

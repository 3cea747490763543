"""The chunked kernel's gradient needs no memory of its own for the states where its results have room for them."""

import functools

import jax.numpy as jnp
import pytest

from glax.bind import bind
from glax.kernels import load_kernels
from glax.kernels.xla.chunked import ChunkedConfig, Stored, start
from glax.registry import kernel_registry
from tests.compiling import quick_jit

load_kernels()
B, T, H, D, C = 1, 4096, 2, 64, 32
STATES = 4 * (T // C) * B * H * D * D  # bytes


def compiled(**gates):
    x = jnp.ones((B, T, H, D))
    r = bind(x, x, x, **gates)
    run = kernel_registry.kernels["chunked.vjp/xla/any"].run
    run = quick_jit(functools.partial(run, config=ChunkedConfig(C)))
    return run.lower(r, x, jnp.zeros(r.state_shape)).compile()


@pytest.mark.parametrize("gate", ["gk", "gv"])
def test_states_wait_in_the_rows_of_gradients(gate):
    """Nor does XLA copy those: a copy of one array of rows alone would be half as large as all states."""
    needs = compiled(**{gate: -jnp.ones((B, T, H, D))}).memory_analysis().temp_size_in_bytes
    assert needs < STATES / 2


def test_at_most_one_state_a_chunk():
    needs = compiled(g=-jnp.ones((B, T, H))).memory_analysis().temp_size_in_bytes
    assert needs < STATES * 1.5


@pytest.mark.parametrize(
    ("why", "shape", "dtype", "heads"),
    [
        ("rows are left over", (1, 100, 2, 64), "float32", 2),
        ("too few rows", (1, 64, 2, 128), "float32", 2),
        ("rows too narrow a dtype", (1, 64, 2, 64), "bfloat16", 2),
        ("heads share rows", (1, 64, 2, 64), "float32", 4),
    ],
)
def test_states_elsewhere(why, shape, dtype, heads):
    x = jnp.ones(shape, dtype)
    wide = jnp.ones((*shape[:2], heads, shape[3]), dtype)
    r = bind(x, x, wide, gk=-wide)
    assert not Stored(r, start(r, ChunkedConfig(C))[0]).in_rows

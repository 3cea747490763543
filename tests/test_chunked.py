"""Where the chunked kernel's gradient has the states before each chunk from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax.bind import bind
from glax.kernels import load_kernels
from glax.kernels.xla.chunked import ChunkedConfig, Stored, start
from glax.registry import kernel_registry
from tests.compiling import quick_jit

load_kernels()
B, T, H, D, C = 1, 4128, 2, 64, 32  # a T that goes chunk by chunk on CPUs too
STATES = 4 * (T // C) * B * H * D * D  # bytes


def compiled(**gates):
    x = jnp.ones((B, T, H, D))
    r = bind(x, x, x, **gates)
    run = kernel_registry.kernels["chunked.vjp/xla/any"].run
    run = quick_jit(functools.partial(run, config=ChunkedConfig(C)))
    return run.lower(r, x, jnp.zeros(r.state_shape)).compile()


@pytest.mark.parametrize("chunks", [(16, 16), (50, 64), (50, 128)], ids=lambda x: f"{x[0]}, then {x[1]}")
@pytest.mark.parametrize(("cuts", "reverse"), [(None, True), ((0, 7, 7, 90), False)], ids=["reverse", "packed"])
def test_from_states_that_were_kept(cuts, reverse, chunks):
    """In chunks of as many tokens, and never in chunks of another size."""
    T, N, K, V = 100, 1 if cuts is None else 3, 5, 3
    rng = np.random.default_rng(0)
    q, k, v, do, state, gk = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in [(1, T, 2, K)] * 2 + [(1, T, 2, V)] * 2 + [(N, 2, K, V), (1, T, 2, K)]
    )
    cuts = None if cuts is None else jnp.asarray(cuts)
    r = bind(q, k, v, gk=jax.nn.log_sigmoid(gk), initial_state=state, cu_seqlens=cuts, reverse=reverse)
    forward, gradient = (kernel_registry.kernels[f"chunked{end}/xla/any"] for end in ("", ".vjp"))
    _, kept = quick_jit(functools.partial(forward.run_and_keep, config=ChunkedConfig(chunks[0])))(r)
    run = quick_jit(functools.partial(gradient.run, config=ChunkedConfig(chunks[1])))
    want, got = run(r, do, state), run(r, do, state, kept)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
    if chunks[0] == chunks[1]:  # that they were used
        wrong = run(r, do, state, kept._replace(states=2 * kept.states))
        assert np.abs(wrong.q - want.q).max() > 0.1


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

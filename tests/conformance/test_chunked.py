"""The chunked kernel on XLA: which states its gradient uses and where it stores them, its accuracy and its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax._src.kernels.xla.chunk_scan_vjp import StateStore
from glax._src.kernels.xla.chunk_window import start
from tests.close import assert_close
from tests.compiling import quick_jit

load_kernels()
B, T, H, D, C = 1, 4128, 2, 64, 32  # a T for which CPUs use the chunk scan too
STATES = 4 * (T // C) * B * H * D * D  # bytes


def compiled(**gates):
    x = jnp.ones((B, T, H, D))
    r = bind(x, x, x, **gates)
    run = kernel_registry.kernels["chunked.vjp/xla/any"].run
    run = quick_jit(functools.partial(run, config=ChunkedConfig(C)))
    return run.lower(r, x, jnp.zeros(r.state_shape)).compile()


@pytest.mark.parametrize("chunks", [(16, 16), (50, 64), (50, 128)], ids=lambda x: f"{x[0]}, then {x[1]}")
@pytest.mark.parametrize(("cuts", "reverse"), [(None, True), ((0, 7, 7, 90), False)], ids=["reverse", "packed"])
def test_gradient_uses_residuals_of_equal_chunks_only(cuts, reverse, chunks):
    """The gradient uses the saved states if its chunks have the same size, and ignores them otherwise."""
    T, N, K, V = 100, 1 if cuts is None else 3, 5, 3
    rng = np.random.default_rng(0)
    q, k, v, do, state, gk = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in [(1, T, 2, K)] * 2 + [(1, T, 2, V)] * 2 + [(N, 2, K, V), (1, T, 2, K)]
    )
    cuts = None if cuts is None else jnp.asarray(cuts)
    r = bind(q, k, v, gk=jax.nn.log_sigmoid(gk), initial_state=state, cu_seqlens=cuts, reverse=reverse)
    forward, gradient = (kernel_registry.kernels[f"chunked{end}/xla/any"] for end in ("", ".vjp"))
    _, residuals = quick_jit(functools.partial(forward.forward_with_residuals, config=ChunkedConfig(chunks[0])))(r)
    run = quick_jit(functools.partial(gradient.run, config=ChunkedConfig(chunks[1])))
    want, got = run(r, do, state), run(r, do, state, residuals)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
    if chunks[0] == chunks[1]:  # the residuals were used
        wrong = run(r, do, state, residuals._replace(states=2 * residuals.states))
        assert np.abs(wrong.q - want.q).max() > 0.1


# The first T takes the chunk-parallel form, the second the chunk scan.
@pytest.mark.parametrize("T", [2**15, 2**15 - 1])
@pytest.mark.parametrize("gate", ["g_gamma", "gk"])
def test_decays_next_to_1_over_many_chunks(gate, T):
    """Chunks of 4 tokens: as many chunks as half a million tokens have. Tokens add nothing to the second head's state."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, T, 2, 2)).astype(np.float32) for _ in range(4))
    state, d_final = (rng.standard_normal((1, 2, 2, 2)).astype(np.float32) for _ in range(2))
    for x in (q, k, v, do):
        x[:, :, 1] = 0
    log = np.array([-4e-8, -3.7e-7], np.float32)
    gates = log if gate == "g_gamma" else np.broadcast_to(log[:, None], q.shape)
    r = bind(
        *map(jnp.asarray, (q, k, v)), **{gate: jnp.asarray(gates)}, initial_state=jnp.asarray(state), softmax_scale=1.0
    )
    forward, gradient = (kernel_registry.kernels[f"chunked{end}/xla/any"].run for end in ("", ".vjp"))
    _, final = quick_jit(functools.partial(forward, config=ChunkedConfig(4)))(r)
    d = quick_jit(functools.partial(gradient, config=ChunkedConfig(4)))(r, jnp.asarray(do), jnp.asarray(d_final))

    log = log.astype(np.float64)
    # [T, H]: the decays after each token, and from the first token through it
    behind, through = np.exp(np.arange(T)[::-1, None] * log), np.exp(np.arange(1, T + 1)[:, None] * log)
    sums = functools.partial(np.einsum, "th,thk,thv->hkv", optimize=True)
    decay = through[-1][:, None, None]
    assert_close("final_state", final[0], decay * state[0] + sums(behind, k[0], v[0], dtype=float), 1e-6)
    assert_close("d_state", d.initial_state[0], decay * d_final[0] + sums(through, q[0], do[0], dtype=float), 1e-6)
    for head in (0, 1):
        assert_close("a head", final[0, head], (decay * state[0] + sums(behind, k[0], v[0], dtype=float))[head], 1e-6)


def test_loop_copies_no_array_of_all_states():
    """A program for up to 512 sequences copies no array of all states in its loop."""
    T, slots = 256, 512
    q, gk = jnp.ones((1, T, 1, 64)), -jnp.ones((1, T, 1, 64))
    cuts = jnp.asarray([0, 100] + [T] * (slots - 1))
    r = bind(q, q, q, gk=gk, cu_seqlens=cuts)
    for name, *cotangents in (("chunked",), ("chunked.vjp", q, jnp.zeros(r.state_shape))):
        run = functools.partial(kernel_registry.kernels[f"{name}/xla/any"].run, config=ChunkedConfig(C))
        text = quick_jit(run).lower(r, *cotangents).compile().as_text()
        states = rf"f32\[{slots},1,64,64\]"
        loops = [part for part in text.split("\n\n") if "dynamic-update-slice" in part and re.search(states, part)]
        assert loops
        for body in loops:
            assert not re.search(rf"{states}\S* copy\(", body), f"{name} copies all states in a loop"


@pytest.mark.parametrize("gate", ["gk", "gv"])
def test_states_are_stored_in_the_rows_of_gradients(gate):
    """XLA does not copy these rows: a copy of one such array would be half as large as all states."""
    needs = compiled(**{gate: -jnp.ones((B, T, H, D))}).memory_analysis().temp_size_in_bytes
    assert needs < STATES / 2


def test_gradient_stores_at_most_one_state_per_chunk():
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
def test_states_do_not_fit_the_rows_of_gradients(why, shape, dtype, heads):
    x = jnp.ones(shape, dtype)
    wide = jnp.ones((*shape[:2], heads, shape[3]), dtype)
    r = bind(x, x, wide, gk=-wide)
    assert not StateStore(r, start(r, C)[0]).in_rows

"""The delta rule through the public functions: arguments, serving, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import glax
from glax._src.core.bind import bind
from glax._src.kernels import load_kernels
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import named
from tests.close import assert_close

B, T, H, K, V = 2, 12, 2, 6, 10
BAR = 2e-5
rng = np.random.default_rng(0)
q, k, state = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, H, K), (B, T, H, K), (B, H, K, V)))
v = jnp.asarray(rng.normal(size=(B, T, H, V)), jnp.float32)
k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
g, beta = -jnp.asarray(rng.random((B, T, H)), jnp.float32), jnp.asarray(2 * rng.random((B, T, H)), jnp.float32)


def wanted(**options):
    return reference(bind(q, k, v, g=g, beta=beta, initial_state=state, **options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(beta=beta, erase=k), "beta must come without erase and write"),
        (dict(beta=beta, write=v), "beta must come without erase and write"),
        (dict(write=v), "write must come with erase"),
        (dict(beta=beta, bonus=jnp.ones((H, K))), "bonus must come without beta"),
        (dict(beta=beta[:, :3]), "beta must be"),
        (dict(erase=v), "erase must be"),
        (dict(beta=beta, erase_before_decay=True), "erase_before_decay must come with erase"),
    ],
)
def test_arguments_that_contradict_each_other(arguments, message):
    with pytest.raises(ValueError, match=message):
        glax.recurrent(q, k, v, **arguments)


def test_gates_of_another_rank_name_the_other_function():
    with pytest.raises(ValueError, match="kda takes"):
        glax.gated_delta_rule(q, k, v, k, beta)
    with pytest.raises(ValueError, match="gated_delta_rule takes"):
        glax.kda(q, k, v, g, beta)


def test_normalised_keys_with_padding_of_nan():
    ids = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3, [1] * T])
    dirty = jnp.where((ids == 0)[..., None, None], jnp.nan, 3 * k)

    def loss(x):
        outputs = glax.gated_delta_rule(q, x, v, g, beta, segment_ids=ids, pad_id=0, use_qk_l2norm=True)
        return jnp.square(outputs.output).sum(), outputs

    d, outputs = jax.grad(loss, has_aux=True)(dirty)
    norm = np.linalg.norm(q, axis=-1, keepdims=True)
    r = bind(q / norm, k, v, g=g, beta=beta, segment_ids=ids, pad_id=0)
    assert_close("output", outputs.output, reference(r).output, BAR)
    assert np.isfinite(d).all() and not np.asarray(d)[np.asarray(ids) == 0].any()


def test_steps_and_drafts_equal_the_scan():
    want, S = wanted(), state
    for t in range(4):
        o, S = glax.recurrent_step(q[:, t], k[:, t], v[:, t], S, g[:, t], beta=beta[:, t])
        assert_close("output", o, want.output[:, t], BAR)
    drafted, draft = glax.recurrent_verify(q[:, :6], k[:, :6], v[:, :6], state, g[:, :6], beta=beta[:, :6])
    assert_close("output", drafted, want.output[:, :6], BAR)
    moved = glax.commit(state, draft, jnp.array([4, 0]))
    assert_close("state", moved[0], np.asarray(S[0], np.float64), BAR)
    assert (moved[1] == state[1]).all()


def test_serving_normalises_queries_and_keys_as_the_scan_does():
    """Steps, prompts into a pool, and drafts with their commit, all with use_qk_l2norm."""
    want, S, long = wanted(use_qk_l2norm=True), state, 3 * k
    for t in range(2):
        o, S = glax.recurrent_step(q[:, t], long[:, t], v[:, t], S, g[:, t], beta=beta[:, t], use_qk_l2norm=True)
        assert_close("output", o, want.output[:, t], BAR)
    tokens = (q[:, :6], long[:, :6], v[:, :6])
    drafted, draft = glax.recurrent_verify(*tokens, state, g[:, :6], beta=beta[:, :6], use_qk_l2norm=True)
    assert_close("output", drafted, want.output[:, :6], BAR)
    assert_close("state", glax.commit(state, draft, jnp.array([2, 2])), np.asarray(S, np.float64), BAR)
    output, pool = glax.prefill_into(state, jnp.array([0, 1]), q, long, v, g, beta=beta, use_qk_l2norm=True)
    assert_close("output", output, want.output, BAR)
    assert_close("pool", pool, want.final_state, BAR)
    with pytest.raises(TypeError, match="use_qk_l2norm must be"):
        glax.recurrent_step(q[:, 0], k[:, 0], v[:, 0], state, beta=beta[:, 0], use_qk_l2norm="yes")


def test_a_pool_takes_prompts_and_steps():
    slots = jnp.array([3, 0])
    pool = jnp.zeros((4, H, K, V)).at[slots].set(state)
    output, filled = glax.prefill_into(pool, slots, q, k, v, g, beta=beta)
    want = wanted()
    assert_close("output", output, want.output, BAR)
    assert_close("pool", filled[slots], want.final_state, BAR)
    o, moved = glax.recurrent_step(q[:, 0], k[:, 0], v[:, 0], pool, g[:, 0], beta=beta[:, 0], slots=jnp.array([3, -1]))
    assert_close("output", o[0], want.output[0, 0], BAR)
    assert not o[1].any() and (moved[0] == pool[0]).all()


@pytest.mark.rest
@pytest.mark.parametrize("platform", ["xla", None])
def test_second_derivatives(platform):
    def gradients(k, g, beta):
        def loss(k, g, beta):
            return jnp.square(glax.gated_delta_rule(q, k, v, g, beta, platform=platform).output).sum()

        return sum(jnp.square(x).sum() for x in jax.grad(loss, argnums=(0, 1, 2))(k, g, beta))

    arrays = k, g, beta
    ways = [np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate(arrays)]
    ways = [jnp.asarray(1e-2 * x / np.linalg.norm(x), jnp.float32) for x in ways]
    run, slope = jax.jit(gradients), jax.jit(jax.grad(gradients, argnums=(0, 1, 2)))(*arrays)
    measured = (
        run(*(x + d for x, d in zip(arrays, ways, strict=True)))
        - run(*(x - d for x, d in zip(arrays, ways, strict=True)))
    ) / 2
    assert abs(sum(jnp.vdot(x, d) for x, d in zip(slope, ways, strict=True)) / measured - 1) < 1e-2


def test_vmap_merges_into_the_batch():
    each = jax.vmap(lambda *x: glax.gated_delta_rule(*x, initial_state=state[:1]).output, in_axes=0)
    got = each(*(x[:, None] for x in (q, k, v, g, beta)))[:, 0]
    r = bind(q, k, v, g=g, beta=beta, initial_state=jnp.broadcast_to(state[:1], state.shape))
    assert_close("output", got, reference(r).output, BAR)


BEFORE = dict(erase=0.8 * k + 0.1 * q, write=0.5 * v, erase_before_decay=True)


def before_decay(start, end):
    return {name: x if name == "erase_before_decay" else x[:, start:end] for name, x in BEFORE.items()}


@pytest.mark.parametrize("gate", [g, jnp.where(g < -0.9, -jnp.inf, g)], ids=["usual", "-inf on some"])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_erasure_before_the_decay_reads_nothing_of_another_segment(gate, reverse):
    ids = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3, [3] * 1 + [1] * 11])
    options = dict(initial_state=state, segment_ids=ids, pad_id=0, reverse=reverse)
    r = bind(q, k, v, g=gate, **BEFORE, **options)
    d = jnp.ones_like(v), state
    want, want_gradient = reference(r), named(reference_gradient(r, *d))
    outputs = functools.partial(glax.recurrent, q, k, v, **options, erase_before_decay=True)

    def both(g, erase, write):
        return tuple(outputs(g=g, erase=erase, write=write))

    got, pull = jax.vjp(both, gate, BEFORE["erase"], BEFORE["write"])
    for name, x, y in zip(("output", "final_state"), got, want, strict=True):
        assert_close(name, x, y, BAR)
    for name, x in zip(("head", "erase", "write"), pull(d), strict=True):
        assert_close(name, x, want_gradient[name], 5 * BAR)


def test_steps_drafts_and_prompts_erase_before_the_decay():
    want, S = reference(bind(q, k, v, g=g, initial_state=state, **BEFORE)), state
    for t in range(3):
        own = {name: x[:, 0] if hasattr(x, "shape") else x for name, x in before_decay(t, t + 1).items()}
        o, S = glax.recurrent_step(q[:, t], k[:, t], v[:, t], S, g[:, t], **own)
        assert_close("output", o, want.output[:, t], BAR)
    drafted, draft = glax.recurrent_verify(q[:, :6], k[:, :6], v[:, :6], state, g[:, :6], **before_decay(0, 6))
    assert_close("output", drafted, want.output[:, :6], BAR)
    assert_close("state", glax.commit(state, draft, jnp.array([3, 3])), np.asarray(S, np.float64), BAR)
    output, pool = glax.prefill_into(state, jnp.array([0, 1]), q, k, v, g, **BEFORE)
    assert_close("output", output, want.output, BAR)
    assert_close("pool", pool, want.final_state, BAR)


@pytest.mark.parametrize("platform", ["xla", None])
def test_second_derivatives_before_the_decay(platform):
    with jax.enable_x64(True):
        arrays = tuple(x[:1, :5].astype(jnp.float64) for x in (k, g, BEFORE["erase"]))

        def loss(k, g, erase):
            options = dict(erase=erase, erase_before_decay=True, platform=platform)
            return jnp.square(glax.recurrent(q[:1, :5].astype(k.dtype), k, k, g, **options).output).sum()

        check_grads(loss, arrays, order=2, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_kernels_name_the_erasure_that_they_do_not_take():
    load_kernels()
    specs = glax.kernel_registry.kernels
    plain, before = bind(q, k, v, beta=beta), bind(q, k, v, g=g, erase=k, erase_before_decay=True)
    for name in ("chunked/xla/any", "recurrent/xla/any"):
        assert specs[name].refusal(plain) is None and specs[name].refusal(before) is None
    assert specs["recurrent/cpp/cpu"].refusal(plain) is None
    assert "got erase_before_decay" in str(specs["recurrent/cpp/cpu"].refusal(before))
    on_tpu = [s for s in specs.values() if s.backend is glax.Backend.TPU]
    assert on_tpu and all(s.erases and s.erases_before_decay == s.is_pooled for s in on_tpu)

"""Drafts are verified and committed by kernels on a pool of states where some are able: here by two of this test's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.kernels.xla.recurrent import recurrent
from glax._src.serving.state_pool import put, take
from tests.cases import Case, inputs
from tests.close import assert_close

CASE = Case("draft", B=3, T=4, heads=(1, 1, 2), K=8, V=6, gates=("gk",))
SLOTS = jnp.array([4, -1, 0])
ACCEPTED = jnp.array([4, 2, 3])


def solved(r, pool, slots):
    used = slots >= 0
    rows = jnp.where(used, slots, pool.shape[0])
    output, final = recurrent(r.replace(initial_state=take(pool, rows)), config=None)
    return jnp.where(used[:, None, None, None], output, 0), put(pool, rows, final)


def step(r, pool, slots, *, config):
    return solved(r, pool, slots)


def verify(r, pool, slots, *, config):
    return solved(r, pool, slots)[0]


@pytest.fixture
def kernels(monkeypatch):
    jax.clear_caches()
    for role, run in (("step", step), ("verify", verify)):
        spec = KernelSpec(f"recurrent.{role}", Platform.XLA, Backend.ANY, run, priority=lambda r: 99, erases=True)
        monkeypatch.setitem(kernel_registry.kernels, spec.name, spec)
    yield
    jax.clear_caches()


def draft(erasure=()) -> tuple[dict, jax.Array]:
    case = Case(**vars(CASE) | dict(erasure=erasure))
    x = inputs(case, "log-sigmoid")
    states = x.pop("initial_state")
    return x, jnp.concatenate([states, 2 * states])


def verified_and_committed(x, pool, slots, accepted=ACCEPTED):
    output, draft = glax.recurrent_verify(**x, state=pool, slots=slots)
    return output, glax.commit(pool, draft, accepted)


def test_each_is_one_call_with_the_results_of_the_gathered_form(kernels, monkeypatch):
    for erasure in ((), ("beta",)):
        x, pool = draft(erasure)
        given = (x, pool, SLOTS), (x, pool[:3], None)
        got = [jax.jit(verified_and_committed)(*arguments) for arguments in given]
        names = [decision.kernel for decision in glax.explain(verified_and_committed, *given[0])]
        assert names == ["recurrent.verify/xla/any", "recurrent.step/xla/any"]
        with monkeypatch.context() as without:
            for name in names:
                without.delitem(kernel_registry.kernels, name)
            jax.clear_caches()
            want = [verified_and_committed(*arguments) for arguments in given]
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close("result", x, np.asarray(y, np.float64), 1e-6)


@pytest.mark.parametrize("erasure,slots", [((), None), (("beta",), None), ((), SLOTS)], ids=str)
def test_a_commit_without_slots_or_an_erasure_is_a_product(kernels, erasure, slots):
    x, pool = draft(erasure)
    pool = pool if slots is not None else pool[:3]
    decisions = glax.explain(lambda pool: verified_and_committed(x, pool, slots), pool)
    in_pool = [decision.kernel for decision in decisions].count("recurrent.step/xla/any")
    assert in_pool == (0 if slots is None and not erasure else 1)


def test_vmap_and_gradients_are_those_of_the_gathered_form(kernels):
    x, pool = draft()

    def loss(x, pool, platform):
        output, _ = glax.recurrent_verify(**x, state=pool, slots=SLOTS, platform=platform)
        return (output**2).sum()

    own, gathered = (jax.grad(loss, (0, 1))(x, pool, platform) for platform in (None, "cpp"))
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(gathered), strict=True):
        assert_close("gradient", a, np.asarray(b, np.float64), 1e-5)
    pools = jnp.stack([pool, pool + 1])
    both = jax.vmap(lambda pool: verified_and_committed(x, pool, SLOTS))(pools)
    for i in range(2):
        each = verified_and_committed(x, pools[i], SLOTS)
        for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(each), strict=True):
            assert_close("example", a[i], np.asarray(b, np.float64), 1e-6)

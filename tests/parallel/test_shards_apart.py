"""NaN, inf and overflow in one document change no other document's results where T is sharded.

A document of 70 tokens and one of 58 span whole shards of 25 rows. 8 shards pass their messages on, and 4 gather them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import parallel
from glax._src.core.registry import Platform
from glax._src.parallel.sharding import Spread, solve_on_mesh
from glax._src.solve.dispatch import Choice
from tests.close import assert_close
from tests.parallel.meshes import mesh_of
from tests.parallel.test_parallel import TWO_PHASE
from tests.poison import (
    LAYOUTS,
    erasing_along,
    gradient_of,
    leaks,
    operands_of,
    poisoned,
    poisons,
    second_derivatives,
    spoiled,
)

FORMS = [case.name for case in LAYOUTS["cu_seqlens"].cases()]
PACKINGS = "cu_seqlens", "segment_ids"


def solver(spread: Spread, platform: Platform | None = None):
    return functools.partial(solve_on_mesh, Choice(platform), spread)


def hold(form: str, packing: str, spread: Spread | None = None, platform: Platform | None = None):
    """Asserts that documents stay apart. Of the four pairs of 4 or 8 shards and a direction, each call takes one."""
    i = FORMS.index(form) + PACKINGS.index(packing)
    spread = Spread(mesh_of(s=(4, 8)[i % 2]), sequence_axis="s") if spread is None else spread
    layout = LAYOUTS[packing]
    operands = operands_of(layout.case(form, reverse=i // 2 % 2 == 1))
    run = solver(spread, platform)
    found = leaks(layout, operands, jax.jit(run), jax.jit(gradient_of(run)), few=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", FORMS)
def test_shards_that_wait(form, packing):
    hold(form, packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", ["head", "key", "value", "key+value"])
def test_shards_that_correct(form, packing, short_windows, correcting):
    hold(form, packing)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", TWO_PHASE)
def test_shards_in_two_phases(form, packing, in_two_phases):
    hold(form, packing)
    assert any(".vjp/" in name for name in in_two_phases)


@pytest.mark.parametrize("form", ["constant", "key+value", "head beta"])
def test_kernels_whose_chunks_mix_segments(form):
    hold(form, "segment_ids", platform=Platform.XLA)


@pytest.mark.parametrize("packing", PACKINGS)
def test_erasures_along_another_key(packing):
    layout, run = LAYOUTS[packing], solver(Spread(mesh_of(s=8), sequence_axis="s"))
    operands = erasing_along(operands_of(layout.case("head erase")), before_decay=packing == "segment_ids")
    found = leaks(layout, operands, jax.jit(run), jax.jit(gradient_of(run)), few=True)
    assert not found, "\n".join(found)


def test_a_number_that_overflows_in_another_shard():
    """Where the sums of a document are large but finite, the gradients of other documents' gates are as they were."""
    layout = LAYOUTS["segment_ids"]
    operands = operands_of(layout.case("key"))
    gradient = jax.jit(gradient_of(solver(Spread(mesh_of(s=8), sequence_axis="s"), Platform.XLA)))
    clean = gradient(*operands)
    for poison in poisons(layout, operands):
        if poison.title in ("overflow in k, first token", "overflow in initial_state, sequence 0"):
            found = spoiled(layout, poison.owners, gradient(*poisoned(operands, poison)), clean, False, 1e-3)
            assert not found, f"{poison}: {found}"


@pytest.mark.parametrize(
    ("form", "packing"), [("key", "cu_seqlens"), ("constant", "segment_ids"), ("head beta", "segment_ids")]
)
def test_second_derivatives(form, packing):
    layout = LAYOUTS[packing]
    operands = operands_of(layout.case(form))
    run = solver(Spread(mesh_of(s=4), sequence_axis="s"))
    for of_cotangents in (False, True):
        found = leaks(layout, operands, None, second_derivatives(run, of_cotangents), few=True, bar=5e-3)
        assert not found, "\n".join(found)


def test_batch_and_heads_are_sharded_too(in_two_phases):
    hold("key", "segment_ids", Spread(mesh_of(b=2, h=2, s=2), "b", "h", "s"))


@pytest.mark.parametrize("options", [dict(states_every=64), dict(bonus=jnp.ones((2, 8)))], ids=["states", "bonus"])
def test_public_calls_keep_segments_apart(options):
    """NaN in the second of three documents leaves the others' outputs and gradients as they are on one device."""
    rng, (B, T, H, K) = np.random.default_rng(0), (1, 200, 2, 8)
    ids = jnp.asarray(np.repeat([3, 1, 2], (70, 60, 70)))[None]
    arrays = [jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.float32) for _ in range(4)]

    def outputs_and_gradients(f, arrays, **axes):
        def output(q, k, v, g):
            return f(q, k, v, gk=-jnp.abs(g), segment_ids=ids, **options, **axes).output

        found, pull = jax.vjp(output, *arrays)
        return found, *pull(jnp.ones_like(found))

    others = np.r_[0:70, 130:200]
    spread = jax.jit(lambda x: outputs_and_gradients(parallel.recurrent, x, mesh=mesh_of(s=4), sequence_axis="s"))
    clean = jax.jit(lambda x: outputs_and_gradients(glax.recurrent, x))(arrays)
    for i in range(4):
        poisoned = [x.at[:, 100].set(jnp.nan) if i == j else x for j, x in enumerate(arrays)]
        for got, want in zip(spread(poisoned), clean, strict=True):
            assert_close("others", got[:, others], want[:, others], 2e-5)

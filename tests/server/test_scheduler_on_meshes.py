"""The scheduler over models whose parameters lie on explicit axes of a mesh of simulated devices."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import glax.models
from glax.server import slots
from glax.server.request import Request
from glax.server.scheduler import Scheduler
from tests.compiling import Compiled
from tests.parallel.meshes import mesh_of
from tests.server.test_scheduler import FIXTURES, alone, assert_free, model_of


@pytest.mark.parametrize(
    ("name", "axes"), [("gla", dict(model=2, fsdp=2)), ("gla_hybrid", dict(model=2, fsdp=4))], ids=str
)
def test_answers_on_a_mesh_are_those_of_one_device(name, axes, monkeypatch):
    """With stored prefixes, growing caches and draws; each program is compiled once for each room."""
    monkeypatch.setattr("glax.server.slots.ROOM", 32)
    mesh = mesh_of(AxisType.Explicit, **axes)
    model, whole, rng = (
        glax.models.from_pretrained(FIXTURES / name, mesh=mesh),
        model_of(name),
        np.random.default_rng(0),
    )
    programs = (slots.admit, slots.load, slots.save, slots.read, slots.write, slots.draw)
    before = [program._cache_size() for program in programs]
    scheduler = Scheduler(model, capacity=3, rows=16, max_length=64, block=8, prefix_bytes=10**6, ends=())
    prompt = rng.integers(0, model.vocabulary, 40).tolist()
    drawn = dict(temperature=0.8, repetition_penalty=1.2)
    requests = [
        Request(prompt[:20], 9),
        Request(prompt[:12], 12),
        Request(prompt[5:], 12),
        Request(prompt[:22], 9, seed=3, **drawn),
        Request(prompt[:20], 9),
    ]
    got = scheduler.answers(requests)
    for request, tokens in zip(requests, got, strict=True):
        options = dict(key=jax.random.key(3)[None], **drawn) if request.temperature else {}
        assert tokens.tolist() == alone(whole, request, **options)
    assert scheduler.counts().cached_tokens and scheduler.slots.room == 64
    pools = scheduler.slots.arrays["pools"]
    for got, want in zip(
        jax.tree.leaves(pools), jax.tree.leaves(model.initial_states(3, scheduler.slots.room)), strict=True
    ):
        assert (got.shape, got.sharding) == (want.shape, want.sharding)
    assert any("model" in x.sharding.spec for x in scheduler.store.leaves)
    rooms = 1 + scheduler.slots.grows
    for program, count in zip(programs, before, strict=True):
        kinds = 2 if program is slots.draw else 1  # the likeliest tokens, and drawn ones
        assert program._cache_size() <= count + rooms * kinds, program
    assert_free(scheduler)


def test_answers_on_automatic_axes_are_those_of_one_device():
    model = glax.models.from_pretrained(FIXTURES / "gla_hybrid", mesh=mesh_of(AxisType.Auto, model=2, fsdp=2))
    scheduler = Scheduler(model, capacity=2, rows=16, max_length=64, block=8, prefix_bytes=10**6, ends=())
    requests = [Request([*range(1, n)], 6) for n in (20, 12, 24)]
    for request, tokens in zip(requests, scheduler.answers(requests), strict=True):
        assert tokens.tolist() == alone(model_of("gla_hybrid"), request)
    assert scheduler.counts().cached_tokens


@pytest.mark.parametrize("name", ["gla", "llama"])
def test_no_device_has_the_whole_head(name):
    """One has an untied head, the other the embedding's transpose."""
    model = glax.models.from_pretrained(FIXTURES / name, mesh=mesh_of(AxisType.Explicit, model=2))
    held = slots.Slots(model, 5, 64, None)
    held.make()
    pools, token = held.arrays["pools"], held.arrays["token"]
    lowered = slots.write.lower(held.structure, held.parameters, pools, token, np.zeros(5, bool))
    gathers = [line for line in lowered.compile().as_text().splitlines() if " all-gather(" in line]
    width, vocabulary = model.width, model.vocabulary
    wrong = [line for line in gathers if re.search(rf"\[({width},{vocabulary}|{vocabulary},{width})\]", line)]
    assert not wrong
    assert lowered.out_info[1].shape == (5, vocabulary)


def test_a_warm_scheduler_on_a_mesh_compiles_nothing_for_its_first_request():
    model = glax.models.from_pretrained(FIXTURES / "gla", mesh=mesh_of(AxisType.Explicit, model=2, fsdp=2))
    scheduler = Scheduler(model, capacity=2, rows=8, max_length=64, ends=())
    scheduler.warm_up()
    with Compiled() as compiled:
        scheduler.answers([Request([1, 2, 3], 5)])
    assert compiled.count == 0

"""Whole models with NaN and inf in one document, prompt or slot: no other one changes, and padding reaches nothing.

GLAX_ALL_FIXTURES=1 tries every fixture rather than one of each type.
"""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax._src.kernels.cpu.library import missing
from glax.models.model import CausalLM

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
BAR = 1e-4  # a poisoned call may solve the clean documents by other kernels
# The second of three documents is poisoned; the third ends behind a chunk of 64 tokens. The second row is one document.
T, CUTS = 70, (0, 30, 50, 66)
IDS = np.stack([np.repeat([5, 2, 7, 0], np.diff((*CUTS, T))), np.full(T, 3)])
POISONED, PADDING = (0, 40), IDS == 0
PROMPTS, ROWS = np.array([0, 10, 22, 30], np.int32), 40  # the second prompt is poisoned, and what lies behind the third
READ, STEPPED = np.array([1, 3, 0]), np.array([0, 3, 1, -1])  # slots of the prompts, and of the tokens of a step
SLOTS = 5


def one_of_each_type() -> list[str]:
    """Return a fixture of each model type: the one called "_options", which sets every option, or else the first."""
    types: dict[str, str] = {}
    for path in sorted(FIXTURES.iterdir()):
        kind = json.loads((path / "config.json").read_text()).get("model_type", "mamba2")
        if kind not in types or path.name.endswith("_options"):
            types[kind] = path.name
    return sorted(types.values())


NAMES = sorted(path.name for path in FIXTURES.iterdir()) if os.environ.get("GLAX_ALL_FIXTURES") else one_of_each_type()


@pytest.fixture
def added(monkeypatch) -> dict[str, Any]:
    """Make every model add the entry "embedding" to the rows of its embedding."""
    entry: dict[str, Any] = {}
    own = CausalLM.embed

    def embed(self, tokens):
        return own(self, tokens) + entry["embedding"].astype(self.dtype)

    monkeypatch.setattr(CausalLM, "embed", embed)
    return entry


def program(name: str, added: dict):
    """Return the clean inputs, and a compiled function from inputs to (logits, gradients by row, logits of prompts, pools behind
    them, logits of a step, pools behind it)."""
    model = glax.models.from_pretrained(FIXTURES / name)
    graph, params = nnx.split(model)
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, model.vocabulary, (2, T)).astype(np.int32)

    @jax.jit
    def run(inputs):
        model = nnx.merge(graph, params)

        def weighted(rows):
            added["embedding"] = rows
            logits = model(tokens, jnp.asarray(IDS), 0)
            return jnp.where(PADDING[..., None], 0, logits * inputs["weights"]).sum(), logits

        gradient, logits = jax.grad(weighted, has_aux=True)(inputs["rows"])
        added["embedding"] = inputs["prompts"]
        fresh = jnp.ones(len(READ), bool)
        read, pools = model.prefill(tokens[0, :ROWS], inputs["pools"], jnp.asarray(READ), jnp.asarray(PROMPTS), fresh)
        added["embedding"] = inputs["step"]
        stepped, after = model.step(tokens[1, : len(STEPPED)], inputs["behind"], jnp.asarray(STEPPED))
        return dict(logits=logits, gradient=gradient, read=read, pools=pools, stepped=stepped, after=after)

    def zeros(*rows):
        return np.zeros((*rows, model.width), np.float32)

    pools = jax.tree.map(np.asarray, model.initial_states(SLOTS, 16))
    inputs = dict(rows=zeros(2, T), prompts=zeros(ROWS), step=zeros(len(STEPPED)), pools=pools, behind=pools)
    inputs["weights"] = draw.standard_normal((2, T, model.vocabulary)).astype(np.float32)
    inputs["behind"] = jax.tree.map(np.asarray, run(inputs)["pools"])
    return inputs, lambda inputs: jax.tree.map(np.asarray, run(inputs))


def assert_same(name: str, got, want, where):
    got, want = got[where], want[where]
    assert np.isfinite(got).all(), f"{name}: {(~np.isfinite(got)).any(-1).sum()} rows are not finite"
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12)
    assert error <= BAR, f"{name} is off by {error:.1e}"


def assert_same_slots(name: str, got, want, slots):
    def of_array(path, got, want):
        assert_same(f"{name}{jax.tree_util.keystr(path)}", got, want, slots)

    jax.tree_util.tree_map_with_path(of_array, got, want)


def with_value(x, at, value):
    x = x.copy()
    x[at] = value
    return x


def with_value_in_slots(pools, slots, value):
    """Return the pools with the value in the states of the slots; lengths are integers, and stay."""
    return jax.tree.map(lambda x: with_value(x, slots, value) if np.issubdtype(x.dtype, np.floating) else x, pools)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_a_prompt_and_a_slot_reach_no_other(name, added):
    inputs, run = program(name, added)
    clean = run(inputs)
    others = ~PADDING & (IDS[POISONED] != IDS)
    earlier = np.arange(T)[None] < POISONED[1]  # of the same document, too
    # XLA's chunks mix a prompt's rows; native code, which goes by token, does not compute RWKV-7 and Comba.
    by_token = missing() is None and not name.startswith(("rwkv7", "comba"))
    other_rows = np.r_[0 : 15 if by_token else PROMPTS[1], PROMPTS[2] : PROMPTS[3]]
    for value in (np.nan, np.inf):
        poison = dict(
            rows=with_value(inputs["rows"], POISONED, value),
            prompts=with_value(inputs["prompts"], 15, value),
            step=with_value(inputs["step"], 1, value),
        )
        found = run(inputs | poison)
        assert not np.isfinite(found["logits"][POISONED]).all()
        assert_same("logits", found["logits"], clean["logits"], others | (earlier & ~PADDING))
        assert_same("gradient", found["gradient"], clean["gradient"], others)
        assert_same("prompts", found["read"], clean["read"], other_rows)
        assert_same_slots("pools behind prompts", found["pools"], clean["pools"], [0, 1, 2, 4])
        assert_same("step", found["stepped"], clean["stepped"], [0, 2])
        assert_same_slots("pools behind a step", found["after"], clean["after"], [0, 1, 2, 4])
    # a cotangent; a slot whose states are not finite
    weights = with_value(inputs["weights"], POISONED, np.nan)
    found = run(inputs | dict(weights=weights, behind=with_value_in_slots(inputs["behind"], 3, np.nan)))
    assert_same("gradient", found["gradient"], clean["gradient"], others)
    assert_same("step", found["stepped"], clean["stepped"], [0, 2])
    assert_same_slots("pools behind a step", found["after"], clean["after"], [0, 1, 2, 4])
    # padding; what slots hold that are not read; a token of no slot
    poison = dict(
        rows=with_value(inputs["rows"], PADDING, np.nan),
        prompts=with_value(inputs["prompts"], slice(PROMPTS[-1], None), np.nan),
        step=with_value(inputs["step"], 3, np.nan),
        pools=with_value_in_slots(inputs["pools"], slice(None), np.nan),
        behind=with_value_in_slots(inputs["behind"], [2, 4], np.nan),
    )
    found = run(inputs | poison)
    assert_same("logits", found["logits"], clean["logits"], ~PADDING)
    assert_same("gradient", found["gradient"], clean["gradient"], ~PADDING)
    assert_same("prompts", found["read"], clean["read"], slice(PROMPTS[-1]))
    assert_same_slots("pools behind prompts", found["pools"], clean["pools"], READ)
    assert_same("step", found["stepped"], clean["stepped"], slice(3))
    assert_same_slots("pools behind a step", found["after"], clean["after"], [0, 1, 3])


@pytest.mark.parametrize("name", ["gla_hybrid", "qwen3_next"])
def test_a_prompt_that_is_not_finite_leaves_the_continuations_of_others(name):
    """Prompts of their own lengths, read and continued in one program."""
    model = glax.models.from_pretrained(FIXTURES / name)
    tokens, lengths = np.random.default_rng(0).integers(0, model.vocabulary // 2, (3, 12)), np.array([12, 9, 5])
    wanted = glax.models.generate(model, tokens, 6, lengths=lengths)
    poison = np.setdiff1d(np.arange(model.vocabulary // 2, model.vocabulary), wanted)[0]
    model.embedding.embedding[...] = model.embedding.embedding[...].at[poison].set(jnp.nan)
    tokens[1, 4] = tokens[2, 5:] = poison
    found = glax.models.generate(model, tokens, 6, lengths=lengths)
    np.testing.assert_array_equal(found[::2], wanted[::2])

"""The Triton kernel of a step of a `StatePool` in Triton's interpreter, called as on a GPU, against the float64 token loop."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

from glax import serving  # noqa: E402
from glax._src.core.registry import kernel_registry  # noqa: E402
from glax._src.kernels.triton import TritonReplayConfig, replay, support  # noqa: E402
from glax._src.kernels.triton.config import width  # noqa: E402
from tests.close import assert_close  # noqa: E402
from tests.conformance.test_replay import (  # noqa: E402
    ERASURES,
    assert_no_drift,
    assert_served,
    case_of,
    kernels_on_a_pool,
    rows,
)
from tests.delta_cases import DeltaCase, Draw  # noqa: E402


def by_triton(**fields):
    config = TritonReplayConfig(**dict(columns=16, warps=1) | fields)
    return kernels_on_a_pool(replay=functools.partial(replay.recurrent_replay, config=config))


@pytest.mark.parametrize("form", ["none", "constant", "head", "key", "value", "key+value"])
@pytest.mark.parametrize("erasure", ERASURES)
def test_a_step_of_ringed_states(form, erasure):
    """Slots are at places of their own, and some steps have no sequence in a row."""
    draw = Draw("-inf on 5%", "to 2") if form in ("head", "key+value") else Draw()
    with by_triton() as calls:
        assert_served(case_of(form, erasure, T=11), draw, replay=4, drafts=0)
    assert calls["replay"]


@pytest.mark.parametrize(
    "form,erasure,changes",
    [
        ("head", "+beta", dict(heads=(1, 1, 2), K=20, V=24)),
        ("key", "", dict(heads=(2, 1, 2), V=33, dtype="bfloat16")),
        ("key", "+beta", dict(replay=1, drafts=3)),
        ("key+value", "+erase+write+along", dict(replay=2)),
        ("value", "+erase", dict(replay=30, T=50, drafts=0, heads=(1, 1, 1))),  # longer than a tile of tokens
        ("key", "+erase+along", dict(replay=18, T=40, drafts=0, heads=(1, 1, 1))),
    ],
    ids=str,
)
def test_between_drafts_and_in_rings_of_any_length(form, erasure, changes):
    changes = dict(replay=5, T=16, drafts=3) | changes
    ring = {name: changes.pop(name) for name in ("replay", "drafts")}
    with by_triton() as calls:
        assert_served(case_of(form, erasure, **changes), Draw("+0.05"), **ring)
    assert calls["replay"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form,erasure", [("key", ""), ("head", "+erase+write+along")])
def test_states_of_sixteen_bits(dtype, form, erasure):
    """Beside the steps by parts, which read and round the same states."""
    case = case_of(form, erasure, T=9)
    inputs, found = case.inputs(Draw()), []
    for kernels in (by_triton(), kernels_on_a_pool()):
        with kernels:
            pool, outputs = serving.StatePool(6, case.heads, (case.K, case.V), dtype, replay=4, form=case.name), []
            for t in range(case.T):
                token = rows(inputs, np.full(3, t))
                own = dict(erase_before_decay=True) if case.before_decay else {}
                output, pool = pool.step(**token, slots=jnp.asarray([4, 0, 2]), **own)
                outputs.append(output)
            found.append((np.asarray(outputs), np.asarray(pool.states_of())))
    for name, got, want in zip(("output", "states"), *found, strict=True):
        assert_close(name, got, want, dict(bfloat16=3.5e-3, float16=1e-3)[dtype])


@pytest.mark.parametrize("name,dtype,changes", [
    ("key", "int8", {}), ("head+beta", "int8", dict(replay=20)), ("key", "float8_e4m3fn", {}),
])  # fmt: skip
def test_states_of_8_bits_do_not_drift(name, dtype, changes):
    with by_triton(columns=32) as calls:
        assert_no_drift(name, dtype, T=60, **changes)
    assert calls["replay"]


def test_a_state_of_8_bits_that_is_not_finite_is_nan():
    """Of the rows that share its scale, and of no other."""
    with by_triton():
        pool = serving.StatePool(1, 1, (40, 3), "int8", replay=2)
        k = jnp.zeros((1, 1, 40)).at[0, 0, 8].set(jnp.inf).at[0, 0, 20].set(2.0)
        for _ in range(2):
            _, pool = pool.step(jnp.ones_like(k), k, jnp.ones((1, 1, 3)))
    state = np.asarray(pool.states_of())[0, 0]
    assert np.isnan(state[8:16]).all() and np.isfinite(np.delete(state, slice(8, 16), 0)).all()
    assert_close("state", state[20], np.full(3, 4.0), 1e-3)


def test_without_slots_and_with_slots_outside():
    """A slot outside of the pool is no sequence. Slots that no sequence has do not change."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 2, 8)), jnp.float32)
    states = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 8, 8)), jnp.float32)
    with by_triton():
        pool = serving.StatePool(3, 2, 8, replay=2, form="head").replace(states=states)
        g = -jnp.ones((3, 2))
        want, whole = pool.step(*x[:3], g=g)
        got, some = jax.jit(lambda slots: pool.step(*x[:3], g=g, slots=slots))(jnp.asarray([-1, 7, 2]))
    np.testing.assert_array_equal(got[2], want[2])
    assert not np.asarray(got[:2]).any() and some.length.tolist() == [0, 0, 1] and whole.length.tolist() == [1, 1, 1]
    for after, before in zip(jax.tree.leaves(some), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(after[:2], before[:2])


def test_every_shape_of_the_heuristic():
    """Of a state in 8 bits a program has all columns, which 16 warps hold."""
    for dtype, K, V in itertools.product(("float32", "bfloat16", "int8"), (1, 64, 128, 512), (1, 64, 128, 512)):
        r = token_of(dtype, K, V)
        config = TritonReplayConfig.heuristic(r)
        if support.replay_refusal(r) is None:
            assert config.warps <= 16 and width(K) * config.columns <= 2**15, (dtype, K, V, config)
            assert dtype != "int8" or config.columns >= V


def token_of(dtype: str, K: int, V: int):
    case = DeltaCase("fits", ("gk",), (), B=1, T=1, heads=(1, 1, 1), K=K, V=V)
    return jax.eval_shape(lambda: case.recurrence(Draw()).replace(initial_state=jnp.zeros((1, 1, K, V), dtype)))


@pytest.mark.parametrize("dtype, capability, why", [
    ("float8_e4m3fn", "8.0", "compute capability 8.9 or newer, this one has 8.0"),
    ("int8", "9.0", "at most 32768 numbers"),
    ("float8_e5m2", "9.0", "takes states in float32 or bfloat16"),
])  # fmt: skip
def test_refusals(monkeypatch, dtype, capability, why):
    monkeypatch.setattr(support, "capability", lambda: tuple(map(int, capability.split("."))))
    assert why in (support.replay_refusal(token_of(dtype, 256, 256)) or "")
    assert support.replay_refusal(token_of("float32", 512, 512)) is None


def test_an_older_jax_triton_is_refused(monkeypatch):
    monkeypatch.setattr(support, "version_of", lambda name: "3.9.0" if name == "triton" else "0.3.1")
    assert "needs jax-triton>=0.4, 0.3.1 is installed" in (support.replay_refusal(token_of("float32", 8, 8)) or "")


def test_the_kernel_of_cuda_is_preferred():
    own, other = (kernel_registry.kernels[f"recurrent.replay/{name}/gpu"] for name in ("triton", "cuda"))
    r = token_of("float32", 128, 128)
    assert own.priority(r) < other.priority(r)


def test_8_bits_need_all_columns():
    said = r"must have all 20 columns of states in 8 bits: set columns to 32"
    with by_triton(columns=16), pytest.raises(ValueError, match=said):
        serving.StatePool(1, 1, 20, "int8", replay=2).step(*jnp.ones((3, 1, 1, 20)))

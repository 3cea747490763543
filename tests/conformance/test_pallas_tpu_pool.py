"""The TPU kernels on a pool of states in Pallas' TPU interpreter, against the float64 reference; and lowered for a TPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.backend import lowering_platform
from glax._src.core.registry import Backend, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.pallas_tpu import rows
from glax.testing.reference import reference
from tests.close import assert_close
from tests.conformance.test_pallas_tpu import interpreted, lowered
from tests.delta_cases import DeltaCase, Draw

load_kernels()
STEP, VERIFY = (kernel_registry.kernels[f"recurrent.{name}/pallas/tpu"] for name in ("step", "verify"))
POOLED = dict(B=4, heads=(1, 2, 4), K=24, V=40)
SLOTS = np.array([2, -1, 6, 4], np.int32)
USED = SLOTS >= 0
CASES = {
    case.name: case
    for case in (
        DeltaCase("none", (), (), **POOLED, T=1),
        DeltaCase("constant and values", ("g_gamma", "gv"), (), **POOLED, T=1),
        DeltaCase("head", ("g",), (), B=4, heads=(10, 10, 10), K=16, V=128, T=1),
        DeltaCase("key and values", ("gk", "gv"), (), **POOLED, T=3),
        DeltaCase("beta", ("g",), ("beta",), **POOLED, T=1),
        DeltaCase("beta, wide", ("gk",), ("beta",), B=4, heads=(2, 2, 2), K=128, V=256, T=2),
        DeltaCase("erase and write", ("gk",), ("erase", "write"), **POOLED, T=4),
        DeltaCase("along", ("g",), ("erase", "write"), **POOLED, T=1, along=True),
        DeltaCase("along, before the decay", ("gk",), ("erase",), **POOLED, T=3, along=True, before_decay=True),
        DeltaCase("before the decay", ("gk",), ("erase", "write"), **POOLED, T=1, before_decay=True),
    )
}


def problem(case: DeltaCase, draw, dtype="float32", slots=SLOTS):
    """The recurrence, a pool of seven rows with its states, and the slots."""
    r = case.recurrence(draw)
    states = r.initial_state.astype(dtype)
    pool = jnp.cos(jnp.arange(7.0 * states[0].size)).reshape(7, *states.shape[1:]).astype(dtype)
    used = slots >= 0
    return r.replace(initial_state=states), pool.at[slots[used]].set(states[used]), jnp.asarray(slots)


def run(spec, r, pool, slots):
    assert spec.supports(r.replace(initial_state=pool)) is None
    program = interpreted(functools.partial(spec.run, config=spec.config()))
    return program(r.replace(initial_state=None), pool, slots)


def sampled():
    """Every case with two strengths of gates and states in two dtypes, of which `make rest` runs few."""
    for name in CASES:
        for gates, dtype in (("log-sigmoid", "float32"), ("-inf on 5%", "bfloat16")):
            few = name in ("head", "key and values", "beta", "along, before the decay")
            marks = [] if few and (dtype == "float32" or name == "beta") else pytest.mark.thorough
            yield pytest.param(CASES[name], Draw(gates), dtype, id=f"{name}, {dtype}", marks=marks)


@pytest.mark.parametrize(("case", "draw", "dtype"), [*sampled()])
def test_a_step_advances_the_rows_of_its_slots_alone(case, draw, dtype):
    r, pool, slots = problem(case, draw, dtype)
    output, after = run(STEP, r, pool, slots)
    want = reference(r)
    assert_close("output", output[USED], want.output[USED], 1e-5)
    assert not np.asarray(output[~USED]).any()
    assert after.dtype == dtype
    assert_close("pool", after[slots[USED]], want.final_state[USED], 1e-5 if dtype == "float32" else 3e-3)
    others = np.setdiff1d(np.arange(7), SLOTS)
    np.testing.assert_array_equal(np.asarray(after)[others], np.asarray(pool)[others])
    assert_close("verified", run(VERIFY, r, pool, slots)[USED], want.output[USED], 1e-5)


@pytest.mark.parametrize("slots", [[-1, -1, 3, 0], [5, -1, -1, -1], [-1, -1, -1, -1], [0, 1, -1, 2]], ids=str)
def test_null_sequences_anywhere_change_nothing(slots):
    slots = np.array(slots, np.int32)
    case = dataclasses.replace(CASES["head"], B=4)
    r, pool, slots = problem(case, Draw("log-sigmoid"), slots=slots)
    pool = pool.at[6].set(jnp.nan)  # of no sequence
    output, after = run(STEP, r, pool, slots)
    used, want = np.asarray(slots) >= 0, reference(r)
    assert not np.asarray(output[~used]).any()
    if used.any():
        assert_close("output", output[used], want.output[used], 1e-5)
        assert_close("pool", after[slots[used]], want.final_state[used], 1e-5)
    others = np.setdiff1d(np.arange(7), np.asarray(slots))
    np.testing.assert_array_equal(np.asarray(after)[others], np.asarray(pool)[others])


def test_a_sequence_that_is_not_finite_harms_no_other():
    r, pool, slots = problem(CASES["beta"], Draw("log-sigmoid"))
    clean = run(STEP, r, pool, slots)
    spoiled = run(STEP, r.replace(v=r.v.at[2].set(jnp.nan)), pool.at[4].set(jnp.inf), slots)
    for x, y in zip(clean, spoiled, strict=True):
        rows = [0, 1] if x is clean[0] else [0, 1, 2, 3, 5]
        np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(y)[rows])


def test_slow_decays_are_not_rounded_alike():
    case = DeltaCase("slow", ("g",), (), B=1, heads=(1, 1, 1), K=8, V=128, T=60)
    r, pool, _ = problem(case, Draw("log-sigmoid"), slots=np.array([3], np.int32))
    r = r.replace(decay=dataclasses.replace(r.decay, head=jnp.full_like(r.decay.head, -1e-6)), v=0 * r.v)
    _, after = run(STEP, r, pool, jnp.array([3]))
    decayed = np.asarray(after[3], np.float64) / np.asarray(pool[3], np.float64)
    assert abs(np.median(decayed) - np.exp(-60e-6)) < 2e-7  # e^-1e-6 in float32 would be off by 8e-7


@pytest.mark.parametrize("T", [1, 3])
def test_calls_on_a_tpu_take_these_kernels_in_place(T):
    """The public functions, lowered for a TPU on a machine without one."""
    r, pool, slots = problem(dataclasses.replace(CASES["beta"], T=T), Draw("log-sigmoid"))
    arrays = dict(query=r.q, key=r.k, value=r.v, g=r.decay.head, beta=r.erasing.beta)
    if T == 1:
        one = {name: x[:, 0] for name, x in arrays.items()}
        text = lowered(lambda pool: glax.recurrent_step(**one, state=pool, slots=slots), pool)
        assert "glax_step" in text and "output_operand_alias" in text
    else:
        with lowering_platform("tpu"):  # on a CPU no kernel of this kind is chosen, in whose place another could run
            text = lowered(lambda pool: glax.recurrent_verify(**arrays, state=pool, slots=slots), pool)
        assert "glax_verify" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 24, 40), (2, 128, 256)], ids=str)
def test_rows_are_read_and_written_by_slot(shape, dtype):
    pool = jnp.cos(jnp.arange(7.0 * np.prod(shape))).reshape(7, *shape).astype(dtype)
    read, write = (interpreted(f, detect_races=True) for f in (rows.read_rows, rows.write_rows))
    found = read(pool, jnp.asarray(SLOTS))
    np.testing.assert_array_equal(found[USED], pool[SLOTS[USED]])
    new = jnp.sin(found).at[1].set(jnp.nan)
    np.testing.assert_array_equal(
        write(pool, jnp.asarray(SLOTS), new), pool.at[SLOTS[USED]].set(new[np.flatnonzero(USED)])
    )
    nothing = jnp.full(4, -1, jnp.int32)
    np.testing.assert_array_equal(write(pool, nothing, new), pool)


def prompts(pool, tokens, **changes):
    """Prompts of four requests in one row: one continues, one starts anew, one has no slot, one reads what it does not write."""
    options = dict(cu_seqlens=jnp.array([0, 9, 9, 13, 20]), fresh=jnp.array([False, True, False, False]))
    options |= dict(write_slots=jnp.array([2, 5, -1, 1])) | changes
    return glax.prefill_into(pool, jnp.array([2, 0, -1, 4]), **tokens, **options)


def prompt_operands() -> tuple:
    case = DeltaCase("prompts", ("g",), ("beta",), B=1, heads=(2, 2, 2), K=24, V=40, T=20)
    r = case.recurrence(Draw("log-sigmoid"))
    tokens = dict(query=r.q, key=r.k, value=r.v, g=r.decay.head, beta=r.erasing.beta)
    pool = jnp.cos(jnp.arange(7.0 * 2 * 24 * 40)).reshape(7, 2, 24, 40)
    return pool, {name: x[0] for name, x in tokens.items()}


def loss(pool, tokens):
    output, after = prompts(pool, tokens)
    return jnp.square(output).sum() + jnp.square(after).sum()


def test_prompts_read_and_write_a_pool_by_these_kernels(request):
    """prefill_into, its gradient, and vmap over pools equal those on a CPU."""

    def all_of(pool, tokens):
        several = jnp.stack([pool, 2 * pool])
        return (
            prompts(pool, tokens),
            jax.grad(loss, (0, 1))(pool, tokens),
            jax.vmap(lambda x: prompts(x, tokens))(several),
        )

    operands = prompt_operands()
    want = jax.jit(all_of)(*operands)
    request.getfixturevalue("on_tpu_anew")
    got = interpreted(all_of)(*operands)
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert_close(f"prompts {i}", x, np.asarray(y, np.float64), 2e-5)


def test_a_lowered_prompt_copies_the_rows_of_its_slots(on_tpu_anew):
    pool, tokens = prompt_operands()
    text = lowered(prompts, pool, tokens)
    assert "glax_read_rows" in text and "glax_write_rows" in text and "output_operand_alias" in text
    assert not [line for line in text.splitlines() if "scatter" in line and "tensor<7x2x24x40xf32>" in line]
    by_xla = lowered(lambda *x: prompts(*x, platform="xla"), pool, tokens)
    assert "tpu_custom_call" not in by_xla
    few = lowered(lambda *x: prompts(*x, states_every=64, state_slots=jnp.zeros(0, jnp.int32)), pool, tokens)
    assert "glax_write_rows" in few
    halves = lowered(prompts, pool.astype(jnp.float16), tokens)
    assert "glax_read_rows" not in halves


def test_prompts_on_explicit_axes_copy_the_heads_of_each_device(on_tpu_anew):
    mesh = jax.make_mesh((2,), ("h",), axis_types=(jax.sharding.AxisType.Explicit,))
    pool, tokens = prompt_operands()

    def over_heads(x, dimension: int):
        spec = jax.sharding.PartitionSpec(*[None] * dimension, "h")
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    text = lowered(prompts, over_heads(pool, 1), {name: over_heads(x, 1) for name, x in tokens.items()})
    assert "glax_read_rows" in text and "glax_write_rows" in text
    assert not re.findall("all_gather|all_reduce|all_to_all|collective_permute", text)


@pytest.mark.filterwarnings("ignore:glax runs XLA")
def test_prompts_on_automatic_axes_take_xla(on_tpu_anew):
    """JAX refuses to divide a Pallas kernel there."""
    mesh = jax.make_mesh((4,), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
    pool, tokens = prompt_operands()
    pool = jax.device_put(pool, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert "tpu_custom_call" not in lowered(prompts, pool, tokens)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(T=65), "takes up to 64 tokens of each sequence, got T=65"),
        (dict(K=1024, V=1000), "key (K) 1024 wide and value (V) 1000 wide, and of T=1 tokens, do not fit VMEM"),
        (dict(dtype="float16"), "query is float16"),
        (
            dict(T=64, K=512, V=512, gates=("gk", "gv"), erasure=("erase", "write"), along=True),
            "key (K) 512 wide and value (V) 512 wide, and of T=64 tokens, do not fit VMEM",
        ),
    ],
    ids=str,
)
def test_refusals_name_what_came(change, why):
    r = dataclasses.replace(CASES["head"], **change).recurrence(Draw("log-sigmoid"))
    assert why in STEP.supports(r)
    assert STEP.backend is Backend.TPU and jax.default_backend() == "cpu"

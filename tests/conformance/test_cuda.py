"""The CUDA kernels on the host, device/scan.cu behind tests/emulate_cuda.h, against the float64 reference."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax import serving
from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels.cuda import replay, scan, step_priority
from glax._src.kernels.cuda.config import CudaConfig, ReplayConfig
from glax.testing.reference import reference
from tests.cases import Case, all_cases, recurrence
from tests.close import assert_close
from tests.conformance.test_replay import assert_no_drift, assert_served, case_of, kernels_on_a_pool
from tests.delta_cases import BEFORE_DECAY, DeltaCase, Draw
from tests.emulate_cuda import emulated
from tests.poison import dispatched, leaks, operands_of, packed, segmented
from tests.suite import check_forward

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++, which compiles the kernel's source for the host"
)

CASES = {case.name: case for case in all_cases()}
FEW = ("log-sigmoid", "-20", "-inf on 5%", "+0.05")
TOKENS = [
    *(dataclasses.replace(CASES[name], T=20, strengths=FEW) for name in ("key", "head", "value-reverse", "constant")),
    dataclasses.replace(CASES["key+value-packed-reverse"], strengths=("log-sigmoid",)),
    dataclasses.replace(CASES["head-packed"], strengths=("log-sigmoid", "-100 on 5%")),
    dataclasses.replace(CASES["bfloat16-key+value"], T=20, V=40),
    dataclasses.replace(CASES["float16-key"], T=20),
    dataclasses.replace(CASES["T2600-key"], T=700, strengths=("-1e-6",)),
    Case("odd", T=9, K=33, V=7, gates=("gk", "gv")),
    Case("groups", T=9, heads=(2, 3, 6), K=8, V=6, gates=("g",)),
    Case("none", T=9, gates=(), state_dtype=None),
    CASES["all-padding"],
    Case("delta", T=11, heads=(1, 1, 2), K=40, V=24, gates=("g",), erasure=("beta",), strengths=FEW[::2]),
    Case(
        "delta-packed",
        T=21,
        K=24,
        V=7,
        gates=("gk", "gv"),
        erasure=("erase", "write"),
        cuts=(0, 3, 3, 19),
        reverse=True,
    ),
    DeltaCase("before-decay", ("gk",), ("erase", "write"), T=11, before_decay=True, draws=BEFORE_DECAY[3:8]),
    DeltaCase(
        "before-decay-head-packed",
        ("g",),
        ("erase",),
        T=21,
        K=40,
        V=7,
        cuts=(0, 3, 3, 19),
        reverse=True,
        before_decay=True,
    ),
    DeltaCase("along", ("g",), ("erase", "write"), T=11, K=24, along=True, dtype="bfloat16"),
    DeltaCase("along-before-decay", ("gk",), ("erase",), T=11, heads=(1, 1, 2), along=True, before_decay=True),
]


@pytest.fixture(scope="module", autouse=True)
def on_host(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "launch_kernel", emulated(tmp_path_factory.mktemp("cuda")))
        yield


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_whole_sequences(case):
    config = CudaConfig(threads=64 if case.K > 32 else 32, columns=16)
    check_forward(case, functools.partial(scan.recurrent, config=config))


@pytest.mark.parametrize("form,pack", [("key+value", segmented), ("head beta", segmented), ("none", packed)])
def test_a_poisoned_document_harms_no_other(form, pack):
    layout = pack((0, 2, 4, 5), 6)
    operands = operands_of(layout.case(form, heads=(1, 1, 1), K=8, V=8))
    spec, config = kernel_registry.kernels["recurrent/cuda/gpu"], CudaConfig(threads=32, columns=8)
    found = leaks(layout, operands, dispatched(spec, lambda r: scan.recurrent(r, config)), None, few=True)
    assert not found, "\n".join(found)


def pool_of(r, state: str):
    """A pool of five rows and slots: the state of sequence n lies in row 4 - n; sequence 1 has no slot."""
    pool = jnp.concatenate([r.initial_state, jnp.full((2, *r.initial_state.shape[1:]), 7.0, state)])[::-1]
    return pool, jnp.array([4, -1, 2], jnp.int32)


POOLED = dict(B=3, heads=(1, 1, 2), K=40, V=24)
USED = np.array([0, 2])


@pytest.mark.parametrize(
    "erasure,T,state",
    [
        ((), 1, "float32"),
        ((), 1, "bfloat16"),
        ((), 9, "bfloat16"),
        (("beta",), 1, "bfloat16"),
        (("erase",), 9, "float32"),
    ],
    ids=str,
)
def test_a_step_advances_the_rows_of_its_slots_alone(erasure, T, state):
    case = Case("step", **POOLED, T=T, gates=("gk",), state_dtype=state, erasure=erasure)
    r = recurrence(case, "log-sigmoid")
    pool, slots = pool_of(r, state)
    output, after = scan.recurrent_step(r.replace(initial_state=None), pool, slots, CudaConfig(threads=64, columns=8))
    want = reference(r)
    assert_close("output", output[USED], want.output[USED], 1e-5)
    assert not np.asarray(output[1]).any()
    rounding = 1e-6 if state == "float32" else 3e-3
    assert_close("pool", after[slots[USED]], want.final_state[USED], rounding)
    untouched = np.array([0, 1, 3])
    np.testing.assert_array_equal(np.asarray(after)[untouched], np.asarray(pool)[untouched])


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("along", [False, True])
def test_steps_and_drafts_erase_before_the_decay(T, along):
    r = DeltaCase("step", erasure=("erase", "write"), before_decay=True, along=along, **POOLED, T=T).recurrence(
        Draw("-inf on 5%")
    )
    pool, slots = pool_of(r, "float32")
    tokens, config, want = r.replace(initial_state=None), CudaConfig(threads=64, columns=8), reference(r)
    output, after = scan.recurrent_step(tokens, pool, slots, config)
    for x in (output, scan.recurrent_verify(tokens, pool, slots, config)):
        assert_close("output", x[USED], want.output[USED], 1e-5)
    assert_close("pool", after[slots[USED]], want.final_state[USED], 1e-5)


@pytest.mark.parametrize("erasure,T", [((), 9), (("beta",), 1)], ids=str)
def test_verification_reads_the_rows_of_its_slots(erasure, T):
    r = recurrence(Case("verify", **POOLED, T=T, gates=("g",), state_dtype="bfloat16", erasure=erasure), "log-sigmoid")
    pool, slots = pool_of(r, "bfloat16")
    output = scan.recurrent_verify(r.replace(initial_state=None), pool, slots, CudaConfig(threads=64, columns=16))
    assert_close("output", output[USED], reference(r).output[USED], 1e-5)
    assert not np.asarray(output[1]).any()


@pytest.mark.parametrize("form,erasure", [("key", ""), ("head", "+beta")])
def test_replayed_states_are_read_and_advanced_in_the_pool(form, erasure):
    """Steps and drafts of a `StatePool` with slots at places of their own, against the token loop."""
    config = CudaConfig(threads=32, columns=8)

    def step(r, pool, slots):
        return scan.recurrent_step(r, pool, slots, config)

    def verify(r, pool, slots):
        return scan.recurrent_verify(r, pool, slots, config)

    with kernels_on_a_pool(step=step, verify=verify) as calls:
        assert_served(case_of(form, erasure, T=6, heads=(1, 1, 2), V=8), Draw("-inf on 5%"), replay=3)
    assert calls["step"] and calls["verify"]


@pytest.mark.parametrize(
    "form,erasure,changes",
    [
        ("none", "+beta", {}),
        ("constant", "", dict(heads=(1, 1, 2))),
        ("head", "+beta", dict(heads=(1, 1, 2), K=40, V=24, threads=64)),
        ("key", "", dict(heads=(2, 1, 2), V=8, dtype="bfloat16")),
        ("key", "+beta", dict(replay=12)),
        ("value", "+erase+write", dict(replay=12, drafts=0)),
        ("key+value", "+erase+along", {}),
        ("key+value", "+erase+write+along", dict(replay=12)),
    ],
    ids=str,
)
def test_a_step_of_ringed_states(form, erasure, changes):
    """Steps of a `StatePool` by one kernel, between drafts and their commits by others, against the token loop."""
    changes = dict(replay=5, threads=32, T=16) | changes
    config = ReplayConfig(threads=changes.pop("threads"), columns=8)
    ring = {name: changes.pop(name) for name in ("replay", "drafts") if name in changes}

    with kernels_on_a_pool(replay=functools.partial(replay.recurrent_replay, config=config)) as calls:
        for draw in (Draw(), Draw("-inf on 5%", "to 2"), Draw("+0.05"))[: 3 if form == "key" else 2]:
            assert_served(case_of(form, erasure, **changes), draw, **ring)
    assert calls["replay"]


@pytest.mark.parametrize("name,dtype,changes", [
    ("key", "int8", {}), ("head+beta", "int8", dict(replay=20)), ("key", "float8_e4m3fn", {}),
])  # fmt: skip
def test_a_step_of_ringed_states_of_8_bits(name, dtype, changes):
    config = ReplayConfig(threads=64, columns=32)

    with kernels_on_a_pool(replay=functools.partial(replay.recurrent_replay, config=config)) as calls:
        assert_no_drift(name, dtype, T=60, **changes)
    assert calls["replay"]


def test_a_step_by_the_kernel_is_mapped_and_differentiated_by_parts():
    x, slots = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 1, 8)), jnp.float32), jnp.array([2, -1])
    pool = serving.StatePool(3, 1, 8, replay=2, form="none+beta")
    states = jax.random.normal(jax.random.key(0), (2, *pool.states.shape))

    def output(states):
        found, _ = pool.replace(states=states).step(*x, beta=jnp.full((2, 1), 0.5), slots=slots)
        return found

    def all_of():
        return output(states[0]), jax.vmap(output)(states), jax.grad(lambda s: (output(s) ** 2).sum())(states[0])

    want = all_of()
    run = functools.partial(replay.recurrent_replay, config=ReplayConfig(threads=32, columns=8))
    with kernels_on_a_pool(replay=run) as calls:
        got = all_of()
    assert calls["replay"]
    for name, a, b in zip(("output", "mapped", "gradient"), got, want, strict=True):
        assert_close(name, a, np.asarray(b), 1e-5)


@pytest.mark.parametrize("dtype, K, V, erasure, able", [
    ("int8", 128, 128, ("beta",), True),
    ("int8", 128, 64, (), True),
    ("int8", 32, 33, (), False),  # a thread reads one column at a time, and 32 threads not all
    ("int8", 32, 66, (), False),
    ("int8", 256, 256, (), False),
    ("int8", 128, 256, ("erase", "along"), False),  # no token fits in shared memory
    ("float8_e4m3fn", 128, 256, (), True),
    ("float32", 512, 512, ("erase", "along"), True),
])  # fmt: skip
def test_a_step_of_ringed_states_is_refused_where_it_does_not_fit(dtype, K, V, erasure, able):
    case = DeltaCase("fits", ("gk",), erasure[:1], B=1, T=1, heads=(1, 1, 1), K=K, V=V, along="along" in erasure)
    r = case.recurrence(Draw())
    why = replay.refusal(r.replace(initial_state=jnp.zeros(r.state_shape, dtype)))
    assert (why is None) == able, why


def test_every_shape_of_block_covers_the_state():
    for K, V, heads in ((1, 1, 1), (512, 512, 1), (128, 64, 64), (100, 60, 3), (256, 512, 4)):
        r = recurrence(Case("shape", B=1, T=2, heads=(heads,) * 3, K=K, V=V, gates=("gk",)), "mild")
        for config in (CudaConfig.heuristic(r), *CudaConfig.candidates(r), CudaConfig(1024, 256), CudaConfig(32, 1)):
            for stored in (0, 1):
                constants, blocks = scan.plan(r, config, dict(STATE=stored, STATES=1, SINGLE=0))
                columns = constants["LANES"] * constants["VECTOR"]
                assert V % constants["VECTOR"] == 0 and 32 % constants["LANES"] == 0
                assert (blocks // heads - 1) * columns < V <= blocks // heads * columns
                assert constants["VECTOR"] * (2 if stored else 4) in (2, 4, 8, 16)


@pytest.mark.parametrize("B, V, preferred", [(1, 128, False), (16, 63, False), (16, 64, True), (64, 128, True)])
def test_a_step_of_few_states_is_left_to_triton(B, V, preferred):
    """16 sequences with 64 heads of 128 x 64 in float32 have 2^25 bytes of states."""

    def step(q, v, pool):
        found.append(step_priority(bind(q, q, v, initial_state=pool)))

    found, shapes = [], ((B, 1, 64, 128), (B, 1, 64, V), (B, 64, 128, V))
    jax.eval_shape(step, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert (found[0] > 0) == preferred

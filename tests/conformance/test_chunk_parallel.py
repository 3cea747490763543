"""The chunk-parallel form of XLA on CPUs: its results, the shapes it supports, and gates for which it is not exact."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import glax
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.xla import chunk_parallel, chunk_scan
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from tests.cases import Case, cotangents, inputs, recurrence
from tests.compiling import quick_jit

C = 16
CASE = Case("", B=2, T=128, heads=(4, 2, 1), K=8, V=12)
needs_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="glax chooses this form on CPUs alone")


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())


def assert_equals_chunk_scan(case: Case, strength: str = "log-sigmoid"):
    r, config = recurrence(case, strength), ChunkedConfig(C)
    cotangent = cotangents(case, r)
    outputs, states = quick_jit(lambda r: chunk_parallel.solve(r, C))(r)
    want, before = quick_jit(lambda r: chunk_scan.forward_by_scan(r, config, save_states=True))(r)
    close(outputs, want)
    assert (states is None) == chunk_parallel.groups_heads(r, C)
    if states is not None:
        close(states, before)
    vjp = quick_jit(lambda r, residuals: chunk_parallel.vjp(r, C, *cotangent, residuals))
    want = quick_jit(lambda r: chunk_scan.vjp_by_scan(r, config.chunk, *cotangent, None))(r)
    for residuals in (states, None):
        close(vjp(r, residuals), want)


both_ways = pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
GATES = [(), ("g_gamma",), ("g",), ("gk",)]
every_gate = pytest.mark.parametrize("gates", GATES, ids=str)


@both_ways
@every_gate
def test_blocks_equal_chunk_scan(gates, reverse, monkeypatch):
    monkeypatch.setattr(chunk_parallel, "BLOCK", 1)
    case = dataclasses.replace(CASE, gates=gates, reverse=reverse)
    assert chunk_parallel.block(recurrence(case, "log-sigmoid"), C) == chunk_parallel.GROUPS * C < case.T
    assert_equals_chunk_scan(case)


def test_memory_depends_on_the_block_alone(monkeypatch):
    """The gradient of a longer sequence needs no more memory, except for the saved states."""
    monkeypatch.setattr(chunk_parallel, "BLOCK", 2**13)
    needs = []
    for T in (1024, 4096):
        r = recurrence(dataclasses.replace(CASE, T=T, heads=(2, 2, 2)), "mild")
        cotangent = cotangents(CASE, r)
        residuals = chunk_parallel.solve(r, C)[1]
        run = quick_jit(lambda r, residuals, *cotangent: chunk_parallel.vjp(r, C, *cotangent, residuals))
        needs.append(run.lower(r, residuals, *cotangent).compile().memory_analysis().temp_size_in_bytes)
    assert needs[1] < 1.1 * needs[0] < 40 * 4 * chunk_parallel.BLOCK


def one_block():
    """Heads, gates and directions; one of each form also for the newest JAX."""
    forms = (CASE.heads, ("gk",), False), (CASE.heads, ("g",), False)
    for heads, gates, reverse in itertools.product([(4, 2, 1), (2, 2, 1)], GATES, [False, True]):
        marks = [pytest.mark.fast] * ((heads, gates, reverse) in forms)
        yield pytest.param(heads, gates, reverse, marks=marks, id=f"{heads}-{gates}{'-reverse' * reverse}")


@pytest.mark.parametrize(("heads", "gates", "reverse"), list(one_block()))
def test_one_block_equals_chunk_scan(heads, gates, reverse):
    case = dataclasses.replace(CASE, heads=heads, gates=gates, reverse=reverse)
    r = recurrence(case, "log-sigmoid")
    assert chunk_parallel.block(r, C) == case.T
    assert chunk_parallel.groups_heads(r, C) == (heads[0] == chunk_parallel.GROUPS and gates != ("gk",))
    assert_equals_chunk_scan(case)


@pytest.mark.fast
def test_groups_of_heads_have_few_chunks():
    """The matrix of decays between chunks is never larger than a matrix of a chunk's pairs."""
    for T in (C**2, C**2 + chunk_parallel.GROUPS * C):
        r = recurrence(dataclasses.replace(CASE, B=1, T=T, K=1, V=1, gates=("g",)), "mild")
        assert chunk_parallel.block(r, C) == T and chunk_parallel.groups_heads(r, C) == (T == C**2)


@pytest.mark.fast
def test_blocks_are_small_and_whole():
    for T, H, D in ((2048, 4, 64), (4096, 8, 128), (64 * 4 * 7, 8, 128), (64 * 4 * 60, 4, 64)):
        x = jax.ShapeDtypeStruct((1, T, H, D), jnp.float32)
        r = Recurrence(x, x, x, recurrence(CASE, "mild").decay, None, None, jax.ShapeDtypeStruct((1,), jnp.float32))
        L = chunk_parallel.block(r, 64)
        assert T % L == 0 and L % (chunk_parallel.GROUPS * 64) == 0
        assert chunk_parallel.elements(r, 64, L) <= chunk_parallel.BLOCK
        assert chunk_parallel.suits(r)


@needs_cpu
@pytest.mark.fast
@pytest.mark.parametrize(
    "changes",
    [dict(gates=("gv",)), dict(gates=("gk", "gv")), dict(cuts=(0, 128), B=1), dict(T=120), dict(B=2**12)],
    ids=str,
)
def test_unsupported_shapes_use_chunk_scan(changes):
    if "B" in changes and "cuts" not in changes:
        r = recurrence(CASE, "mild")
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((changes["B"], *x.shape[1:]), x.dtype), (r.q, r.k, r.v))
        r = r.replace(q=wide[0], k=wide[1], v=wide[2])
    else:
        r = recurrence(dataclasses.replace(CASE, **changes), "mild")
    assert not chunk_parallel.suits(r, C)
    assert chunk_parallel.suits(recurrence(CASE, "mild"), C)


# With one block, the form is always computed and its result may be overwritten. With several, it is a branch of lax.cond.
in_one_and_in_blocks = pytest.mark.parametrize("blocks", [1, 2], ids=["one block", "blocks"])


def cut_into(blocks: int, monkeypatch):
    r = recurrence(CASE, "mild")
    monkeypatch.setattr(chunk_parallel, "BLOCK", chunk_parallel.elements(r, C, CASE.T // blocks))
    assert chunk_parallel.block(r, C) == CASE.T // blocks


@needs_cpu
@in_one_and_in_blocks
@pytest.mark.parametrize("gate", ["gk", "g"])
def test_out_of_range_gates_use_chunk_scan(gate, blocks, monkeypatch):
    """One compiled function selects the form at run time. The test adds an error to the form to see where it is taken."""
    cut_into(blocks, monkeypatch)
    case, solve = dataclasses.replace(CASE, gates=(gate,)), chunk_parallel.solve

    def wrong(r, size):
        outputs, states = solve(r, size)
        return outputs._replace(output=outputs.output + 1e6), states

    monkeypatch.setattr(chunk_parallel, "solve", wrong)
    run = quick_jit(lambda r: chunk_scan.solve(r, ChunkedConfig(C), save_states=True))
    for strength in ("log-sigmoid", "+0.05", "-7", "-20", "-inf on 5%"):
        r = recurrence(case, strength)
        mild = strength in (
            "log-sigmoid",
            "+0.05",
        )  # at -7, the pairs of tokens with themselves would exceed the gradient
        assert bool(chunk_parallel.in_range(r, C)) == mild, strength
        (output, _), states, blank = run(r)
        assert bool(blank) != mild, strength
        assert states is None if chunk_parallel.groups_heads(r, C) else bool((states != 0).any()) == mild, strength
        assert bool((output > 5e5).all()) == mild and bool((output > 5e5).any()) == mild, strength


@pytest.mark.parametrize("size", [15, 16])
def test_no_exponent_is_underestimated(size):
    """For decays, the largest sum from a chunk's middle decides. For growing gates, the bound may be too large."""
    rng = np.random.default_rng(0)
    case = dataclasses.replace(CASE, gates=("gk",), T=8 * size)
    r = recurrence(case, "mild")
    in_range = jax.jit(
        lambda log: chunk_parallel.in_range(r.replace(decay=dataclasses.replace(r.decay, key=log)), size)
    )
    decided = set()
    for scale, growing in itertools.product(np.geomspace(0.25, 32, 30), (0, 0.001, 0.2)):
        log = -scale * rng.random(r.decay.key.shape, np.float32)
        log = np.where(rng.random(log.shape) < growing, -log, log)
        halves = np.abs(log.reshape(-1, size, log[0, 0].size))
        halves = halves[:, : size // 2], halves[:, size // 2 :]
        largest, found = max(half.sum(1).max() for half in halves), bool(in_range(log))
        assert found <= (largest <= size)
        if size % 2 == 0 and not growing:
            assert found == (largest <= size)
        decided.add(found)
    assert decided == {True, False}


@needs_cpu
@pytest.mark.parametrize("gate", ["gk", "g"])
def test_range_of_inputs_at_the_limit(gate):
    """Chunks of 64 tokens with gates just inside the limit of `common.limits` have the range of inputs stated there."""
    case = dataclasses.replace(CASE, B=1, T=256, gates=(gate,), state_dtype=None)
    r, config = recurrence(case, "-1.87"), ChunkedConfig(64)
    assert chunk_parallel.suits(r, 64) and bool(chunk_parallel.in_range(r, 64))
    run, vjp = (
        quick_jit(lambda r: chunk_parallel.solve(r, 64)[0]),
        quick_jit(lambda r, *d: chunk_parallel.vjp(r, 64, *d, None)),
    )
    scan = quick_jit(lambda r: chunk_scan.forward_by_scan(r, config, save_states=False)[0])
    d_output, d_final = cotangents(case, r)
    want, d_want = (
        scan(r),
        quick_jit(lambda r, *d: chunk_scan.vjp_by_scan(r, 16, *d, None))(r, d_output, d_final),
    )
    for factor in (2.0**33, 2.0**-23):  # 1e10, 1e-7
        for name in ("k", "v"):
            scaled = r.replace(**{name: factor * getattr(r, name)})
            close(run(scaled), jax.tree.map(lambda x: factor * x, want))  # noqa: B023
            d = vjp(scaled, d_output, d_final)
            close(getattr(d, name), getattr(d_want, name))
            close(d.q, factor * d_want.q)


@needs_cpu
@in_one_and_in_blocks
@pytest.mark.parametrize("gate", ["gk", "g", "g_gamma"])
def test_strong_gates_leave_no_infinities_or_nan(gate, blocks, monkeypatch):
    """Neither results nor residuals nor gradients, with residuals or without, hold infinities or NaN of the form."""
    cut_into(blocks, monkeypatch)
    case, config = dataclasses.replace(CASE, gates=(gate,)), ChunkedConfig(C)
    cotangent = cotangents(case, recurrence(case, "mild"))
    run = quick_jit(lambda r: chunk_scan.chunked_with_residuals(r, config=config))
    scan = quick_jit(lambda r: chunk_scan.forward_by_scan(r, config, save_states=False)[0])
    vjp = quick_jit(lambda r, residuals: chunk_scan.chunked_vjp(r, *cotangent, residuals, config=config))
    vjp_by_scan = quick_jit(lambda r: chunk_scan.vjp_by_scan(r, config.chunk, *cotangent, None))
    for strength in ("-20", "-120", "-inf", "-inf on 5%"):
        r = recurrence(case, strength)
        outputs, residuals = run(r)
        assert bool((residuals.out_of_range == 1).all())
        # Groups of heads save the initial state only.
        assert (
            np.array_equal(residuals.states, r.start_state[:, None])
            if chunk_parallel.groups_heads(r, C)
            else not residuals.states.any()
        )
        close(outputs, scan(r))
        for known in (residuals, None):
            close(vjp(r, known), vjp_by_scan(r))


def calls_of(gate: str):
    """Arguments of three calls, the second out of largest, on a first axis; and loss and gradient of one, in chunks of a size."""
    case = dataclasses.replace(CASE, B=1, heads=(2, 2, 2), gates=(gate,), state_dtype=None)
    calls = [list(inputs(case, strength).values()) for strength in ("mild", "-inf on 5%", "log-sigmoid")]

    def loss(q, k, v, log, size=C):
        output, state = glax.recurrent(q, k, v, **{gate: log}, cfg=ChunkedConfig(size))
        return jnp.square(output).sum() + jnp.square(state).sum()

    return [jnp.stack(x) for x in zip(*calls, strict=True)], jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


@needs_cpu
@pytest.mark.parametrize("gate", ["gk", "g"])
def test_one_of_several_calls_is_out_of_range(gate):
    """Calls in a vmap, in a scan and in a shard_map select their forms independently."""
    calls, each = calls_of(gate)
    alone = quick_jit(each)
    results = [alone(*(x[i] for x in calls)) for i in range(3)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *results)
    close(quick_jit(jax.vmap(each))(*calls), want)
    close(quick_jit(lambda *xs: jax.lax.scan(lambda _, x: (None, each(*x)), None, xs)[1])(*calls), want)
    own = P("calls")

    def on_each(*xs):
        return jax.tree.map(lambda x: x[None], each(*(x[0] for x in xs)))

    mesh = jax.make_mesh((3,), ("calls",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(on_each, mesh=mesh, in_specs=own, out_specs=own)
    close(quick_jit(spread)(*calls), want)


@needs_cpu
def test_second_derivatives():
    """Of calls within largest and not, as in chunks that go one by one."""
    calls, each = calls_of("gk")

    def energy(size, *x):
        return sum(jnp.square(d).sum() for d in each(*x, size=size)[1])

    got, want = (quick_jit(jax.grad(functools.partial(energy, size), argnums=(0, 1, 2, 3))) for size in (C, C - 1))
    for i in range(3):
        x = [x[i] for x in calls]
        close(got(*x), want(*x))


@needs_cpu
def test_overwritten_nan_passes_debug_nans():
    """jax_debug_nans raises no error outside of jit, where the saved states are results of a program."""
    calls, each = calls_of("gk")
    with jax.debug_nans(True):
        each(*(x[1] for x in calls))

"""Sums of gates in the Triton kernels, in Triton's interpreter: those of head gates are rounded once, behind gates of -inf
too, and those of key gates have every bit of a gate."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

from glax._src.core.decay import Decay  # noqa: E402
from glax._src.core.recurrence import Recurrence  # noqa: E402
from glax._src.core.registry import kernel_registry  # noqa: E402
from glax._src.kernels import load_kernels  # noqa: E402
from glax._src.kernels.common.limits import LOG_OF_ZERO  # noqa: E402
from glax._src.kernels.triton import GradientConfig, TritonChunkedConfig  # noqa: E402
from glax._src.kernels.triton.operands import chunk_operands  # noqa: E402
from glax._src.kernels.triton.segments import segments_of  # noqa: E402
from glax.testing.reference import reference, reference_gradient  # noqa: E402
from tests.cases import Case, cotangents, recurrence  # noqa: E402
from tests.close import assert_gradients_close, assert_outputs_close  # noqa: E402
from tests.delta_cases import DeltaCase, Draw  # noqa: E402

load_kernels()
chunked, chunked_vjp = (kernel_registry.kernels[f"{name}/triton/gpu"].run for name in ("chunked", "chunked.vjp"))
WHOLE = dict(T=150)
PACKED = dict(cuts=(0, 0, 70, 71, 199, 199), T=205)
NARROW = Case("narrow", K=32, V=48, gates=("g",), dtype="bfloat16")
CASES = [
    dataclasses.replace(NARROW, **rows, reverse=reverse, name=f"{name}{'-reverse' * reverse}")
    for name, rows in (("whole", WHOLE), ("packed", PACKED))
    for reverse in (False, True)
]
WIDE = Case("wide", K=136, V=40, gates=("g",), dtype="bfloat16", **PACKED)


def step_of(chunk: int) -> float:
    """The step whose multiples the kernel takes from gates: what the difference of two sums may be off by."""
    return chunk * 2.0**-17


def rows_of(r: Recurrence, chunk: int) -> list[np.ndarray]:
    """The rows of each chunk that has tokens, in scan order."""
    tables = np.asarray(segments_of(r, chunk, chunk).table)
    return [origin + (-1 if r.reverse else 1) * np.arange(filled) for origin, _, filled, *_ in tables if filled]


def with_gates(r: Recurrence, chunk: int, logs: np.ndarray) -> Recurrence:
    """Give every chunk the same gates: logs [chunk, H], in scan order. Rows of no chunk, which no kernel may use, have NaN."""
    gates = np.full(r.decay.head.shape, np.nan, np.float32)
    for rows in rows_of(r, chunk):
        gates.reshape(-1, gates.shape[-1])[rows] = logs[: len(rows)]
    return r.replace(decay=Decay(head=jnp.asarray(gates)))


def dead_half(r: Recurrence, chunk: int) -> Recurrence:
    """Let each chunk begin with gates of -inf in its first half. A running float32 sum would drop each gate of head 0 behind
    them, and a third of each of head 1."""
    weak = -step_of(chunk) * np.array([0.47, 1.47])
    return with_gates(r, chunk, np.where(np.arange(chunk)[:, None] < chunk // 2, -np.inf, weak))


def patterns(chunk: int) -> np.ndarray:
    """Gates just inside and outside of the step and of the floor: strong ones, all to none of them, before weak ones."""
    step, tokens = step_of(chunk), np.arange(chunk)
    strong = (-np.inf, LOG_OF_ZERO * (1 + 2**-7), LOG_OF_ZERO, LOG_OF_ZERO * (1 - 2**-7), -20.3)
    weak = [step * x for x in (-1e-6, -0.49, -0.51, -1 + 2**-7, -1, -1 - 2**-7, -1.49, 0.49, 1.49)] + [
        -5e-3,
        -0.7,
        0.05,
    ]
    counts = (0, 1, chunk // 2, chunk - 1, chunk)
    steady = [np.where(tokens < count, x, y) for x in strong for y in weak for count in counts]
    rng = np.random.default_rng(0)
    learned = -np.log1p(np.exp(-rng.normal(size=(chunk, 8))))
    mixed = np.where(rng.random((chunk, 8)) < 0.5, -np.inf, learned)
    return np.concatenate([np.stack(steady, 1), learned, mixed], 1).astype(np.float32)


@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_rounded_once(case, chunk):
    logs = patterns(chunk)
    r = recurrence(dataclasses.replace(case, heads=(1, 1, logs.shape[1]), K=1, V=1), "log-sigmoid")
    r = with_gates(r, chunk, logs)
    sums = np.asarray(chunk_operands(r, segments_of(r, chunk, chunk), chunk).gates, np.float64).reshape(
        -1, logs.shape[1]
    )
    want = np.cumsum(np.maximum(logs, LOG_OF_ZERO).astype(np.float64), 0)
    # Half a unit of float32, and what the sum of the rests loses: each of C additions at most C STEP 2^-24.
    allowed = np.spacing(np.abs(want).astype(np.float32)) / 2 + chunk**3 * 2.0**-41
    for rows in rows_of(r, chunk):
        assert (np.abs(sums[rows] - want[: len(rows)]) <= allowed[: len(rows)]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_behind_gates_of_minus_infinity(case):
    r = dead_half(recurrence(case, "log-sigmoid"), 64)
    for config in (TritonChunkedConfig(64, 64), TritonChunkedConfig(64, 64, segment=64)):
        assert_outputs_close(r, jax.jit(functools.partial(chunked, config=config))(r), reference(r))


@pytest.mark.parametrize("chunk", [64, 128])
def test_outputs_of_wide_heads_behind_gates_of_minus_infinity(chunk):
    r = dead_half(recurrence(WIDE, "log-sigmoid"), chunk)
    config = TritonChunkedConfig(chunk, 64, warps=8, block=128)
    assert_outputs_close(r, jax.jit(functools.partial(chunked, config=config))(r), reference(r))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("columns", [0, 32])
def test_gradients_behind_gates_of_minus_infinity(case, columns):
    r = dead_half(recurrence(case, "log-sigmoid"), 64)
    d = cotangents(case, r)
    run = jax.jit(functools.partial(chunked_vjp, config=GradientConfig(64, 32, block=32, columns=columns)))
    assert_gradients_close(r, run(r, *d), reference_gradient(r, *d))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_delta_rule_behind_gates_of_minus_infinity(reverse):
    case = DeltaCase("", ("g",), K=32, V=48, dtype="bfloat16", reverse=reverse, **PACKED)
    r = dead_half(case.recurrence(Draw()), 64)
    run = jax.jit(functools.partial(chunked, config=TritonChunkedConfig(64, 32)))
    assert_outputs_close(r, run(r), reference(r))
    d = case.cotangents(r)
    run = jax.jit(functools.partial(chunked_vjp, config=GradientConfig(64, 16, block=16)))
    assert_gradients_close(r, run(r, *d), reference_gradient(r, *d))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_key_gate_alone_in_its_chunk_is_the_sum(dtype, reverse):
    """Every bit of it, from the floor down to gates whose last bits are below the least normal number, where these are lost."""
    chunk, K = 32, 64
    r = recurrence(Case("", T=8 * chunk, heads=(1, 1, 2), K=K, V=1, dtype=dtype, reverse=reverse), "log-sigmoid")
    rng = np.random.default_rng(0)
    logs = -np.exp2(rng.uniform(-149, 7, size=(8, 2, K))).astype(np.float32)
    logs *= rng.choice(np.float32([1, 1, 1, -(2**-3)]), size=logs.shape)  # some let the state grow
    logs[:, :, 0], logs[:, :, 1], logs[:, :, 2] = -np.inf, LOG_OF_ZERO * (1 + 2**-7), LOG_OF_ZERO * (1 - 2**-24)
    gates = np.zeros((8, chunk, 2, K), np.float32)
    gates[:, chunk // 2 + 3] = logs  # in scan order, the second half of the chunk, or in reverse its first
    r = r.replace(decay=Decay(key=jnp.asarray(gates.reshape(r.decay.key.shape))))
    operands = chunk_operands(r, segments_of(r, chunk, chunk), chunk)
    last, first = np.moveaxis(np.asarray(operands.gates), 2, 0)
    order = slice(None, None, -1 if reverse else 1)
    want = np.maximum(logs, LOG_OF_ZERO)[order]
    allowed = np.where(np.abs(want) >= 2.0**-103, 0.0, 2.0**-126)
    for sums, whole in ((last, want), (first, want if reverse else np.zeros_like(want))):
        assert (np.abs(sums.astype(np.float64) - whole) <= allowed).all()
    np.testing.assert_array_equal(operands.max_abs_cumsum, np.abs(want).max(-1))

"""The Triton kernel of a step of softmax attention in Triton's interpreter, beside XLA's and a sum in NumPy."""

import dataclasses
import functools
import importlib.util
import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

from glax._src.core.backend import Backend  # noqa: E402
from glax._src.kernels.common.softmax import Intervals, StepOperands  # noqa: E402
from glax._src.kernels.triton import config as triton_config  # noqa: E402
from glax._src.kernels.triton import softmax_config, softmax_step  # noqa: E402
from glax._src.kernels.triton.softmax_config import SoftmaxStepConfig  # noqa: E402
from glax._src.solve import softmax as solve  # noqa: E402
from tests.softmax_steps import CASES, PARTS, Step  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_sums_in_float64(name):
    case, bound = CASES[name], CASES[name].bound
    operands = case.operands()
    o = softmax_step.forward(operands, 0.3, case.V, case.config)
    assert o.shape == (*operands.q.shape[:3], case.V) and o.dtype == operands.q.dtype
    wanted = case.wanted(0.3)
    np.testing.assert_allclose(np.asarray(o, np.float64)[:, 0], wanted, rtol=bound, atol=bound)
    np.testing.assert_allclose(by_xla(case), wanted, rtol=2 * bound, atol=2 * bound)


def by_xla(case: Step) -> np.ndarray:
    return np.asarray(solve.step_by_xla(case.operands(), scale=0.3, width=case.V), np.float64)[:, 0]


@pytest.mark.parametrize("within", [False, True], ids=["values", "within"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_rows_that_read_it_alone(value, within):
    dtype = "bfloat16" if within else "float32"
    case = Step(heads=(4, 2), window=20, D=24, within=within, dtype=dtype, config=PARTS)
    operands = case.operands()
    clean = np.asarray(softmax_step.forward(operands, 0.3, case.V, case.config), np.float32)
    for which in ("k",) if within else ("k", "v"):
        # Of slot 3: a key of the interval 18 to 37, one in front of it and one behind; and of a slot that none reads.
        for slot, key, is_read in ((3, 30, True), (3, 17, False), (3, 38, False), (1, 0, False)):
            poisoned = operands._replace(**{which: getattr(operands, which).at[slot, key, 1, 3].set(value)})
            found = np.asarray(softmax_step.forward(poisoned, 0.3, case.V, case.config), np.float32)
            others = np.ones(found.shape[:3], bool)
            if is_read:  # by the first sequence, and its last two heads
                others[0, 0, 2:] = False
                assert not np.isfinite(found[0, 0, 2:]).all(-1).any()
            np.testing.assert_array_equal(found[others], clean[others])


# ---- calls of layers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """Choose kernels as on a GPU, and in small blocks."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(softmax_config, "step_config", lambda operands, value_width: PARTS)


def attended(case: Step, q, k, v):
    operands = case.operands()
    seen = Intervals(operands.first, operands.last)
    return solve.attend_step(q, k, v, seen, None, width=case.V, slots=operands.slots)


@pytest.mark.parametrize("name", ["groups", "in order", "within"])
def test_layers_run_the_kernel_on_a_gpu(on_gpu, caplog, monkeypatch, name):
    case = CASES[name]
    floats = case.operands()[:3]
    d_o = jnp.asarray(np.random.default_rng(1).standard_normal((len(floats[0]), 1, case.heads[0], case.V)), case.dtype)

    def values_and_gradients():
        with caplog.at_level(logging.DEBUG, "glax"):
            o, pull = jax.vjp(functools.partial(attended, case), *floats)
        return o, *jax.tree.leaves(pull(d_o))

    found = values_and_gradients()
    assert [x.message.split(":")[0] for x in caplog.records] == ["softmax.step/triton/gpu"]
    monkeypatch.undo()
    wanted = values_and_gradients()
    assert "not softmax.step/triton/gpu: needs a gpu, JAX computes on cpu here" in caplog.records[-1].message
    bound = 2e-5 if case.dtype == "float32" else 3e-2
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), rtol=bound, atol=bound)


def test_vmap_and_a_program_for_another_backend(on_gpu, monkeypatch):
    case = Step(config=PARTS)
    q, k, v = cast(tuple[jax.Array, ...], case.operands()[:3])
    mapped = jax.vmap(functools.partial(attended, case), (0, None, 0))(jnp.stack([q, 2 * q]), k, jnp.stack([v, 3 * v]))
    traced = jax.jit(functools.partial(attended, case)).trace(q, k, v)
    monkeypatch.undo()
    lowered = traced.lower().compile()(q, k, v)
    for got, want in ((lowered, (q, k, v)), (mapped[0], (q, k, v)), (mapped[1], (2 * q, k, 3 * v))):
        np.testing.assert_allclose(got, attended(case, *want), rtol=2e-5, atol=2e-5)


def test_a_place_behind_the_cache_is_not_read(on_gpu):
    """The layer makes NaN of such a row. The kernel must not read the next row of the pool."""
    case = Step(last=(500, 99, 99, 99))
    o = attended(case, *case.operands()[:3])
    np.testing.assert_array_equal(o[0], attended(dataclasses.replace(case, last=(99,) * 4), *case.operands()[:3])[0])


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(D=264, dtype="bfloat16"), "takes heads of bfloat16 up to 256 wide, got query 264 and value 16 wide"),
        (dict(V=192), "takes heads of float32 up to 128 wide, got query 16 and value 192 wide"),
        (dict(last=()), "takes arrays with elements, got query [0, 1, 2, 16], key [6, 100, 1, 16] and values 16 wide"),
        (dict(stored="int8"), "takes query, key and value in bfloat16 or float16 or float32, got float32, int8, int8"),
        (
            dict(within=True, D=20),
            "takes keys whose first 512 channels or fewer are values, with 128 others or fewer, and query of two bytes, got "
            "16, 4 and float32",
        ),
    ],
)  # fmt: skip
def test_refusals_state_the_reason(change, why):
    case = Step(**change)
    assert softmax_config.step_refusal(case.operands(), 1.0, case.V) == why


def test_a_scale_below_0_is_refused():
    assert softmax_config.step_refusal(Step().operands(), -1.0, 16) == "takes a scale above 0, got -1.0"


def test_blocks_of_a_step(monkeypatch):
    """Of a batch that fills a GPU, of one sequence, and of latent attention with 128 heads, on an H100 and on an L4."""
    capability = (9, 0)
    monkeypatch.setattr(softmax_config, "multiprocessors", lambda: 132)
    monkeypatch.setattr(triton_config, "capability", lambda: capability)

    def config(B: int, heads: tuple[int, int], D: int, V: int, within: bool = False) -> SoftmaxStepConfig:
        shapes = (B, 1, heads[0], D), (B, 4096, heads[1], D), (B, 4096, heads[1], V)
        arrays: Any = [jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes]
        place: Any = jax.ShapeDtypeStruct((B, 1), "int32")
        q, k, v = arrays
        return softmax_config.step_config(StepOperands(q, k, None if within else v, place, place, None), V)

    assert config(256, (16, 4), 256, 256) == SoftmaxStepConfig(keys=32, rows=16, parts=1, warps=4, stages=4)
    assert config(64, (16, 4), 256, 256).parts == 1  # two would not run at the same time
    assert config(1, (16, 4), 256, 256).parts == 32  # of 128 keys
    assert config(33, (8, 8), 64, 64).parts == 1 < config(16, (8, 8), 64, 64).parts
    assert config(8, (128, 1), 576, 512, within=True) == SoftmaxStepConfig(keys=32, rows=64, parts=8, warps=8, stages=3)
    capability = (8, 9)
    assert config(64, (16, 4), 256, 256) == SoftmaxStepConfig(keys=32, rows=16, parts=1, warps=4, stages=3)
    assert config(33, (8, 8), 64, 64).parts == 1 == config(16, (8, 8), 64, 64).parts
    assert config(8, (128, 1), 576, 512, within=True).rows == 16

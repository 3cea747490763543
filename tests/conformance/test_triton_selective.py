"""The Triton kernels of the selective scan in Triton's interpreter, against a loop over tokens in float64."""

import dataclasses
import functools
import importlib.util

import jax
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

import glax  # noqa: E402
from glax._src.core.backend import Backend  # noqa: E402
from glax._src.kernels.common.selective import Packing, SelectiveOperands  # noqa: E402
from glax._src.kernels.triton import selective_scan_config  # noqa: E402
from glax._src.kernels.triton.selective_scan_config import SelectiveConfig, refusal  # noqa: E402
from glax._src.solve import selective_scan as solver  # noqa: E402
from tests.close import assert_close  # noqa: E402
from tests.conformance import test_selective_scan as scans  # noqa: E402
from tests.conformance.test_selective_scan import CASES, FEW, called, checked, given  # noqa: E402
from tests.named_cases import NamedCase  # noqa: E402
from tests.suite import at_each  # noqa: E402

WIDTHS = {
    case.name: (case, FEW[:1])
    for case in (
        NamedCase("N8", "selective_scan", T=21, K=20, V=8, cuts=(0, 3, 3, 20, 21)),
        NamedCase("N128", "selective_scan", T=11, K=3, V=128),
        NamedCase("N16-bfloat16", "selective_scan", B=2, T=77, K=33, V=16, dtype="bfloat16"),
    )
}
LEFT_OUT = (
    "float64",
    "wide",
    "long",
    "long-segments",
    "many-channels",
)  # float64 is refused; the others take minutes here


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """Choose kernels as on a GPU."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT] + list(WIDTHS))
def test_it_equals_the_loop_over_tokens(name):
    case, draws = (CASES | WIDTHS)[name]
    at_each(draws if name == "steps" else FEW[: len(draws)], functools.partial(checked, case, "triton"))


@pytest.mark.parametrize("forward", [SelectiveConfig(2, 1, 8), SelectiveConfig(8, 2, 16)])
@pytest.mark.parametrize("gradient", [SelectiveConfig(4, 2, 4), SelectiveConfig(2, 4, 8), SelectiveConfig(8, 1, 16)])
def test_all_configs_compute_the_same(monkeypatch, forward, gradient):
    (first, *others), (first_gradient, *other_gradients) = solver.SCAN, solver.GRADIENT
    first = dataclasses.replace(first, heuristic=lambda operands: forward)
    first_gradient = dataclasses.replace(first_gradient, heuristic=lambda operands: gradient)
    monkeypatch.setattr(solver, "SCAN", (first, *others))
    monkeypatch.setattr(solver, "GRADIENT", (first_gradient, *other_gradients))
    name = str((forward, gradient))
    checked(NamedCase(name, "selective_scan", T=19, K=20, V=16, cuts=(0, 18, 19)), "triton", FEW[1])


def test_vmap_second_derivatives_and_resumed_prompts():
    scans.test_vmap_and_second_derivatives("triton")
    case = NamedCase("", "selective_scan", T=30, K=3, V=3)
    arrays = given(case, FEW[0])
    state, A, D = (arrays.pop(name) for name in ("state", "A", "D"))
    run = functools.partial(glax.selective_scan, A=A, D=D, platform="triton")
    whole = run(**arrays, initial_state=state)
    first = run(**{name: x[:, :17] for name, x in arrays.items()}, initial_state=state)
    second = run(**{name: x[:, 17:] for name, x in arrays.items()}, initial_state=first.final_state)
    assert_close("y", np.concatenate([first.output, second.output], 1), whole.output, 2e-6)
    assert_close("final state", second.final_state, whole.final_state, 2e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packing", ["cuts", "segments"])
def test_a_poisoned_document_harms_no_other(monkeypatch, packing, reverse):
    monkeypatch.setattr(scans, "CUTS", (0, 4, 5, 10))
    monkeypatch.setattr(scans, "ROWS", np.r_[0:4, 5:10])
    monkeypatch.setattr(scans, "POISONS", (np.nan,))
    monkeypatch.setattr(scans, "POISONED", 4)
    scans.test_a_poisoned_document_harms_no_other(packing, reverse, "triton")


def test_it_is_chosen_on_a_gpu_and_its_program_for_another_backend_runs_xla(monkeypatch):
    case = NamedCase("", "selective_scan", T=9, K=3, V=4)
    arrays = given(case, FEW[0])

    def loss(arrays):
        return sum((x**2).sum() for x in called(case, arrays, platform=None))

    jax.clear_caches()
    names = [decision.kernel for decision in glax.explain(jax.grad(loss), arrays)]
    assert names == ["selective_scan/triton/gpu", "selective_scan.vjp/triton/gpu"]
    traced = jax.jit(jax.grad(loss)).trace(arrays)
    monkeypatch.undo()
    jax.clear_caches()
    found, wanted = traced.lower().compile()(arrays), jax.grad(loss)(arrays)
    for name, x in wanted.items():
        assert_close(f"d {name}", found[name], x, 1e-5)


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(A=(6, 129)), "takes states of up to 128 numbers, got N=129"),
        (dict(A=(2**25, 64)), "takes fewer than 2^31 numbers of a sequence's states, and rows, got"),
    ],
)
def test_refusals_state_the_reason(changes, why):
    shapes = dict(x=(1, 8, 6), dt=(1, 8, 6), A=(6, 4), B=(1, 8, 4), C=(1, 8, 4), states=(1, 6, 4)) | changes
    operands = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    found = refusal(SelectiveOperands(**operands, packing=Packing(None, None)))
    assert found is not None and found.startswith(why)


@pytest.mark.parametrize("D, lanes", [(5120, (2, 4)), (1536, (8, 8)), (32, (8, 8))])
def test_few_channels_have_more_lanes(monkeypatch, D, lanes):
    monkeypatch.setattr(selective_scan_config, "multiprocessors", lambda: 132)
    rows, numbers = jax.ShapeDtypeStruct((1, 64, D), "bfloat16"), jax.ShapeDtypeStruct((1, 64, 16), "bfloat16")
    state = jax.ShapeDtypeStruct((1, D, 16), "float32")
    p = SelectiveOperands(
        rows, rows, jax.ShapeDtypeStruct((D, 16), "float32"), numbers, numbers, state, Packing(None, None)
    )
    found = selective_scan_config.forward_config(p), selective_scan_config.gradient_config(p)
    assert tuple(config.lanes for config in found) == lanes


@pytest.mark.parametrize("value", [0, 3, 64, 2.0, True])
def test_a_config_names_the_field_that_is_wrong(value):
    with pytest.raises(ValueError, match="lanes must be a power of two from 1 to 32, got"):
        SelectiveConfig(lanes=value)

"""The Triton kernels of the selective scan in Triton's interpreter, against a loop over tokens in float64."""

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

import glax  # noqa: E402
from glax._src.core.backend import Backend  # noqa: E402
from glax._src.kernels.common.selective import Packing, SelectiveOperands  # noqa: E402
from glax._src.kernels.triton import selective_scan, selective_scan_config  # noqa: E402
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


CUT = {
    case.name: case
    for case in (
        NamedCase("whole", "selective_scan", B=2, T=130, K=3, V=4),
        NamedCase("packed-reverse", "selective_scan", T=150, K=3, V=4, cuts=(0, 3, 3, 131, 132, 148), reverse=True),
        NamedCase("wide", "selective_scan", T=150, K=23, V=12, cuts=(0, 5, 5, 140, 147)),
        NamedCase("segments", "selective_scan", T=150, K=3, V=4, ids=((0,) * 70 + (1,) * 58 + (2,) * 22,)),
        NamedCase("segments-reverse", "selective_scan", T=130, K=3, V=4, ids=((0,) * 3 + (1,) * 127,), reverse=True),
    )
}


@pytest.mark.parametrize("forward, gradient", [(64, 64), (64, None), (None, 128)])
@pytest.mark.parametrize("name", CUT)
def test_cut_sequences_equal_the_loop_over_tokens(monkeypatch, name, forward, gradient):
    configs = SelectiveConfig(2, 1, 8, forward), SelectiveConfig(4, 2, 4, gradient)
    for table, config in zip(("SCAN", "GRADIENT"), configs, strict=True):
        first, *others = getattr(solver, table)
        first = dataclasses.replace(first, heuristic=lambda operands, config=config: config)
        monkeypatch.setattr(solver, table, (first, *others))
    jax.clear_caches()  # the heuristics are no part of a trace's key
    checked(CUT[name], "triton", FEW[0])


@pytest.mark.parametrize("segment, kernels", [(None, ["outputs"]), (64, ["ends", "enter", "outputs"])])
def test_whole_sequences_take_one_kernel_and_cut_ones_three(monkeypatch, segment, kernels):
    names, whole = [], selective_scan.launch

    def launch(kernel, *rest, **options):
        names.append(kernel.__name__)
        return whole(kernel, *rest, **options)

    monkeypatch.setattr(selective_scan, "launch", launch)
    x, B = jnp.ones((1, 100, 3)), jnp.ones((1, 100, 4))
    packing = Packing(jnp.array([0, 40, 100]), None)
    p = SelectiveOperands(x, x, -jnp.ones((3, 4)), B, B, jnp.zeros((2, 3, 4)), packing)
    selective_scan.forward(p, None, SelectiveConfig(2, 1, 8, segment), reverse=False, saves_residuals=False)
    assert names == kernels


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


@pytest.mark.parametrize("D, lanes", [(5120, (4, 4)), (1536, (8, 8)), (32, (8, 8))])
def test_few_channels_have_more_lanes(monkeypatch, D, lanes):
    monkeypatch.setattr(selective_scan_config, "multiprocessors", lambda: 132)
    assert tuple(config.lanes for config in chosen(1, 64, D)) == lanes


def chosen(G: int, T: int, D: int) -> tuple[SelectiveConfig, SelectiveConfig]:
    """Return the configs of a forward and a gradient of G rows of T tokens and D channels."""
    rows, numbers = (jax.ShapeDtypeStruct((G, T, width), "bfloat16") for width in (D, 16))
    A, states = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((D, 16), (G, D, 16)))
    p = SelectiveOperands(rows, rows, A, numbers, numbers, states, Packing(None, None))
    return selective_scan_config.forward_config(p), selective_scan_config.gradient_config(p)


@pytest.mark.parametrize(
    "sizes, cut, lanes",
    [
        ((1, 2048, 5120), 256, (2, 4)),
        ((1, 32_768, 5120), 1280, (2, 4)),
        ((8, 2048, 1536), 256, (2, 4)),
        ((1, 512, 5120), 256, (2, 4)),
        ((1, 511, 5120), None, (4, 4)),
        ((3, 2048, 5120), 256, (2, 4)),
        ((4, 2048, 5120), None, (4, 4)),
        ((8, 2048, 5120), None, (2, 4)),
    ],
)
def test_few_programs_take_parts_of_sequences(monkeypatch, sizes, cut, lanes):
    monkeypatch.setattr(selective_scan_config, "multiprocessors", lambda: 132)
    monkeypatch.setattr(selective_scan_config, "capability", lambda: (9, 0))
    found = chosen(*sizes)
    assert tuple(config.lanes for config in found) == lanes
    assert [config.segment for config in found] == [cut, cut]


@pytest.mark.parametrize("segment", [0, 63, 96, True, 64.0])
def test_a_segment_is_whole_chunks(segment):
    with pytest.raises(ValueError, match="segment must be a multiple of 64 or None, got"):
        SelectiveConfig(segment=segment)


@pytest.mark.parametrize("value", [0, 3, 64, 2.0, True])
def test_a_config_names_the_field_that_is_wrong(value):
    with pytest.raises(ValueError, match="lanes must be a power of two from 1 to 32, got"):
        SelectiveConfig(lanes=value)

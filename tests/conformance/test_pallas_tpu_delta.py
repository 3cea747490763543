"""The TPU kernels of the delta rule in Pallas' TPU interpreter, against the float64 reference; and lowered for a TPU.

`make tpu-interpret` runs every case at every draw. `make rest` runs SAMPLE at few draws.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.testing.cases import Case, inputs
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import ERASING_BARS, named, norm
from tests.close import assert_close
from tests.conformance.test_pallas_tpu import BACKWARD, FORWARD, interpreted, lowered
from tests.delta_cases import DRAWS, FEW, PACKED, DeltaCase, Draw, all_cases, growing_cases
from tests.poison import dispatched, leaks, operands_of, packed, segmented
from tests.suite import at_each_draw, check_forward, check_gradient, wanted, wanted_gradient

load_kernels()
REFUSED = ("value-packed", "key+value-packed", "float16-packed")
BF16 = dict(dtype="bfloat16", gate_dtype="bfloat16")
WIDE = dict(T=140, heads=(1, 1, 1))
OWN = (
    DeltaCase("pairs-none-packed", (), heads=(4, 4, 4), K=64, V=64, **PACKED),
    DeltaCase("pairs-head-reverse", ("g",), heads=(2, 2, 2), K=64, V=60, reverse=True),
    DeltaCase("pairs-key-packed", ("gk",), heads=(4, 4, 4), K=64, V=64, **PACKED),
    DeltaCase("pairs-erase-write-key", ("gk",), ("erase", "write"), heads=(2, 2, 2), K=60, V=64),
    DeltaCase("erase-none-reverse", (), ("erase",), reverse=True, state=False),
    DeltaCase("heads2-2-4-key-packed", ("gk",), heads=(2, 2, 4), **PACKED),
    DeltaCase("T600", ("g",), T=600, B=2),
    DeltaCase("K192V256-head", ("g",), K=192, V=256, **WIDE),
    DeltaCase("K256V192-key", ("gk",), K=256, V=192, **WIDE),
    DeltaCase("bfloat16-none", (), **BF16, draws=DRAWS),
    DeltaCase("bfloat16-key", ("gk",), **BF16, draws=DRAWS),
    DeltaCase("bfloat16-head-128", ("g",), K=128, V=128, T=300, **BF16, draws=DRAWS),
    DeltaCase("bfloat16-key-128", ("gk",), heads=(1, 1, 2), K=128, V=128, T=300, **BF16),
    DeltaCase("bfloat16-pairs-erase-write-key-packed", ("gk",), ("erase", "write"), K=64, V=64, **BF16, **PACKED),
)  # fmt: skip
TAKEN = [case for case in all_cases() if case.name not in REFUSED and not (case.before_decay or case.along)]
CASES = {case.name: case for case in (*TAKEN, *OWN)}
SAMPLE = (
    "none", "erase-write-key-packed-reverse", "head-packed-reverse", "heads1-2-4", "pairs-key-packed", "K256V192-key",
    "bfloat16-none", "bfloat16-key-128", "T1", "all-padding",
)  # fmt: skip
# Of the gradient, which compiles slowly for the interpreter.
GRADIENT_SAMPLE = (
    "none", "erase-write-key-packed-reverse", "heads1-2-4", "pairs-head-reverse", "bfloat16-head-128",
)  # fmt: skip
CHUNKS = (32, 64, 128, 256)


def sampled(sample: tuple[str, ...]):
    """Every case at all of its draws, and those of a sample at few."""
    few = [pytest.param(dataclasses.replace(CASES[name], draws=FEW), id=f"{name}-few") for name in sample]
    every = [pytest.param(case, id=name, marks=pytest.mark.thorough) for name, case in CASES.items()]
    return pytest.mark.parametrize("case", [*few, *every])


def run_of(spec, **config):
    return interpreted(functools.partial(spec.run, config=spec.config(**config)))


@sampled(SAMPLE)
def test_forward(case):
    assert FORWARD.supports(case.recurrence(case.draws[0])) is None
    check_forward(case, run_of(FORWARD))


@sampled(GRADIENT_SAMPLE)
def test_gradient(case):
    check_gradient(case, run_of(BACKWARD))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["none", "head-packed-reverse", "erase-write-key-packed-reverse"])
def test_chunks(name, chunk):
    case = dataclasses.replace(CASES[name], draws=FEW)
    check_forward(case, run_of(FORWARD, chunk=chunk))
    check_gradient(case, run_of(BACKWARD, chunk=chunk))


@pytest.mark.thorough
@pytest.mark.parametrize("case", list(growing_cases()), ids=str)
def test_a_growing_state_is_as_exact_as_float32_allows(case):
    """No worse than 3 times the same reference in float32, whose rounding errors grow with the state."""
    run = run_of(FORWARD)

    def check(draw):
        r, want = wanted(case, draw)
        plain, got = reference(r, np.float32), run(r)
        for name, x, y, z in zip(("output", "final_state"), got, plain, want, strict=True):
            bar = max(3 * norm(np.asarray(y, np.float64) - z) / norm(z), ERASING_BARS["float32"][0])
            assert_close(name, x, z, bar)

    at_each_draw(case, check)


@pytest.mark.thorough
@pytest.mark.parametrize("case", list(growing_cases()), ids=str)
def test_a_gradient_through_a_growing_state_is_as_exact_as_float32_allows(case):
    """No worse than 3 times the same reference in float32, as above."""
    run = run_of(BACKWARD)

    def check(draw):
        r, d, want = wanted_gradient(case, draw)
        plain, got, want = (named(x) for x in (reference_gradient(r, *d, np.float32), run(r, *d), want))
        for name, exact in want.items():
            bar = max(3 * norm(np.asarray(plain[name], np.float64) - exact) / norm(exact), ERASING_BARS["float32"][1])
            assert_close(name, got[name], exact, bar)

    at_each_draw(case, check)


IDS = tuple(tuple(row) for row in np.repeat([[3, 1, 7, 0], [2, 5, 6, 8]], [40, 31, 60, 9], axis=1).tolist())


@pytest.mark.parametrize("gates", [(), ("gk",)], ids=["none", "key"])
def test_segments(gates):
    """Segments are folded into gates of -inf, which reset the state inside of a chunk."""
    case = Case("segments", B=2, T=140, gates=gates, ids=IDS, erasure=("beta",))
    check_forward(case, interpreted(dispatched(FORWARD, functools.partial(FORWARD.run, config=FORWARD.config()))))
    if gates:
        check_gradient(
            case, interpreted(dispatched(BACKWARD, functools.partial(BACKWARD.run, config=BACKWARD.config())))
        )


@pytest.mark.parametrize("pack", [segmented, packed])
@pytest.mark.parametrize(
    "spec,form",
    [(FORWARD, "none beta"), (FORWARD, "key erase+write"), (BACKWARD, "head beta")],
    ids=lambda x: str(x)[:20],
)
def test_a_poisoned_document_harms_no_other(spec, form, pack):
    layout = pack()
    operands = operands_of(layout.case(form, heads=(1, 1, 1)))
    program = interpreted(dispatched(spec, functools.partial(spec.run, config=spec.config())))
    found = leaks(layout, operands, *((None, program) if spec.is_gradient else (program, None)), few=True)
    assert not found, "\n".join(found)


RACES = [
    Case("head", T=64, heads=(2, 2, 2), K=128, V=128, gates=("g",), erasure=("beta",)),
    Case("key", T=60, heads=(2, 2, 2), K=128, V=128, cuts=(0, 20, 50), reverse=True, erasure=("erase", "write")),
]


@pytest.mark.parametrize("case", [pytest.param(RACES[0], marks=pytest.mark.fast), RACES[1]], ids=str)
def test_no_races(case):
    """Every reader of a block waits for its writer, in any order of the parallel axes of the grid."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    options = dict(detect_races=True, num_cores_or_threads=2, random_seed=1)
    check_forward(case, interpreted(functools.partial(FORWARD.run, config=FORWARD.config(32, 1)), **options))
    assert not interpreter.races.races_found
    check_gradient(case, interpreted(functools.partial(BACKWARD.run, config=BACKWARD.config(32, 1)), **options))
    assert not interpreter.races.races_found


@sampled(GRADIENT_SAMPLE)
def test_lowers(case):
    """Mosaic lowers every case that the interpreter runs."""
    r = jax.eval_shape(lambda: case.recurrence(Draw()))
    text = lowered(functools.partial(FORWARD.run, config=FORWARD.config.heuristic(r)), r)
    assert text.count("tpu_custom_call") == 1
    d = jax.eval_shape(lambda: case.cotangents(case.recurrence(Draw())))
    text = lowered(functools.partial(BACKWARD.run, config=BACKWARD.config.heuristic(r)), r, *d)
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize("spec", [("x",), (None, None, "x")], ids=["batch", "heads"])
def test_shard_map(on_tpu, spec):
    """The kernels' results vary over the mesh as their inputs do, sharded over the batch or over the heads."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    case = Case("", B=4, T=131, heads=(8, 8, 8), K=64, V=64, gates=("g",), dtype="bfloat16", erasure=("beta",))
    arguments = inputs(case, "log-sigmoid")
    specs = {name: PartitionSpec(*spec) for name in arguments}
    specs["initial_state"] = PartitionSpec(*spec) if spec[0] else PartitionSpec(None, "x")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec())
    def loss(arguments):
        output, state = glax.recurrent(**arguments)
        return jax.lax.psum((output.astype(jnp.float32) ** 2).sum() + state.sum(), "x")

    assert lowered(jax.value_and_grad(loss), arguments).count("tpu_custom_call") == 3


@pytest.mark.fast
def test_choice(on_tpu):
    """A TPU takes the delta rule in chunks, and leaves to XLA what the kernels refuse, with the reason."""
    r = CASES["head"].recurrence(Draw())
    assert kernel_registry.find(r).name == "chunked/pallas/tpu"
    stored = r.replace(states_every=128)
    assert "does not store the states behind every n tokens" in FORWARD.refusal(stored)
    for case, reason in (
        ("float16-packed", "query is float16"),
        ("key+value-packed", r"got key\+value \(given by gk and gv\)"),
        ("before-decay-head", "got erase_before_decay"),
        ("along-head-packed", "got erase_along"),
    ):
        refused = next(c for c in all_cases() if c.name == case).recurrence(Draw())
        assert kernel_registry.find(refused).platform == "xla"
        with pytest.raises(glax.UnsupportedError, match=reason):
            kernel_registry.find(refused, glax.Platform.PALLAS)

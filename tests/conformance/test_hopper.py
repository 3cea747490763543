"""The Hopper kernels, forward and gradient, through the interpreter of Pallas Mosaic GPU and against the float64 reference.

tests/hopper.py has the calls. `make hopper-few` runs those in FEW, and CI does; `make hopper` runs all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip(
        "the interpreter of Hopper kernels needs JAX 0.12: make hopper PYTHON=python3.13 VENV=.venv-3.13",
        allow_module_level=True,
    )

import glax
from glax._src.core.bind import bind
from glax._src.core.recurrence import StoredStates
from glax._src.core.registry import Platform
from glax._src.kernels import pallas_gpu
from glax._src.kernels.pallas_gpu.chunks import pairs
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.rows import Form
from glax._src.solve.autodiff import solve
from glax._src.solve.dispatch import Choice
from glax._src.solve.pieces import solve_with_states
from glax.testing.reference import reference, reference_gradient
from tests import case, mosaic_interpreter, strengths
from tests.close import assert_gradients_close, assert_outputs_close
from tests.delta_cases import Draw
from tests.hopper import (
    BAR,
    CALLS,
    FEW,
    IN_BFLOAT16,
    MISSED,
    Interpreter,
    assert_right,
    delta,
    distance,
    kernels,
    run,
    run_in_phases,
)  # fmt: skip


@pytest.fixture
def interpreter(monkeypatch):
    return Interpreter(monkeypatch)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    missed = [pytest.mark.xfail(reason=MISSED[name], strict=True)] if name in MISSED else []
    return [pytest.mark.few] * (name in FEW) + missed


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CALLS])
def test_against_the_reference(name, interpreter):
    call = CALLS[name]
    problem = call.problem()
    if call.kind[1] == "joined":
        assert Route.of(problem[0], call.config).rows.form in (Form.JOINED, Form.EQUAL)
    results = (run_in_phases if call.begun else run)(call, interpreter, problem)
    assert_right(call, problem, *results)


def test_the_few_launch_what_all_launch(monkeypatch):
    """Every kernel, with each gate and packing that it has in CALLS. The kernels are not executed here."""
    interpreter = Interpreter(monkeypatch, executes=False)

    def launched(names) -> set:
        found = set()
        for name in names:
            jax.clear_caches()  # jit would not launch again what it has traced before
            interpreter.launched.clear()
            call = CALLS[name]
            jax.eval_shape(functools.partial(run, call, interpreter), call.problem())
            found |= {(kernel, *call.kind) for kernel in interpreter.launched}
        return found

    assert launched(FEW) == launched(CALLS)


@pytest.mark.parametrize(
    "gate, T, heads, reverse, parts, save",
    [
        ("g", 330, (2, 2, 2), False, 3, True),
        ("g", 256, (1, 1, 2), True, 1, False),
        ("gk", 200, (1, 1, 1), False, 2, False),
        ("gk", 192, (1, 1, 1), True, 1, True),
    ],
)
def test_states_behind_every_64_tokens(gate, T, heads, reverse, parts, save, interpreter):
    """With their gradients, which also pass from segment to segment; against the states of pieces, by XLA."""
    rng, every, H = np.random.default_rng(0), 64, max(heads)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v, d_output = (normal(1, T, h, 64, dtype=jnp.bfloat16) for h in (*heads, H))
    g = (jax.nn.log_sigmoid(normal(1, T, H, *(64,) * (gate == "gk"))) / 8).astype(jnp.bfloat16)
    state, d_final, d_states = normal(1, H, 64, 64), normal(1, H, 64, 64), normal(1, T // every, H, 64, 64)
    plain = bind(q, k, v, **{gate: g}, initial_state=state, reverse=reverse)
    r, cotangents = plain.replace(states_every=every), (d_output, StoredStates(d_final, d_states))
    found, d = forward_and_gradient(interpreter, r, *cotangents, parts=parts, save=save)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), plain)
    in_pieces = functools.partial(solve, Choice(Platform.XLA))
    wanted, pull = jax.vjp(lambda rows: tuple(solve_with_states(in_pieces, rows, every, None)), exact)
    expected = pull((d_output.astype(jnp.float32), d_final, d_states))[0]
    pairs = zip(jax.tree.leaves((found, d)), jax.tree.leaves((wanted, expected)), strict=True)
    assert max(distance(a, b) for a, b in pairs) < BAR


def forward_and_gradient(interpreter, r, *cotangents, parts: int = 1, save: bool = True):
    (forward, backward), config = kernels(), glax.configs.HopperConfig(parts=parts)
    interpreter.programs(3)
    found, residuals = interpreter(forward.forward_with_residuals, r, config=config) if save else (None, None)
    found = interpreter(forward.run, r, config=config) if found is None else found
    return found, interpreter(backward.run, r, *cotangents, residuals, config=config)


@pytest.mark.parametrize("form", ["key", "head"])
def test_steady_strengths(form, interpreter):
    """A state passes from a chunk's middle to the next one's also where the decay between them is 0 in float32."""
    r, *cotangents = strengths.problem(form, half=32, T=104, K=64)
    strengths.assert_right(r, *cotangents, *forward_and_gradient(interpreter, r, *cotangents))


def test_a_final_state_has_its_last_token_unrounded(interpreter):
    """1.65e-3 off with it rounded, where gates are so strong that it is most of the state."""
    rng = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(rng.normal(size=(1, 64, 1, 64)), jnp.bfloat16) for _ in range(4))
    r = bind(q, k, v, gk=jax.nn.log_sigmoid(g))
    interpreter.programs(3)
    found = interpreter(kernels()[0].run, r, config=glax.configs.HopperConfig())
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, r)
    assert distance(found.final_state, reference(exact).final_state) < 1.1e-3


@pytest.mark.parametrize("seed", (9, 50))
def test_d_beta_where_its_sum_cancels(seed, interpreter):
    """With a gradient of the final state a few tokens have most of d beta, and each sums 64 products that nearly cancel. With dS'
    in one term of bfloat16 it would be off by 4.4e-3 and 4.7e-3."""
    case = delta("gk", T=40, gate_dtype="bfloat16", reverse=True).case
    r = case.recurrence(Draw(), seed)
    d_output, d_final = case.cotangents(r)
    interpreter.programs(3)
    d = interpreter(kernels()[1].run, r, d_output, d_final, None, config=glax.configs.HopperConfig())
    assert_gradients_close(r, d, reference_gradient(r, d_output, d_final))


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.few), True])
@pytest.mark.parametrize(
    "level, inside, outside", [(0, -1.875, -1.8828125), (1, -3.75, -3.765625), (2, -7.5, -7.53125)]
)
def test_at_the_limit_of_the_last_level(level, inside, outside, reverse, interpreter, monkeypatch):
    """Gates of `inside` sum to -60 over the tokens on one side of a level's references, at which the level is the last. With the
    next number below it is not. In one channel the gates of every second side are the opposite, so that its state grows by e^60,
    to the size of the others."""
    inputs = delta("gk", T=64, **IN_BFLOAT16).case.inputs(Draw())
    inputs["key"] = inputs["key"].at[..., 5].multiply(1e-26)
    taken, measure = [], pairs.measure
    jax.clear_caches()  # else jit takes a kernel that was traced before
    monkeypatch.setattr(pairs, "measure", lambda p: seen(taken, measure(p)))
    interpreter.programs(3)
    token = np.arange(64)[::-1] if reverse else np.arange(64)
    second = (token & (pairs.HALF >> level) != 0)[:, None]
    for gate in (inside, outside):
        opposite = jnp.asarray(np.where(second, -gate, gate), jnp.bfloat16)
        inputs["gk"] = inputs["gk"].at[0, ..., 5].set(opposite).at[..., 9].set(gate)
        r = bind(**inputs, reverse=reverse)
        found = interpreter(kernels()[0].run, r, config=glax.configs.HopperConfig())
        assert_outputs_close(r, found, reference(r))
    assert taken == [level, level + 1 if level + 1 < pairs.FAST_LEVELS else pairs.LEVELS]


@pytest.mark.parametrize(
    "gate", [pytest.param(-1.875, marks=pytest.mark.few), -1.8828125, -3.75, -3.765625, -7.5, -7.53125]
)
def test_gradients_at_the_limits_of_levels(gate, interpreter):
    """Steady gates just inside and outside of what makes a level of the forward the last, beside channels with gates as drawn.
    The gradient forms the pairs again."""
    case = delta("gk", T=70, **IN_BFLOAT16).case
    inputs = case.inputs(Draw(beta="to 2"))
    inputs["gk"] = inputs["gk"].at[..., 9:20].set(gate)
    r = bind(**inputs)
    d_output, d_final = case.cotangents(r)
    interpreter.programs(3)
    d = interpreter(kernels()[1].run, r, d_output, None, None, config=glax.configs.HopperConfig())
    assert_gradients_close(r, d, reference_gradient(r, d_output, jnp.zeros_like(d_final)))


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_at_a_level_whose_first_tokens_decay_to_nothing(reverse, interpreter):
    """Steady gates of which the second level is the last, but for gates of -1000 in the first tokens of its blocks, which are in
    no |M|. e reads the state before the decay."""
    case = delta("gk", T=64, **IN_BFLOAT16).case
    inputs = case.inputs(Draw())
    token = np.arange(64)[::-1] if reverse else np.arange(64)
    gate = np.where(token % 32 == 0, -1000.0, -3.75)[:, None]
    inputs["gk"] = inputs["gk"].at[..., 9:20].set(jnp.asarray(gate, jnp.bfloat16)[None, :, None])
    erase = (inputs["key"] * inputs.pop("beta")[..., None]).astype(jnp.bfloat16)
    r = bind(**inputs, erase=erase, erase_before_decay=True, reverse=reverse)
    d_output, d_final = case.cotangents(r)
    interpreter.programs(3)
    d = interpreter(kernels()[1].run, r, d_output, None, None, config=glax.configs.HopperConfig())
    assert_gradients_close(r, d, reference_gradient(r, d_output, jnp.zeros_like(d_final)))


def seen(taken: list[int], level):
    jax.debug.callback(lambda x: taken.append(int(x)), level)
    return level


@pytest.mark.few
def test_a_case_is_reproduced_in_the_interpreter(capsys):
    name = "hopper: delta-key, growing"
    assert case.main([name, "--platform", "pallas", "--dump", "output,scores"]) == 0
    said = capsys.readouterr().out
    assert case.main([name, "--platform", "xla", "--dump", "output"]) == 0
    assert "the interpreter of Pallas Mosaic GPU" in said and "scores of chunk 0" in said


@pytest.mark.few
@pytest.mark.parametrize("name", ["delta, two stripes together, one row", "head, wide, split, shared heads"])
def test_a_case_runs_as_its_call_does(name):
    """With its programs in every kernel, in its phases, and with a gradient for each of `finals`."""
    call, problem = CALLS[name], case.Problem.of(CALLS[name], None)
    assert (problem.programs, problem.begun, problem.finals) == (call.programs, call.begun, call.finals)
    with case.machine("pallas", problem.programs):
        assert [module.multiprocessors() for module in (pallas_gpu.plain, pallas_gpu.delta)] == 2 * [call.programs]


@pytest.mark.few
@pytest.mark.parametrize("waits", [True, False])
def test_a_race_is_an_error(waits, monkeypatch):
    """One warpgroup writes what another reads, which waits for it or does not."""
    mosaic_interpreter.install(monkeypatch)

    def body(out, memory, written):
        group = jax.lax.axis_index("group")

        @pl.when(group == 0)
        def _():
            memory[...] = jnp.ones(128)
            plgpu.barrier_arrive(written)

        @pl.when(group == 1)
        def _():
            if waits:
                plgpu.barrier_wait(written)
            out[...] = memory[...]

    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    out_type = jax.ShapeDtypeStruct((128,), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out_type, scratch_types=scratch, num_threads=2, thread_name="group")
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        if waits:
            assert (kernel() == 1).all()
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match="race"):
                kernel()

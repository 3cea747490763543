"""Every registered kernel x every case x (output, final state, every gradient), against the float64 reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, Config, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax._src.solve.autodiff import derived_gradient, solve
from glax._src.solve.dispatch import Choice, by_folding
from glax._src.solve.pieces import solve_with_states
from glax.testing.reference import reference, reference_gradient, reference_states
from glax.testing.tolerances import BARS
from tests.cases import FORMS, Case, Sweep, all_cases, all_sweeps, cotangents, inputs, recurrence, runs
from tests.close import (
    assert_close,
    assert_gradients_close,
    assert_outputs_close,
    assert_reference_gradient_is_the_slope,
)
from tests.compiling import OPTIMIZED, UNOPTIMIZED, quick_jit
from tests.suite import check_forward, check_gradient, check_taken

load_kernels()
CASES = list(all_cases())
SWEEPS = {sweep.case.name: sweep for sweep in all_sweeps()}
# Those of other machines have tests of their own, in their interpreters.
KERNELS = [spec for spec in kernel_registry.kernels.values() if spec.backend in (Backend.ANY, Backend.here())]
# Steps, and the gradient that takes the delta rule alone, have tests of their own.
KERNELS = [spec for spec in KERNELS if not spec.is_pooled and spec.name != "recurrent.vjp/xla/any"]
FORWARD = [spec for spec in KERNELS if not spec.algorithm.endswith(".vjp")]
BACKWARD = [spec for spec in KERNELS if spec.algorithm.endswith(".vjp")]
FAST = ("none-packed", "key", "value", "key+value-packed-reverse", "constant-packed", "bfloat16-head", "heads4-2-1")


def on_each(specs: list[KernelSpec]):
    """Every case on every kernel; cases about the chunk only where a kernel has chunks.

    The sweep over a case's shapes follows it, and finds its programs compiled.
    """
    chosen = [(case, spec) for case in CASES for spec in specs if case.chunk is None or has_chunks(spec, case.chunk)]
    pairs = [(x, spec) for case, spec in chosen for x in (case, SWEEPS.get(case.name)) if x is not None]
    pairs += [(sweep, spec) for sweep in SWEEPS.values() if sweep.case not in CASES for spec in specs]
    marks = {True: [pytest.mark.fast], False: []}
    return pytest.mark.parametrize(
        ("case", "spec"), [pytest.param(c, s, id=f"{c}-{s.name}", marks=marks[str(c) in FAST]) for c, s in pairs]
    )


def has_chunks(spec: KernelSpec, size: int) -> bool:
    """Triton's are tiles, and tests/conformance/test_triton.py has what its configs say of others."""
    tile = size in (16, 32, 64, 128)
    return "chunk" in {field.name for field in dataclasses.fields(spec.config)} and (
        tile or spec.platform is not Platform.TRITON
    )


def is_optimized(case: Case) -> bool:
    """Whether a case's programs are compiled as users run them.

    They are for every form of decay: from first to last token, packed and reversed, in bfloat16, and of the length that XLA
    computes in parallel. The other cases vary the shapes and dtypes of the same kernels. On GPUs all are.
    """
    names = ("{}", "{}-packed-reverse", "bfloat16-{}", "T512-{}")
    return jax.default_backend() != "cpu" or case.name in {name.format(form) for name in names for form in FORMS}


@pytest.mark.fast
def test_the_fast_cases_have_every_form_and_packing():
    fast = [case for case in CASES if case.name in FAST]
    assert {case.gates for case in fast} == set(FORMS.values())
    assert {(case.cuts is None, case.reverse) for case in fast} >= {(True, False), (False, False), (False, True)}
    assert {case.dtype for case in fast} == {"float32", "bfloat16"} and any(len(set(case.heads)) > 1 for case in fast)


@functools.cache
def jitted(spec: KernelSpec, config: Config, optimized: bool):
    run = functools.partial(spec.run, config=config)
    folded = by_folding(run)

    def run_any(r: Recurrence, *cotangents):
        return (run if r.segments is None or spec.takes_segments(r) else folded)(r, *cotangents)

    return jax.jit(run_any, compiler_options=OPTIMIZED if optimized else UNOPTIMIZED)


def taken(case: Case, spec: KernelSpec) -> Recurrence:
    """A recurrence that the kernel takes here."""
    r = recurrence(case, case.strengths[0])
    check_taken(r, spec)
    return r


def compiled(case: Case | Sweep, spec: KernelSpec):
    case = case.case if isinstance(case, Sweep) else case
    r = taken(case, spec)
    config = spec.config.heuristic(r) if case.chunk is None else spec.config(chunk=case.chunk)
    return jitted(spec, config, is_optimized(case))


@on_each(FORWARD)
def test_forward(case, spec):
    check_forward(case, compiled(case, spec))


@on_each(BACKWARD)
def test_gradient(case, spec):
    check_gradient(case, compiled(case, spec))


DERIVED = [
    dataclasses.replace(c, strengths=("log-sigmoid", "mild"))
    for c in CASES
    if "packed-reverse" in c.name or c.name == "key+value" or c.name in ("key-segments", "key+value-segments-reverse")
]


@pytest.mark.parametrize("spec", FORWARD, ids=lambda spec: spec.name)
@pytest.mark.parametrize("case", DERIVED, ids=str)
def test_derived_gradient(case, spec):
    """The gradient that a platform without a fused one gets; gates for which its telescoped sums keep their digits."""
    taken(case, spec)
    choice = Choice(spec.platform, ChunkedConfig(16)) if spec.config is ChunkedConfig else Choice(spec.platform)
    check_gradient(case, quick_jit(functools.partial(derived_gradient, choice)))


def test_float64():
    with jax.enable_x64(True):
        for name in ("key+value", "key+value-packed-reverse", "head", "T512-key"):
            case = next(case for case in CASES if case.name == name)
            case = dataclasses.replace(case, dtype="float64", gate_dtype="float64", state_dtype="float64", chunk=16)
            for spec in FORWARD:
                if spec.refusal(recurrence(case, "mild")) is None:
                    config = spec.config(16) if spec.config is ChunkedConfig else spec.config()
                    check_forward(case, jitted(spec, config, optimized=False))
            case = dataclasses.replace(case, strengths=("log-sigmoid", "mild", "0", "-20", "-100 on 5%"))
            for spec in BACKWARD:
                if spec.refusal(recurrence(case, "mild")) is None:
                    check_gradient(case, jitted(spec, spec.config(16), optimized=False))


def test_float64_with_several_gates():
    """Of float32: their sum must not be."""
    with jax.enable_x64(True):
        for gates in itertools.combinations(("g", "g_gamma", "gk", "gv"), 2):
            case = Case("", dtype="float64", T=20, gates=gates)
            r, want = recurrence(case, "log-sigmoid"), wide_sum(case)
            for x, y in zip(jax.tree.leaves(r.decay), want, strict=True):
                assert_close("log decay", x, y, 1e-15)


def wide_sum(case: Case) -> list[np.ndarray]:
    """The log decays of a case of two gates, of the state's rows or both sides, summed in float64."""
    gates = {name: np.asarray(inputs(case, "log-sigmoid")[name], np.float64) for name in case.gates}
    if "gk" in gates and "gv" in gates:
        return [gates["gk"], gates["gv"]]
    rank = max(max(x.ndim for x in gates.values()), 3)
    each = (x[:, None] if name == "g_gamma" else x for name, x in gates.items())
    return [sum(x.reshape(*x.shape, *[1] * (rank - x.ndim)) for x in each)]


# ---- states behind every n tokens ------------------------------------------------------------------------------------

STATES = [
    dataclasses.replace(case, name=f"{case.name}-states", T=T, **changes)
    for case, T, changes in (
        *((Case("", B=2, heads=(4, 2, 1), K=8, V=6, gates=gates), 150, {}) for gates in FORMS.values()),
        (Case("reverse", heads=(4, 2, 1), K=8, V=6), 150, dict(reverse=True)),
        (Case("packed", K=8, V=6, gates=("g_gamma",)), 280, dict(cuts=(0, 0, 130, 131, 131, 200, 264, 264))),
        (Case("packed-reverse", K=8, V=6, gates=("gk", "gv")), 280, dict(cuts=(0, 130, 200, 264), reverse=True)),
        (
            Case("segments", B=2, K=8, V=6),
            150,
            dict(ids=(runs((0, 70), (3, 1), (5, 79)), runs((2, 64), (1, 80), (0, 6)))),
        ),
    )
]


@pytest.mark.parametrize("platform", [Platform.XLA, Platform.CPP], ids=str)
@pytest.mark.parametrize("case", STATES, ids=lambda case: f"{case.name}{'+'.join(case.gates)}")
def test_states_every_64_tokens(case, platform):
    """The states, their dtype, and the gradient through output, final state and states, against the same in float64."""
    r = recurrence(case, "log-sigmoid")
    d_output, d_final = cotangents(case, r)
    want, outputs = reference_states(r, 64), reference(r)
    solver = functools.partial(solve, Choice(platform))

    def run(x: Recurrence):
        whole = x.replace(boundaries=r.boundaries, segments=r.segments)
        output, final, states = solve_with_states(solver, whole, 64, None)
        return Outputs(output, final), states if r.boundaries is None else states.states[: len(want)]

    floats = r.replace(boundaries=None, segments=None)
    d_states = jnp.asarray(np.random.default_rng(4).normal(size=want.shape), jnp.float32)
    got, states = quick_jit(run)(floats)
    assert_outputs_close(r, got, outputs)
    assert_close("states", states, want, BARS["float32"][0])
    pull = quick_jit(lambda x, *d: jax.vjp(run, x)[1](d)[0])
    gradient = pull(floats, Outputs(d_output, d_final), d_states)
    assert_gradients_close(r, gradient, gradient_with_states(r, d_output, d_final, d_states))


def gradient_with_states(r: Recurrence, d_output, d_final, d_states) -> Recurrence:
    """The gradient of <output, d_output> + <final state, d_final> + the sum of <state, d_state>: one more sequence for each."""
    total = reference_gradient(r, d_output, d_final)
    cuts = np.stack([np.arange(len(r.q)) * 0, np.full(len(r.q), r.q.shape[1])], 1) if r.boundaries is None else None
    spans = cuts if cuts is not None else np.stack([r.boundaries[:-1], r.boundaries[1:]], 1)
    index = 0
    for n, (low, high) in enumerate(spans):
        for j in range(1, (high - low) // 64 + 1):
            d = d_states[n, j - 1] if r.boundaries is None else d_states[index]
            index += 1
            total = jax.tree.map(np.add, total, prefix_gradient(r, n, low, high, j * 64, d))
    return total


def prefix_gradient(r: Recurrence, n: int, low: int, high: int, length: int, d) -> Recurrence:
    """The gradient of <the state behind the first `length` tokens of sequence n, d>, in every array of r."""
    rows = slice(high - length, high) if r.reverse else slice(low, low + length)
    b = n if r.boundaries is None else 0
    alone = jax.tree.map(lambda x: np.asarray(x)[b : b + 1, rows], r.tokens_alone)
    whole = r.replace(
        decay=dataclasses.replace(r.decay, **constant_of(r, n)), initial_state=state_of(r, n), boundaries=None
    )
    part = alone.with_whole(whole.replace(scale=r.scale[n : n + 1]))
    got = reference_gradient(part, np.zeros((1, length, *r.state_shape[1::2])), np.asarray(d)[None])
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), r.replace(boundaries=None, segments=None))

    def placed(zero, x):
        zero[b : b + 1, rows] = x
        return zero

    tokens = jax.tree.map(placed, zeros.tokens_alone, got.replace(segments=None).tokens_alone)
    for whole, x in ((zeros.decay.constant, got.decay.constant), (zeros.initial_state, got.initial_state)):
        if whole is not None:
            whole[n] = x[0]
    zeros.scale[n] = got.scale[0]
    return tokens.with_whole(zeros)


def constant_of(r: Recurrence, n: int) -> dict:
    return {} if r.decay.constant is None else dict(constant=r.decay.constant[n : n + 1])


def state_of(r: Recurrence, n: int):
    return None if r.initial_state is None else r.initial_state[n : n + 1]


# ---- the suite itself can fail ---------------------------------------------------------------------------------------

sound, sound_gradient = (
    jitted(kernel_registry.kernels[f"{name}/xla/any"], ChunkedConfig(32), optimized=False)
    for name in ("chunked", "chunked.vjp")
)


def no_decay_at_chunk_start(r: Recurrence) -> Outputs:
    return sound(r.replace(decay=dataclasses.replace(r.decay, key=r.decay.key.at[:, 32:33].set(0))))


def swapped_gates(r: Recurrence) -> Outputs:
    key, value = r.decay.key, r.decay.value
    K, V = key.shape[3], value.shape[3]
    return sound(r.replace(decay=dataclasses.replace(r.decay, key=value[..., :K], value=jnp.tile(key, 2)[..., :V])))


def dropped_initial_state(r: Recurrence) -> Outputs:
    return sound(r.replace(initial_state=jnp.zeros_like(r.initial_state)))


def final_state_of_wrong_sequence(r: Recurrence) -> Outputs:
    outputs = sound(r)
    return outputs._replace(final_state=jnp.roll(outputs.final_state, 1, axis=0))


def reverse_off_by_one(r: Recurrence) -> Outputs:
    return sound(r.replace(decay=jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), r.decay)))


def padding_read(r: Recurrence) -> Outputs:
    return sound(r.replace(boundaries=r.boundaries.at[-1].add(1)))


def no_final_state_term(r: Recurrence, d_output, d_final) -> Recurrence:
    return sound_gradient(r, d_output, jnp.zeros_like(d_final))


def wrong_scale_gradient(r: Recurrence, d_output, d_final) -> Recurrence:
    d = sound_gradient(r, d_output, d_final)
    return d.replace(scale=d.scale * r.scale)


@pytest.mark.parametrize(
    ("check", "faulty", "name"),
    [
        (check_forward, no_decay_at_chunk_start, "key"),
        (check_forward, swapped_gates, "key+value"),
        (check_forward, dropped_initial_state, "key"),
        (check_forward, final_state_of_wrong_sequence, "key-packed"),
        (check_forward, reverse_off_by_one, "key+value-reverse"),
        (check_forward, padding_read, "key-packed"),
        (check_gradient, no_final_state_term, "key"),
        (check_gradient, wrong_scale_gradient, "key"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_fault_is_caught(check, faulty, name):
    (case,) = (dataclasses.replace(c, strengths=("log-sigmoid",)) for c in CASES if c.name == name)
    check(case, sound if check is check_forward else sound_gradient)
    with pytest.raises(AssertionError, match="1 of 1 draws"):
        check(case, faulty)


# ---- the reference itself --------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_reference_gradient_is_the_slope_of_the_reference():
    case = Case("", B=2, T=9, heads=(4, 2, 1), K=3, V=4, gates=("g", "g_gamma", "gk", "gv"), reverse=True)
    r = recurrence(case, "log-sigmoid")
    assert_reference_gradient_is_the_slope(r, cotangents(case, r))

"""The Triton kernels in Triton's interpreter, called as on a GPU, against the float64 reference."""

import dataclasses
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import strengths, triton_interpreter

triton_interpreter.install()

from glax._src.core.bind import bind  # noqa: E402
from glax._src.core.registry import kernel_registry  # noqa: E402
from glax._src.kernels import load_kernels  # noqa: E402
from glax._src.kernels.triton import (  # noqa: E402
    GradientConfig,
    TokenConfig,
    TritonChunkedConfig,
    support,
)
from glax._src.kernels.triton import chunked as chunks  # noqa: E402
from glax._src.kernels.triton import gradient as gradients  # noqa: E402
from glax._src.kernels.triton.segments import segments_of  # noqa: E402
from glax.testing.reference import reference, reference_gradient  # noqa: E402
from tests.cases import Case, all_cases, cotangents, inputs, recurrence  # noqa: E402
from tests.close import assert_close, assert_gradients_close, assert_outputs_close  # noqa: E402
from tests.poison import dispatched, leaks, operands_of, packed, segmented  # noqa: E402
from tests.suite import check_forward, check_gradient  # noqa: E402

load_kernels()
chunked, chunked_vjp, recurrent, recurrent_step = (
    kernel_registry.kernels[f"{name}/triton/gpu"].run
    for name in ("chunked", "chunked.vjp", "recurrent", "recurrent.step")
)
CASES = {case.name: case for case in all_cases()}
FEW = ("log-sigmoid", "-20", "-100 on 5%")
PACKED = dict(cuts=(0, 0, 30, 31, 31, 130, 144, 144), T=150, strengths=("log-sigmoid",))
CHUNKED = [
    *(dataclasses.replace(CASES[f"{form}-packed-reverse"], strengths=FEW) for form in ("key", "head", "constant")),
    *(dataclasses.replace(CASES[name], strengths=("0", "-120", "-inf on 5%")) for name in ("key", "head")),
    *(
        CASES[name]
        for name in ("none-packed", "T1", "T65-head", "K1V64", "K128V60", "heads4-2-1-packed", "all-padding")
    ),
    *(CASES[name] for name in ("bfloat16-key", "bfloat16-head", "bfloat16-gates", "bfloat16-packed")),
    *(CASES[name] for name in ("no-state-packed", "float16-gates")),
    dataclasses.replace(CASES["float16-key"], strengths=("log-sigmoid", "-100 on 5%")),
    Case("heads1-4-2", T=40, heads=(1, 4, 2), K=8, V=6),
]
# Wide heads in bfloat16, whose states are stored at every chunk. All widths but one end inside of a block.
WIDE = [
    Case("wide-key", T=150, heads=(2, 1, 2), K=200, V=72, dtype="bfloat16", strengths=("log-sigmoid", "-20")),
    Case("wide-constant-packed-reverse", K=256, V=40, gates=("g_gamma",), dtype="bfloat16", reverse=True, **PACKED),
    Case("wide-head-packed", K=136, V=40, gates=("g",), dtype="bfloat16", **PACKED),
    Case("wide-none-reverse", T=150, K=136, V=72, gates=(), dtype="bfloat16", state_dtype=None, reverse=True),
    Case("wide-key-shared", T=70, heads=(1, 2, 2), K=136, V=40, dtype="bfloat16", strengths=("log-sigmoid",)),
    Case(
        "wide-head-shared",
        T=70,
        heads=(1, 1, 2),
        K=136,
        V=40,
        gates=("g",),
        dtype="bfloat16",
        strengths=("-inf on 5%",),
    ),
    Case("wide-key-packed", K=136, V=40, dtype="bfloat16", gate_dtype="bfloat16", state_dtype=None, **PACKED),
]
STORED = [*WIDE, *(CASES[name] for name in ("T1", "T65-head", "heads4-2-1-packed", "all-padding", "no-state-packed"))]
WIDE_VALUES = [
    Case("key", heads=(2, 1, 2), K=64, V=320, T=150, strengths=("log-sigmoid", "-100 on 5%", "-inf on 5%")),
    Case("head-packed", heads=(1, 1, 1), K=96, V=320, T=150, gates=("g",), cuts=(0, 0, 40, 41, 41, 130)),
    Case("constant-reverse", heads=(1, 2, 1), K=96, V=257, T=150, gates=("g_gamma",), reverse=True),
    Case("none", heads=(1, 1, 1), K=128, V=256, T=70, gates=(), strengths=("log-sigmoid",)),
    Case("wide-key", heads=(1, 1, 2), K=144, V=272, T=70, strengths=("log-sigmoid", "-100 on 5%")),
]
WIDE_VALUES = [dataclasses.replace(case, dtype="bfloat16") for case in WIDE_VALUES]
TOKENS = [
    dataclasses.replace(CASES[name], T=40, strengths=("log-sigmoid", "-inf on 5%"))
    for name in ("key+value", "value-reverse", "constant", "head")
]
TOKENS += [
    dataclasses.replace(CASES["key+value-packed-reverse"], strengths=("log-sigmoid",)),
    CASES["bfloat16-key+value"],
]
# Equal gates must not round alike at every token.
TOKENS += [dataclasses.replace(CASES["T2600-key"], T=700, gates=("gk", "gv"), strengths=("-1e-6",))]


def taken(case: Case) -> Case:
    """Remove the gates on the value side, which the chunked kernels do not support."""
    return dataclasses.replace(case, gates=tuple(name for name in case.gates if name != "gv"))


POISONED = {
    "chunked/triton/gpu": (TritonChunkedConfig(32, 32), ("none", "key", "head beta", "key erase+write")),
    "chunked.vjp/triton/gpu": (GradientConfig(32, 16, block=16), ("head", "key beta", "head erase+write")),
    "recurrent/triton/gpu": (TokenConfig(), ("key+value", "none erase")),
}


@pytest.mark.parametrize("name,form", [(name, form) for name, (_, forms) in POISONED.items() for form in forms])
def test_a_poisoned_document_harms_no_other(name, form):
    layout = (packed if form == "head" else segmented)((0, 20, 32, 38), 40)
    operands = operands_of(layout.case(form, heads=(1, 1, 1)))
    spec, (config, _) = kernel_registry.kernels[name], POISONED[name]
    program = jax.jit(dispatched(spec, functools.partial(spec.run, config=config)))
    found = leaks(layout, operands, *((None, program) if spec.is_gradient else (program, None)), few=True)
    assert not found, "\n".join(found)


# In one scan, and in segments with a scan of their states.
@pytest.mark.parametrize(
    "config", [TritonChunkedConfig(32, 32), TritonChunkedConfig(16, 64, segment=32)], ids=["whole", "segments"]
)
@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_chunked(case, config):
    check_forward(taken(case), jax.jit(functools.partial(chunked, config=config)))


@pytest.mark.parametrize(
    "config",
    [
        TritonChunkedConfig(64, 64, block=64),
        TritonChunkedConfig(32, 32, segment=64, block=128),
        TritonChunkedConfig(128, 128, warps=8, block=128),
    ],
    ids=["whole", "segments", "chunks of 128"],
)
@pytest.mark.parametrize("case", STORED, ids=str)
def test_chunked_with_stored_states(case, config):
    check_forward(taken(case), jax.jit(functools.partial(chunked, config=config)))


def test_wide_heads_and_float32_store_states():
    for case in (*WIDE, CASES["K256V128"], CASES["key"], CASES["bfloat16-key"]):
        r = recurrence(case, "log-sigmoid")
        found = [TritonChunkedConfig.heuristic(r), *TritonChunkedConfig.candidates(r)]
        stores = case in WIDE or case.dtype == "float32"
        assert all((each.block > 0) is stores for each in found[:2])
        assert {each.block for each in found} == ({0, 64, 128} if stores else {0})


@pytest.mark.parametrize(
    "T, documents, stores", [(2**19, 0, True), (2**19 + 8, 0, False), (2**15, 3839, True), (2**15, 3840, False)]
)
def test_states_that_would_fill_the_memory_are_not_stored(T, documents, stores):
    """Just inside and just outside of 8 GiB: 4096 states of 8 heads of 256 x 512, one every 128 tokens and one a document."""
    found = []

    def choose(q, v, g, cuts):
        found.append(TritonChunkedConfig.heuristic(bind(q, q, v, g_gamma=g, cu_seqlens=cuts if documents else None)))

    shapes = (1, T, 8, 256), (1, T, 8, 512), (8,)
    cuts = jax.ShapeDtypeStruct((documents + 1,), jnp.int32)
    jax.eval_shape(choose, *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes), cuts)
    assert (found[0].block > 0) is stores


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_chunked_gradient(case):
    wide = max(case.K, case.V) > 64  # each program takes the interpreter long, however small its tiles are
    config = GradientConfig(32, 32, block=64) if wide else GradientConfig(32, 16, block=16)
    check_gradient(taken(case), jax.jit(functools.partial(chunked_vjp, config=config)))


@pytest.mark.parametrize("heads", [(4, 2, 1), (2, 1, 4), (1, 6, 3)], ids=str)
@pytest.mark.parametrize("form", ["head", "none"])
def test_shared_heads_are_summed_by_one_program(heads, form, monkeypatch):
    monkeypatch.setattr(gradients, "multiprocessors", lambda: 1)  # a GPU that few programs fill
    case = dataclasses.replace(CASES[f"{form}-packed"], heads=heads, K=17, V=18, strengths=("log-sigmoid",))
    r = recurrence(case, "log-sigmoid")
    assert gradients.heads_of_a_program(r, 10) > 1
    check_gradient(taken(case), jax.jit(functools.partial(chunked_vjp, config=GradientConfig(16, 16, block=16))))
    case = dataclasses.replace(case, T=60, cuts=(0, 0, 31, 50))
    config = GradientConfig(32, 16, block=16, columns=16)
    check_gradient(taken(case), jax.jit(functools.partial(chunked_vjp, config=config)))


@pytest.mark.parametrize("case", WIDE_VALUES, ids=str)
def test_wide_gradient(case):
    """Programs hold blocks of K and of V, the last of which are no whole blocks."""
    r = recurrence(case, case.strengths[0])
    config = dataclasses.replace(GradientConfig.heuristic(r), segment=0)
    assert config.chunk == 64 and config.columns == 64
    check_gradient(case, jax.jit(functools.partial(chunked_vjp, config=config)))


@pytest.mark.parametrize("case", [CHUNKED[1], CASES["key-packed"], CASES["bfloat16-key"]], ids=str)
def test_wide_gradient_in_segments(case):
    """Of any dtype, also where chunks and blocks are small."""
    case = dataclasses.replace(case, heads=(1, 1, 1), K=17, V=40, strengths=("log-sigmoid", "-100 on 5%"))
    config = GradientConfig(16, 16, segment=32, block=16, columns=32)
    check_gradient(taken(case), jax.jit(functools.partial(chunked_vjp, config=config)))


@pytest.mark.parametrize("case", [*CHUNKED[:2], CASES["all-padding"]], ids=str)
def test_chunked_gradient_in_segments(case):
    config = GradientConfig(16, 64, segment=32)
    check_gradient(taken(case), jax.jit(functools.partial(chunked_vjp, config=config)))


@pytest.mark.parametrize("what", ["forward", "stored", "gradient"])
@pytest.mark.parametrize(
    "case", [*(CASES[f"{form}-packed"] for form in ("key", "head", "none")), CASES["key-reverse"]], ids=str
)
def test_two_phases_agree_with_one(case, what):
    """The first phase returns the final state for any initial state, and the decay; the second phase returns the results.

    The two-phase gradient equals the single-phase gradient in every bit. The two-phase forward adds the decayed initial
    state to each segment's state, so it is compared with the reference.
    """
    r, gradient = recurrence(case, "log-sigmoid"), what == "gradient"
    d = cotangents(case, r) if gradient else ()
    config = TritonChunkedConfig(16, 16, segment=32, block=16 * (what == "stored"))
    if gradient:
        config = GradientConfig(16, 16, segment=32, block=16)
    run, first, finish = (
        (chunked_vjp, chunks.local_states_vjp, chunks.finish_vjp)
        if gradient
        else (chunked, chunks.local_states, chunks.finish)
    )
    nothing = jnp.zeros(r.state_shape)
    empty = (r.replace(initial_state=nothing), *d[:1], *(nothing for _ in d[1:]))
    saved, from_zero, log = jax.jit(functools.partial(first, config=config))(*empty)
    _, state, _ = jax.jit(functools.partial(first, config=config))(r, *d)
    want, got = (jax.jit(functools.partial(f, config=config)) for f in (run, functools.partial(finish, saved)))
    want, got = want(r, *d), got(r, *d)
    if gradient:
        jax.tree.map(np.testing.assert_array_equal, got, want)
    else:
        assert_outputs_close(r, got, reference(r))
    assert_close("state", state, want.initial_state if gradient else want.final_state, 1e-5)
    carried = jnp.exp(log)[..., None] * (d[1] if gradient else r.initial_state)
    assert_close("decay", from_zero + carried, np.asarray(state), 1e-5)


@pytest.mark.parametrize("form, dtype", [("key", "float32"), ("key", "bfloat16"), ("head", "float32")])
def test_steady_strengths(form, dtype):
    """Just inside and just outside of each limit, the state passed over several chunks."""
    r, *d = strengths.problem(form, half=16, T=72, K=32, dtype=dtype)
    got = jax.jit(functools.partial(chunked, config=TritonChunkedConfig(32, 32)))(r)
    gradient = jax.jit(functools.partial(chunked_vjp, config=GradientConfig(32, 32, block=32)))(r, *d)
    strengths.assert_right(r, *d, got, gradient)


@pytest.mark.parametrize("size", [1, 7, 48, 1024])
def test_tiles_are_powers_of_two(size):
    said = f"must be a power of two from 16 to 512, got {size}"
    for config, names in ((TritonChunkedConfig, ("chunk", "columns")), (GradientConfig, ("chunk", "rows", "block"))):
        for name in names:
            with pytest.raises(ValueError, match=f"^{name} {said}$"):
                config(**{name: size})


def test_blocks_of_stored_states_fill_a_product():
    with pytest.raises(ValueError, match=r"^block must be 0 or a power of two from 16 to 512, got 8$"):
        TritonChunkedConfig(block=8)


def test_a_reset_on_a_chunks_first_token():
    """-inf there is in no sum from the chunk's middle; the fast forms must notice it all the same."""
    case = Case("", T=70, K=16, V=16, state_dtype=None)
    r = recurrence(case, "log-sigmoid")
    gates = r.decay.key.at[:, 32, :, 3].set(-jnp.inf)
    r = r.replace(decay=dataclasses.replace(r.decay, key=gates))
    d = cotangents(case, r)
    assert_outputs_close(r, jax.jit(functools.partial(chunked, config=TritonChunkedConfig(32, 16)))(r), reference(r))
    got = jax.jit(functools.partial(chunked_vjp, config=GradientConfig(32, 16)))(r, *d)
    assert_gradients_close(r, got, reference_gradient(r, *d))


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_recurrent(case):
    check_forward(case, jax.jit(functools.partial(recurrent, config=TokenConfig(16))))


@pytest.mark.parametrize("gates", [(), ("g_gamma",), ("g",), ("gk", "gv")], ids="+".join)
def test_step(gates):
    """Rows of the pool that no slot names keep their bits; slot -1 answers 0."""
    case = Case("", B=3, T=1, heads=(4, 2, 1), K=12, V=20, gates=gates, state_dtype=None)
    pool = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 12, 20)), jnp.float32)
    slots, places = jnp.array([4, -1, 0], jnp.int32), jnp.array([4, 1, 0])
    r = bind(**inputs(case, "log-sigmoid"))
    output, new = jax.jit(functools.partial(recurrent_step, config=TokenConfig(16)))(r, pool, slots)
    want = reference(r.replace(initial_state=pool[places]))
    assert_close("output", output[jnp.array([0, 2])], want.output[[0, 2]], 1e-6)
    assert not output[1].any()
    assert_close("pool", new[jnp.array([4, 0])], want.final_state[[0, 2]], 1e-6)
    np.testing.assert_array_equal(new[1:4], pool[1:4])


def test_a_new_length_is_no_new_kernel():
    """Nothing that a kernel is compiled for depends on T, nor on where sequences begin."""
    launched = []

    def record(*operands, kernel, grid, num_warps, num_stages, out_type=None, out_shape=None, **constants):
        launched.append((kernel, num_warps, num_stages, sorted(constants.items(), key=str)))
        return [jnp.zeros(x.shape, x.dtype) for x in (out_type or out_shape)]

    def launches(T: int, cuts=None):
        case = Case("", T=T, cuts=cuts, K=16, V=16, state_dtype=None)
        r = recurrence(case, "log-sigmoid")
        launched.clear()
        for segment in (0, 64):
            chunked(r, config=TritonChunkedConfig(32, 16, segment))
            chunked_vjp(r, *cotangents(case, r), config=GradientConfig(32, 16, segment))
        return list(launched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_triton.triton_call", record)
        assert launches(100) == launches(1000) == launches(1024)
        assert launches(100, (0, 40, 100)) == launches(1001, (0, 1, 900))


def test_segments_cover_every_row_once():
    for reverse in (False, True):
        for case in (CASES["key-packed"], CASES["all-padding"], Case("", B=3, T=50)):
            r = recurrence(dataclasses.replace(case, reverse=reverse), "log-sigmoid")
            table = np.asarray(segments_of(r, 32, 16).table)
            rows = [o - i if reverse else o + i for o, length, *_ in table for i in range(length)]
            assert sorted(rows) == list(range(r.q.shape[0] * r.q.shape[1]))
            last = table[(table[:, 4] & 2) != 0]
            assert sorted(last[:, 3]) == list(range(r.num_sequences))


def test_refusals():
    r = recurrence(Case("", T=20), "log-sigmoid")
    assert support.chunked_refusal(r) is None and support.refusal(r) is None
    assert "one token" in support.step_refusal(r)
    value = recurrence(Case("", T=20, gates=("gv",)), "log-sigmoid")
    refusals = {
        name: kernel_registry.kernels[f"{name}/triton/gpu"].other_form(value, "value")
        for name in ("chunked", "recurrent")
    }
    assert "got value (given by gv)" in refusals["chunked"] and refusals["recurrent"] is None
    wide = jax.eval_shape(lambda: bind(*(jnp.zeros((1, 4, 1, 1024), jnp.float32),) * 3))
    assert "512" in support.refusal(wide)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "version_of", lambda name: "3.2.0")
        assert "triton>=3.7.1" in support.refusal(r)


def test_signs_of_bfloat16():
    """Triton's interpreter, unrepaired, takes bfloat16 for integers and negates their bits."""
    x = triton_interpreter.rounded(triton_interpreter.Handle(np.float32([-1.5, 2.0]), triton_interpreter.tl.float32))
    builder = triton_interpreter.Builder()
    negative, magnitude = (triton_interpreter.widened(f(x)).data for f in (builder.create_fneg, builder.create_fabs))
    np.testing.assert_array_equal(negative, [1.5, -2.0])
    np.testing.assert_array_equal(magnitude, [1.5, 2.0])


def test_reads_out_of_bounds_show():
    """The interpreter's guards are NaN, so the suite can fail."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    memory = triton_interpreter.Memory(np.ones(3, np.float32))
    assert np.isnan(memory.whole).sum() == 2 * triton_interpreter.GUARD
    memory.whole[0] = 1
    assert not memory.written_only_inside()

"""The Triton kernels of the delta rule in Triton's interpreter: forward and gradient against the float64 reference."""

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
from glax._src.core.registry import kernel_registry  # noqa: E402
from glax._src.kernels import load_kernels  # noqa: E402
from glax._src.kernels.common.limits import FAST_LIMIT  # noqa: E402
from glax._src.kernels.triton import GradientConfig, TokenConfig, TritonChunkedConfig, support  # noqa: E402
from glax._src.kernels.triton.chunked import segments_and_chunks  # noqa: E402
from glax._src.kernels.triton.delta_along_chunked import folded  # noqa: E402
from glax._src.kernels.triton.delta_chunked import chunk_pairs, scanned  # noqa: E402
from glax.testing.reference import reference, reference_gradient  # noqa: E402
from tests.close import assert_close, assert_gradients_close, assert_outputs_close  # noqa: E402
from tests.delta_cases import DRAWS, ERASURES, FEW, PACKED, DeltaCase, Draw, all_cases  # noqa: E402
from tests.suite import check_forward, check_gradient  # noqa: E402

load_kernels()
chunked, chunked_vjp, recurrent, recurrent_step = (
    kernel_registry.kernels[f"{name}/triton/gpu"].run
    for name in ("chunked", "chunked.vjp", "recurrent", "recurrent.step")
)
ALL = {case.name: case for case in all_cases()}
CASES = [
    dataclasses.replace(ALL["head"], T=70, draws=DRAWS[::2]),
    dataclasses.replace(ALL["none"], T=40, draws=FEW),
    *(ALL[name] for name in ("head-packed-reverse", "constant-packed", "heads1-2-4", "bfloat16-head", "all-padding")),
    DeltaCase("T1", ("g",), T=1, K=8, V=8, heads=(1, 1, 1)),
    DeltaCase("K100V72", ("g",), T=40, K=100, V=72, heads=(1, 1, 2), draws=FEW[:1]),
    DeltaCase("no-state", ("g",), B=2, T=40, state=False, draws=FEW[:1]),
    DeltaCase("float16-packed", ("g",), dtype="float16", **PACKED, draws=FEW[:2]),
]


KEY_CASES = [
    dataclasses.replace(
        ALL["key"], T=70, draws=tuple(draw for draw in DRAWS if draw.strength != "mild" or draw.beta == "2")
    ),
    *(ALL[name] for name in ("heads4-2-2", "K1V1")),
    DeltaCase("key-K100V72", ("gk",), T=40, K=100, V=72, heads=(1, 1, 2), draws=FEW[:1]),
    DeltaCase("key-packed-reverse", ("gk",), reverse=True, **PACKED, draws=FEW[:2]),
    DeltaCase("bfloat16-key", ("gk",), T=70, K=64, V=64, dtype="bfloat16", draws=FEW[:2]),
    DeltaCase("float16-key", ("gk",), T=70, K=32, V=32, dtype="float16", draws=FEW[:2]),
]


class FreeCase(DeltaCase):
    """A case whose erase vectors are no multiples of the keys: of any direction, of norms up to 2, a fifth of them zero."""

    def inputs(self, draw: Draw, seed: int = 0) -> dict[str, jax.Array]:
        found, rng = super().inputs(draw, seed), np.random.default_rng(seed + 2)
        e = rng.normal(size=found["erase"].shape)
        e *= 2 * rng.random((*e.shape[:-1], 1)) / np.linalg.norm(e, axis=-1, keepdims=True)
        e *= rng.random((*e.shape[:-1], 1)) < 0.8
        for name, x in (("erase", e), ("write", rng.normal(size=(*e.shape[:-1], self.V)))):
            if name in found:
                x = np.where(np.isnan(found[name]), np.nan, x * (rng.random(x.shape) < 0.8))
                found[name] = jnp.asarray(x, found[name].dtype)
        return found


HOSTILE = tuple(Draw(strength) for strength in ("log-sigmoid", "0", "-120", "-inf on 5%", "+0.05", "-100 on 5%"))
BOTH = ("erase", "write")
FREE = [
    FreeCase("free-none", (), BOTH, T=70, draws=HOSTILE[:1]),
    FreeCase("free-head", ("g",), ("erase",), T=70, draws=HOSTILE),
    FreeCase("free-key", ("gk",), ("erase",), T=70, draws=HOSTILE),
    FreeCase("free-head-K100V72", ("g",), BOTH, T=40, K=100, V=72, heads=(1, 1, 2), draws=HOSTILE[:1]),
    FreeCase("free-key-K100V72", ("gk",), BOTH, T=40, K=100, V=72, heads=(1, 1, 2), draws=HOSTILE[:1]),
    FreeCase("free-key-write", ("gk",), BOTH, T=40, draws=HOSTILE[-1:]),
    FreeCase("free-constant-packed", ("g_gamma",), ("erase",), **PACKED, draws=HOSTILE[:1]),
    FreeCase("free-head-packed-reverse", ("g",), BOTH, reverse=True, **PACKED, draws=HOSTILE[:1]),
    FreeCase("free-key-packed-reverse", ("gk",), BOTH, reverse=True, **PACKED, draws=HOSTILE[3:4]),
    FreeCase("free-heads1-2-4", ("g",), BOTH, heads=(1, 2, 4), T=40, K=8, V=6, draws=HOSTILE[:1]),
    FreeCase("free-heads4-2-2", ("gk",), BOTH, heads=(4, 2, 2), T=17, K=8, V=6, state=False, draws=HOSTILE[:1]),
    FreeCase("free-T1", ("gk",), ("erase",), T=1, K=8, V=8, heads=(1, 1, 1), draws=HOSTILE[:1]),
    FreeCase("free-head-bfloat16", ("g",), BOTH, T=137, K=64, V=64, dtype="bfloat16", draws=HOSTILE[::3]),
    FreeCase("free-key-bfloat16", ("gk",), BOTH, T=70, K=64, V=64, dtype="bfloat16", draws=HOSTILE[::3]),
    FreeCase("free-key-float16", ("gk",), ("erase",), T=70, K=32, V=32, dtype="float16", draws=HOSTILE[::3]),
    *(dataclasses.replace(ALL[f"before-decay-{form}"], T=40) for form in ("head", "key")),
    *(dataclasses.replace(ALL[f"before-decay-{form}-packed-reverse"], draws=HOSTILE[3:4]) for form in ("head", "key")),
    *(ALL[f"before-decay-{name}"] for name in ("constant-packed", "T1", "bfloat16")),
    dataclasses.replace(ALL["along-head-packed"], draws=HOSTILE[:1]),
    dataclasses.replace(ALL["along-before-decay-key"], T=40),
    dataclasses.replace(ALL["along-before-decay-key-packed-reverse"], draws=HOSTILE[3:4]),
    DeltaCase(
        "along-constant-reverse",
        ("g_gamma",),
        ("erase",),
        along=True,
        reverse=True,
        heads=(1, 2, 4),
        T=20,
        draws=FEW[:1],
    ),
    FreeCase("free-before-head", ("g",), BOTH, T=70, before_decay=True, draws=HOSTILE),
    FreeCase("free-before-key", ("gk",), BOTH, T=70, before_decay=True, draws=HOSTILE),
    FreeCase("free-all-padding", ("g",), ("erase",), cuts=(0, 0, 0), T=10, draws=HOSTILE[:1]),
]
ALONG = [
    FreeCase("along-key", ("gk",), ("erase",), T=70, along=True, draws=HOSTILE),
    FreeCase("along-key-write", ("gk",), BOTH, T=40, along=True, draws=HOSTILE[-2:]),
    FreeCase("along-before-key", ("gk",), ("erase",), T=70, before_decay=True, along=True, draws=HOSTILE),
    FreeCase("along-key-packed", ("gk",), ("erase",), along=True, **PACKED, draws=HOSTILE[:1]),
    FreeCase(
        "along-before-key-packed-reverse",
        ("gk",),
        BOTH,
        reverse=True,
        before_decay=True,
        along=True,
        **PACKED,
        draws=HOSTILE[3:4],
    ),
    FreeCase(
        "along-heads1-2-4",
        ("gk",),
        BOTH,
        heads=(1, 2, 4),
        T=40,
        K=8,
        V=6,
        before_decay=True,
        along=True,
        draws=HOSTILE[:1],
    ),
    FreeCase(
        "along-heads4-2-2", ("gk",), ("erase",), heads=(4, 2, 2), T=17, state=False, along=True, draws=HOSTILE[3:4]
    ),
    FreeCase(
        "along-T1", ("gk",), BOTH, T=1, K=8, V=8, heads=(1, 1, 1), before_decay=True, along=True, draws=HOSTILE[:2]
    ),
    FreeCase("along-all-padding", ("gk",), ("erase",), cuts=(0, 0, 0), T=10, along=True, draws=HOSTILE[:1]),
    FreeCase("along-two-rows", ("gk",), ("erase",), T=20, K=80, V=8, before_decay=True, along=True, draws=HOSTILE[3:4]),
    FreeCase("along-float16", ("gk",), BOTH, T=40, K=32, dtype="float16", before_decay=True, along=True, draws=HOSTILE),
]
NARROW = dict(dtype="bfloat16", T=200, K=64, along=True)
ALONG_BFLOAT16 = [
    DeltaCase(
        "along-before-bfloat16",
        ("gk",),
        ("erase",),
        V=48,
        gate_dtype="bfloat16",
        before_decay=True,
        **NARROW,
        draws=HOSTILE,
    ),
    FreeCase("along-bfloat16-write", ("gk",), BOTH, V=64, **NARROW, draws=HOSTILE[::3]),
]
TOKENS = [
    dataclasses.replace(ALL["none"], T=20, draws=FEW),
    DeltaCase("value", ("gv",), T=20),
    DeltaCase("erase-head", ("g",), ("erase",), T=20, heads=(1, 2, 4)),
    dataclasses.replace(ALL["erase-write-key-packed-reverse"], draws=FEW[1:2]),
    dataclasses.replace(ALL["key+value-packed"], draws=FEW[:1]),
    DeltaCase("bfloat16-key", ("gk",), T=20, dtype="bfloat16", draws=FEW[:2]),
    dataclasses.replace(ALL["before-decay-key+value-packed"], draws=FEW[:1]),
    dataclasses.replace(ALL["before-decay-head"], T=20, draws=HOSTILE[2:4]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case):
    chunk = 16 if str(case) in ("none", "heads1-2-4") else 64  # without merges in the inverse, and with two
    run = jax.jit(functools.partial(chunked, config=TritonChunkedConfig(chunk, 32)))
    check_forward(case, run)


@pytest.mark.parametrize("case", KEY_CASES, ids=str)
def test_forward_with_key_gates(case):
    run = jax.jit(functools.partial(chunked, config=TritonChunkedConfig(32, 32)))
    check_forward(case, run)


@pytest.mark.parametrize("case", FREE, ids=str)
def test_forward_of_free_erase_vectors(case):
    check_forward(case, jax.jit(functools.partial(chunked, config=TritonChunkedConfig(32, 32))))


@pytest.mark.parametrize("case", ALONG + ALONG_BFLOAT16, ids=str)
def test_forward_along_another_key(case):
    check_forward(case, jax.jit(functools.partial(chunked, config=TritonChunkedConfig(32, 32))))


def decaying(case: DeltaCase) -> DeltaCase:
    """The case at gates that decay. In bfloat16 two rows a token miss the bar of the gradients of e and b at the others, too."""
    return dataclasses.replace(case, draws=tuple(draw for draw in case.draws if draw.strength not in ("0", "+0.05")))


@pytest.mark.parametrize("case", CASES + KEY_CASES + FREE + ALONG + [decaying(x) for x in ALONG_BFLOAT16], ids=str)
def test_gradient(case):
    check_gradient(case, jax.jit(functools.partial(chunked_vjp, config=GradientConfig(32, 32, block=32, columns=16))))


@pytest.mark.parametrize("gate,in_range", [(-1.87, True), (-1.88, False)])
def test_key_gates_just_inside_and_outside_of_the_limit(gate, in_range):
    """32 gates of -1.875 reach FAST_LIMIT. The fast form covers the chunks below it, and the exact form the others."""
    case = DeltaCase("", ("gk",), T=128, K=16, V=16, heads=(1, 1, 1))
    r = case.recurrence(Draw("mild", "to 2"))
    r = r.replace(decay=Decay(key=jnp.full_like(r.decay.key, gate)))
    _, chunks = segments_and_chunks(r, TritonChunkedConfig(64, 16))
    assert bool((scanned(r, chunks, 64).max_abs_cumsum <= FAST_LIMIT).all()) is in_range
    assert_outputs_close(r, chunked(r, config=TritonChunkedConfig(64, 16)), reference(r))
    d = case.cotangents(r)
    assert_gradients_close(r, chunked_vjp(r, *d, config=GradientConfig(64, 16, block=16)), reference_gradient(r, *d))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate,in_range", [(-1.87, True), (-1.88, False)])
def test_key_gates_along_another_key_inside_and_outside_of_the_limit(gate, in_range, dtype):
    case = DeltaCase(
        "", ("gk",), ("erase",), T=128, K=16, V=16, heads=(1, 1, 1), dtype=dtype, before_decay=True, along=True
    )
    r = case.recurrence(Draw("mild", "to 2"))
    r = r.replace(decay=Decay(key=jnp.full_like(r.decay.key, gate)))
    _, chunks = segments_and_chunks(r, TritonChunkedConfig(64, 16))
    assert bool((folded(r, chunks, 64, False).max_abs_cumsum <= FAST_LIMIT).all()) is in_range
    assert_outputs_close(r, chunked(r, config=TritonChunkedConfig(64, 16)), reference(r))
    d = case.cotangents(r)
    assert_gradients_close(r, chunked_vjp(r, *d, config=GradientConfig(64, 16, block=16)), reference_gradient(r, *d))


@pytest.mark.parametrize("case", TOKENS, ids=str)
def test_recurrent(case):
    run = jax.jit(functools.partial(recurrent, config=TokenConfig(16)))
    check_forward(case, run)


@pytest.mark.parametrize("erasure", ERASURES, ids="+".join)
@pytest.mark.parametrize("gates", [("g",), ("gk", "gv")], ids="+".join)
def test_step(gates, erasure):
    """Rows of the pool that no slot names keep their bits; slot -1 answers 0."""
    case = DeltaCase("", gates, erasure, B=3, T=1, heads=(1, 2, 4), K=12, V=20, state=False)
    pool = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 12, 20)), jnp.float32)
    slots, places = jnp.array([4, -1, 0], jnp.int32), jnp.array([4, 1, 0])
    r = case.recurrence(Draw("log-sigmoid", "to 2"))
    output, new = jax.jit(functools.partial(recurrent_step, config=TokenConfig(16)))(r, pool, slots)
    want = reference(r.replace(initial_state=pool[places]))
    assert_close("output", output[jnp.array([0, 2])], want.output[[0, 2]], 1e-6)
    assert not output[1].any()
    assert_close("pool", new[jnp.array([4, 0])], want.final_state[[0, 2]], 1e-6)
    np.testing.assert_array_equal(new[1:4], pool[1:4])


def test_long_sequences_are_left_to_chunks():
    """Token by token is the last choice for a recurrence that erases, but for sequences shorter than a chunk."""
    long, short = (DeltaCase("", ("gk",), T=T).recurrence(Draw()) for T in (64, 4))
    assert support.token_priority(long) < 0 < support.token_priority(short)


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_the_inverse_of_repeated_keys(chunk):
    """Keys that repeat with beta = 2: the inverse stays small, while the powers of L pass 1e20."""
    case = DeltaCase("", (), T=chunk, K=16, V=16, heads=(1, 1, 2), state=False)
    for draw in (Draw("0", "2", "repeated"), Draw("0", "to 2", "repeated"), Draw("0", "random"))[chunk == 128 :]:
        check_inverse(case.recurrence(draw), chunk, 1e-5)


def test_the_inverse_of_128_repeated_keys():
    """In float32 a sum of 64 products of +-2 rounds to up to 3e-5, in the processor's order of summation. Keys of +-1/4 make
    every product exact, with the bar of fewer tokens."""
    case = DeltaCase("", (), T=128, K=16, V=16, heads=(1, 1, 2), state=False)
    r = case.recurrence(Draw("0", "2", "repeated"))
    check_inverse(r, 128, 3e-5)
    check_inverse(dataclasses.replace(r, k=jnp.sign(r.k) / 4), 128, 1e-5)


def check_inverse(r, chunk, bar):
    _, chunks = segments_and_chunks(r, TritonChunkedConfig(chunk, 16))
    got = chunk_pairs(r, chunks, chunk).inverse[0]
    beta, k = np.asarray(r.erasing.beta[0], np.float64), np.asarray(r.k[0, :, 0], np.float64)
    for h in range(2):
        L = np.tril(beta[:, h, None] * (k @ k.T), -1)
        assert_close("inverse", got[h] + jnp.eye(chunk), np.linalg.inv(np.eye(chunk) + L), bar)


def test_a_new_length_is_no_new_kernel():
    """Nothing that a kernel is compiled for depends on T, nor on where sequences begin."""
    launched = []

    def record(*operands, kernel, grid, num_warps, num_stages, out_type=None, out_shape=None, **constants):
        launched.append((kernel, num_warps, num_stages, sorted(constants.items(), key=str)))
        return [jnp.zeros(x.shape, x.dtype) for x in (out_type or out_shape)]

    def launches(T: int, cuts=None):
        case = DeltaCase("", ("g",), T=T, cuts=cuts, K=16, V=16, state=False)
        r = case.recurrence(Draw())
        launched.clear()
        chunked(r, config=TritonChunkedConfig(32, 16))
        chunked_vjp(r, *case.cotangents(r), config=GradientConfig(32, 16))
        return list(launched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_triton.triton_call", record)
        assert launches(100) == launches(1000) == launches(1024)
        assert launches(100, (0, 40, 100)) == launches(1001, (0, 1, 900))


def test_heuristics_fit_their_kernels():
    """The configs that are chosen and those that tuning tries run."""
    case = DeltaCase("", ("g",), T=20, heads=(1, 1, 1), dtype="bfloat16", state=False)
    r = case.recurrence(Draw())
    for config in TritonChunkedConfig.candidates(r):
        assert_outputs_close(r, jax.jit(functools.partial(chunked, config=config))(r), reference(r))
    d = case.cotangents(r)
    for config in GradientConfig.candidates(r)[:2]:
        got = jax.jit(functools.partial(chunked_vjp, config=config))(r, *d)
        assert_gradients_close(r, got, reference_gradient(r, *d))


@pytest.mark.parametrize(
    "case, reason",
    [
        (
            DeltaCase("", ("g",), T=4, K=264, dtype="bfloat16"),
            "key (K) up to 256 wide and value (V) up to 256 wide, got 264",
        ),
        (DeltaCase("", ("g",), T=4, K=136), "in float32 with key (K) up to 128"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(case, reason):
    assert reason in support.chunked_refusal(case.recurrence(Draw()))
    for gates in (("gk",), ("g",), ("g_gamma",), ()):
        for erasure in ERASURES:
            assert support.chunked_refusal(DeltaCase("", gates, erasure, T=4).recurrence(Draw())) is None


@pytest.mark.parametrize("config", [TritonChunkedConfig, GradientConfig])
def test_a_segment_is_a_multiple_of_chunk(config):
    assert config(32, 32, segment=64).segment == 64
    with pytest.raises(ValueError, match="segment must be a multiple of chunk, 32, or 0, got 50"):
        config(32, 32, segment=50)


@pytest.mark.parametrize("case", [ALL["head"], FreeCase("along", ("gk",), ("erase",), T=40, along=True)], ids=str)
def test_a_config_that_divides_sequences_is_refused(case):
    r = case.recurrence(case.draws[0])
    with pytest.raises(ValueError, match="segment must be 0 with beta or erase"):
        chunked(r, config=TritonChunkedConfig(32, 32, segment=32))
    with pytest.raises(ValueError, match="segment must be 0 with beta or erase"):
        chunked_vjp(r, *case.cotangents(r), config=GradientConfig(32, 16, segment=32, block=32))

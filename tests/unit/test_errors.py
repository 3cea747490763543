# ruff: noqa: E501  one case a line reads best
"""What bad input says: the argument, what was expected, what came, and who set the expectation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
import glax.parallel
from glax._src.core.registry import Config
from glax._src.kernels.cpu.recurrent import NativeConfig
from glax._src.kernels.cuda.config import CudaConfig, ReplayConfig
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_tpu.config import TPUChunkedConfig, TPUGradientConfig, TPUPoolConfig
from glax._src.kernels.triton import config as triton
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax.compat import easydel, ejkernel

pytestmark = pytest.mark.fast


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


GOOD = dict(query=ones(2, 12, 4, 8), key=ones(2, 12, 2, 8), value=ones(2, 12, 2, 6))
PACKED = dict(query=ones(1, 12, 4, 8), key=ones(1, 12, 2, 8), value=ones(1, 12, 2, 6))
FLAT = {name: x[0] for name, x in PACKED.items()}


def cuts(*values, dtype=jnp.int32):
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "gk must be [B, T, H, K] with K=8 as in query, got shape (2, 12, 4, 9)", GOOD | dict(gk=ones(2, 12, 4, 9))),
        (ValueError, "gk must be [B, T, H, K] with H=4 as many as query has heads, got shape (2, 12, 2, 8)", GOOD | dict(gk=ones(2, 12, 2, 8))),
        (ValueError, "gv must be [B, T, H, V] with V=6 as in value, got shape (2, 12, 4, 8)", GOOD | dict(gv=ones(2, 12, 4, 8))),
        (ValueError, "g must be [B, T, H] or [B, T, H, K], got shape (2, 12)", GOOD | dict(g=ones(2, 12))),
        (ValueError, "g must be [B, T, H] with T=12 as in query, got shape (2, 1, 4)", GOOD | dict(g=ones(2, 1, 4))),
        (ValueError, "g_gamma must be [H] with H=4 as many as query has heads, got shape (3,)", GOOD | dict(g_gamma=ones(3))),
        (ValueError, "g_gamma must be [H] or [N, H] with N=2, B as in query, got shape (3, 4)", GOOD | dict(g_gamma=ones(3, 4))),
        (ValueError, "key must be [B, T, Hk, K] with T=12 as in query, got shape (2, 3, 2, 8)", GOOD | dict(key=ones(2, 3, 2, 8))),
        (ValueError, "key must be [B, T, Hk, K] with B=2 as in query, got shape (1, 12, 2, 8)", GOOD | dict(key=ones(1, 12, 2, 8))),
        (ValueError, "key must have a number of heads that divides the 4 of query, got 3", GOOD | dict(key=ones(2, 12, 3, 8))),
        (ValueError, "value must be [B, T, Hv, V] with V of at least 1, got shape (2, 12, 2, 0)", GOOD | dict(value=ones(2, 12, 2, 0))),
        (ValueError, "query must be [B, T, Hq, K], got shape (12, 8)", GOOD | dict(query=ones(12, 8))),
        (ValueError, "key must be [T, Hk, K] (query has no B), got shape (2, 12, 2, 8)", GOOD | dict(query=ones(12, 4, 8))),
        (ValueError, "initial_state must be [N, H, K, V] or [H, K, V] with N=2, B as in query, got shape (3, 4, 8, 6)", GOOD | dict(initial_state=ones(3, 4, 8, 6))),
        (ValueError, "initial_state must be [N, H, K, V] with V=6 as in value, got shape (2, 4, 8, 8)", GOOD | dict(initial_state=ones(2, 4, 8, 8))),
        (ValueError, "initial_state must be [N, H, K, V] or [H, K, V] with N=2, one fewer than cu_seqlens has entries, got shape (1, 4, 8, 6)", PACKED | dict(cu_seqlens=cuts(0, 5, 12), initial_state=ones(1, 4, 8, 6))),
        (ValueError, "cu_seqlens packs the sequences along T, so query must have B=1, got B=2", GOOD | dict(cu_seqlens=cuts(0, 12))),
        (ValueError, "cu_seqlens must not decrease, got 7 before 5 at position 2", FLAT | dict(cu_seqlens=cuts(0, 7, 5, 12))),
        (ValueError, "cu_seqlens must begin with 0, got 1", FLAT | dict(cu_seqlens=cuts(1, 12))),
        (ValueError, "cu_seqlens must not pass T=12 as in query, got 13 at its end", FLAT | dict(cu_seqlens=cuts(0, 13))),
        (ValueError, "cu_seqlens must be [N + 1], got shape (1, 2)", PACKED | dict(cu_seqlens=cuts([0, 12]))),
        (TypeError, "cu_seqlens must hold integers, got float32", PACKED | dict(cu_seqlens=cuts(0, 12, dtype=jnp.float32))),
        (TypeError, "cu_seqlens must be an array, got list", PACKED | dict(cu_seqlens=[0, 12])),
        (TypeError, "key must be float32 as query is, got bfloat16", GOOD | dict(key=ones(2, 12, 2, 8, dtype=jnp.bfloat16))),
        (TypeError, "query must be floating point, got int32", GOOD | dict(query=ones(2, 12, 4, 8, dtype=jnp.int32))),
        (TypeError, "query must be float32, bfloat16, float16 or float64, got float8_e4m3fn", GOOD | dict(query=ones(2, 12, 4, 8, dtype=jnp.float8_e4m3fn))),
        (TypeError, "value must be an array, got list", GOOD | dict(value=[1.0])),
        (TypeError, "gk must be floating point, got bool", GOOD | dict(gk=ones(2, 12, 4, 8, dtype=bool))),
        (TypeError, "reverse must be True or False, known while tracing, got 1", GOOD | dict(reverse=1)),
        (ValueError, "softmax_scale must be one number, got shape (4,)", GOOD | dict(softmax_scale=ones(4))),
        (TypeError, "softmax_scale must be a number, got str", GOOD | dict(softmax_scale="1")),
        (TypeError, "softmax_scale must be a number, got complex", GOOD | dict(softmax_scale=1j)),
        (TypeError, "softmax_scale must be a number, got bool", GOOD | dict(softmax_scale=True)),
        (TypeError, "softmax_scale must be a real number, got complex64", GOOD | dict(softmax_scale=jnp.complex64(1))),
        (TypeError, "softmax_scale must be a real number, got complex128", GOOD | dict(softmax_scale=np.complex128(1))),
        (TypeError, "softmax_scale must be a real number, got bool", GOOD | dict(softmax_scale=jnp.asarray(True))),
        (TypeError, "softmax_scale must be a real number, got bool", GOOD | dict(softmax_scale=np.bool_(True))),
        (ValueError, "softmax_scale must be finite in float32, the dtype of sums, got nan", GOOD | dict(softmax_scale=float("nan"))),
        (ValueError, "softmax_scale must be finite in float32, the dtype of sums, got nan", GOOD | dict(softmax_scale=jnp.bfloat16(jnp.nan))),
        (ValueError, "softmax_scale must be finite in float32, the dtype of sums, got -inf", GOOD | dict(softmax_scale=np.float64("-inf"))),
        (ValueError, "softmax_scale must be finite in float32, the dtype of sums, got 3.5e+38", GOOD | dict(softmax_scale=3.5e38)),
        (ValueError, f"softmax_scale must be finite in float32, the dtype of sums, got {10**400}", GOOD | dict(softmax_scale=10**400)),
        (TypeError, "query must be an array, got NoneType", GOOD | dict(query=None)),
        (TypeError, "key must be an array, got NoneType", GOOD | dict(key=None)),
        (TypeError, "value must be an array, got NoneType", GOOD | dict(value=None)),
        (TypeError, "query must be an array, got _ScalarMeta", GOOD | dict(query=jnp.float32)),
        (TypeError, "g_gamma must be an array, got float", GOOD | dict(g_gamma=-0.5)),
        (TypeError, "query must be an array of numbers, got dtype key<fry>", GOOD | dict(query=jax.random.key(0))),
        (TypeError, "gk must be an array of numbers, got dtype object", GOOD | dict(gk=np.full((2, 12, 4, 8), None))),
        (TypeError, "reverse must be True or False, known while tracing, got 'no'", GOOD | dict(reverse="no")),
        (TypeError, "reverse must be True or False, known while tracing, got an array of bool", GOOD | dict(reverse=jnp.asarray(True))),
        (ValueError, "platform must be None, 'auto', 'xla', 'cpp', 'triton', 'pallas', 'cuda', got 'tpu'", GOOD | dict(platform="tpu")),
        (TypeError, "cfg must be the Config of a kernel, such as glax.configs.ChunkedConfig(chunk=64), got 64", GOOD | dict(cfg=64)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_bad_input(error, text, arguments):
    with pytest.raises(error) as caught:
        glax.recurrent(**arguments)
    assert str(caught.value) == text


def test_a_platform_without_kernels_gives_reasons(monkeypatch):
    others = {n: s for n, s in glax.kernel_registry.kernels.items() if s.platform is not glax.Platform.CUDA}
    monkeypatch.setattr(glax.kernel_registry, "kernels", others)
    with pytest.raises(glax.UnsupportedError) as caught:
        glax.recurrent(**GOOD, platform="cuda")
    assert str(caught.value) == "no kernel solves this recurrence on platform 'cuda':\n  none is registered"


def test_a_config_of_no_kernel_gives_every_reason():
    class Other(Config):
        pass

    with pytest.raises(glax.UnsupportedError) as caught:
        glax.recurrent(**GOOD, platform="xla", cfg=Other())
    assert str(caught.value).splitlines() == [
        "no kernel solves this recurrence on platform 'xla':",
        "  recurrent/xla/any: takes a Config, cfg is a Other",
        "  chunked/xla/any: takes a ChunkedConfig, cfg is a Other",
    ]


CONFIGS = {
    NativeConfig: dict(block=(1, 4096)),
    ChunkedConfig: dict(chunk=(1, 4096)),
    TPUChunkedConfig: dict(chunk=(32, 256), units=(1, 1024)),
    TPUGradientConfig: dict(chunk=(32, 256), units=(1, 1024)),
    TPUPoolConfig: dict(),
    triton.TritonChunkedConfig: dict(
        chunk=(16, 512), columns=(16, 512), segment=(0, 2**31 - 1), warps=(1, 32), stages=(1, 16), block=(0, 512)
    ),
    triton.GradientConfig: dict(
        chunk=(16, 512),
        rows=(16, 512),
        segment=(0, 2**31 - 1),
        block=(16, 512),
        warps=(1, 32),
        stages=(1, 16),
        columns=(0, 512),
    ),
    triton.TokenConfig: dict(columns=(1, 512), warps=(1, 32)),
    triton.TritonReplayConfig: dict(columns=(1, 512), warps=(1, 32)),
    HopperConfig: dict(parts=(1, 32), columns=(64, 128)),
    CudaConfig: dict(threads=(32, 1024), columns=(1, 256)),
    ReplayConfig: dict(threads=(32, 1024), columns=(1, 256)),
}


def test_every_config_checks_every_field():
    """A config may come from a file, and bounds what its kernel allocates and compiles."""
    assert {spec.config for spec in glax.kernel_registry.kernels.values()} - {Config} <= CONFIGS.keys()
    for config, fields in CONFIGS.items():
        assert {field.name for field in dataclasses.fields(config)} == fields.keys()
        for name, (lowest, highest) in fields.items():
            largest = highest // 512 * 512 if name == "segment" else highest  # a multiple of any chunk
            for value in (lowest, largest):
                assert getattr(config(**{name: value}), name) == value
            for value in (lowest - 1, highest + 1, 10**12, 10**19, True, 2.0, float("nan"), "64", None, [64]):
                with pytest.raises(ValueError) as caught:
                    config(**{name: value})
                assert f"{name} must be a" in str(caught.value)
                assert f"from {lowest} to {highest}, got {value!r}" in str(caught.value)


@pytest.mark.parametrize("got", ["no", 1, 0.0, None, jnp.asarray(True)], ids=str)
def test_every_flag_is_true_or_false(got):
    on_mesh = functools.partial(
        glax.parallel.recurrent_attention, mesh=jax.make_mesh((1,), ("data",)), batch_axis="data"
    )
    calls = [
        ("return_state", glax.recurrent_attention),
        ("return_state", on_mesh),
        ("reverse", glax.retention),
        ("reverse", on_mesh),
        ("output_final_state", functools.partial(easydel.recurrent_gla, gk=ones(2, 12, 4, 8))),
        ("progress", functools.partial(glax.tune, glax.recurrent)),
    ]
    for flag, call in calls:
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, known while tracing, got "):
            call(**GOOD, **{flag: got})


def test_lightning_layers():
    array = jnp.arange(2)
    wrong = [
        (TypeError, "layer_idx must be an integer, got True", dict(layer_idx=True)),
        (TypeError, "layer_idx must be an integer, got 1.0", dict(layer_idx=1.0)),
        (TypeError, "layer_idx must be an integer, got '1'", dict(layer_idx="1")),
        (TypeError, "layer_idx must be an integer, got 1j", dict(layer_idx=1j)),
        (TypeError, "layer_idx must be an integer, got None", dict(layer_idx=None)),
        (TypeError, "layer_idx must be an integer, got bool", dict(layer_idx=np.bool_(True))),
        (TypeError, "layer_idx must be an integer, got float32", dict(layer_idx=jnp.float32(1))),
        (ValueError, "layer_idx must be one integer, got shape (2,)", dict(layer_idx=array)),
        (ValueError, "layer_idx must be from 0 to num_layers=4, got -1", dict(layer_idx=np.int8(-1))),
        (ValueError, "layer_idx must be from 0 to num_layers=4, got 5", dict(layer_idx=jnp.asarray(5))),
        (ValueError, "layer_idx must be from 0 to num_layers - 1=3, got 4", dict(layer_idx=4, slopes="minimax")),
        (TypeError, "num_layers must be an integer, known while tracing, got True", dict(num_layers=True)),
        (TypeError, "num_layers must be an integer, known while tracing, got 4.0", dict(num_layers=4.0)),
        (TypeError, "num_layers must be an integer, known while tracing, got '4'", dict(num_layers="4")),
        (TypeError, "num_layers must be an integer, known while tracing, got None", dict(num_layers=None)),
        (TypeError, f"num_layers must be an integer, known while tracing, got {array!r}", dict(num_layers=array)),
        (ValueError, "slopes must be 'fla' or 'minimax', got 'alibi'", dict(slopes="alibi")),
        (ValueError, "slopes must be 'fla' or 'minimax', got None", dict(slopes=None)),
    ]
    for error, text, arguments in wrong:
        with pytest.raises(error) as caught:
            glax.lightning_attention(**GOOD | dict(layer_idx=1, num_layers=4) | arguments)
        assert str(caught.value) == text
    with pytest.raises(TypeError, match="layer_idx must be an integer, got float"):
        jax.eval_shape(lambda i: glax.lightning_attention(**GOOD, layer_idx=i, num_layers=4), 1.0)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "query must be an array, got NoneType", dict(query=None)),
        (TypeError, "gk must be an array, got list", dict(gk=[[[[0.0]]]])),
        (TypeError, "key must be floating point, got int32", dict(key=ones(2, 12, 4, 8, dtype=jnp.int32))),
        (ValueError, "query must be [B, T, Hq, K], got shape (12, 4, 8)", dict(query=ones(12, 4, 8))),
        (ValueError, "gk must be [B, T, H, K], got shape (2, 12, 4)", dict(gk=ones(2, 12, 4))),
        (ValueError, "key must be [B, T, Hk, K] with T=12 as in query, got shape (2, 13, 2, 8)", dict(key=ones(2, 13, 2, 8))),
        (ValueError, "initial_state must be [N, H, K, V] or [H, K, V], got shape (8, 6)", dict(initial_state=ones(8, 6))),
        (TypeError, "scale must be a number, got str", dict(scale="1")),
        (TypeError, "scale must be a real number, got complex64", dict(scale=jnp.complex64(1))),
        (ValueError, "scale must be finite in float32, the dtype of sums, got nan", dict(scale=jnp.float32(jnp.nan))),
        (TypeError, "chunk_size must be an integer, known while tracing, got 4.0", dict(chunk_size=4.0)),
        (TypeError, "chunk_size must be an integer, known while tracing, got True", dict(chunk_size=True)),
        (TypeError, "dtype must be float32, bfloat16, float16, float64 or None, got 'no'", dict(dtype="no")),
        (TypeError, f"dtype must be float32, bfloat16, float16, float64 or None, got {jnp.int32!r}", dict(dtype=jnp.int32)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_bad_calls_of_easydel(error, text, arguments):
    with pytest.raises(error) as caught:
        easydel.recurrent_gla(**GOOD | dict(gk=ones(2, 12, 4, 8)) | arguments)
    assert str(caught.value) == text


def test_detect_platform():
    with pytest.raises(
        TypeError, match=r"fn must be a function, got 'recurrent'; glax.compat.ejkernel.detect_platform"
    ):
        glax.detect_platform("recurrent")
    with pytest.raises(ValueError, match=r"fn must make a call of glax, got .*, which makes none"):
        glax.detect_platform(lambda: jnp.ones(3))
    assert glax.detect_platform(lambda: glax.recurrent(**GOOD)) == glax.detect_platform(glax.recurrent, *GOOD.values())


def test_executors_take_numpy_arrays():
    """NumPy's are float64 by default, float32 in JAX: not a warning a call, and the key of what JAX makes of them."""
    arrays = {name: np.ones(x.shape) for name, x in GOOD.items()}
    run = glax.Executor()
    np.testing.assert_array_equal(run(glax.RecurrentAttention(), **arrays), glax.recurrent(**GOOD).output)
    (decision, *_) = glax.explain(lambda: run(glax.RecurrentAttention(), **arrays))
    assert "float32" in decision.invocation.key


def test_executors():
    with pytest.raises(
        TypeError, match=r"kernel must be a Kernel or a KernelSpec, such as RecurrentAttention.., got <class"
    ):
        glax.Executor()(glax.RecurrentAttention, *GOOD.values())
    with pytest.raises(TypeError, match="chain must be a ConfigSelectorChain, got 'heuristics'"):
        glax.Executor("heuristics")
    with pytest.raises(TypeError, match="cfg and _cfg are two names of one option"):
        glax.Executor()(glax.RecurrentAttention(), *GOOD.values(), cfg=ChunkedConfig(), _cfg=ChunkedConfig())
    for arguments in (dict(query=None), dict(key=[1.0])):
        with pytest.raises(TypeError, match=f"^{next(iter(arguments))} must be an array, got "):
            glax.Executor()(glax.RecurrentAttention(), **GOOD | arguments)


def test_an_executor_runs_an_operation_that_stores_states():
    arrays = {name: jnp.ones((1, 130, *x.shape[2:])) for name, x in GOOD.items()}
    options = dict(states_every=64, states_dtype=jnp.bfloat16)
    got = glax.Executor()(glax.RecurrentAttention(), **arrays, **options)
    want = glax.recurrent(**arrays, **options)
    assert got.states.dtype == jnp.bfloat16 and got.states.shape == (1, 2, 4, 8, 6)
    jax.tree.map(np.testing.assert_array_equal, tuple(got), tuple(want))
    with pytest.raises(TypeError, match=r"recurrent_attention\(\) got an unexpected keyword argument 'bonus'"):
        glax.Executor()(glax.RecurrentAttention(), **GOOD, bonus=ones(4, 8))


def test_variants():
    with pytest.raises(ValueError) as caught:
        glax.simple_gla(**GOOD, g=ones(2, 12, 4, 8))
    assert str(caught.value) == "g must be [B, T, H] in simple_gla, one gate per head, got shape (2, 12, 4, 8)"
    with pytest.raises(ValueError, match="layer_idx must be from 0 to num_layers=4, got 5"):
        glax.lightning_attention(**GOOD, layer_idx=5, num_layers=4)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        glax.lightning_attention(**GOOD, layer_idx=0, num_layers=0)
    with pytest.raises(ValueError, match="chunk_size must be 0 or more, got -1"):
        easydel.recurrent_gla(**GOOD, gk=ones(2, 12, 4, 8), chunk_size=-1)


STEP = dict(query=ones(3, 4, 8), key=ones(3, 2, 8), value=ones(3, 2, 6), state=ones(5, 4, 8, 6))


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "query must be [B, Hq, K], got shape (3, 1, 4, 8)", dict(query=ones(3, 1, 4, 8))),
        (
            ValueError,
            "key must be [B, Hk, K] with B=3 as in query, got shape (2, 2, 8)",
            dict(key=ones(2, 2, 8)),
        ),
        (
            ValueError,
            "beta must be [B, H] with H=4 as many as query has heads, got shape (3, 2)",
            dict(beta=ones(3, 2)),
        ),
        (
            ValueError,
            "gv must be [B, H, V] with V=6 as in value, got shape (3, 4, 8)",
            dict(gv=ones(3, 4, 8)),
        ),
        (ValueError, "write must be [B, H, V], got shape (3, 4)", dict(erase=ones(3, 4, 8), write=ones(3, 4))),
        (
            ValueError,
            "state must be [B, H, K, V], or [P, H, K, V] with slots, got shape (4, 8, 6)",
            dict(state=ones(4, 8, 6)),
        ),
        (ValueError, "g must be [B, H] or [B, H, K], got shape (4,)", dict(g=ones(4))),
        (ValueError, "slots must be [B] with B=3 as in query, got shape (2,)", dict(slots=cuts(0, 1))),
        (ValueError, "slots must be from -1 to 4, the last row of state, got 5", dict(slots=cuts(0, 5, 1))),
        (ValueError, "slots must not repeat, got 2 more than once", dict(slots=cuts(2, 2, 1))),
        (TypeError, "slots must hold integers, got float32", dict(slots=ones(3))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_steps(error, text, arguments):
    with pytest.raises(error) as caught:
        glax.recurrent_step(**STEP | arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_known_boundaries_of_any_integer_dtype(dtype):
    flat = dict(query=ones(300, 4, 8), key=ones(300, 4, 8), value=ones(300, 4, 8))
    most = np.iinfo(dtype).max
    for cuts, text in (
        ([0, 7, 5, 12], "cu_seqlens must not decrease, got 7 before 5 at position 2"),
        ([0, most, 0, 12], f"cu_seqlens must not decrease, got {most} before 0 at position 2"),
        ([1, 12], "cu_seqlens must begin with 0, got 1"),
    ):
        with pytest.raises(ValueError) as caught:
            glax.recurrent(**flat, cu_seqlens=np.array(cuts, dtype))
        assert str(caught.value) == text
    if most > 300:
        with pytest.raises(ValueError, match=f"cu_seqlens must not pass T=300 as in query, got {most} at its end"):
            glax.recurrent(**flat, cu_seqlens=np.array([0, most], dtype))
    least = np.iinfo(dtype).min
    if least < 0:
        with pytest.raises(ValueError, match=f"cu_seqlens must not decrease, got 100 before {least} at position 2"):
            glax.recurrent(**flat, cu_seqlens=np.array([0, 100, least, 3], dtype))


# ---- nonsense, for every argument of every function --------------------------------------------------------------------

TOKEN = {name: x[:, 0] for name, x in GOOD.items()}
STATES, GATE = ones(2, 4, 8, 6), -ones(2, 12, 4, 8)
OPTIONS = dict(softmax_scale=1.0, initial_state=STATES, reverse=False, cu_seqlens=None, platform=None, cfg=None)
POOLED = dict(softmax_scale=1.0, slots=jnp.arange(2), platform=None, cfg=None)
GATES = dict(g=GATE, g_gamma=-ones(4), gk=GATE, gv=-ones(2, 12, 4, 6))
OPERATION = GOOD | OPTIONS | dict(return_state=False)
FUNCTIONS = dict(
    recurrent=(glax.recurrent, GOOD | GATES | OPTIONS),
    recurrent_attention=(glax.recurrent_attention, OPERATION),
    recurrent_gla=(glax.recurrent_gla, GOOD | dict(g=GATE, g_gamma=-ones(4)) | OPTIONS),
    simple_gla=(glax.simple_gla, GOOD | dict(g=GATE[..., 0]) | OPTIONS),
    retention=(glax.retention, GOOD | OPTIONS),
    lightning_attention=(glax.lightning_attention, GOOD | OPTIONS | dict(layer_idx=1, num_layers=4, slopes="fla")),
    recurrent_step=(glax.recurrent_step, TOKEN | POOLED | dict(state=STATES, g=GATE[:, 0])),
    prefill_into=(glax.prefill_into, GOOD | POOLED | dict(pool=STATES, fresh=jnp.zeros(2, bool))),
    recurrent_verify=(glax.recurrent_verify, GOOD | POOLED | dict(state=STATES)),
    parallel=(functools.partial(glax.parallel.recurrent_attention, mesh=jax.make_mesh((1,), ("data",))), OPERATION),
    executor=(functools.partial(glax.Executor(), glax.RecurrentAttention()), OPERATION),
    easydel=(
        easydel.recurrent_gla,
        GOOD | dict(gk=GATE, scale=1.0, initial_state=STATES, chunk_size=0, output_final_state=True),
    ),
    ejkernel=(ejkernel.recurrent, GOOD | GATES | OPTIONS),
    ejkernel_layer=(ejkernel.lightning_attn, GOOD | OPTIONS | dict(layer_idx=1, num_layers=4)),
    ejkernel_operation=(ejkernel.RecurrentAttention().run, OPERATION),
    ejkernel_executor=(functools.partial(glax.Executor(), ejkernel.RecurrentAttention()), OPERATION),
)
NONSENSE = ["no", b"no", 1j, [1.0], {}, (), object(), Ellipsis, slice(3), len, jnp.float32, float("nan"), -(10**400),
            np.array([None]), np.array(["no"]), np.complex64(1), jnp.full(7, 1j), jnp.nan * ones(), jax.random.key(0)]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nonsense_is_an_error_that_names_its_argument(name):
    call, good = FUNCTIONS[name]
    jax.eval_shape(lambda: call(**good))
    for argument in good:
        wrong = NONSENSE + [None] * (argument in (*GOOD, "state", "pool", "layer_idx", "num_layers", "reverse"))
        for x in wrong:
            with pytest.raises((TypeError, ValueError)) as caught:
                call(**good | {argument: x})
            assert str(caught.value).startswith(argument), f"{argument}={x!r}: {caught.value}"


def test_errors_are_raised_while_tracing_too():
    with pytest.raises(ValueError, match="key must be"):
        jax.eval_shape(glax.recurrent, GOOD["query"], ones(2, 3, 2, 8), GOOD["value"])


def test_every_config_has_a_public_name():
    classes = {getattr(glax.configs, name) for name in glax.configs.__all__}
    kernels = glax.kernel_registry.kernels.values()
    assert classes == {spec.config for spec in kernels if spec.config is not glax.Config}
    assert set(glax.configs.__all__) <= set(dir(glax.configs))
    assert glax.configs.ChunkedConfig is glax.kernel_registry.kernels["chunked/xla/any"].config
    assert all(getattr(glax.configs, name).__name__ == name for name in glax.configs.__all__)
    with pytest.raises(AttributeError, match=r"'glax\.configs' has no attribute 'QuadraticConfig', only ChunkedConfig"):
        glax.configs.QuadraticConfig  # noqa: B018

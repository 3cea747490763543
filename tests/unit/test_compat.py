"""Other packages' functions on glax."""

import dataclasses
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.tuning.executor import decisions
from glax.compat import easydel, ejkernel
from tests.cases import Case, inputs
from tests.close import assert_close

CASE = Case("", B=2, T=37, K=6, V=5)


@pytest.mark.parametrize("chunk_size", [0, 8, 37, 100])
def test_easydel_recurrent_gla(chunk_size):
    a = inputs(CASE, "log-sigmoid")
    whole = glax.recurrent_gla(a["query"], a["key"], a["value"], a["gk"], initial_state=a["initial_state"])
    output, state = easydel.recurrent_gla(**a, chunk_size=chunk_size, output_final_state=True)
    assert_close("output", output, whole.output, 2e-6)
    assert_close("state", state, whole.final_state, 2e-6)


def test_easydel_defaults():
    a = inputs(CASE, "log-sigmoid")
    a = {name: x.astype(jnp.bfloat16) for name, x in a.items()}
    output, state = easydel.recurrent_gla(**a, scale=2.0)
    assert state is None
    assert output.dtype == jnp.float32
    default, _ = easydel.recurrent_gla(**a)
    np.testing.assert_allclose(output, default * 2 * 6**0.5, rtol=1e-5, atol=1e-5)
    assert easydel.recurrent_gla(**a, dtype=jnp.bfloat16)[0].dtype == jnp.bfloat16
    usual = [-1.0, -1, np.float64(-1.0), np.asarray(-1.0), jnp.float32(-1.0), jnp.bfloat16(-1.0), jnp.asarray(-1)]
    for meant in usual:  # however it arrives
        assert_close(repr(meant), easydel.recurrent_gla(**a, scale=meant)[0], default, 1e-6)
    run = jax.jit(lambda scale: easydel.recurrent_gla(**a, scale=scale)[0])
    assert_close("traced -1.0", run(jnp.float32(-1.0)), default, 1e-6)
    assert_close("traced 2.0", run(jnp.float32(2.0)), output, 1e-6)
    assert_close("-2.0", easydel.recurrent_gla(**a, scale=jnp.float32(-2.0))[0], -output, 1e-6)
    empty = easydel.recurrent_gla(*(a[name][:, :0] for name in ("query", "key", "value", "gk")), chunk_size=4)[0]
    assert empty.shape == (2, 0, 2, 5)


# ---- ejkernel --------------------------------------------------------------------------------------------------------

DOCUMENTED = dict(block_q=64, block_k=64, block_d=64, num_warps=4, num_stages=1, platform="auto", backend="any")
PACKED = Case("", T=40, heads=(2, 2, 2), gates=("g_gamma", "gk"), K=6, V=5, cuts=(0, 9, 9, 33, 37))


@pytest.fixture
def packed():
    a = {name: jnp.nan_to_num(x) for name, x in inputs(PACKED, "log-sigmoid").items()}
    return a | dict(g_gamma=a["g_gamma"][0], cu_seqlens=jnp.asarray(PACKED.cuts))


@pytest.mark.fast
def test_ejkernel_config_is_as_documented():
    config = ejkernel.RecurrentAttentionConfig(**DOCUMENTED)
    assert config == ejkernel.RecurrentAttentionConfig()
    order = ["platform", "backend", "block_q", "block_k", "block_d", "num_warps", "num_stages"]
    assert [field.name for field in dataclasses.fields(config)] == order
    assert ejkernel.RecurrentAttentionConfig("xla", "cpu", 32, 16, 16, 8, 2).block_q == 32
    for platform in ("triton", "pallas", "cuda", "cute", "tilelang", "xla", "auto", "cpp"):
        assert ejkernel.RecurrentAttentionConfig(platform=platform).platform == platform
    for field, wrong in (("platform", "tpu"), ("platform", 3), ("backend", "mps"), ("block_q", 0)):
        with pytest.raises(ValueError, match=f"{field} must be .*, got {wrong!r}"):
            ejkernel.RecurrentAttentionConfig(**{field: wrong})
    with pytest.raises(TypeError, match="block_q must be an integer"):
        ejkernel.RecurrentAttentionConfig(block_q=64.0)


@pytest.mark.fast
def test_ejkernel_says_once_what_it_ignores(packed):
    ejkernel.say_ignored.cache_clear()
    run = ejkernel.RecurrentAttention().run
    arrays = {name: packed[name] for name in ("query", "key", "value")}
    with pytest.warns(UserWarning, match="glax ignores block_k, block_d, block_v, num_warps and num_stages"):
        wide = run(**arrays, cfg=ejkernel.RecurrentAttentionConfig(num_warps=8, platform="xla"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = run(**arrays, cfg=ejkernel.RecurrentAttentionConfig(block_k=128, platform="xla"))
        tiles = ejkernel.recurrent(
            *arrays.values(), None, None, None, None, None, None, False, None, 32, 32, 8, 2
        ).output
    want = glax.recurrent(**arrays, platform="xla").output
    for got in (wide, again, tiles):
        assert_close("output", got, want, 2e-6)
    ejkernel.say_ignored.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is lost of a default
        run(**arrays, cfg=ejkernel.RecurrentAttentionConfig(**DOCUMENTED))


@pytest.mark.fast
def test_ejkernel_operation_runs_in_its_order(packed):
    order = "query key value g g_gamma gk gv softmax_scale initial_state reverse cu_seqlens return_state platform cfg"
    operation, config = ejkernel.RecurrentAttention(), ejkernel.RecurrentAttentionConfig(**DOCUMENTED)
    assert list(inspect.signature(operation.run).parameters) == order.split()
    assert operation.op_id == "recurrent"
    want = glax.recurrent(**packed, softmax_scale=0.3, reverse=True)
    states, gamma = packed["initial_state"][None], packed["g_gamma"][None]
    q, k, v, gk, cuts = (packed[name] for name in ("query", "key", "value", "gk", "cu_seqlens"))
    arguments = (q, k, v, None, gamma, gk, None, 0.3, states, True, cuts)
    run = glax.Executor()
    for output, state in (
        operation.run(*arguments, True, None, cfg=config),
        operation.get_impl(config)(*arguments),
        run(operation, *arguments, True, _cfg=config),
        run(operation, *arguments, return_state=True),
        ejkernel.recurrent_attention(
            *arguments[:7], states, cuts, softmax_scale=0.3, reverse=True, return_state=True, cfg=config
        ),
    ):
        assert_close("output", output, want.output, 2e-6)
        assert state.shape == (1, *want.final_state.shape)
        assert_close("state", state[0], want.final_state, 2e-6)
    for output in (operation.run(*arguments, cfg=config), run(operation, *arguments, cfg=config)):
        assert_close("output alone", output, want.output, 2e-6)
    (decision, *_) = decisions(lambda *a: run(operation, *a[:9], True, a[-1]), *arguments[:9], cuts)
    assert (decision.kernel, decision.config, decision.selector) == ("recurrent", config, "heuristic")
    with pytest.raises(TypeError, match="return_state must be True or False"):
        operation.run(*arguments, "no", cfg=config)


def test_ejkernel_platforms(packed):
    """Any platform in a config: those that run here run, the others raise what is a ValueError, too."""
    available = {str(spec.platform) for spec in glax.kernel_registry.kernels.values() if spec.backend in ("cpu", "any")}
    want = glax.recurrent(**packed).output
    operation = ejkernel.RecurrentAttention()
    for platform in ("xla", "cpp", "triton", "pallas", "cuda", "cute"):
        config = ejkernel.RecurrentAttentionConfig(platform=platform)
        calls = [
            lambda config=config: ejkernel.recurrent_attention(**packed, cfg=config),
            lambda config=config: operation.run(**packed, cfg=config),
            lambda config=config: glax.Executor()(operation, **packed, _cfg=config),
            lambda config=config: operation.get_impl(config)(**packed).output,
        ]
        for call in calls:
            if platform in available:
                assert_close(platform, call(), want, 2e-6)
            else:
                with pytest.raises(ValueError) as caught:
                    call()
                assert isinstance(caught.value, glax.UnsupportedError) or platform == "cute"
    assert "xla" in available
    with pytest.raises(ejkernel.UnsupportedError, match="needs a gpu, JAX computes on cpu here"):
        glax.Executor(glax.ConfigSelectorChain(policy=glax.AutotunePolicy(cache_miss_fallback="error")))(
            operation, **packed, platform="triton"
        )


@pytest.mark.fast
def test_ejkernel_registry(packed):
    get = ejkernel.kernel_registry.get
    assert ejkernel.kernel_registry.kernels is glax.kernel_registry.kernels
    want = glax.recurrent(**packed, platform="xla")
    for backend in (None, "any", "cpu"):
        output, state = get("Recurrent", platform="xla", backend=backend)(**packed)
        np.testing.assert_array_equal(output, want.output)
        np.testing.assert_array_equal(state, want.final_state)
    q, k, v = (packed[name] for name in ("query", "key", "value"))
    layer = glax.lightning_attention(q, k, v, 3, 12, softmax_scale=0.5)
    for got in (get("lightning_attn")(q, k, v, 3, 12, 0.5), ejkernel.lightning_attn(q, k, v, jnp.asarray(3), 12, 0.5)):
        assert_close("output", got[0], layer.output, 1e-6)
        assert_close("state", got[1], layer.final_state, 1e-6)
    gla = get("gla", "xla", "any")(q, k, v, packed["gk"])
    assert_close("gla", gla[0], glax.recurrent_gla(q, k, v, packed["gk"]).output, 1e-6)
    for error, text, arguments in (
        (
            ValueError,
            "algorithm must be 'recurrent' or 'lightning_attn' or 'gla', got 'flash'",
            dict(algorithm="flash"),
        ),
        (ValueError, "algorithm must be 'recurrent' or 'lightning_attn' or 'gla', got None", dict(algorithm=None)),
        (ejkernel.UnsupportedError, "no kernel of 'recurrent' on platform 'triton'", dict(platform="triton")),
        (ejkernel.UnsupportedError, "no kernel of 'recurrent' on platform 'cuda'", dict(platform="cuda")),
        (ValueError, "platform must be None, 'auto', 'xla'", dict(platform="cute")),
        (ValueError, "backend must be None or 'cpu' or 'gpu' or 'tpu' or 'any', got 'mps'", dict(backend="mps")),
    ):
        with pytest.raises(error, match=text) as caught:
            get(**dict(algorithm="recurrent") | arguments)
        assert isinstance(caught.value, ValueError)


@pytest.mark.fast
def test_ejkernel_detect_platform():
    for name in ("recurrent", "lightning_attn", "gla"):
        assert ejkernel.detect_platform(name) == ejkernel.detect_platform(name, "auto") == glax.detect_platform()
        assert ejkernel.detect_platform(name, "triton") == "triton"
    with pytest.raises(ValueError, match="algorithm must be 'recurrent'"):
        ejkernel.detect_platform("flash_attention")
    with pytest.raises(ValueError, match="platform must be None"):
        ejkernel.detect_platform("recurrent", "cute")


def test_ejkernel_states(packed):
    """[1, N, H, K, V] only where sequences are packed; a gradient passes through it, and through g_gamma [1, H]."""
    for wrong in (dict(cu_seqlens=None), dict(initial_state=jnp.stack([packed["initial_state"]] * 2))):
        with pytest.raises(
            ValueError, match=r"initial_state must be \[1, N, H, K, V\] with cu_seqlens, or \[N, H, K, V\], got"
        ):
            ejkernel.recurrent(**packed | dict(initial_state=packed["initial_state"][None]) | wrong)

    def loss(gamma, state):
        arguments = packed | dict(g_gamma=gamma, initial_state=state)
        return sum((x**2).sum() for x in ejkernel.recurrent(**arguments))

    gamma, state = packed["g_gamma"], packed["initial_state"]
    want = jax.grad(loss, (0, 1))(gamma, state)
    got = jax.grad(loss, (0, 1))(gamma[None], state[None])
    for x, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(x[0], w)

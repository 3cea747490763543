"""Choosing configs: the order, overlays, policies, tuning from inside transformations, what disqualifies a candidate."""

import functools
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import glax
from glax._src.core import known_miscompiles
from glax._src.kernels import load_kernels
from glax._src.kernels.cpu.library import missing
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax._src.tuning.cache import Measurement
from glax._src.tuning.executor import decisions
from tests.cumulative import BlockConfig, Cumulative

load_kernels()
CHUNKED = "chunked/xla/any"
Q = jax.random.normal(jax.random.key(0), (4, 50, 2, 8))


def executor(tmp_path=None, **policy):
    return glax.Executor(
        glax.ConfigSelectorChain(
            cache=glax.ConfigCache(),
            policy=glax.AutotunePolicy(**policy),
            tuner=glax.Tuner(warmup=1, iters=2),
            persistent=None if tmp_path is None else glax.PersistentCache("recurrent", folder=tmp_path),
        )
    )


X = jnp.arange(12.0).reshape(6, 2)


def chosen(run, kernel, *args, **kwargs):
    """(config, selector) of one call."""
    (decision,) = decisions(functools.partial(run, kernel, **kwargs), *args)
    return decision.config, decision.selector


def test_the_order(tmp_path):
    """override > overlay > memory > disk > shipped > autotune > heuristic, each found when those above it are silent."""
    kernel = Cumulative()
    inv = glax.Invocation.of(kernel, (X,), {})
    run = executor(tmp_path / "user", cache_miss_fallback="heuristics")
    assert chosen(run, kernel, X) == (BlockConfig(16), "heuristic")
    with glax.overlay(policy=glax.AutotunePolicy(cache_miss_fallback="autotune")):
        assert chosen(run, kernel, X)[1] == "autotune"
        assert chosen(run, kernel, X)[1] == "memory"
        run.chain.cache.clear()
        assert chosen(run, kernel, X)[1] == "disk"
    for path in (tmp_path / "user").rglob("*.json"):
        path.unlink()
    run.chain.cache.clear()
    run.chain.shipped = glax.PersistentCache("tuned", folder=tmp_path / "shipped")
    run.chain.shipped.put(inv, Measurement(BlockConfig(7), 1.0))
    assert chosen(run, kernel, X) == (BlockConfig(7), "shipped")
    run.chain.cache.put(inv, BlockConfig(9))
    assert chosen(run, kernel, X) == (BlockConfig(9), "memory")
    with glax.overlay({"cumulative": BlockConfig(10)}):
        assert chosen(run, kernel, X) == (BlockConfig(10), "overlay")
        with glax.overlay({"cumulative": BlockConfig(11)}):
            assert chosen(run, kernel, X) == (BlockConfig(11), "overlay")
            assert chosen(run, kernel, X, cfg=BlockConfig(12)) == (BlockConfig(12), "override")
        assert chosen(run, kernel, X) == (BlockConfig(10), "overlay")
    assert chosen(run, kernel, X) == (BlockConfig(9), "memory")


def test_neither_overrides_nor_guesses_are_kept(tmp_path):
    run, kernel = executor(tmp_path), Cumulative()
    run(kernel, X, cfg=BlockConfig(2))
    run(kernel, X)
    with glax.overlay({"cumulative": BlockConfig(10)}):
        run(kernel, X)
    assert run.chain.cache.configs == {}
    assert not list(tmp_path.rglob("*.json"))


def test_policies():
    kernel = Cumulative()
    with pytest.raises(LookupError, match="no measured config of cumulative"):
        executor(cache_miss_fallback="error")(kernel, X)
    forbidden = executor(cache_miss_fallback="autotune", allow_autotune=False)
    assert chosen(forbidden, kernel, X)[1] == "heuristic"
    with pytest.raises(
        ValueError, match="cache_miss_fallback must be 'heuristics', 'autotune' or 'error', got 'guess'"
    ):
        glax.AutotunePolicy(cache_miss_fallback="guess")


def test_an_overlay_knows_the_kernels_of_softmax_attention():
    from glax._src.kernels.triton.softmax_config import SoftmaxConfig
    from glax._src.solve import softmax

    with glax.overlay({softmax.TRITON.op_id: SoftmaxConfig()}):
        pass
    with pytest.raises(ValueError, match=r"got 'softmax/triton/gp', which is none: name softmax/triton/gpu"):
        glax.overlay({"softmax/triton/gp": SoftmaxConfig()}).__enter__()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: glax.Tuner(iters=0), "iters must be an int of at least 1, got 0"),
        (lambda: glax.Tuner(iters=True), "iters must be an int of at least 1, got True"),
        (lambda: glax.Tuner(warmup=-1), "warmup must be an int of at least 0, got -1"),
        (lambda: glax.Tuner(warmup=1.5), "warmup must be an int of at least 0, got 1.5"),
        (lambda: glax.AutotunePolicy(allow_autotune="no"), "allow_autotune must be True or False, got 'no'"),
        (lambda: glax.AutotunePolicy(validate_backward=None), "validate_backward must be True or False, got None"),
        (lambda: glax.AutotunePolicy(cache_miss_fallback=[]), "cache_miss_fallback must be .* got \\[\\]"),
        (
            lambda: glax.overlay({"chunkd/xla/any": ChunkedConfig(16)}).__enter__(),
            "got 'chunkd/xla/any'.*chunked/xla/any",
        ),
        (lambda: glax.overlay({"cumulativ": 1}).__enter__(), "got 'cumulativ', which is none: name .*cumulative"),
        (
            lambda: glax.overlay({CHUNKED: 16}).__enter__(),
            "chunked/xla/any takes a ChunkedConfig, the overlay gives it 16",
        ),
        (
            lambda: glax.overlay(policy="autotune").__enter__(),
            "policy must be an AutotunePolicy or None, got 'autotune'",
        ),
        (lambda: glax.overlay([CHUNKED]).__enter__(), "configs must be a dict"),
    ],
)
def test_nonsense_is_refused_where_it_is_said(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        wrong()


def test_the_default_policy_measures_nothing():
    run, kernel = executor(), Cumulative()
    np.testing.assert_array_equal(run(kernel, X, negate=True), -jnp.cumsum(X, axis=0))
    assert kernel.runs == [(16, False)]


@pytest.mark.parametrize(
    ("name", "selector"), [("autotune", "autotune"), ("error", "LookupError"), ("none", "ValueError")]
)
def test_environment(name, selector, tmp_path):
    code = """
import glax, jax.numpy as jnp
try:
    print(glax.explain(glax.recurrent, *[jnp.ones((1, 40, 1, 4))] * 3)[0].selector)
except LookupError:
    print("LookupError")
"""
    environment = dict(
        GLAX_AUTOTUNE=name, GLAX_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="cpu", PATH="", PYTHONPATH=":".join(sys.path)
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert selector in (done.stdout if selector != "ValueError" else done.stderr)


# ---- tuning ----------------------------------------------------------------------------------------------------------


def transformations():
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("b")
    x = jnp.arange(24.0).reshape(4, 6)
    return {
        "eager": lambda f: jnp.stack([f(row) for row in x]),
        "jit": lambda f: jax.jit(lambda x: jnp.stack([f(row) for row in x]))(x),
        "vmap": lambda f: jax.vmap(f)(x),
        "grad": lambda f: jax.grad(lambda x: jnp.stack([f(row) ** 2 / 2 for row in x]).sum())(x),
        "scan": lambda f: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x)[1],
        "shard_map": lambda f: jax.jit(
            jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
        )(x),
    }


@pytest.mark.parametrize("name", list(transformations()))
def test_tuning_inside_transformations_measures_real_arrays(name, tmp_path):
    """The tuner's own calls see no tracer of the caller's: its candidates are compiled once each, and timed compiled."""
    run, kernel = executor(tmp_path, cache_miss_fallback="autotune"), Cumulative((8, 16))
    result = transformations()[name](functools.partial(run, kernel))
    assert np.isfinite(result).all()
    ((_, _, key),) = run.chain.cache.configs
    assert key == "0.0=float32[6]"
    (path,) = tmp_path.rglob("*.json")
    (entry,) = glax.PersistentCache("recurrent", folder=tmp_path).read(path)["entries"].values()
    assert all(0 < ms < 1e3 for ms in entry["candidates"].values())
    assert len(entry["candidates"]) == 2


def test_a_candidate_that_fails_or_is_wrong_is_recorded_and_passed_over():
    kernel = Cumulative((3, 4, 5, 8, 16))
    measurement = glax.Tuner(warmup=1, iters=2).tune(glax.Invocation.of(kernel, (X,), {}))
    notes = measurement.candidates
    assert notes["BlockConfig(block=3)"] == "NotImplementedError: 3 does not divide"
    assert notes["BlockConfig(block=4)"].startswith("CandidateError: wrong: off by 1.0e-02")
    assert notes["BlockConfig(block=5)"].startswith("CandidateError: wrong: off by 1.0e+00")
    assert measurement.config in (BlockConfig(8), BlockConfig(16))
    unchecked = glax.Tuner(warmup=0, iters=1).tune(glax.Invocation.of(kernel, (X,), {}), validate_backward=False)
    assert isinstance(unchecked.candidates["BlockConfig(block=5)"], float)


def test_no_usable_candidate_is_one_error_with_every_reason():
    with pytest.raises(ExceptionGroup, match="no candidate of cumulative") as caught:
        glax.Tuner(warmup=0, iters=1).tune(glax.Invocation.of(Cumulative((3, 4)), (X,), {}))
    assert len(caught.value.exceptions) == 2


def test_results_that_differ_from_run_to_run_disqualify():
    class Unsteady(Cumulative):
        op_id = "unsteady"
        calls = 0

        def run(self, x, *, cfg):
            def noisy(x):
                type(self).calls += 1
                return np.asarray(x) * np.float32(1 + 1e-6 * (type(self).calls % 2))

            return jax.pure_callback(noisy, x, x) if cfg.block == 8 else jnp.asarray(x)

    inv = glax.Invocation.of(Unsteady((8, 16)), (X,), {})
    measurement = glax.Tuner(warmup=0, iters=1).tune(inv, validate_backward=False)
    assert measurement.candidates["BlockConfig(block=8)"] == "CandidateError: two runs on the same input differ"
    assert measurement.config == BlockConfig(16)


def test_the_deny_list(monkeypatch):
    here = jax.local_devices()[0].device_kind.lower()
    common = dict(device=here, library="jaxlib", first="0.1", fixed="99", reason="known to be wrong")
    monkeypatch.setattr(
        known_miscompiles, "DENIED", [known_miscompiles.Denial(kernel="cumulative", config=(("block", 8),), **common)]
    )
    measurement = glax.Tuner(warmup=0, iters=1).tune(glax.Invocation.of(Cumulative((8, 16)), (X,), {}))
    assert measurement.candidates["BlockConfig(block=8)"] == "CandidateError: known to be wrong"
    monkeypatch.setattr(known_miscompiles, "DENIED", [known_miscompiles.Denial(kernel="chunked/xla/*", **common)])
    with pytest.raises(glax.UnsupportedError, match="chunked/xla/any: known to be wrong"):
        glax.recurrent(Q, Q, Q, cfg=ChunkedConfig(17))
    for first, fixed in (("99", "100"), ("0.1", "0.2")):
        monkeypatch.setattr(
            known_miscompiles,
            "DENIED",
            [known_miscompiles.Denial(kernel="*", **common | dict(first=first, fixed=fixed))],
        )
        assert known_miscompiles.known_miscompile("chunked/xla/any") is None


class Device:
    def __init__(self, kind: str):
        self.device_kind = kind


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H800", "NVIDIA H20"]
)
def test_triton_that_miscompiles_is_refused_on_hopper(kind, monkeypatch):
    def reason(version, kind):
        monkeypatch.setattr(known_miscompiles, "version_of", lambda library: version)
        monkeypatch.setattr(jax, "local_devices", lambda: [Device(kind)])
        return known_miscompiles.known_miscompile("chunked/triton/gpu")

    for version in ("3.4.0", "3.6.0", "3.7.0+cu12"):
        assert "install triton>=3.7.1" in reason(version, kind)
    for version, other in (("3.7.1", kind), ("3.9.0", kind), ("3.6.0", "NVIDIA A100-SXM4-80GB"), (None, kind)):
        assert reason(version, other) is None


@pytest.mark.parametrize(
    ("jaxlib", "linker", "slowed"), [("0.12.0", "13.0.88", True), ("0.11.2", "13.0.88", False), ("0.12.0", None, False)]
)
def test_kernels_linked_by_nvjitlink_are_named_as_slower(monkeypatch, jaxlib, linker, slowed):
    versions = {"jaxlib": jaxlib, "nvidia-nvjitlink": linker}
    monkeypatch.setattr(known_miscompiles, "version_of", versions.get)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA H100 80GB HBM3")])
    assert (known_miscompiles.known_slowdown() is not None) == slowed


def test_examples_are_realistic():
    from glax._src.core.bind import bind
    from glax._src.tuning.op import example_of

    cuts = jnp.array([0, 0, 50])
    shapes = jax.eval_shape(lambda q: bind(q, q, q, gk=q, cu_seqlens=cuts), Q[:1])
    r = example_of(shapes)
    assert (r.decay.key < 0).all()
    assert r.decay.key.mean() < -0.3
    np.testing.assert_array_equal(r.boundaries, [0, 25, 50])
    np.testing.assert_allclose(r.scale, 8**-0.5)
    assert 0.5 < r.q.std() < 2


# ---- the library's own calls -----------------------------------------------------------------------------------------


def test_overlays_retrace_compiled_functions():
    traces = []

    @jax.jit
    def f(q):
        traces.append(None)
        return glax.recurrent(q, q, q, cfg=None, platform="xla").output

    long = jnp.tile(Q, (4, 1, 4, 4))  # so large that the chunked kernel is the choice
    f(long), f(long)
    with glax.overlay({CHUNKED: ChunkedConfig(25)}):
        assert "25,25]" in str(jax.make_jaxpr(f)(long)).replace(" ", "")
        f(long)
    f(long)
    assert "25,25]" not in str(jax.make_jaxpr(f)(long)).replace(" ", "")
    assert len(traces) == 2


def test_explain_names_kernels_configs_selectors_and_refusals():
    def loss(q):
        return glax.recurrent_gla(q, q, q, -jnp.abs(q), cfg=ChunkedConfig(16)).output.sum()

    explained = glax.explain(jax.grad(loss), Q)
    assert [(d.kernel, d.config, d.selector) for d in explained] == [
        (CHUNKED, ChunkedConfig(16), "override"),
        ("chunked.vjp/xla/any", ChunkedConfig(16), "override"),
    ]
    assert str(explained).splitlines()[:2] == [
        "chunked/xla/any: ChunkedConfig(chunk=16), by override",
        "  for B4 T64 Hq2 Hk2 Hv2 K8 V8 float32 key=float32",
    ]
    assert explained[0].outranked == {}
    assert explained[0].refused["recurrent/xla/any"] == "takes a Config, cfg is a ChunkedConfig"
    assert str(glax.explain(jnp.sin, Q)) == "no call of glax"
    shapes = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    fastest = "recurrent/xla/any" if missing() else "recurrent/cpp/cpu"
    usual = glax.explain(glax.recurrent, shapes, shapes, shapes)
    assert usual[0].kernel == fastest
    assert CHUNKED in usual[0].outranked and CHUNKED not in usual[0].refused
    assert f"  not {CHUNKED}: able, with a priority of 1; {fastest} has " in str(usual)
    assert glax.detect_platform() is glax.Platform(fastest.split("/")[1])


@pytest.mark.parametrize(
    "option", [dict(cfg=ChunkedConfig(16)), dict(cfg=glax.Config()), dict(platform="xla", reverse=True)]
)
def test_explain_takes_the_arguments_of_the_call(option):
    def call(q):
        return glax.recurrent(q, q, q, g_gamma=-jnp.ones(2), states_every=64, softmax_scale=0.5, **option)

    gamma = -jnp.ones(2)
    found = glax.explain(glax.recurrent, Q, Q, Q, g_gamma=gamma, states_every=64, softmax_scale=0.5, **option)
    assert [(d.kernel, d.config) for d in found] == [(d.kernel, d.config) for d in glax.explain(call, Q)]
    assert found[0].config == option.get("cfg", found[0].config)
    for function in (glax.explain, glax.tune):
        with pytest.raises(TypeError, match="fn must be a function, got 3"):
            function(3)


def test_what_no_kernel_can_run_is_explained():
    shapes = jax.ShapeDtypeStruct((1, 65, 2, 8), jnp.float64)

    def two_calls(q):
        return glax.recurrent(q, q, q, platform="xla").output + glax.recurrent(q, q, q, platform="triton").output

    explained = glax.explain(two_calls, shapes)
    assert [decision.kernel.split("/")[1] for decision in explained] == ["xla"]
    assert explained.unsupported is not None and "chunked/triton/gpu: " in explained.unsupported
    assert str(explained).endswith(explained.unsupported)
    with pytest.raises(glax.UnsupportedError, match="chunked/triton/gpu: "):
        glax.detect_platform(two_calls, shapes)


def test_the_choice_of_kernels_is_logged_once_a_trace(caplog):
    q = jnp.ones((1, 65, 2, 8))
    forward = jax.jit(lambda q: glax.recurrent(q, q, q, platform="xla").output)
    gradient = jax.jit(jax.grad(lambda q: glax.recurrent(q, q, q, platform="xla").output.sum()))
    silent = forward.lower(q).as_text()
    for run, chosen, other in (
        (
            forward,
            "recurrent/xla/any: Config()",
            "chunked/xla/any: able, with a priority of 1; recurrent/xla/any has 2",
        ),
        (
            gradient,
            "chunked.vjp/xla/any: ChunkedConfig(chunk=32)",
            "recurrent.vjp/xla/any: takes recurrences that erase",
        ),
    ):
        caplog.clear()
        jax.clear_caches()
        with caplog.at_level(logging.DEBUG, "glax"):
            run(q), run(q)
        *_, message = messages = [record.getMessage() for record in caplog.records if record.name == "glax"]
        assert message.startswith(f"{chosen}, by heuristic; for B1 T128 Hq2 Hk2 Hv2 K8 V8 float32; not {other}")
        assert messages.count(message) == 1 and "\n" not in message
    assert forward.lower(q).as_text() == silent


def test_a_new_length_of_the_same_bucket_has_the_same_key():
    keys = {
        glax.explain(glax.recurrent, *[jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3)[0].invocation.key
        for T in (65, 100, 128)
    }
    assert len(keys) == 1


def test_tune_finds_every_call_and_remembers(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(glax._src.api.explain.executor.chain, "tuner", glax.Tuner(warmup=1, iters=2))

    def loss(q):
        x = glax.recurrent(q, q, q, cfg=None).output
        return glax.simple_gla(x, x, x, -jnp.abs(x[..., 0]), reverse=True).output.sum()

    measured = glax.tune(jax.jit(jax.grad(loss)), Q, progress=False)
    assert len(measured) == 4
    assert sum(".vjp/" in name for name in measured) == 2
    try:
        assert {d.selector for d in glax.explain(jax.grad(loss), Q)} == {"memory"}
        glax._src.api.explain.executor.chain.cache.clear()
        assert {d.selector for d in glax.explain(jax.grad(loss), Q)} == {"disk"}
    finally:
        glax._src.api.explain.executor.chain.cache.clear()


def test_recurrent_attention_through_an_executor_of_the_users_own(tmp_path):
    """As this family's users write it; tuned, remembered, and equal to the public function."""
    run = glax.Executor(
        glax.ConfigSelectorChain(
            cache=glax.ConfigCache(),
            policy=glax.AutotunePolicy(allow_autotune=True, cache_miss_fallback="autotune", validate_backward=True),
            tuner=glax.Tuner(warmup=1, iters=2),
            persistent=glax.PersistentCache("recurrent", folder=tmp_path),
        )
    )
    few, gates = Q[:, :16], -jnp.abs(Q[:, :16])  # so few tokens have few candidates, each compiled with its gradient
    got = jax.jit(lambda q: run(glax.RecurrentAttention(), q, q, q, gk=gates))(few)
    np.testing.assert_allclose(got, glax.recurrent_attention(few, few, few, gk=gates), rtol=1e-4, atol=1e-5)
    (((op, _, key), config),) = run.chain.cache.configs.items()
    assert (op, key) == ("recurrent_attention", "B4 T16 Hq2 Hk2 Hv2 K8 V8 float32 key=float32")
    run.chain.cache.clear()
    (decision,) = [
        d for d in decisions(lambda q: run(glax.RecurrentAttention(), q, q, q, gk=gates), few) if d.kernel == op
    ]
    assert (decision.config, decision.selector) == (config, "disk")
    packed = dict(gk=-jnp.abs(Q[:1]), cu_seqlens=jnp.array([0, 20, 50]))
    got = run(glax.RecurrentAttention(), Q[:1], Q[:1], Q[:1], **packed, cfg=ChunkedConfig(16))
    np.testing.assert_allclose(got, glax.recurrent_attention(Q[:1], Q[:1], Q[:1], **packed), rtol=1e-4, atol=1e-5)


def test_ejkernel_names():
    from glax.compat import ejkernel

    gates = -jnp.abs(Q)
    config = ejkernel.RecurrentAttentionConfig(block_q=25)
    text = str(jax.make_jaxpr(lambda q: ejkernel.recurrent_attention(q, q, q, gk=gates, cfg=config))(Q)).replace(
        " ", ""
    )
    assert "25,25]" in text
    np.testing.assert_array_equal(ejkernel.recurrent(Q, Q, Q, g=gates).output, glax.recurrent(Q, Q, Q, gk=gates).output)
    assert ejkernel.kernel_registry.kernels is glax.kernel_registry.kernels
    with pytest.raises(ValueError, match="backend must be 'any' or 'cpu'"):
        ejkernel.RecurrentAttentionConfig(backend="gpu")

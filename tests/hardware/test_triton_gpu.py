"""The Triton kernels on a GPU: arrays and states beyond 2^31 elements, repeats that agree in every bit, grouped rows, selective
scans, steps of softmax attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import serving
from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.common.softmax import Intervals, ReadBlocks, SoftmaxOperands
from glax._src.kernels.triton.softmax_config import step_config
from glax._src.kernels.xla.softmax import attend_step as attend_step_by_xla
from glax._src.kernels.xla.softmax import whole
from glax._src.solve.grouped import grouped_product
from glax._src.solve.softmax import attend_in_blocks, attend_step
from tests import softmax_steps, strengths
from tests.cases import Case, cotangents, recurrence
from tests.conformance import test_selective_scan as selective
from tests.suite import at_each

SELECTIVE_CASES = {name: each for name, each in selective.CASES.items() if name != "float64"}  # which is refused
GPU = jax.default_backend() == "gpu"
ROOM = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0) if GPU else 0
pytestmark = pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
large = pytest.mark.skipif(ROOM < 90e9, reason="needs an NVIDIA GPU with 90 GB of memory")


def kernel(algorithm: str):
    load_kernels()
    spec = kernel_registry.kernels[f"{algorithm}/triton/gpu"]
    return lambda r, *rest: jax.jit(functools.partial(spec.run, config=spec.config.heuristic(r)))(r, *rest)


@large
def test_arrays_beyond_2_31_elements():
    """The last batch row lies beyond 2^31 elements, and comes out as it does alone."""
    B, T, H, D = 17, 8192, 128, 128
    assert B * T * H * D > 2**31 and (B - 1) * T * H * D + T * H * D // 2 > 2**31
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, do = (jax.random.normal(key, (B, T, H, D), jnp.bfloat16) for key in keys[:4])
    gk = jax.nn.log_sigmoid(jax.random.normal(keys[4], (B, T, H, D), jnp.bfloat16))
    d_final = jnp.zeros((B, H, D, D))
    last = slice(B - 1, B)
    got = kernel("chunked")(bind(q, k, v, gk=gk))
    want = kernel("chunked")(bind(q[last], k[last], v[last], gk=gk[last]))
    assert_same(got.output[last], want.output)
    assert_same(got.final_state[last], want.final_state)
    del got
    got = kernel("chunked.vjp")(bind(q, k, v, gk=gk), do, d_final)
    want = kernel("chunked.vjp")(bind(q[last], k[last], v[last], gk=gk[last]), do[last], d_final[last])
    for x, y in ((got.q, want.q), (got.k, want.k), (got.v, want.v), (got.decay.key, want.decay.key)):
        assert_same(x[last], y)


def assert_same(got, want):
    """Whether cut into segments or not: equal to rounding."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want)


@large
def test_states_beyond_2_31_elements():
    P, H, D = 1100, 128, 128
    assert P * H * D * D > 2**31
    pool = jnp.full((P, H, D, D), 0.5)
    case = Case("", B=2, T=1, heads=(H, H, H), K=D, V=D, state_dtype=None)
    r = recurrence(case, "log-sigmoid")
    run = jax.jit(
        functools.partial(
            kernel_registry.kernels["recurrent.step/triton/gpu"].run,
            config=kernel_registry.kernels["recurrent.step/triton/gpu"].config.heuristic(r),
        ),
        donate_argnums=1,
    )
    output, pool = run(r, pool, jnp.array([P - 1, 1], jnp.int32))
    gate = np.exp(np.asarray(r.decay.key, np.float64)[:, 0])
    want = 0.5 * gate[..., None] + np.asarray(r.k, np.float64)[:, 0][..., None] * np.asarray(r.v)[:, 0][..., None, :]
    np.testing.assert_allclose(np.asarray(pool[P - 1]), want[0], atol=1e-5)
    np.testing.assert_allclose(np.asarray(pool[1]), want[1], atol=1e-5)
    assert (pool[P - 2] == 0.5).all() and (pool[0] == 0.5).all()
    read = np.einsum("bhk,bhkv->bhv", np.asarray(r.q, np.float64)[:, 0], want) * D**-0.5
    np.testing.assert_allclose(np.asarray(output)[:, 0], read, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["key", "head+beta"])
def test_a_step_of_ringed_states(monkeypatch, form, dtype):
    """Many programs count in the length of a slot at a time. The steps are those by parts, and the pool is written in place."""
    load_kernels()
    P, B, H, D, steps = 96, 64, 16, 128, 21
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(steps, B, H, D)), jnp.float32) for _ in range(3))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    log = jnp.asarray(-rng.random((steps, B, H, D) if form == "key" else (steps, B, H)), jnp.float32)
    tokens = dict(query=q, key=k, value=v, g=log) | (dict(beta=jnp.full((steps, B, H), 0.5)) if "beta" in form else {})
    slots = jnp.asarray(np.where(rng.random((steps, B)) < 0.1, -1, rng.permutation(P)[:B]), jnp.int32)

    def served():
        pool = serving.StatePool(P, H, D, dtype, replay=8, form=form)
        pool = pool.replace(length=jnp.arange(P, dtype=jnp.int32) % 8)  # of tokens that are zeros
        step = jax.jit(lambda pool, token, slots: pool.step(**token, slots=slots), donate_argnums=0)
        outputs = []
        for t in range(steps):
            output, pool = step(pool, {name: x[t] for name, x in tokens.items()}, slots[t])
            outputs.append(output)
        return jnp.stack(outputs), pool.states_of(), pool.length

    monkeypatch.delitem(kernel_registry.kernels, "recurrent.replay/cuda/gpu")
    jax.clear_caches()
    got = served()
    monkeypatch.delitem(kernel_registry.kernels, "recurrent.replay/triton/gpu")
    jax.clear_caches()
    want = served()
    jax.clear_caches()
    np.testing.assert_array_equal(got[2], want[2])
    bar = dict(float32=1e-5, bfloat16=4e-3, int8=4e-2, float8_e4m3fn=0.12)[dtype]  # of two roundings of one state
    for x, y in zip(got[:2], want[:2], strict=True):
        assert np.linalg.norm(np.asarray(x - y)) <= bar * np.linalg.norm(np.asarray(y))


@pytest.mark.parametrize("gates", [("gk",), ("g",), ("g_gamma",)], ids="+".join)
def test_repeats_agree_in_every_bit(gates):
    case = Case("", T=3000, heads=(8, 4, 4), K=64, V=64, gates=gates, dtype="bfloat16", cuts=(0, 700, 701, 2900))
    r = recurrence(case, "log-sigmoid")
    d = cotangents(case, r)
    first = [kernel("chunked")(r), kernel("chunked.vjp")(r, *d)]
    for _ in range(3):
        again = [kernel("chunked")(r), kernel("chunked.vjp")(r, *d)]
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    "form, dtype",
    [("key", "bfloat16"), ("key", "float32"), ("key", "float16"), ("head", "bfloat16"), ("constant", "float32")],
)
def test_steady_strengths(form, dtype):
    """Just inside and just outside of each limit, the state passed over several chunks."""
    shaped, *_ = strengths.problem(form, half=32, T=300, K=64, dtype=dtype)
    load_kernels()
    specs = (kernel_registry.kernels[f"{name}/triton/gpu"] for name in ("chunked", "chunked.vjp"))
    for half in {spec.config.heuristic(shaped).chunk // 2 for spec in specs}:
        r, *d = strengths.problem(form, half, T=300, K=64, dtype=dtype)
        strengths.assert_right(r, *d, kernel("chunked")(r), kernel("chunked.vjp")(r, *d))


def values_and_gradients(x, w, d_y, sizes):
    y, pull = jax.vjp(lambda x, w: grouped_product(x, w, sizes), x, w)
    return y, *pull(d_y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "sizes, behind",
    [((0, 300, 1, 0, 700, 129), 57), ((5, 0, 1, 3, 0, 2), 0), ((40, 60, 0, 33, 20, 90), 7)],
    ids=["large", "small", "between"],
)
def test_grouped_rows(sizes, behind, dtype):
    """Values and gradients beside products of each group in float64, with repeats that agree in every bit."""
    M, K, N = sum(sizes) + behind, 328, 200
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (M, K), (len(sizes), K, N), (M, N)
    x, w, d_y = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    run = jax.jit(values_and_gradients)
    found, again = (run(x, w, d_y, jnp.array(sizes, jnp.int32)) for _ in range(2))
    x, w, d_y = (np.asarray(a, np.float64) for a in (x, w, d_y))
    y, d_x, d_w, end = np.zeros_like(d_y), np.zeros_like(x), np.zeros_like(w), 0
    for e, size in enumerate(sizes):
        own, end = slice(end, end + size), end + size
        y[own], d_x[own], d_w[e] = x[own] @ w[e], d_y[own] @ w[e].T, x[own].T @ d_y[own]
    bar = dict(bfloat16=4e-3, float16=5e-4, float32=3e-6)[dtype]
    for got, same, want in zip(found, again, (y, d_x, d_w), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(same).tobytes()
        assert np.linalg.norm(np.asarray(got, np.float64) - want) <= bar * np.linalg.norm(want)
        assert not np.asarray(got, np.float64)[want == 0].any()


@large
def test_grouped_rows_beyond_2_31_elements():
    """The rows of the last group lie beyond 2^31 elements, and come out as they do alone."""
    M, K, N, own = 2**20 + 300, 2048, 2048, 200
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_y = (jax.random.normal(key, (M, K), jnp.bfloat16) for key in keys[:2])
    w = jax.random.normal(keys[2], (2, K, N), jnp.bfloat16)
    found = jax.jit(values_and_gradients)(x, w, d_y, jnp.array([M - own, own], jnp.int32))
    alone = jax.jit(values_and_gradients)(x[-own:], w[1:], d_y[-own:], jnp.array([own], jnp.int32))
    for got, want in zip((found[0][-own:], found[1][-own:], found[2][1:]), alone, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("name", list(softmax_steps.CASES))
def test_a_step_of_softmax_attention(name):
    """Beside sums in float64, as cut into parts by its config and as by the heuristic."""
    case = softmax_steps.CASES[name]
    operands, wanted = case.operands(), case.wanted(0.3)
    for config in (case.config, step_config(operands, case.V)):
        run = jax.jit(functools.partial(attend_step, scale=0.3, width=case.V))
        with glax.overlay({"softmax.step/triton/gpu": config}):
            found, again = (run(*operands[:3], Intervals(*operands[3:5]), slots=operands[5]) for _ in range(2))
        assert np.asarray(found).tobytes() == np.asarray(again).tobytes()
        np.testing.assert_allclose(np.asarray(found, np.float64)[:, 0], wanted, rtol=case.bound, atol=case.bound)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_steps_of_long_caches_equal_those_of_xla(width):
    """512 is the width of the values within the keys of latent attention."""
    B, S, within = 33, 3000, width > 256
    heads, key = ((40, 1), width + 64) if within else ((24, 4), width)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, 1, heads[0], key), (B + 2, S, heads[1], key), (B + 2, S, heads[1], width)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    last = (jnp.arange(B, dtype=jnp.int32) * 911 % S)[:, None]
    first, slots = jnp.maximum(last - 2000, 0), (jnp.arange(B, dtype=jnp.int32) * 6) % (B + 2)
    found = jax.jit(functools.partial(attend_step, scale=None, width=width))(
        q, k, None if within else v, Intervals(first, last), slots=slots
    )
    with jax.default_matmul_precision("highest"):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        exact = jax.jit(functools.partial(attend_step_by_xla, scale=None, width=width))(
            q, k, None if within else v, Intervals(first, last), slots=slots
        )
    assert_same(found, exact)


@pytest.mark.parametrize("size, documents, dtype", [(16, 0, "bfloat16"), (4, 5, "bfloat16"), (1, 3, "float32")])
def test_attention_over_chosen_blocks_equals_that_of_xla(size, documents, dtype):
    """Values and gradients, over keys of whole batches and of packed documents, with repeats that agree in every bit."""
    (B, T), most = (1, 1500) if documents else (2, 1500), 1500 // size + 1
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, T, 6, 128), (B, T, 2, 128), (B, T, 2, 64), (B, T, 6, 64)
    q, k, v, d_o = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False))
    rows = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    first = rows // (T // documents) * (T // documents) if documents else jnp.zeros_like(rows)
    words = jax.random.bits(keys[4], (B, T, -(-most // 32)), jnp.uint32) & jax.random.bits(
        keys[0], (B, T, 1), jnp.uint32
    )
    blocks = ReadBlocks(words.astype(jnp.int32), size)

    def run(attend, q, k, v, d_o):
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(d_o)

    def by_triton(q, k, v):
        return attend_in_blocks(q, k, v, Intervals(first, rows), None, blocks)

    def by_xla(q, k, v):
        return whole(SoftmaxOperands(q, k, v, first, rows, None, blocks), q.shape[-1] ** -0.5)

    found, again = (jax.jit(functools.partial(run, by_triton))(q, k, v, d_o) for _ in range(2))
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(run, by_xla))(*(x.astype(jnp.float32) for x in (q, k, v, d_o)))
    for got, repeated, want in zip(found, again, exact, strict=True):
        assert np.asarray(got).tobytes() == np.asarray(repeated).tobytes()
        assert_same(got, want)


@pytest.mark.parametrize("name", list(SELECTIVE_CASES))
def test_selective_scan(name):
    """Values, states and gradients beside the loop over tokens in float64."""
    case, draws = SELECTIVE_CASES[name]
    at_each(draws, functools.partial(selective.checked, case, "triton"))


@pytest.mark.parametrize("options", [{}, dict(reverse=True), dict(cu_seqlens=jnp.array([0, 700, 701, 701, 2000]))])
def test_selective_scans_of_many_programs_equal_those_of_xla(options):
    """Values and gradients beside XLA's in float32, with repeats that agree in every bit."""
    B, T, D, N = (1 if "cu_seqlens" in options else 3), 2048, 1544, 16
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = dict(x=(B, T, D), dt=(B, T, D), A=(D, N), B=(B, T, N), C=(B, T, N), D=(D,))
    arrays = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    arrays |= dict(dt=jax.nn.softplus(arrays["dt"] - 3), A=-jnp.exp(arrays["A"]))
    d_y = jax.random.normal(keys[6], (B, T, D))

    def value(arrays, platform):
        y, final = glax.selective_scan(**arrays, platform=platform, **options)
        return (y * d_y).sum() + (final**2).sum(), y

    run = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=1)
    found, again, wanted = run(arrays, "triton"), run(arrays, "triton"), run(arrays, "xla")
    for got, same, want in zip(*map(jax.tree.leaves, (found[1:], again[1:], wanted[1:])), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(same).tobytes()
        assert np.linalg.norm(np.asarray(got - want)) <= 5e-5 * np.linalg.norm(np.asarray(want))
    assert jnp.linalg.norm(found[0][1] - wanted[0][1]) <= 1e-5 * jnp.linalg.norm(wanted[0][1])

"""The Hopper kernels of the gradient in the interpreter, chunk by chunk against JAX's gradient of the recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from glax._src.core.recurrence import sum_heads
from glax._src.kernels.pallas_gpu.gradient.head import gradient_head
from glax._src.kernels.pallas_gpu.gradient.head_group import gradient_groups
from glax._src.kernels.pallas_gpu.gradient.key import gradient_key
from glax._src.kernels.pallas_gpu.gradient.wide import gradient_wide
from glax._src.kernels.pallas_gpu.plan import Blocks
from tests import mosaic_interpreter

C = 64


def recurrence(reverse, q, k, v, g, scale, S):
    """o of one chunk and head and the state behind it; q, k, g [C, K], v [C, V], S [K, V]."""

    def token(S, x):
        q, k, v, g = x
        S = jnp.exp(g)[:, None] * S + k[:, None] * v[None, :]
        return S, scale * (q @ S)

    S, o = jax.lax.scan(token, S, (q, k, v, g), reverse=reverse)
    return o, S


def expected(reverse, q, k, v, g, do, scale, before, behind):
    """dq, dk, dv, dg [B, T, H, D] and d_scale [B, chunks, H] by chunk, in float32."""
    B, T, H, _ = do.shape
    fill = -T % C

    def by_chunk(x):
        x = jnp.repeat(x.astype(jnp.float32), H // x.shape[2], 2)
        x = jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0)))
        return x.reshape(B, -1, C, H, x.shape[3]).swapaxes(2, 3)

    def one(q, k, v, g, do, scale, before, behind):
        _, pull = jax.vjp(functools.partial(recurrence, reverse), q, k, v, g, scale, before)
        return pull((do, behind))[:5]

    each = jax.vmap(jax.vmap(jax.vmap(one, (0,) * 5 + (None, 0, 0)), (0,) * 5 + (None, 0, 0)))
    tiles = [by_chunk(x) for x in (q, k, v, g, do)]
    *found, d_scale = each(*tiles, scale, before.astype(jnp.float32), behind.astype(jnp.float32))
    return *(x.swapaxes(2, 3).reshape(B, -1, H, x.shape[4])[:, :T] for x in found), d_scale


def inputs(B, T, heads, D, form, strength):
    r = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(r.normal(size=shape), jnp.bfloat16)

    H, HQ, HK, HV = heads
    g = np.log(1 / (1 + np.exp(-r.normal(size=(B, T, H, 1 if form == "head" else D)))))
    if strength is not None:
        g = np.where(r.random(g.shape) < 0.05, strength, g)
    g = in_terms(g, 2 if form == "key, float32" else 1).astype(jnp.float32).sum(0)
    tiles = (normal(B, T, HQ, D), normal(B, T, HK, D), normal(B, T, HV, D), g)
    states = (normal(B, -(-T // C), H, D, D), normal(B, -(-T // C), H, D, D))
    return *tiles, normal(B, T, H, D), jnp.asarray(np.linspace(-0.2, 0.3, B), jnp.float32), *states


def in_terms(g, terms):
    """[terms, ...] in bfloat16, whose sum is g."""
    found = [jnp.asarray(g, jnp.bfloat16)]
    if terms == 2:
        found.append(jnp.asarray(g - np.asarray(found[0], np.float64), jnp.bfloat16))
    return jnp.stack(found)


def head_sums(g, reverse):
    B, T, H, _ = g.shape
    x = jnp.maximum(g[..., 0].astype(jnp.float32), -128.0) / np.log(2)
    x = jnp.pad(x, ((0, 0), (0, -T % C), (0, 0))).reshape(B, -1, C, H).swapaxes(2, 3)
    return jax.lax.cumsum(x, 3, reverse=reverse)


def stored(g, reverse, before, behind):
    """Return the states as scans store them for per-key gates, decayed to the middle of their chunks, and which chunks
    are out of range."""
    B, T, H, K = g.shape
    g = jnp.pad(g.astype(jnp.float32), ((0, 0), (0, -T % C), (0, 0), (0, 0))).reshape(B, -1, 2, C // 2, H, K)
    first, second = (g[:, :, i] for i in ((1, 0) if reverse else (0, 1)))
    enter, leave = first.sum(2), second.sum(2)
    # |M| is largest at a chunk's first token, behind which all other gates of its half lie, or at its last.
    most = jnp.maximum(-(enter - first[:, :, -1 if reverse else 0]), -leave).max(-1)
    out_of_range = ~((most <= 60) & jnp.isfinite(enter + leave).all(-1))

    def to_middle(x, log):
        return jnp.where(out_of_range[..., None, None], x, x * jnp.exp(log)[..., None]).astype(x.dtype)

    return to_middle(before, enter), to_middle(behind, leave), out_of_range.astype(jnp.int32)


def in_runs(run, reverse, k, v, g, before):
    """before, of which every `run`-th is stored; the others follow from it."""

    def rows(x, c):
        return jnp.repeat(x, before.shape[2] // x.shape[2], 2)[:, c * C : (c + 1) * C].astype(jnp.float32)

    chunks = list(before.astype(jnp.float32).swapaxes(0, 1))
    each = jax.vmap(jax.vmap(lambda k, v, g, S: recurrence(reverse, k, k, v, g, 1.0, S)[1], (1, 1, 1, 0)))
    for c in range(len(chunks)):
        at, step = (len(chunks) - 1 - c, -1) if reverse else (c, 1)
        if c % run < run - 1:
            chunks[at + step] = each(rows(k, at), rows(v, at), rows(g, at), chunks[at])
    return before[:, run - 1 if reverse else 0 :: run], jnp.stack(chunks, 1)


CASES = [
    (1, 136, (2, 1, 2, 1), 64, "key", None, False, 1),
    (1, 72, (1, 1, 1, 1), 128, "key", None, True, 1),
    (1, 136, (1, 1, 1, 1), 64, "key", -np.inf, True, 1),
    (1, 136, (2, 1, 2, 1), 64, "key, float32", None, False, 1),
    (1, 72, (1, 1, 1, 1), 128, "key, float32", -100.0, True, 1),
    (1, 72, (1, 1, 1, 1), 128, "key", -100.0, False, 1),
    (2, 136, (2, 2, 1, 1), 64, "head", None, True, 1),
    (1, 72, (1, 1, 1, 1), 128, "head", -np.inf, False, 1),
    (1, 376, (2, 1, 2, 1), 64, "head", None, False, 3),
    (1, 248, (2, 2, 1, 2), 128, "head", None, True, 2),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    mosaic_interpreter.install(monkeypatch)
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        yield


@pytest.mark.parametrize("B,T,heads,D,form,strength,reverse,run", CASES)
def test_gradient_of_chunks(B, T, heads, D, form, strength, reverse, run):
    q, k, v, g, *others = inputs(B, T, heads, D, form, strength)
    if run > 1:
        g = g / 16  # chunks let states through
    options = dict(reverse=reverse, programs=2)
    gates = jnp.broadcast_to(g, (*g.shape[:3], D))
    do, scale, before, behind = others
    before, every = in_runs(run, reverse, k, v, gates, before)
    others = do, scale, before, behind
    wanted = expected(reverse, q, k, v, gates, do, scale, every, behind)
    if form != "head":
        terms = in_terms(np.asarray(g, np.float64), 2 if form == "key, float32" else 1)
        found = gradient_key(q, k, v, terms, *others[:2], *stored(g, reverse, *others[2:]), **options)
    else:
        *first, dg, d_scale = gradient_head(q, k, v, head_sums(g, reverse), *others, **options)
        dg = dg.reshape(B, -1, heads[0])[:, :T, :, None]
        found = *first, dg, d_scale if form == "key" else d_scale.sum(3)
        wanted = *wanted[:3], wanted[3].sum(3, keepdims=True), wanted[4]
    for name, x, y in zip(("dq", "dk", "dv", "dg", "d_scale"), found, wanted, strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.sqrt(((x - y) ** 2).mean()) < 5e-3 * np.sqrt((y**2).mean()), name


@pytest.mark.parametrize(
    "blocks,form,strength,reverse", [((1, 2), "key", -100.0, True), ((2, 2), "key, float32", None, False)]
)
def test_gradient_of_wide_heads(blocks, form, strength, reverse):
    """dq, dk and dg are sums over blocks of V; in some chunks and blocks of K gates are out of range."""
    rows, columns = blocks
    H = rows * columns
    _, _, v, _, do, scale, before, behind = inputs(1, 72, (H, H, H, columns), 128, "key", None)
    q, k, _, g, *_ = inputs(1, 72, (rows, rows, rows, rows), 128, "key", None)
    if strength is not None:
        g = g.at[:, 66:, :, 7].set(strength)
    terms = in_terms(np.asarray(g, np.float64), 2 if form == "key, float32" else 1)
    g = terms.astype(jnp.float32).sum(0)

    def each(x):
        """Of every block, what its block of K has."""
        return jnp.repeat(x, columns, 2)

    options = dict(reverse=reverse, programs=2, blocks=Blocks(*blocks))
    states = stored(each(g), reverse, before, behind)
    assert strength is None or set(np.unique(states[-1])) == {0, 1}
    do = do[:, :, :columns]
    found = gradient_wide(q, k, v, terms, do, scale, *states, **options)
    values = (jnp.tile(x, (1, 1, rows, 1)) for x in (v, do))
    v, do = values
    dq, dk, dv, dg, d_scale = expected(reverse, each(q), each(k), v, each(g), do, scale, before, behind)
    dq, dk, dg = (x.reshape(1, 72, rows, columns, -1).sum(3) for x in (dq, dk, dg))
    wanted = dq, dk, dv, dg, d_scale.reshape(1, 2, rows, columns).sum(3)
    for name, x, y in zip(("dq", "dk", "dv", "dg", "d_scale"), found, wanted, strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.sqrt(((x - y) ** 2).mean()) < 5e-3 * np.sqrt((y**2).mean()), name


def behind_in_runs(reverse, q, g, do, scale, behind):
    """behind, of which every second is stored; the others follow from it and the chunk behind."""

    def rows(x, c):
        return jnp.repeat(x, behind.shape[2] // x.shape[2], 2)[:, c * C : (c + 1) * C].astype(jnp.float32)

    def one(q, g, do, scale, dS):
        zero = jnp.zeros_like(dS)
        _, pull = jax.vjp(lambda S: recurrence(reverse, q, q, do, g, scale, S), zero)
        return pull((do, dS))[0]

    chunks = list(behind.astype(jnp.float32).swapaxes(0, 1))
    each = jax.vmap(jax.vmap(one, (1, 1, 1, None, 0)), (0, 0, 0, 0, 0))
    for c in range(0, len(chunks), 2):
        first, last = (c + 1, c) if reverse else (c, c + 1)
        chunks[first] = each(rows(q, last), rows(g, last), rows(do, last), scale, chunks[last])
    return behind[:, 0 if reverse else 1 :: 2], jnp.stack(chunks, 1)


GROUPS = [
    (2, 136, (3, 1, 1, 3), 64, 64, None, True, 1),
    (1, 248, (4, 2, 1, 4), 128, 64, None, False, 2),
    (1, 256, (2, 1, 1, 2), 64, 128, -np.inf, True, 2),
    (1, 72, (2, 1, 1, 1), 128, 64, -100.0, False, 1),
]


@pytest.mark.parametrize("B,T,heads,K,V,strength,reverse,run", GROUPS)
def test_gradient_of_groups(B, T, heads, K, V, strength, reverse, run):
    """dq and dk of heads that share a query and a key are sums over these."""
    H, HQ, HK, _ = heads
    q, k, v, g, do, scale, before, behind = inputs(B, T, heads, max(K, V), "head", strength)
    g = g / (16 if run > 1 else 1)
    q, k, v, do, before, behind = (
        q[..., :K],
        k[..., :K],
        v[..., :V],
        do[..., :V],
        before[..., :K, :V],
        behind[..., :K, :V],
    )
    gates, stored = jnp.broadcast_to(g, (*g.shape[:3], K)), (before, behind)
    if run > 1:
        before, every_before = in_runs(run, reverse, k, v, gates, before)
        behind, every_behind = behind_in_runs(reverse, q, gates, do, scale, behind)
        stored = every_before, every_behind
    wanted = expected(reverse, q, k, v, gates, do, scale, *stored)
    by_chunk = jnp.broadcast_to(scale[:, None], (B, -(-T // C)))
    options = dict(reverse=reverse, programs=2)
    group = np.gcd(H // HQ, H // HK)
    dq, dk, dv, dg, d_scale = gradient_groups(
        q, k, v, head_sums(g, reverse), do, by_chunk, before, behind, group=int(group), **options
    )
    assert dq.shape[2] == dk.shape[2] < H
    found = *(sum_heads(x.astype(jnp.float32), heads) for x, heads in ((dq, HQ), (dk, HK))), dv, dg, d_scale.sum(3)
    wanted = sum_heads(wanted[0], HQ), sum_heads(wanted[1], HK), wanted[2], wanted[3].sum(3), wanted[4]
    found = *found[:3], found[3].reshape(B, -1, H)[:, :T], found[4]
    for name, x, y in zip(("dq", "dk", "dv", "dg", "d_scale"), found, wanted, strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.sqrt(((x - y) ** 2).mean()) < 5e-3 * np.sqrt((y**2).mean()), name

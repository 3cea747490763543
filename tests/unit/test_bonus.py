"""The exclusive read with a bonus, as RWKV-6 has it: `bonus=` of recurrent, recurrent_step and prefill_into."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import glax
from glax import parallel
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast
CUTS = (0, 0, 5, 6, 17, 17)
CASES = [
    Case("rows", B=2, T=9, heads=(4, 2, 1), K=6, V=5, gates=("gk",)),
    Case("no gates, no state", T=9, K=4, V=3, gates=(), state_dtype=None),
    Case("packed", T=19, heads=(2, 1, 2), K=6, V=5, gates=("g", "gk"), cuts=CUTS),
    Case("packed, reverse", T=19, K=6, V=5, gates=("g_gamma",), cuts=CUTS, reverse=True),
    Case("gates of -inf", T=17, K=6, V=5, strengths=("-inf on 5%",)),
]


def by_token(u, cuts, reverse, query, key, value, g=None, g_gamma=None, gk=None, initial_state=None):
    """o_t = (S_{t-1} + diag(u) k_t v_t^T)^T q_t / sqrt(K), then S_t = decay_t S_{t-1} + k_t v_t^T: one token after another."""
    H = max(x.shape[2] for x in (query, key, value))
    query, key, value = (jnp.repeat(x, H // x.shape[2], 2) for x in (query, key, value))
    B, T, _, K = query.shape
    spans = [(b, 0, T) for b in range(B)]
    if cuts is not None:
        spans = [(0, *pair) for pair in itertools.pairwise(cuts)]
    log = jnp.zeros((B, T, H, K))
    log += 0 if g is None else g[..., None]
    log += 0 if gk is None else gk

    def step(S, row):
        q, k, v, log = row
        own = k[:, :, None] * v[:, None, :]
        return jnp.exp(log)[..., None] * S + own, jnp.einsum("hk,hkv->hv", q, S + u[:, :, None] * own) / K**0.5

    output, finals = jnp.zeros((B, T, H, value.shape[3])), []
    for n, (b, low, high) in enumerate(spans):
        S = jnp.zeros((H, K, value.shape[3])) if initial_state is None else initial_state[n]
        each = log[b, low:high] + (0 if g_gamma is None else g_gamma[n][:, None])
        rows = (query[b, low:high], key[b, low:high], value[b, low:high], each)
        S, read = jax.lax.scan(step, S, rows, reverse=reverse)
        output = output.at[b, low:high].set(read)
        finals.append(S)
    return output, jnp.stack(finals)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_read_and_its_gradient_are_those_of_the_definition(case):
    arrays = inputs(case, case.strengths[0])
    u = jnp.asarray(np.random.default_rng(3).normal(size=(max(case.heads), case.K)), jnp.float32)
    cuts = None if case.cuts is None else jnp.asarray(case.cuts)

    def ours(u, arrays):
        return tuple(glax.recurrent(**arrays, bonus=u, cu_seqlens=cuts, reverse=case.reverse))

    def definition(u, arrays):
        return by_token(u, case.cuts, case.reverse, **arrays)

    got, want = quick_jit(ours)(u, arrays), quick_jit(definition)(u, arrays)
    for name, x, y in zip(("output", "state"), got, want, strict=True):
        assert_close(name, x, y, 1e-5)
    if case.cuts is not None:
        assert not got[0][:, case.cuts[-1] :].any()
    weights = [jnp.asarray(np.random.default_rng(4).normal(size=x.shape), jnp.float32) for x in want]

    def loss(of):
        return lambda u, arrays: sum((w * x).sum() for w, x in zip(weights, of(u, arrays), strict=True))

    got, want = (quick_jit(jax.grad(loss(of), (0, 1)))(u, arrays) for of in (ours, definition))
    assert_close("u", got[0], want[0], 5e-5)
    for name in arrays:
        wanted = want[1][name]
        if case.cuts is not None and name not in ("initial_state", "g_gamma"):
            wanted = wanted.at[:, case.cuts[-1] :].set(0)
        assert_close(name, got[1][name], wanted, 5e-5)


def test_steps_and_prefill_equal_one_pass():
    case = Case("", B=1, T=12, heads=(4, 2, 2), K=6, V=5, gates=("gk",))
    arrays = inputs(case, "log-sigmoid")
    u = jnp.asarray(np.random.default_rng(3).normal(size=(4, 6)), jnp.float32)
    start = arrays.pop("initial_state")
    whole = glax.recurrent(**arrays, bonus=u, initial_state=start)
    pool = jnp.full((3, 4, 6, 5), jnp.nan).at[2].set(start[0])
    rows = {name: x[0, :8] for name, x in arrays.items()}
    cuts = jnp.array([0, 0, 8])
    output, pool = glax.prefill_into(pool, jnp.array([-1, 2]), **rows, cu_seqlens=cuts, bonus=u)
    assert_close("prefill", output, whole.output[0, :8], 1e-5)
    for t in range(8, 12):
        tokens = {name: jnp.concatenate([x[:, t], jnp.full_like(x[:, t], jnp.nan)]) for name, x in arrays.items()}
        output, pool = glax.recurrent_step(**tokens, state=pool, slots=jnp.array([2, -1]), bonus=u)
        assert_close("step", output[0], whole.output[0, t], 1e-5)
        assert not output[1].any()
    assert_close("state", pool[2], whole.final_state[0], 1e-5)
    assert np.isnan(pool[:2]).all()


def test_a_bonus_on_a_mesh_gives_what_one_device_gives():
    """The sequence in four shards: the queries move across them."""
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    arrays = inputs(Case("", B=2, T=20, heads=(4, 2, 2), K=6, V=5, gates=("gk",)), "log-sigmoid")
    u = jnp.asarray(np.random.default_rng(3).normal(size=(4, 6)), jnp.float32)
    spread = functools.partial(parallel.recurrent, mesh=mesh, batch_axis="data", sequence_axis="sequence")

    def loss(of):
        return jax.jit(jax.value_and_grad(lambda u, arrays: (of(**arrays, bonus=u).output ** 2).sum(), (0, 1)))

    got, want = loss(spread)(u, arrays), loss(glax.recurrent)(u, arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("value or gradient", x, y, 5e-5)


def test_another_shape_or_dtype_is_refused():
    arrays = inputs(CASES[0], "log-sigmoid")
    with pytest.raises(ValueError, match=r"bonus must be \[H, K\]=\[4, 6\], got shape \(2, 6\)"):
        glax.recurrent(**arrays, bonus=jnp.zeros((2, 6)))
    with pytest.raises(TypeError, match="bonus must be floating point, got int32"):
        glax.recurrent(**arrays, bonus=jnp.zeros((4, 6), jnp.int32))

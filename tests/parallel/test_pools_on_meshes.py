"""Pools of states whose heads lie along an explicit axis: every function that reads them, against one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax
from glax import serving
from tests.compiling import quick_jit
from tests.parallel.meshes import mesh_of, tree_close

B, T, H, K, V, ROWS = 4, 5, 4, 8, 6, 7
SLOTS = jnp.array([2, 0, -1, 5])
FORMS = {
    "none": (),
    "gammas": ("g_gamma",),
    "head": ("g",),
    "keys and values": ("gk", "gv"),
    "beta": ("g", "beta"),
    "erase": ("gk", "erase", "write"),
    "along": ("gk", "erase", "erase_along"),
}


def arguments(form: str, heads: tuple[int, int]) -> dict:
    """The arguments of draft tokens, with heads of the query and of the key."""
    rng = np.random.default_rng(len(form))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    gates = dict(
        g_gamma=-abs(normal(H)), g=-abs(normal(B, T, H)), gk=-abs(normal(B, T, H, K)), gv=-abs(normal(B, T, H, V)),
        beta=jax.nn.sigmoid(normal(B, T, H)), erase=normal(B, T, H, K) / K, write=normal(B, T, H, V),
        erase_along=normal(B, T, H, K) / K,
    )  # fmt: skip
    tokens = dict(query=normal(B, T, heads[0], K), key=normal(B, T, heads[1], K) / K, value=normal(B, T, H, V))
    return tokens | {name: gates[name] for name in FORMS[form]}


def placed(mesh, x, batch):
    """Tokens with their heads along "h" where it divides them, and the batch along `batch`."""
    heads = "h" if x.ndim < 3 or x.shape[2] > 1 else None
    return jax.device_put(x, NamedSharding(mesh, P(heads) if x.ndim == 1 else P(batch, None, heads)))


def step(arrays, pool):
    one = {name: x if x.ndim == 1 else x[:, 0] for name, x in arrays.items()}
    return glax.recurrent_step(**one, state=pool, slots=SLOTS)


def draft(arrays, pool):
    output, drafted = glax.recurrent_verify(**arrays, state=pool, slots=SLOTS)
    return output, glax.commit(pool, drafted, jnp.array([3, 0, 2, 5]))


def draft_with_states(arrays, pool):
    slots = jnp.full((B, T), -1).at[0, 2].set(6).at[3, 4].set(1)
    output, drafted, after = glax.recurrent_verify(**arrays, state=pool, slots=SLOTS, state_slots=slots)
    return output, drafted.key, after


def prefill(arrays, pool):
    return glax.prefill_into(pool, SLOTS, **arrays, fresh=jnp.array([True, False, False, False]))


def packed(arrays, pool):
    joined = {name: x if x.ndim == 1 else x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
    return glax.prefill_into(pool, SLOTS[:3], **joined, cu_seqlens=jnp.array([0, 9, 9, 20]))


CALLS = [step, draft, draft_with_states, prefill, packed]


@pytest.mark.parametrize("batch", [None, "b"])
@pytest.mark.parametrize("heads", [(4, 4), (1, 2)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_pools_over_heads_equal_one_device(form, heads, batch):
    mesh = mesh_of(AxisType.Explicit, b=2, h=2)
    arrays, pool = arguments(form, heads), jnp.sin(jnp.arange(ROWS * H * K * V)).reshape(ROWS, H, K, V)
    on_mesh = {name: placed(mesh, x, batch) for name, x in arrays.items()}
    on_heads = jax.device_put(pool, NamedSharding(mesh, P(None, "h")))
    for call in CALLS[:-1] if batch else CALLS:
        run = quick_jit(call)
        got = run(on_mesh, on_heads)
        tree_close(got, run(arrays, pool))
        assert jax.typeof(got[-1]).sharding.spec[1] == "h", call


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_each_device_reads_its_own_heads_alone(kind):
    """Nothing is exchanged, and a step updates a donated pool where it lies."""
    mesh = mesh_of(kind, h=4)
    arrays = {name: placed(mesh, x, None) for name, x in arguments("beta", (4, 4)).items()}
    pool = jax.device_put(jnp.ones((ROWS, H, K, V)), NamedSharding(mesh, P(None, "h")))
    for call in CALLS:
        text = jax.jit(call, donate_argnums=1).lower(arrays, pool).compile().as_text()
        assert not re.findall(r"all-(gather|reduce|to-all)|collective-permute", text), call
        if call is step:
            assert not re.findall(rf"f32\[{ROWS},1,{K},{V}\]\S* copy\(", text)


@pytest.mark.parametrize("form", FORMS)
def test_pools_over_heads_on_automatic_axes(form):
    """Tokens over the batch are gathered, and the pool is not."""
    mesh = mesh_of(AxisType.Auto, b=2, h=2)
    arrays, pool = arguments(form, (4, 4)), jnp.sin(jnp.arange(ROWS * H * K * V)).reshape(ROWS, H, K, V)
    on_mesh = {name: placed(mesh, x, "b") for name, x in arrays.items()}
    on_heads = jax.device_put(pool, NamedSharding(mesh, P(None, "h")))
    for call in CALLS[:2]:
        run = jax.jit(call)
        tree_close(run(on_mesh, on_heads), run(arrays, pool))
        text = run.lower(on_mesh, on_heads).compile().as_text()
        assert f"f32[{ROWS},{H},{K},{V}]" not in text, call


def test_the_gradient_of_a_step_on_a_pool_over_heads():
    mesh = mesh_of(AxisType.Explicit, b=2, h=2)
    arrays, pool = arguments("erase", (1, 2)), jnp.cos(jnp.arange(ROWS * H * K * V)).reshape(ROWS, H, K, V)
    gradient = quick_jit(jax.grad(lambda *x: sum((y**2).sum() for y in step(*x)), (0, 1)))
    on_mesh = {name: placed(mesh, x, None) for name, x in arrays.items()}
    tree_close(gradient(on_mesh, jax.device_put(pool, NamedSharding(mesh, P(None, "h")))), gradient(arrays, pool))


@pytest.mark.parametrize("batch", [None, "b"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pools_with_rings_over_heads_equal_one_device(dtype, batch):
    mesh, arrays = mesh_of(AxisType.Explicit, b=2, h=2), arguments("beta", (1, 2))
    pool = serving.StatePool(ROWS, (1, 2, H), (K, V), dtype, replay=2, drafts=3, form="head+beta")

    def served(pool, arrays):
        outputs = []
        for t in range(2):
            output, pool = pool.step(**{name: x[:, t] for name, x in arrays.items()}, slots=SLOTS)
            outputs.append(output)
        output, pool = pool.verify(**{name: x[:, 2:] for name, x in arrays.items()}, slots=SLOTS)
        pool = pool.commit(jnp.array([3, 0, 0, 1]), slots=SLOTS)
        last, pool = pool.prefill(SLOTS, **arrays)
        return [*outputs, output, last], pool.flush()

    def over_heads(tree, before: int):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*[None] * before, "h"))), tree)

    on_heads = pool.replace(states=over_heads(pool.states, 1), ring=over_heads(pool.ring, 2))
    run = quick_jit(served)
    got = run(on_heads, {name: placed(mesh, x, batch) for name, x in arrays.items()})
    tree_close(got, run(pool, arrays))
    assert all(jax.typeof(x).sharding.spec[1] == "h" for x in jax.tree.leaves(got[1].states))


def test_heads_are_not_rounded_alike():
    mesh = mesh_of(AxisType.Explicit, h=2)
    same = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (B, 1, K)), (B, H, K))
    pool = jnp.zeros((ROWS, H, K, K), jnp.bfloat16)
    q, pool = (jax.device_put(x, NamedSharding(mesh, P(None, "h"))) for x in (same, pool))
    call = functools.partial(glax.recurrent_step, slots=SLOTS, rounding_key=jax.random.key(1))
    after = np.asarray(jax.jit(call)(q, q, q, pool)[1], np.float32)
    assert (after[2, 0] != after[2, 2]).any()


@pytest.mark.parametrize(
    ("spec", "heads", "named"),
    [
        (P("h"), (4, 4), r"state \[P, H, K, V\].* got the axis 'h' along P: .*PartitionSpec\(None, ...\)"),
        (P(None, None, "h"), (4, 4), "got the axis 'h' along K"),
        (P(None, "h"), (4, 2), "heads of key .* the axis 'h' of 4 devices.* got 2"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused_by_the_axis(spec, heads, named):
    mesh = mesh_of(AxisType.Explicit, h=4)
    arrays = arguments("head", heads)
    pool = jax.device_put(jnp.ones((8, H, K, V)), NamedSharding(mesh, spec))
    with pytest.raises(ValueError, match=named):
        step(arrays, pool)

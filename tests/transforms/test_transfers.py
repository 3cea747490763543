"""Outside of jit no function transfers anything that its caller has not given to be transferred: jax.transfer_guard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import glax
import glax.parallel
from glax.compat import easydel

pytestmark = pytest.mark.fast

Q = jnp.sin(jnp.arange(2 * 20 * 2 * 4.0)).reshape(2, 20, 2, 4)
GK, G, TOKEN = -jnp.abs(Q), -jnp.abs(Q[..., 0]), Q[:, 0]
CUTS, SLOTS, FRESH, LAYER, USUAL = (
    jnp.array([0, 5, 40]),
    jnp.array([4, 1]),
    jnp.array([True, False]),
    jnp.array(1),
    jnp.array(-1.0),
)
ROWS = Q.reshape(40, 2, 4)
STATES, POOL = jnp.ones((2, 2, 4, 4)), jnp.ones((5, 2, 4, 4))
DRAFT = glax.recurrent_verify(Q, Q, Q, STATES)[1]

CALLS = dict(
    recurrent=lambda: glax.recurrent(Q, Q, Q, gk=GK),
    scale=lambda: glax.recurrent(Q, Q, Q, softmax_scale=0.5),
    packed=lambda: glax.recurrent(ROWS, ROWS, ROWS, cu_seqlens=CUTS, softmax_scale=np.float32(2)),
    numpy=lambda: glax.recurrent(*[np.asarray(Q)] * 3, g=np.asarray(G)),
    simple_gla=lambda: glax.simple_gla(Q, Q, Q, G),
    retention=lambda: glax.retention(Q, Q, Q),
    lightning=lambda: glax.lightning_attention(Q, Q, Q, 1, 4),
    minimax=lambda: glax.lightning_attention(Q, Q, Q, LAYER, 4, slopes="minimax"),
    step=lambda: glax.recurrent_step(TOKEN, TOKEN, TOKEN, STATES, softmax_scale=1),
    pool=lambda: glax.recurrent_step(TOKEN, TOKEN, TOKEN, POOL, slots=SLOTS),
    prefill=lambda: glax.prefill_into(POOL, SLOTS, ROWS, ROWS, ROWS, cu_seqlens=CUTS, fresh=FRESH),
    verify=lambda: glax.recurrent_verify(Q, Q, Q, STATES, softmax_scale=0.5),
    commit=lambda: glax.commit(STATES, DRAFT, np.array([1, 2])),
    easydel=lambda: easydel.recurrent_gla(Q, Q, Q, GK, scale=USUAL, chunk_size=16),
)


def allowed_and_not(f):
    """The results of two calls, the second of which may transfer nothing implicitly."""
    want = jax.block_until_ready(f())
    with jax.transfer_guard("disallow"):
        got = jax.block_until_ready(f())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)
    return got


@pytest.mark.parametrize("call", CALLS)
def test_one_device(call):
    allowed_and_not(CALLS[call])


def test_results_are_as_free_to_move_as_the_arguments():
    assert not allowed_and_not(lambda: glax.retention(Q, Q, Q, softmax_scale=2)).output.committed
    there = jax.device_put(Q, jax.devices()[1])
    assert (
        allowed_and_not(lambda: glax.retention(there, there, there, softmax_scale=2)).output.devices()
        == there.devices()
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    q = jax.device_put(Q, NamedSharding(mesh, PartitionSpec("x")))
    allowed_and_not(lambda: glax.retention(q, q, q, softmax_scale=2))
    allowed_and_not(lambda: glax.parallel.retention(q, q, q, softmax_scale=2, mesh=mesh, batch_axis="x"))

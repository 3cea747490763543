"""Queries and keys that many heads share: no array of the gradient has a row of keys for every head."""

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.kernels.cpu.library import missing

B, T, H, K, V = 1, 2048, 64, 128, 16


def temporary_bytes(platform: str, shared: int, gate: str) -> int:
    """Bytes of temporaries of a compiled forward and gradient with `shared` heads of q and k."""

    def train(q, k, v, gates, d_output):
        output, pull = jax.vjp(
            lambda q, k, v, x: glax.recurrent(q, k, v, **{gate: x}, platform=platform).output, q, k, v, gates
        )
        return output, *pull(d_output)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    gates = array(B, T, H) if gate == "g" else array(H)
    operands = array(B, T, shared, K), array(B, T, shared, K), array(B, T, H, V), gates, array(B, T, H, V)
    return jax.jit(train).lower(*operands).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "platform, part",
    [
        ("xla", 0.9),
        pytest.param("cpp", 0.35, marks=pytest.mark.skipif(bool(missing()), reason="no native kernels here")),
    ],
)
def test_no_temporary_has_keys_of_every_head(platform, part):
    """part: of the bytes of one such array. XLA saves states at chunks, the native kernels sum eight heads at a time."""
    whole = B * T * H * K * 4
    assert temporary_bytes(platform, 1, "g") < part * whole
    assert temporary_bytes(platform, 4, "g_gamma") < part * whole

"""The route of a call of the Hopper kernels, as `glax.explain` prints it; no kernel is traced."""

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.core.backend import Backend
from glax._src.kernels.pallas_gpu.config import HopperConfig

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11"),
]
GATES = {"g": "BTH", "gk": "BTHK", "g_gamma": "H", "beta": "BTH"}
# the sizes and gates of a call, what else it is given; the lines of its forward and of its gradient
ROUTES = {
    "key": (dict(gates=("gk",)), "key_scan; rows as they are given; whole rows", "gradient_key"),
    "key, wide": (dict(gates=("gk",), K=256, V=512), "key_scan; rows as they are given; whole rows", "gradient_wide"),
    "key, cut": (
        dict(gates=("gk",), config=HopperConfig(4)),
        "key_scan; rows as they are given; 4 segments of a row",
        "gradient_key",
    ),
    "head, pairs": (
        dict(gates=("g",), groups=2, V=64, config=HopperConfig(1, 128)),
        "pair_scan; rows as they are given; whole rows",
        "gradient_groups",
    ),
    "head, last chunk": (
        dict(gates=("g",), B=1, T=2049),
        "head_scan; rows as they are given, the last chunk from a copy; whole rows",
        "gradient_head",
    ),
    "head, all in one row": (
        dict(gates=("g",), B=3, T=2049),
        "head_scan; sequences joined to rows, 3 to a row, the last chunk from a copy; whole rows",
        "gradient_head",
    ),
    "key, joined": (
        dict(gates=("gk",), B=8, T=2047),
        "key_scan; sequences joined to rows, 8 to a row; whole rows",
        "gradient_key",
    ),
    "key, equal": (
        dict(gates=("gk",), B=8, T=2047, K=64),
        "key_scan; a batch as packed sequences; whole rows",
        "gradient_key",
    ),
    "key, filled up": (
        dict(gates=("gk",), B=1, T=2047),
        "key_scan; rows filled up to a multiple of 8 by a copy; whole rows",
        "gradient_key",
    ),
    "no gates, packed": (
        dict(gates=(), B=1, packed=3),
        "head_scan; one row of packed sequences; whole rows",
        "gradient_head",
    ),
    "key, packed, 64 wide": (
        dict(gates=("gk",), B=1, K=64, packed=3),
        "key_scan; packed sequences, each from a chunk's start on; whole rows",
        "gradient_key",
    ),
    "delta": (dict(gates=("g", "beta")), "delta_scan; rows as they are given; whole rows", "delta_gradient"),
    "delta, wide": (
        dict(gates=("g", "beta"), K=256),
        "delta_scan; rows as they are given; whole rows",
        "delta_gradient_wide",
    ),
    "delta, key": (
        dict(gates=("gk", "beta")),
        "delta_key_scan; rows as they are given; whole rows",
        "delta_key_gradient",
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_explain_prints_the_route(name, monkeypatch):
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    given, line, gradient = ROUTES[name]
    given = dict(B=2, T=2048, H=4, K=128, V=128, groups=4, packed=0, config=HopperConfig()) | given
    sizes = {axis: given[axis] for axis in "BTHK"}

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    B, T, H, K = sizes.values()
    arrays = dict(query=shaped(B, T, given["groups"], K), key=shaped(B, T, given["groups"], K))
    arrays |= dict(value=shaped(B, T, H, given["V"]))
    arrays |= {gate: shaped(*(sizes[axis] for axis in GATES[gate])) for gate in given["gates"]}
    cuts = dict(cu_seqlens=shaped(given["packed"] + 1, dtype=jnp.int32)) if given["packed"] else {}

    def loss(arrays, cuts):
        run = glax.recurrent(**arrays, **cuts, platform="pallas", cfg=given["config"])
        return run.output.astype(jnp.float32).sum()

    forward, *_, backward = glax.explain(jax.grad(loss), arrays, cuts)
    scan, rows = line.split("; ", 1)
    assert forward.route == line
    assert backward.route == f"{scan}, then {gradient}; {rows}"
    assert f"\n  by {line}\n" in str(glax.explain(loss, arrays, cuts)) + "\n"

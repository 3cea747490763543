"""The time to compile the gradient of every public function: a part of benchmarks/cpu.py."""

import time

import jax
import jax.numpy as jnp
from timing import compiled, table

import glax

COMPILE_BAR = 5.0  # seconds


def variants() -> dict:
    """Every public function and form of decay: (f(q, k, v, gates), gates)."""
    B, T, H, D = 1, 2048, 4, 64
    per_head, per_channel = -jnp.ones((B, T, H)), -jnp.ones((B, T, H, D))
    cuts = jnp.array([0, 300, 1000, 1001, T], jnp.int32)
    forms = dict(
        none={},
        constant=dict(g_gamma=-jnp.ones(H)),
        head=dict(g=per_head),
        key=dict(gk=per_channel),
        value=dict(gv=per_channel),
        **{"key+value": dict(gk=per_channel, gv=per_channel)},
    )

    def recurrent(q, k, v, gates, **options):
        return glax.recurrent(q, k, v, **gates, **options)

    return {
        **{f"recurrent, decay: {name}": (recurrent, gates) for name, gates in forms.items()},
        "recurrent, packed": (lambda *x: recurrent(*x, cu_seqlens=cuts), forms["key"]),
        "recurrent, reverse": (lambda *x: recurrent(*x, reverse=True), forms["key"]),
        "recurrent_gla": (glax.recurrent_gla, per_channel),
        "simple_gla": (glax.simple_gla, per_head),
        "retention": (lambda q, k, v, _: glax.retention(q, k, v), ()),
        "lightning_attention": (lambda q, k, v, _: glax.lightning_attention(q, k, v, 3, 12), ()),
    }


def compiling(args) -> dict:
    """Seconds to trace and compile the gradient of each variant, at B1 T2048 H4 K=V=64.

    The first variant is compiled twice, because the first compilation loads kernels and starts XLA.
    """
    x = jnp.ones((1, 2048, 4, 64))
    results = []
    for i, (name, (f, gates)) in enumerate(variants().items()):

        def loss(q, k, v, gates, f=f):
            return f(q, k, v, gates).output.sum()

        for _ in range(2 if i == 0 else 1):
            jax.clear_caches()
            begin = time.perf_counter()
            compiled(jax.grad(loss, argnums=(0, 1, 2, 3)), x, x, x, gates)
            seconds = time.perf_counter() - begin
        results.append({"gradient of": name, "seconds to compile": seconds})
    print(f"\n{table(results)}\n")
    return dict(results=results)


def compile_bars(found: dict) -> list[tuple[str, float, str, bool]]:
    slowest = max(found["results"], key=lambda row: row["seconds to compile"])
    seconds = slowest["seconds to compile"]
    title = f"slowest to compile of {len(found['results'])}: {slowest['gradient of']}, seconds"
    return [(title, seconds, f"<= {COMPILE_BAR}", seconds <= COMPILE_BAR)]

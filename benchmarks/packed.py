"""Time rows of documents on a GPU, by cu_seqlens and by segment_ids, beside one document of the same length.

    for tree in BEFORE AFTER BEFORE AFTER; do PYTHONPATH=$tree python benchmarks/packed.py; done

BEFORE, AFTER: checkouts of two commits. The script imports nothing but glax and JAX, so that one copy of it times any commit. A
line is the forward, or the forward and the gradient: the median time of a call with many in flight, and temporary memory.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

import glax

FORMS = dict(none=(), head=("g",), key=("gk",), gated_delta=("g", "beta"), kda=("gk", "beta"))
PACKINGS = "one document", "cu_seqlens", "segment_ids"


def operands(form: str, T: int, H: int, D: int) -> dict[str, jax.Array]:
    """Return q, k, v and the gates of a form in bfloat16, keys with norm 1."""
    q, k, v, logs = (jax.random.normal(jax.random.key(i), (1, T, H, D), jnp.bfloat16) for i in range(4))
    gates = dict(g=jax.nn.log_sigmoid(logs[..., 0]), gk=jax.nn.log_sigmoid(logs) / 4, beta=jax.nn.sigmoid(logs[..., 1]))
    k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True).astype(k.dtype)
    return dict(query=q, key=k, value=v) | {name: gates[name] for name in FORMS[form]}


def packing_of(name: str, T: int, documents: int) -> dict[str, jax.Array]:
    """Return the argument that packs a row of T tokens, in documents of unequal lengths."""
    cuts = jnp.asarray([round(T * (i / documents) ** 1.5) for i in range(documents + 1)], jnp.int32)
    ids = jnp.searchsorted(cuts, jnp.arange(T), side="right")[None]
    return {"one document": {}, "cu_seqlens": dict(cu_seqlens=cuts), "segment_ids": dict(segment_ids=ids)}[name]


def median_ms(call, iters: int) -> float:
    """Return the median over `iters` of the time of a call, of 20 in flight."""
    jax.block_until_ready(call())
    times = []
    for _ in range(iters):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(20)])
        times.append((time.perf_counter() - start) / 20)
    return 1e3 * statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8192,16,128", help="T,H,D")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--platform", default="pallas")
    parser.add_argument("--iters", type=int, default=9)
    args = parser.parse_args()
    T, H, D = (int(x) for x in args.shape.split(","))
    print(f"{glax.__file__}: {jax.devices()[0].device_kind}, jax {jax.__version__}, T,H,D = {args.shape}")
    for form in args.form:
        given = operands(form, T, H, D)
        for packing in PACKINGS:
            pack = packing_of(packing, T, args.documents)

            def forward(given, pack):
                return glax.recurrent(**given, **pack, platform=args.platform).output

            def gradient(given, pack, d_output, forward=forward):
                _, pull = jax.vjp(lambda given: forward(given, pack), given)
                return pull(d_output)

            for mode, f, more in (("forward", forward, ()), ("with gradient", gradient, (given["value"],))):
                compiled = jax.jit(f).lower(given, pack, *more).compile()
                ms = median_ms(functools.partial(compiled, given, pack, *more), args.iters)
                memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
                print(f"{form:12} {packing:13} {mode:13} {ms:8.4f} ms {memory:8.1f} MiB", flush=True)


if __name__ == "__main__":
    main()

"""The delta rule in native code beside plain JAX: part of `python benchmarks/cpu.py --delta`.

python benchmarks/delta_rule.py    # how time and memory grow with T: microseconds of processor time a token, and MiB
"""

import ast
import dataclasses
import functools
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import available_bytes, compiled, interleaved, table

import glax
from glax.cli.measure import Timing

SHAPES = (dict(B=1, T=2048, H=4, width=64), dict(B=2, T=4096, H=8, width=128))
MODES = ("forward", "forward + backward")
BAR = 4.0  # times as fast as the best baseline, in both modes
CLOSE = dict(zip(MODES, (2e-5, 1e-4), strict=True))


def one_token(S, row):
    q, k, v, g, beta = row
    S = jnp.exp(g)[..., None, None] * S
    u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k))
    S = S + k[..., None] * u[..., None, :]
    return S, jnp.einsum("bhkv,bhk->bhv", S, q) * q.shape[-1] ** -0.5


def by_scan(q, k, v, g, beta):
    """Token by token, by lax.scan."""
    B, _, H, K = q.shape
    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    return jnp.moveaxis(lax.scan(one_token, jnp.zeros((B, H, K, v.shape[3])), rows)[1], 0, 1)


def by_blocks(q, k, v, g, beta, C: int = 64):
    """The same, with a gradient that saves a state every 64 tokens and computes the others again."""
    B, T, H, K = q.shape
    rows = tuple(jnp.moveaxis(x, 1, 0).reshape(T // C, C, B, *x.shape[2:]) for x in (q, k, v, g, beta))
    block = jax.checkpoint(functools.partial(lax.scan, one_token))
    o = lax.scan(block, jnp.zeros((B, H, K, v.shape[3])), rows)[1]
    return jnp.moveaxis(o.reshape(T, *o.shape[2:]), 0, 1)


def inverse(A):
    """The inverse of unit lower triangular matrices, by halves: [[A, 0], [B, C]] to [[A', 0], [-C' B A', C']].

    The gradient of lax.linalg.triangular_solve can stop forever on CPUs with JAX 0.10.
    """
    if A.shape[-1] == 1:
        return jnp.ones_like(A)
    n = A.shape[-1] // 2
    upper, lower = inverse(A[..., :n, :n]), inverse(A[..., n:, n:])
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
    return jnp.concatenate([top, jnp.concatenate([-lower @ A[..., n:, :n] @ upper, lower], -1)], -2)


def in_chunks(q, k, v, g, beta, C: int = 64):
    """Chunks of 64 tokens as the papers write them: one inverse for all chunks, then a scan over them."""
    B, T, H, K = q.shape

    def cut(x):
        return jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), 3, 1)

    q, k, v, g, beta = map(cut, (q * K**-0.5, k, v, g, beta))
    G = jnp.cumsum(g, -1)
    causal = jnp.tril(jnp.ones((C, C), bool))
    decay = jnp.exp(jnp.where(causal, G[..., :, None] - G[..., None, :], -jnp.inf))
    A = jnp.eye(C) + jnp.tril((beta[..., None] * k) @ k.mT * decay, -1)
    right = jnp.concatenate([beta[..., None] * v, (beta * jnp.exp(G))[..., None] * k], -1)
    u, w = jnp.split(inverse(A) @ right, [v.shape[-1]], axis=-1)

    def step(S, chunk):
        q, k, u, w, pairs, G = chunk
        U = u - w @ S
        o = (jnp.exp(G)[..., None] * q) @ S + pairs @ U
        last = G[..., -1:]
        return jnp.exp(last)[..., None] * S + (k * jnp.exp(last - G)[..., None]).mT @ U, o

    chunks = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, u, w, q @ k.mT * decay, G))
    o = lax.scan(step, jnp.zeros((B, H, K, v.shape[-1])), chunks)[1]
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, T, H, -1)


def by_glax(q, k, v, g, beta):
    return glax.gated_delta_rule(q, k, v, g, beta).output


def on_xla(q, k, v, g, beta):
    return glax.gated_delta_rule(q, k, v, g, beta, platform="xla").output


BASELINES = {"lax.scan": by_scan, "lax.scan, blocks saved": by_blocks, "chunks": in_chunks}
WAYS = BASELINES | {"glax": by_glax, "glax on XLA": on_xla}


def operands(B: int, T: int, H: int, width: int) -> list[jax.Array]:
    """query, key (of norm 1), value, gate, beta."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, H, width), np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = (rng.standard_normal((B, T, H), np.float32) for _ in range(2))
    return [jnp.asarray(x) for x in (q, k, v)] + [jax.nn.log_sigmoid(g + 3), jax.nn.sigmoid(beta)]


def in_mode(f, mode: str):
    if mode == "forward":
        return f
    return jax.grad(lambda *arrays: jnp.square(f(*arrays)).sum(), argnums=(0, 1, 2, 3, 4))


def error(x, y) -> float:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def affordable(run) -> bool:
    """Whether a run's temporary arrays leave half of the memory. A gradient of lax.scan saves several states a token."""
    available = available_bytes()
    return available is None or run.memory_analysis().temp_size_in_bytes < available / 2


def measure(args) -> dict:
    results = []
    for shape in SHAPES:
        arrays = operands(**shape)
        for mode in MODES:
            every = {name: compiled(in_mode(f, mode), *arrays) for name, f in WAYS.items()}
            runs = {name: run for name, run in every.items() if affordable(run)}
            for name in every.keys() - runs.keys():
                print(f"{shape} {mode}: {name} is left out, for it needs more than half of the memory that is free")
            want = runs["lax.scan, blocks saved"](*arrays)
            errors = {name: error(run(*arrays), want) for name, run in runs.items()}
            times = interleaved(runs, *arrays, repeats=args.repeats, seconds=args.seconds, warm=True)
            best = min(BASELINES.keys() & runs.keys(), key=lambda name: times[name].median)
            ratio = times[best].median / times["glax"].median
            right = max(errors.values()) <= CLOSE[mode]
            ms = {name: dataclasses.asdict(t) for name, t in times.items()}
            title = f"gated delta rule {shape} {mode}"
            results.append(dict(title=title, mode=mode, best=best, ratio=ratio, right=right, ms=ms, errors=errors))
            rows = [
                {
                    "": name,
                    "ms: median (p20-p80)": Timing(**x),
                    "relative error": errors[name],
                    "temporary MiB": round(runs[name].memory_analysis().temp_size_in_bytes / 2**20),
                }
                for name, x in ms.items()
            ]
            print(f"{title}\n{table(rows)}\n", flush=True)
    return dict(results=results)


def bars(found: dict) -> list[tuple[str, float, str, bool]]:
    return [
        (f"{r['title']}: native, times as fast as {r['best']}", r["ratio"], f">= {BAR}", r["ratio"] >= BAR)
        for r in found["results"]
    ]


def resident(name: str) -> float:
    """MiB of memory of this process, by a name of /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def grown(T: int) -> dict[str, float]:
    """Time per token in both modes, and what the gradient adds to the peak of this process, its results included."""
    row, arrays = {"T": T}, operands(1, T, 4, 64)
    for mode in MODES:
        run = compiled(in_mode(by_glax, mode), *arrays)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmHWM")
        jax.block_until_ready(run(*arrays))
        mib = resident("VmHWM") - before
        spent = []
        for _ in range(7):
            began = time.process_time()
            jax.block_until_ready(run(*arrays))
            spent.append(time.process_time() - began)
        row[f"{mode}, us a token"] = 1e6 * statistics.median(spent) / T
    return row | {"peak of the gradient, MiB": mib, "its results, MiB": sum(x.nbytes for x in arrays) / 2**20}


if __name__ == "__main__":
    if sys.argv[1:]:
        print(grown(int(sys.argv[1])))
    else:  # each length in a process of its own, because a peak never falls
        lengths = [2048 * 2**i for i in range(6)]
        rows = [subprocess.check_output([sys.executable, __file__, str(T)], text=True) for T in lengths]
        print(table([ast.literal_eval(row) for row in rows]))

"""Time the overhead of glax over its kernels: `python benchmarks/overhead.py`.

eager:  a warm call of `recurrent_attention` outside of jit, less the same kernel compiled and called directly (under 60 us)
traced: tracing 8 calls of distinct shapes, less tracing their kernels alone, per call (under 3 ms)
import: `import glax` in a fresh process, less the time to import jax (under 150 ms)
"""

import functools
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

import glax
from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import Choice, resolve, run_forward


def median_us(f, repeats: int, calls: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = f()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e6 * statistics.median(times)


def eager() -> float:
    """Return the overhead of a warm call in microseconds. The arrays are tiny, so that the call dominates."""
    q = jnp.ones((1, 1, 1, 4))
    gk = -q
    r = bind(q, q, q, gk=gk)
    kernel = jax.jit(functools.partial(run_forward, resolve(Choice(), r)))
    pairs = []
    for _ in range(15):
        direct = median_us(lambda: kernel(r).output, 3, 200)
        pairs.append(median_us(lambda: glax.recurrent_attention(q, q, q, gk=gk), 3, 200) - direct)
    return statistics.median(pairs)


def traced() -> float:
    """Return the overhead of tracing a call in milliseconds. Each call has its own shape, so that no trace is cached."""
    shapes = [jax.ShapeDtypeStruct((1, 8 + i, 2, 16), jnp.float32) for i in range(8)]
    recurrences = [jax.eval_shape(lambda q: bind(q, q, q, gk=q), shape) for shape in shapes]
    specs = [kernel_registry.find(r) for r in recurrences]

    def kernels_alone(*rs):
        return [spec.run(r, config=spec.config.heuristic(r)).output for spec, r in zip(specs, rs, strict=True)]

    def calls(*qs):
        return [glax.recurrent_attention(q, q, q, gk=q) for q in qs]

    def once(f, operands) -> float:
        jax.clear_caches()
        start = time.perf_counter()
        jax.make_jaxpr(f)(*operands)
        return 1e3 * (time.perf_counter() - start)

    pairs = [once(calls, shapes) - once(kernels_alone, recurrences) for _ in range(10)][1:]
    return statistics.median(pairs) / len(shapes)


def imported() -> float:
    code = "import time, jax, jax.numpy, numpy; s = time.perf_counter(); import glax; print(time.perf_counter() - s)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in range(5)
    ]
    return 1e3 * statistics.median(times)


def main():
    load_kernels()
    for name, value, bar, unit in (
        ("eager call", eager(), 60, "us"),
        ("traced call site", traced(), 3, "ms"),
        ("import glax", imported(), 150, "ms"),
    ):
        print(f"{name:18} {value:8.2f} {unit}   bar {bar} {unit}   {'pass' if value < bar else 'MISS'}")


if __name__ == "__main__":
    main()

"""Compare the kernels that can run one call on an NVIDIA GPU, on both sides of every border of the choice among them.

python benchmarks/platforms.py --json OUT.json                  # Hopper kernels beside Triton's, all cases
python benchmarks/platforms.py --only kda --processes 8         # cases whose name begins with kda
python benchmarks/platforms.py --only float32 --platforms triton xla cuda

A call is timed inside a loop on the device, so the time of launching it from Python is left out. The platforms are timed in
turns, and one process times at a time; the others compile meanwhile. A platform that refuses a call has the reason in its
place. `tests/unit/test_priorities.py` holds glax's choices to the stored results.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the memory
# Else what does not depend on the call before, such as the inverse of the delta rule, is computed once for all calls.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_disable_hlo_passes=while-loop-invariant-code-motion"

import jax
import jax.numpy as jnp
import numpy as np
from timing import table

import glax
from glax._src.core.registry import UnsupportedError
from glax.cli import measure
from glax.cli.measure import Way, interleaved

CALLS = 8  # in one loop on the device
measure.SAMPLE_MS = 20.0  # a loop needs one launch, so short samples are enough
turns = None  # the lock of the process that times


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold a call. kind: the decay, and "delta-" before it for the delta rule. heads: of q and k, and of v."""

    kind: str
    B: int
    T: int
    heads: tuple[int, int]
    K: int
    V: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        heads = "/".join(map(str, dict.fromkeys(self.heads)))
        return f"{self.kind} {self.B},{self.T},{heads},{self.K},{self.V} {self.dtype}"


SQUARE = (
    *(
        (1, T, H)
        for T, H in ((512, 16), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 12), (2048, 16), (2048, 32))
    ),
    *((1, T, H) for T, H in ((4096, 4), (4096, 8), (8192, 2), (8192, 4), (8192, 16))),
    *((B, T, 16) for B, T in ((2, 512), (2, 1024), (2, 2048), (4, 512), (4, 1024), (4, 2048), (8, 512), (16, 256))),
)
FEW = ((1, 1024, 8), (1, 2048, 8), (1, 8192, 4), (4, 512, 16), (2, 2048, 16), (4, 2048, 16))
SHORT = (
    (1, 64, 16),
    (16, 32, 16),
    (64, 64, 16),
    (1, 128, 16),
    (4, 128, 16),
    (32, 128, 16),
    (1, 256, 4),
    (1, 256, 16),
    (4, 256, 16),
)
UNEVEN = ((96, 96), (80, 160), (160, 160), (192, 384), (96, 192))
WIDE = ((1, 2048, 4), (1, 4096, 8), (4, 2048, 8))


def cases() -> list[Case]:
    """Return the grid: square heads at many sizes, other widths and grouped heads at fewer, and float32."""
    found = []
    for kind in ("delta-head", "delta-key", "key", "head"):
        found += [Case(kind, B, T, (H, H), 128, 128) for B, T, H in SQUARE]
        found += [Case(kind, B, T, (H, H), 64, 64) for B, T, H in FEW]
        found += [Case(kind, B, T, (H, H), 128, 128) for B, T, H in SHORT]
        for K, V in ((96, 192), (128, 256), (64, 128)):
            found += [Case(kind, B, T, (H, H), K, V) for B, T, H in WIDE]
    for kind in ("key", "head", "constant"):
        found += [Case(kind, 2, 4096, (8, 8), K, V) for K, V in UNEVEN]
    found += [Case("delta-head", 2, 4096, (30, 30), 96, 192), Case("delta-key", 2, 4096, (30, 30), 96, 192)]
    for kind in ("delta-head", "key", "head"):
        found += [Case(kind, B, T, (H, H), 256, 256) for B, T, H in WIDE]
    found += [Case("delta-none", B, T, (H, H), 128, 128) for B, T, H in FEW]
    found += [Case("constant", B, T, (H, H), 128, 128) for B, T, H in FEW]
    found += [Case("delta-head", B, T, (H, 2 * H), 128, 128) for B, T, H in FEW]
    found += [Case("head", B, T, (1, 4 * H), 128, 64) for B, T, H in FEW]
    found += [Case("key", B, T, (H, H), 256, 512) for B, T, H in WIDE[:2]]
    return list(dict.fromkeys(found))


def float32_cases() -> list[Case]:
    sizes = ((1, 512, 4), (2, 2048, 8), (8, 1024, 32))
    kinds = ("delta-none", "delta-head", "delta-key")
    return [Case(kind, B, T, (H, H), 128, 128, "float32") for kind in kinds for B, T, H in sizes]


def operands_of(case: Case) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=case.dtype):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    (few, H), (B, T) = case.heads, (case.B, case.T)
    arrays = dict(query=normal(B, T, few, case.K), key=normal(B, T, few, case.K), value=normal(B, T, H, case.V))
    decay = case.kind.removeprefix("delta-")
    if decay == "key":
        arrays["gk"] = jax.nn.log_sigmoid(normal(B, T, H, case.K, dtype="float32")).astype(case.dtype)
    if decay == "head":
        arrays["g"] = jax.nn.log_sigmoid(normal(B, T, H, dtype="float32"))
    if decay == "constant":
        arrays["g_gamma"] = jax.nn.log_sigmoid(normal(H, dtype="float32"))
    if case.kind.startswith("delta-"):
        unit = arrays["key"].astype(jnp.float32)
        arrays["key"] = (unit / jnp.linalg.norm(unit, axis=-1, keepdims=True)).astype(case.dtype)
        arrays["beta"] = jax.nn.sigmoid(normal(B, T, H, dtype="float32"))
    return arrays


def loop(case: Case, platform: str, mode: str):
    """Return a jitted function that makes CALLS calls one after another."""

    def forward(arrays, scale):
        return glax.recurrent(**arrays, softmax_scale=scale, platform=platform).output

    def both(arrays, scale):
        output, pull = jax.vjp(lambda arrays: forward(arrays, scale), arrays)
        return output, pull(output)

    call = forward if mode == "forward" else both

    def run(arrays):
        def body(_, scale):
            # Each call's scale depends on every result of the call before, which the barrier keeps whole.
            results = jax.tree.leaves(jax.lax.optimization_barrier(call(arrays, scale)))
            last = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in results)
            return jnp.where(last == 1.5, 0.5 * scale, scale)

        return jax.lax.fori_loop(0, CALLS, body, jnp.float32(case.K**-0.5))

    return jax.jit(run)


def measured(case: Case, platforms: list[str], iters: int) -> dict:
    """Return one row: for each mode and platform the milliseconds, or why the platform refuses the call."""
    arrays, row = operands_of(case), dict(dataclasses.asdict(case), name=case.name)
    for mode in ("forward", "gradient"):
        ways, found = [], {}
        for platform in platforms:
            began, run = time.perf_counter(), loop(case, platform, mode)
            try:
                jax.block_until_ready(run(arrays))
            except UnsupportedError as error:
                found[platform] = str(error).splitlines()[-1].strip()
                continue
            except Exception as error:  # a kernel that does not compile is a row of the result, not the end of the run
                found[platform] = f"{type(error).__name__}: {error}"[:200]
                continue
            row[f"{mode} {platform} first s"] = round(time.perf_counter() - began, 1)
            ways.append(Way(platform, lambda run=run: run(arrays), calls=CALLS))
        with turns:
            times = interleaved(ways, iters) if ways else []
        found |= {way.name: round(each.median, 5) for way, each in zip(ways, times, strict=True)}
        row[mode] = found
        jax.clear_caches()
    return row


def start(lock):
    global turns
    turns = lock


def ratio(row: dict, mode: str, platforms: list[str]) -> float | None:
    """Return the second platform's time over the first's."""
    times = [row[mode].get(platform) for platform in platforms[:2]]
    return times[1] / times[0] if all(isinstance(x, float) for x in times) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platforms", nargs="+", default=["pallas", "triton"])
    parser.add_argument("--only", default="", help="cases whose name begins so; float32 for those of float32")
    parser.add_argument("--skip", type=Path, help="an earlier result, whose cases are left out")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    grid = float32_cases() if args.only == "float32" else [c for c in cases() if c.name.startswith(args.only)]
    if args.skip is not None:
        known = {row["name"] for row in json.loads(args.skip.read_text())["rows"]}
        grid = [case for case in grid if case.name not in known]
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(args.processes, context, start, (context.Lock(),))
    rows, began = [], time.perf_counter()
    with pool:
        waiting = {pool.submit(measured, case, args.platforms, args.iters): case for case in grid}
        for done in concurrent.futures.as_completed(waiting):
            try:
                rows.append(done.result())
            except Exception as error:
                print(f"{waiting[done].name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if args.json is not None:
                write(args, rows)
    order = [case.name for case in grid]
    rows.sort(key=lambda row: order.index(row["name"]))
    shown = [
        {"case": row["name"]}
        | {f"{mode} {p}": row[mode].get(p) for mode in ("forward", "gradient") for p in args.platforms}
        | {f"{mode} ratio": ratio(row, mode, args.platforms) for mode in ("forward", "gradient")}
        for row in rows
    ]
    for line in shown:
        for name, cell in line.items():
            if isinstance(cell, str) and name != "case":
                line[name] = "refused"
            elif isinstance(cell, float) and "ratio" not in name:
                line[name] = f"{cell:.3f}"
    print(table(shown))
    ratios = [r for row in rows for mode in ("forward", "gradient") if (r := ratio(row, mode, args.platforms))]
    if ratios:
        print(f"{len(rows)} cases in {time.perf_counter() - began:.0f} s; median ratio {statistics.median(ratios):.2f}")
    if args.json is not None:
        write(args, rows)


def write(args, rows: list[dict]):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = dict(device=device_name(), jax=jax.__version__, glax=commit or glax.__version__, calls=CALLS)
    args.json.write_text(json.dumps(dict(about, rows=rows), indent=1) + "\n")


def device_name() -> str:
    found = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()

"""Compiles the TPU kernels for real chips, without a chip, and records the results in a table.

    python -m benchmarks.tpu.compile            compiles everything and writes benchmarks/tpu/table.txt
    python -m benchmarks.tpu.compile --check    compiles everything and fails where the table differs
    make tpu                                    checks with the table's libtpu, which stays outside of the environment

--few compiles three of the problems for each chip.

Needs libtpu (pip install "jax[tpu]==0.10.2"). Another compiler version makes other code, so --check needs the table's version.
Each chip has its own process, in which the kernels compile under a limit of 16 MiB of VMEM. The table has a line for each kernel:

bundles: instruction words of the whole kernel. step: instruction words of one step of the scan, as the longest run without a
branch (plus, for per-key gates, the check before it). units: tiles of 128 lanes, or heads of a pool, that a step computes. vmem:
KiB. code: KiB of the whole program, with all its kernels and XLA's copies.
"""

import argparse
import concurrent.futures
import dataclasses
import difflib
import functools
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks.tpu.problems import FEW, POOLS, PROBLEMS, TARGETS, PoolProblem, Problem, fingerprint, shapes

TABLE = pathlib.Path(__file__).with_name("table.txt")
JAX = "0.10.2"
VMEM_KIB = 16 * 1024
IN_HBM = "read_rows", "write_rows"  # kernels that copy within HBM, and use no VMEM


@dataclasses.dataclass(frozen=True)
class Row:
    target: str
    problem: str
    kernel: str
    bundles: int
    step: int
    units: int
    vmem: int
    code: int

    def __str__(self):
        numbers = (self.bundles, self.step, self.units, self.vmem, self.code)
        return f"{self.target}  {self.problem:38} {self.kernel:12}" + "".join(f"{x:8}" for x in numbers)


def environment(dump: str) -> dict[str, str]:
    """Returns an environment in which libtpu compiles without a TPU and writes its code to the folder `dump`."""
    return os.environ | dict(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
    )


def compile_all(target: str, dump: str, problems: list[Problem]):
    """Prints the rows of one chip as lines of JSON. Runs in a process with `environment`."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from glax._src.core.registry import kernel_registry
    from glax._src.kernels import load_kernels
    from glax._src.kernels.pallas_tpu import rows
    from glax._src.kernels.pallas_tpu.config import pool_block_of
    from glax._src.kernels.pallas_tpu.plan import Plan

    load_kernels()
    pooled = "recurrent.step", "recurrent.verify"
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target].topology)
    array = shapes(SingleDeviceSharding(topology.devices[0]))
    for problem in problems:
        operands = problem.operands(array)
        r, is_pool = operands[0], isinstance(problem, PoolProblem)
        whole = ("chunked", (r,)), ("chunked.vjp", operands)
        calls = []
        for algorithm, given in [(name, operands) for name in pooled] if is_pool else whole:
            spec = kernel_registry.kernels[f"{algorithm}/pallas/tpu"]
            config = spec.config.heuristic(r)
            units = pool_block_of(r)[0] if is_pool else Plan.of(r, config.chunk, config.units, spec.is_gradient).units
            calls.append((functools.partial(spec.run, config=config), given, units))
        if is_pool:
            (_, pool, slots), units = operands, pool_block_of(r)[0]
            calls += [
                (rows.read_rows, (pool, slots), units),
                (rows.write_rows, (pool, slots, array((*slots.shape, *pool.shape[1:]), pool.dtype)), units),
            ]
        for run, given, units in calls:
            lowered = jax.jit(run).trace(*given).lower(lowering_platforms=("tpu",))
            compiled = lowered.compile(compiler_options=dict(xla_tpu_scoped_vmem_limit_kib=str(VMEM_KIB)))
            code = -(-compiled.memory_analysis().generated_code_size_in_bytes // 1024)
            vmem = vmem_of(compiled.as_text())
            for kernel, (bundles, step) in sorted(bundles_of(dump, problem.form == "key" and not is_pool).items()):
                row = Row(target, str(problem), kernel, bundles, step, units, vmem[kernel], code)
                print(json.dumps(dataclasses.asdict(row)), flush=True)


def vmem_of(text: str) -> dict[str, int]:
    """Reads the KiB of VMEM of each kernel from the compiled program's text."""
    calls = re.findall(r"%glax_(\w+?)(?:\.\d+)? = .*?used_scoped_memory_configs\":\[(.*?)\]", text)
    return {name: sum(int(size) for size in re.findall(r'"size":"(\d+)"', configs)) // 1024 for name, configs in calls}


def bundles_of(dump: str, has_check: bool) -> dict[str, tuple[int, int]]:
    """Returns (bundles, bundles of a step) of each kernel compiled since the last call, and removes their files."""
    found = {}
    for path in glob.glob(f"{dump}/*"):
        name = re.search(r"-glax_(\w+?)(?:\.\d+)?-\d+-final_bundles\.txt$", path)
        if name:
            found[name[1]] = counted(pathlib.Path(path).read_text(), has_check and name[1] != "save_states")
        os.remove(path)
    return found


def counted(text: str, has_check: bool) -> tuple[int, int]:
    """Counts (bundles, bundles of a step) in a listing of bundles."""
    cuts, last = [0], 0
    for line in text.splitlines():
        if (bundle := re.match(r"\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:", line)) is not None:
            last = int(bundle[1], 16)
            if bundle[2] or "sbr.rel" in line:
                cuts.append(last)
    runs = [after - before for before, after in zip(cuts, [*cuts[1:], last], strict=True)]
    longest = runs.index(max(runs))
    # A branch of a few bundles stands between the check and the form that it chooses, and leads to the other form.
    check = next(run for run in reversed(runs[:longest]) if run > 20) if has_check else 0
    return last + 1, runs[longest] + check


def rows_of(target: str, options: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-m", "benchmarks.tpu.compile", "--one", target, dump, *options]
        done = subprocess.run(command, env=environment(dump), stdout=subprocess.PIPE, text=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"compiling for {target} failed with exit status {done.returncode}")
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def header() -> list[str]:
    names = ("bundles", "step", "units", "vmem", "code")
    return [
        f"# jax {JAX}, libtpu {libtpu_version()}, code {fingerprint()}; by: python -m benchmarks.tpu.compile",
        f"#    {'problem':38} {'kernel':12}" + "".join(f"{name:>8}" for name in names),
    ]


def libtpu_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("libtpu")
    except PackageNotFoundError:
        raise SystemExit(f'libtpu is not installed: pip install "jax[tpu]=={JAX}"') from None


def main():
    parser = argparse.ArgumentParser(prog="benchmarks.tpu.compile")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="only these chips' lines")
    parser.add_argument("--few", action="store_true", help="with --check: only some of the problems")
    parser.add_argument("--only", default="", help="a regular expression: only the problems whose names it finds")
    parser.add_argument("--one", nargs=2, metavar=("TARGET", "DUMP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    problems = [x for x in (FEW if args.few else [*PROBLEMS, *POOLS]) if re.search(args.only, str(x))]
    if args.one:
        return compile_all(*args.one, problems)
    if args.few and not args.check:
        parser.error("--few goes with --check: the table has all problems")
    options = [*(["--few"] if args.few else []), "--only", args.only]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = [row for rows in pool.map(functools.partial(rows_of, options=options), args.targets) for row in rows]
    new = [*header(), *map(str, rows)]
    over = [row for row in rows if not (row.kernel in IN_HBM or row.vmem > 0) or row.vmem > VMEM_KIB]
    if over:
        raise SystemExit(f"VMEM not within {VMEM_KIB} KiB:\n" + "\n".join(map(str, over)))
    old = TABLE.read_text().splitlines() if TABLE.exists() else []
    names = [str(problem) for problem in problems]
    selected = [line for line in old if (words := line.split())[0] in args.targets and " ".join(words[1:-6]) in names]
    if not args.check:
        unchanged = [line for line in old if not line.startswith("#") and line not in selected]
        targets, every = list(TARGETS), [str(x) for x in (*PROBLEMS, *POOLS)]

        def place(line: str) -> tuple[int, int]:
            target, *problem = line.split()[:-6]
            return targets.index(target), every.index(" ".join(problem))

        lines = sorted([*unchanged, *map(str, rows)], key=place)
        TABLE.write_text("\n".join([*header(), *lines]) + "\n")
    elif (table := [*old[:2], *selected]) != new:
        print(*difflib.unified_diff(table, new, "table.txt", "compiled", lineterm="", n=0), sep="\n")
        raise SystemExit("benchmarks/tpu/table.txt is out of date: python -m benchmarks.tpu.compile")
    else:
        print(f"{len(rows)} lines of benchmarks/tpu/table.txt compiled again: all the same")


if __name__ == "__main__":
    main()

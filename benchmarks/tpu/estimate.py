"""Estimates run times on TPUs from the bundles of the table. No TPU has run the kernels.

    python -m benchmarks.tpu.estimate [v5e v6e]

A kernel is taken to need the larger of bundles / clock and its own bytes / bandwidth. This assumes that instructions wait only
for products, whose delays the compiler has scheduled, and that copies overlap with work, as the compiler arranges.
"""

import sys

from benchmarks.tpu.compile import TABLE
from benchmarks.tpu.problems import PROBLEMS, TARGETS, Problem

CHUNK = 128


def bundles() -> dict[tuple[str, str, str], tuple[int, int]]:
    """Reads (bundles of a step, units) by chip, problem and kernel from the table."""
    found = {}
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            target, *problem, kernel, _, step, units, _, _ = line.split()
            found[target, " ".join(problem), kernel] = int(step), int(units)
    return found


def own_bytes(problem: Problem) -> dict[str, int]:
    """Returns the bytes that each kernel reads and writes.

    The states before the chunks are in the dtype of q, and the inverses of the delta rule in float32.
    """
    tensor, gates, (forward, _) = problem.tensor, problem.gates, problem.floors
    sequences = (problem.sequences or problem.B) * problem.H * problem.D**2 * 4
    pack = 128 // problem.D
    before = tensor * pack * problem.D // CHUNK
    before += problem.erases * problem.B * problem.H * problem.T * CHUNK * 4
    shared = tensor // problem.shared
    return dict(
        forward=forward,
        save_states=shared + tensor + gates + before + sequences,
        # the gradients of shared heads are stored in float32
        backward=(2 + 2 * min(problem.shared, 2)) * shared + 3 * tensor + 2 * gates + before + 2 * sequences,
    )


def seconds(target: str, problem: Problem, kernel: str, found) -> tuple[float, float]:
    """Returns the seconds (by instructions, by bytes) of a chip whose cores share the call."""
    chip = TARGETS[target]
    step, units = found[target, str(problem), kernel]
    heads = units * 128 // problem.D if problem.D < 128 else units
    blocks = -(-problem.T // CHUNK) + (problem.sequences or 0)
    steps = problem.B * problem.H // heads * blocks
    return steps * step / chip.clock / chip.cores, own_bytes(problem)[kernel] / chip.bandwidth / chip.cores


def main(targets=("v5e", "v6e")):
    found = bundles()
    for target in targets:
        chip = TARGETS[target]
        print(f"\n{target}: {chip.clock / 1e9:.2f} GHz, {chip.bandwidth * chip.cores / 1e9:.0f} GB/s\n")
        print("| call | | GB | GFLOP | floor, us | by bytes, us | by bundles, us | of the floor |\n" + "|---" * 8 + "|")
        for problem in PROBLEMS:
            for way, kernels, floor, flops in zip(
                ("forward", "gradient"),
                (("forward",), ("save_states", "backward")),
                problem.floors,
                problem.flops(),
                strict=True,
            ):
                each = [seconds(target, problem, kernel, found) for kernel in kernels]
                total = sum(max(pair) for pair in each)
                least = floor / chip.bandwidth / chip.cores
                by_bundles, by_bytes = (sum(pair[i] for pair in each) for i in (0, 1))
                print(
                    f"| {problem} | {way} | {floor / 1e9:.3f} | {flops / 1e9:.0f} | {least * 1e6:.0f} | {by_bytes * 1e6:.0f} "
                    f"| {by_bundles * 1e6:.0f} | {least / total:.0%} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:] or ("v5e", "v6e"))

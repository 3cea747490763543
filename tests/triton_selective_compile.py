"""Compile the kernels of the selective scan without a GPU, and report the resources of each.

python -m tests.triton_selective_compile 90 "N16 bfloat16 16" prints a line of JSON per kernel, in the form of
`tests.triton_compile`, with the instructions of its longest innermost loop for every token, channel and number of a state. The
last two words are a dtype and the numbers of a state. Channels are 5120. "packed" as the first word resets states at tokens, and
"prompt" is one sequence, which is cut.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import triton

from glax._src.kernels.common.selective import Packing, SelectiveOperands
from glax._src.kernels.triton import selective_scan, selective_scan_config
from glax._src.kernels.triton.selective_scan_config import CHUNK, forward_config, gradient_config
from tests.triton_compile import TOOLS, Launch, compiled, launches


def shipped(name: str, dtype: str, N: int) -> list[Launch]:
    """Return the launches of the heuristic configs: the forward that saves states, and the gradient."""
    (G, T, D), shape = (1 if name == "prompt" else 4, 2048, 5120), jax.ShapeDtypeStruct
    x, B, states = shape((G, T, D), dtype), shape((G, T, N), dtype), shape((G, D, N), "float32")
    packing = Packing(None, shape((G, T), "bool") if name == "packed" else None)
    p = SelectiveOperands(x, x, shape((D, N), "float32"), B, B, states, packing)
    skip, starts = shape((D,), "float32"), shape((G * T // CHUNK + G, D, N), "float32")

    def forward(p, skip):
        return selective_scan.forward(p, skip, forward_config(p), reverse=False, saves_residuals=True)

    def gradient(p, *rest):
        return selective_scan.gradients(p, *rest, gradient_config(p), reverse=False)

    return launches(forward, p, skip) + launches(gradient, p, skip, starts, x, states)


def longest_loop(cubin: bytes) -> int:
    """Return the number of instructions of the longest loop that has no loop within."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels, spans, count = {}, [], 0
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            target = re.search(r"BRA.*(\.L_x_\d+)\)", line)
            if target and target[1] in labels:
                spans.append((labels[target[1]], count))
            count += 1
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return max(b - a + 1 for a, b in inner)


if __name__ == "__main__":
    selective_scan_config.capability = lambda: divmod(int(sys.argv[1]), 10)  # what the heuristics ask about the GPU
    compile_one, binaries = triton.compile, []
    triton.compile = lambda *args, **options: binaries.append(compile_one(*args, **options)) or binaries[-1]
    for what in sys.argv[2:]:
        name, dtype, N = what.split()
        for each in shipped(name, dtype, int(N)):
            usage = compiled(each, int(sys.argv[1]))
            D = dict(each.constants)["D"]
            # `enter` has no span, and 4 warps.
            entries = D.SPAN * D.BK * D.BV / 32 if D.SPAN else D.BK / 128
            per_entry = longest_loop(binaries[-1].asm["cubin"]) / entries
            row = dict(
                kernel=each.kernel.__name__, runs=what, registers=usage.registers, matrix=[], shared=usage.shared
            )
            print(json.dumps(row | dict(stack=usage.stack, per_entry=round(per_entry, 2))), flush=True)

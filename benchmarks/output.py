"""Print results as tables, and write them in the form of results/README.md."""

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import jax

import glax
from glax._src.core.known_miscompiles import version_of

LIBRARIES = ("jax", "jaxlib", "fla-core", "mamba-ssm", "jax-linear-attention", "ejkernel", "torch", "triton")

LABEL = ("model", "problem", "gate", "dtype", "packing", "states_every", "gates")
FIGURES = (
    "times_first",
    "times_floor",
    "kernels_ms",
    "kernels_times_floor",
    "error",
    "temporary_mib",
    "mib",
    "first_s",
    "gflops",
)


def table(rows: list[dict[str, object]]) -> str:
    """Aligned columns: text to the left, all else to the right; None is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    left = [all(isinstance(row.get(name), str) for row in rows) for name in names]

    def line(texts):
        padded = (t.ljust(w) if to_left else t.rjust(w) for t, w, to_left in zip(texts, widths, left, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [names, *cells]))


def cell(x) -> str:
    match x:
        case None:
            return "-"
        case float():
            return f"{x:.1e}" if x and abs(x) < 0.01 else f"{x:.2f}"
        case _:
            return str(x)


def show(lines: list[dict], modes: Iterable[str]):
    """Print a table of each mode, with what sets its calls apart."""
    for mode in (*modes, "errors"):
        rows = []
        for line in lines:
            if line["mode"] != mode or "refusal" in line:
                continue
            row = {"": ", ".join(str(line[name]) for name in LABEL if name in line), "by": line["implementation"]}
            if "ms" in line:
                row["ms (p20-p80)"] = f"{line['ms']:.3f} ({line['p20']:.3f}-{line['p80']:.3f})"
                row |= {name: line[name] for name in FIGURES if name in line}
            else:
                row |= {
                    name: x for name, x in line.items() if name not in (*LABEL, "mode", "implementation", "gate_dtype")
                }
            rows.append(row)
        if rows:
            print(f"\n{mode}\n{table(rows)}", flush=True)
    for reason in dict.fromkeys(f"{line['implementation']}: {line['refusal']}" for line in lines if "refusal" in line):
        print(reason)


def without(arguments: list[str], *options: str) -> list[str]:
    """Return the arguments without these options and the value behind each."""
    dropped = {i + more for i, x in enumerate(arguments) if x in options for more in (0, 1)}
    return [x for i, x in enumerate(arguments) if i not in dropped]


def write(path: Path, lines: list[dict]):
    """Write the lines with the date, the device, the versions, and the command but for its file of results and the folders of
    this machine."""
    device = jax.devices()[0]
    versions = dict(glax=glax.__version__) | {
        name: found for name in LIBRARIES if (found := version_of(name)) is not None
    }
    about = dict(
        date=datetime.date.today().isoformat(),
        device=platform.machine() if device.platform == "cpu" else device.device_kind,
        versions=versions,
        method=shlex.join(
            ["python", *(Path(x).name if Path(x).is_absolute() else x for x in without(sys.argv, "--json"))]
        ),
    )
    path.write_text(json.dumps(about | dict(results=lines), indent=1) + "\n")

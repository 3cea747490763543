"""Draw a benchmark as a roofline: operations per second over operations per byte, below the limits of the device."""

import importlib.util
from pathlib import Path

from glax._src.core.files import replacing


def plot(document: dict, path: Path) -> str:
    """Write the picture of what `glax bench` measured to `path`. Return a text for the user that says so, or why there is none.

    document: the content of bench.json.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    from matplotlib.figure import Figure

    timed = [result for result in document["results"] if result.get("gflops") is not None]
    if not timed:
        return "no plot: no operations were counted"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    copy, products = document["machine"]["copy_gbytes"], document["machine"]["matmul_gflops"]
    intensities = [result["flops"] / result["bytes"] for result in timed]
    ends = [min(intensities) / 4, max(*intensities, *(peak / copy for peak in products.values())) * 4]
    for dtype, peak in products.items():
        ridge = peak / copy
        axes.plot([ends[0], ridge, ends[1]], [ends[0] * copy, peak, peak], color="grey")
        axes.annotate(f"{dtype} product", (ends[1], peak), ha="right", va="bottom", color="grey")
    for dtype in products:
        for mode, marker in (("forward", "o"), ("train", "s"), ("step", "^")):
            some = [i for i, r in enumerate(timed) if r["mode"] == mode and r["problem"]["dtype"] == dtype]
            if some:
                x, y = [intensities[i] for i in some], [timed[i]["gflops"] for i in some]
                axes.plot(x, y, marker, label=f"{mode}, {dtype}")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s", title=document["device"])
    axes.legend()
    with replacing(path) as new:
        figure.savefig(new, dpi=120)
    return f"plotted {path}"

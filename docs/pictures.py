"""Draw the pictures of README.md and of the guides, from benchmarks/results and from the memory that XLA plans.

    python docs/pictures.py            all of them, into docs/_static, and the table of README.md
    python docs/pictures.py speed      one of them, and the table

It needs matplotlib. The same input gives the same file.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "_static"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
TEAL, DARK, AMBER, GREY = "#0f8b8d", "#0a5c5e", "#d1741a", "#6b7280"
STYLE = {
    "svg.hashsalt": "glax", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "axes.labelcolor": "#1f2937",
    "xtick.color": "#1f2937", "ytick.color": "#1f2937", "legend.frameon": False,
}  # fmt: skip


def lines(folder: str) -> Iterator[dict]:
    """Yield the lines of a device's files of results that no later file supersedes, each with the name of its file."""
    for path in sorted((RESULTS / folder).glob("*.json")):
        for line in json.loads(path.read_text()).get("results", ()):
            if "superseded" not in line:
                yield line | {"file": path.name}


# ---- speed beside peers ----------------------------------------------------------------------------------------------


def call_of(line: dict) -> tuple:
    return tuple(line.get(name) for name in ("problem", "gate", "model", "packing", "heads"))


class Beside(NamedTuple):
    """Hold the time of a peer over glax's, and glax's milliseconds in the same run."""

    ratio: float
    ms: float
    peer: str


def beside_peers(found: list[dict]) -> dict[tuple, dict[str, Beside]]:
    """Return, for each call and mode, the lowest ratio of all runs and peers."""
    timed = [x for x in found if x.get("ms") and x.get("mode") in ("forward", "with gradient")]
    ours = {(x["file"], x["mode"], *call_of(x)): x["ms"] for x in timed if x["implementation"] == "glax"}
    lowest: dict[tuple, dict[str, Beside]] = {}
    for x in timed:
        own = ours.get((x["file"], x["mode"], *call_of(x)))
        if own is not None and not x["implementation"].startswith("glax"):
            modes = lowest.setdefault(call_of(x), {})
            beside = Beside(x["ms"] / own, own, x["implementation"])
            modes[x["mode"]] = min(modes.get(x["mode"], beside), beside)
    return {call: modes for call, modes in lowest.items() if len(modes) == 2}


def name_of(call: tuple) -> str:
    problem, gate, model, packing, _ = call
    extra = model or packing
    return f"{gate}, {extra}" if extra else f"{gate}, {problem}"


def speed() -> plt.Figure:
    ratios = beside_peers(list(lines("nvidia_h100")))
    calls = sorted(ratios, key=lambda call: ratios[call]["with gradient"])
    figure, axes = plt.subplots(figsize=(8.4, 0.29 * len(calls) + 1.3))
    axes.axvspan(0.5, 1, color=AMBER, alpha=0.12, lw=0)
    axes.axvline(1, color=GREY, lw=1)
    for y, call in enumerate(calls):
        forward, gradient = (ratios[call][mode].ratio for mode in ("forward", "with gradient"))
        axes.plot([forward, gradient], [y, y], color="#cbd5e1", lw=2, zorder=1)
        for value, filled in ((forward, False), (gradient, True)):
            color = AMBER if value < 1 else TEAL
            axes.scatter(value, y, s=42, zorder=2, edgecolors=color, facecolors=color if filled else "white", lw=1.6)
    axes.set(xscale="log", xlim=(0.75, 14), ylim=(-0.7, len(calls) - 0.3))
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 5, 10], ["0.8", "1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_yticks(range(len(calls)), [name_of(call) for call in calls], fontsize=9)
    axes.set_xlabel("time of the fastest peer / time of glax, one H100, the lowest of all runs")
    axes.grid(axis="x", color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.scatter([], [], s=42, edgecolors=TEAL, facecolors="white", lw=1.6, label="forward")
    axes.scatter([], [], s=42, color=TEAL, label="forward and gradient")
    axes.scatter([], [], s=42, color=AMBER, label="the peer is faster")
    axes.legend(loc="lower right", fontsize=9)
    return figure


BEGIN, END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"
ROWS = (
    "per head, Mamba2-1.3B",
    "per key, GLA-1.3B",
    "constant, RetNet-1.3B",
    "per head, 4,2048,16,128,128",
    "delta rule, per head, 1,8192,32,128,128",
)


def with_table(text: str) -> str:
    """Return README's text with the table of ROWS as it now is."""
    found = {name_of(call): (call, modes) for call, modes in beside_peers(list(lines("nvidia_h100"))).items()}
    rows = ["| call | B, T, H, K, V | glax, ms | fastest peer | peer / glax |", "|---|---|---|---|---|"]
    for name in ROWS:
        call, modes = found[name]
        forward, gradient = modes["forward"], modes["with gradient"]
        peers = " / ".join(dict.fromkeys((forward.peer, gradient.peer)))
        times, ratios = f"{forward.ms:.3g} / {gradient.ms:.3g}", f"{forward.ratio:.2f}x / {gradient.ratio:.2f}x"
        title = name.removesuffix(f", {call[0]}")
        rows.append(f"| {title} | {call[0].replace(',', ', ')} | {times} | {peers} | {ratios} |")
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(rows) + "\n" + END + rest.split(END)[1]


# ---- the recurrence and its chunks -----------------------------------------------------------------------------------


def chunks() -> plt.Figure:
    """Draw tokens in three chunks: scores within a chunk, and the state that passes from chunk to chunk."""
    figure, axes = plt.subplots(figsize=(8.4, 3.3))
    size, gap, each = 0.42, 1.9, 4
    for n in range(3):
        left = n * (each * size + gap)
        for i in range(each):
            for j in range(each):
                decay = 0.85 ** (2.5 * (i - j)) if j <= i else 0
                corner = (left + j * size, (each - 1 - i) * size)
                axes.add_patch(Rectangle(corner, size, size, fc=TEAL, alpha=decay, lw=0))
                axes.add_patch(Rectangle(corner, size, size, fc="none", ec="#cbd5e1", lw=0.8))
        middle = left + each * size / 2
        axes.text(middle, -0.35, f"chunk {n + 1}", ha="center", va="top")
        axes.text(middle, each * size + 0.18, r"scores $A_{ij},\ j \leq i$", ha="center", fontsize=10, color=GREY)
        if n < 2:
            start, x = left + each * size, left + each * size + gap / 2
            arrow = dict(arrowstyle="-|>", mutation_scale=14, color=AMBER, lw=1.8, shrinkA=0, shrinkB=0)
            y = each * size / 2
            axes.add_patch(FancyArrowPatch((start + 0.08, y), (x - 0.42, y), **arrow))
            axes.add_patch(FancyArrowPatch((x + 0.42, y), (start + gap - 0.08, y), **arrow))
            axes.add_patch(Rectangle((x - 0.36, y - 0.36), 0.72, 0.72, fc="white", ec=AMBER, lw=1.8))
            axes.text(x, y, "S", ha="center", va="center", style="italic", fontsize=13)
            axes.text(x, y - 0.52, "K x V", ha="center", va="top", fontsize=9, color=GREY)
    axes.set(xlim=(-0.3, 3 * each * size + 2 * gap + 0.3), ylim=(-0.9, each * size + 0.6), aspect="equal")
    axes.axis("off")
    return figure


# ---- memory by length ------------------------------------------------------------------------------------------------


def memory() -> plt.Figure:
    """Draw what XLA plans on a CPU for a forward and its gradient, beside arguments and results, by length."""
    import jax
    import jax.numpy as jnp

    import glax

    H, K = 4, 64
    lengths = [2**n for n in range(8, 15)]

    def token_by_token(q, k, v, g):
        def step(S, x):
            q, k, v, g = x
            S = jnp.exp(g)[..., None, None] * S + k[..., None] * v[..., None, :]
            return S, jnp.einsum("hkv,hk->hv", S, q)

        return jax.lax.scan(step, jnp.zeros((H, K, K)), (q, k, v, g))[1]

    def softmax(q, k, v, g):
        scores = jnp.einsum("thk,shk->hts", q, k) * K**-0.5
        scores = jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf)
        return jnp.einsum("hts,shv->thv", jax.nn.softmax(scores), v)

    def simple_gla(platform, q, k, v, g):
        return glax.simple_gla(q, k, v, g, platform=platform).output

    def planned(f, T: int) -> float:
        x, g = jax.ShapeDtypeStruct((T, H, K), jnp.float32), jax.ShapeDtypeStruct((T, H), jnp.float32)
        gradient = jax.jit(jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2, 3)))
        return gradient.lower(x, x, x, g).compile().memory_analysis().temp_size_in_bytes / 2**20

    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    curves = (
        ("softmax attention, all scores", softmax, AMBER, 4096),
        ("a scan under autodiff: a state for each token", token_by_token, GREY, lengths[-1]),
        ("glax, XLA's kernel", functools.partial(simple_gla, "xla"), TEAL, lengths[-1]),
        ("glax, native kernel", functools.partial(simple_gla, "cpp"), DARK, lengths[-1]),
    )
    for label, f, color, most in curves:
        shown = [T for T in lengths if most >= T]
        axes.plot(shown, [planned(f, T) for T in shown], marker="o", ms=4, color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel=f"tokens (one sequence, H = {H}, K = V = {K}, float32)")
    axes.set_ylabel("MiB beside arguments and results")
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.minorticks_off()
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.45, -0.2), ncol=2)
    return figure


# ---- growth ----------------------------------------------------------------------------------------------------------


def growth() -> plt.Figure:
    """Draw the memory of a request by its length: the state of a layer, and the keys and values that softmax stores."""
    H, K = 16, 128
    lengths = [2**n for n in range(4, 18)]
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    cache = [T * H * 2 * K * 2 / 2**20 for T in lengths]
    axes.plot(lengths, cache, color=AMBER, label="keys and values of softmax attention, bfloat16")
    for bytes_of_each, color, dtype in ((4, TEAL, "float32"), (2, DARK, "bfloat16")):
        state = H * K * K * bytes_of_each / 2**20
        axes.plot(lengths, [state] * len(lengths), color=color, label=f"state, {dtype}")
    axes.set(
        xscale="log", yscale="log", xlabel=f"tokens read (a layer of H = {H}, K = V = {K})", ylabel="MiB a request"
    )
    axes.set_xticks([16, 128, 1024, 8192, 131072], ["16", "128", "1,024", "8,192", "131,072"])
    axes.minorticks_off()
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.legend(fontsize=9)
    return figure


# ---- a sharded sequence ----------------------------------------------------------------------------------------------


def parallel() -> plt.Figure:
    """Draw the speedup over one GPU of a sequence of 131,072 tokens, by the number of GPUs: all runs."""
    found = [x for folder in ("nvidia_h100", "nvidia_h200") for x in lines(folder) if x.get("speedup")]
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    most = max(x["devices"] for x in found)
    axes.plot([1, most], [1, most], color="#cbd5e1", lw=1.5, ls="--", label="linear")
    for key, color, label in (("speedup", TEAL, "calls in a row"), ("speedup_waited", AMBER, "each call waited for")):
        runs = [(x["devices"], x[key]) for x in found if x.get(key)]
        axes.scatter(*zip(*runs, strict=True), s=26, color=color, alpha=0.55, lw=0, label=label)
    axes.set(xlabel="GPUs of one host (H100, H200)", ylabel="speedup, forward and gradient")
    axes.set_xticks(sorted({x["devices"] for x in found}))
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.legend(fontsize=9)
    return figure


PICTURES = dict(speed=speed, chunks=chunks, memory=memory, growth=growth, parallel=parallel)


def main():
    for name in sys.argv[1:] or PICTURES:
        with plt.rc_context(STYLE):
            figure = PICTURES[name]()
            figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
            plt.close(figure)
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()

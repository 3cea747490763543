"""The table of what `run.py` measures: the calls of each suite, which of them are timed in turns, by what, and the bars."""

import dataclasses
from collections.abc import Callable, Sequence

from calls import NAMED, Call, calls, grid, neighbours, published
from peers import PLAIN, torch_peer

CPU_SHAPES = ((1, 2048, 4, 64), (2, 4096, 8, 128))
DELTA_SHAPES = {
    "head": ((4, 2048, 16, 128), (1, 8192, 16, 32, 128, 128), (1, 8192, 16, 64, 128, 128), (1, 32768, 8, 16, 128, 128)),
    "key": ((4, 2048, 16, 128), (1, 8192, 32, 128)),
}
NATIVE = {"forward": 4.0, "with gradient": 5.0}  # times as fast as the best of all else, on a CPU
SPEED = {"forward": 1.0, "with gradient": 1.8}  # XLA's kernels: times as fast as the best baseline
DELTA, SEGMENTS, STATES = 4.0, 1.15, 1.1
CLOSE = {"forward": 2e-5, "train": 1e-4}  # both sides are float32: twice the bars against float64


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure must be at least, or at most."""

    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def row(self) -> dict:
        wanted = f"{'<=' if self.at_most else '>='} {self.limit:g}"
        return dict(bar=self.what, measured=self.value, wanted=wanted, met="pass" if self.is_met else "MISS")


@dataclasses.dataclass(frozen=True)
class Suite:
    """`calls` are what is measured by the subjects `by`; what `group` makes of one call is timed in turns.

    With --shape, --gate and --like other calls take their place, with the fields `rest`. close: the errors against the first
    subject beyond which results are wrong, by mode. loop: calls are made in a loop on the device. peer: also by the library of
    PyTorch that users of such a layer run. bars: of the lines of results.
    """

    what: str
    calls: Callable[[], Sequence[Call]]
    by: tuple[str, ...]
    group: Callable[[Call], list[Call]] = lambda call: [call]
    rest: dict = dataclasses.field(default_factory=dict)
    gates: tuple[str, ...] = ("key", "head")
    close: dict | None = None
    loop: bool = False
    peer: bool = False
    bars: Callable[[list[dict]], list[Bar]] = lambda lines: []


def delta_calls() -> list[Call]:
    return [
        x for gate, shapes in DELTA_SHAPES.items() for x in calls(shapes, (gate,), delta=True, gate_dtype="float32")
    ]


def with_documents(call: Call) -> list[Call]:
    """One document, and 16 and 128 that begin at the same tokens for all, by cu_seqlens and by gates of -inf."""
    each = [dict(packed=count, packing=packing) for count in (16, 128) for packing in ("cu_seqlens", "-inf")]
    return [
        call,
        *(dataclasses.replace(call, **x) for x in each if call.gate in ("key", "head") or "-inf" not in x.values()),
    ]


def with_segments_or_states(call: Call) -> list[Call]:
    segments = dataclasses.replace(call, packed=4, packing="segment_ids")
    return [call, segments, dataclasses.replace(call, states_every=256)]


def by_packing(call: Call) -> list[Call]:
    return [call, *(dataclasses.replace(call, packed=16, packing=x) for x in ("cu_seqlens", "segment_ids"))]


def by_dtype(call: Call) -> list[Call]:
    return [dataclasses.replace(call, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]


def forms() -> list[Call]:
    shape = [(1, 8192, 16, 128)]
    plain = calls(shape, ("none", "head")) + calls(shape, ("key",), strength=0.25)
    return plain + calls(shape, ("head",), delta=True) + calls(shape, ("key",), delta=True, strength=0.25)


# ---- bars: lines of one call and mode, by implementation ----


def by_call(lines: list[dict], *keys: str) -> dict[tuple, dict[str, dict]]:
    """Return the timed lines of each (problem, gate, mode), by the fields `keys`, joined."""
    found: dict = {}
    for line in lines:
        if "ms" in line:
            call = tuple(line[name] for name in ("problem", "gate", "mode"))
            found.setdefault(call, {})["".join(str(line.get(key, "")) for key in keys)] = line
    return found


def cpu_bars(lines: list[dict]) -> list[Bar]:
    """glax's native kernels beside the best of all else, and those of XLA beside the best of plain JAX, of those that ran."""
    bars = []
    for call, ways in by_call(lines, "implementation").items():
        title, mode = ", ".join(call), call[2]
        ms = {name: line["ms"] for name, line in ways.items()}
        plain = [name for name in ms if name in PLAIN]
        rivals = [name for name in ms if "glax" not in name or "xla" in name]
        is_native = "glax" in ways and all("cpp" in kernel for kernel in ways["glax"]["kernels"])
        limits = dict(XLA=("glax, xla", plain, SPEED[mode]), native=("glax", rivals, NATIVE[mode]))
        if "delta" in call[1]:
            limits = dict(native=("glax", plain, DELTA))
        for kernels, (own, others, limit) in limits.items():
            if own in ms and others and (kernels == "XLA" or is_native):
                best = min(others, key=ms.__getitem__)
                bars.append(
                    Bar(f"{title}: {kernels}, times as fast as {best}", ms[best] / ms[own], limit, at_most=False)
                )
    return bars


def dtype_bars(lines: list[dict]) -> list[Bar]:
    return [
        Bar(f"{', '.join(call)}: bfloat16's time over float32's", ways["bfloat16"]["ms"] / ways["float32"]["ms"], 1.0)
        for call, ways in by_call(lines, "dtype").items()
        if ways.keys() >= {"float32", "bfloat16"}
    ]


def row_bars(lines: list[dict]) -> list[Bar]:
    """Segments and stored states beside the same row with neither.

    States may cost 1.1 times the row and a copy of their bytes, written once, and with gradient read once more.
    """
    bars = []
    glax = [line for line in lines if line["implementation"] == "glax"]
    for call, ways in by_call(glax, "packing", "states_every").items():
        if "" not in ways:
            continue  # the row itself was refused
        plain = ways.pop("")["ms"]
        for name, line in ways.items():
            if not line.get("states_every"):
                bars.append(Bar(f"{', '.join(call)}: {name}, times of none", line["ms"] / plain, SEGMENTS))
                continue
            floor = plain + (2 if call[2] == "with gradient" else 1) * line["states_bytes"] / line["copy_gbytes"] / 1e6
            bars.append(Bar(f"{', '.join(call)}: states every {name}, of the sum", line["ms"] / floor, STATES))
    return bars


GPU_SHAPES = ((4, 2048, 16, 128), (2, 16384, 16, 128), (1, 8192, 96, 128), (1, 32768, 8, 128), (8, 1024, 8, 64))
BESIDE = ("glax", "xla", "kernels", "torch, chunks of 64", "torch, chunks of 32")
SUITES = {
    "shapes": Suite("six shapes, per-key and per-head gates, beside fla-core",
                    lambda: calls((*GPU_SHAPES, (4, 4096, 64, 128)), ("key", "head")), ("glax", "fla")),
    "published": Suite("the layers of published models, beside the libraries that their users run", published, ("glax", "jla"),
                       peer=True, gates=tuple(NAMED)),
    "between": Suite("shapes beside the published ones", published, ("glax",), lambda x: [x, *neighbours(x)], gates=tuple(NAMED)),
    "delta": Suite("the gated delta rule and Kimi Delta Attention", delta_calls, ("pallas", "triton", "mosaic", "fla", "safe"),
                   rest=dict(delta=True, gate_dtype="float32")),
    "packed": Suite("a row of 32,768 tokens in documents", lambda: calls([(1, 32768, 16, 128)], ("key", "head"), strength=0.25),
                    ("glax", "jla"), with_documents, dict(strength=0.25)),
    "rows": Suite("segment_ids and states_every in the rows of a trainer",
                  lambda: calls([(8, 4096, 16, 128)], ("key", "head"), strength=0.25), ("glax",), with_segments_or_states,
                  dict(strength=0.25), bars=row_bars),
    "forms": Suite("each rule and gate, packed by cu_seqlens and by segment_ids", forms, ("glax",), by_packing,
                   gates=tuple(NAMED)),
    "choice": Suite("kernels on both sides of every border of the choice among them", grid, ("pallas", "triton"), loop=True),
    "cpu": Suite("this CPU, beside plain JAX and PyTorch", lambda: calls(CPU_SHAPES, ("key", "head"), dtype="float32"),
                 ("scan", "chunks of 64", "chunks of 32", *BESIDE), rest=dict(dtype="float32"), close=CLOSE, bars=cpu_bars),
    "cpu-delta": Suite("the delta rule on this CPU, beside plain JAX",
                       lambda: calls(CPU_SHAPES, ("head",), dtype="float32", delta=True),
                       ("scan, a state a block", "scan", "chunks of 64", *BESIDE[:2]), gates=("head",),
                       rest=dict(dtype="float32", delta=True), close=CLOSE, bars=cpu_bars),
    "dtypes": Suite("float32, bfloat16 and float16 on this CPU", lambda: calls(CPU_SHAPES, ("key", "head")), ("glax",), by_dtype,
                    bars=dtype_bars),
}  # fmt: skip


def subjects_of(suite: Suite, call: Call) -> tuple[str, ...]:
    """Return the subjects of a call: those that can have none of its gates, or no such documents, are left out."""
    chosen = (*suite.by, torch_peer(call)) if suite.peer else suite.by
    if call.packed > 1 and call.packing != "cu_seqlens":
        chosen = tuple(x for x in chosen if x != "jla")
    if not (call.delta and call.gate == "key"):
        chosen = tuple(x for x in chosen if x != "safe")
    return tuple(dict.fromkeys(chosen))

"""What is measured of a call: times in turns, memory, kernels alone on the device, errors, and whether results repeat."""

import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from calls import Call

from glax._src.core.bind import bind
from glax._src.core.registry import Backend
from glax.cli import measure
from glax.cli.cases import GATES
from glax.cli.measure import Timing, Way, milliseconds, timing
from glax.cli.peers import as_numpy
from glax.testing.reference import reference, reference_gradient

MIB = 2**20
LONG = 1000.0  # milliseconds
PROFILED = 10  # calls in a profile
WARM = 10.0  # milliseconds; after one run alone the next of a small candidate takes a tenth longer


def interleaved(ways: Sequence[Way], iters: int, seconds: float = math.inf) -> list[Timing]:
    """Return the `Timing` of each way, all in turn in every round: a machine that others slow down slows all.

    On accelerators many runs are in flight. On CPUs a way rests once it has run `iters` times, or 3 times and for `seconds`; each
    timed run follows untimed ones until they have taken WARM, so that a small way does not pay for the memory and the caches
    that a large one took. One that takes more than LONG is timed without them after its first run.
    """
    if Backend.here() is not Backend.CPU:
        return measure.interleaved(ways, iters)
    samples: list[list[float]] = [[] for _ in ways]
    for _ in range(iters):
        for way, taken in zip(ways, samples, strict=True):
            if len(taken) < 3 or sum(taken) < 1e3 * seconds:
                untimed = LONG if taken and taken[-1] > LONG else 0.0
                while untimed < WARM:
                    untimed += milliseconds(way, 1)
                taken.append(milliseconds(way, 1))
    return [timing([x / way.calls for x in taken]) for way, taken in zip(ways, samples, strict=True)]


def available_bytes() -> int | None:
    """The memory that new arrays can have on this host; None where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def temporary_bytes(way: Way) -> int | None:
    """Return the temporary memory of a program of XLA; None for other ways, where it is unknown."""
    found = plan(way)
    return None if found is None else found.temp_size_in_bytes


def peak_mib(way: Way) -> float | None:
    """Return the memory at the peak, inputs and results included: planned by XLA, or taken by PyTorch on a GPU."""
    if (found := plan(way)) is not None:
        return (found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes) / MIB
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    way.wait(way.run())
    return torch.cuda.max_memory_allocated() / MIB


def plan(way: Way):
    """Return XLA's plan of memory of a way that runs functools.partial(program, *operands); None of others."""
    program = getattr(way.run, "func", None)
    if hasattr(program, "lower"):
        program = program.lower(*way.run.args).compile()  # compiled already, so this is a lookup
    return program.memory_analysis() if hasattr(program, "memory_analysis") else None


# ---- kernels alone ----


class DeviceEvent(NamedTuple):
    """One execution on the device. instruction: the instruction of the compiled program that it belongs to. device: the name of
    the GPU in the profile. began: milliseconds since a moment that all events of a profile share."""

    name: str
    instruction: str
    milliseconds: float
    device: str
    began: float


def device_events(run: Callable) -> Iterator[DeviceEvent]:
    """Return what runs on the GPU's streams while `run` does. `run` must wait for its results, and must have run before."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        yield from events_of(pathlib.Path(folder))


def events_of(folder: pathlib.Path) -> Iterator[DeviceEvent]:
    """Return what ran on the streams of GPUs, from a folder with one profile; nothing if it has no GPU."""
    (path,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        for stream in streams if plane.name.startswith("/device:GPU") else ():
            for event in stream.events:
                instruction = str(dict(event.stats).get("hlo_op", event.name))
                yield DeviceEvent(event.name, instruction, event.duration_ns / 1e6, plane.name, event.start_ns / 1e6)


COLLECTIVE = re.compile(r"nccl|all-?_?(gather|reduce|to-?_?all)|reduce-?_?scatter|collective|memcpyp2p", re.IGNORECASE)


def is_collective(event: DeviceEvent) -> bool:
    """Return whether an event moves data between devices, by the name of its kernel or of its instruction."""
    return bool(COLLECTIVE.search(event.name) or COLLECTIVE.search(event.instruction))


def exposed(events: Sequence[DeviceEvent]) -> dict[str, float]:
    """Return milliseconds of one device from its events, the means of all devices: from the first to the last event, `all_ms`;
    in which anything but collectives runs, `compute_ms`; in which collectives run, `collectives_ms`; in which they alone run,
    `exposed_ms`; in which nothing runs, `idle_ms`. No events are no entries."""
    found: list[dict[str, float]] = []
    for device in sorted({event.device for event in events}):
        spans = [
            [(x.began, x.began + x.milliseconds) for x in events if x.device == device and is_collective(x) in kinds]
            for kinds in ((False,), (True,), (False, True))
        ]
        compute, moving, busy = map(union_length, spans)
        whole = max(end for _, end in spans[2]) - min(begin for begin, _ in spans[2])
        times = dict(all_ms=whole, compute_ms=compute, collectives_ms=moving)
        found.append(times | dict(exposed_ms=busy - compute, idle_ms=whole - busy))
    return {name: sum(x[name] for x in found) / len(found) for name in found[0]} if found else {}


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    length, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def kernels(way: Way, runs: int = PROFILED) -> dict[str, list[float]]:
    """Return the milliseconds of every execution of each kernel in calls one after another, by the kernel's name."""

    def several():
        for _ in range(runs):
            way.wait(way.run())

    several()
    found: dict[str, list[float]] = {}
    for event in device_events(several):
        found.setdefault(event.name, []).append(event.milliseconds)
    if not found:
        raise RuntimeError(
            "--device and --profile: expected streams of a GPU in the profile, got none: they need a GPU"
        )
    return found


def kernels_ms(way: Way) -> float:
    """Return the milliseconds of all kernels of a call together, the mean of PROFILED calls."""
    return sum(map(sum, kernels(way, PROFILED).values())) / PROFILED


# ---- errors ----


def distance(got, want) -> float:
    """Return ||got - want|| / ||want||."""
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(as_numpy(got).reshape(want.shape) - want) / np.linalg.norm(want))


def named(result, call: Call, mode: str) -> dict:
    """Return the arrays of a way's result by name: of ours several outputs, of a peer's the output; gradients as d_NAME."""
    outputs, gradients = result if mode == "train" else (result, {})
    found = dict(zip(call.output_names, outputs, strict=True)) if isinstance(outputs, tuple) else dict(output=outputs)
    operands = tuple(call.shapes())
    if not isinstance(gradients, dict):
        # mamba-ssm has other operands
        gradients = dict(zip(operands, gradients, strict=True)) if len(gradients) == len(operands) else {}
    return found | {f"d_{name}": gradients[name] for name in operands if name in gradients}


def expected(call: Call, arrays: dict, d_output) -> dict:
    """Return the results in float64, by the reference, which has no gradient of stored states."""
    r = bind(**arrays, **call.options())
    out, d = reference(r), reference_gradient(r, np.asarray(d_output, np.float64), np.zeros(r.state_shape))
    found = dict(output=out.output, final_state=out.final_state, d_query=d.q, d_key=d.k, d_value=d.v)
    if (argument := GATES[call.gate]) is not None:
        found[f"d_{argument}"] = getattr(d.decay, call.gate)
    return found | (dict(d_beta=d.erasure.beta) if d.erasure is not None else {})


def repeats(way: Way) -> bool:
    """Return whether two more calls agree with the first in every bit."""
    first, *others = ([np.asarray(x).tobytes() for x in jax.tree.leaves(way.run())] for _ in range(3))
    return all(other == first for other in others)


def errors(got: dict, want: dict) -> dict[str, float]:
    """Return the relative errors by name, in thousandths, of those results that both have."""
    return {name: round(1e3 * distance(got[name], want[name]), 4) for name in want if name in got}

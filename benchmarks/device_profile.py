"""Measure the time that each kernel of a call takes on the GPU, from the profiler's trace."""

import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax


class DeviceEvent(NamedTuple):
    """One execution on the device. instruction: the instruction of the compiled program that it belongs to."""

    name: str
    instruction: str
    milliseconds: float


def device_events(run: Callable) -> Iterator[DeviceEvent]:
    """Return what runs on the GPU's streams while `run` does. `run` must wait for its results, and must have run before."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            streams = [line for line in plane.lines if line.name.startswith("Stream")]
            for stream in streams if plane.name.startswith("/device:GPU") else ():
                for event in stream.events:
                    instruction = str(dict(event.stats).get("hlo_op", event.name))
                    yield DeviceEvent(event.name, instruction, event.duration_ns / 1e6)

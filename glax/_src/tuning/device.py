"""Name what measurements depend on: the device, and the versions of its compilers."""

import functools
import os
import pathlib
import platform
import re

from glax._src.core.backend import local_device, target_platform
from glax._src.core.known_miscompiles import version_of


def device_kind() -> str:
    """Return the name of the device that kernels are chosen for, as part of a file name, such as "nvidia_h100_80gb_hbm3" or
    "cpu_amd_epyc_2_cores"."""
    device = local_device()
    return named(f"{target_platform()} elsewhere" if device is None else device.device_kind)


@functools.cache
def named(kind: str) -> str:
    """Return a device's kind as part of a file name: lower case, "_" for all but letters and digits, a CPU with processor and
    cores."""
    if kind.lower() == "cpu":
        kind = f"cpu {processor()} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def processor() -> str:
    """Return the name of the processor's model."""
    try:
        info = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux, or a container that hides the file
        info = ""
    names = re.findall(r"^model name\s*:\s*(.*)$", info, flags=re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def libraries(op_id: str) -> dict[str, str | None]:
    """Return the versions that a measurement of this kernel depends on; None for a library that is not installed."""
    return {name: version_of(name) for name in ("jaxlib", *(("triton",) if "/triton/" in op_id else ()))}

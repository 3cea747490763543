"""Names for what measurements depend on: the device, and the versions of what compiles for it."""

import functools
import os
import pathlib
import platform
import re

import jax

from glax.deny import version_of


@functools.cache
def device_kind() -> str:
    """The device that JAX computes on, as part of a file's name: "nvidia_h100_80gb_hbm3", "cpu_amd_epyc_2_cores"."""
    kind = jax.local_devices()[0].device_kind
    if kind.lower() == "cpu":
        kind = f"cpu {processor()} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.*)$", info.read_text(), flags=re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def libraries(op_id: str) -> dict[str, str]:
    """The versions that a measurement of this kernel depends on."""
    return {name: version_of(name) for name in ("jaxlib", *(("triton",) if "/triton/" in op_id else ()))}

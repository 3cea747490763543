"""The memory of this process."""

import os
import pathlib

STATM = pathlib.Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory of this process, or 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0

"""Eight simulated devices, set before JAX starts, for the sharding tests; everything runs on the CPU."""

import gc
import os
import pathlib
from importlib.metadata import version

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs compile in a fraction of the time, in subprocesses too: see tests/compiling.py, which names the exceptions.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if version("jax").startswith("0.10."):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from tests.checked_types import check_types

check_types()  # before any test imports glax

# Tracing makes very many objects that live on: Python's usual rhythm of looking through all of them takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Marks as `core` what `make test` runs: the unit tests that are not marked rest, and others' that are marked fast."""
    for item in items:
        in_core = item.path.parent.name == "unit" and not item.get_closest_marker("rest")
        if in_core or item.get_closest_marker("fast"):
            item.add_marker("core")


STATM = pathlib.Path("/proc/self/statm")
GROWTH = 1 << 30  # bytes
cleared_at = 0


def resident_bytes() -> int:
    """Return the memory of this process, or 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drop what JAX has compiled whenever a process has grown by GROWTH. JAX would hold every program of every test."""
    global cleared_at
    if resident_bytes() - cleared_at > GROWTH:
        import jax

        jax.clear_caches()
        gc.collect()
        cleared_at = resident_bytes()

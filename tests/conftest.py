"""Eight simulated devices, set before JAX starts, for the sharding tests; everything runs on the CPU."""

import gc
import os
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
    """Marks as `core` what `make test` runs: the unit tests, and the tests of other folders that are marked fast."""
    for item in items:
        if item.path.parent.name == "unit" or item.get_closest_marker("fast"):
            item.add_marker("core")

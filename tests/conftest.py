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

import jax

from tests.checked_types import check_types
from tests.memory import resident_bytes

check_types()  # before any test imports glax
if int(version("jax").split(".")[1]) >= 12:
    # XLA's CPU client runs at most 32 programs at a time. Programs that wait for a kernel in its interpreter would use these up,
    # and the kernel's warpgroups would find no thread. So no call returns before its program has run.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# Tracing makes very many objects that live on: Python's usual rhythm of looking through all of them takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Marks as `core` what `make test` runs: the unit tests that are not marked rest, and others' that are marked fast."""
    for item in items:
        in_core = item.path.parent.name == "unit" and not item.get_closest_marker("rest")
        if in_core or item.get_closest_marker("fast"):
            item.add_marker("core")


def pytest_addoption(parser: pytest.Parser):
    parser.addoption(
        "--part",
        default="0/1",
        help="K/N, K from 0: of all cases, each test's beside each other, the K-th and every N-th behind it",
    )


class Part:
    """Keeps a part of the cases that -m and -k leave. A test with fewer than N cases has one in some of the parts alone."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]):
        part, parts = map(int, config.getoption("--part").split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part])
        items[:] = items[part::parts]


def pytest_configure(config: pytest.Config):
    config.pluginmanager.register(Part())


GROWTH = 1 << 30  # bytes
cleared_at = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drop what JAX has compiled whenever a process has grown by GROWTH. JAX would hold every program of every test."""
    global cleared_at
    if resident_bytes() - cleared_at > GROWTH:
        import jax

        jax.clear_caches()
        gc.collect()
        cleared_at = resident_bytes()

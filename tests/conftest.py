"""Eight simulated devices, set before JAX starts, for the sharding tests; everything runs on the CPU."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs compile in half the time, in subprocesses too: see tests/compiling.py, which names the exceptions.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Tracing makes very many objects that live on: Python's usual rhythm of looking through all of them takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)

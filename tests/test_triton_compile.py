"""What the shipped configs cost on NVIDIA GPUs: compiled here for a GPU that is not here, against budgets.

In a process of its own, for Triton's interpreter, which other tests switch on, cannot compile. A change that needs more
shared memory or spills more than its budget must say so here.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install 'glax[triton]'", allow_module_level=True)

LIMITS = {80: 166_912, 90: 232_448}  # bytes of shared memory that one program may take

# (kernel, what it runs): bytes of shared memory, and of stack a thread (spills), on sm_90 with Triton 3.9.
BUDGETS = {
    ("prepare", "key bfloat16 128"): (62_000, 0),  # a third stage: 13% faster, and three programs still fit
    ("exact_scores", "key bfloat16 128"): (13_000, 0),
    ("outputs", "key bfloat16 128"): (115_000, 0),
    ("all_states", "key bfloat16 128"): (52_000, 0),
    ("gradient", "key bfloat16 128"): (99_000, 160),
    ("exact_gradient", "key bfloat16 128"): (80_000, 560),
    ("outputs", "head bfloat16 128"): (92_000, 64),
    ("all_states", "head bfloat16 128"): (51_000, 0),
    ("gradient", "head bfloat16 128"): (111_000, 400),
    ("recurrent", "key float32 64"): (1_024, 0),
    ("step", "key float32 64"): (1_024, 0),
}


def usages(capability: int, *names: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_compile", str(capability), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    worst: dict = {}  # a kernel runs more than once: forwards and backwards, say
    for row in map(json.loads, done.stdout.splitlines()):
        other = worst.setdefault((row["kernel"], row["runs"]), row)
        other |= {name: max(row[name], other[name]) for name in ("shared", "stack", "registers")}
    return worst


@pytest.mark.parametrize("capability", LIMITS)
def test_budgets(capability):
    names = ("key bfloat16 128", "head bfloat16 128", "key float32 64") if capability == 90 else ("head bfloat16 128",)
    found = usages(capability, *names)
    assert found
    over = {key: row["shared"] for key, row in found.items() if row["shared"] > LIMITS[capability]}
    assert not over, f"more shared memory than sm_{capability} has: {over}"
    if capability == 90:
        for key, (shared, stack) in BUDGETS.items():
            assert found[key]["shared"] <= shared and found[key]["stack"] <= stack, (key, found[key])
        assert all("wgmma" in row["matrix"] for key, row in found.items() if key[0] == "gradient" and "bf" in key[1])

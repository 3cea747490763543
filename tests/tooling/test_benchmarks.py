"""The benchmarks run on a CPU, and their calls for GPUs trace."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suites(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import suites

    return suites


def test_calls_of_every_suite_trace_with_their_gradient(suites):
    """By their shapes alone: no array is made. One call of a suite for each rule, gate and packing."""

    def train(call, arrays):
        output, pull = jax.vjp(call.outputs, arrays)
        return pull(output)

    traced = {}
    for name, suite in suites.SUITES.items():
        groups = [suite.group(call) for call in suite.calls()]
        assert groups, name
        for call in (call for group in groups for call in group):
            options = call.packing if call.packed > 1 else bool(call.states_every)
            traced.setdefault((call.gate, call.delta, call.dtype, options), call)
    assert len(traced) > 20
    for call in traced.values():
        jax.eval_shape(lambda arrays, call=call: train(call, arrays), call.shapes())


def test_a_suite_runs_and_writes_results(tmp_path):
    """glax beside plain JAX, with gradient, timed and compared; a peer that is not installed is a refusal."""
    command = [
        sys.executable,
        FOLDER / "run.py",
        "cpu-delta",
        "--quick",
        "--shape",
        "1,64,1,16",
        "--json",
        tmp_path / "x.json",
    ]
    command += ["--by", "scan", "glax", "chunks of 64", "fla"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "x.json").read_text())["results"]
    ran = [line for line in lines if "refusal" not in line]
    assert {line["implementation"] for line in ran} == {"scan", "glax", "chunks of 64"}
    assert {line["mode"] for line in ran} == {"forward", "with gradient"}
    assert all(line["right"] and line["ms"] > 0 for line in ran)
    assert len(lines) == len(ran) + 2
    assert "bars met" in done.stdout

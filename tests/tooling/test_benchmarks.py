"""The benchmarks run on a CPU, and their calls for GPUs trace."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


def test_scripts_call_what_exists(suites):
    """What a shell script calls by path, by `-m`, and the suites and scripts whose names gpu_all has."""
    root = FOLDER.parent
    for script in ("benchmarks/gpu_all", "tests/hardware/sanitize_cuda", "Makefile"):
        text = (root / script).read_text()
        called = re.findall(r"\b(?:benchmarks|tests|docs)/[\w/]+\.py\b", text)
        modules = [module.replace(".", "/") for module in re.findall(r"-m ((?:tests|glax)[\w.]*)", text)]
        called += [
            f"{module}.py" if (root / f"{module}.py").exists() else f"{module}/__main__.py" for module in modules
        ]
        assert called, script
        assert not [path for path in called if not (root / path).exists()], script
    named = dict(re.findall(r"^(SUITES|SCRIPTS)=\$\{\w+-([\w ]+)\}", (FOLDER / "gpu_all").read_text(), re.MULTILINE))
    assert set(named["SUITES"].split()) <= set(suites.SUITES)
    assert not [name for name in named["SCRIPTS"].split() if not (FOLDER / f"{name}.py").exists()]


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


def test_the_trainer_is_measured_on_one_device_and_on_four(tmp_path):
    """At tiny sizes: rates, and a quarter of the memory with fsdp = 4."""
    command = [sys.executable, FOLDER / "training.py", "--tiny", "--devices", "4", "--steps", "2"]
    command += ["--only", "gla-1.3b/1", "*/fsdp", "--json", tmp_path / "x.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {line["case"]: line for line in json.loads((tmp_path / "x.json").read_text())["results"]}
    assert list(lines) == ["gla-1.3b/1", "gla-1.3b/fsdp", "gdn-1.3b/fsdp"]
    one, four = lines["gla-1.3b/1"], lines["gla-1.3b/fsdp"]
    assert one["devices"] == 1 and four["devices"] == 4 and four["problem"] == "16 x 64"
    assert four["speedup"] == pytest.approx(four["tokens_per_second"] / one["tokens_per_second"])
    assert one["optimizer_gib"] == pytest.approx(2 * one["parameters_gib"], rel=1e-3)
    assert 0.25 <= four["memory_share"] <= 0.27
    assert 0 < one["begun_s"] < one["first_s"]


def test_exposed_is_the_time_in_which_collectives_alone_run(suites):
    """Of two devices, one of which also computes beside its second collective."""
    from meters import DeviceEvent, exposed

    def events(device, *parts):
        return [DeviceEvent(name, name, end - begin, device, begin) for name, begin, end in parts]

    collectives = ("ncclDevKernel_AllGather", 10.0, 14.0), ("fusion", 12.0, 16.0), ("reduce-scatter.1", 20.0, 30.0)
    one = events("/device:GPU:0", *collectives, ("gemm", 22.0, 24.0))
    assert exposed(one) == dict(all_ms=20.0, compute_ms=6.0, collectives_ms=14.0, exposed_ms=10.0, idle_ms=4.0)
    two = events("/device:GPU:1", *collectives)
    assert exposed([*one, *two])["exposed_ms"] == (10.0 + 12.0) / 2
    assert exposed([]) == {}

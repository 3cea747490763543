"""The subcommands of glax but the demo: what they print, write and return."""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.common.library import REMEDY
from glax.cli import check, doctor, output
from glax.cli.processes import start_processes
from glax.testing import CASES, Case, check_kernels, states
from glax.testing.cases import QUICK, recurrence
from glax_cli import main
from tests.tooling.command import SHAPE, json_of, wrong

load_kernels()
pytestmark = pytest.mark.usefixtures("cache")
KEY = next(case for case in CASES if case.name == "key")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("variables", "is_joined"),
    [
        (dict(SLURM_JOB_ID="7", SLURM_NTASKS="4"), False),  # a script of sbatch, or a shell of salloc
        (dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NODELIST="n[1-4]"), True),
        (dict(SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NODELIST="n1"), False),
        (dict(OMPI_COMM_WORLD_SIZE="2"), True),
        ({}, False),
    ],
)
def test_processes_join_where_a_launcher_started_several(monkeypatch, variables, is_joined):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given: joined.append(given))
    start_processes()
    assert joined == [()] * is_joined


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--shape", "1,2,3"],
            "argument --shape: must be B,T,H,D or B,T,H,K,V or B,T,G,H,K,V, integers of at least 1, got '1,2,3'",
        ),
        (["tune", "--shape", "1,2,0,4"], "argument --shape: must be B,T,H,D"),
        (["tune", "--gate", "wrong"], "argument --gate: invalid choice: 'wrong'"),
        (["bench", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["bench", "--mode", "backward"], "argument --mode: invalid choice: 'backward'"),
        (["bench", "--iters", "0"], "argument --iters: must be at least 1, got 0"),
        (["bench", "--out", "/dev/null/folder"], "argument --out: cannot make /dev/null/folder: Not a directory"),
        (["bench", "--shape", f"1,{2**31},1,4"], "B,T,G,H,K,V, each at most 2147483647"),
        (["tune", "--shape", f"1,{'9' * 5000},1,4"], "argument --shape: must be B,T,H,D"),
        (["bench", "--iters", str(2**40)], "argument --iters: must be at most 2147483647"),
        (["bench", "--shape", "1,8,3,4,8,8"], "argument --shape: G must divide H, got G=3 and H=4"),
        (["bench", "--packed", "99", *SHAPE], "argument --packed: must be at most B T, 24, got 99"),
        (
            ["bench", "--packed", "2", "--mode", "step", *SHAPE],
            "argument --packed: one token of a sequence is not packed",
        ),
        (
            ["tune", "--like", "RetNet-1.3B", "--delta"],
            "argument --like: names shape, gate and rule: leave out --shape",
        ),
        (["bench", "--like", "RetNet"], "argument --like: invalid choice: 'RetNet' (choose from"),
        (
            ["bench", "--peer", "mamba-ssm", *SHAPE],
            "argument --peer: mamba-ssm needs torch, triton, mamba-ssm: pip install",
        ),
        (["generate", "/nowhere", "--prompt", "a"], "/nowhere"),
        (["train", "/nowhere.toml"], "No such file or directory: /nowhere.toml"),
        (["bench", "--out", ""], "argument --out: must be the name of a file or folder, got ''"),
        (["cache", "import", "/dev/zero"], "cannot read /dev/zero: Not a regular file, but a device"),
        (["cache", "import", "a\0b"], "argument FILE: must be the name of a file or folder"),
        (["cache", "export", "/dev/full"], "cannot write /dev/full: No space left on device"),
        (["cache"], "the following arguments are required: action"),
        (["cache", "show", "nothing"], "NAME must fit one file, got 'nothing'"),
        (["cache", "import", "/nowhere.json"], "cannot read /nowhere.json: No such file or directory"),
        (["cache", "export", "/nowhere/x.json"], "cannot write /nowhere/x.json: No such file or directory"),
        (["check", "--slow"], "glax check: unrecognized arguments: --slow; see glax check --help"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    assert code == 2 and message in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.fast
def test_glax_alone_prints_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: glax") and "doctor" in shown.out and not shown.err
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"glax {glax.__version__}\n"


@pytest.mark.fast
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_choices(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("doctor", "--like", "RetNet-1.3B", "import"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.fast
def test_no_color_is_heeded(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    output.show_table(("a", "b"), [("x", 1.0)], title="t")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert "\x1b[1m" in shown and not re.search(r"\x1b\[[0-9;]*[34][0-9]m", shown)


@pytest.mark.fast
@pytest.mark.parametrize("command", [["doctor"], ["check", "--quick"], ["tune", *SHAPE], ["bench", *SHAPE], ["demo"]])
@pytest.mark.parametrize("variable", ["GLAX_AUTOTUNE", "GLAX_CPU_INSTRUCTIONS"])
def test_a_variable_that_means_nothing_is_one_line(command, variable, capsys, monkeypatch):
    monkeypatch.setenv(variable, "fastest")
    assert main(command) == 2
    shown = capsys.readouterr()
    assert f"{variable} must be" in shown.err and "got 'fastest': set one of these, or unset it" in shown.err
    assert shown.err.count("\n") == 1 and not shown.out
    monkeypatch.setenv(variable, "")  # as if it were not set
    assert main(["doctor"]) == 0


@pytest.mark.fast
def test_without_a_home_the_cache_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(glax.PersistentCache, "folder", None)
    for command in (["list"], ["show", "x"], ["clear", "--yes"], ["export", "x.json"], ["import", "x.json"]):
        assert main(["cache", *command]) == 2
        shown = capsys.readouterr()
        assert "set GLAX_CACHE_DIR to a folder" in shown.err and shown.err.count("\n") == 1
    assert main(["doctor"]) == 0 and "set GLAX_CACHE_DIR to a folder" in " ".join(capsys.readouterr().out.split())


@pytest.mark.fast
def test_show_shows_what_is_ignored(capsys, cache):
    folder = cache / "device"
    folder.mkdir(parents=True)
    entries = {
        "lone \ud800": True,
        "no ms": dict(type="X", config={}),
        "sound": dict(type="X", config=dict(a=1), ms=2.0),
    }
    (folder / "kernel@0.json").write_text(json.dumps(dict(format=1, entries=entries)))
    assert main(["cache", "show", "kernel"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("ignored: it must have a config") == 2 and "X(a=1)" in shown


# ---- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_doctor_tells_what_runs_and_what_would_help(register, capsys, monkeypatch, cache):
    gpu = register(wrong, backend=Backend.GPU)
    half = register(
        wrong, "chunked", Platform.TRITON, supports=lambda r: "bfloat16 only" * (r.q.dtype != jnp.bfloat16) or None
    )
    never = register(wrong, platform=Platform.TRITON, supports=lambda r: "triton is not installed")
    found = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if "triton" in name else found(name))  # here or not
    monkeypatch.setenv("GLAX_SOMETHING", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, report = json_of(capsys, "doctor")
    kernels = {kernel["name"]: kernel for kernel in report["kernels"]}
    assert code == 0 and kernels.keys() == kernel_registry.kernels.keys()
    assert kernels["chunked/xla/any"]["usable"] and kernels["chunked/xla/any"]["reason"] is None
    assert kernels[gpu]["reason"] == "needs a gpu, JAX computes on cpu here"
    assert kernels[gpu]["fix"].endswith("unset JAX_PLATFORMS, which is cpu")
    limit = "not with float32, per-key gate or float32, per-head gate: bfloat16 only"
    assert kernels[half]["usable"] and limit in kernels[half]["reason"]
    assert not kernels[never]["usable"] and kernels[never]["fix"] == "pip install triton jax-triton"
    assert report["versions"]["jax"] == jax.__version__ and report["versions"]["glax"] == glax.__version__
    assert report["environment"]["GLAX_SOMETHING"] == "1" and report["policy"]["cache_miss_fallback"] == "heuristics"
    assert report["cache"] == dict(folder=str(cache), unwritable=None, files=0, entries=0)
    assert not cache.exists()

    monkeypatch.setenv("GLAX_CACHE_DIR", "/dev/null/cache")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "not writable" in " ".join(shown.split()) and gpu in shown
    assert shown.splitlines()[:3] == report["verdict"] and max(map(len, shown.splitlines())) <= 80
    assert shown.count("needs a gpu, JAX computes on cpu here") == 1  # once for all kernels with one remedy


@pytest.mark.fast
def test_a_remedy_is_one_where_it_is_given(register, monkeypatch):
    """Nothing that is installed or set on a machine without a GPU makes GPU kernels run there."""
    here = kernel_registry.kernels[register(wrong, platform=Platform.TRITON)]
    gpu, tpu, cpu = (
        kernel_registry.kernels[register(wrong, platform=Platform.TRITON, backend=backend)]
        for backend in (Backend.GPU, Backend.TPU, Backend.CPU)
    )
    found = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if "triton" in name else found(name))
    assert doctor.fix(here) == "pip install triton jax-triton"  # nothing else is missing

    monkeypatch.setattr(doctor, "present", lambda backend: False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    elsewhere = 'on a machine with a GPU: pip install "jax[cuda13]" (or cuda12); pip install triton jax-triton'
    assert doctor.fix(gpu) == elsewhere
    assert doctor.fix(tpu).startswith('on a machine with a TPU: pip install "jax[tpu]"')
    monkeypatch.setattr(doctor, "present", lambda backend: True)
    assert doctor.fix(gpu) == elsewhere.removeprefix("on a machine with a GPU: ")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert doctor.fix(gpu) == "unset JAX_PLATFORMS, which is cpu; pip install triton jax-triton"
    monkeypatch.setattr(doctor.Backend, "here", lambda: Backend.GPU)
    assert doctor.fix(cpu) == "JAX_PLATFORMS=cpu"


@pytest.mark.fast
def test_the_verdict_states_what_is_lost(register, capsys, monkeypatch):
    """In one line: kernels that were not built, and a device that JAX does not use."""
    register(wrong, supports=lambda r: f"its library is missing (no compiler): {REMEDY}")
    for here, lost in (
        (None, "the kernels of cpp (native code); others run in their place"),
        (Backend.GPU, "this machine's GPU"),
    ):
        monkeypatch.setattr(doctor, "present", lambda backend, here=here: backend is here)
        verdict = json_of(capsys, "doctor")[1]["verdict"]
        assert len(verdict) == 3 and verdict[0].startswith("Ready: ") and verdict[2].startswith(f"Lost: {lost}")


def test_doctor_fails_without_a_usable_kernel(register, capsys):
    kernel_registry.kernels.clear()
    register(wrong, backend=Backend.TPU)
    assert json_of(capsys, "doctor")[0] == 1


def test_as_a_process():
    """Plain text in an encoding without lines and dashes; with --json one document and nothing else."""
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    plain = os.environ | dict(PYTHONIOENCODING="ascii")
    shown = run([sys.executable, "-m", "glax", "doctor"], env=plain)
    assert "chunked/xla/any" in shown.stdout and shown.stdout.isascii()
    assert json.loads(run([sys.executable, "-m", "glax_cli", "doctor", "--json"]).stdout)["backend"] == "cpu"


# ---- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_doctor_asks_kernels_of_one_token_about_one_token(register, capsys):
    def one_token(r):
        return None if r.q.shape[1] == 1 else "takes one token"

    step = register(wrong, "recurrent.step", Platform.CPP, supports=one_token)
    _, report = json_of(capsys, "doctor")
    assert next(kernel for kernel in report["kernels"] if kernel["name"] == step)["usable"]


def test_a_reader_that_goes_away():
    """As in `glax cache list --json | head -c 0`: no traceback."""
    command = [sys.executable, "-m", "glax_cli", "cache", "list", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("output", "said"),
    [(None, "standard output is closed: nothing can be shown"), ("/dev/full", "No space left on device")],
)
def test_an_output_that_takes_nothing_is_one_line(output, said, capsys, monkeypatch):
    file = None if output is None else open(output, "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stdout", file)
    assert main(["cache", "list"]) > 0
    monkeypatch.undo()
    if file is not None:
        file.close()  # what was left in its buffer goes nowhere
    assert capsys.readouterr().err == f"glax cache: {said}\n"


def test_check_passes(register, capsys, monkeypatch):
    monkeypatch.setattr(check, "CASES", (Case("key, packed", B=1, T=20, cuts=(0, 5, 5, 18), K=8, V=12), CASES[0]))
    monkeypatch.setattr(check, "QUICK", ("key, packed",))
    code, report = json_of(capsys, "check", "--quick")
    assert code == 0 and report["ok"] and {result["case"] for result in report["results"]} == {"key, packed"}
    assert {result["kernel"] for result in report["results"]} == kernel_registry.kernels.keys()
    for result in report["results"]:
        if result["kernel"] in elsewhere():
            assert result["status"] == "refused" and "JAX computes on cpu here" in result["reason"]
        elif result["kernel"] == ERASES_ALONE:
            assert result["status"] == "refused" and "takes recurrences that erase" in result["reason"]
        else:
            assert result["status"] == "pass" and 0 < result["error"] <= result["bar"]


def test_check_of_one_platform(capsys, monkeypatch):
    """The kernels of one device run, and what a report needs is printed; another device is refused."""
    monkeypatch.setattr(check, "CASES", (dataclasses.replace(KEY, T=20),))
    assert main(["check", "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "recurrent/cpp/cpu" in shown and "/xla/" not in shown
    assert f"To report, with all lines above: glax {glax.__version__}, jax {jax.__version__}, jaxlib " in shown
    assert main(["check", "--platform", "tpu"]) == 2
    refused = "glax check: --platform tpu needs a tpu, JAX computes on cpu here: glax doctor says what is missing"
    assert refused in capsys.readouterr().err


def test_check_states(capsys):
    code, report = json_of(capsys, "check", "--states", "--quick")
    assert code == 0
    assert {(x["dtype"], x["stochastic"]) for x in report["errors"]} == set(check.STORED)
    assert all(0 < x["error"] < 1e-5 for x in report["errors"] if x["dtype"] == "float32")
    main(["check", "--states", "--quick"])
    assert "relative RMS error of the state after 4096 decoded tokens" in capsys.readouterr().out


def test_check_states_says_whose_errors_grow(capsys, monkeypatch):
    monkeypatch.setattr(check, "STORED", (("float32", False), ("bfloat16", False), ("int8", False)))
    monkeypatch.setattr(states, "STORED", check.STORED)
    main(["check", "--states"])
    shown = capsys.readouterr().out
    for steps in (4096, 65536):
        assert f"relative RMS error of the state after {steps} decoded tokens" in shown
    assert "int8      with rests" in shown
    assert "errors grow with the tokens in bfloat16 rounded to nearest; the default is float32" in shown


ERASES_ALONE = "recurrent.vjp/xla/any"  # forms the gradients of the delta rule, and no others


def elsewhere() -> list[str]:
    """The kernels for other machines than this."""
    return [spec.name for spec in kernel_registry.kernels.values() if spec.backend not in ("any", "cpu")]


def test_check_finds_faults(register, capsys, monkeypatch):
    def breaks(r, *, config):
        raise RuntimeError("launch failed\nsecond line")

    def none(r, *, config):
        return jax.tree.map(lambda x: x * jnp.nan, wrong(r, config=config))

    def in_bfloat16(r, *, config):
        return wrong(r, config=config)._replace(output=jnp.zeros((*r.q.shape[:3], r.v.shape[3]), jnp.bfloat16))

    faults = {
        register(wrong): None,
        register(none, "chunked"): "values of output are not finite",
        register(breaks, platform=Platform.CUDA): "RuntimeError: launch failed",
        register(in_bfloat16, "chunked", Platform.CUDA): "output is bfloat16[2, 20, 2, 32], expected float32",
    }
    refuses = register(wrong, platform=Platform.PALLAS, supports=lambda r: "widths of 64 only")
    monkeypatch.setattr(check, "CASES", (dataclasses.replace(KEY, T=20),))
    assert main(["check"]) == 1
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    for name, reason in faults.items():
        of_kernel = shown.split(f"{name}\n")[1].split("\n\n")[0]
        assert "miss" in of_kernel and (reason or "0.001") in of_kernel
    (summary,) = [line for line in lines if "kernels run none of these cases here: " in line]
    assert refuses not in shown and summary.endswith(" for other calls than these") and len(summary) < 100
    assert f"4 pass, 4 miss, {2 + len(elsewhere())} refused; on cpu" in lines  # with ERASES_ALONE


def test_cases_of_check():
    assert 12 <= len(CASES) <= 25 and len({case.name for case in CASES}) == len(CASES)
    assert set(QUICK) < {case.name for case in CASES}
    forms = {recurrence(case, case.strengths[0]).decay.form for case in CASES}
    assert forms == {"none", "constant", "head", "key", "value", "key+value"}
    assert {case.erasure for case in CASES} == {(), ("beta",), ("erase", "write")}


def test_padding_rows_must_stay_zero(register):
    sound = kernel_registry.kernels["recurrent/xla/any"].run
    kernel_registry.kernels.clear()

    def pads(r, *, config):
        outputs = sound(r, config=config)
        return outputs._replace(output=outputs.output.at[:, -1].set(1))

    register(pads)
    (result,) = check_kernels([Case("packed", B=1, T=9, cuts=(0, 8), K=4, V=4)])
    assert result.status == "miss" and result.reason == "padding rows of output are not 0"

"""The subcommands of glax but the demo: what they print, write and return."""

import dataclasses
import functools
import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import executor
from glax.cli import bench, check, doctor, main, peers
from glax.cli.cases import DTYPES, GATES, Problem, forward, train
from glax.cli.measure import Way
from glax.cli.tune import tuned
from glax.testing import CASES, Case, check_kernels
from glax.testing.cases import QUICK, recurrence

load_kernels()
SHAPE = ["--shape", "1,24,1,8", "--gate", "none"]
PROBLEM = Problem(1, 24, 1, 8, "none", "float32")
KEY = next(case for case in CASES if case.name == "key")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder for measurements that no other test sees, and none in memory."""
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path / "cache"))
    executor.chain.cache.clear()
    yield tmp_path / "cache" / "recurrent"
    executor.chain.cache.clear()


@pytest.fixture
def register(monkeypatch):
    """Registers faulty kernels, beside XLA's alone, until the test ends."""
    load_kernels()
    sound = {name: spec for name, spec in kernel_registry.kernels.items() if spec.platform is Platform.XLA}
    monkeypatch.setattr(kernel_registry, "kernels", sound)

    def add(run, algorithm="recurrent", platform=Platform.CPP, backend=Backend.ANY, **traits):
        traits = dict(priority=lambda r: -1) | traits
        spec = KernelSpec(algorithm, platform, backend, run, **traits)
        kernel_registry.kernels[spec.name] = spec
        return spec.name

    return add


def json_of(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def wrong(r, *, config):
    """Right within a thousandth."""
    return jax.tree.map(lambda x: x * 1.001, kernel_registry.kernels["recurrent/xla/any"].run(r, config=config))


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "1,2,3"], "argument --shape: must be B,T,H,D, four integers of at least 1, got '1,2,3'"),
        (["tune", "--shape", "1,2,0,4"], "argument --shape: must be B,T,H,D"),
        (["tune", "--gate", "wrong"], "argument --gate: invalid choice: 'wrong'"),
        (["bench", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["bench", "--mode", "backward"], "argument --mode: invalid choice: 'backward'"),
        (["bench", "--iters", "0"], "argument --iters: must be at least 1, got 0"),
        (["bench", "--out", "/dev/null/folder"], "argument --out: cannot make /dev/null/folder: Not a directory"),
        (["bench", "--shape", f"1,{2**31},1,4"], "argument --shape: must be B,T,H,D, each at most 2147483647"),
        (["tune", "--shape", f"1,{'9' * 5000},1,4"], "argument --shape: must be B,T,H,D"),
        (["bench", "--iters", str(2**40)], "argument --iters: must be at most 2147483647"),
        (["bench", "--out", ""], "argument --out: must be the name of a file or folder, got ''"),
        (["cache", "import", "/dev/zero"], "cannot read /dev/zero: Not a regular file, but a device"),
        (["cache", "import", "a\0b"], "argument FILE: must be the name of a file or folder"),
        (["cache", "export", "/dev/full"], "cannot write /dev/full: No space left on device"),
        (["cache"], "the following arguments are required: action"),
        (["cache", "show", "nothing"], "NAME must fit one file, got 'nothing'"),
        (["cache", "import", "/nowhere.json"], "cannot read /nowhere.json: No such file or directory"),
        (["cache", "export", "/nowhere/x.json"], "cannot write /nowhere/x.json: No such file or directory"),
        (["check", "--slow"], "unrecognized arguments: --slow"),
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
    assert main(["doctor"]) == 0 and "set GLAX_CACHE_DIR to a folder" in capsys.readouterr().out


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
    assert kernels[half]["usable"] and "not with float32, per-head gate: bfloat16 only" in kernels[half]["reason"]
    assert not kernels[never]["usable"] and kernels[never]["fix"] == "pip install triton jax-triton"
    platforms = {platform["name"]: platform for platform in report["platforms"]}
    assert list(platforms) == list(Platform)
    assert platforms["xla"]["usable"] and platforms["cuda"]["reason"] == "no kernels in this version"
    assert platforms["triton"]["usable"] and platforms["triton"]["reason"] == "1 of 2 kernels"
    assert platforms["cpp"]["reason"] == "needs a gpu, JAX computes on cpu here"
    assert report["versions"]["jax"] == jax.__version__ and report["versions"]["glax"] == glax.__version__
    assert report["environment"]["GLAX_SOMETHING"] == "1" and report["policy"]["cache_miss_fallback"] == "heuristics"
    assert report["cache"] == dict(folder=str(cache), unwritable=None, files=0, entries=0)
    assert not cache.exists()

    monkeypatch.setenv("GLAX_CACHE_DIR", "/dev/null/cache")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "not writable" in shown and "no kernels in this version" in shown and gpu in shown


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


def test_doctor_fails_without_a_usable_kernel(register, capsys):
    kernel_registry.kernels.clear()
    register(wrong, backend=Backend.TPU)
    assert json_of(capsys, "doctor")[0] == 1


def test_as_a_process_without_rich_and_matplotlib():
    """Plain aligned text; with --json one document and nothing else."""
    code = "import sys; sys.modules |= dict(rich=None, matplotlib=None); import glax.cli; sys.exit(glax.cli.main())"
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    shown = run([sys.executable, "-c", code, "doctor"])
    assert "\npackage  " in "\n" + shown.stdout and "chunked/xla/any" in shown.stdout and shown.stdout.isascii()
    assert json.loads(run([sys.executable, "-m", "glax.cli", "doctor", "--json"]).stdout)["backend"] == "cpu"


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
    command = [sys.executable, "-m", "glax.cli", "cache", "list", "--json"]
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
        else:
            assert result["status"] == "pass" and 0 < result["error"] <= result["bar"]


def test_check_states(capsys):
    code, report = json_of(capsys, "check", "--states")
    assert code == 0
    assert {(x["dtype"], x["stochastic"]) for x in report["errors"]} == set(check.STORED)
    assert all(0 < x["error"] < 1e-5 for x in report["errors"] if x["dtype"] == "float32")
    main(["check", "--states"])
    assert "relative RMS error of the state after 4096 decoded tokens" in capsys.readouterr().out


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
    lines = capsys.readouterr().out.splitlines()
    for name, reason in faults.items():
        row = next(line for line in lines if name in line.split())
        assert "miss" in row and (reason or "0.001") in row
    assert f"{refuses} runs none of these here: widths of 64 only" in lines
    assert f"4 pass, 4 miss, {1 + len(elsewhere())} refused; on cpu" in lines


def test_cases_of_check():
    assert 12 <= len(CASES) <= 20 and len({case.name for case in CASES}) == len(CASES)
    assert set(QUICK) < {case.name for case in CASES}
    forms = {recurrence(case, case.strengths[0]).decay.form for case in CASES}
    assert forms == {"none", "constant", "head", "key", "value", "key+value"}


def test_padding_rows_must_stay_zero(register):
    sound = kernel_registry.kernels["recurrent/xla/any"].run
    kernel_registry.kernels.clear()

    def pads(r, *, config):
        outputs = sound(r, config=config)
        return outputs._replace(output=outputs.output.at[:, -1].set(1))

    register(pads)
    (result,) = check_kernels([Case("packed", B=1, T=9, cuts=(0, 8), K=4, V=4)])
    assert result.status == "miss" and result.reason == "padding rows of output are not 0"


# ---- tune and cache --------------------------------------------------------------------------------------------------


def selectors() -> set[str]:
    arrays = PROBLEM.shapes()
    return {decision.selector for decision in glax.explain(train, arrays, arrays["value"])}


def test_measurements_go_from_user_to_user(tmp_path, capsys, monkeypatch, cache, register):
    assert selectors() == {"heuristic"}
    code, report = json_of(capsys, "tune", *SHAPE)
    assert code == 0 and not report["failed"] and report["cache"] == str(cache)
    rows = {row["kernel"]: row for row in report["measured"]}
    gradient = rows["chunked.vjp/xla/any"]
    assert len(rows) == 2 and gradient["ms"] == gradient["candidates"][gradient["winner"]]
    assert selectors() == {"memory"}

    _, listed = json_of(capsys, "cache", "list")
    assert [file["entries"] for file in listed["files"]] == [1, 1]
    assert main(["cache", "list"]) == main(["cache", "show", "vjp"]) == 0
    shown = capsys.readouterr().out
    assert listed["files"][0]["name"] in shown and gradient["winner"] in shown and gradient["call"] in shown
    _, content = json_of(capsys, "cache", "show", listed["files"][0]["name"])
    assert content["entries"].keys() == {gradient["call"]}

    exported = tmp_path / "measured.json"
    code, report = json_of(capsys, "cache", "export", str(exported))
    assert report == dict(file=str(exported), files=2, entries=2)

    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path / "other"))
    executor.chain.cache.clear()
    assert selectors() == {"heuristic"}
    assert json_of(capsys, "cache", "import", str(exported))[1]["added"] == 2
    assert selectors() == {"disk"} and selectors() == {"memory"}
    assert json_of(capsys, "cache", "import", str(exported))[1]["added"] == 0  # as fast as what is there

    other = json.loads(exported.read_text())
    first, second = (next(iter(file["entries"].values())) for file in other["files"].values())
    first |= dict(ms=first["ms"] / 2)
    second |= dict(ms=second["ms"] * 2)
    exported.write_text(json.dumps(other))
    _, report = json_of(capsys, "cache", "import", str(exported))
    assert (report["added"], report["unchanged"]) == (1, 1)
    assert json_of(capsys, "cache", "show", "vjp")[1]["entries"][gradient["call"]]["ms"] == first["ms"]

    note = tmp_path / "other" / "recurrent" / "note.txt"
    note.write_text("mine")
    monkeypatch.setattr("sys.stdin", io.StringIO("y"))  # no terminal
    assert main(["cache", "clear"]) == 2 and "say --yes" in capsys.readouterr().err
    assert len(json_of(capsys, "cache", "clear", "--yes")[1]["removed"]) == 2
    assert json_of(capsys, "cache", "list")[1]["files"] == [] and note.exists()
    assert selectors() == {"heuristic"}


def test_clear_asks(capsys, monkeypatch, cache):
    class Terminal:
        def __init__(self, answer):
            self.isatty, self.readline = lambda: True, lambda: f"{answer}\n"

    entry = dict(type="Config", config={}, ms=1.0, candidates={})
    path = cache / "device" / "kernel@0.json"
    executor.chain.persistent.merge(path, dict(device="device", kernel="kernel"), {"call": entry})
    for answer, there in (("", True), ("no", True), ("y", False)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert main(["cache", "clear"]) == 0 and path.exists() is there
    assert "removed 1 files" in capsys.readouterr().out


ENTRY = dict(config={}, ms=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ('{"format": 1, "files": {}, "files": {}}', "the key 'files' stands twice"),
        (dict(format=True, files={}), "its format is True"),
        (dict(format=1, files={"d\0/k.json": dict(format=1, entries={})}), "file names must be device/kernel.json"),
        (dict(format=1, files={"\ud800/k.json": dict(format=1, entries={})}), "file names must be device/kernel.json"),
        (
            dict(format=1, files={"d/k.json": dict(format=1, entries={"a": ENTRY | dict(ms=10**400)})}),
            "the entry 'a' must have a config and its ms",
        ),
        ("[]", 'it has no "files"'),
        (dict(format=99, files={}), "its format is 99"),
        (dict(format=1, files={"../x/y.json": {}}), "file names must be device/kernel.json, got '../x/y.json'"),
        (dict(format=1, files={"../y.json": {}}), "file names must be device/kernel.json, got '../y.json'"),
        (dict(format=1, files={"/y.json": {}}), "file names must be device/kernel.json, got '/y.json'"),
        (dict(format=1, files={"d/k.json": 3}), "d/k.json: it is not a file of glax"),
        (dict(format=1, files={"d/k.json": dict(format=1, entries={"a": 3})}), "the entry 'a' must have a config"),
        (
            dict(format=1, files={"d/k.json": dict(format=1, entries={"a": ENTRY | dict(ms="fast")})}),
            "the entry 'a' must have a config and its ms",
        ),
    ],
)
def test_only_exports_are_imported(content, message, tmp_path, capsys, cache):
    path = tmp_path / "export.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["cache", "import", str(path)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and not cache.exists()


def test_tune_shows_what_fell_out(capsys, monkeypatch):
    def measured(problem):
        if problem.gate == "head":
            raise ExceptionGroup("none", [ValueError("too large\nby far"), ExceptionGroup("deep", [KeyError("x")])])
        measurement = glax._src.tuning.cache.Measurement(
            "Fast()", 1.5, {"Fast()": 1.5, "Slow()": 2.5, "Broken()": "wrong: 1"}
        )
        return {"kernel/xla/any: B1": measurement}

    monkeypatch.setattr("glax.cli.tune.tuned", measured)
    assert main(["tune", "--shape", "1,8,1,8", "--gate", "key", "--gate", "head"]) == 1
    shown = capsys.readouterr().out
    assert "Slow() 2.5" in shown and "Broken() fell out: wrong: 1" in shown
    assert "B1 T8 H1 D8 head float32: not tuned: ValueError: too large; KeyError: 'x'" in shown


def test_tune_measures_where_the_policy_is_error(monkeypatch):
    monkeypatch.setenv("GLAX_AUTOTUNE", "error")
    monkeypatch.setattr(executor.chain, "tuner", glax.Tuner(warmup=1, iters=1))
    with pytest.raises(LookupError):
        selectors()
    assert tuned(PROBLEM)
    assert selectors() == {"memory"}


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench(capsys, monkeypatch, tmp_path):
    def by_scan(problem, mode, arrays, d_output, state):
        print("peers print")
        if mode == "step":
            raise peers.UnavailableError("has no step of one token")
        run = jax.jit(lambda: forward(arrays))
        return Way("peer", run)

    def broken(*_):
        raise TypeError("no such gate\nmore")

    monkeypatch.setitem(peers.PEERS, "peer", by_scan)
    monkeypatch.setitem(peers.PEERS, "broken", broken)
    out = tmp_path / "new" / "out"
    modes = [x for mode in bench.MODES for x in ("--mode", mode)]
    assert main(["bench", "--shape", "2,40,6,16", *modes, "--iters", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "broken: TypeError: no such gate\n" in shown and "peer: has no step of one token (B2 H6 D16" in shown
    chosen = glax.explain(lambda q: glax.recurrent(q, q, q, gk=q).output, jnp.ones((2, 40, 6, 16)))[0]
    assert f"glax ran {chosen.kernel} with {chosen.config}, by heuristic\n" in shown and "WRONG" not in shown
    assert "peers print" not in shown
    assert (out / "roofline.png").read_bytes().startswith(b"\x89PNG")

    document = json.loads((out / "bench.json").read_text())
    assert document["machine"]["copy_gbytes"] > 0.1 and document["machine"]["matmul_gflops"]["float32"] > 1
    assert [result["mode"] for result in document["results"]] == list(bench.MODES)
    for result in document["results"]:
        ours = result["ways"][0]
        assert ours["name"] == "glax" and ours["right"] and ours["error"] < 1e-6 and ours["ms"]["samples"] == 3
        assert 0 < ours["ms"]["p20"] <= ours["ms"]["median"] <= ours["ms"]["p80"] < 1e3
        seconds = ours["ms"]["median"] / 1e3
        assert result["gflops"] == pytest.approx(result["flops"] / seconds / 1e9)
        assert result["gbytes"] == pytest.approx(result["bytes"] / seconds / 1e9)
        named = {way["name"]: way for way in result["ways"]}
        assert named["peer"]["reason"] or named["peer"]["right"]
        if theirs := named["peer"]["ms"]:
            assert f"{theirs['median'] / ours['ms']['median']:.2f}x" in shown
        if peers.importlib.util.find_spec("ejkernel") is None:
            assert named["ejkernel"]["reason"] == "ejkernel not installed"
    wide = 4 * 2 * 40 * 6 * 16
    assert [result["bytes"] for result in document["results"][:2]] == [5 * wide, 14 * wide]


def test_bench_finds_a_wrong_kernel(register, capsys, monkeypatch):
    register(wrong, priority=lambda r: 99)
    monkeypatch.setattr(
        bench, "ceilings", lambda dtypes, iters: dict(copy_gbytes=1.0, matmul_gflops=dict.fromkeys(dtypes, 1.0))
    )
    code, document = json_of(capsys, "bench", "--shape", "1,11,1,8", "--mode", "forward", "--iters", "1")
    assert code == 1 and not document["results"][0]["ways"][0]["right"]

    def breaks(r, *, config):
        raise RuntimeError("launch failed")

    register(breaks, priority=lambda r: 100)
    assert main(["bench", "--shape", "1,12,1,8", "--mode", "forward", "--iters", "1"]) == 1
    assert "glax: RuntimeError: launch failed\n" in capsys.readouterr().out
    jax.clear_caches()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_problems_bind(gate, dtype):
    """Every gate in every dtype is a call of glax; the first sequence of a few heads has the result of the whole."""
    problem = Problem(2, 5, 6, 4, gate, dtype)
    arrays = problem.shapes()
    assert jax.eval_shape(forward, arrays).dtype == dtype
    assert bench.expected(problem.arrays(), None).shape == (5, 4, 4)

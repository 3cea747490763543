"""The subcommands of glax that measure: tune, cache and bench."""

import io
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import executor
from glax.cli import bench, peers
from glax.cli.cases import GATES, Problem, problems_of
from glax.cli.measure import Way
from glax.cli.tune import tuned
from glax_cli import main, published
from glax_cli.parser import DTYPES, MODES, build_parser
from glax_cli.published import LAYERS
from tests.tooling.command import SHAPE, json_of, wrong

load_kernels()
pytestmark = pytest.mark.usefixtures("cache")
PROBLEM = Problem.of_shape((1, 24, 1, 8), gate="none", dtype="float32")

# ---- tune and cache --------------------------------------------------------------------------------------------------


def selectors() -> set[str]:
    arrays = PROBLEM.shapes()
    return {decision.selector for decision in glax.explain(PROBLEM.train, arrays, arrays["value"])}


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
    monkeypatch.setenv("COLUMNS", "20")  # names stand whole in any width
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
    assert max(map(len, shown.split("remembered in ")[0].splitlines())) <= 80
    assert re.search(r"Slow\(\) +2.5", shown) and "Broken() fell out: wrong: 1" in shown
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
        run = jax.jit(lambda: problem.forward(arrays))
        return Way("peer", run)

    def broken(*_):
        raise TypeError("no such gate\nmore")

    monkeypatch.setitem(peers.PEERS, "peer", by_scan)
    monkeypatch.setitem(peers.PEERS, "broken", broken)
    out = tmp_path / "new" / "out"
    modes = [x for mode in MODES for x in ("--mode", mode)]
    assert main(["bench", "--shape", "2,40,6,16", *modes, "--iters", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "broken: TypeError: no such gate\n" in shown and "peer: has no step of one token (B2 H6 D16" in shown
    assert max(map(len, shown.splitlines())) <= 80
    chosen = glax.explain(lambda q: glax.recurrent(q, q, q, gk=q).output, jnp.ones((2, 40, 6, 16)))[0]
    assert f"glax ran {chosen.kernel} with {chosen.config}, by heuristic\n" in shown and "WRONG" not in shown
    assert "peers print" not in shown
    assert (out / "roofline.png").read_bytes().startswith(b"\x89PNG")

    document = json.loads((out / "bench.json").read_text())
    assert document["machine"]["copy_gbytes"] > 0.1 and document["machine"]["matmul_gflops"]["float32"] > 1
    assert [result["mode"] for result in document["results"]] == list(MODES)
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
    problem = Problem.of_shape((2, 5, 6, 4), gate=gate, dtype=dtype)
    arrays = problem.shapes()
    assert jax.eval_shape(problem.forward, arrays).dtype == dtype
    assert bench.expected(problem, problem.arrays(), None).shape == (5, 4, 4)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("delta", [False, True])
def test_bench_takes_every_form_of_a_call(gate, delta, capsys, monkeypatch):
    """K and V apart, shared heads, the delta rule and packed sequences: glax is right in each, forward, trained and decoded."""
    monkeypatch.setattr(bench, "ceilings", lambda dtypes, iters: dict(copy_gbytes=1.0, matmul_gflops=dict(float32=1.0)))
    call = ["--shape", "2,12,2,4,4,6", "--gate", gate, "--iters", "1", *(["--delta"] if delta else [])]
    for modes in (["--packed", "3", "--mode", "train"], ["--mode", "step"]):
        code, document = json_of(capsys, "bench", *call, *modes)
        (result,) = document["results"]
        assert code == 0 and result["ways"][0]["error"] < 1e-5
        assert (result["gflops"] is None) is delta and result["gbytes"] > 0


def test_every_published_layer_is_a_call():
    args = build_parser().parse_args(["tune", *(x for name in LAYERS for x in ("--like", name))])
    for problem in problems_of(args):
        arrays = problem.shapes()
        assert jax.eval_shape(problem.forward, arrays).shape == (*problem.rows, problem.H, problem.V)


def test_a_peer_of_jax_is_right(capsys, monkeypatch):
    """A peer that is installed is called with the arguments that it documents, here a stand-in with their names."""

    def linear_attention(kind, q, k, v, *, g=None, beta=None, segment_ids=None):
        gates = {"gk" if kind in ("gla", "kda") else "g": g, "beta": beta}
        return glax.recurrent(q, k, v, **gates, segment_ids=segment_ids)

    package = types.ModuleType("jla")
    package.ops = types.ModuleType("jla.ops")
    package.ops.linear_attention = linear_attention
    monkeypatch.setitem(sys.modules, "jla", package)
    monkeypatch.setitem(published.PEERS, "jla", {})
    monkeypatch.setattr(bench, "ceilings", lambda dtypes, iters: dict(copy_gbytes=1.0, matmul_gflops=dict(float32=1.0)))
    for options in (["--gate", "key", "--packed", "2"], ["--gate", "constant", "--delta"]):
        call = ["bench", "--shape", "1,12,2,4,4,6", "--iters", "1", "--mode", "train", "--peer", "jla", *options]
        code, document = json_of(capsys, *call)
        _, peer = document["results"][0]["ways"]
        assert code == 0 and peer["right"], peer["reason"]

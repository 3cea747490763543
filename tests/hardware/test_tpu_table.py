"""The table of compiled TPU kernels belongs to the present code, and its kernels fit and are fast enough by estimate."""

import pytest

from benchmarks.tpu import compile, estimate
from benchmarks.tpu.problems import POOLS, PROBLEMS, TARGETS, fingerprint

pytestmark = pytest.mark.core
LINES = compile.TABLE.read_text().splitlines()
ROWS = [line.split() for line in LINES if not line.startswith("#")]


def test_table_has_the_fingerprint_of_the_code():
    """After a change of the kernels, `python -m benchmarks.tpu.compile` must compile them again. It needs libtpu."""
    assert f"code {fingerprint()};" in LINES[0], "run python -m benchmarks.tpu.compile (needs libtpu)"


def test_every_problem_compiles_for_every_chip():
    kernels = ("forward", "backward", "save_states")
    pooled = "step", "verify", *compile.IN_HBM
    want = {(target, str(problem), kernel) for target in TARGETS for problem in PROBLEMS for kernel in kernels}
    want |= {(target, str(problem), kernel) for target in TARGETS for problem in POOLS for kernel in pooled}
    assert {(row[0], " ".join(row[1:-6]), row[-6]) for row in ROWS} == want
    assert len(ROWS) == len(want)


def test_vmem_budget():
    """Every kernel fits the 16 MiB that a v5e allows by default."""
    assert all((row[-6] in compile.IN_HBM or int(row[-2]) > 0) and int(row[-2]) <= compile.VMEM_KIB for row in ROWS)


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_estimate(target):
    """By the bundles of the table, simple GLA at D = 128 reaches at least 60% of the floor."""
    found = estimate.bundles()
    for problem in PROBLEMS:
        is_simple = problem.form in ("head", "constant") and not problem.erases
        if is_simple and problem.D == 128 and problem.sequences is None:
            time = max(estimate.seconds(target, problem, "forward", found))
            assert problem.floors[0] / TARGETS[target].bandwidth >= 0.6 * time


def test_fingerprint_ignores_docstrings_and_comments(tmp_path, monkeypatch):
    from benchmarks.tpu import problems

    def of(text):
        (tmp_path / "kernel.py").write_text(text)
        fingerprint.cache_clear()
        return fingerprint()

    monkeypatch.setattr(problems, "SOURCES", tmp_path)
    try:
        plain = of('def f():\n    """One."""\n    return 1\n')
        assert plain == of('"""Module."""\n\n\ndef f():\n    """Two.\n\n    More.\n    """\n    # why\n    return 1\n')
        assert plain != of('def f():\n    """One."""\n    return 2\n')
    finally:
        fingerprint.cache_clear()


def test_counted_bundles_of_a_step():
    """A step is the longest run between branches and targets. For per-key gates, the check before it is added."""
    listing = [f" {hex(i) if i else '0'}   : > {{ %v = vadd }}" for i in range(200)]
    for at, text in ((30, "sbr.rel (%p) target = $region1"), (70, "sbr.rel (%p) target = $region2"), (74, "sbr.rel")):
        listing[at] = f" {hex(at)}   : > {{ %{text} }}"
    listing[180] = " 0xb4 PF: > { %v = vadd }"
    assert compile.counted("\n".join(listing), has_check=False) == (200, 106)
    assert compile.counted("\n".join(listing), has_check=True) == (200, 106 + 40)


def test_instructions_of_a_program_and_their_bytes_in_hbm():
    """Arrays in other memories, S(1), and instructions that move nothing have no bytes. A copy's start counts each side once."""
    from benchmarks.tpu.peers import instructions

    text = """
ENTRY %main {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[1024]{0:T(1024)} bitcast(%p)
  %s = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)
  %d = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%s)
  %k.1 = (bf16[8,128]{1,0:T(8,128)(2,1)}, f32[2]{0}) custom-call(%d, %b), custom_call_target="tpu_custom_call"
}
"""
    assert instructions(text) == {"s": ("copy-start", 4096), "k.1": ("custom-call", 2048 + 8 + 4096)}


def test_a_share_is_judged_by_more_than_the_error_of_the_estimate():
    from benchmarks.tpu.peers import verdict

    factors = [0.9, 1.2, 1.35]  # an error of 1.5
    for ours, words in ((0.45, "at most 0.75"), (0.6, "undecided"), (1.1, "undecided"), (1.2, "more than 0.75")):
        assert verdict(ours, 1.0, factors) == (ours, words)

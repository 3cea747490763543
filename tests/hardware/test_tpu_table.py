"""The table of compiled TPU kernels belongs to the present code, and its kernels fit and are fast enough by estimate."""

import pytest

from benchmarks.tpu import compile, estimate
from benchmarks.tpu.problems import PROBLEMS, TARGETS, fingerprint

pytestmark = pytest.mark.core
LINES = compile.TABLE.read_text().splitlines()
ROWS = [line.split() for line in LINES if not line.startswith("#")]


def test_table_has_the_fingerprint_of_the_code():
    """After a change of the kernels, `python -m benchmarks.tpu.compile` must compile them again. It needs libtpu."""
    assert f"code {fingerprint()};" in LINES[0], "run python -m benchmarks.tpu.compile (needs libtpu)"


def test_every_problem_compiles_for_every_chip():
    kernels = ("forward", "backward", "save_states")
    want = {(target, str(problem), kernel) for target in TARGETS for problem in PROBLEMS for kernel in kernels}
    assert {(row[0], " ".join(row[1:-6]), row[-6]) for row in ROWS} == want
    assert len(ROWS) == len(want)


def test_vmem_budget():
    """Every kernel fits the 16 MiB that a v5e allows by default."""
    assert all(0 < int(row[-2]) <= compile.VMEM_KIB for row in ROWS)


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_estimate(target):
    """By the bundles of the table, simple GLA at D = 128 reaches at least 60% of the floor."""
    found = estimate.bundles()
    for problem in PROBLEMS:
        if problem.form in ("head", "constant") and problem.D == 128 and problem.sequences is None:
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

"""The table of what the TPU compiler made of the kernels is that of the kernels as they are."""

import pytest

from benchmarks.tpu import compile, estimate
from benchmarks.tpu.problems import PROBLEMS, TARGETS, fingerprint

pytestmark = pytest.mark.fast
LINES = compile.TABLE.read_text().splitlines()
ROWS = [line.split() for line in LINES if not line.startswith("#")]


def test_table_is_of_this_code():
    """A change of the kernels must compile them again: `python -m benchmarks.tpu.compile`, which needs libtpu."""
    assert f"code {fingerprint()};" in LINES[0], "run python -m benchmarks.tpu.compile (needs libtpu)"


def test_every_problem_compiles_for_every_chip():
    kernels = ("forward", "backward", "remember")
    want = {(target, str(problem), kernel) for target in TARGETS for problem in PROBLEMS for kernel in kernels}
    assert {(row[0], " ".join(row[1:-6]), row[-6]) for row in ROWS} == want
    assert len(ROWS) == len(want)


def test_vmem_budget():
    """Below the 16 MiB that a kernel may take on a v5e without asking for more."""
    assert all(0 < int(row[-2]) <= compile.VMEM_KIB for row in ROWS)


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_estimate(target):
    """Simple GLA at D = 128 is expected at 60% of the floor at least, by the bundles of the table."""
    found = estimate.bundles()
    for problem in PROBLEMS:
        if problem.form in ("head", "constant") and problem.D == 128 and problem.sequences is None:
            time = max(estimate.seconds(target, problem, "forward", found))
            assert problem.floors[0] / TARGETS[target].bandwidth >= 0.6 * time


def test_fingerprint_sees_code_alone(tmp_path, monkeypatch):
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


def test_counted():
    """The longest run between branches and targets; for gates per key channel, with the check before it."""
    listing = [f" {hex(i) if i else '0'}   : > {{ %v = vadd }}" for i in range(200)]
    for at, text in ((30, "sbr.rel (%p) target = $region1"), (70, "sbr.rel (%p) target = $region2"), (74, "sbr.rel")):
        listing[at] = f" {hex(at)}   : > {{ %{text} }}"
    listing[180] = " 0xb4 PF: > { %v = vadd }"
    assert compile.counted("\n".join(listing), has_check=False) == (200, 106)
    assert compile.counted("\n".join(listing), has_check=True) == (200, 106 + 40)

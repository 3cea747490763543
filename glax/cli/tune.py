"""Run `glax tune`: measure every config of the kernels that given calls use, and store the fastest."""

import sys

import glax
from glax._src.tuning.cache import Measurement
from glax.cli.cache import measurements
from glax.cli.cases import Problem, problems_of
from glax.cli.output import show_json, show_table, show_text
from glax.testing.check import one_line


def run(args) -> int:
    rows, failures = [], []
    for problem in problems_of(args):
        try:
            rows += [row(problem, call, m) for call, m in tuned(problem).items()]
        except* Exception as group:  # the errors of compilers and devices for every candidate
            failures.append(dict(problem=str(problem), reasons=[one_line(e) for e in leaves(group)]))
    if args.json:
        folder = measurements().folder
        show_json(dict(cache=None if folder is None else str(folder), measured=rows, failed=failures))
    else:
        show(rows, failures)
    return int(bool(failures))


def tuned(problem: Problem) -> dict[str, Measurement]:
    """Return the measurements of all calls of glax in the forward and the gradient of a problem: {"kernel: shapes":
    measurement}."""
    arrays = problem.shapes()
    return glax.tune(problem.train, arrays, arrays["value"], progress=sys.stderr.isatty())


def row(problem: Problem, call: str, measurement: Measurement) -> dict:
    kernel, _, shapes = call.partition(": ")
    return dict(
        problem=str(problem),
        kernel=kernel,
        call=shapes,
        winner=str(measurement.config),
        ms=measurement.ms,
        candidates=measurement.candidates,
    )


def leaves(group: BaseExceptionGroup) -> list[BaseException]:
    """Return the errors of a group that are no groups, at any depth."""
    return [leaf for e in group.exceptions for leaf in (leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


def show(rows: list[dict], failures: list[dict]):
    for row in rows:
        timed = {name: ms for name, ms in row["candidates"].items() if not isinstance(ms, str)}
        table = [(name, float(ms), "fastest" if name == row["winner"] else "") for name, ms in timed.items()]
        title = f"{row['kernel']}, {row['problem']}"
        show_table(("config", "ms", ""), sorted(table, key=lambda x: (x[2] == "", x[1])), title=title)
        for name, reason in row["candidates"].items():
            if isinstance(reason, str):
                show_text(f"{name} fell out: {reason.splitlines()[0]}")
    for failure in failures:
        show_text(f"{failure['problem']}: not tuned: {'; '.join(failure['reasons'])}")
    persistent = measurements()
    if rows and persistent.folder is not None and persistent.failure is None:
        # otherwise a warning has stated why nothing is stored
        print(f"remembered in {persistent.folder}")

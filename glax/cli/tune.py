"""Run `glax tune`: measure every config of the kernels that given calls use, and store the fastest."""

import dataclasses

import jax

import glax
from glax._src.solve.dispatch import executor
from glax._src.tuning.cache import Measurement
from glax.cli.cache import measurements
from glax.cli.cases import Problem, add_problems, problems_of, train
from glax.cli.output import add_json, show_json, show_table
from glax.testing.check import one_line


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "tune",
        help="measure which configs are fastest here, and remember them",
        description="Measures the configs of the kernels that a call of each shape uses on this device, forward and "
        "gradient, each checked before it may win, and keeps the fastest in the cache that all later calls look into. "
        "Exit code 1 if no config of a kernel can be used.",
    )
    add_problems(parser)
    add_json(parser)
    return parser


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
    arrays = problem.shapes()
    # finding calls needs no measuring
    policy = dataclasses.replace(executor.chain.policy, cache_miss_fallback="heuristics")
    with glax.overlay(policy=policy):
        return glax.tune(train, arrays, jax.eval_shape(lambda x: x, arrays["value"]))


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
    return [leaf for e in group.exceptions for leaf in (leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


def show(rows: list[dict], failures: list[dict]):
    table = []
    for row in rows:
        timed = {name: ms for name, ms in row["candidates"].items() if not isinstance(ms, str)}
        others = ", ".join(
            f"{name} {ms:.3g}" for name, ms in sorted(timed.items(), key=lambda x: x[1]) if name != row["winner"]
        )
        table.append((row["problem"], row["kernel"], row["winner"], float(row["ms"]), others or None))
    if table:
        show_table(("problem", "kernel", "winner", "ms", "other candidates, ms"), table)
    for row in rows:
        for name, reason in row["candidates"].items():
            if isinstance(reason, str):
                print(f"{row['kernel']}, {row['problem']}: {name} fell out: {reason.splitlines()[0]}")
    for failure in failures:
        print(f"{failure['problem']}: not tuned: {'; '.join(failure['reasons'])}")
    persistent = measurements()
    if (
        rows and persistent.folder is not None and persistent.failure is None
    ):  # otherwise a warning has stated why nothing is stored
        print(f"remembered in {persistent.folder}")

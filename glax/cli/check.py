"""Run `glax check`: compare every usable kernel with the float64 reference, on this machine."""

import collections
import dataclasses

import jax

from glax.cli.output import add_json, progress, show_json, show_table
from glax.testing.cases import CASES, QUICK
from glax.testing.check import Result, check_kernels
from glax.testing.states import DECAYS, STEPS, STORED, state_errors


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "check",
        help="compare every kernel with the reference on this machine",
        description="Runs every usable kernel on a set of telling cases, forward and gradients, and compares the results "
        "with a token-by-token reference in float64. Minutes on 2 cores, for compilers. Exit code 1 if any result misses its bar "
        "or is not finite.",
    )
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} cases of {len(CASES)}")
    parser.add_argument(
        "--states", action="store_true", help=f"instead, the error of states stored in each dtype after {STEPS} tokens"
    )
    add_json(parser)
    return parser


def run(args) -> int:
    if args.states:
        return run_states(args.json)
    cases = [case for case in CASES if case.name in QUICK or not args.quick]
    results, last = [], cases[0].name
    with progress("checking", len(cases)) as advance:
        for result in check_kernels(cases):
            if result.case != last:
                last = result.case
                advance()
            results.append(result)
    missed = any(result.status == "miss" for result in results)
    if args.json:
        show_json(dict(ok=not missed, backend=jax.default_backend(), results=[dataclasses.asdict(r) for r in results]))
    else:
        show(results)
    return int(missed)


def run_states(as_json: bool) -> int:
    with progress("decoding", len(STORED) * len(DECAYS)) as advance:
        errors = []
        for error in state_errors():
            errors.append(error)
            advance()
    if as_json:
        show_json(dict(backend=jax.default_backend(), errors=[dataclasses.asdict(error) for error in errors]))
        return 0
    rows = []
    for dtype, stochastic in STORED:
        own = [f"{x.error:.1e}" for x in errors if (x.dtype, x.stochastic) == (dtype, stochastic)]
        rows.append((dtype, "stochastic" if stochastic else "to nearest", *own))
    show_table(("state", "rounded", *(f"decay {decay}" for decay in DECAYS)), rows)
    print(
        f"relative RMS error of the state after {STEPS} decoded tokens, against float64; decays are those of one token"
    )
    return 0


def show(results: list[Result]):
    rows = {result: (result.error, result.of, result.bar, result.status, result.reason) for result in results}
    never = refusals_of_all(results)
    shown = [(r.kernel, r.case, *row) for r, row in rows.items() if r.kernel not in never]
    show_table(("kernel", "case", "relative error", "of", "bar", "", "reason"), sorted(shown, key=lambda row: row[0]))
    for kernel, reason in never.items():
        print(f"{kernel} runs none of these here: {reason}")
    counts = collections.Counter(result.status for result in results)
    print(
        f"{counts['pass']} pass, {counts['miss']} miss, {counts['refused']} refused; on {jax.devices()[0].device_kind}"
    )
    print("relative error: RMS against the float64 reference, of the array nearest to its bar")


def refusals_of_all(results: list[Result]) -> dict[str, str | None]:
    """Return the kernels that refuse every case, with their first reason."""
    runs = {result.kernel for result in results if result.status != "refused"}
    return {r.kernel: r.reason for r in reversed(results) if r.kernel not in runs}

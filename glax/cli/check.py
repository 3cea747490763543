"""Run `glax check`: compare every usable kernel with the float64 reference, on this machine."""

import collections
import dataclasses
from collections.abc import Iterable

import jax

from glax._src.core.registry import Backend, kernel_registry
from glax.cli.output import progress, show_json, show_table, show_text
from glax.testing.cases import CASES, QUICK
from glax.testing.check import Result, check_kernels
from glax.testing.states import DECAYS, STEPS, STORED, state_errors


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
    never = kernels_that_refuse_all(results)
    shown = [r for r in results if r.kernel not in never]
    for kernel in sorted({r.kernel for r in shown}):
        own = [r for r in shown if r.kernel == kernel]
        ran = [(r.case, r.error, r.bar, r.of, r.status) for r in own if r.status != "refused"]
        show_table(("case", "error", "bar", "of", ""), ran, title=kernel)
        for r in own:
            if r.status != "refused" and r.reason is not None:
                show_text(f"{r.case}: {r.reason}", indent=2)
        for reason, cases in by_reason(r for r in own if r.status == "refused").items():
            show_text(f"refused {len(cases)}: {reason} ({'; '.join(cases)})", indent=2)
        print()
    if never:
        print(f"{len(never)} kernels run none of these cases here: {by_backend(never)}")
    counts = collections.Counter(result.status for result in results)
    print(
        f"{counts['pass']} pass, {counts['miss']} miss, {counts['refused']} refused; on {jax.devices()[0].device_kind}"
    )
    print("error: relative, RMS against the float64 reference, of the array nearest to its bar")


def by_reason(results: Iterable[Result]) -> dict[str | None, list[str]]:
    """Return the cases of the results by their reason."""
    found: dict[str | None, list[str]] = {}
    for result in results:
        found.setdefault(result.reason, []).append(result.case)
    return found


def kernels_that_refuse_all(results: list[Result]) -> list[str]:
    runs = {result.kernel for result in results if result.status != "refused"}
    return sorted({r.kernel for r in results} - runs)


def by_backend(kernels: list[str]) -> str:
    """Return a count of kernels by the machine that they need, such as "3 for a GPU, 1 for other calls than these"."""
    found = collections.Counter(kernel_registry.kernels[name].backend for name in kernels)
    here = sum(found.pop(backend, 0) for backend in (Backend.here(), Backend.ANY))
    counts = [f"{count} for a {str(backend).upper()}" for backend, count in found.items()]
    return ", ".join([*counts, *([f"{here} for other calls than these"] if here else [])])

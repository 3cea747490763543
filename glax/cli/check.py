"""Run `glax check`: compare every usable kernel with the float64 reference, on this machine."""

import collections
import dataclasses
from collections.abc import Iterable

import jax

from glax._src.core.backend import computes_on
from glax._src.core.known_miscompiles import version_of
from glax._src.core.registry import Backend, kernel_registry
from glax._version import __version__
from glax.cli.errors import UsageError
from glax.cli.output import progress, show_json, show_table, show_text
from glax.testing.cases import CASES, QUICK
from glax.testing.check import Result, check_kernels
from glax.testing.states import COMPACT, DECAYS, LONG, STEPS, STORED, StateError, state_errors

SMALL = 1e-4  # an error that counts as exact: dtypes of 16 bits have larger ones
# The packages of each device whose versions a report states, where they are installed.
PACKAGES = {Backend.CPU: (), Backend.GPU: ("jax-cuda13-plugin", "triton", "jax-triton"), Backend.TPU: ("libtpu",)}


def run(args) -> int:
    backend = None if args.platform is None else Backend(args.platform)
    if backend not in (None, Backend.here()):
        raise UsageError(f"--platform {backend} needs a {backend}, {computes_on()}: glax doctor says what is missing")
    if args.states:
        return run_states(args.json, args.quick)
    cases = [case for case in CASES if case.name in QUICK or not args.quick]
    results, last = [], cases[0].name
    with progress("checking", len(cases)) as advance:
        for result in check_kernels(cases, backend):
            if result.case != last:
                last = result.case
                advance()
            results.append(result)
    missed = any(result.status == "miss" for result in results)
    if args.json:
        report = dict(ok=not missed, backend=jax.default_backend(), installation=installation(Backend.here()))
        show_json(report | dict(results=[dataclasses.asdict(r) for r in results]))
    else:
        show(results)
        if backend is not None:
            print(f"To report, with all lines above: {installation(backend)}")
    return int(missed)


def installation(backend: Backend) -> str:
    """Return the versions and the devices to report beside the results of a backend's kernels, as a text."""
    packages = ("jax", "jaxlib", *PACKAGES[backend])
    found = [f"{name} {version}" for name in packages if (version := version_of(name)) is not None]
    return ", ".join([f"glax {__version__}", *found, f"{len(jax.devices())} of {jax.devices()[0].device_kind}"])


def run_states(as_json: bool, quick: bool) -> int:
    """Run `glax check --states`: print the errors of states stored in each dtype. Return exit code 0. quick: only the fewer
    tokens."""
    counts = (STEPS,) if quick else (STEPS, LONG)
    with progress("decoding", len(STORED) * len(DECAYS) * len(counts)) as advance:
        errors = []
        for error in state_errors(counts):
            errors.append(error)
            advance()
    if as_json:
        show_json(dict(backend=jax.default_backend(), errors=[dataclasses.asdict(error) for error in errors]))
        return 0
    for steps in counts:
        rows = []
        for dtype, stochastic in STORED:
            own = [f"{x.error:.1e}" for x in errors if (x.steps, x.dtype, x.stochastic) == (steps, dtype, stochastic)]
            rows.append((dtype, rounding_of(dtype, stochastic), *own))
        show_table(("state", "rounded", *(f"decay {decay}" for decay in DECAYS)), rows)
        print(
            f"relative RMS error of the state after {steps} decoded tokens, against float64; decays are those of one token"
        )
    if growing := growing_dtypes(errors):
        print(f"errors grow with the tokens in {', '.join(growing)}; the default is float32")
    return 0


def rounding_of(dtype: str, stochastic: bool) -> str:
    """Return in words how states of a dtype are rounded."""
    if dtype in COMPACT:
        return "with rests"
    return "stochastic" if stochastic else "to nearest"


def growing_dtypes(errors: list[StateError]) -> list[str]:
    """Return, in words, the dtypes and roundings whose error grows: at some decay, the error after the last number of tokens is
    above 1.5 times the error after the first. Errors up to `SMALL` do not count."""
    found = {}
    for x in errors:
        found.setdefault((x.dtype, x.stochastic, x.decay), []).append(x.error)
    grow = {key[:2] for key, own in found.items() if own[-1] > max(1.5 * own[0], SMALL)}
    return [
        f"{dtype} rounded {rounding_of(dtype, stochastic)}"
        for dtype, stochastic in STORED
        if (dtype, stochastic) in grow
    ]


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
    """Return {reason: names of cases} of the results; None as the reason of those without one."""
    found: dict[str | None, list[str]] = {}
    for result in results:
        found.setdefault(result.reason, []).append(result.case)
    return found


def kernels_that_refuse_all(results: list[Result]) -> list[str]:
    runs = {result.kernel for result in results if result.status != "refused"}
    return sorted({r.kernel for r in results} - runs)


def by_backend(kernels: list[str]) -> str:
    """Return a text that counts kernels by the machine that they need, such as "3 for a GPU, 1 for other calls than these"."""
    found = collections.Counter(kernel_registry.kernels[name].backend for name in kernels)
    here = sum(found.pop(backend, 0) for backend in (Backend.here(), Backend.ANY))
    counts = [f"{count} for a {str(backend).upper()}" for backend, count in found.items()]
    return ", ".join([*counts, *([f"{here} for other calls than these"] if here else [])])

"""Reproduce a wrong number: one case on one platform, and each intermediate beside the float64 reference's.

    python -m tests.case "key, extreme" --platform pallas --dump state,scores
    python -m tests.case --list
    python -m tests.case "bfloat16, key" --platform pallas --set T=72 --resources

The cases are those of `glax check`, of the conformance suite and of the Hopper kernels, which are listed from JAX 0.12 on; --set
changes a field. Without a GPU or TPU the kernel runs in its interpreter; cuda has none, and no gradient. What --dump prints, each
with its error, the first token, chunk and head that are off, and that row beside the reference's:

    output      of every token
    state       the state behind every 64 tokens, in the order of the scan: the final states of shorter and shorter calls
    scores      what each token reads of each of its chunk, [64, 64]: the outputs where the values are unit vectors
    gradient    of every input

--resources compiles the case's kernels for an H100, where a compiler is, and prints registers and spilled bytes. The exit status
is 1 where an array is beyond its bar.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax._src.core.recurrence import Recurrence
from glax.testing.cases import CASES, Case
from glax.testing.reference import reference, reference_gradient
from glax.testing.tolerances import Comparison, compare_gradients, compare_outputs, named
from tests.delta_cases import DeltaCase
from tests.suite import draws, is_extreme, problem

# Else the warpgroups of an interpreted kernel find no thread, and wait for ever: tests/conftest.py does the same.
if jax.__version_info__ >= (0, 12):
    jax.config.update("jax_cpu_enable_async_dispatch", False)
DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8"
CHUNK = 64
KERNELS = {
    "xla": "chunked/xla/any",
    "cpp": "recurrent/cpp/cpu",
    "triton": "chunked/triton/gpu",
    "pallas": "chunked/pallas/gpu",
    "tpu": "chunked/pallas/tpu",
    "cuda": "recurrent/cuda/gpu",
}
FAR = 4  # times an array's bar: a row that is off


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where kernels run. call(f, *operands) is f(*operands), on the device or in the kernels' interpreter."""

    said: str
    call: Callable[..., Any]


def has(backend: str) -> bool:
    return any(device.platform == backend for device in jax.devices())


@contextlib.contextmanager
def machine(platform: str, programs: int) -> Iterator[Machine]:
    """The device that the platform needs, or else its interpreter. Raises SystemExit where there is neither.

    programs: how many each kernel has in the interpreter of Pallas Mosaic GPU.
    """
    needed = dict(triton="gpu", pallas="gpu", cuda="gpu", tpu="tpu").get(platform)
    if needed is None or has(needed):
        yield Machine(str(jax.devices()[0]), lambda f, *operands: jax.jit(f)(*operands))
    elif platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield Machine("the TPU interpreter", lambda f, *operands: jax.jit(f)(*operands))
    elif platform == "triton":
        importlib.import_module("tests.triton_interpreter").install()
        yield Machine("Triton's interpreter", lambda f, *operands: f(*operands))
    elif platform == "pallas" and jax.__version_info__ >= (0, 12):
        from tests.hopper import Interpreter

        with pytest.MonkeyPatch.context() as patch:
            interpreter = Interpreter(patch)
            interpreter.programs(programs)
            yield Machine("the interpreter of Pallas Mosaic GPU, with races as errors", interpreter)
    else:
        remedy = "its interpreter needs JAX 0.12" if platform == "pallas" else "it has no interpreter"
        raise SystemExit(f"{platform} needs a {needed} here; {remedy}")


# ---- the cases -------------------------------------------------------------------------------------------------------


NEWER = "" if jax.__version_info__ >= (0, 12) else "; the names of hopper: need JAX 0.12"


def all_cases() -> dict[str, Any]:
    """Every named case; of the Hopper kernels a call, which has a case, a draw and a config."""
    from tests import cases, delta_cases

    found = {case.name: case for case in (*cases.all_cases(), *CASES)}
    found |= {f"delta {case.name}": case for case in delta_cases.all_cases()}
    if jax.__version_info__ >= (0, 12):
        from tests.hopper import CALLS

        found |= {f"hopper: {name}": call for name, call in CALLS.items()}
    return found


def with_fields(case, fields: list[str]):
    """The case with `name=value` for each of `fields`, in Python's syntax: T=72, dtype=bfloat16, gates=('g',)."""
    if not isinstance(case, Case | DeltaCase):
        return dataclasses.replace(case, case=with_fields(case.case, fields))
    names = {field.name for field in dataclasses.fields(case)}
    given = {}
    for text in fields:
        name, _, value = text.partition("=")
        if name not in names or not value:
            raise SystemExit(f"--set takes one of {', '.join(sorted(names))} and a value, as in T=72, got {text!r}")
        try:
            given[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            given[name] = value
    return dataclasses.replace(case, **given)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A recurrence and the cotangents of its results.

    extreme: whether its bars are the wider ones. config: of the kernel; its heuristic's if None. finals: for each gradient
    whether the kernel receives a cotangent of the final states; without one a packed call can run as one row. saves: whether the
    gradient receives what a forward saved, as in training. begun: whether kernels that have two phases run in these. programs:
    see `machine`.
    """

    r: Recurrence
    cotangents: tuple[jax.Array, jax.Array]
    extreme: bool
    config: glax.Config | None = None
    finals: tuple[bool, ...] = (True,)
    saves: bool = False
    begun: bool = False
    programs: int = 3

    @classmethod
    def of(cls, case, strength: str | None) -> "Problem":
        if not isinstance(case, Case | DeltaCase):
            call = case if strength is None else dataclasses.replace(case, given=with_strength(case.case, strength))
            r, *cotangents = call.problem()
            return cls(
                r, tuple(cotangents), extreme=False, config=call.config, finals=call.finals or (True,), saves=call.save,
                begun=call.begun, programs=call.programs,
            )  # fmt: skip
        draw = draws(case)[0] if strength is None else with_strength(case, strength)
        return cls(*problem(case, draw), is_extreme(draw))


def with_strength(case: Case | DeltaCase, strength: str):
    """The case's first draw with gates of this strength."""
    return dataclasses.replace(draws(case)[0], strength=strength) if isinstance(case, DeltaCase) else strength


def tokens(r: Recurrence, keep: slice) -> Recurrence:
    """Those tokens alone, from the same initial states."""

    def cut(x):
        return x[:, keep] if x is not None and x.ndim > 2 else x

    decay = dataclasses.replace(r.decay, **{name: cut(getattr(r.decay, name)) for name in ("head", "key", "value")})
    erasure = r.erasure if r.erasure is None else jax.tree.map(cut, r.erasure)
    return r.replace(q=cut(r.q), k=cut(r.k), v=cut(r.v), decay=decay, erasure=erasure)


def chunks_of(r: Recurrence, what: str) -> list[slice]:
    """The tokens of each chunk in the order of the scan. Raises SystemExit for rows that hold several sequences."""
    if r.boundaries is not None or r.segments is not None:
        raise SystemExit(f"--dump {what} needs one sequence a row: pass --set cuts=None or --set ids=None")
    slices = [slice(t, min(t + CHUNK, r.q.shape[1])) for t in range(0, r.q.shape[1], CHUNK)]
    return slices[::-1] if r.reverse else slices


# ---- the dumps -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Dump:
    """An array beside the reference's. axes: what its leading axes count; a row is what lies behind them."""

    name: str
    got: np.ndarray
    want: np.ndarray
    comparison: Comparison
    axes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        c = self.comparison
        said = c.reason if c.error is None else f"off by {c.error:.1e}, bar {c.bar:.1e}"
        yield f"{self.name:<22} {said}" + ": MISS" * (c.reason is not None)
        if self.got.shape != self.want.shape or self.want.ndim < len(self.axes):
            return
        ahead = len(self.axes)
        got, want = (x.reshape(*x.shape[:ahead], -1) for x in (self.got, self.want))
        size = np.linalg.norm(want, axis=-1)
        usual = np.sqrt(np.mean(size**2))
        with np.errstate(invalid="ignore", divide="ignore"):
            errors = np.linalg.norm(got - want, axis=-1) / np.maximum(size, usual)
        errors = np.where(np.isfinite(got).all(-1), np.nan_to_num(errors), np.inf)
        far = np.argwhere(errors > FAR * c.bar)
        worst = np.unravel_index(np.argmax(errors), errors.shape)
        if self.axes:
            yield f"  worst at {self.place(worst)}: {errors[worst]:.1e}"
        if len(far):
            first = tuple(far[0])
            yield f"  {len(far)} of {errors.size} rows are off by more than {FAR} bars, the first at {self.place(first)}:"
            for said, x in (("here", got), ("reference", want)):
                yield f"    {said:<10} " + " ".join(f"{value:11.4e}" for value in x[first][:6])

    def place(self, index) -> str:
        said = [f"{name} {i}" for name, i in zip(self.axes, index, strict=True)]
        if "token" in self.axes:
            token = index[self.axes.index("token")]
            said.append(f"row {token % CHUNK} of chunk {token // CHUNK}")
        return ", ".join(said)


GATES = dict(constant="g_gamma", head="g", key="gk", value="gv")  # fields of a decay, by the arguments
BY_TOKEN = ("sequence", "token", "head")
BY_SEQUENCE = ("sequence", "head")


def float64(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32) if jnp.asarray(x).dtype == jnp.bfloat16 else x, np.float64)


def outputs(p: Problem, run, _) -> Iterator[Dump]:
    got, want = run(p.r), reference(p.r)
    compared = compare_outputs(p.r, got, want, p.extreme)
    yield Dump("output", float64(got.output), want.output, compared[0], BY_TOKEN)
    yield Dump("final_state", float64(got.final_state), want.final_state, compared[1], BY_SEQUENCE)


def states(p: Problem, run, _) -> Iterator[Dump]:
    T = p.r.q.shape[1]
    for number, chunk in enumerate(chunks_of(p.r, "state")):
        r = tokens(p.r, slice(chunk.start, T) if p.r.reverse else slice(0, chunk.stop))
        got, want = run(r), reference(r)
        comparison = compare_outputs(r, got, want, p.extreme)[1]
        name = f"state behind chunk {number}"
        yield Dump(name, float64(got.final_state), want.final_state, comparison, BY_SEQUENCE)


def scores(p: Problem, run, _) -> Iterator[Dump]:
    for number, chunk in enumerate(chunks_of(p.r, "scores")):
        r = tokens(p.r, chunk).replace(initial_state=None)
        B, C, H = r.q.shape[0], r.q.shape[1], r.v.shape[2]
        units = jnp.broadcast_to(jnp.eye(C, CHUNK, dtype=r.v.dtype)[None, :, None], (B, C, H, CHUNK))
        r = r.replace(v=units, decay=dataclasses.replace(r.decay, value=None))
        got, want = run(r), reference(r)
        compared = compare_outputs(r, got, want, p.extreme)[0]
        yield Dump(f"scores of chunk {number}", float64(got.output), want.output, compared, BY_TOKEN)


def gradients(p: Problem, _, pull) -> Iterator[Dump]:
    d_output, d_final = p.cotangents
    for has_d_final in p.finals:
        got = pull(p.r, d_output, d_final if has_d_final else None)
        want = reference_gradient(p.r, d_output, d_final if has_d_final else jnp.zeros_like(d_final))
        arrays, wanted = named(got), named(want)
        of = "" if has_d_final else " of outputs"
        for comparison in compare_gradients(p.r, got, want, p.extreme):
            name = comparison.name.removeprefix("d ")
            x = arrays[name]
            axes = BY_TOKEN if x.ndim > 2 else ()
            axes = BY_SEQUENCE if name == "initial_state" else axes
            yield Dump(f"d {GATES.get(name, name)}{of}", float64(x), float64(wanted[name]), comparison, axes)


DUMPS = dict(output=outputs, state=states, scores=scores, gradient=gradients)


def run_case(p: Problem, platform: str, dumps: tuple[str, ...], say=print) -> int:
    """Print each of `dumps`; return how many arrays are beyond their bars."""
    _ = glax.configs.ChunkedConfig  # loads the kernels
    forward = glax.kernel_registry.kernels[KERNELS[platform]]
    name = forward.name.replace("/", ".vjp/", 1)
    backward = glax.kernel_registry.kernels.get(name)
    if "gradient" in dumps and backward is None:
        raise SystemExit(f"{forward.name} has no gradient of its own: leave gradient out of --dump")
    missed = 0
    with machine(platform, p.programs) as here:
        shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named(p.r).items())
        say(f"{forward.name} on {here.said}: {shapes}")

        def run(r, saves=False):
            config = config_of(forward, p, r)
            phases = forward.two_phase(r, config) if p.begun else None
            if phases is None or (saves and phases.finish_with_residuals is None):
                f = forward.forward_with_residuals if saves else forward.run
                return here.call(functools.partial(f, config=config), r)
            begun, *_ = here.call(jax.jit(functools.partial(phases.local_states, config=config)), r)
            f = phases.finish_with_residuals if saves else phases.finish
            return here.call(functools.partial(f, config=config), begun, r)

        def pull(r, d_output, d_final):
            saves = p.saves and forward.forward_with_residuals is not None
            residuals = run(r, saves=True)[1] if saves else None
            config = config_of(backward, p, r)
            # Kernels that have saved nothing are called without residuals.
            given = (r, d_output, d_final, *([] if residuals is None else [residuals]))
            phases = backward.two_phase(r, config) if p.begun and d_final is not None else None
            if phases is None:
                return here.call(functools.partial(backward.run, config=config), *given)
            begin = jax.jit(functools.partial(phases.local_states, config=config))
            begun, *_ = here.call(begin, r, d_output, 0 * d_final)
            return here.call(functools.partial(phases.finish, config=config), begun, *given)

        for dump in dumps:
            for found in DUMPS[dump](p, run, pull):
                missed += found.comparison.reason is not None
                for line in found.lines():
                    say(line)
    return missed


def config_of(spec: glax.KernelSpec, p: Problem, r: Recurrence) -> glax.Config:
    """The problem's config where it is one of the kernel's, else what the heuristic chooses."""
    return p.config if isinstance(p.config, spec.config) else spec.config.heuristic(r)


def resources(case) -> Iterator[str]:
    """What the compilers say of a case's Hopper kernels."""
    from tests.hopper_compile import compiled

    case = case if isinstance(case, Case | DeltaCase) else case.case
    gate = "key" if "gk" in case.gates else "head"
    is_delta = isinstance(case, DeltaCase) or bool(case.erasure)
    what = ["residuals", *["delta"] * is_delta, *["packed"] * (case.cuts is not None), *["reverse"] * case.reverse]
    for direction in ("forward", "gradient"):
        sizes, kernels = compiled(", ".join([direction, *what]), gate, f"{case.K}x{case.V}")
        for number, kernel in enumerate(kernels):
            each = ", ".join(f"{name} {value}" for name, value in kernel.items())
            yield f"{direction}, kernel {number}: {each}"
        yield f"{direction}: bytes of shared memory {sizes}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a case, as --list names it")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--platform", choices=KERNELS, default="xla")
    parser.add_argument("--dump", default="output,gradient", help=f"some of {','.join(DUMPS)}")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the case")
    parser.add_argument("--strength", action="append", help="of the gates; the case's first if left out")
    parser.add_argument("--resources", action="store_true", help="compile for an H100, and print registers and spills")
    args = parser.parse_args(arguments)
    cases, dumps = all_cases(), tuple(args.dump.split(","))
    if args.list:
        print(*cases, sep="\n")
        return 0
    if not args.names or not set(args.names) <= set(cases) or not set(dumps) <= set(DUMPS):
        parser.error(f"expected names of --list and of {','.join(DUMPS)}, got {args.names} and {args.dump!r}{NEWER}")
    missed = 0
    for name in args.names:
        case = with_fields(cases[name], args.set)
        if args.resources:
            print(*resources(case), sep="\n")
        for strength in args.strength or [None]:
            missed += run_case(Problem.of(case, strength), args.platform, dumps)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())

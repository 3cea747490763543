"""Every kernel against the float64 reference on this machine, on few but telling cases: what `glax check` runs."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import bind
from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import KernelSpec, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.autodiff import solve
from glax._src.solve.dispatch import Choice
from glax.testing.reference import reference, reference_gradient

# Relative RMS of (output and state, gradients), by the dtype of q, k and v; docs/numerics.md says why.
BARS = {"float32": (1e-5, 5e-5), "bfloat16": (3.5e-3, 3.5e-3), "float16": (1e-3, 1e-3)}
SUMS = {"d constant": 10, "d scale": 10}  # single sums over all of T, with cancellation
EXTREME = 10  # float32, where gates of -100 and -inf stand among mild ones

AS_CHOSEN = "recurrent and its gradient"  # what users call, through the choice of kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `cuts` packs sequences; rows behind the last cut are padding, and hold NaN."""

    name: str
    gates: tuple[str, ...] = ("gk",)
    strength: str = "log-sigmoid"
    heads: tuple[int, int, int] = (2, 2, 2)
    B: int = 2
    T: int = 150
    K: int = 32
    V: int = 32
    dtype: str = "float32"
    gate_dtype: str = "float32"
    cuts: tuple[int, ...] | None = None
    reverse: bool = False

    @property
    def extreme(self) -> bool:
        return self.strength == "extreme" and self.dtype == "float32"

    def gate(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        logs = -np.log1p(np.exp(-rng.normal(size=shape)))
        match self.strength:
            case "log-sigmoid":
                return logs
            case "extreme":
                dice = rng.random(shape)
                return np.where(dice < 0.05, -np.inf, np.where(dice < 0.1, -100.0, logs))
            case constant:
                return np.full(shape, float(constant))

    def operands(self) -> tuple[Recurrence, jax.Array, jax.Array]:
        """A recurrence, and the cotangents of its output and final state."""
        rng = np.random.default_rng(0)
        B, T, K, V, H = self.B, self.T, self.K, self.V, max(self.heads)
        N = B if self.cuts is None else len(self.cuts) - 1
        Hq, Hk, Hv = self.heads
        shapes = dict(query=(B, T, Hq, K), key=(B, T, Hk, K), value=(B, T, Hv, V), d_output=(B, T, H, V))
        arrays = {name: jnp.asarray(rng.normal(size=shape), self.dtype) for name, shape in shapes.items()}
        shapes = dict(g=(B, T, H), g_gamma=(N, H), gk=(B, T, H, K), gv=(B, T, H, V))
        arrays |= {name: jnp.asarray(self.gate(rng, shapes[name]), self.gate_dtype) for name in self.gates}
        if self.cuts is not None:
            end = self.cuts[-1]
            arrays = {name: x if name == "g_gamma" else x.at[:, end:].set(jnp.nan) for name, x in arrays.items()}
        d_output = arrays.pop("d_output")
        state, d_final = (jnp.asarray(rng.normal(size=(N, H, K, V)), jnp.float32) for _ in range(2))
        cuts = None if self.cuts is None else jnp.asarray(self.cuts, jnp.int32)
        return bind(**arrays, initial_state=state, cu_seqlens=cuts, reverse=self.reverse), d_output, d_final


PACKED = dict(B=1, T=150, cuts=(0, 0, 40, 41, 41, 110, 141, 141))  # empty sequences, one token, padding behind
CASES = (
    Case("key"),
    Case("key, extreme", strength="extreme"),
    Case("key, all -20", strength="-20"),
    Case("key, all 0", strength="0"),
    Case("none", gates=()),
    Case("constant", gates=("g_gamma",)),
    Case("head", gates=("g",)),
    Case("head, extreme", gates=("g",), strength="extreme"),
    Case("value", gates=("gv",)),
    Case("key and value, reverse, extreme", gates=("gk", "gv"), strength="extreme", reverse=True),
    Case("key, packed", **PACKED),
    Case("key, packed, extreme", **PACKED, strength="extreme"),
    Case("all gates, packed, reverse", gates=("g", "g_gamma", "gk", "gv"), reverse=True, **PACKED),
    Case("constant, packed", gates=("g_gamma",), **PACKED),
    Case("head, 4 queries, 2 keys, 1 value", gates=("g",), heads=(4, 2, 1), K=64, V=32),
    Case("key, K=24 V=40, one token", K=24, V=40, T=1),
    Case("key, T=1000", B=1, T=1000, K=64, V=64),
    Case("bfloat16, key", dtype="bfloat16", gate_dtype="bfloat16", K=64, V=64),
    Case("bfloat16, head, 4 queries, packed, reverse", gates=("g",), dtype="bfloat16", heads=(4, 2, 2), reverse=True, **PACKED),
    Case("float16, key, extreme", dtype="float16", strength="extreme"),
)  # fmt: skip
QUICK = ("key", "key, extreme", "constant", "all gates, packed, reverse", "bfloat16, key")


@dataclasses.dataclass(frozen=True)
class Result:
    """A kernel on a case. `error` is the relative RMS error of the array `of` that came closest to its `bar` or missed it."""

    kernel: str
    case: str
    status: str  # "pass", "miss" or "refused"
    error: float | None = None
    bar: float | None = None
    of: str | None = None
    reason: str | None = None


def check_kernels(cases: Sequence[Case] = CASES) -> Iterator[Result]:
    """Each registered kernel on each case, and `recurrent` itself with its gradient on the quick ones, as results come."""
    load_kernels()
    specs = list(kernel_registry.kernels.values())
    programs = {spec.name: jax.jit(spec.run, static_argnames="config") for spec in specs}
    for case in cases:
        operands = case.operands()
        want = named(reference(operands[0])._asdict())
        want_gradient = named(reference_gradient(*operands), "d ")
        for spec in specs:
            backward = spec.algorithm.endswith(".vjp")
            if (reason := spec.refusal(operands[0])) is not None:
                yield Result(spec.name, case.name, "refused", reason=reason)
                continue
            yield judged(spec.name, case, operands, want_gradient if backward else want, run_kernel(spec, programs))
        if case.name in QUICK:
            yield judged(AS_CHOSEN, case, operands, want | want_gradient, run_chosen)


def run_kernel(spec: KernelSpec, programs: dict):
    def run(r: Recurrence, d_output, d_final) -> dict[str, jax.Array]:
        program, config = programs[spec.name], spec.config.heuristic(r)
        if spec.algorithm.endswith(".vjp"):
            return named(program(r, d_output, d_final, config=config), "d ")
        if spec.is_step:
            everyone = jnp.arange(r.num_sequences)
            output, pool = program(r.replace(initial_state=None), r.initial_state, everyone, config=config)
            return dict(output=output, final_state=pool)
        return named(program(r, config=config)._asdict())

    return run


def run_chosen(r: Recurrence, d_output, d_final) -> dict[str, jax.Array]:
    outputs, gradient = chosen(r, d_output, d_final)
    return named(outputs._asdict()) | named(gradient, "d ")


@jax.jit
def chosen(r: Recurrence, d_output, d_final):
    outputs, pull = jax.vjp(lambda x: solve(Choice(), x.replace(boundaries=r.boundaries)), r.replace(boundaries=None))
    (gradient,) = pull(type(outputs)(d_output, d_final))
    return outputs, gradient


def named(arrays: Recurrence | dict, prefix: str = "") -> dict[str, jax.Array]:
    """The float arrays of a recurrence, or of its results, by name."""
    if isinstance(arrays, Recurrence):
        arrays = vars(arrays) | vars(arrays.decay)
    return {prefix + name: x for name, x in arrays.items() if hasattr(x, "dtype") and name != "boundaries"}


def judged(kernel: str, case: Case, operands, want: dict, run) -> Result:
    """What run(*operands) computes beside `want`: the array closest to its bar, or beyond it."""
    try:
        got = jax.block_until_ready(run(*operands))
    except Exception as failure:  # whatever a compiler or a device raises is what this kernel does with this case
        return Result(kernel, case.name, "miss", reason=one_line(failure))
    if got.keys() != want.keys():
        return Result(kernel, case.name, "miss", reason=f"returns {', '.join(got)}, expected {', '.join(want)}")
    inputs = named(operands[0], "d ") | dict(output=operands[0].q, final_state=operands[2])
    each = [compared(name, got[name], w, inputs[name].dtype, case) for name, w in want.items()]
    worst = max(each, key=lambda x: (x.reason is not None, (x.error or 0) / x.bar))
    missed = worst.reason is not None or worst.error > worst.bar
    return dataclasses.replace(worst, kernel=kernel, status="miss" if missed else "pass")


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text, cut short."""
    return textwrap.shorten(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", 160)


def compared(name: str, got, want: np.ndarray, dtype, case: Case) -> Result:
    """The error of one array that should have that dtype; a reason if it cannot be right whatever its error is."""
    bar = max(BARS[str(jnp.dtype(x))][name.startswith("d ")] for x in (case.dtype, dtype))
    bar *= (EXTREME if case.extreme else 1) * SUMS.get(name, 1)
    result = Result("", case.name, "", bar=bar, of=name)
    if (got.shape, got.dtype) != (want.shape, dtype):
        reason = f"{name} is {got.dtype}{list(got.shape)}, expected {dtype}{list(want.shape)}"
        return dataclasses.replace(result, reason=reason)
    got = np.asarray(got).astype(np.float64)
    if (wrong := np.count_nonzero(~np.isfinite(got))) > 0:
        return dataclasses.replace(result, reason=f"{wrong} of {got.size} values of {name} are not finite")
    if case.cuts is not None and got.shape[:2] == (case.B, case.T) and got[:, case.cuts[-1] :].any():
        return dataclasses.replace(result, reason=f"padding rows of {name} are not 0")
    floor = np.finfo(np.float32).tiny * np.sqrt(want.size)  # below the least normal float32, all numbers are equal
    error = np.linalg.norm(got - want) / (np.linalg.norm(want) + floor / bar)
    return dataclasses.replace(result, error=float(error))

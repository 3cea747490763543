"""Register kernels by algorithm, platform and backend, and choose among them.

A kernel refuses a call for a reason in one sentence, its refusal: it needs another backend, takes another config, is known to
be miscompiled here, or does not support the call (`KernelSpec.supports`, the kernel's own condition). A kernel that does not
refuse is able. The able kernel with the highest priority is chosen; the other able kernels are outranked.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, Self

import jax

from glax._src.core.backend import Backend, computes_on, local_device, lowering_platform, x64_is_enabled
from glax._src.core.decay import PARTS, USUAL_FORMS
from glax._src.core.known_miscompiles import known_miscompile
from glax._src.core.recurrence import Recurrence, describe


class Platform(enum.StrEnum):
    """Name the language or compiler that a kernel is written for: `xla` (JAX's own operations), `cpp` (native code for CPUs),
    `triton`, `pallas` (Mosaic, on GPUs and TPUs) or `cuda`.

    A member is a str. Platform(name) raises ValueError for another name. `parse` also accepts None and "auto".

    >>> glax.Platform("xla")
    <Platform.XLA: 'xla'>
    """

    XLA = enum.auto()
    CPP = enum.auto()
    TRITON = enum.auto()
    PALLAS = enum.auto()
    CUDA = enum.auto()

    @classmethod
    def parse(cls, name: "str | Platform | None") -> "Platform | None":
        """Return the platform that a user names, such as "xla". Return None, by which glax chooses, for None and "auto".

        Raises ValueError for an unknown name.
        """
        if name is None or name == "auto":
            return None
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(repr(str(platform)) for platform in cls)
            raise ValueError(f"platform must be None, 'auto', {names}, got {name!r}") from None


class Role(enum.StrEnum):
    """Name what a kernel computes of a recurrence. A value is the suffix of the algorithm's name, except for FORWARD, which has
    none."""

    FORWARD = enum.auto()
    VJP = enum.auto()
    STEP = enum.auto()  # outputs and states, which lie in a pool and are updated there
    VERIFY = enum.auto()  # outputs alone, with the states in a pool that stays as it is
    REPLAY = (
        enum.auto()
    )  # outputs of one token, with states and replay rings, which lie in a pool and are updated there


def refused_form(form: str, forms: Iterable[str], what: str = "decays") -> str:
    """Return the refusal of the decay form `form` by a kernel or function that computes only `forms`.

    what: what has the form, as the sentence names it, such as "decays".
    """
    gates = [PARTS[part].argument if part in PARTS else part for part in form.split("+") if part != "none"]
    came = f"{form} (given by {' and '.join(gates)})" if gates else form
    return f"takes {what} of the form {', '.join(forms)}; got {came}"


def check_field(name: str, value, lowest: int, highest: int, power_of_two: bool = False):
    """Raise ValueError unless `value`, the field `name` of a Config, is an int from `lowest` to `highest`.

    If `power_of_two`, the value must also be a power of two. Configs also come from files, so the check bounds what a kernel
    allocates and compiles.
    """
    fits = type(value) is int and lowest <= value <= highest and not (power_of_two and value & (value - 1))
    if not fits:
        kind = "a power of two" if power_of_two else "an int"
        raise ValueError(f"{name} must be {kind} from {lowest} to {highest}, got {value!r:.80}")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hold the tunable numbers of a kernel. `glax.configs` has the configs of glax's kernels.

    A subclass is a frozen dataclass. Its fields are the numbers, and its __post_init__ raises ValueError for those out of
    range. It may override two class methods. Both receive a `Recurrence`, the call, of which they may read shapes, dtypes and
    fields, but no values of arrays. heuristic(r) returns the config of a call that was not measured; if absent, the one with
    the fields' defaults. candidates(r) returns the configs that tuning measures, in any order; if absent, heuristic(r) alone.

    former_names: a class variable, a tuple of str: the names that the class had in measurements stored by earlier versions of
    glax. () if absent.

    >>> config = glax.configs.ChunkedConfig(chunk=32)
    >>> isinstance(config, glax.Config), config
    (True, ChunkedConfig(chunk=32))
    """

    former_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def heuristic(cls, r: Recurrence) -> Self:
        """Return the config for a call r that was not measured, from its shapes. `Config` returns the fields' defaults."""
        return cls()

    @classmethod
    def candidates(cls, r: Recurrence) -> Iterable[Self]:
        """Return the configs that tuning measures for r. `Config` returns heuristic(r) alone; a subclass may return more."""
        return [cls.heuristic(r)]


class TwoPhase(NamedTuple):
    """Hold a kernel in two phases. The first needs no initial state (a gradient's first needs no d_final), so shards exchange
    states while it runs.

    local_states: (recurrence, config=) -> (begun, state, log); for "<algorithm>.vjp" (recurrence, d_output, d_final, config=).
            begun: arrays for `finish`, whose first axis grows with the batch. state [N, H, K, V]: the final state, or the
            gradient of the initial state. log [N, H, K or 1]: the sum of log decays of each sequence
    finish: (begun, recurrence, config=) -> what `run` returns, from the initial state of this recurrence, not from the state of
            the first phase; for "<algorithm>.vjp" (begun, recurrence, d_output, d_final[, residuals], config=)
    finish_with_residuals: (begun, recurrence, config=) -> what `forward_with_residuals` returns; None if the kernel saves none
    """

    local_states: Callable[..., Any]
    finish: Callable[..., Any]
    finish_with_residuals: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Describe one implementation of one algorithm. `KernelRegistry.register` makes a KernelSpec from the function `run`.

    algorithm, platform, backend: the parts of its name, such as "chunked/xla/any". The algorithm's suffix states what it
              computes, and `role` names it: ".vjp" a gradient; ".step", ".verify" and ".replay" the outputs of tokens whose
              sequences have their states in a pool; none the outputs and final states, with the role "forward"
    run:      (recurrence, config=) -> Outputs;
              for "<algorithm>.vjp" (recurrence, d_output, d_final[, residuals], config=) -> Recurrence. The residuals, by
              position, are what forward_with_residuals saved. They are left out if nothing was saved;
              for "<algorithm>.step" (recurrence of few tokens, pool, slots, config=) -> (output, pool), slot -1 for none;
              for "<algorithm>.verify" the same operands -> output;
              for "<algorithm>.replay" (recurrence of one token, ringed, slots, config=) -> (output, ringed). ringed: the arrays
              of a `glax.serving.StatePool`, states and replay rings. slots: None for all of them in order
    forward_with_residuals: (recurrence, config=) -> (Outputs, Residuals). The gradient kernel of the same algorithm and
              platform then reads the residuals instead of computing them again. None if it takes no residuals
    route:    (recurrence, *cotangents, config=) -> (line, missed), which `explain` shows. line: how the kernel runs this call,
              in one line, or "". missed: {a faster form of the kernel that does not run this call: why}
    omits_d_final: recurrence -> whether a gradient kernel takes None for a d_final of zeros
    saves_residuals: recurrence -> whether residuals are worth their memory
    config:   the class of its configs, a `Config`
    forms:    the forms of decay that the kernel computes: of "none", "constant", "head", "key", "value" and "key+value". It
              refuses every other form
    erases:   whether the kernel runs recurrences with an `erasure`, which are of the delta rule
    erases_before_decay: whether it also runs those with erase_before_decay, as `recurrent` defines it
    erases_along: whether it also runs those with erase_along, as `recurrent` defines it
    erasing_forms: the forms of decay that it computes with an erasure; None for `forms`
    supports: recurrence -> None, or why the kernel refuses it for another reason, whatever the machine and the config
    priority: recurrence -> number; of the able kernels, the one with the highest is chosen
    version:  a number, which the author increments when measured configs become invalid
    takes_segments: recurrence -> whether the kernel reads its segments; else the kernel receives `recurrence.folded`
    mixes_segments: recurrence -> whether NaN or inf in one segment of `recurrence.folded` may spoil the results of others. The
              results are then checked, and computed again token by token where they are not finite (solve/isolation.py)
    isolate:  (run, recurrence, *others) -> the result of run(recurrence, *others), in which no NaN or inf has passed from one
              sequence or segment to another. It calls `run`, and computes again what is not finite. others: the cotangents
              and residuals of a gradient. None for a kernel that needs no more than `mixes_segments`
    two_phase: (recurrence, config) -> the kernel in two phases, a `TwoPhase`, or None where these would add work to `run`. Where
              devices share a sequence, the first computes the state of a device's tokens from zeros, and the second the
              outputs, after the devices have exchanged states
    stores_states: recurrence -> None, or why the kernel does not store the states behind every r.states_every tokens

    If left out, `config` is `Config`, `forms` has all six, `supports` refuses nothing, `priority` is 0 (XLA's kernels have 0 to
    2, those of a device more), `version` is 0, and `saves_residuals` is True. `erases`, `erases_before_decay`, `erases_along`,
    `omits_d_final`, `takes_segments` and `mixes_segments` are False. There is no route, `isolate` or form in two phases, and
    neither residuals nor states behind n tokens are stored.

    >>> glax.kernel_registry.kernels["chunked/xla/any"].platform
    <Platform.XLA: 'xla'>
    """

    algorithm: str
    platform: Platform
    backend: Backend
    run: Callable[..., Any]
    config: type[Config] = Config
    supports: Callable[[Recurrence], str | None] = lambda r: None
    priority: Callable[[Recurrence], int] = lambda r: 0
    version: int = 0
    two_phase: Callable[[Recurrence, Any], TwoPhase | None] = lambda r, config: None
    forward_with_residuals: Callable[..., Any] | None = None
    saves_residuals: Callable[[Recurrence], bool] = lambda r: True
    erases: bool = False
    erases_before_decay: bool = False
    erases_along: bool = False
    route: Callable[..., tuple[str, dict[str, str]]] = lambda r, *cotangents, config: ("", {})
    stores_states: Callable[[Recurrence], str | None] = lambda r: "does not store the states behind every n tokens"
    omits_d_final: Callable[[Recurrence], bool] = lambda r: False
    takes_segments: Callable[[Recurrence], bool] = lambda r: False
    mixes_segments: Callable[[Recurrence], bool] = lambda r: False
    isolate: Callable[..., Any] | None = None
    forms: tuple[str, ...] = USUAL_FORMS
    erasing_forms: tuple[str, ...] | None = None

    @functools.cached_property
    def name(self) -> str:
        """Return "algorithm/platform/backend", which is unique in a registry."""
        return f"{self.algorithm}/{self.platform}/{self.backend}"

    @functools.cached_property
    def role(self) -> Role:
        """Return what the kernel computes, a `Role`: the one whose name is the suffix of the algorithm, else FORWARD."""
        return next((role for role in Role if self.algorithm.endswith(f".{role}")), Role.FORWARD)

    @property
    def is_gradient(self) -> bool:
        """Return whether the kernel is the gradient of an algorithm, with the suffix ".vjp"."""
        return self.role is Role.VJP

    def is_gradient_of(self, other: "KernelSpec") -> bool:
        """Return whether this kernel is the gradient of `other`'s algorithm, on the same platform."""
        return (self.algorithm, self.platform) == (f"{other.algorithm}.vjp", other.platform)

    @property
    def is_step(self) -> bool:
        """Return whether the kernel computes the outputs of tokens and replaces the states in a pool: the suffix ".step"."""
        return self.role is Role.STEP

    @property
    def is_pooled(self) -> bool:
        """Return whether the kernel takes a pool of states and the slots of the sequences: the suffixes ".step", ".verify" and
        ".replay"."""
        return self.role in (Role.STEP, Role.VERIFY, Role.REPLAY)

    def refusal(self, r: Recurrence, config: Config | None = None) -> str | None:
        """Return why this kernel refuses to run r here. Return None if the kernel is able to.

        config: the config that the caller names, which must be of the kernel's class; None if the caller names none, and then no
        config is a reason to refuse.
        """
        return self.refusal_by_traits(r, config, Facts.of(r)) or known_miscompile(self.name) or self.supports(r)

    def refusal_by_traits(self, r: Recurrence, config: Config | None, facts: "Facts") -> str | None:
        """Return why this kernel's platform, backend, forms, class of configs or stored states refuse r here; None if they do
        not.

        `supports` is called only after this. facts: `Facts.of(r)`, which a caller forms once for all kernels.
        """
        if self.backend not in (facts.here, Backend.ANY):
            return f"needs a {self.backend}, {facts.computes_on}"
        if self.backend is Backend.GPU and facts.gpu_is_unknown:
            return "which GPU the program is lowered for is not known: this machine has none"
        if facts.is_symbolic and self.platform not in (Platform.XLA, Platform.CPP):
            return "takes shapes that are known while tracing, not symbols"
        if (why := self.other_form(r, facts.form)) is not None:
            return why
        if r.states_every is not None and (why := self.stores_states(r)) is not None:
            return why
        if config is not None and type(config) is not self.config:
            return f"takes a {self.config.__name__}, cfg is a {type(config).__name__}"
        return None

    def other_form(self, r: Recurrence, form: str) -> str | None:
        """Return why this kernel refuses the decay form or the erasure of r; None if it computes both.

        form: `r.decay.form`, such as "key", which a caller forms once for all kernels.
        """
        if r.erasure is not None and not self.erases:
            return "does not erase, as beta and erase require"
        if r.erasure is not None and r.erasure.before_decay and not self.erases_before_decay:
            return "reads what it erases behind the token's decay, got erase_before_decay"
        if r.erasure is not None and r.erasure.along is not None and not self.erases_along:
            return "takes what is erased along the key alone, got erase_along"
        forms = self.forms
        if r.erasure is not None and self.erasing_forms is not None:
            forms = self.erasing_forms
        if form in forms:
            return None
        what = "decays" if r.erasure is None else "decays beside an erasure"
        return f"{refused_form(form, forms, what)}: leave out platform and cfg"

    # The interface of `glax._src.tuning.op.Kernel`, for executors and the tuner.

    @functools.cached_property
    def op_id(self) -> str:
        """Return `name`."""
        return self.name

    def get_impl(self, cfg: Config) -> Callable[..., Any]:
        """Return `run` as a function of the other arguments, with config=cfg."""
        return functools.partial(self.run, config=cfg)

    runner = get_impl

    def heuristic_cfg(self, inv) -> Config:
        """Return the config for a call, guessed from its shapes. inv: the `Invocation`, whose first argument is a
        `Recurrence`."""
        return self.config.heuristic(inv.args[0])

    def key(self, inv) -> str:
        """Return the text under which measurements of a call are stored.

        T and the number of packed sequences are rounded up to powers of two. inv: the `Invocation`, whose first argument is a
        `Recurrence`.
        """
        return describe(inv.args[0])

    def candidate_cfgs(self, inv) -> Iterable[Config]:
        """Return the configs that tuning measures for a call. inv: the `Invocation`, whose first argument is a `Recurrence`."""
        return self.config.candidates(inv.args[0])


def under_usual_options(spec: KernelSpec) -> KernelSpec:
    """Return spec with functions that trace under JAX's default promotion of dtypes and ranks, whatever the caller has set.

    Kernels multiply bfloat16 operands by float32 decays and rely on a float32 product. Kernels of accelerators take no 64-bit
    values: they are traced without jax_enable_x64, so that their indices have 32 bits.
    """

    def usual(run):
        @functools.wraps(run)
        def traced(*operands, **options):
            wide = spec.backend not in (Backend.GPU, Backend.TPU) and x64_is_enabled()
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(wide):
                return run(*operands, **options)

        return traced

    def usual_if_any(run):
        return None if run is None else usual(run)

    def two_phase(r: Recurrence, config: Config) -> TwoPhase | None:
        phases = spec.two_phase(r, config)
        if phases is None:
            return None
        saving = usual_if_any(phases.finish_with_residuals)
        return TwoPhase(usual(phases.local_states), usual(phases.finish), saving)

    saving, isolate = usual_if_any(spec.forward_with_residuals), usual_if_any(spec.isolate)
    return dataclasses.replace(
        spec, run=usual(spec.run), forward_with_residuals=saving, two_phase=two_phase, isolate=isolate
    )


class Facts(NamedTuple):
    """Hold facts on a recurrence and this machine that every kernel's refusal depends on, formed once for all kernels.

    here: the backend. computes_on: a phrase that names the platform, for refusals. gpu_is_unknown: whether the program is
    lowered for a platform of which this process has no device. is_symbolic: whether B, T or N is a symbol. form: the decay
    form.
    """

    here: Backend
    computes_on: str
    gpu_is_unknown: bool
    is_symbolic: bool
    form: str

    @classmethod
    def of(cls, r: Recurrence) -> "Facts":
        gpu_is_unknown = lowering_platform.value is not None and local_device() is None
        return cls(Backend.here(), computes_on(), gpu_is_unknown, r.is_symbolic, r.decay.form)


class UnsupportedError(NotImplementedError):
    """Say that no kernel can run a call. The message lists the reason of each kernel.

    Calls with an explicit `platform` or `cfg` raise it, and `KernelRegistry.find` does.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> try: glax.recurrent(q, q, q, platform="cuda")
    ... except glax.UnsupportedError as error: print(str(error)[:35])
    no kernel solves this recurrence on
    """


def check_form(r: Recurrence, what: str, forms: tuple[str, ...] = USUAL_FORMS):
    """Raise UnsupportedError unless the decay of r has one of `forms`.

    what: the function, other than a kernel, that computes these forms alone, as the message names it, such as "sequence_axis".
    """
    if r.decay.form not in forms:
        raise UnsupportedError(f"{what} {refused_form(r.decay.form, forms)}")


class KernelRegistry:
    """Hold the KernelSpecs by name in the dict `kernels`, and choose one for a recurrence on this machine.

    `register` adds a kernel. `find` chooses one; it raises UnsupportedError if no kernel is able. `able` lists the able kernels
    and the refusals of the others. A new registry is empty. glax's own kernels are in `glax.kernel_registry`.

    A kernel refuses a recurrence for a reason in one sentence: it is for another backend or config, or does not support the
    call. A kernel that does not refuse is able. The able kernel with the highest priority is chosen.

    >>> "chunked/xla/any" in glax.kernel_registry.kernels
    True
    """

    def __init__(self):
        self.kernels: dict[str, KernelSpec] = {}

    def register(self, algorithm: str, platform: Platform, backend: Backend, **traits) -> Callable:
        """Return a decorator that registers a kernel's function, the `run` of its KernelSpec, and returns it unchanged.

        traits: the other fields of KernelSpec, by name. The decorator raises ValueError if the kernel's name is taken.
        """

        def add(run):
            spec = under_usual_options(KernelSpec(algorithm, platform, backend, run, **traits))
            if spec.name in self.kernels:
                raise ValueError(f"{spec.name} is registered twice")
            self.kernels[spec.name] = spec
            return run

        return add

    def able(
        self,
        r: Recurrence,
        platform: Platform | None = None,
        config: Config | None = None,
        role: Role = Role.FORWARD,
    ) -> tuple[list[KernelSpec], dict[str, str]]:
        """Return (the able kernels of that role for r here, the chosen one first; the refusals of the others, by name).

        platform: the platform whose kernels are considered; all platforms if None. config: the config of the call; kernels with
        another class of configs refuse. None: the call has none. role: the `KernelSpec.role` of the kernels that are
        considered; if left out, those that compute outputs and final states. Raises nothing if no kernel is able: the first
        list is then empty.
        """
        facts = Facts.of(r)
        eligible = [s for s in self.kernels.values() if s.role is role and platform in (None, s.platform)]
        reasons = [spec.refusal_by_traits(r, config, facts) for spec in eligible]
        reasons = [why or known_miscompile(spec.name) for spec, why in zip(eligible, reasons, strict=True)]
        reasons = [why or spec.supports(r) for spec, why in zip(eligible, reasons, strict=True)]
        able = [spec for spec, why in zip(eligible, reasons, strict=True) if why is None]
        refusals = {spec.name: why for spec, why in zip(eligible, reasons, strict=True) if why is not None}
        return sorted(able, key=lambda spec: -spec.priority(r)), refusals

    def find(self, r: Recurrence, platform: Platform | None = None, config: Config | None = None) -> KernelSpec:
        """Return the kernel that is chosen for the outputs and final states of r on this machine. platform, config: as in `able`.

        Raises UnsupportedError, with every refusal, if no kernel is able.
        """
        able, refusals = self.able(r, platform, config)
        if able:
            return able[0]
        on = f" on platform {str(platform)!r}" if platform else ""
        reasons = [f"  {name}: {reason}" for name, reason in refusals.items()] or ["  none is registered"]
        raise UnsupportedError(f"no kernel solves this recurrence{on}:\n" + "\n".join(reasons))


kernel_registry = KernelRegistry()

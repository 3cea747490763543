"""From a recurrence to the kernel that runs it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from glax._src.core.recurrence import Outputs, Recurrence, Residuals, varying_like
from glax._src.core.registry import Config, KernelSpec, Platform, UnsupportedError, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.tuning.cache import PersistentCache, overlay
from glax._src.tuning.executor import Executor
from glax._src.tuning.selection import AutotunePolicy, ConfigSelectorChain


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the caller insists on; None leaves it to glax."""

    platform: Platform | None = None
    config: Config | None = None


# The one that every public function goes through. Its caches are this process's, the user's disk, and what glax ships.
executor = Executor(
    ConfigSelectorChain(
        persistent=PersistentCache("recurrent"),
        shipped=PersistentCache("tuned", folder=pathlib.Path(__file__).parents[1] / "tuning", any_compiler=True),
    )
)


def run_forward(choice: Choice, r: Recurrence) -> Outputs:
    load_kernels()
    spec = kernel_registry.find(r, choice.platform, choice.config)
    return merged_vmap(functools.partial(execute, spec, choice, again=forward_again), r)


def forward_again(choice: Choice, results, r: Recurrence) -> Outputs:
    return run_spec(kernel_registry.find(r, choice.platform, choice.config), choice, r)


def forward_with_residuals(choice: Choice, r: Recurrence) -> tuple[Outputs, Residuals | None]:
    """The same, with what the kernel leaves for its gradient, if that is the one that will be taken."""
    load_kernels()
    spec = kernel_registry.find(r, choice.platform, choice.config)
    if not saves_for_gradient(choice, r, spec):
        return run_forward(choice, r), None
    part = dict(part=spec.forward_with_residuals, saves_residuals=True, again=forward_keeping_nothing)
    return merged_vmap(functools.partial(execute, spec, choice, **part), r)


def forward_keeping_nothing(
    choice: Choice, results: tuple[Outputs, Residuals], r: Recurrence
) -> tuple[Outputs, Residuals]:
    """What another backend's gradient takes was not traced: it gets zeros, and forms anew what it needs."""
    runs, chunks = results[1]
    B, H = r.q.shape[0], r.num_heads
    states = jnp.zeros((B, runs.shape[1], H, *runs.shape[3:]), runs.dtype)
    far = jnp.zeros((B, chunks.shape[1], H), chunks.dtype)
    return forward_again(choice, results, r), Residuals(varying_like(states, r.q), varying_like(far, r.q))


def saves_for_gradient(choice: Choice, r: Recurrence, spec: KernelSpec) -> bool:
    """Whether this kernel keeps something, and the gradient will be taken by the kernel that goes with it."""
    if spec.forward_with_residuals is None or not spec.saves_residuals(r):
        return False
    gradient, _ = gradient_kernel(choice, r)
    return gradient is not None and gradient.is_gradient_of(spec)


def run_backward(choice: Choice, r: Recurrence, d_output, d_final, residuals: Residuals | None) -> Recurrence | None:
    """The gradient by the best fused kernel; None if there is none, and the forward must serve instead."""
    spec, own = gradient_kernel(choice, r)
    operands = (r, d_output, d_final, *([] if residuals is None else [residuals]))
    return None if spec is None else merged_vmap(functools.partial(execute, spec, own, again=gradient_again), *operands)


def gradient_again(
    choice: Choice, results, r: Recurrence, d_output, d_final, residuals: Residuals | None = None
) -> Recurrence:
    """Without what was kept: see `forward_keeping_nothing`."""
    spec, own = gradient_kernel(choice, r)
    if spec is None:
        kernel_registry.find(r, choice.platform, choice.config)  # its error says why
        raise UnsupportedError("no kernel forms this gradient")
    return run_spec(spec, own, r, d_output, d_final)


def gradient_kernel(choice: Choice, r: Recurrence) -> tuple[KernelSpec | None, Choice]:
    """A config that is not of a fused kernel belongs to the forward; the fused one's is then chosen as ever."""
    load_kernels()
    for config in dict.fromkeys((choice.config, None)):
        able, _ = kernel_registry.able(r, choice.platform, config, gradient=True)
        if able:
            return able[0], dataclasses.replace(choice, config=config)
    return None, choice


def runs_in_two_phases(choice: Choice, r: Recurrence, gradient: bool) -> bool:
    """Whether the kernel that runs r (or its gradient) has two TwoPhase there."""
    spec, _ = kernel_of(choice, r, gradient)
    return spec is not None and spec.two_phase(r) is not None


def begin(choice: Choice, r: Recurrence, *cotangents):
    """(begun, state, log) of the first part of the kernel that runs r, or given cotangents its gradient: see TwoPhase."""
    spec, own = kernel_of(choice, r, bool(cotangents))
    part = spec.two_phase(r).local_states
    return merged_vmap(functools.partial(run_spec, spec, own, part=part), r, *cotangents)


def finish(choice: Choice, r: Recurrence, *given, begun):
    """The results, by the second part; given: d_output, d_final and what was kept, for the gradient."""
    spec, own = kernel_of(choice, r, bool(given))
    return finish_by(spec.two_phase(r).finish, spec, own, r, *given, begun=begun)


def finish_with_residuals(choice: Choice, r: Recurrence, begun) -> tuple[Outputs, Residuals | None]:
    """The outputs, by the second part, with what the kernel leaves for its gradient, if that is the one that will be taken."""
    spec, own = kernel_of(choice, r, gradient=False)
    if spec.two_phase(r).finish_with_residuals is None or not saves_for_gradient(choice, r, spec):
        return finish(choice, r, begun=begun), None
    return finish_by(spec.two_phase(r).finish_with_residuals, spec, own, r, begun=begun)


def finish_by(part, spec: KernelSpec, choice: Choice, *operands, begun):
    def run(*operands):
        *operands, begun = operands
        return run_spec(spec, choice, *operands, part=functools.partial(part, begun))

    return merged_vmap(run, *operands, begun)


def kernel_of(choice: Choice, r: Recurrence, gradient: bool) -> tuple[KernelSpec | None, Choice]:
    load_kernels()
    if gradient:
        return gradient_kernel(choice, r)
    return kernel_registry.find(r, choice.platform, choice.config), choice


def step_kernel(choice: Choice, r: Recurrence) -> KernelSpec | None:
    """The best kernel that takes one token of r, its initial states a pool, in the pool itself; None if there is none.

    A config that is not of such a kernel belongs to the kernel that solves.
    """
    load_kernels()
    able, _ = kernel_registry.able(r, choice.platform, choice.config, step=True)
    return able[0] if able else None


def run_step(spec: KernelSpec, choice: Choice, r: Recurrence, slots, otherwise) -> Outputs:
    """The output and, as the final state, the pool, with sequence n in row slots[n] (-1: nowhere), or n without slots.

    otherwise(choice, r, slots): the same where the program is lowered for a backend that has no such kernel.
    """
    from glax._src.solve.lowering import Kernel  # loads modules of JAX that are not a part of `import jax`

    _, refused = kernel_registry.able(r, choice.platform, step=True)

    def step(spec, refused, r: Recurrence, slots=None) -> Outputs:
        rows = jnp.arange(r.num_sequences, dtype=jnp.int32) if slots is None else slots.astype(jnp.int32)
        tokens, pool = r.replace(initial_state=None), r.initial_state
        return Outputs(*executor(spec, tokens, pool, rows, cfg=choice.config, refused=refused))

    def again(platform: Platform | None, results, r: Recurrence, slots=None) -> Outputs:
        own = insisting(choice, platform)
        spec = step_kernel(own, r)
        return otherwise(own, r, slots) if spec is None else step(spec, {}, r, slots)

    kernel = Kernel(functools.partial(step, spec, refused), again, opaque=spec.platform is not Platform.XLA)
    # Where sequences lie in a pool is known at run time only, so a pool cannot be spread along with them.
    return kernel.placed(r) if slots is None else kernel.alone(r, slots)


def execute(spec: KernelSpec, choice: Choice, r: Recurrence, *given, again, part=None, saves_residuals: bool = False):
    """The kernel of spec on (r, *given); where the program is lowered for another backend, again(choice, results, r, *given).

    results: the shapes of what that kernel returns.
    """
    from glax._src.solve.lowering import Kernel  # loads modules of JAX that are not a part of `import jax`

    def anew(platform: Platform | None, results, *operands):
        with overlay(policy=AutotunePolicy()):  # there is nothing to measure on
            return again(insisting(choice, platform), results, *operands)

    run = functools.partial(run_spec, spec, choice, part=part)
    return Kernel(run, anew, spec.platform is not Platform.XLA, saves_residuals).placed(r, *given)


def run_spec(spec: KernelSpec, choice: Choice, r: Recurrence, *given, part=None):
    _, refused = kernel_registry.able(r, choice.platform, gradient=spec.is_gradient)
    return executor(spec, r, *given, cfg=choice.config, refused=refused, part=part)


def insisting(choice: Choice, platform: Platform | None) -> Choice:
    """The choice, narrowed to that platform."""
    if platform is None or choice.platform is platform:
        return choice
    if choice.platform is not None:
        raise UnsupportedError(
            f"kernels on platform {str(choice.platform)!r} cannot be exported for several devices: call glax with "
            f"platform {str(platform)!r} or None, or inside jax.shard_map"
        )
    return dataclasses.replace(choice, platform=platform)


def merged_vmap(f, *operands):
    """f(*operands), with a vmapped axis merged into the batch, so that no kernel needs a rule of its own.

    Packed sequences share out the rows of T differently in each example: those go one at a time.
    """
    run = custom_vmap(f)

    @run.def_vmap
    def rule(size, batched, *operands):
        def spread(x, is_batched):
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        operands = jax.tree.map(spread, operands, tuple(batched))
        if operands[0].boundaries is not None:
            results = jax.lax.map(lambda each: run(*each), operands)
        else:
            results = run(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), operands))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return run(*operands)

"""From a recurrence to the kernel that runs it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from glax.kernels import load_kernels
from glax.recurrence import Outputs, Recurrence
from glax.registry import Config, Platform, UnsupportedError, kernel_registry

FORWARD = ("recurrent", "chunked")
BACKWARD = tuple(f"{algorithm}.vjp" for algorithm in FORWARD)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the caller insists on; None leaves it to glax."""

    platform: Platform | None = None
    config: Config | None = None


def run_forward(choice: Choice, r: Recurrence) -> Outputs:
    load_kernels()
    spec = kernel_registry.find(FORWARD, r, choice.platform, choice.config)
    return merged_vmap(call, spec.name, choice.config, r)


def run_backward(choice: Choice, r: Recurrence, d_output, d_final) -> Recurrence | None:
    """The gradient by the best fused kernel; None if there is none, and the forward must serve instead.

    A config that names another kernel than a fused one belongs to the forward; the fused kernel then guesses its own.
    """
    load_kernels()
    for config in dict.fromkeys((choice.config, None)):
        try:
            spec = kernel_registry.find(BACKWARD, r, choice.platform, config)
        except UnsupportedError:
            continue
        return merged_vmap(call, spec.name, config, r, d_output, d_final)
    return None


def call(name: str, config: Config | None, r: Recurrence, *cotangents):
    spec = kernel_registry.kernels[name]
    with jax.named_scope(f"glax.{name}"):
        return spec.run(r, *cotangents, config=spec.config.heuristic(r) if config is None else config)


def merged_vmap(f, name, config, *operands):
    """f(name, config, *operands), with a vmapped axis merged into the batch, so that no kernel needs a rule of its own.

    Packed sequences share out the rows of T differently in each example: those go one at a time.
    """
    run = custom_vmap(functools.partial(f, name, config))

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

"""Solve a recurrence whose states lie in a pool by a kernel that reads them there, where one is able."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Role
from glax._src.solve.autodiff import float0_zeros
from glax._src.solve.dispatch import Choice, pooled_kernel, run_pooled


def pool_of(r: Recurrence) -> Float[Array, "P H K V"]:
    """Return r's initial states, which callers have set to a pool [P, H, K, V], or to the states of the sequences in order."""
    assert r.initial_state is not None
    return r.initial_state


def in_one_pass(role: Role, gathered: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function (choice, r, slots) -> the results of `gathered`, computed by a kernel of that role if one is able.

    gathered: (choice, r, slots) -> Outputs for Role.STEP, and the output alone for Role.VERIFY, by the kernels of whole
    sequences. It runs where no kernel is able and under vmap, and the gradient is taken through it. A slot of P, the
    size of the pool, marks a row without a sequence.
    """

    def run(choice: Choice, r: Recurrence, slots):
        spec = pooled_kernel(choice, r, role)
        if spec is None or 0 in (*r.q.shape, pool_of(r).shape[0]):
            return gathered(choice, r, slots)

        def in_pool(r: Recurrence, slots):
            known = None if slots is None else jnp.where(slots < pool_of(r).shape[0], slots, -1)
            outputs = run_pooled(spec, choice, r, known, out_of_pool)
            return outputs if role is Role.STEP else outputs.output

        run_in_pool = jax.custom_batching.custom_vmap(in_pool)
        run_in_pool.def_vmap(functools.partial(by_example, choice))
        return run_in_pool(r, slots)

    def out_of_pool(choice: Choice, r: Recurrence, slots) -> Outputs:
        P = pool_of(r).shape[0]
        results = gathered(choice, r, None if slots is None else jnp.where(slots < 0, P, slots))
        return results if role is Role.STEP else Outputs(results, pool_of(r))

    def by_example(choice: Choice, size: int, batched, *operands):
        """Run calls under vmap, each with a pool of its own, by `gathered`, whose gathered states merge into one batch."""
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        results = jax.vmap(functools.partial(gathered, choice), axes, axis_size=size)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    def fwd(choice: Choice, r: Recurrence, slots):
        return solve_in_pool(choice, r, slots), (r, slots)

    def bwd(choice: Choice, operands, cotangents):
        r, slots = operands
        _, pull = jax.vjp(lambda r: gathered(choice, r, slots), r)
        return *pull(cotangents), float0_zeros(slots)

    solve_in_pool = jax.custom_vjp(run, nondiff_argnums=(0,))
    solve_in_pool.defvjp(fwd, bwd)
    return solve_in_pool

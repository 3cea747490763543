"""Find variables with equal layouts for JAX 0.11, whose own way is slow in large kernels.

Mosaic GPU infers the layout of every value of a kernel. JAX 0.11 sorts the values by their operations as text, and MLIR verifies
and numbers the whole kernel for the text of each: the time is quadratic in the kernel's size. JAX 0.12 sorts nothing, and the
layouts do not depend on the order.
"""

import functools

import jax


def equal_variables(system) -> dict:
    """Return for each variable of a constraint system the others that its constraints make equal, in the constraints' order."""
    from jax.experimental.mosaic.gpu.constraints import Equals, Variable

    groups: dict[Variable, list[Variable]] = {}
    for x in system.constraints:
        if isinstance(x, Equals) and isinstance(x.lhs, Variable) and isinstance(x.rhs, Variable):
            one, other = (groups.setdefault(v, [v]) for v in (x.lhs, x.rhs))
            if one is not other:
                one += other
                groups |= dict.fromkeys(other, one)
    return {v: [x for x in group if x != v] for v, group in groups.items()}


@functools.cache
def use_in_jax():
    """Replace JAX 0.11's own way for this process; do nothing for other versions."""
    if jax.__version_info__[:2] == (0, 11):
        from jax.experimental.mosaic.gpu import constraints

        constraints.compute_transitively_equal_vars = equal_variables

"""Find variables with equal layouts for JAX 0.11, whose own way is slow in large kernels.

Mosaic GPU infers the layout of every value of a kernel. JAX 0.11 sorts the values by their operations as text, and MLIR verifies
and numbers the whole kernel for the text of each: the time is quadratic in the kernel's size. JAX 0.12 sorts nothing, and the
layouts do not depend on the order.
"""

import contextlib
import threading

import jax

replacing = threading.Lock()


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


@contextlib.contextmanager
def used_by_jax():
    """Use `equal_variables` in JAX 0.11 while a kernel is lowered inside; do nothing for other versions.

    JAX looks the function up in its module, so it is replaced for all threads. One thread at a time is let in: another could take
    the replacement for JAX's own function, and put it back.
    """
    if jax.__version_info__[:2] != (0, 11):
        yield
        return
    from jax.experimental.mosaic.gpu import constraints

    with replacing:
        of_jax = constraints.compute_transitively_equal_vars
        constraints.compute_transitively_equal_vars = equal_variables
        try:
            yield
        finally:
            constraints.compute_transitively_equal_vars = of_jax

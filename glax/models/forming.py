"""Form a tree of arrays over a mesh, each by a program of its own.

One program of all parameters would hold a kernel for each, and XLA compiles kernels of GPUs one after another. Here equal
programs, as equal layers have, are compiled once, and one array is formed at a time.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]  (JAX 0.12)
from jax.sharding import NamedSharding

# Elements of what is computed outside of the programs, such as keys. A layer's own, held in its program, would make it unequal to
# the programs of other layers.
SMALL = 64


def formed(make: Callable[[], Any], shardings: Any) -> Any:
    """Return make(), each array with its sharding. shardings: a tree of NamedSharding with the structure of make()'s result.

    The values are those of make() outside of jit, up to rounding. An array of more than SMALL elements that make() computes is
    never whole on one device, unless its sharding says so. Arrays that exist before the call stay where they are. What several
    results need is computed once for each of them.
    """
    traced, shapes = jax.make_jaxpr(make, return_shape=True)()
    values, rest = small_values(traced)
    programs: dict[tuple, Callable] = {}

    def array(outcome, sharding: NamedSharding) -> jax.Array:
        program, inputs = program_of(traced.jaxpr, rest, outcome)
        key = str(program), tuple(map(content, constants(program))), sharding
        if key not in programs:
            programs[key] = jax.jit(jaxpr_as_fun(ClosedJaxpr(program, ())), out_shardings=[sharding])
        return programs[key](*(values[x] for x in inputs))[0]

    placed = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, NamedSharding))
    leaves = [array(*each) for each in zip(traced.jaxpr.outvars, placed, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def small_values(traced: ClosedJaxpr) -> tuple[dict[Any, Any], list]:
    """Return ({a variable: its value}, the other equations) of a traced program. The values are its constants, and the results,
    of at most SMALL elements each, of equations that read only such values. They are computed here."""
    values, rest = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True)), []
    for equation in traced.jaxpr.eqns:
        inputs = variables(equation.invars)
        if all(x in values for x in inputs) and all(x.aval.size <= SMALL for x in equation.outvars):
            alone = part(traced.jaxpr, inputs, equation.outvars, [equation])
            results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(values[x] for x in inputs))
            values |= zip(equation.outvars, results, strict=True)
        else:
            rest.append(equation)
    return values, rest


def program_of(whole: Jaxpr, equations: list, outcome) -> tuple[Jaxpr, list]:
    """Return (the program that forms one result, with only those `equations` that it needs; the variables that are its inputs).

    whole: the program that the equations are from. outcome: the variable of the result.
    """
    needed, found = set(variables([outcome])), []
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            found.append(equation)
            needed.difference_update(equation.outvars)
            needed.update(variables(equation.invars))
    found.reverse()
    read = [x for each in found for x in each.invars]
    inputs = list(
        dict.fromkeys(x for x in variables([*read, outcome]) if x in needed)
    )  # equal programs share this order
    return part(whole, inputs, [outcome], found), inputs


def constants(program: Jaxpr) -> Iterable:
    """Yield the arrays that a program and the programs in it hold as constants, which the text of a program does not
    include."""
    for equation in program.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(inner, ClosedJaxpr):
                yield from inner.consts
                inner = inner.jaxpr
            if isinstance(inner, Jaxpr):
                yield from constants(inner)


def content(x) -> bytes:
    """Return a checksum, SHA-256, of the bytes of an array or of keys of jax.random."""
    values = np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    return hashlib.sha256(values.tobytes()).digest()


def variables(atoms: Iterable) -> list:
    """Return the atoms of equations that are variables, not literals."""
    return [x for x in atoms if not isinstance(x, Literal)]


def part(whole: Jaxpr, inputs: list, outcomes: list, equations: list) -> Jaxpr:
    """Return a program with these inputs, results (outcomes) and equations, which are some of those of `whole`."""
    return whole.replace(constvars=[], invars=inputs, outvars=outcomes, eqns=equations)

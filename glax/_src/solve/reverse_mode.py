"""Mark arrays so that forward-mode differentiation raises an error that names the remedy. JAX's own error names only a
custom_vjp."""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

WAYS_ROUND = (
    "glax has no forward mode (jax.jvp, jax.jacfwd, jax.hessian, what jax.linearize returns): use jax.grad, jax.vjp or "
    "jax.jacrev, any number of times. Two vjps are one jvp: with y, pull = jax.vjp(f, x), the derivative of f along v is "
    "jax.vjp(lambda d: pull(d)[0], y)[1](v)[0]; a Hessian times v is jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)"
)


def reverse_mode(tree):
    """Return the tree with its floats marked as differentiable in reverse mode alone. Forward mode raises TypeError."""
    return jax.tree.map(lambda x: value_p.bind(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def refuse(*_, **__):
    raise TypeError(WAYS_ROUND)


# A primitive, for the derivative of a custom_jvp is vmapped with it, in either mode.
value_p = Primitive("glax_reverse_mode")
value_p.def_impl(lambda x: x)
value_p.def_abstract_eval(lambda x: x)
ad.defjvp(value_p, lambda tangent, _: tangent_p.bind(tangent))
batching.primitive_batchers[value_p] = lambda x, axes: (value_p.bind(*x), axes[0])
mlir.register_lowering(value_p, lambda context, x: [x])

# Reverse mode transposes it away; only forward mode runs it, or vmaps it.
tangent_p = Primitive("glax_tangent")
tangent_p.def_impl(refuse)
tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(tangent_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[tangent_p] = refuse
mlir.register_lowering(tangent_p, refuse)

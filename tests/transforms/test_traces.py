"""What JAX stores of traces is let go: by `explain` and `detect_platform`, and where functions of callers no longer exist."""

import collections
import gc

import jax
import jax.numpy as jnp
import pytest

import glax

pytestmark = pytest.mark.fast
X, STATE = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 32, 1, 8), (1, 1, 8, 8)))


def step(x, state):
    return glax.recurrent_step(x[:, 0], x[:, 0], x[:, 0], state)


CALLS = dict(
    explain=lambda: glax.explain(glax.recurrent, X, X, X),
    step=lambda: glax.explain(step, X, STATE),
    segments=lambda: glax.explain(lambda x: glax.recurrent(x, x, x, segment_ids=jnp.zeros((1, 32), int)), X),
    detect_platform=glax.detect_platform,
    traced_again=lambda: jax.jit(lambda x: glax.recurrent(x, x, x, gk=x).output).trace(X),
)


def stored() -> collections.Counter:
    """Return how many traces, and calls of kernels in them, exist."""
    gc.collect()
    names = (type(x).__name__ for x in gc.get_objects())
    return collections.Counter(name for name in names if name in ("Jaxpr", "ClosedJaxpr", "Call", "JaxprEqn"))


@pytest.mark.parametrize("call", CALLS)
def test_no_trace_stays(call):
    for _ in range(2):
        CALLS[call]()
    before = stored()
    for _ in range(5):
        CALLS[call]()
    assert stored() - before == collections.Counter()


@pytest.mark.parametrize("ends", [False, True])
def test_a_jitted_function_of_the_caller_lets_its_traces_go(ends):
    """With the function, or by clear_cache. Until then JAX keeps them: explain traces a jitted function anew each time."""
    f = jax.jit(lambda x: glax.recurrent(x, x, x, gk=x).output)
    glax.explain(f, X)
    f.clear_cache()
    before = stored()
    for _ in range(3):
        glax.explain(f, X)
    if ends:
        del f
    else:
        f.clear_cache()
    assert stored() - before == collections.Counter()


def test_explain_lists_the_same_each_time():
    """Also through a function that jit has traced before, which is traced again."""
    f = jax.jit(lambda x: glax.recurrent(x, x, x, gk=x).output)
    jax.eval_shape(f, X)
    lists = [[decision.kernel for decision in glax.explain(jax.grad(lambda x: f(x).sum()), X)] for _ in range(3)]
    assert lists[0] == lists[1] == lists[2] and len(lists[0]) == 2

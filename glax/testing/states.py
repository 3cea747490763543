"""Measure the error of decoding with states stored in each dtype, as `glax check --states` prints it."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.serving.decode_step import recurrent_step

STEPS = 4096
DECAYS = (0.9, 0.99, 0.999, 0.99992)
STORED = (("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False), ("float16", True))
B, WIDTH = 2, 16
SPARSITY = 1 / 512  # the share of nonzero keys; between two of them a row of the state only decays


@dataclasses.dataclass(frozen=True)
class StateError:
    """Hold the relative RMS error of the final states after `steps` tokens. `stochastic` says whether the states were rounded
    stochastically."""

    dtype: str
    stochastic: bool
    decay: float
    steps: int
    error: float


def state_errors(steps: int = STEPS) -> Iterator[StateError]:
    """Return the error of decoding in each dtype of storage, on random tokens with sparse keys and one head for each of DECAYS.

    The states are compared with the closed form in float64:   S = d^steps S_0 + sum_t d^(steps - 1 - t) k_t v_t^T
    """
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, steps, B, len(DECAYS), WIDTH)).astype(np.float32)
    k *= (
        rng.random(k.shape) < SPARSITY
    )  # dense keys would hide what is lost: their noise rounds small decays up and down alike
    first = rng.normal(size=(B, len(DECAYS), WIDTH, WIDTH)).astype(np.float16)  # exact in float16
    logs = np.log(np.asarray(DECAYS)).astype(np.float32)
    for dtype, stochastic in STORED:
        start = jnp.asarray(first, jnp.float32).astype(dtype)
        want = closed_form(np.asarray(start.astype(jnp.float32), np.float64), k, v, logs.astype(np.float64))
        final = np.asarray(decoded(stochastic, start, k, v, logs).astype(jnp.float32), np.float64)
        for head, decay in enumerate(DECAYS):
            error = np.linalg.norm(final[:, head] - want[:, head]) / np.linalg.norm(want[:, head])
            yield StateError(dtype, stochastic, decay, steps, float(error))


@functools.partial(jax.jit, static_argnums=0)
def decoded(stochastic: bool, state, k, v, logs):
    def step(state, token):
        k, v, i = token
        key = jax.random.fold_in(jax.random.key(0), i) if stochastic else None
        return recurrent_step(k, k, v, state, g_gamma=logs, rounding_key=key)[1], None

    return jax.lax.scan(step, state, (k, v, jnp.arange(len(k))))[0]


def closed_form(first: np.ndarray, k: np.ndarray, v: np.ndarray, logs: np.ndarray) -> np.ndarray:
    behind = np.exp(np.arange(len(k))[::-1, None] * logs)[:, None, :, None]
    added = np.einsum("tbhk,tbhv->bhkv", k * behind, v.astype(np.float64), optimize=True)
    return np.exp(len(k) * logs)[:, None, None] * first + added

"""Measure the error of decoding with states stored in each dtype, as `glax check --states` prints it."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.stored_states import COMPACT, CompactStates
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.replayed_pool import StatePool

STEPS, LONG = 4096, 65536
DECAYS = (0.9, 0.99, 0.999, 0.99992)
STORED = (
    ("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False), ("float16", True), ("int8", False),
    ("float8_e4m3fn", False),
)  # fmt: skip
REPLAY = 8  # the tokens between two writes of a state in 8 bits
B, WIDTH = 2, 16
SPARSITY = 1 / 512  # the share of nonzero keys; between two of them a row of the state only decays


@dataclasses.dataclass(frozen=True)
class StateError:
    """Hold the relative RMS error of the states after `steps` tokens, as outputs read them. `stochastic` says whether the states
    were rounded stochastically."""

    dtype: str
    stochastic: bool
    decay: float
    steps: int
    error: float


def state_errors(steps: tuple[int, ...] = (STEPS,)) -> Iterator[StateError]:
    """Yield the error of decoding in each dtype of storage, on random tokens with sparse keys and one head for each of DECAYS.

    steps: the numbers of tokens after which errors are yielded, in rising order. States in 8 bits are those of a `StatePool`,
    which carries what a write loses into the next.

    The states are compared with the closed form in float64: S = d^steps S_0 + sum_t d^(steps - 1 - t) k_t v_t^T
    """
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, steps[-1], B, len(DECAYS), WIDTH)).astype(np.float32)
    k *= (
        rng.random(k.shape) < SPARSITY
    )  # dense keys would hide what is lost: their noise rounds small decays up and down alike
    first = rng.normal(size=(B, len(DECAYS), WIDTH, WIDTH)).astype(np.float16)  # exact in float16
    logs = np.log(np.asarray(DECAYS)).astype(np.float32)
    for dtype, stochastic in STORED:
        state = started(dtype, first)
        want = np.asarray(read(state), np.float64)
        for low, high in itertools.pairwise((0, *steps)):
            want = closed_form(want, k[low:high], v[low:high], logs.astype(np.float64))
            state = decoded(stochastic, state, k[low:high], v[low:high], logs, low)
            got = np.asarray(read(state), np.float64)
            for head, decay in enumerate(DECAYS):
                error = np.linalg.norm(got[:, head] - want[:, head]) / np.linalg.norm(want[:, head])
                yield StateError(dtype, stochastic, decay, high, float(error))


def started(dtype: str, first: np.ndarray) -> jax.Array | StatePool:
    """Return the first states in `dtype`; in a `StatePool` if that has 8 bits."""
    if dtype not in COMPACT:
        return jnp.asarray(first, jnp.float32).astype(dtype)
    pool = StatePool(B, len(DECAYS), WIDTH, dtype, replay=REPLAY, form="constant")
    return pool.replace(states=CompactStates.of(jnp.asarray(first, jnp.float32), dtype))


def read(state: jax.Array | StatePool) -> jax.Array:
    """Return the states that outputs are formed from, in float32. The states of a pool in 8 bits are read without their
    rests."""
    if not isinstance(state, StatePool):
        return state.astype(jnp.float32)
    return state.replace(states=state.states_to_read(jnp.arange(B), jnp.float32)).states_of()


@functools.partial(jax.jit, static_argnums=0)
def decoded(stochastic: bool, state, k, v, logs, done):
    """Return the state after the tokens k, v [T, B, H, width], read one by one.

    logs: the log decay of each head. done: the number of tokens read before, which chooses the keys of stochastic rounding.
    """

    def step(state, token):
        k, v, i = token
        if isinstance(state, StatePool):
            return state.step(k, k, v, g_gamma=logs)[1], None
        key = jax.random.fold_in(jax.random.key(0), i) if stochastic else None
        return recurrent_step(k, k, v, state, g_gamma=logs, rounding_key=key)[1], None

    return jax.lax.scan(step, state, (k, v, done + jnp.arange(len(k))))[0]


def closed_form(first: np.ndarray, k: np.ndarray, v: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return the state after these tokens by the formula of `state_errors`, in float64. first: the state before them."""
    behind = np.exp(np.arange(len(k))[::-1, None] * logs)[:, None, :, None]
    added = np.einsum("tbhk,tbhv->bhkv", k * behind, v.astype(np.float64), optimize=True)
    return np.exp(len(k) * logs)[:, None, None] * first + added

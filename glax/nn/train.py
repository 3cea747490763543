"""Train a ByteLM."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, UInt8

from glax.nn.model import ByteLM
from glax.nn.text import random_windows


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Configure AdamW with a linear warmup and a cosine decay to a tenth. Gradients are clipped by their global norm."""

    steps: int
    batch: int
    length: int
    learning_rate: float = 4e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0

    def optimizer(self) -> optax.GradientTransformation:
        peak = self.learning_rate
        warmup = max(1, round(self.warmup * self.steps))
        steps = max(self.steps, warmup + 1)
        schedule = optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, end_value=peak / 10)
        adamw = optax.adamw(schedule, b2=0.99, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


class NotFiniteLoss(ArithmeticError):
    """A loss or a parameter is not finite."""


def matrices(params):
    """Return which parameters have weight decay: all but biases and the scales of norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def bits(model: ByteLM, windows: UInt8[Array, "B T+1"]) -> Float[Array, "B"]:
    """Return the mean of -log2 p(byte | the bytes before it in the window) over all bytes of each window but the first."""
    return next_byte_bits(model, windows[:, :-1], windows[:, 1:])


def next_byte_bits(model: ByteLM, read: UInt8[Array, "B T"], following: UInt8[Array, "B T"]) -> Float[Array, "B"]:
    logits = model(read.astype(jnp.int32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, following.astype(jnp.int32)).mean(1) / jnp.log(2.0)


def held_out_bits(model: ByteLM, windows: UInt8[np.ndarray, "windows T+1"], batch: int = 16) -> float:
    """Return the mean of `bits` over all windows. It compiles once for any number of windows."""
    filled = np.concatenate([windows, np.repeat(windows[:1], -len(windows) % batch, axis=0)])
    each = [jitted_bits(model, jnp.asarray(part)) for part in filled.reshape(-1, batch, windows.shape[1])]
    return float(np.concatenate(each)[: len(windows)].mean())


jitted_bits = nnx.jit(bits)


def train(
    model: ByteLM,
    text: UInt8[np.ndarray, "bytes"],
    recipe: Recipe,
    seed: int,
    each_step: Callable[[int, float, ByteLM], bool],
) -> ByteLM:
    """Return the model after all steps on random windows, or as soon as each_step(steps done, bits per byte, model) is true.

    Raises NotFiniteLoss at the first step whose loss is not finite. The next step overwrites the model that was passed in, and
    each model that was passed to each_step.
    """
    optimizer = recipe.optimizer()
    graph, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, moments, windows):
        loss, gradient = jax.value_and_grad(lambda params: bits(nnx.merge(graph, params), windows).mean())(params)
        change, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, change), moments, loss

    moments, rng = jax.jit(optimizer.init)(params), np.random.default_rng(seed)
    for step in range(1, recipe.steps + 1):
        windows = random_windows(text, recipe.batch, recipe.length, rng)
        params, moments, loss = update(params, moments, windows)
        if not math.isfinite(loss):
            raise NotFiniteLoss(
                f"the loss of step {step} is {float(loss)}: lower recipe.learning_rate, which is "
                f"{recipe.learning_rate}, or take another seed"
            )
        if each_step(step, float(loss), nnx.merge(graph, params)):
            break
    return nnx.merge(graph, params)

"""Text from a ByteLM, token by token, with a state of constant size."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from glax.nn.model import ByteLM


@nnx.jit(static_argnames=("length", "temperature"))
def generate(
    model: ByteLM, prompt: Int[Array, "B P"], key: Key[Array, ""], length: int, temperature: float = 0.8
) -> Int[Array, "B length"]:
    """`length` bytes that go on from the prompt. The prompt is read in one parallel pass, the rest one at a time.

    Each byte is drawn from softmax(logits / temperature).
    """

    def one(carry, key):
        logits, states = carry
        token = jax.random.categorical(key, logits / temperature)
        return model.step(token, states), token

    logits, states = model.extend(prompt, model.initial_states(prompt.shape[0]))
    _, tokens = jax.lax.scan(one, (logits[:, -1], states), jax.random.split(key, length))
    return tokens.T


@nnx.jit
def token_by_token(model: ByteLM, tokens: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
    """What model(tokens) is, by T steps."""

    def one(states, token):
        logits, states = model.step(token, states)
        return states, logits

    _, logits = jax.lax.scan(one, model.initial_states(tokens.shape[0]), tokens.T)
    return logits.swapaxes(0, 1)

"""Generate text with a ByteLM, token by token, with a state of constant size."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from glax._src.core.bind import check_memory, check_real, is_array, known_integer, known_number
from glax.nn.model import BYTES, ByteLM, checked_tokens


def generate(
    model: ByteLM,
    prompt: Int[Array, "B P"],
    key: Key[Array, ""],
    length: int,
    temperature: float | Float[Array, ""] = 0.8,
) -> Int[Array, "B length"]:
    """Return `length` bytes that continue the prompt, [B, length]. The prompt is read in one parallel pass, the rest byte by
    byte.

    Each byte is drawn from softmax(logits / temperature). A temperature of 0 takes the likeliest byte. temperature may be
    traced.

    Raises TypeError or ValueError if prompt is not [B, P] of bytes with P of at least 1, key is no key, length is negative, or
    a known temperature is negative or not finite.
    """
    prompt = checked_prompt(prompt)
    check_key(key)
    if (length := known_integer("length", length)) < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    check_real("temperature", temperature)
    known = known_number(temperature)
    if known is not None and known < 0:
        raise ValueError(f"temperature must be at least 0, got {known}")
    return sample(model, prompt, key, length, jnp.asarray(temperature, jnp.float32))


@nnx.jit(static_argnames="length")
def sample(model: ByteLM, prompt, base, length: int, temperature) -> Int[Array, "B length"]:
    def one(carry, _):
        logits, states, number = carry
        key = jax.random.fold_in(base, number)  # one of jax.random.split's, without an array of all keys
        # The largest of logits / temperature + noise is drawn from their softmax. Without the division 0 needs no exception.
        noise = jax.random.gumbel(key, logits.shape, logits.dtype)
        token = jnp.argmax(logits + temperature.astype(logits.dtype) * noise, -1)
        return (*model.step(token, states), number + 1), token

    logits, states = model.extend(prompt, model.initial_states(prompt.shape[0]))
    _, tokens = jax.lax.scan(one, (logits[:, -1], states, 0), length=length)
    return tokens.T


def checked_prompt(prompt) -> Int[Array, "B P"]:
    prompt = checked_tokens("prompt", prompt, "[B, P]", BYTES, "hold bytes,")
    if prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, P] with P of at least 1, got shape {prompt.shape}")
    return prompt


def check_key(key):
    if isinstance(key, np.ndarray):
        check_memory("key", key)
    typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = is_array(key) and key.dtype == jnp.uint32
    if not (typed and key.ndim == 0) and not (raw and key.ndim == 1):
        got = f"{key.dtype} of shape {key.shape}" if is_array(key) else repr(key)
        raise TypeError(f"key must be one key of jax.random, such as jax.random.key(0), got {got}")


@nnx.jit
def token_by_token(model: ByteLM, tokens: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
    """Return model(tokens), computed by T steps."""
    tokens = checked_tokens("tokens", tokens, "[B, T]", BYTES, "hold bytes,")

    def one(states, token):
        logits, states = model.step(token, states)
        return states, logits

    _, logits = jax.lax.scan(one, model.initial_states(tokens.shape[0]), tokens.T)
    return logits.swapaxes(0, 1)

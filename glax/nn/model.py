"""Define a language model over bytes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glax._src.api.recurrent import recurrent_gla
from glax._src.core.bind import check_integers, known_values
from glax._src.core.recurrence import to_int32
from glax.nn.automatic import automatic, like, rows_of
from glax.nn.gla import GatedLinearAttention
from glax.nn.layer import parallel_rows
from glax.nn.mlp import SwiGLU
from glax.nn.parts import check_sizes

BYTES = 256


@dataclasses.dataclass(frozen=True)
class ByteLMConfig:
    """Configure a ByteLM. width: the width of the residual stream. mlp_width: the inner width of the gated MLP.

    For the other fields see GatedLinearAttention.
    """

    width: int = 128
    layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 4
    key_width: int = 32
    value_width: int = 32
    gate_rank: int = 16
    temperature: float = 4.0
    mlp_width: int = 256

    def __post_init__(self):
        check_sizes(**{name: size for name, size in vars(self).items() if name != "temperature"})


States = tuple[Array | dict[str, Array], ...]  # one state for each block


lecun = nnx.initializers.lecun_normal()


def spread_bias(key_width: int, key, shape: tuple[int], dtype) -> Float[Array, "keys"]:
    """Return biases from -4 to 4 over the channels of each head. Some channels then forget within a token or two, and some
    remember hundreds."""
    return jnp.tile(jnp.linspace(-4.0, 4.0, key_width, dtype=dtype), shape[0] // key_width)


class Block(nnx.Module):
    """Compute x + GLA(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ByteLMConfig, *, recurrence: Callable = recurrent_gla, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = GatedLinearAttention(
            config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            key_width=config.key_width,
            value_width=config.value_width,
            gate_rank=config.gate_rank,
            temperature=config.temperature,
            kernel_init=lecun,
            gate_bias_init=functools.partial(spread_bias, config.key_width),
            recurrence=recurrence,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = SwiGLU(config.width, config.mlp_width, kernel_init=lecun, rngs=rngs)

    def through(self, attend: Callable, x: Float[Array, "*rows width"], state) -> tuple[Array, Any]:
        """Return the block's output and new state. attend: (attention, x, state) -> (y, new state)."""
        y, state = attend(self.attention, self.attention_norm(x), state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


class ByteLM(nnx.Module):
    """Map bytes to logits of the next byte by an embedding, pre-norm blocks, a norm and a head."""

    def __init__(self, config: ByteLMConfig, *, recurrence: Callable = recurrent_gla, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(BYTES, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, recurrence=recurrence, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, BYTES, use_bias=False, rngs=rngs)

    @automatic(rows_of("tokens"))
    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None, pad_id: int | None = None
    ) -> Float[Array, "B T 256"]:
        """Return the logits of the byte behind each token, [B, T, 256]. Every sequence is read from its beginning, in one
        parallel pass.

        segment_ids and pad_id are as in `glax.recurrent`. Every segment is then read from its own beginning.
        """
        tokens = checked_tokens("tokens", tokens, "[B, T]", BYTES, "hold bytes,")
        return self.extend(tokens, self.initial_states(tokens.shape[0]), segment_ids, pad_id)[0]

    @automatic(rows_of("tokens"), like("states"))
    def extend(
        self,
        tokens: Int[Array, "B T"],
        states: States,
        segment_ids: Int[Array, "B T"] | None = None,
        pad_id: int | None = None,
    ) -> tuple[Float[Array, "B T 256"], States]:
        """Continue from `states` in one parallel pass. Return the logits, and the states behind the last token."""
        tokens = checked_tokens("tokens", tokens, "[B, T]", BYTES, "hold bytes,")

        def attend(attention, x, state):
            return attention(x, state, segment_ids=segment_ids, pad_id=pad_id)

        rows = parallel_rows(tokens.shape, None, segment_ids, pad_id)
        return self.through(attend, rows.without_padding(self.embed(tokens)), states)

    @automatic(rows_of("tokens"), like("pools"))
    def prefill_into(
        self,
        tokens: Int[Array, "T"],
        pools: States,
        slots: Int[Array, "N"],
        cu_seqlens: Int[Array, "N+1"],
        fresh: Bool[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T 256"], States]:
        """Read packed prompts from the states in pools [P, H, K, V], one pool per block, and write the new states into the
        pools."""
        tokens = checked_tokens("tokens", tokens, "[T]", BYTES, "hold bytes,")

        def attend(attention, x, pool):
            return attention.prefill_into(x, pool, slots, cu_seqlens, fresh)

        rows = parallel_rows(tokens.shape, cu_seqlens)
        return self.through(attend, rows.without_padding(self.embed(tokens)), pools)

    prefill = prefill_into  # the name that the models of `glax.models` have for it

    @automatic(rows_of("tokens"), like("states"))
    def step(
        self, tokens: Int[Array, "B"], states: States, slots: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B 256"], States]:
        """Read one token of each sequence, in time and memory that do not depend on the tokens before.

        With slots, `states` are pools. A slot of -1 is no sequence, and its logits have no meaning.
        """
        tokens = checked_tokens("tokens", tokens, "[B]", BYTES, "hold bytes,")
        return self.through(lambda attention, x, state: attention.step(x, state, slots), self.embed(tokens), states)

    def initial_states(self, batch: int, max_length: int | None = None) -> States:
        """Return the empty states of `batch` sequences. Their size does not depend on the length, so max_length has no effect."""
        return tuple(block.attention.initial_state(batch) for block in self.blocks)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
        return embedded(self.embedding.embedding[...], tokens)

    def through(self, attend: Callable, x: Float[Array, "*rows width"], states: States) -> tuple[Array, States]:
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.through(attend, x, state)
            after.append(state)
        return self.head(self.norm(x)), tuple(after)


def checked_tokens(name: str, tokens, form: str, vocabulary: int, must: str = "be") -> Int[Array, "*rows"]:
    """Return tokens as int32. Raise TypeError or ValueError unless they are integers of the shape `form`, such as "[B, T]", and
    from 0 to vocabulary - 1 where their values are known."""
    check_integers(name, tokens)
    if tokens.ndim != len(form.split(",")):
        raise ValueError(f"{name} must be {form}, got shape {tokens.shape}")
    known = known_values(tokens)
    if known is not None and (wrong := known[(known < 0) | (known >= vocabulary)]).size:
        raise ValueError(f"{name} must {must} from 0 to {vocabulary - 1}, got {wrong[0]}")
    return to_int32(tokens)


def embedded(table: Float[Array, "vocabulary width"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
    """Return the rows of the tokens. A token outside of the vocabulary has a row of NaN; -1 is not the last token."""
    return jnp.take(table, jnp.where(tokens < 0, table.shape[0], tokens), axis=0, mode="fill")

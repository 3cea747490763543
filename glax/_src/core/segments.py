"""Divide rows into segments: runs of adjacent tokens with one id, each with a state of its own."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.decay import PARTS, Decay


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Hold where the segments of each row begin in scan order, and which tokens are padding.

    resets: [B, T], true for tokens that start from a state of zeros. The first segment of a row has none, because it continues
    the initial state. is_token: [B, T], false for padding, which a scan passes without changing the state; None if no token is
    padding.
    """

    resets: Bool[Array, "B T"]
    is_token: Bool[Array, "B T"] | None

    @classmethod
    def from_ids(cls, ids: Int[Array, "B T"], pad_id: int | None, reverse: bool) -> "Segments":
        """Return the segments of rows with these ids. A token of id pad_id is padding; None for no padding.

        A token that is not padding resets the state if its predecessor in the scan has another id or is padding. The first such
        token of a row resets nothing. reverse: whether the scan goes from the last token to the first.
        """
        ids = whole_rows(ids)
        differs, edge = ids[:, 1:] != ids[:, :-1], jnp.zeros_like(ids[:, :1], bool)
        resets = jnp.concatenate([differs, edge] if reverse else [edge, differs], axis=1)
        is_token, row = differs_from_padding(ids, pad_id), jnp.arange(ids.shape[1])[None]
        if is_token is None:
            return cls(resets, None)
        # The first token behind leading padding continues the initial state.
        if reverse:
            follows = row < ids.shape[1] - 1 - jnp.argmax(is_token[:, ::-1], axis=1)[:, None]
        else:
            follows = row > jnp.argmax(is_token, axis=1)[:, None]
        return cls(resets & is_token & follows, is_token)

    @property
    def of_one_run(self) -> "Segments":
        """Return segments of the same shapes in which each row is one segment without padding, for measurements by the
        tuner."""
        is_token = None if self.is_token is None else jnp.ones(self.is_token.shape, bool)
        return Segments(jnp.zeros(self.resets.shape, bool), is_token)

    def masked(self, x: Float[Array, "B T *rest"]) -> Float[Array, "B T *rest"]:
        """Return x with zeros at padding. The gradient of x at padding is 0, even where x is NaN."""
        return x if self.is_token is None else jnp.where(expanded(self.is_token, x.ndim), x, 0)

    def folded(self, decay: Decay, to_tokens: Callable, shape: tuple[int, int, int], dtype) -> Decay:
        """Return `decay` with resets and padding expressed by its gates: a gate of -inf at resets, and of 0 at padding.

        Where the decay has per-head or per-key gates, only these become -inf; its per-value gates are 0 there. The changed
        gates have a gradient of 0. A decay without gates gets per-head gates in `dtype`. to_tokens: a function that repeats the
        row of each sequence, [N, H], for its tokens, [B, T, H]. shape: (B, T, H).
        """
        decay = decay.with_tokens(to_tokens)
        if decay.form == "none":
            decay = Decay(head=jnp.zeros(shape, dtype))
        parts = {name: vars(decay)[name] for name in reversed(PARTS) if vars(decay)[name] is not None}
        # -inf on the rows of the state is enough: gates on its columns then need no restart.
        restarting = parts.keys() & {"head", "key"} or parts.keys()

        def gate(name: str, x: Array) -> Array:
            at_reset = -jnp.inf if name in restarting else 0
            return jnp.where(expanded(self.resets, x.ndim), at_reset, self.masked(x))

        return dataclasses.replace(decay, **{name: gate(name, x) for name, x in parts.items()})


def differs_from_padding(ids: Int[Array, "B T"], pad_id: int | None) -> Bool[Array, "B T"] | None:
    """Return a mask of the ids that are not pad_id. Return None if no id can be pad_id, so that there is no padding.

    A pad_id that the dtype of the ids cannot hold is equal to no id. A conversion to that dtype could make it equal to one.
    """
    limits = jnp.iinfo(ids.dtype)
    if pad_id is None or not limits.min <= pad_id <= limits.max:
        return None
    return ids != jnp.asarray(int(pad_id), ids.dtype)


def expanded(mask: Bool[Array, "B T"], rank: int) -> Bool[Array, "B T *ones"]:
    """Return the mask with axes of size 1 appended, so that it has `rank` axes."""
    return jnp.expand_dims(mask, range(2, rank))


def whole_rows(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return ids such that the axis of T is not sharded. Neighbouring ids are compared, so a row must lie on one device."""
    sharding = jax.typeof(ids).sharding
    if sharding.mesh.empty or sharding.spec[1] is None:
        return ids
    return jax.sharding.reshard(
        ids, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(sharding.spec[0]))
    )

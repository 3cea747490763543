"""Compute the recurrence in native code: forward, gradient of every input, and one decoding step."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glax._src.core.decay import ROW_FORMS, Decay
from glax._src.core.recurrence import Outputs, Recurrence, gradient_recurrence, is_symbol
from glax._src.core.registry import Backend, Config, Platform, check_field, kernel_registry
from glax._src.core.ring import RingedStates
from glax._src.core.stored_states import COMPACT
from glax._src.kernels.common.foreign import NONE, call
from glax._src.kernels.cpu import delta, replay
from glax._src.kernels.cpu.library import missing
from glax._src.kernels.cpu.operands import STORED, marks_of, operands_of

MAX_TOKENS = 64  # of a sequence in a pool; `Step::most_tokens` in native/problem.h
MAX_BLOCK = 4096  # tokens: 9 MB of scratch in each thread at K = V = 128
GROUP = 32  # columns of a partial sum; `group` in native/problem.h
SUMMED = 8  # heads of one query, key or value whose gradients the library sums, at least


@dataclasses.dataclass(frozen=True)
class NativeConfig(Config):
    """Configure the native kernels.

    block: the largest number of tokens between two rescalings of the state, from 1 to 4096. Scratch memory grows with the
    block, and the number of operations does not.

    Raises ValueError for any other block.

    >>> glax.configs.NativeConfig(block=16)
    NativeConfig(block=16)
    """

    block: int = 24

    def __post_init__(self):
        check_field("block", self.block, 1, MAX_BLOCK)

    @classmethod
    def candidates(cls, r: Recurrence) -> list[Self]:
        return [cls(block) for block in (12, 24, 48)]


def takes(r: Recurrence) -> str | None:
    """Return why no native kernel can run r, because of the dtypes of q, k and v or because the library is missing; None if one
    can."""
    for name in ("q", "k", "v"):
        if (dtype := getattr(r, name).dtype) not in STORED:
            return f"takes float32, bfloat16 and float16, {name} is {dtype}"
    return missing()


def register(algorithm: str, **traits):
    """Return the decorator that registers a native kernel of this algorithm. traits: further arguments of
    `kernel_registry.register`.

    The priority is above every XLA kernel's, because native kernels were faster at every shape measured
    (docs/internals/experiments/cpu.md).
    """
    traits = dict(supports=takes, erases=True, priority=lambda r: 4) | traits
    return kernel_registry.register(algorithm, Platform.CPP, Backend.CPU, **traits)


WHOLE: dict = dict(config=NativeConfig, erasing_forms=ROW_FORMS, takes_segments=lambda r: True)  # of whole sequences


@register("recurrent", **WHOLE)
def recurrent(r: Recurrence, *, config: NativeConfig) -> Outputs:
    """Compute the outputs and final states in blocks of tokens, within which the state is not rescaled.

    native/scan.h has the formulas. A recurrence with an erasure has other blocks; see `delta`.
    """
    if r.erasure is not None:
        return delta.forward(r)
    results = [output_of(r), jax.ShapeDtypeStruct(r.state_shape, jnp.float32)]
    operands = [*operands_of(r), *marks_of(r)]
    return Outputs(*call("glax_forward", operands, results, reverse=r.reverse, block=config.block))


@register("recurrent.vjp", **WHOLE)
def recurrent_vjp(
    r: Recurrence, d_output: Float[Array, "B T H V"], d_final: Float[Array, "N H K V"], *, config: NativeConfig
) -> Recurrence:
    """Compute the gradient in every input by three scans, or four with per-value gates; native/gradient.h has the formulas."""
    if r.erasure is not None:
        return delta.gradient(r, d_output, d_final)
    (B, T), (N, H, K, V), decay = r.q.shape[:2], r.state_shape, r.decay
    groups = -(-K // GROUP)

    def each(x: Array):
        # Where heads share a row, the library sums some in float32 in one thread, and gradient_recurrence the rest.
        heads, dtype = (H, x.dtype) if x.shape[2] == H else (H // heads_summed(H // x.shape[2]), jnp.float32)
        return jax.ShapeDtypeStruct((B, T, heads, x.shape[3]), dtype)

    def if_any(shape, *arrays):
        return NONE if all(x is None for x in arrays) else jax.ShapeDtypeStruct(shape, jnp.float32)

    results = [
        each(r.q),
        each(r.k),
        each(r.v),
        if_any((groups, B, T, H), decay.head, decay.constant),
        if_any((B, T, H, K), decay.key),
        if_any((B, T, H, V), decay.value),
        if_any((groups, N, H), decay.constant),
        if_any((N, H, K, V), r.initial_state),
        jax.ShapeDtypeStruct((groups, N, H), jnp.float32),
    ]
    operands = [*operands_of(r), d_output, d_final.astype(jnp.float32), *marks_of(r)]
    attributes = dict(reverse=r.reverse, block=config.block)
    dq, dk, dv, d_head, d_key, d_value, d_constant, d_initial, d_scale = call(
        "glax_gradient", operands, results, **attributes
    )
    d_decay = Decay(
        constant=None if decay.constant is None else d_constant.sum(0),
        head=None if decay.head is None else d_head.sum(0),
        key=None if decay.key is None else d_key,
        value=None if decay.value is None else d_value,
    )
    return gradient_recurrence(r, dq, dk, dv, d_decay, d_initial, d_scale.sum((0, 2)))


def heads_summed(sharing: int) -> int:
    """Return the number of heads whose shared gradient one task sums: the smallest divisor of `sharing` that is at least SUMMED
    and less than `sharing`, or else `sharing`. Many small sums give many tasks. sharing: the number of heads that share one
    query, key or value."""
    return next((n for n in range(SUMMED, sharing) if sharing % n == 0), sharing)


def step_supports(r: Recurrence) -> str | None:
    """Return why native code does not support a step of r, whose states lie in a pool, or None."""
    if r.initial_state is not None and r.initial_state.dtype not in STORED:
        return f"stores states as float32, bfloat16 and float16, the pool is {r.initial_state.dtype}"
    if r.boundaries is not None:
        return "takes the same number of tokens of each sequence, got cu_seqlens"
    if r.q.shape[1] == 1:
        return takes(r)
    if r.erasure is not None:
        return f"takes one token of each sequence under the delta rule, got T={r.q.shape[1]}"
    return tokens_supports(r)


def tokens_supports(r: Recurrence) -> str | None:
    """Return why native code does not run T tokens of each sequence, 1 to MAX_TOKENS, whose states lie in a pool; None if it
    does."""
    if is_symbol(T := r.q.shape[1]) or not 0 < T <= MAX_TOKENS:
        return f"takes from 1 to {MAX_TOKENS} tokens of each sequence, got T={T}"
    if r.boundaries is not None or r.segments is not None or r.reverse:
        return "takes tokens in order, got cu_seqlens, segment_ids or reverse"
    if r.initial_state is not None and r.initial_state.dtype not in STORED:
        return f"reads states in float32, bfloat16 and float16, the pool is {r.initial_state.dtype}"
    return takes(r) or missing("glax_tokens")


@register("recurrent.step", supports=step_supports)
def recurrent_step(
    r: Recurrence, pool: Float[Array, "P H K V"], slots: Int[Array, "B"], *, config: Config
) -> tuple[Float[Array, "B T H V"], Float[Array, "P H K V"]]:
    """Advance each sequence by its T tokens, in place in the pool. Each state is read once and written once. slots: the row of
    the pool of each sequence, -1 for none.

    The delta rule takes one token, and reads a state twice, because what a token writes depends on the whole state before it.
    """
    if r.erasure is not None:
        return delta.step(r, pool, slots)
    *arrays, _, _, scale = operands_of(r)
    results = [output_of(r), jax.ShapeDtypeStruct(pool.shape, pool.dtype)]
    options: dict = dict(input_output_aliases={len(arrays): 1})
    target = "glax_step"
    if r.q.shape[1] != 1:
        target, options = "glax_tokens", options | dict(writes=True)
    output, pool = call(target, [*arrays, pool, slots, scale], results, **options)
    return output, pool


@register("recurrent.verify", supports=tokens_supports, erases=False)
def recurrent_verify(
    r: Recurrence, pool: Float[Array, "P H K V"], slots: Int[Array, "B"], *, config: Config
) -> Float[Array, "B T H V"]:
    """Compute the outputs of each sequence's T tokens. The sequence's state in the pool is read once for all of them, and does
    not change. slots: the row of the pool of each sequence, -1 for none.

    native/tokens.h has the formulas. A token whose query is 0 has an output of 0, and costs no read of the state.
    """
    *arrays, _, _, scale = operands_of(r)
    (output,) = call("glax_tokens", [*arrays, pool, slots, scale], [output_of(r)], writes=False)
    return output


def replay_supports(r: Recurrence) -> str | None:
    """Return why native code does not support one token of each sequence whose states have replay rings, or None."""
    if (T := r.q.shape[1]) != 1:
        return f"takes one token of each sequence, got T={T}"
    if r.boundaries is not None or r.segments is not None:
        return "takes one token of each sequence, got cu_seqlens or segment_ids"
    stored = None if r.initial_state is None else r.initial_state.dtype
    if stored is not None and stored not in STORED and str(stored) not in COMPACT:
        return f"stores states as float32, bfloat16, float16, {' and '.join(COMPACT)}, the pool is {stored}"
    return takes(r) or missing("glax_replay")


@register("recurrent.replay", supports=replay_supports, erases_before_decay=True, erases_along=True)
def recurrent_replay(
    r: Recurrence, pool: RingedStates, slots: Int[Array, "B"] | None, *, config: Config
) -> tuple[Float[Array, "B H V"], RingedStates]:
    """Advance each sequence by one token. Its state and its replay ring are read once, and the state is written at every
    `replay`-th token. slots: the row of the pool of each sequence; None if sequence b has row b."""
    return replay.recurrent_replay(r, pool, slots)


def output_of(r: Recurrence) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the outputs."""
    return jax.ShapeDtypeStruct((*r.q.shape[:2], r.num_heads, r.v.shape[3]), r.q.dtype)

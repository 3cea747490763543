"""Register kernels for NVIDIA GPUs from compute capability 8.0 on, in Triton, through jax-triton.

Importing this module imports neither package. The first call that runs here imports both.
"""

from glax._src.core.decay import ROW_FORMS
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, Platform, TwoPhase, kernel_registry
from glax._src.kernels.triton.config import GradientConfig, TokenConfig, TritonChunkedConfig, TritonReplayConfig
from glax._src.kernels.triton.support import (
    chunked_priority,
    chunked_refusal,
    refusal,
    replay_priority,
    replay_refusal,
    step_refusal,
    token_priority,
)

__all__ = ["GradientConfig", "TokenConfig", "TritonChunkedConfig", "TritonReplayConfig"]


def forward_two_phase(r: Recurrence, config: TritonChunkedConfig) -> TwoPhase | None:
    """Return the two phases of the forward if sequences are cut into segments, whose local states are computed first; else
    None."""
    if r.erasure is not None or not config.segment:
        return None
    from glax._src.kernels.triton import chunked as chunks

    return TwoPhase(chunks.local_states, chunks.finish)


def gradient_two_phase(r: Recurrence, config: GradientConfig) -> TwoPhase | None:
    """Return the two phases of the gradient if sequences are cut into segments, whose local states are computed first; else
    None."""
    if r.erasure is not None or not config.segment:
        return None
    from glax._src.kernels.triton import chunked as chunks

    return TwoPhase(chunks.local_states_vjp, chunks.finish_vjp)


@kernel_registry.register(
    "chunked",
    Platform.TRITON,
    Backend.GPU,
    config=TritonChunkedConfig,
    supports=chunked_refusal,
    priority=chunked_priority,
    two_phase=forward_two_phase,
    version=1,
    forms=ROW_FORMS,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    mixes_segments=lambda r: True,
)
def chunked(r: Recurrence, *, config: TritonChunkedConfig) -> Outputs:
    """Compute outputs and final states in chunks, in one pass over q, k, v and the gates, or with config.block from states at
    every chunk."""
    if r.erasure is not None:
        from glax._src.kernels.triton import delta

        return delta.forward(r, config)
    from glax._src.kernels.triton import chunked as chunks

    return chunks.chunked(r, config)


@kernel_registry.register(
    "chunked.vjp",
    Platform.TRITON,
    Backend.GPU,
    config=GradientConfig,
    supports=chunked_refusal,
    priority=chunked_priority,
    two_phase=gradient_two_phase,
    version=1,
    forms=ROW_FORMS,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
    mixes_segments=lambda r: True,
)
def chunked_vjp(r: Recurrence, d_output, d_final, *, config: GradientConfig) -> Recurrence:
    """Compute the gradient in every input from the states at both ends of each chunk."""
    if r.erasure is not None:
        from glax._src.kernels.triton import delta

        return delta.gradient(r, d_output, d_final, config)
    from glax._src.kernels.triton import chunked as chunks

    return chunks.chunked_vjp(r, d_output, d_final, config)


@kernel_registry.register(
    "recurrent",
    Platform.TRITON,
    Backend.GPU,
    config=TokenConfig,
    supports=refusal,
    priority=token_priority,
    erases=True,
    erases_before_decay=True,
    mixes_segments=lambda r: True,
)
def recurrent(r: Recurrence, *, config: TokenConfig) -> Outputs:
    """Compute the outputs and final states token by token, with exact decays: for short sequences, gates on the value side, and
    every erasure but `along`."""
    from glax._src.kernels.triton import recurrent as tokens

    return tokens.run_tokens(r, config)


@kernel_registry.register(
    "recurrent.step",
    Platform.TRITON,
    Backend.GPU,
    config=TokenConfig,
    supports=step_refusal,
    erases=True,
    erases_before_decay=True,
)
def recurrent_step(r: Recurrence, pool, slots, *, config: TokenConfig):
    """Return (outputs, pool) after one token of each sequence. pool: [P, H, K, V], in which each sequence's state is read and
    written once, in place. slots: the row of the pool of each sequence, -1 for none."""
    from glax._src.kernels.triton import recurrent as tokens

    return tokens.run_step(r, pool, slots, config)


@kernel_registry.register(
    "recurrent.replay",
    Platform.TRITON,
    Backend.GPU,
    config=TritonReplayConfig,
    supports=replay_refusal,
    priority=replay_priority,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
)
def recurrent_replay(r: Recurrence, pool, slots, *, config: TritonReplayConfig):
    """Return (outputs, pool) after one token of each sequence. The sequence's state in the pool and its replay ring are read
    once, and the state is written at every `replay`-th token. slots: the row of the pool of each sequence; None if sequence b
    has row b."""
    from glax._src.kernels.triton import replay

    return replay.recurrent_replay(r, pool, slots, config)

"""Register kernels in CUDA C++ for NVIDIA GPUs from compute capability 8.0 on. They need neither Triton nor CUDA's compiler
`nvcc`.

NVRTC comes with `jax[cuda12]` and `jax[cuda13]`. It compiles device/*.cu for the GPU in use at the first use. host/launch.cc,
built when glax is installed, launches the result.
"""

import functools
import math
from collections.abc import Iterable

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Backend, Platform, kernel_registry
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.common.refusals import XLA, empty, older_gpu, other_dtype, too_wide
from glax._src.kernels.cuda.config import COMPACT, STORED, WIDEST, CudaConfig, ReplayConfig
from glax._src.kernels.cuda.library import load_library
from glax._src.kernels.cuda.nvrtc import Compiler, load_compiler

__all__ = ["CudaConfig", "ReplayConfig"]

LARGE = 2**25  # bytes of states
# The most that were measured beside XLA: benchmarks/results/nvidia_h100/2026-11-27-platforms-float32.json.
MOST_HEADS = 256
SHORT = 64  # tokens; from this number on the chunked kernels are faster


def installation() -> str | None:
    """Return what is missing on this machine for the CUDA kernels, or None."""
    library, compiler = load_library(), load_compiler()
    if isinstance(library, str):
        return library
    if not isinstance(compiler, Compiler):
        return compiler
    if capability() >= (10, 0) and compiler.version < (12, 8):
        version = ".".join(map(str, compiler.version))
        return f"needs NVRTC 12.8 or newer for this GPU, {version} is installed: pip install -U nvidia-cuda-nvrtc"
    return older_gpu()


def refusal(r: Recurrence) -> str | None:
    """Return why `recurrent` does not support r, or None."""
    return other_dtype(r, STORED) or empty(r) or too_wide(r, WIDEST, WIDEST) or installation()


def pooled_refusal(r: Recurrence, stored: Iterable[str] = STORED) -> str | None:
    """Return why the kernels on a pool of states do not support r, or None. stored: the dtypes of states that they take."""
    if r.boundaries is not None:
        return "takes the same number of tokens of each sequence, got cu_seqlens: `recurrent` takes packed sequences"
    if r.q.shape[1] >= SHORT:
        return f"takes fewer than {SHORT} tokens of each sequence, got T={r.q.shape[1]}: `recurrent` takes more"
    if r.initial_state is not None and str(r.initial_state.dtype) not in stored:
        return f"takes states in {' or '.join(stored)}, got {r.initial_state.dtype}: cast the pool, or {XLA}"
    return refusal(r)


def priority(r: Recurrence) -> int:
    """Return 25, above Triton's 20, for sequences of fewer than SHORT tokens. For longer ones return 3, below Triton's 5 and
    above XLA's priorities.

    Under the delta rule with more than MOST_HEADS heads of all sequences, return -1 for these, below XLA's: its chunks of the
    delta rule then fill the GPU too.
    """
    if r.q.shape[1] < SHORT:
        return 25
    return 3 if r.erasure is None or r.num_sequences * r.num_heads <= MOST_HEADS else -1


def step_priority(r: Recurrence) -> int:
    """Return 1, above Triton's 0, for states of LARGE bytes and more, and -1 for smaller ones.

    docs/internals/cuda.md: 64 sequences, of 67 MB and more, were as fast or faster at every shape. One sequence, of 2 to 4 MB,
    was slower. Between these nothing was measured.
    """
    itemsize = 4 if r.initial_state is None else r.initial_state.dtype.itemsize
    return 1 if math.prod(r.state_shape) * itemsize >= LARGE else -1


register = functools.partial(
    kernel_registry.register,
    platform=Platform.CUDA,
    backend=Backend.GPU,
    config=CudaConfig,
    erases=True,
    erases_before_decay=True,
    erases_along=True,
)


@register("recurrent", supports=refusal, priority=priority, mixes_segments=lambda r: True)
def recurrent(r: Recurrence, *, config: CudaConfig) -> Outputs:
    """Compute the outputs and final states token by token, with exact decays and the state in registers. It is for short
    sequences, and for per-value gates."""
    from glax._src.kernels.cuda import scan

    return scan.recurrent(r, config)


@register("recurrent.step", supports=pooled_refusal, priority=step_priority)
def recurrent_step(r: Recurrence, pool, slots, *, config: CudaConfig):
    """Advance each sequence by its T tokens: return the outputs [B, T, H, V] and the pool. Each state in the pool is read once
    and written once, in place. slots: the row of the pool of each sequence, -1 for none."""
    from glax._src.kernels.cuda import scan

    return scan.recurrent_step(r, pool, slots, config)


@register("recurrent.verify", supports=pooled_refusal)
def recurrent_verify(r: Recurrence, pool, slots, *, config: CudaConfig):
    """Compute the outputs of each sequence's T tokens, [B, T, H, V]. Each state in the pool is read once, and the pool does not
    change. slots: the row of the pool of each sequence, -1 for none."""
    from glax._src.kernels.cuda import scan

    return scan.recurrent_verify(r, pool, slots, config)


def replay_refusal(r: Recurrence) -> str | None:
    """Return why `recurrent_replay` does not support r, or None."""
    if r.q.shape[1] != 1:
        return f"takes one token of each sequence, got T={r.q.shape[1]}"
    if (why := pooled_refusal(r, STORED | COMPACT)) is not None:
        return why
    from glax._src.kernels.cuda import replay

    return replay.refusal(r)


@register("recurrent.replay", supports=replay_refusal, config=ReplayConfig)
def recurrent_replay(r: Recurrence, pool, slots, *, config: ReplayConfig):
    """Advance each sequence by one token: return the outputs and the pool. The sequence's state and replay ring are read once,
    and the state is written at every `replay`-th token. slots: as of `cuda.replay.recurrent_replay`."""
    from glax._src.kernels.cuda import replay

    return replay.recurrent_replay(r, pool, slots, config)

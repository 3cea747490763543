"""State which calls the Triton kernels refuse, with the reason, and which kernel is preferred."""

import importlib.util

from glax._src.core.known_miscompiles import numbers, version_of
from glax._src.core.recurrence import Recurrence
from glax._src.core.stored_states import COMPACT
from glax._src.kernels.common.gpu import capability
from glax._src.kernels.common.refusals import XLA, empty, older_gpu, too_wide
from glax._src.kernels.triton.config import MOST_COMPACT, WIDEST, TritonReplayConfig, width

SMALL_T = 16
# The delta rule's scan holds a state of [columns, K] in registers, in float32 thrice for products in three terms.
WIDEST_ERASED = 256
WIDEST_ERASED_FLOAT32 = 128
REPLAYED = ("float32", "bfloat16", "float16", *COMPACT)  # dtypes of states beside replay rings
MOST_PROGRAMS = 32_767  # of a sequence: the upper half of a slot's length counts those that have read it


def installation() -> str | None:
    """Return what is missing on this machine for the Triton kernels, or None."""
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        names = [name.replace("_", "-") for name in missing]
        return f"needs {' and '.join(names)}: pip install {' '.join(names)}"
    if numbers(version_of("triton") or "") < (3, 4):
        return f"needs triton>=3.7.1, {version_of('triton')} is installed: pip install -U triton"
    return older_gpu()


def refusal(r: Recurrence) -> str | None:
    """Return why no Triton kernel supports r, or None."""
    if r.q.dtype == "float64":
        return f"takes float32 and narrower floats, got query in float64: cast it, or {XLA}"
    return empty(r) or too_wide(r, WIDEST, WIDEST) or installation()


def chunked_refusal(r: Recurrence) -> str | None:
    """Return why the chunked kernels do not support r, or None."""
    return refusal(r) if r.erasure is None else erasing_refusal(r)


def erasing_refusal(r: Recurrence) -> str | None:
    """Return why the chunked kernels do not support r, which erases, or None."""
    widest, of = WIDEST_ERASED, "heads that erase"
    if r.q.dtype == "float32":
        widest, of = WIDEST_ERASED_FLOAT32, "heads that erase in float32"
    return too_wide(r, widest, widest, of) or refusal(r)


def step_refusal(r: Recurrence) -> str | None:
    """Return why the decoding step does not support r, whose sequences must have one token each and must not be packed, or
    None."""
    if r.boundaries is not None:
        return "takes one token of each sequence, got cu_seqlens: `recurrent` takes packed sequences"
    if r.q.shape[1] != 1:
        return f"takes one token of each sequence, got T={r.q.shape[1]}: `recurrent` takes more"
    return refusal(r)


def replay_refusal(r: Recurrence) -> str | None:
    """Return why the step of a `StatePool` does not support r, one token of each sequence, or None. The pool's states have the
    dtype of r's initial states, or float32 if there are none."""
    if (why := step_refusal(r)) is not None:
        return why
    if numbers(version_of("jax-triton") or "") < (0, 4):
        return f"needs jax-triton>=0.4, {version_of('jax-triton')} is installed: pip install -U jax-triton"
    states, (K, V) = r.initial_state, (width(x.shape[3]) for x in (r.q, r.v))
    stored = "float32" if states is None else str(states.dtype)
    if stored not in REPLAYED:
        return f"takes states in {' or '.join(REPLAYED)}, got {stored}: make the pool in one of these"
    if stored == "float8_e4m3fn" and capability() < (8, 9):
        found = ".".join(map(str, capability()))
        return f"takes states in {stored} on GPUs of compute capability 8.9 or newer, this one has {found}: make the pool in int8"
    if stored in COMPACT and K * V > MOST_COMPACT:
        most = f"{MOST_COMPACT} numbers, with K and V rounded up to powers of two"
        return f"takes states in {stored} of at most {most}, got {K} x {V}: make the pool in bfloat16"
    programs = r.num_heads * -(-V // TritonReplayConfig.heuristic(r).columns)
    if programs > MOST_PROGRAMS:
        return f"takes at most {MOST_PROGRAMS} programs for a sequence, got {programs}"
    return None


def replay_priority(r: Recurrence) -> int:
    """Return -1. The CUDA kernel, whose priority is 0, is preferred where NVRTC is installed."""
    return -1


def chunked_priority(r: Recurrence) -> int:
    """Return the priority of the chunked kernels, above XLA's and the same for all calls."""
    return 10


def token_priority(r: Recurrence) -> int:
    """Return 20, above the chunked kernels, where T < SMALL_T and a chunk would be mostly padding. Return 5 otherwise, above
    XLA's kernels, or -5 with an erasure.

    Where `chunked` refuses a long recurrence with an erasure, -5 lets XLA's chunked kernel run.
    """
    if r.q.shape[1] < SMALL_T:
        return 20
    return 5 if r.erasure is None else -5

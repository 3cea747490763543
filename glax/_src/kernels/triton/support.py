"""State which calls the Triton kernels refuse, with the reason, and which kernel is preferred."""

import importlib.util

from glax._src.core.known_miscompiles import numbers, version_of
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.common.refusals import XLA, empty, older_gpu, too_wide
from glax._src.kernels.triton.config import WIDEST

SMALL_T = 16
# The delta rule's scan holds a state of [columns, K] in registers, in float32 thrice for products in three terms.
WIDEST_ERASED = 256
WIDEST_ERASED_FLOAT32 = 128


def installation() -> str | None:
    """Return what is missing on this machine, or None."""
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
    """Return why the decoding step does not support r, or None."""
    if r.boundaries is not None:
        return "takes one token of each sequence, got cu_seqlens: `recurrent` takes packed sequences"
    if r.q.shape[1] != 1:
        return f"takes one token of each sequence, got T={r.q.shape[1]}: `recurrent` takes more"
    return refusal(r)


def chunked_priority(r: Recurrence) -> int:
    """Return the same priority for all calls, above XLA."""
    return 10


def token_priority(r: Recurrence) -> int:
    """Return a priority above `chunked` where a chunk would be mostly padding, and above XLA elsewhere.

    Where `chunked` refuses a long recurrence with an erasure, XLA's chunked kernel is preferred.
    """
    if r.q.shape[1] < SMALL_T:
        return 20
    return 5 if r.erasure is None else -5

"""State which calls the Triton kernels refuse, with the reason, and which kernel is preferred."""

import importlib.util

from glax._src.core.backend import local_device
from glax._src.core.known_miscompiles import numbers, version_of
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.triton.config import WIDEST

SMALL_T = 16
# The delta rule's scan holds a state of [columns, K] in registers, in float32 thrice for products in three terms.
WIDEST_ERASED = 256
WIDEST_ERASED_FLOAT32 = 128


def installation() -> str | None:
    """Return what is missing on this machine, or None."""
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing).replace('_', '-')}: pip install 'glax[triton]'"
    capability = getattr(local_device(), "compute_capability", None)
    if capability is not None and numbers(str(capability)) < (8, 0):
        return f"needs a GPU of compute capability 8.0, this one has {capability}"
    if numbers(version_of("triton") or "") < (3, 4):
        return f"needs triton>=3.7.1, {version_of('triton')} is installed"
    return None


def refusal(r: Recurrence) -> str | None:
    """Return why no Triton kernel supports r, or None."""
    if r.q.dtype == "float64":
        return "float64 is not supported"
    if 0 in (*r.q.shape, *r.v.shape, r.num_sequences):
        return "empty arrays are left to XLA"
    if max(r.q.shape[3], r.v.shape[3]) > WIDEST:
        return f"heads wider than {WIDEST} are not supported"
    return installation()


def chunked_refusal(r: Recurrence) -> str | None:
    """Return why the chunked kernels do not support r, or None."""
    if r.decay.value is not None:
        return "gates on the value side are not supported in chunks; `recurrent` runs them"
    return refusal(r) if r.erasure is None else erasing_refusal(r)


def erasing_refusal(r: Recurrence) -> str | None:
    """Return why the chunked kernels do not support r, which erases, or None."""
    if r.erasing.beta is None:
        return f"erases by beta, not by {r.erasing.form.replace('+', ' and ')}"
    if max(r.q.shape[3], r.v.shape[3]) > WIDEST_ERASED:
        return f"erases in heads of at most {WIDEST_ERASED} columns"
    if max(r.q.shape[3], r.v.shape[3]) > WIDEST_ERASED_FLOAT32 and r.q.dtype == "float32":
        return f"erases in float32 in heads of at most {WIDEST_ERASED_FLOAT32} columns"
    return refusal(r)


def step_refusal(r: Recurrence) -> str | None:
    """Return why the decoding step does not support r, or None."""
    if r.q.shape[1] != 1 or r.boundaries is not None:
        return "takes one token of each sequence"
    return refusal(r)


def chunked_priority(r: Recurrence) -> int:
    """Return a priority above XLA, but below it for an erasure with key gates, which is not measured beside XLA."""
    return -1 if r.erasure is not None and r.decay.key is not None else 10


def token_priority(r: Recurrence) -> int:
    """Return a priority above `chunked` where a chunk would be mostly padding, and above XLA elsewhere.

    Where `chunked` refuses a long recurrence with an erasure, XLA's chunked kernel is preferred.
    """
    if r.q.shape[1] < SMALL_T:
        return 20
    return 5 if r.erasure is None else -5

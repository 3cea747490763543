"""State why the kernels of a GPU platform refuse a call: what they take, what came, and what the user can do."""

from collections.abc import Iterable

from glax._src.core.known_miscompiles import numbers
from glax._src.core.recurrence import Recurrence
from glax._src.kernels.common.gpu import found_capability

XLA = 'leave out platform, or pass platform="xla"'


def other_dtype(r: Recurrence, taken: Iterable[str]) -> str | None:
    """Return the refusal of a call whose query, key or value has a dtype that is not in `taken`, or None if all have one of
    these. taken: names of dtypes."""
    for name, x in (("query", r.q), ("key", r.k), ("value", r.v)):
        if str(x.dtype) not in taken:
            return f"takes {name} in {' or '.join(taken)}, got {x.dtype}: cast it, or {XLA}"
    return None


def empty(r: Recurrence) -> str | None:
    """Return the refusal of a call in which a query or a value has no element, or which has no sequence; None for other
    calls."""
    q, v, N = list(r.q.shape), list(r.v.shape), r.scale.shape[0]
    if 0 not in (*q, *v, N):
        return None
    return f"takes arrays with elements, got query {q}, value {v} and {N} sequences: {XLA}"


def too_wide(r: Recurrence, widest_key: int, widest_value: int, what: str = "heads") -> str | None:
    """Return the refusal of a call with K > widest_key or V > widest_value, or None. what: the heads that have this limit, in
    the message."""
    K, V = r.q.shape[3], r.v.shape[3]
    if max(K - widest_key, V - widest_value) <= 0:
        return None
    widths = f"key (K) up to {widest_key} wide and value (V) up to {widest_value} wide"
    return f"takes {what} with {widths}, got {K} and {V}: {XLA}"


def older_gpu() -> str | None:
    """Return the refusal of a GPU whose compute capability is below 8.0; None for a newer GPU and without a GPU."""
    found = found_capability()
    if found is None or numbers(found) >= (8, 0):
        return None
    return f"needs a GPU of compute capability 8.0 or newer, this one has {found}: {XLA}"

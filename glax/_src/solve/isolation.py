"""Keep the segments of a row apart where a kernel's products mix them.

Many kernels receive segments as gates of -inf (`Recurrence.folded`). A chunk of theirs holds tokens of several segments, and a
weight of 0 does not stop NaN or inf: a document with such a number would spoil others. What a document spoils is not finite.
The results of such kernels are therefore checked, and computed again token by token where they are not finite.
"""

from collections.abc import Callable
from typing import Any

from glax._src.core.recurrence import Recurrence
from glax._src.core.segments import Segments


def isolating(run: Callable[..., Any], segments: Segments) -> Callable[..., Any]:
    """Return `run` with results in which each segment depends on its own rows alone.

    run: (r) -> Outputs or (Outputs, Residuals), or (r, d_output, d_final, *residuals) -> Recurrence, of a recurrence whose
    `segments` are folded.
    """

    def checked(r: Recurrence, *given):
        from glax._src.kernels.xla.isolated import run_checked  # registers kernels, which happens at the first call

        return run_checked(run, r, *given, resets=segments.resets)

    return checked

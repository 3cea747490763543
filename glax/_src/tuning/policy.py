"""Define the policy for a call without a measured config."""

import dataclasses
import os
from typing import Literal

Fallback = Literal["heuristics", "autotune", "error"]
# What each name means: one of the fallbacks, or a synonym.
FALLBACKS: dict[str, Fallback] = {
    "heuristics": "heuristics",
    "heuristic": "heuristics",
    "autotune": "autotune",
    "error": "error",
}


@dataclasses.dataclass(frozen=True)
class AutotunePolicy:
    """State the policy for a call without a measured config.

    cache_miss_fallback: "heuristics" takes the config that the kernel derives from the shapes. "autotune" measures all
                         candidates during the call. "error" raises LookupError.
    allow_autotune:      whether calls may measure. If False, "autotune" acts as "heuristics".
    validate_backward:   whether the tuner also compares the gradient of a `Kernel` with each candidate to the gradient with
                         the config of heuristic_cfg, and rejects a candidate that differs by more than rounding. A `KernelSpec`
                         is not affected: its gradient is a KernelSpec of its own, which is tuned and compared by itself.

    A `ConfigSelectorChain` and `overlay` take a policy. Raises ValueError for other values of the fields.

    >>> glax.AutotunePolicy(cache_miss_fallback="error").allow_autotune
    True
    """

    allow_autotune: bool = True
    cache_miss_fallback: Fallback = "heuristics"
    validate_backward: bool = True

    def __post_init__(self):
        for name in ("allow_autotune", "validate_backward"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.cache_miss_fallback, str) or self.cache_miss_fallback not in FALLBACKS:
            wanted = "'heuristics', 'autotune' or 'error'"
            raise ValueError(f"cache_miss_fallback must be {wanted}, got {self.cache_miss_fallback!r}")
        object.__setattr__(self, "cache_miss_fallback", FALLBACKS[self.cache_miss_fallback])

    @classmethod
    def from_environment(cls) -> "AutotunePolicy":
        """Return the policy that GLAX_AUTOTUNE names: heuristic (also if unset or empty), autotune or error.

        Raises ValueError for another name.
        """
        name = os.environ.get("GLAX_AUTOTUNE") or "heuristic"
        if name not in FALLBACKS:
            raise ValueError(
                f"GLAX_AUTOTUNE must be heuristic, autotune or error, got {name!r}: set one of these, or unset it"
            )
        return cls(cache_miss_fallback=FALLBACKS[name])

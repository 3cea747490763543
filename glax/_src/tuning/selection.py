"""Choose a config by a chain of selectors."""

from typing import Any, NamedTuple

from glax._src.tuning.cache import ConfigCache, PersistentCache, overlaid, overlaid_policy
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.policy import AutotunePolicy
from glax._src.tuning.tuner import Tuner


class Chosen(NamedTuple):
    config: Any
    selector: str


class ConfigSelectorChain:
    """Try each selector in turn: override, overlay, memory, disk, shipped, autotune (if the policy says so), heuristic.

    Caches hold only measurements, never an override or a guess.

    >>> chain = glax.ConfigSelectorChain(policy=glax.AutotunePolicy(allow_autotune=False))
    >>> executor = glax.Executor(chain)
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | None = None,
        shipped: PersistentCache | None = None,
    ):
        self.cache = ConfigCache() if cache is None else cache
        self.own_policy = policy  # None: each choice reads GLAX_AUTOTUNE
        self.tuner = Tuner() if tuner is None else tuner
        self.persistent, self.shipped = persistent, shipped

    @property
    def policy(self) -> AutotunePolicy:
        return overlaid_policy() or self.own_policy or AutotunePolicy.from_environment()

    def choose(self, inv: Invocation) -> Chosen:
        for selector in (
            self.override,
            self.overlay,
            self.memory,
            self.disk,
            self.measured,
            self.autotune,
            self.heuristic,
        ):
            if (config := selector(inv)) is not None:
                return Chosen(config, "shipped" if selector == self.measured else selector.__name__)
        raise LookupError(f"no measured config of {inv.kernel.op_id} for {inv.key}, and the policy forbids a guess")

    def override(self, inv):
        return inv.override

    def overlay(self, inv):
        return overlaid(inv.kernel.op_id)

    def memory(self, inv):
        return self.cache.get(inv)

    def disk(self, inv):
        return self.remembered(inv, self.persistent)

    def measured(self, inv):
        return self.remembered(inv, self.shipped)

    def remembered(self, inv, stored: PersistentCache | None):
        if stored is not None and (config := stored.get(inv)) is not None:
            self.cache.put(inv, config)
            return config
        return None

    def autotune(self, inv):
        if self.policy.cache_miss_fallback == "autotune" and self.policy.allow_autotune:
            return self.tune(inv).config
        return None

    def heuristic(self, inv):
        return None if self.policy.cache_miss_fallback == "error" else inv.kernel.heuristic_cfg(inv)

    def tune(self, inv):
        """Measure every candidate, and store the fastest correct one."""
        measurement = self.tuner.tune(inv, validate_backward=self.policy.validate_backward)
        self.cache.put(inv, measurement.config)
        if self.persistent is not None:
            self.persistent.put(inv, measurement)
        return measurement

"""Choose a config by a chain of selectors."""

from typing import Any, NamedTuple

from glax._src.tuning.cache import ConfigCache, PersistentCache, overlaid, overlaid_policy
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.policy import AutotunePolicy
from glax._src.tuning.tuner import Tuner


class Chosen(NamedTuple):
    """Hold a config and the name of the selector that chose it, such as "memory"."""

    config: Any
    selector: str


class ConfigSelectorChain:
    """Choose the config of a call, by the first selector that has one, in this order:

        "override"   the call names a config
        "overlay"    an `overlay` names one
        "memory"     `cache`
        "disk"       `persistent`
        "shipped"    `shipped`
        "autotune"   a measurement now, if the policy says so
        "heuristic"  what the kernel derives from the shapes

    cache:      the configs in memory, a `ConfigCache`; a new one if None.
    policy:     what to do without a measurement, an `AutotunePolicy`; if None, the one that the
                environment's GLAX_AUTOTUNE names at each choice, "heuristic", "autotune" or "error"; unset it is
                "heuristic", which measures nothing.
    tuner:      what measures, a `Tuner`; the default one if None.
    persistent: the measurements on disk, a `PersistentCache`, which tuning writes; none if None.
    shipped:    measurements that are only read, a `PersistentCache`; none if None.

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
        """Return the policy that holds now: the policy of the innermost overlay that has one, else the chain's own, else the
        policy that GLAX_AUTOTUNE names.

        If the variable is unset, this is "heuristic", which measures nothing.
        """
        return overlaid_policy() or self.own_policy or AutotunePolicy.from_environment()

    def choose(self, inv: Invocation) -> Chosen:
        """Return (config, selector): the config of the first selector that has one, and the selector's name.

        A config found on disk is put in memory. Raises LookupError where the policy forbids a guess.
        """
        if inv.override is not None:
            return Chosen(inv.override, "override")
        if (config := overlaid(inv.kernel.op_id)) is not None:
            return Chosen(config, "overlay")
        if (config := self.cache.get(inv)) is not None:
            return Chosen(config, "memory")
        for selector, stored in (("disk", self.persistent), ("shipped", self.shipped)):
            if stored is not None and (config := stored.get(inv)) is not None:
                self.cache.put(inv, config)
                return Chosen(config, selector)
        policy = self.policy
        if policy.cache_miss_fallback == "autotune" and policy.allow_autotune:
            return Chosen(self.tune(inv).config, "autotune")
        if policy.cache_miss_fallback == "error":
            raise LookupError(f"no measured config of {inv.kernel.op_id} for {inv.key}, and the policy forbids a guess")
        return Chosen(inv.kernel.heuristic_cfg(inv), "heuristic")

    def tune(self, inv):
        """Measure every candidate of an `Invocation`, and store the fastest correct one in memory and on disk.

        Returns the `Measurement`, with the config and its milliseconds. Raises ExceptionGroup if no candidate can be used.
        """
        measurement = self.tuner.tune(inv, validate_backward=self.policy.validate_backward)
        self.cache.put(inv, measurement.config)
        if self.persistent is not None:
            self.persistent.put(inv, measurement)
        return measurement

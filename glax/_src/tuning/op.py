"""Define `Kernel`, an operation with tunable configs."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from glax._src.core.recurrence import Recurrence
from glax._src.core.registry import Config
from glax._src.tuning.invocation import described


class Kernel:
    """Define an operation that an `Executor` configures, tunes and caches. A registered `KernelSpec` has the same interface.

    A subclass sets op_id, the name under which configs are stored, and defines run and heuristic_cfg. It may override
    candidate_cfgs, key and example. Its configs are of a frozen dataclass of its choice, whose fields are values of JSON.
    version: an int, 0 if absent. The author increments it when measured configs become invalid; those of other versions are
    then not used. inv, of the methods: the `Invocation`, which is the call with shapes in place of arrays.

    >>> class Power(glax.Kernel):
    ...     op_id = "power"
    ...     def run(self, x, *, cfg): return x**2
    ...     def heuristic_cfg(self, inv): return glax.configs.ChunkedConfig(chunk=64)
    ...     def candidate_cfgs(self, inv): return [glax.configs.ChunkedConfig(chunk=C) for C in (32, 64)]
    >>> glax.Executor()(Power(), jnp.ones(3)).shape
    (3,)
    """

    op_id: str
    version: int = 0

    def run(self, *args, cfg, **kwargs) -> Any:
        """Return the operation's result for these arguments, computed with the config cfg. Subclasses define this method. A
        call of `Executor` returns the result unchanged."""
        raise NotImplementedError(f"{type(self).__name__} must define run(self, ..., cfg)")

    def get_impl(self, cfg) -> Callable[..., Any]:
        """Return the function (*args, **kwargs) -> self.run(*args, cfg=cfg, **kwargs). cfg: a config of this operation."""
        return lambda *args, **kwargs: self.run(*args, cfg=cfg, **kwargs)

    def runner(self, cfg) -> Callable[..., Any]:
        """Return the function of the arguments that executors and the tuner call: `get_impl(cfg)`, unless a subclass overrides
        it."""
        return self.get_impl(cfg)

    def heuristic_cfg(self, inv) -> Any:
        """Return the config for a call, guessed from its shapes. Subclasses define it. inv: the `Invocation`, which is the call
        with shapes in place of arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define heuristic_cfg(self, inv)")

    def candidate_cfgs(self, inv) -> Iterable[Any]:
        """Return the configs that the tuner measures for a call. Here it is the one of `heuristic_cfg`; a subclass may return
        others. inv: the `Invocation`, which is the call with shapes in place of arrays."""
        return [self.heuristic_cfg(inv)]

    def key(self, inv) -> str:
        """Return the text under which measurements of a call are stored: the arguments' shapes, dtypes and static values. inv:
        the `Invocation`, which is the call with shapes in place of arrays."""
        return described(inv.args, inv.kwargs)

    def example(self, inv) -> tuple[tuple, dict]:
        """Return (args, kwargs) like those of an `Invocation` inv, with arrays in place of shapes, on which the tuner measures.

        Floats are drawn from a normal distribution, and integers are zeros. A subclass overrides it where time depends on
        values.
        """
        return example_of((inv.args, inv.kwargs))


@dataclasses.dataclass(frozen=True)
class FunctionKernel(Kernel):
    """Hold one implementation of an operation, and the rule for its config.

    function: (*args, cfg=, **options) -> the result. heuristic: the first of args -> a config. op_ids: in a subclass, the names
    of those of its instances that have configs.
    """

    op_ids: ClassVar[tuple[str, ...]] = ()

    op_id: str  # pyright: ignore[reportIncompatibleVariableOverride]  (the base declares no field)
    function: Callable[..., Any]
    heuristic: Callable[[Any], Config] = lambda operands: Config()

    def run(self, *args, cfg, **options):
        return self.function(*args, cfg=cfg, **options)

    def heuristic_cfg(self, inv) -> Config:
        return self.heuristic(inv.args[0])


def example_of(operands):
    """Return the operands, a tree, with random arrays in place of shapes: floats are normal numbers, and integers are zeros.

    A Recurrence gets log-sigmoid gates, sequences of equal length and a scale of K ** -0.5. Each of its rows has one segment,
    because the best config does not depend on where other segments begin.
    """
    leaves, structure = jax.tree.flatten(operands, is_leaf=lambda x: isinstance(x, Recurrence))
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    return structure.unflatten([example_leaf(key, x) for key, x in zip(keys, leaves, strict=True)])


def example_leaf(key, x):
    """Return a random array or Recurrence like x, as `example_of` describes it; x itself if it has no dtype. key: a key of
    jax.random."""
    if isinstance(x, Recurrence):
        filled = example_of(vars(x) | {"decay": vars(x.decay), "boundaries": None, "reverse": None, "segments": None})
        gates = {name: None if g is None else jax.nn.log_sigmoid(g) for name, g in filled["decay"].items()}
        N, T = x.num_sequences, x.q.shape[1]
        cuts = None if x.boundaries is None else (jnp.arange(N + 1) * T // N).astype(x.boundaries.dtype)
        scale = jnp.full(x.scale.shape, x.q.shape[3] ** -0.5, x.scale.dtype)
        decay = type(x.decay)(**gates)
        # Keys are not normalised here: a whole erasure would let the state grow past the range of float32.
        erasure = jax.tree.map(lambda e: jax.nn.sigmoid(e) / x.q.shape[3], filled["erasure"])
        segments = None if x.segments is None else x.segments.of_one_run
        own = dict(decay=decay, boundaries=cuts, scale=scale, erasure=erasure, reverse=x.reverse, segments=segments)
        return Recurrence(**filled | own)
    if not hasattr(x, "dtype"):
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(key, x.shape, x.dtype)
    return jnp.zeros(x.shape, x.dtype)

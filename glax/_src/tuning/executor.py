"""Choose a config, run the kernel and record the decision where `explain` listens."""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from glax._src.tuning.cache import stacked
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.selection import ConfigSelectorChain


class Decision(NamedTuple):
    """Hold one call of a kernel, as `explain` shows it: the kernel, its config, the selector, and why other kernels were not
    chosen."""

    invocation: Invocation  # the kernel, and the shapes of its arguments
    config: Any
    selector: str  # the selector that chose the config
    refused: dict[str, str]  # the refusals of other kernels, by their names
    outranked: dict[str, str]  # the priorities of other able kernels beside this one's, by their names

    @property
    def kernel(self) -> str:
        return self.invocation.kernel.op_id


class Executor:
    """Run a KernelSpec or a Kernel with the config that its chain of selectors chooses: executor(kernel, *args)."""

    def __init__(self, chain: ConfigSelectorChain | None = None):
        if not (chain is None or callable(getattr(chain, "choose", None))):
            raise TypeError(f"chain must be a ConfigSelectorChain, got {chain!r}")
        self.chain = ConfigSelectorChain() if chain is None else chain

    def __call__(
        self,
        kernel,
        *args,
        cfg=None,
        _cfg=None,
        refused: dict[str, str] | None = None,
        outranked: dict[str, str] | None = None,
        forgoes: Callable[[Any], dict[str, str]] | None = None,
        part=None,
        **kwargs,
    ):
        """Run kernel(*args, **kwargs) with the config that the chain chooses.

        cfg: the config to use instead. _cfg: another name of cfg, which ejkernel uses. refused, outranked: what to record for
        `explain`; see `Decision`. forgoes: config -> what to add to `refused` for the config that runs. part: the function of
        the kernel to call instead of its `run`, with the same config: `forward_with_residuals`, or a function of a `TwoPhase`.

        Raises TypeError if kernel is neither a Kernel nor a KernelSpec, or if both cfg and _cfg are given.
        """
        if isinstance(kernel, type) or not hasattr(kernel, "runner"):
            raise TypeError(f"kernel must be a Kernel or a KernelSpec, such as RecurrentAttention(), got {kernel!r}")
        if cfg is not None and _cfg is not None:
            raise TypeError("cfg and _cfg are two names of one option, and both are given: leave one out")
        inv = Invocation.of(kernel, args, kwargs, _cfg if cfg is None else cfg)
        config, selector = self.chain.choose(inv)
        if (recorded := listener.get()) is not None:
            found = {} if forgoes is None else forgoes(config)
            recorded.append(Decision(inv, config, selector, (refused or {}) | found, outranked or {}))
        with jax.named_scope(f"glax.{kernel.op_id}"):
            run = kernel.runner(config) if part is None else functools.partial(part, config=config)
            return run(*args, **kwargs)


listener: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar("glax_listener", default=None)
turns = itertools.count()


def is_listening() -> bool:
    """Return whether decisions are recorded now."""
    return listener.get() is not None


@contextlib.contextmanager
def listening():
    """Record the decisions of what is traced inside the context. Functions that jit has traced before are traced again."""
    recorded: list[Decision] = []
    token = listener.set(recorded)
    try:
        with stacked(((("listening", next(turns)),), None)):
            yield recorded
    finally:
        listener.reset(token)


def decisions(f, *args, **kwargs) -> list[Decision]:
    """Return every decision that f(*args, **kwargs) makes, without running f."""
    with listening() as recorded:
        jax.eval_shape(f, *args, **kwargs)
    return recorded

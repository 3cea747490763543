"""Chooses a config, runs the kernel, and tells who listens."""

import contextlib
import contextvars
import functools
import itertools
from typing import Any, NamedTuple

import jax

from glax._src.tuning.cache import stacked
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.selection import ConfigSelectorChain


class Decision(NamedTuple):
    """One call of a kernel: what was asked, what runs it, with which config, which selector chose that, who refused."""

    invocation: Invocation
    config: Any
    selector: str
    refused: dict[str, str]

    @property
    def kernel(self) -> str:
        return self.invocation.kernel.op_id


class Executor:
    """executor(kernel, *args): runs a KernelSpec or a Kernel with the config that its chain of selectors chooses."""

    def __init__(self, chain: ConfigSelectorChain | None = None):
        if not (chain is None or callable(getattr(chain, "choose", None))):
            raise TypeError(f"chain must be a ConfigSelectorChain, got {chain!r}")
        self.chain = ConfigSelectorChain() if chain is None else chain

    def __call__(self, kernel, *args, cfg=None, _cfg=None, refused: dict[str, str] | None = None, part=None, **kwargs):
        """kernel(*args, **kwargs) with the config that the chain chooses; `cfg` overrides all. `refused` is for explain.

        _cfg: another name of cfg, ejkernel's. part: a function that does a part of that call, run in its place with the same
        config.
        """
        if isinstance(kernel, type) or not hasattr(kernel, "runner"):
            raise TypeError(f"kernel must be a Kernel or a KernelSpec, such as RecurrentAttention(), got {kernel!r}")
        if cfg is not None and _cfg is not None:
            raise TypeError("cfg and _cfg are two names of one option, and both are given: leave one out")
        inv = Invocation.of(kernel, args, kwargs, _cfg if cfg is None else cfg)
        config, selector = self.chain.choose(inv)
        if (heard := listener.get()) is not None:
            heard.append(Decision(inv, config, selector, refused or {}))
        with jax.named_scope(f"glax.{kernel.op_id}"):
            run = kernel.runner(config) if part is None else functools.partial(part, config=config)
            return run(*args, **kwargs)


listener: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar("glax_listener", default=None)
turns = itertools.count()


@contextlib.contextmanager
def listening():
    """Gathers the decisions of what is traced inside; functions that jit has traced before are traced again."""
    heard: list[Decision] = []
    token = listener.set(heard)
    try:
        with stacked(((("listening", next(turns)),), None)):
            yield heard
    finally:
        listener.reset(token)


def decisions(f, *args, **kwargs) -> list[Decision]:
    """Every decision that f(*args, **kwargs) makes, without running it."""
    with listening() as heard:
        jax.eval_shape(f, *args, **kwargs)
    return heard

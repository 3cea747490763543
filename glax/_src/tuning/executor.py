"""Choose a config, run the kernel and record the decision where `explain` listens."""

import contextlib
import contextvars
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.bind import is_array
from glax._src.tuning.cache import layers, stacked, traced_layers
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.selection import ConfigSelectorChain


class Decision(NamedTuple):
    """Hold one call of a kernel, as `explain` shows it: the kernel, its config, the selector, why other kernels were not chosen,
    and how this one runs the call."""

    invocation: Invocation  # the kernel, and the shapes of its arguments
    config: Any
    selector: str  # the selector that chose the config
    refused: dict[str, str]  # the refusals of other kernels, by their names
    outranked: dict[str, str]  # the priorities of other able kernels beside this one's, by their names
    route: str = ""  # how the kernel runs the call; empty where it runs all calls in one way

    @property
    def kernel(self) -> str:
        return self.invocation.kernel.op_id

    @property
    def lines(self) -> list[str]:
        """Return the decision as text: the kernel with its config, its shapes, and a line for each other kernel."""
        others = (*self.outranked.items(), *self.refused.items())
        chosen = [f"{self.kernel}: {self.config}, by {self.selector}", f"for {self.invocation.key}"]
        route = [f"by {self.route}"] if self.route else []
        return [*chosen, *route, *(f"not {name}: {reason}" for name, reason in others)]


class Executor:
    """Run a `Kernel` or a `KernelSpec` with the config that its chain of selectors chooses: executor(kernel, *args).

    chain: a `ConfigSelectorChain`; a new one, without files, if None. Raises TypeError if it is neither.

    executor(kernel, *args, cfg=None, **kwargs) returns what the kernel returns; cfg is the config to use instead of a choice.
    It raises TypeError if kernel is neither a Kernel nor a KernelSpec, and LookupError where the policy forbids a guess.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.Executor()(glax.RecurrentAttention(), q, q, q).shape
    (1, 8, 2, 4)
    """

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
        route: Callable[..., tuple[str, dict[str, str]]] | None = None,
        part=None,
        **kwargs,
    ):
        """Return kernel(*args, **kwargs) with the config that the chain chooses, and say which at DEBUG under the logger "glax".

        cfg: the config to use instead. _cfg: another name of cfg, which ejkernel uses. refused, outranked: what to record for
        `explain`; see `Decision`. route: config= -> (the `route` of the Decision, what to add to `refused`) for the config that
        runs. part: the function of the kernel to call instead of its `run`, with the same config: `forward_with_residuals`, or a
        function of a `TwoPhase`.

        Raises TypeError if kernel is neither a Kernel nor a KernelSpec, or if both cfg and _cfg are given; and LookupError
        where the policy forbids a guess.
        """
        if isinstance(kernel, type) or not hasattr(kernel, "runner"):
            raise TypeError(f"kernel must be a Kernel or a KernelSpec, such as RecurrentAttention(), got {kernel!r}")
        if cfg is not None and _cfg is not None:
            raise TypeError("cfg and _cfg are two names of one option, and both are given: leave one out")
        inv = Invocation.of(kernel, args, kwargs, _cfg if cfg is None else cfg)
        config, selector = self.chain.choose(inv)
        if is_recorded():
            line, reasons = ("", {}) if route is None else route(config=config)
            decision = Decision(inv, config, selector, (refused or {}) | reasons, outranked or {}, line)
            if (recorded := listener.get()) is not None:
                recorded.append(decision)
            logger.debug("; ".join(decision.lines))
        with jax.named_scope(f"glax.{kernel.op_id}"):
            run = kernel.runner(config) if part is None else functools.partial(part, config=config)
            return run(*args, **kwargs)


listener: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar("glax_listener", default=None)
logger = logging.getLogger("glax")
turns = itertools.count()
LISTENING = (("listening", None),)  # the first entry of the layer of `listening`


def is_listening() -> bool:
    """Return whether `listening` records decisions now."""
    return listener.get() is not None


def is_recorded() -> bool:
    """Return whether decisions are recorded or logged, so that the reasons against other kernels are needed."""
    return is_listening() or logger.isEnabledFor(logging.DEBUG)


def compiled(static_argnums: tuple[int, ...] = ()) -> Callable[[Callable], Callable]:
    """Return a decorator for a function of glax that calls kernels: jax.jit, inlined into the programs of callers.

    While decisions are recorded, the function is traced at each call, so that every call is recorded. JAX's caches then see one
    key (`one_key`).
    """

    def decorate(f: Callable) -> Callable:
        program = jax.jit(f, static_argnums=static_argnums, inline=True)

        @functools.wraps(f)
        def call(*operands, **named):
            if not is_listening():
                return program(*operands, **named)
            given = [x if i in static_argnums else arrays_of(x) for i, x in enumerate(operands)]
            with one_key():
                return f(*given, **arrays_of(named))

        return call

    return decorate


def arrays_of(tree):
    """Return the leaves of a tree as jit passes them to a function."""
    return jax.tree.map(jnp.asarray, tree)


@contextlib.contextmanager
def one_key():
    """Let functions that are traced inside the context have one key in JAX's caches, if decisions are recorded.

    JAX stores what it traces by that key, every function of jnp included, and never drops it. Functions of callers, which jit
    may have traced before, get a new key for each `listening` instead, so that they are traced again.
    """
    if not is_listening():
        yield
        return
    with traced_layers((LISTENING, *(layer for layer in layers.get() if layer[0][:1] != LISTENING))):
        yield


@contextlib.contextmanager
def listening():
    """Yield a list to which every `Decision` is appended that is made inside the context, while functions are traced.

    Functions that jit has traced before are traced again.
    """
    recorded: list[Decision] = []
    token = listener.set(recorded)
    try:
        with stacked(((*LISTENING, ("turn", next(turns))), None)):
            yield recorded
    finally:
        listener.reset(token)


def decisions(f, *args, **kwargs) -> list[Decision]:
    """Return every decision that f(*args, **kwargs) makes, without running f."""
    with listening() as recorded:
        trace(f, *args, **kwargs)
    return recorded


def trace(f, *args, **kwargs):
    """Trace f(*args, **kwargs) without running it. JAX drops the trace after the call.

    Arguments that are no arrays, such as a config, a platform or a flag, are known while tracing, as they are in a call. Raises
    TypeError if f is no function.
    """
    if not callable(f):
        raise TypeError(f"fn must be a function, got {f!r}")
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = {i: x for i, x in enumerate(leaves) if is_array(x) and not isinstance(x, np.generic)}

    def called(arrays: dict):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return f(*args, **kwargs)

    jax.eval_shape(called, traced)

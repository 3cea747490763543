"""Define `explain`, `tune` and `detect_platform`, which show and tune the calls of glax that a function makes."""

import inspect
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from glax._src.api.recurrent import recurrent
from glax._src.core.bind import check_flag
from glax._src.core.registry import KernelSpec, Platform, UnsupportedError
from glax._src.solve.dispatch import executor
from glax._src.solve.selective_scan import SelectiveKernel
from glax._src.tuning.cache import Measurement, overlay
from glax._src.tuning.executor import Decision, decisions, listening, trace
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.selection import AutotunePolicy


class Explanation(list[Decision]):
    """List the decisions of a function in the order of its calls. As text, each decision is one paragraph.

    unsupported: the message of the UnsupportedError at which the function ended, with each kernel's reason; None without one.
    """

    unsupported: str | None = None

    def __str__(self):
        lines = ["\n  ".join(decision.lines) for decision in self]
        lines += [] if self.unsupported is None else [self.unsupported]
        return "\n".join(lines) or "no call of glax"


def explain(fn, *args, **kwargs) -> Explanation:
    """List every glax call that fn(*args, **kwargs) makes: its kernel, its config, and the selector that chose the config.

    Returns a list, which prints as text, with an entry for each call: `kernel`, its name; `config`; `selector`, "override",
    "overlay", "memory", "disk", "shipped", "autotune" or "heuristic", as in `ConfigSelectorChain`; `refused` and `outranked`,
    dicts of why each other kernel does not run: it refused, or its priority is not above the chosen kernel's; and `route`, how
    the kernel runs the call. For a call that names a platform, kernels of other platforms are not listed.

    If no kernel can run a call, the list ends before that call. The list's `unsupported` then has each kernel's reason; it is
    None otherwise.

    fn is only traced, so jax.ShapeDtypeStruct may stand for arrays. Raises TypeError if fn is no function, and what fn raises.

    Under jax.grad the list includes the gradient's kernels. Calls of the same kernel on the same shapes appear once. A vmapped
    call appears twice: as written, and merged into the batch, as it runs.

    JAX keeps the traces of functions that the caller has jitted, one for each call of `explain`, until the jitted function is
    garbage collected or its clear_cache() is called. JAX has no public way to drop one trace.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.explain(glax.recurrent, q, q, q, platform="xla")[0].kernel
    'recurrent/xla/any'
    """
    unsupported = None
    with listening() as recorded:
        try:
            trace(fn, *args, **kwargs)
        except UnsupportedError as error:
            unsupported = str(error)
    explanation = distinct(recorded)
    explanation.unsupported = unsupported
    return explanation


def distinct(found: Iterable[Decision]) -> Explanation:
    """Return the decisions without repetitions: of those with the same kernel and shapes only the first."""
    first: dict[tuple[str, str], Decision] = {}
    for decision in found:
        first.setdefault((decision.kernel, decision.invocation.key), decision)
    return Explanation(first.values())


def detect_platform(fn=recurrent, *args, **kwargs) -> Platform:
    """Return the platform that runs the first call of glax in fn(*args, **kwargs) here.

    fn is only traced, so jax.ShapeDtypeStruct may stand for arrays. A function that takes arguments and gets none is traced
    with three of float32 [1, 1024, 4, 64]: a usual call of `recurrent`.

    Raises TypeError if fn is no function, ValueError if it makes no call of glax, and UnsupportedError if no kernel can run a
    call of it.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.detect_platform(glax.recurrent, q, q, q) in list(glax.Platform)
    True
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {fn!r}; glax.compat.ejkernel.detect_platform takes the name of an algorithm"
        )
    if not args and not kwargs and takes_arguments(fn):
        args = (jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32),) * 3
    kernels = [decision.invocation.kernel for decision in decisions(fn, *args, **kwargs)]
    platforms = [kernel.platform for kernel in kernels if isinstance(kernel, KernelSpec | SelectiveKernel)]
    if not platforms:
        raise ValueError(f"fn must make a call of glax, got {fn!r}, which makes none")
    return platforms[0]


def takes_arguments(fn) -> bool:
    """Return whether a function has a parameter that a call must give."""
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())


def tune(fn, *args, progress: bool = True, **kwargs) -> dict[str, Measurement]:
    """Tune every glax call that fn(*args, **kwargs) makes, on this device, and store the results on disk, where later processes
    find them.

    fn is traced to find the calls, so jax.ShapeDtypeStruct may stand for arrays. Each kernel's candidates are then measured on
    made-up inputs of those shapes. `tune` ends with jax.clear_caches: functions that were compiled before are compiled again
    when they are next called, and then use the results. progress: whether a bar on standard error shows how many calls are
    tuned.

    Returns {"kernel: shapes": measurement}, one for each call: `config`, the fastest; `ms`, its median milliseconds; and
    `candidates`, for each config as text its milliseconds, or why it was rejected. Raises TypeError if fn is no function
    or progress no bool, ExceptionGroup if no candidate of a kernel can be used, and what fn raises.

    >>> x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    >>> measured = glax.tune(glax.recurrent, x, x, x, progress=False)  # doctest: +SKIP
    >>> print(*(found.config for found in measured.values()))  # doctest: +SKIP
    """
    check_flag("progress", progress)
    with overlay(policy=AutotunePolicy()):  # finding the calls needs no measurements
        found = {f"{d.kernel}: {d.invocation.key}": d.invocation for d in distinct(decisions(fn, *args, **kwargs))}
    measured = {name: executor.chain.tune(inv) for name, inv in shown(found.items(), progress)}
    jax.clear_caches()
    return measured


def shown(items: Iterable[tuple[str, Invocation]], progress: bool) -> Iterable[tuple[str, Invocation]]:
    """Return the items. With `progress` a bar on standard error shows how many are done."""
    if not progress:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(list(items), description="tuning", console=Console(stderr=True))

"""What glax does inside a function of yours: shown, and tuned."""

import sys
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from glax.api import recurrent
from glax.dispatch import executor
from glax.execution.cache import Measurement, overlay
from glax.execution.executor import Decision, decisions
from glax.execution.invocation import Invocation
from glax.execution.selection import AutotunePolicy
from glax.registry import Platform


class Explanation(list[Decision]):
    """The decisions of a function, in the order of its calls; as text, one paragraph each."""

    def __str__(self):
        lines = []
        for d in self:
            lines += [f"{d.kernel}: {d.config}, by {d.selector}", f"  for {d.invocation.key}"]
            lines += [f"  not {name}: {reason}" for name, reason in d.refused.items()]
        return "\n".join(lines) or "no call of glax"


def explain(fn, *args, **kwargs) -> Explanation:
    """For every glax call that fn(*args, **kwargs) makes: the kernel, its config, which selector chose it, and why others
    refused. Only traces fn; shapes (jax.ShapeDtypeStruct) will do for arguments.

    Under jax.grad the gradient's kernels are among them. Calls of the same kernel on the same shapes stand once. A vmapped
    call stands twice: as written, and merged into the batch, as it runs.
    """
    first: dict[tuple[str, str], Decision] = {}
    for decision in decisions(fn, *args, **kwargs):
        first.setdefault((decision.kernel, decision.invocation.key), decision)
    return Explanation(first.values())


def detect_platform(fn=recurrent, *args, **kwargs) -> Platform:
    """The platform that runs fn(*args, **kwargs) here; without arguments, that of a usual call of `recurrent`."""
    if not args and not kwargs:
        args = (jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32),) * 3
    return explain(fn, *args, **kwargs)[0].invocation.kernel.platform


def tune(fn, *args, progress: bool = True, **kwargs) -> dict[str, Measurement]:
    """Tunes every glax call that fn(*args, **kwargs) makes, on this device, and remembers the results on disk.

    Traces fn to find the calls (shapes will do for arguments), then measures each kernel's candidates on made-up inputs of
    those shapes. Functions compiled before are forgotten (jax.clear_caches), so that they pick the results up.

    Returns the measurement of each call, by "kernel: shapes".
    """
    with overlay(policy=AutotunePolicy()):  # to find the calls, neither measure nor insist
        found = {f"{d.kernel}: {d.invocation.key}": d.invocation for d in explain(fn, *args, **kwargs)}
    measured = {name: executor.chain.tune(inv) for name, inv in shown(found.items(), progress)}
    jax.clear_caches()
    return measured


def shown(items: Iterable[tuple[str, Invocation]], progress: bool) -> Iterator[tuple[str, Invocation]]:
    """The items, with a progress bar on standard error: rich's where it is installed, else a line an item."""
    items = list(items)
    if not progress:
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for i, (name, inv) in enumerate(items):
            print(f"tuning {i + 1} of {len(items)}: {name}", file=sys.stderr)
            yield name, inv
        return
    yield from track(items, description="tuning", console=Console(stderr=True))

"""Kernels and configs that a compiler is known to miscompile: refused by name, and never chosen by the tuner."""

import dataclasses
import fnmatch
import functools
import importlib.metadata

from glax._src.core.backend import local_device


@dataclasses.dataclass(frozen=True)
class Denial:
    """`kernel` (a pattern on its name) on `device` (a pattern on the device kind), with `library` from `first` to before
    `fixed`; with `config` set, only where the config's fields have these values."""

    kernel: str
    device: str
    library: str
    first: str
    fixed: str
    reason: str
    config: tuple[tuple[str, object], ...] = ()


DENIED: list[Denial] = [
    Denial(
        kernel="*/triton/*",
        device="*h[128]0*",  # H100, H200, GH200, H800, H20: all that have compute capability 9.0
        library="triton",
        first="3.4",
        fixed="3.7.1",
        reason="Triton 3.4 to 3.7.0 compiles products of accumulated tiles wrongly on Hopper; install triton>=3.7.1",
    ),
]


def known_miscompile(kernel: str, config=None) -> str | None:
    """The reason why `kernel` is refused here, with that config if one is given: a compiler miscompiles it. None if none does."""
    for denial in DENIED:
        if (
            fnmatch.fnmatch(kernel, denial.kernel)
            and applies_here(denial)
            and (not denial.config or (config is not None and all(getattr(config, k) == v for k, v in denial.config)))
        ):
            return denial.reason
    return None


def applies_here(denial: Denial) -> bool:
    installed = version_of(denial.library)
    if installed is None or not numbers(denial.first) <= numbers(installed) < numbers(denial.fixed):
        return False
    device = local_device()
    return device is not None and fnmatch.fnmatch(device.device_kind.lower(), denial.device)


@functools.cache
def version_of(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.7.1+cu12" is (3, 7, 1)."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)

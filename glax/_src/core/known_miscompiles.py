"""List the kernels and configs that a compiler is known to miscompile, or to slow down. The first are refused by name, and the
tuner never chooses them; `glax doctor` names the second."""

import dataclasses
import fnmatch
import functools
import importlib.metadata

from glax._src.core.backend import local_device


@dataclasses.dataclass(frozen=True)
class Denial:
    """Describe kernels that a compiler miscompiles (in DENIED), or makes slow (in SLOWED).

    kernel: an fnmatch pattern of their names. device: a pattern of the device kind in lower case. library: the compiler; its
    versions from `first` up to, and without, `fixed` are affected. reason: the sentence that users read. config: (field, value)
    pairs of the affected configs; () for all configs.
    """

    kernel: str
    device: str
    library: str
    first: str
    fixed: str
    reason: str
    config: tuple[tuple[str, object], ...] = ()


HOPPER = "*h[128]0*"  # H100, H200, GH200, H800, H20: all that have compute capability 9.0

DENIED: list[Denial] = [
    Denial(
        kernel="*/triton/*",
        device=HOPPER,
        library="triton",
        first="3.4",
        fixed="3.7.1",
        reason="Triton 3.4 to 3.7.0 compiles products of accumulated tiles wrongly on Hopper; install triton>=3.7.1",
    ),
]


SLOWED: list[Denial] = [
    Denial(
        kernel="*/pallas/gpu",
        device=HOPPER,
        library="jaxlib",
        first="0.12",
        fixed="1000",  # none yet
        reason="JAX 0.12 compiles them by nvJitLink, which ignores setmaxnreg, so those of the delta rule and of per-key gates "
        "take 1.0 to 1.8 times as long; JAX 0.11 compiles them by ptxas",
    ),
]


def known_slowdown() -> str | None:
    """Return the reason of the first entry of SLOWED that applies on this machine, or None."""
    linkers = [version_of(name) for name in ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12")]
    return next((x.reason for x in SLOWED if any(linkers) and applies_here(x)), None)


def known_miscompile(kernel: str, config=None) -> str | None:
    """Return the reason why `kernel`, a kernel's name, is refused here with `config`: a compiler miscompiles it. Return None if
    no entry of DENIED matches. An entry for some configs alone does not match a config of None."""
    for denial in DENIED:
        if (
            fnmatch.fnmatch(kernel, denial.kernel)
            and applies_here(denial)
            and (not denial.config or (config is not None and all(getattr(config, k) == v for k, v in denial.config)))
        ):
            return denial.reason
    return None


def applies_here(denial: Denial) -> bool:
    """Return whether the affected version of the entry's library is installed, and the target device is one of its devices."""
    installed = version_of(denial.library)
    if installed is None or not numbers(denial.first) <= numbers(installed) < numbers(denial.fixed):
        return False
    device = local_device()
    return device is not None and fnmatch.fnmatch(device.device_kind.lower(), denial.device)


@functools.cache
def version_of(library: str) -> str | None:
    """Return the installed version of a Python package, such as "3.7.1"; None if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "3.7.1+cu12" gives (3, 7, 1)."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)

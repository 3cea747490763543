"""Measured configs, in memory and on disk; and overlays, which stand above them. Neither an override nor a guess is kept."""

import contextlib
import contextvars
import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from glax.execution.device import device_kind, libraries
from glax.execution.invocation import Invocation

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The fastest config of an Invocation, its median milliseconds, and those of every candidate (or why it fell out)."""

    config: Any
    ms: float
    candidates: dict[str, float | str] = dataclasses.field(default_factory=dict)


class ConfigCache:
    """Measured configs of this process."""

    def __init__(self):
        self.configs: dict[tuple[str, int, str], Any] = {}

    def get(self, inv: Invocation) -> Any | None:
        return self.configs.get((inv.kernel.op_id, inv.kernel.version, inv.key))

    def put(self, inv: Invocation, config: Any):
        self.configs[inv.kernel.op_id, inv.kernel.version, inv.key] = config

    def clear(self):
        self.configs.clear()


class PersistentCache:
    """Measurements on disk: one readable JSON file for each device, kernel, kernel version and compiler version; or, with
    `any_compiler`, for all compilers, as what glax ships: better than a guess, though another version was measured.

    They lie in folder / name, by default that of GLAX_CACHE_DIR, else the user's cache folder. Many processes may read and
    write: a file is replaced whole, under a lock. A file that cannot be read is set aside with a warning, never an error; nor
    is a folder that cannot be written.
    """

    def __init__(self, name: str = "recurrent", folder: pathlib.Path | None = None, *, any_compiler: bool = False):
        self.name, self.given, self.any_compiler = name, folder, any_compiler
        self.parsed: dict[pathlib.Path, tuple[tuple[int, int], dict]] = {}
        self.unwritable = False

    @property
    def folder(self) -> pathlib.Path:
        if self.given is not None:
            return pathlib.Path(self.given) / self.name
        if chosen := os.environ.get("GLAX_CACHE_DIR"):
            return pathlib.Path(chosen) / self.name
        import platformdirs  # here, for `import glax` needs jax, numpy and jaxtyping alone

        return pathlib.Path(platformdirs.user_cache_dir("glax")) / self.name

    def path(self, inv: Invocation) -> pathlib.Path:
        versions = {} if self.any_compiler else libraries(inv.kernel.op_id)
        compilers = "".join(f"+{name}{version}" for name, version in versions.items())
        kernel = inv.kernel.op_id.replace("/", ".")
        return self.folder / device_kind() / f"{kernel}@{inv.kernel.version}{compilers}.json"

    def get(self, inv: Invocation) -> Any | None:
        stored = self.read(self.path(inv)).get("entries", {}).get(inv.key)
        if stored is None:
            return None
        try:
            return inv.config_from(stored["type"], stored["config"])
        except (TypeError, ValueError, KeyError) as error:
            warnings.warn(
                f"glax ignores the stored config of {inv.kernel.op_id} for {inv.key}: {error!r}", stacklevel=2
            )
            return None

    def put(self, inv: Invocation, measurement: Measurement):
        entry = dict(type=type(measurement.config).__name__, **dataclasses.asdict(measurement))
        self.merge(self.path(inv), dict(device=device_kind(), kernel=inv.kernel.op_id), {inv.key: entry})

    def read(self, path: pathlib.Path) -> dict:
        """The content of a file; {} if there is none. Parsed once for each state of the file."""
        try:
            stat = path.stat()
        except OSError:
            return {}
        stamp = (stat.st_mtime_ns, stat.st_size)
        if self.parsed.get(path, (None,))[0] == stamp:
            return self.parsed[path][1]
        try:
            content = check(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            set_aside(path, error)
            return {}
        self.parsed[path] = (stamp, content)
        return content

    def merge(self, path: pathlib.Path, about: dict, entries: dict):
        """Adds entries to a file, or makes it."""
        if self.unwritable:
            return
        import filelock

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{path}.lock"):
                self.parsed.pop(path, None)
                old = self.read(path).get("entries", {})
                content = dict(format=FORMAT, **about, entries=dict(sorted((old | entries).items())))
                temporary = path.with_name(f"{path.name}.{os.getpid()}")
                temporary.write_text(json.dumps(content, indent=1))
                temporary.replace(path)
        except OSError as error:
            self.unwritable = True
            warnings.warn(
                f"glax keeps its measurements in memory only: cannot write {path.parent}: {error}", stacklevel=2
            )

    def files(self) -> Iterator[tuple[pathlib.Path, dict]]:
        """Every file that can be read, with its content."""
        for path in sorted(self.folder.rglob("*.json")):
            if content := self.read(path):
                yield path, content


def check(content) -> dict:
    """The content of a cache file, if it is one that this version writes."""
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        raise ValueError("it is not a file of glax")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')!r}, this version of glax reads {FORMAT}")
    return content


def set_aside(path: pathlib.Path, error: Exception):
    """Renames a file that cannot be read, so that the next write starts afresh and nothing is lost."""
    aside = path.with_name(f"{path.name}.unreadable")
    with contextlib.suppress(OSError):
        path.replace(aside)
    warnings.warn(f"glax set aside {path.name}, now {aside.name}: {error}", stacklevel=2)


# ---- overlays --------------------------------------------------------------------------------------------------------

layers: contextvars.ContextVar[tuple[tuple, ...]] = contextvars.ContextVar("glax_layers", default=())
traced_layers = jax.make_user_context(())  # part of jit's cache key, so that an overlay reaches compiled functions


@contextlib.contextmanager
def overlay(configs: dict[str, Any] | None = None, *, policy=None):
    """Inside, kernels named in `configs` run with those configs, and `policy` says what to do about the others.

    A name is that of a registered kernel ("chunked/xla/any") or an `op_id`. The innermost overlay wins. Functions that are
    compiled already are traced again on entering and on leaving.
    """
    layer = (tuple(sorted((configs or {}).items(), key=lambda item: item[0])), policy)
    with stacked(layer):
        yield


@contextlib.contextmanager
def stacked(layer: tuple):
    """Puts a (hashable) layer above the others, and makes jit see it."""
    token = layers.set((layer, *layers.get()))
    try:
        with traced_layers(layers.get()):
            yield
    finally:
        layers.reset(token)


def overlaid(op_id: str) -> Any | None:
    return next((dict(configs)[op_id] for configs, _ in layers.get() if op_id in dict(configs)), None)


def overlaid_policy():
    return next((policy for _, policy in layers.get() if policy is not None), None)

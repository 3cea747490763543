"""Store measured configs in memory and on disk, and apply overlays, which take precedence. Overrides and guesses are never
stored."""

import contextlib
import contextvars
import dataclasses
import difflib
import errno
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from glax._src.core.files import (
    LIMIT,
    ContentError,
    Stamp,
    cache_folder,
    check_folders,
    make_folders,
    read_json,
    replacing,
    set_aside,
    stamp_of,
)
from glax._src.core.registry import Config, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.tuning.device import libraries
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.op import Kernel
from glax._src.tuning.policy import AutotunePolicy

FORMAT = 1
LOCK_SECONDS = 30.0  # far longer than reading and writing one file, during which the lock is held
NO_FOLDER = "glax has no cache folder, for this user has no home directory: set GLAX_CACHE_DIR to a folder"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Hold the result of tuning one Invocation.

    config: the fastest config. ms: its median time in milliseconds. candidates: for each config, as text, its median
    milliseconds, or the reason why it was rejected.
    """

    config: Any
    ms: float
    candidates: dict[str, float | str] = dataclasses.field(default_factory=dict)


class ConfigCache:
    """Hold the measured configs of this process. A new cache is empty.

    A config is stored for a kernel, its version and the key of the call: the text that `Kernel.key` returns.

    >>> cache, q = glax.ConfigCache(), jnp.ones((1, 8, 2, 4))
    >>> call = glax.Invocation.of(glax.RecurrentAttention(), (q, q, q), {})
    >>> cache.put(call, glax.configs.ChunkedConfig(chunk=32))
    >>> cache.get(call)
    ChunkedConfig(chunk=32)
    """

    def __init__(self):
        self.configs: dict[tuple[str, int, str], Any] = {}

    def get(self, inv: Invocation) -> Any | None:
        """Return the config that was put for an Invocation of the same kernel, version and key; None if there is none."""
        return self.configs.get((inv.kernel.op_id, inv.kernel.version, inv.key)) if self.configs else None

    def put(self, inv: Invocation, config: Any):
        """Store the config of an Invocation. It replaces the one that was put before for the same kernel, version and key."""
        self.configs[inv.kernel.op_id, inv.kernel.version, inv.key] = config

    def clear(self):
        """Remove all configs."""
        self.configs.clear()


class PersistentCache:
    """Store measurements on disk as JSON: one file for each device, kernel, version of the kernel and version of the compiler.

    name, folder: the files lie in folder / name. If folder is None, it is GLAX_CACHE_DIR, else the user's cache folder. For a
        user who has neither, nothing is stored on disk.
    any_compiler: one file serves all versions of the compiler. The measurements that glax ships are stored this way, because a
        config measured with another compiler is better than a guess.

    Many processes may read and write together, because a file is replaced whole, under a lock.

    Reading never raises. A file with content that glax does not write is set aside, with a warning. A file that cannot be read
    now (permissions, too many open files, no regular file) stays, and counts as absent. An entry that does not give a config
    counts as absent, too. If the folder cannot be written, glax warns once and stores measurements in memory.

    >>> chain = glax.ConfigSelectorChain(persistent=glax.PersistentCache("mine"))
    """

    def __init__(self, name: str = "recurrent", folder: pathlib.Path | None = None, *, any_compiler: bool = False):
        self.name, self.given, self.any_compiler = name, folder, any_compiler
        self.parsed: dict[pathlib.Path, tuple[Stamp, dict]] = {}
        self.warned: set[str] = set()
        self.failure: str | None = None  # why the last measurement is in memory only

    @property
    def folder(self) -> pathlib.Path | None:
        """Return the folder of the files; None for a user who has neither GLAX_CACHE_DIR nor a home directory."""
        if self.given is not None:
            return pathlib.Path(self.given) / self.name
        found = cache_folder()
        return None if found is None else found / self.name

    def path(self, inv: Invocation) -> pathlib.Path | None:
        """Return the path of the file of this Invocation's measurement. Return None, with one warning, if there is no folder."""
        if (folder := self.folder) is None:
            self.warn(f"{NO_FOLDER}; measurements stay in memory")
            return None
        versions = {} if self.any_compiler else libraries(inv.kernel.op_id)
        compilers = "".join(f"+{name}{version}" for name, version in versions.items())
        kernel = inv.kernel.op_id.replace("/", ".")
        return folder / inv.device / f"{kernel}@{inv.kernel.version}{compilers}.json"

    def get(self, inv: Invocation) -> Any | None:
        """Return the config that is stored for an Invocation with the same kernel, device and key, or None."""
        if (path := self.path(inv)) is None:
            return None
        entries = self.read(path).get("entries", {})
        if not entries or (entry := entries.get(inv.key)) is None:
            return None
        try:
            check_entry(entry)
            return inv.config_from(entry["type"], entry["config"])
        except Exception as error:  # whatever a config's own checks raise about values that were never measured
            self.warn(f"glax ignores the stored config of {inv.kernel.op_id} for {inv.key} in {path}: {error}")
            return None

    def put(self, inv: Invocation, measurement: Measurement):
        """Store the measurement of an Invocation. Warns once, and raises nothing, if it cannot be stored."""
        if (path := self.path(inv)) is None:
            return
        entry = dict(type=type(measurement.config).__name__, **dataclasses.asdict(measurement))
        try:
            self.merge(path, dict(device=inv.device, kernel=inv.kernel.op_id), {inv.key: entry})
        except (
            OSError,
            TypeError,
            ValueError,
        ) as error:  # the system refuses the file, or the config holds other than JSON values
            first, self.failure = self.failure is None, f"cannot write {path}: {error}"
            if first:
                warnings.warn(f"glax keeps its measurements in memory only: {self.failure}", stacklevel=2)
        else:
            self.failure = None

    def read(self, path: pathlib.Path) -> dict:
        """Return the content of a file; {} if it is missing or cannot be read. A file is parsed again only after it has
        changed."""
        try:
            if not self.any_compiler:  # a package may be installed as links, a cache of measurements is not
                check_folders(path.parent, path.parents[2])
            if self.parsed.get(path, (None,))[0] != stamp_of(os.stat(path)):
                self.parsed[path] = load(path)
            return self.parsed[path][1]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self.warn(f"glax reads no measurements from {path}, which stays as it is: {error}")
            return {}
        except ContentError as error:
            return self.read_again_alone(path, error)

    def read_again_alone(self, path: pathlib.Path, error: ContentError) -> dict:
        """Read a file again under its lock, because another process may have repaired it since. Return its content.

        If the content is still not of glax's format, set the file aside, with a warning, and return {}. error: what was wrong at
        the first reading, for the warning where the file can neither be locked nor renamed.
        """
        try:
            with locked(path):
                return self.read_locked(path)
        except OSError as failure:
            self.warn(
                f"glax ignores {path}: {error}. It stays as it is, for it cannot be renamed: {failure}. Remove it"
            )
            return {}

    def read_locked(self, path: pathlib.Path) -> dict:
        """Return the content of a file whose lock this process holds; {} if the file is missing, or is set aside here."""
        try:
            return load(path)[1]
        except FileNotFoundError:
            return {}
        except ContentError as error:
            self.warn(f"glax set aside {path.name}, now {set_aside(path).name} in {path.parent}: {error}")
            return {}

    def merge(self, path: pathlib.Path, about: dict, entries: dict):
        """Add entries to a file, or make it. An entry replaces the one that the file has for the same key.

        about: {"device": its name, "kernel": its name}, which the file states beside its entries. entries: {the key of a call: a
        `Measurement` as a dict, and the name of its config's class as "type"}. Raises OSError if the file cannot be written, or
        if its present content cannot be read.
        """
        make_folders(path.parent, path.parents[2])
        with locked(path):
            old = self.read_locked(path).get("entries", {})
            content = dict(format=FORMAT, **about, entries=dict(sorted((old | entries).items())))
            text = json.dumps(content, indent=1, allow_nan=False)
            if len(text) > LIMIT:
                raise OSError(errno.EFBIG, f"{len(text)} bytes of measurements are more than the {LIMIT} that are read")
            with replacing(path) as new:
                new.write_text(text, encoding="utf-8")

    def files(self) -> Iterator[tuple[pathlib.Path, dict]]:
        """Yield (its path, its content) of every file that can be read."""
        paths = [] if self.folder is None else sorted(self.folder.glob("*/*.json"))
        for path in paths:
            if content := self.read(path):
                yield path, content

    def warn(self, text: str):
        """Warn of the text, unless this cache has done so before."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=3)


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a file, which every writer takes. Raises OSError if the lock cannot be obtained."""
    import filelock

    with filelock.FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
        yield


def load(path: pathlib.Path) -> tuple[Stamp, dict]:
    """Return (the stamp, the content) of a cache file. Raises OSError if the file cannot be read, and ContentError for a wrong
    format."""
    stamp, content = read_json(path)
    return stamp, check(content)


def check(content) -> dict:
    """Return the content of a cache file. Raise ContentError if it is not of the format that this version of glax writes."""
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        raise ContentError("it is not a file of glax")
    if not is_format(content.get("format")):
        raise ContentError(f"its format is {content.get('format')!r:.80}, this version of glax reads {FORMAT}")
    return content


def is_format(x) -> bool:
    return type(x) is int and x == FORMAT  # a bool is refused: True equals 1


def check_entry(entry):
    """Raise ValueError unless an entry of a cache file has the format that `put` writes. The fields of the config are not
    checked."""
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict) or not is_ms(entry.get("ms")):
        raise ValueError(f"it must have a config and its ms, got {entry!r:.80}")
    if not isinstance(entry.get("type"), str) or not isinstance(entry.get("candidates", {}), dict):
        raise ValueError(f"it must have the type of its config, and its candidates by name, got {entry!r:.80}")


def is_ms(x) -> bool:
    """Return whether x is a finite number of milliseconds above 0."""
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= sys.float_info.max


# ---- overlays --------------------------------------------------------------------------------------------------------

layers: contextvars.ContextVar[tuple[tuple, ...]] = contextvars.ContextVar("glax_layers", default=())
traced_layers = jax.make_user_context(())  # part of jit's cache key, so that an overlay reaches compiled functions


@contextlib.contextmanager
def overlay(configs: dict[str, Any] | None = None, *, policy=None):
    """Run kernels named in `configs` with those configs inside the context: with overlay(...). It does not choose the kernel.

    configs: {the name of a registered kernel, such as "chunked/xla/any", or the `op_id` of a `Kernel`: its config}; none if None.
    policy: the `AutotunePolicy` of the other kernels; the policy around the context if None.

    Of nested overlays that name a kernel, the innermost decides. jit traces a function once for each distinct set of overlays
    around its calls. Overlays with equal configs and policies share that trace. Calls outside keep theirs.

    Raises ValueError if a name belongs to no kernel, or if a registered kernel takes no config of that class. Raises TypeError
    if `configs` is no dict, or `policy` no AutotunePolicy.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> with glax.overlay({"chunked/xla/any": glax.configs.ChunkedConfig(chunk=32)}):
    ...     output = glax.recurrent(q, q, q, platform="xla").output
    """
    configs = {} if configs is None else configs
    if not isinstance(configs, dict):
        raise TypeError(f"configs must be a dict from names of kernels to configs, got {configs!r}")
    if policy is not None and not isinstance(policy, AutotunePolicy):
        raise TypeError(f"policy must be an AutotunePolicy or None, got {policy!r}")
    for name, config in configs.items():
        check_overlaid(name, config)
    layer = (tuple(sorted(configs.items(), key=lambda item: item[0])), policy)
    with stacked(layer):
        yield


def check_overlaid(name: str, config):
    """Raise ValueError if no kernel has the name, or if `config` is of another class than the kernel's configs."""
    load_kernels()
    if name in kernel_registry.kernels:
        wanted = kernel_registry.kernels[name].config
        if type(config) is not wanted:
            raise ValueError(f"{name} takes a {wanted.__name__}, the overlay gives it {config!r}")
        return
    # A kernel of the class Config itself takes nothing that an overlay could give.
    operations = [kernel for kernel in subclasses(Kernel) if getattr(kernel, "config", None) is not Config]
    # A class whose instances have names of their own may list them as op_ids.
    op_ids = [name for kernel in operations for name in getattr(kernel, "op_ids", (getattr(kernel, "op_id", None),))]
    names = [*kernel_registry.kernels, *(op_id for op_id in op_ids if isinstance(op_id, str))]
    # If it lists none, there may be any name.
    if name not in names and len(names) == len(kernel_registry.kernels) + len(op_ids):
        near = difflib.get_close_matches(str(name), names, n=3) or names
        raise ValueError(f"an overlay must name kernels, got {name!r}, which is none: name {' or '.join(near)}")


def subclasses(of: type) -> list[type]:
    """Return all classes that derive from `of`, directly or through others."""
    return [kernel for direct in of.__subclasses__() for kernel in (direct, *subclasses(direct))]


@contextlib.contextmanager
def stacked(layer: tuple):
    """Put `layer` before the other layers of overlays inside the context. Inside of different layers, jit traces a function
    anew.

    layer: a hashable pair: of the configs, as pairs (the kernel's name, its config), and of the policy or None.
    """
    token = layers.set((layer, *layers.get()))
    try:
        with traced_layers(layers.get()):
            yield
    finally:
        layers.reset(token)


def overlaid(op_id: str) -> Any | None:
    """Return the config that the innermost overlay which names this kernel gives to it; None if no overlay names it."""
    return next((dict(configs)[op_id] for configs, _ in layers.get() if op_id in dict(configs)), None)


def overlaid_policy():
    """Return the policy of the innermost overlay that has one; None if no overlay has."""
    return next((policy for _, policy in layers.get() if policy is not None), None)

"""Manage the folder of a training run: its lock, the record of what it trains, its checkpoints and its losses."""

import contextlib
import dataclasses
import datetime
import errno
import functools
import gc
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from glax._src.core.compiling import start_compiling
from glax._src.core.files import ContentError, parse, read_regular, replacing, set_aside
from glax.models.loggers import Logger, started
from glax.testing.check import one_line

LOCK, HISTORY, CHECKPOINTS = ".lock", "history.jsonl", "checkpoints"
# In errors of tensorstore: the machine failed to read, and the file may be whole.
REFUSED = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")


class DamagedCheckpoint(ValueError):
    """Say that a checkpoint cannot be read, or holds other numbers than were saved."""


@dataclasses.dataclass
class History:
    """Hold losses in nats per token, by step: {step: loss}. `train` returns it.

    losses: of the windows that each step trained on. held_out: of the held-out tokens after a step.

    >>> from glax.models.training import History
    >>> History({1: 5.5}, {}).losses[1]
    5.5
    """

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder `out` and hold its lock, which ends with the process at the latest. Process 0 holds it for all. Raises
    ValueError if another training holds it, or if the folder cannot be made or written to."""
    lock = filelock.FileLock(out / LOCK, timeout=0)
    if jax.process_index():
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(
            f"out must be a folder that no other training writes to, got {out}, which one does: wait for its end, or name another"
        ) from None
    except OSError as error:
        raise ValueError(f"out must be a folder to write to, got {out}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


# ---- what a run trains -----------------------------------------------------------------------------------------------


def digest(arrays: Mapping[str, jax.Array]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and sums of arrays. It does not depend on how they are sharded."""
    kinds = {(x.shape, x.dtype, x.sharding): x for x in arrays.values()}
    for compiling in start_compiling(checksums.lower(x) for x in kinds.values()):
        compiling.result()
    totals = jax.device_get({name: checksums(x) for name, x in arrays.items()})
    found = {name: [str(x.dtype), list(x.shape), np.ravel(totals[name]).tolist()] for name, x in arrays.items()}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


@jax.jit
def checksums(x: jax.Array) -> jax.Array:
    """Return two checksums of 32 bits of an array, [2]: sums of words that mix an element's bits with its index.

    The devices compute them. As sums of integers they are equal on any mesh. A change of any one element changes them. Each
    array has a program of its own: one for all arrays of a model would take longer to compile.
    """
    if x.dtype.itemsize == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    words = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    words = words.astype(jnp.uint32)
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return jnp.stack([mixed(words, place, factor).sum(dtype=jnp.uint32) for factor in (0x9E3779B1, 0x85EBCA77)])


def mixed(words: jax.Array, place: jax.Array, factor: int) -> jax.Array:
    """Return the words mixed with their indices `place` by MurmurHash3's finalizer, which maps different words with one index
    to different words."""
    found = (words ^ (place * np.uint32(factor))) * np.uint32(0x85EBCA6B)
    found ^= found >> 13
    found *= np.uint32(0xC2B2AE35)
    return found ^ (found >> 16)


def content(source: str, sha256: str) -> dict:
    """Return the entry of a record for a thing that is compared only by its digest `sha256`, whatever its `source`."""
    return dict(source=source, sha256=sha256)


def refuse_another(where: object, earlier: Mapping[str, Any], record: Mapping[str, Any]):
    """Raise ValueError, which names the entries that differ, unless both records are of the same run. where: the folder, for
    the message.

    A record holds the start, the text and the recipe of a run, by the names of `TrainingConfig`.
    """
    differing = sorted(
        name for name in earlier.keys() | record.keys() if compared(earlier.get(name)) != compared(record.get(name))
    )
    if differing:
        changes = "; ".join(
            f"{name} was {shown(earlier.get(name))}, got {shown(record.get(name))}" for name in differing
        )
        raise ValueError(
            f"{where} is of another {', '.join(differing)}: {changes}: name another out, or take what the run began with"
        )


def compared(entry: object) -> object:
    """Return what decides whether two entries of records are equal: the digest of an entry of `content`, else the entry
    itself."""
    return entry.get("sha256") if isinstance(entry, dict) else entry


def shown(entry: object) -> str:
    """Return an entry of a record as a text for messages."""
    return f"{entry.get('source')} ({str(entry.get('sha256'))[:8]})" if isinstance(entry, dict) else repr(entry)


# ---- losses ----------------------------------------------------------------------------------------------------------


class Journal:
    """Write the values of a run's steps to `history.jsonl`, one JSON object a line, and hold its losses in `history`.

    A line has `step`, and either the values of the step, with `loss` among them, or `held_out`. Where the file is there, its
    lines up to the step `done` stay, and those of later steps go. Lines that are no such objects are dropped, with a warning, and
    stop no run. `loggers` get the values too. Only process 0 has a file and loggers.
    """

    def __init__(self, out: Path, done: int, loggers: Sequence[str] = (), config: Mapping[str, Any] | None = None):
        self.path, self.history, self.file = out / HISTORY, History(), None
        self.loggers: list[Logger] = []
        if jax.process_index():
            return
        self.loggers = started(loggers, out, done, config or {})
        lines = [line for line in read_lines(self.path) if line["step"] <= done] if os.path.lexists(self.path) else []
        for line in lines:
            self.note(line)
        try:
            with replacing(self.path) as new:
                new.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.file = open(self.path, "a")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            self.lose(error)

    def write(self, step: int, **values: float):
        """Add a line, in which numbers that are not finite are null, and give the values to the loggers. A file or a
        logger that cannot be written is given up, with a warning."""
        line = dict(step=step) | {name: x if math.isfinite(x) else None for name, x in values.items()}
        self.note(line)
        for logger in self.loggers[:]:
            self.attempt(logger, functools.partial(logger.write, step, values))
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            self.lose(error)

    def note(self, line: dict):
        """Enter the losses of a line in `history`."""
        for name, by_step in (("loss", self.history.losses), ("held_out", self.history.held_out)):
            if line.get(name) is not None:
                by_step[line["step"]] = line[name]

    def lose(self, error: OSError):
        """Give up the file because of an error, with a warning. The history goes on in memory."""
        self.file = None
        warnings.warn(
            f"{self.path} cannot be written: {error.strerror or error}: the run goes on without it", stacklevel=4
        )

    def close(self):
        if self.file is not None:
            self.file.close()
        for logger in self.loggers[:]:
            self.attempt(logger, logger.close)

    def attempt(self, logger: Logger, call: Callable[[], None]):
        """Run call(), which calls the logger. If it fails, because of a network or a disk, the logger is not called again, with
        a warning."""
        try:
            call()
        except Exception as error:  # each package raises classes of its own
            self.loggers.remove(logger)
            name, why = type(logger).__name__, one_line(error)
            warnings.warn(f"the logger {name} failed: {why}: the run goes on without it", stacklevel=4)


def read_lines(path: Path) -> list[dict]:
    """Return the lines of a history file. If some cannot be read, they are left out, and the file is set aside, with a warning.
    A last line without its end is left out silently."""
    lines, wrong = [], None
    try:
        raw = read_regular(path)[1]
    except OSError as error:
        raw, wrong = b"", error
    whole = raw[: raw.rfind(b"\n") + 1]  # a process that was killed leaves part of a line
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(checked_line(parse(line)))
        except (ContentError, ValueError, OverflowError) as error:
            wrong = wrong or f"line {number}: {error}"
    if wrong is not None:
        warnings.warn(f"{path} cannot be read: {wrong}: set aside as {set_aside(path)}", stacklevel=4)
    return lines


def checked_line(line: object) -> dict:
    """Return `line` if it is a line of a history: a dict of numbers or None by name, with an integer `step`. Raises
    ContentError for anything else."""
    if not isinstance(line, dict):
        raise ContentError(f"it must hold a JSON object, got {type(line).__name__}")
    for name, x in line.items():
        wanted = int if name == "step" else int | float | None
        if isinstance(x, bool) or not isinstance(x, wanted) or (x is not None and not math.isfinite(x)):
            raise ContentError(f"{name} must be a number, got {x!r:.80}")
    if not isinstance(line.get("step"), int):
        raise ContentError("step must be a number, got none")
    return line


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def by_name(state) -> dict:
    """Return {path: array} of a tree, so that a checkpoint does not depend on the classes in the tree."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def forms(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Return {name: dtype and shape as a text} of arrays."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


def seal(written: Mapping[str, object]) -> str:
    """Return the SHA-256 of the metadata of a checkpoint, which reveals damage."""
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


@jax.jit
def is_finite(state) -> jax.Array:
    """Return whether all floating-point numbers of a tree of arrays are finite, as a bool array []. The tree has at least one.

    >>> from glax.models.training import is_finite
    >>> bool(is_finite(nnx.state(model)))
    True
    """
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


class Checkpoints:
    """Save and restore states in the folder `checkpoints` of a run. Each checkpoint also has the state's digest, the run's
    record and the position of the data.

    out: the run's folder. record: what must be the same in a checkpoint that is restored, values of JSON by name (`record_of`).
    count: how many of the newest checkpoints stay.
    hours: None, or a second rule by which others stay. It keeps the first checkpoint, and each that is written at least so many
        hours after the last one that this rule keeps.

    `save` returns before a checkpoint is written, and the next `save` waits for the end of the writing. All processes call each
    method together. The object is a context manager, which waits for the writing at its end.

    >>> from glax.models.training import Checkpoints
    >>> with Checkpoints(folder / "run", record={}) as checkpoints: checkpoints.save(1, dict(x=jnp.ones(2)))
    >>> with Checkpoints(folder / "run", record={}) as checkpoints: checkpoints.restore(dict(x=jnp.ones(2)))[1]
    1
    """

    def __init__(self, out: Path, record: Mapping[str, Any], count: int = 2, hours: float | None = None):
        self.record = record
        options = ocp.CheckpointManagerOptions(
            max_to_keep=count,
            keep_time_interval=None if hours is None else datetime.timedelta(hours=hours),
            cleanup_tmp_directories=True,
        )
        handlers = ocp.StandardCheckpointHandler()  # else the metadata cannot be read without a warning
        self.manager = ocp.CheckpointManager((out / CHECKPOINTS).absolute(), options=options, item_handlers=handlers)
        self.writing: int | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_):
        try:
            self.wait()
        except OSError:
            if kind is None:
                raise
        finally:
            self.manager.close()

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none."""
        return self.manager.latest_step()

    def save(self, step: int, state, position: Any = None):
        """Begin to write a checkpoint, and remove those that do not stay.

        state: a tree of arrays. position: where the data stands, a value of JSON, which `restore` returns.

        Raises OSError if it, or the one before, cannot be written.
        """
        self.wait()
        arrays = by_name(state)
        written = dict(run=self.record, arrays=forms(arrays), sha256=digest(arrays), position=position)
        sealed = written | dict(seal=seal(written))
        self.writing = step
        self.write(lambda: self.manager.save(step, args=ocp.args.StandardSave(arrays), custom_metadata=sealed))

    def wait(self):
        """Wait until the checkpoint is written. Raises OSError if it cannot be."""
        if self.writing is not None:
            self.write(self.manager.wait_until_finished)
            self.writing = None

    def write(self, call):
        """Run call(). Raises OSError, which names the checkpoint's folder, for any error of orbax."""
        try:
            call()
            return
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # orbax raises ValueError and Exception for a full disk
            why = one_line(error)
        step, self.writing = self.writing, None
        discard_reads()
        folder = Path(self.manager.directory) / str(step)
        raise OSError(errno.EIO, f"Cannot write a checkpoint ({why})", str(folder))

    def restore(self, like) -> tuple[Any, int, Any]:
        """Return (the state, the step, the data's position) of the newest whole checkpoint.

        Return (None, 0, None) if the folder has no checkpoint at all.

        like: the state's arrays, or their shapes, with the shardings that the restored ones get.

        Checkpoints are read from the newest on, until one is whole. Damaged ones before it are then renamed, with a warning.
        Older checkpoints are not read. Raises ValueError if all checkpoints are damaged. Raises ValueError if one that is read
        has another record, or arrays of other names, shapes or dtypes than like.
        """
        damaged = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                found, position = self.read(step, like)
            except DamagedCheckpoint as error:
                damaged[step] = error
                continue
            for other, why in damaged.items():
                self.put_aside(other, why, step)
            self.manager.reload()
            return found, step, position
        if damaged:
            raise ValueError(
                f"every checkpoint in {self.manager.directory} is damaged: {damaged}: name another out, or remove that folder "
                "to start again"
            )
        return None, 0, None

    def put_aside(self, step: int, why: Exception, whole: int):
        """Rename the folder of a damaged checkpoint, and warn. whole: the step of the checkpoint that is restored."""
        folder = Path(self.manager.directory) / str(step)
        aside = set_aside(folder) if jax.process_index() == 0 else folder
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"aside {step}")
        warnings.warn(
            f"the checkpoint of step {step} is damaged: {why}: set aside as {aside}, and the run goes on from step {whole}",
            stacklevel=4,
        )

    def read(self, step: int, like) -> tuple[Any, Any]:
        """Return (the state, the data's position) of the checkpoint of `step`. like: as in `restore`. Raises DamagedCheckpoint,
        or ValueError if the checkpoint is of another run or model."""
        arrays = by_name(like)
        written = dict(attempted(self.manager.metadata, step).custom_metadata or {})
        if written.pop("seal", None) != seal(written):
            raise DamagedCheckpoint("its metadata is not what was saved")
        where = f"the checkpoint of step {step} in {self.manager.directory}"
        refuse_another(where, written["run"], self.record)
        mine, stored = forms(arrays), written["arrays"]
        if stored != mine:
            name = min(name for name in stored | mine if stored.get(name) != mine.get(name))
            raise ValueError(
                f"{where} is of another model: {name} must be {mine.get(name, 'missing')}, got {stored.get(name, 'none')}: "
                "name another out"
            )
        wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}
        found = attempted(self.manager.restore, step, args=ocp.args.StandardRestore(wanted))
        if digest(found) != written["sha256"]:
            raise DamagedCheckpoint("its numbers are not those that were saved")
        return jax.tree.structure(like).unflatten([found[name] for name in wanted]), written.get("position")


def attempted(call, *args, **options):
    """Return call(*args, **options). Raises DamagedCheckpoint for an error of orbax, but the error itself if the machine failed
    to read or has no memory."""
    try:
        return call(*args, **options)
    except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # orbax raises the class Exception itself, among others
        if any(word in str(error) for word in REFUSED):
            raise
        why = one_line(error)
    discard_reads()
    raise DamagedCheckpoint(why)


def discard_reads():
    """Collect the reads and writes of arrays that orbax has abandoned, without their errors. Python would otherwise report each
    error later."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook

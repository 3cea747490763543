"""Keep the folder of a training run: its lock, what it trains, its checkpoints and its losses."""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from glax._src.core.files import ContentError, read_json, replacing, set_aside
from glax.testing.check import one_line

LOCK, HISTORY, CHECKPOINTS = ".lock", "history.json", "checkpoints"
REFUSED = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")  # what tensorstore says of files that may be whole


class DamagedCheckpoint(ValueError):
    """A checkpoint cannot be read, or holds other numbers than were saved."""


@dataclasses.dataclass
class History:
    """Hold losses in nats per token: of each step's windows by step, and of the held-out windows by step."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder and hold its lock, which ends with the process. Raises ValueError if another training holds it, or if
    the folder cannot be made or written to."""
    lock = filelock.FileLock(out / LOCK, timeout=0)
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
    """Return the SHA-256 of arrays with their names, dtypes and shapes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(jax.device_get(arrays[name]))
        found.update(f"{name} {value.dtype} {value.shape}\n".encode())
        found.update(value.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def content(source: str, sha256: str) -> dict:
    """Return the entry of a record for something that is compared by its content alone."""
    return dict(source=source, sha256=sha256)


def refuse_another(where: object, earlier: Mapping[str, Any], record: Mapping[str, Any]):
    """Raise ValueError, which names the entries that differ, unless both records are of the same run.

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
    return entry.get("sha256") if isinstance(entry, dict) else entry


def shown(entry: object) -> str:
    return f"{entry.get('source')} ({str(entry.get('sha256'))[:8]})" if isinstance(entry, dict) else repr(entry)


# ---- losses ----------------------------------------------------------------------------------------------------------


def write_history(out: Path, history: History):
    with replacing(out / HISTORY) as new:
        new.write_text(json.dumps(dataclasses.asdict(history)))


def read_history(out: Path, done: int) -> History:
    """Return the losses of the steps up to `done`, as far as they are stored. A file that does not hold losses is set aside,
    with a warning."""
    path = out / HISTORY
    if not done or not os.path.lexists(path):
        return History()
    try:
        found = history_of(read_json(path)[1])
    except (OSError, ValueError, OverflowError) as error:
        warnings.warn(f"{path} cannot be read: {error}: set aside as {set_aside(path)}", stacklevel=3)
        return History()
    return History(*({step: x for step, x in by_step.items() if step <= done} for by_step in vars(found).values()))


def history_of(values: object) -> History:
    """Return the losses in the JSON object of a history. Raises ContentError for anything else."""
    if not isinstance(values, dict):
        raise ContentError(f"it must hold a JSON object, got {type(values).__name__}")
    parts = []
    for name in (field.name for field in dataclasses.fields(History)):
        by_step = values.get(name)
        if not isinstance(by_step, dict):
            raise ContentError(f"{name} must be a JSON object, got {by_step!r:.80}")
        for step, x in by_step.items():
            if not (step.isdecimal() and step.isascii()) or isinstance(x, bool) or not isinstance(x, int | float):
                raise ContentError(f"{name} must hold losses by step, got {step!r:.80}: {x!r:.80}")
        parts.append({int(step): float(x) for step, x in by_step.items()})
    return History(*parts)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def by_name(state) -> dict:
    """Return the arrays of a tree by their paths, so that a checkpoint does not depend on the classes in the tree."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def forms(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


def seal(written: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


@jax.jit
def is_finite(state) -> jax.Array:
    """Return whether all floating-point numbers of a tree are finite."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


class Checkpoints:
    """Save and restore states in the folder `checkpoints` of a run. The two newest stay. Each holds its digest and the record."""

    def __init__(self, out: Path, record: Mapping[str, Any]):
        self.record = record
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        handlers = ocp.StandardCheckpointHandler()  # else the metadata cannot be read without a warning
        self.manager = ocp.CheckpointManager((out / CHECKPOINTS).absolute(), options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_):
        self.manager.close()

    def newest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state):
        """Write a checkpoint, and remove the oldest of three. Raises OSError if it cannot be written."""
        arrays = by_name(state)
        written = dict(run=self.record, arrays=forms(arrays), sha256=digest(arrays))
        sealed = written | dict(seal=seal(written))
        try:
            self.manager.save(step, args=ocp.args.StandardSave(arrays), custom_metadata=sealed)
            return
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # orbax raises ValueError and Exception for a full disk
            why = one_line(error)
        discard_reads()
        folder = Path(self.manager.directory) / str(step)
        raise OSError(errno.EIO, f"Cannot write a checkpoint ({why})", str(folder))

    def restore(self, state, sharding: NamedSharding) -> tuple[Any, int]:
        """Return the state and the step of the newest whole checkpoint; `state` and 0 if there is none.

        Damaged checkpoints are set aside, with a warning, if an older one is whole. Raises ValueError if none is whole, or if
        one is of another run or model.
        """
        damaged = {}
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                found = self.read(step, state, sharding)
            except DamagedCheckpoint as error:
                damaged[step] = error
                continue
            for other, why in damaged.items():
                aside = set_aside(Path(self.manager.directory) / str(other))
                warnings.warn(
                    f"the checkpoint of step {other} is damaged: {why}: set aside as {aside}, "
                    f"and the run goes on from step {step}",
                    stacklevel=3,
                )
            self.manager.reload()
            return found, step
        if damaged:
            raise ValueError(
                f"every checkpoint in {self.manager.directory} is damaged: {damaged}: name another out, or remove that folder "
                "to start again"
            )
        return state, 0

    def read(self, step: int, state, sharding: NamedSharding):
        """Return the state of one checkpoint. Raises DamagedCheckpoint, or ValueError if it is of another run
        or model."""
        arrays = by_name(state)
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
        wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in arrays.items()}
        found = attempted(self.manager.restore, step, args=ocp.args.StandardRestore(wanted))
        if digest(found) != written["sha256"]:
            raise DamagedCheckpoint("its numbers are not those that were saved")
        return jax.tree.structure(state).unflatten([found[name] for name in wanted])


def attempted(call, *args, **options):
    """Return call(*args, **options). Raises DamagedCheckpoint for what orbax raises, unless the machine refused to read or has
    no memory."""
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
    """Discard the reads and writes of arrays that orbax gave up. Python would report the error of each later."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook

"""Read the text of the demo, split it into training and held-out parts, and cut windows from it."""

import dataclasses
import stat
import sysconfig
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from glax._src.core.files import KINDS

LIBRARY_BYTES = 4_000_000
HELD_OUT = 0.05


class TextError(ValueError):
    """The text cannot be read, or is too short."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Hold a text in two parts. train: all but the last 5%. held_out: the last 5%, cut into windows with one byte more than is
    predicted."""

    name: str
    train: UInt8[np.ndarray, "bytes"]
    held_out: UInt8[np.ndarray, "windows length+1"]


def library_text(limit: int = LIBRARY_BYTES) -> bytes:
    """Return the modules of Python's standard library, one after another by name, until `limit` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    if not text:
        raise TextError(f"no Python sources in {folder}: name a text with --text")
    return text[:limit]


def read_text(path: Path | None, length: int) -> Text:
    """Return the file, or the standard library if path is None, split for windows of `length` predicted bytes."""
    kind = None if path is None or not path.exists() else KINDS.get(stat.filemode(path.stat().st_mode)[0])
    if kind not in (None, "a directory"):  # a device may have no end, and a FIFO no writer; reading a directory fails
        raise TextError(f"cannot read the text {path}: it is {kind}: name a file")
    try:
        raw = library_text() if path is None else path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read the text {error.filename}: {error.strerror}") from None
    return split(raw, length, name="Python's standard library" if path is None else path.name)


def split(raw: bytes, length: int, name: str) -> Text:
    window = length + 1
    windows = int(len(raw) * HELD_OUT) // window
    if windows < 1:
        needed = int(np.ceil(window / HELD_OUT))
        raise TextError(f"the text {name} is too short: {len(raw)} bytes, windows of {length} need {needed}")
    data = np.frombuffer(raw, np.uint8)
    cut = len(data) - windows * window
    return Text(name, data[:cut], data[cut:].reshape(windows, window))


def random_windows(train: UInt8[np.ndarray, "bytes"], batch: int, length: int, rng: np.random.Generator):
    """Return windows at random positions of the text, [batch, length + 1] bytes."""
    first = rng.integers(0, len(train) - length, batch)
    return train[first[:, None] + np.arange(length + 1)]

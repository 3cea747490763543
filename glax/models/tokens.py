"""Convert text to tokens and back, by a file of the package `tokenizers` or as bytes."""

import hashlib
import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from glax._src.core.files import newest, read_regular

TOKENIZER = "tokenizer.json"
BYTES = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Convert text to tokens and back.

    vocabulary: one more than the largest token. source, sha256: the file and the digest of its content; "bytes" and "" for
    `Bytes`.
    """

    vocabulary: int
    source: str
    sha256: str

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Bytes:
    """Take each byte of the UTF-8 text as a token. Bytes that the command line could not decode stand for themselves."""

    vocabulary, source, sha256 = BYTES, "bytes", ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < BYTES).decode("utf-8", "replace")


class FromFile:
    """Read a tokenizer.json by the package `tokenizers`.

    What the file holds for training or for batches has no effect: truncation, padding and the random dropout of merges. The
    special tokens that its template places before the text are added, and those behind the text are not, because a
    continuation follows. Special tokens are left out of decoded text, unless
    skip_special_tokens is false.
    """

    def __init__(self, path: Path):
        if importlib.util.find_spec("tokenizers") is None:
            raise ValueError(f"{path} needs the package tokenizers: pip install tokenizers")
        import tokenizers

        _, raw = read_regular(path)
        self.source, self.sha256 = str(path), hashlib.sha256(raw).hexdigest()
        try:
            self.inner = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the package raises the class Exception itself
            raise ValueError(f"{path} holds no tokenizer: {error}") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        if getattr(self.inner.model, "dropout", None):
            self.inner.model.dropout = None
        # The ids may have gaps, and those of the template need not be in the vocabulary.
        ids = self.inner.get_vocab(with_added_tokens=True)
        self.vocabulary = 1 + max([*ids.values(), *self.inner.encode("").ids], default=-1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of the text. Raises ValueError for text that UTF-8 cannot hold.

        add_special_tokens: whether the special tokens of the file's template are placed before the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be UTF-8, got {text!r:.80}: remove {error.object[error.start]!r}") from None
        found = self.inner.encode(text, add_special_tokens=add_special_tokens)
        added, end = found.special_tokens_mask, len(found.ids)
        while add_special_tokens and end and added[end - 1]:
            end -= 1
        return found.ids[:end]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens)


def find_tokenizer(folder: Path | None, vocabulary: int, file: Path | None = None) -> Tokenizer:
    """Return the tokenizer of `file`, else of the tokenizer.json in `folder`, else `Bytes` if the vocabulary has 256 tokens.

    Raises ValueError if there is none, or if it has a token that the model's vocabulary lacks. Raises OSError if the file cannot
    be read.
    """
    if file is None and folder is not None and os.path.lexists(newest(folder, TOKENIZER)):
        file = newest(folder, TOKENIZER)
    if file is not None:
        found = FromFile(file)
    elif vocabulary == BYTES:
        found = Bytes()
    else:
        raise ValueError(
            f"no {TOKENIZER} in {folder}, and a vocabulary of {vocabulary} is not bytes: name a tokenizer file"
        )
    if found.vocabulary > vocabulary:
        raise ValueError(
            f"{file} has the token {found.vocabulary - 1}, beyond the model's vocabulary of {vocabulary}: name another file, or "
            f"train a model with vocab_size={found.vocabulary}"
        )
    return found


def read_tokens(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a text file, int32 [n]. `Bytes` does not decode the text.

    Warns of bytes that are no UTF-8, and reads them as replacement characters. Raises OSError if the file cannot be read, for
    a FIFO and a device too.
    """
    _, raw = read_regular(path)
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(raw, np.uint8).astype(np.int32)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        warnings.warn(f"{path} is no UTF-8 at byte {error.start}: what is not is read as {REPLACEMENT!r}", stacklevel=2)
        text = raw.decode("utf-8", "replace")
    return np.asarray(tokenizer.encode(text), np.int32)

"""Convert text to tokens and back, by a file of the package `tokenizers` or as bytes."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

TOKENIZER = "tokenizer.json"
BYTES = 256


class Tokenizer(Protocol):
    vocabulary: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Take each byte of the UTF-8 text as a token."""

    vocabulary = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BYTES).decode("utf-8", "replace")


class FromFile:
    """Read a tokenizer.json by the package `tokenizers`. Special tokens are added to the tokens and left out of decoded text."""

    def __init__(self, path: Path):
        if importlib.util.find_spec("tokenizers") is None:
            raise ValueError(f'{path} needs the package tokenizers: pip install "glax[models]"')
        import tokenizers

        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises the class Exception itself
            raise ValueError(f"{path} holds no tokenizer: {error}") from None
        self.vocabulary = self.inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in tokens])


def find_tokenizer(folder: Path | None, vocabulary: int, file: Path | None = None) -> Tokenizer:
    """Return the tokenizer of `file`, else of the tokenizer.json in `folder`, else `Bytes` if the vocabulary has 256 tokens.

    Raises ValueError if there is none, or if it has more tokens than the model.
    """
    if file is None and folder is not None and (folder / TOKENIZER).is_file():
        file = folder / TOKENIZER
    if file is not None:
        found = FromFile(file)
    elif vocabulary == BYTES:
        found = Bytes()
    else:
        raise ValueError(
            f"no {TOKENIZER} in {folder}, and a vocabulary of {vocabulary} is not bytes: name a tokenizer file"
        )
    if found.vocabulary > vocabulary:
        raise ValueError(f"{file} has {found.vocabulary} tokens, more than the model's vocabulary of {vocabulary}")
    return found


def read_tokens(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a text file, int32 [n]. `Bytes` does not decode the text."""
    raw = path.read_bytes()
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(raw, np.uint8).astype(np.int32)
    return np.asarray(tokenizer.encode(raw.decode("utf-8", "replace")), np.int32)

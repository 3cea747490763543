"""Turn the tokens of an answer into text as they come: whole characters, up to the first stop text."""

import json
import re
from collections.abc import Sequence

from glax.models.sampling import before_stop
from glax.models.tokens import REPLACEMENT, Bytes, Tokenizer

WINDOW = 6  # tokens that are decoded again with the next
MOST_WINDOW = 48  # tokens that are decoded again, at the most, where none of them ends a character
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token that is a byte
UNFINISHED = 3  # bytes of a character that lacks its last


class TextStream:
    """Decode tokens one by one. The pieces together are the text of all tokens, as decoded behind the tokens `before`.

    A character whose bytes are in several tokens comes with the last of them. before: tokens of the prompt's end, on which the
    first token's text may depend, as a leading space does.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.window = list(before[-WINDOW:])
        text = tokenizer.decode(self.window)
        if text.endswith(REPLACEMENT):  # perhaps amid a character
            self.window, text = [], ""
        self.shown = len(text)
        self.ends: list[int] = []  # places in the window where a character ends

    def push(self, token: int) -> str:
        """Return the text that becomes certain with one more token."""
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        # Where bytes are tokens of their own, those that make no character yet spoil the characters before them, too.
        most = UNFINISHED if len(self.window) > MOST_WINDOW else len(text)
        open_characters = min(len(text) - len(text.rstrip(REPLACEMENT)), most)
        end = max(len(text) - open_characters, self.shown)
        piece, self.shown = text[self.shown : end], end
        if not open_characters:
            self.ends.append(len(self.window))
        if len(self.window) > 2 * WINDOW:
            self.forget(text[end:])
        return piece

    def forget(self, rest: str):
        """Drop the oldest tokens up to the end of a character, unless `rest`, the text not shown yet, depends on them."""
        last = len(self.window) - WINDOW
        cut = max((end for end in self.ends if end <= last), default=last if last > MOST_WINDOW else 0)
        text = self.tokenizer.decode(self.window[cut:])
        if cut and len(text) > len(rest) and text.endswith(rest):
            self.window, self.shown = self.window[cut:], len(text) - len(rest)
            self.ends = [end - cut for end in self.ends if end > cut]

    def finish(self) -> str:
        """Return the text that is left: replacement characters for a character that lacks bytes."""
        text = self.tokenizer.decode(self.window)
        piece, self.shown = text[self.shown :], max(len(text), self.shown)
        return piece


class StopFinder:
    """Find the first of `stops` in a text that comes in pieces, and hold back text that may begin one. found: whether one was
    found."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.found = tuple(stops), "", False

    def push(self, text: str, *, is_whole: bool = False) -> str:
        """Append `text`, and return the text that can be shown: all held-back text before a stop, or before an end that may
        begin one.

        is_whole: whether no text follows, so that nothing need be held back.
        """
        if self.found:
            return ""
        self.held += text
        piece = before_stop(self.held, self.stops, is_whole=is_whole)
        self.found = any(stop in self.held for stop in self.stops)
        self.held = self.held[len(piece) :]
        return piece


class TokenBytes:
    """Provide the bytes of each token, which need not be whole characters.

    special: {text: token} of the special tokens. added: {token: text} of the tokens that the tokenizer has beyond its
    vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.inner = None if isinstance(tokenizer, Bytes) else tokenizer.inner  # pyright: ignore[reportAttributeAccessIssue]
        self.added, self.special, self.is_byte_level, self.has_spaces = {}, {}, False, False
        if self.inner is not None:
            decoder = self.inner.get_added_tokens_decoder()
            self.added = {token: added.content for token, added in decoder.items()}
            self.special = {added.content: token for token, added in decoder.items() if added.special}
            content = json.loads(self.inner.to_str())
            kinds = {part.get("type") for part in parts(content.get("decoder"))}
            self.is_byte_level = "ByteLevel" in kinds
            self.has_spaces = bool(kinds & {"Metaspace", "Replace"})

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for one that the tokenizer does not have."""
        if self.inner is None:
            return bytes([token]) if token < Bytes.vocabulary else b""
        if token in self.added:
            return self.added[token].encode()
        piece = self.inner.id_to_token(token)
        if piece is None:
            return b""
        if self.is_byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if byte := BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return (piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ") if self.has_spaces else piece).encode()


def parts(decoder: dict | None):
    """Yield the parts of a decoder in a tokenizer.json: the decoder itself, and those that a sequence consists of, at any
    depth."""
    if decoder is not None:
        yield decoder
        for each in decoder.get("decoders", ()):
            yield from parts(each)


def byte_characters() -> dict[str, int]:
    """Return {character: byte} of byte-level tokens. Printable bytes stand for themselves; the others are the characters from
    256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_characters()

"""Write the answers of OpenAI's interface: the text of each sample as it comes, and the objects around it."""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from glax.server.protocol import Call, Served, finite
from glax.server.request import Event, Finished, Token
from glax.server.text import StopFinder, TextStream

Content = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Hold a token for `logprobs`, and the offset in the answer at which its text begins."""

    token: Token
    offset: int


class Sample:
    """Turn the events of one request into text.

    reason: "stop" or "length" once the answer has ended, or why there is none: "cancelled", "timeout" or "error". is_over:
    whether the request's last event has come. tokens: the number of tokens of the answer, the end token included.
    """

    def __init__(self, served: Served, call: Call, index: int):
        self.ends = call.requests[index].ends or frozenset()
        self.has_logprobs = call.logprobs is not None
        self.stream = TextStream(served.tokenizer, call.context[index])
        self.finder = StopFinder(call.stops)
        self.reason, self.message, self.is_over = "", "", False
        self.tokens, self.cached_tokens = 0, 0
        self.decoded, self.written = 0, 0  # characters that were decoded, and those that were returned
        self.waiting: list[Entry] = []

    def push(self, event: Event) -> tuple[str, list[Entry]]:
        """Return (the text that an event adds, the entries of its tokens if logprobs are asked for)."""
        if isinstance(event, Finished):
            self.is_over, self.cached_tokens = True, event.cached_tokens
            if self.reason:
                return "", []
            self.reason, self.message = event.reason, event.message
            return self.taken(self.finder.push(self.stream.finish(), is_whole=True), is_whole=True)
        if self.reason:  # the scheduler was ahead of a stop text
            return "", []
        self.tokens += 1
        if event.token in self.ends:
            return "", []
        if self.has_logprobs:
            self.waiting.append(Entry(event, self.decoded))
        text = self.stream.push(event.token)
        self.decoded += len(text)
        piece = self.finder.push(text)
        if self.finder.found:
            self.reason = "stop"
        return self.taken(piece)

    def taken(self, piece: str, is_whole: bool = False) -> tuple[str, list[Entry]]:
        """Return (piece, the waiting entries whose tokens begin before the end of `piece`). is_whole: whether it is the last
        piece, which takes all entries."""
        self.written += len(piece)
        is_whole = is_whole and not self.finder.found
        entries = [entry for entry in self.waiting if is_whole or entry.offset < self.written]
        self.waiting = self.waiting[len(entries) :]
        return piece, entries


class Writer:
    """Build the JSON objects of one call's answer, in the form of chats or of completions."""

    def __init__(self, served: Served, call: Call):
        self.served, self.call = served, call
        self.id = f"{'chatcmpl' if call.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, samples: Iterable[Sample], texts: Iterable[str], entries: Iterable[list[Entry]]) -> Content:
        """Return the answer as one object."""
        samples = list(samples)
        choices = []
        for i, (sample, text, found) in enumerate(zip(samples, texts, entries, strict=True)):
            content = (
                dict(message=dict(role="assistant", content=text, refusal=None))
                if self.call.is_chat
                else dict(text=text)
            )
            choices.append(dict(index=i, **content, logprobs=self.logprobs(found), finish_reason=sample.reason))
        return self.around(choices, "chat.completion" if self.call.is_chat else "text_completion") | dict(
            usage=self.usage(samples)
        )

    def first(self, index: int) -> Content:
        """Return the object that begins a streamed answer of a chat."""
        return self.chunk([self.choice(index, dict(role="assistant", content=""))])

    def piece(self, index: int, text: str, entries: list[Entry], reason: str | None = None) -> Content:
        """Return the object of a piece of a streamed answer. reason: why the answer ends with it."""
        content = dict(content=text) if text or not reason else {}
        return self.chunk([self.choice(index, content if self.call.is_chat else text, entries, reason)])

    def choice(
        self, index: int, content: Any, entries: list[Entry] | None = None, reason: str | None = None
    ) -> Content:
        """Return one entry of `choices` in a piece of a streamed answer. index: its number. content: a chat's delta, or a
        text."""
        name = "delta" if self.call.is_chat else "text"
        return {"index": index, name: content, "logprobs": self.logprobs(entries), "finish_reason": reason}

    def chunk(self, choices: list[Content]) -> Content:
        """Return the object of a streamed answer that has these choices."""
        content = self.around(choices, "chat.completion.chunk" if self.call.is_chat else "text_completion")
        return content | dict(usage=None) if self.call.include_usage else content

    def last(self, samples: Iterable[Sample]) -> Content:
        """Return the object with the usage, which ends a streamed answer."""
        return self.chunk([]) | dict(usage=self.usage(samples))

    def around(self, choices: list[Content], kind: str) -> Content:
        """Return the object that has these choices. kind: its "object", such as "chat.completion"."""
        return dict(id=self.id, object=kind, created=self.created, model=self.served.name, choices=choices)

    def usage(self, samples: Iterable[Sample]) -> Content:
        """Return the numbers of tokens of the call: of its prompts, each counted once, and of its answers."""
        samples = list(samples)
        written = sum(sample.tokens for sample in samples)
        firsts = samples[:: self.call.samples]  # a prompt counts once, however many samples it has
        return dict(
            prompt_tokens=self.call.prompt_tokens,
            completion_tokens=written,
            total_tokens=self.call.prompt_tokens + written,
            prompt_tokens_details=dict(cached_tokens=sum(sample.cached_tokens for sample in firsts)),
        )

    def logprobs(self, entries: list[Entry] | None) -> Content | None:
        """Return the tokens with their logprobs, in the shape of chats or of completions."""
        if self.call.logprobs is None or entries is None:
            return None
        if self.call.is_chat:
            return dict(content=[self.chat_entry(entry.token) for entry in entries], refusal=None)
        texts = [self.text_of(entry.token.token) for entry in entries]
        return dict(
            tokens=texts,
            token_logprobs=[finite(entry.token.logprob or 0.0) for entry in entries],
            top_logprobs=[self.likeliest(entry.token) for entry in entries] if self.call.logprobs else None,
            text_offset=[entry.offset for entry in entries],
        )

    def likeliest(self, token: Token) -> Mapping[str, float]:
        """Return {text: logprob} of the likeliest tokens, and of the token itself."""
        found = [*token.likeliest, (token.token, token.logprob or 0.0)]
        return {self.text_of(other): finite(logprob) for other, logprob in found}

    def chat_entry(self, token: Token) -> Content:
        """Return a token as an entry of a chat's logprobs, with its likeliest tokens."""
        likeliest = [self.named(other, logprob) for other, logprob in token.likeliest]
        return self.named(token.token, token.logprob or 0.0) | dict(top_logprobs=likeliest)

    def named(self, token: int, logprob: float) -> Content:
        """Return a token with its text, logprob and bytes, as a chat's logprobs have it."""
        raw = self.served.token_bytes.of(token)
        return dict(token=raw.decode(errors="replace"), logprob=finite(logprob), bytes=list(raw))

    def text_of(self, token: int) -> str:
        r"""Return a token's text. Bytes that are no characters are written as "bytes:\x..", so that different tokens have
        different texts."""
        raw = self.served.token_bytes.of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""Define what a request asks for, the events that its consumer receives, and why a request is refused."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
GREEDY = 1e-5  # below this temperature quotients of logits may overflow
SEEDS = 2**63  # seeds are integers of 64 bits
LARGEST_TOKEN = 2**63 - 1  # of an array
MOST_LOGPROBS = 20  # the most likeliest tokens that a request may ask for, as in OpenAI's interface


class QueueFull(Exception):
    """Say that as many requests wait as the scheduler's `queue` permits. `Scheduler.submit` raises it; try again later."""


class Stopped(Exception):
    """Say that the scheduler takes no more requests, after `Scheduler.stop`. `Scheduler.submit` raises it."""


@dataclasses.dataclass(frozen=True)
class Token:
    """Hold the next token of a request, as an event of `Scheduler.submit`.

    token: its number.
    logprob: log softmax(logits) at the token, of the model's own distribution; None unless the request asked for it.
    likeliest: the likeliest tokens with their logprobs, as many as the request asked for, the likeliest first.

    >>> glax.server.Token(7)
    Token(token=7, logprob=None, likeliest=())
    """

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Finished:
    """Say that a request has ended. It is the last event of every request.

    reason: "stop" after an end token, "length" after max_tokens, "cancelled", "timeout", or "error", which `message` explains;
        message is else empty.
    cached_tokens: the tokens of the prompt that were not read, because a stored prefix has them.

    >>> glax.server.Finished("length")
    Finished(reason='length', message='', cached_tokens=0)
    """

    reason: str
    message: str = ""
    cached_tokens: int = 0


Event = Token | Finished


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """Ask a `Scheduler` for at most max_tokens tokens that continue a prompt.

    prompt:             at least one token: a list, a tuple, bytes, or an array of integers. The request holds an array of int64.
    max_tokens:         at least 0.
    temperature:        0, and anything below 1e-5, takes the likeliest token, whatever top_k and top_p are. Otherwise a token is
                        drawn from softmax(logits / temperature).
    top_k:              draw among the k likeliest tokens; 0 for no limit.
    top_p:              draw among the likeliest tokens that together have this probability, at least one; 1 for no limit.
    seed:               of the draws, an integer of 64 bits. Equal requests with equal seeds have equal answers. If None, the
                        scheduler draws one.
    repetition_penalty: a logit of a token that the prompt or the answer holds is divided by it if it is above 0, and multiplied
                        by it otherwise; 1 for no penalty.
    presence_penalty:   is subtracted from the logits of tokens that the answer holds.
    frequency_penalty:  is subtracted from the logit of a token once for each time that the answer holds it.
    logprobs:           how many of the likeliest tokens `Token.likeliest` holds, 0 to 20. If None, `Token.logprob` is None too.
    ends:               the tokens that end the answer; those of the scheduler if None.
    deadline:           in seconds from its submission; then the request ends with "timeout". None for none.

    Raises ValueError, which names the field.

    >>> glax.server.Request([1, 2, 3], max_tokens=5, temperature=0.7, seed=1).prompt
    array([1, 2, 3])
    """

    prompt: Sequence[int] | np.ndarray
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    ends: frozenset[int] | None = None
    deadline: float | None = None

    def __post_init__(self):
        self.check_integer("max_tokens", 0)
        self.check_integer("top_k", 0)
        if self.seed is not None:
            self.check_integer("seed", -SEEDS, SEEDS - 1)
        if self.logprobs is not None:
            self.check_integer("logprobs", 0, MOST_LOGPROBS)
        self.check_number("temperature", is_number(self.temperature) and self.temperature >= 0, "of at least 0")
        self.check_number("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        is_positive = is_number(self.repetition_penalty) and float(np.float32(self.repetition_penalty)) > 0
        self.check_number("repetition_penalty", is_positive, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self.check_number(name, is_number(getattr(self, name)), "that is finite")
        if self.deadline is not None:
            self.check_number("deadline", is_number(self.deadline) and self.deadline > 0, "of seconds above 0")
        if isinstance(self.prompt, str) or not hasattr(self.prompt, "__len__") or not len(self.prompt):
            raise ValueError(f"prompt must be a sequence of at least one token, got {self.prompt!r:.80}")
        as_tokens("ends", self.ends or ())
        object.__setattr__(self, "prompt", as_tokens("prompt", self.prompt))

    def check_integer(self, name: str, least: int, most: int | None = None):
        value = getattr(self, name)
        if not is_integer(value) or value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} must be an integer {limits}, got {value!r:.80}")

    def check_number(self, name: str, is_right: bool, wanted: str):
        if not is_right:
            raise ValueError(f"{name} must be a number {wanted}, got {getattr(self, name)!r:.80}")

    def check_tokens(self, vocabulary: int):
        """Raise ValueError unless all tokens are below `vocabulary`."""
        for name, largest in (("prompt", np.max(self.prompt)), ("ends", max(self.ends or (), default=0))):
            if largest >= vocabulary:
                raise ValueError(f"{name} must hold tokens from 0 to {vocabulary - 1}, got {largest!s:.80}")


def as_tokens(name: str, tokens: Iterable) -> np.ndarray:
    """Return tokens as an array [T] of int64. Raises ValueError, which shows the first that is no integer of at least 0.

    A prompt may have a hundred thousand tokens, and other calls wait for Python's lock meanwhile. So no Python code runs for
    each token.
    """
    if not (isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu" and tokens.ndim == 1):
        tokens = list(tokens)
        if not all(kind is not bool and issubclass(kind, int | np.integer) for kind in set(map(type, tokens))):
            raise ValueError(wrong_token(name, next(token for token in tokens if not is_integer(token))))
    least, most = (np.min, np.max) if isinstance(tokens, np.ndarray) else (min, max)
    if len(tokens) and least(tokens) < 0:
        raise ValueError(wrong_token(name, next(token for token in tokens if token < 0)))
    if len(tokens) and most(tokens) > LARGEST_TOKEN:
        raise ValueError(f"{name} must hold tokens below 2**63, got {most(tokens)!s:.80}")
    return np.array(tokens, np.int64)


def wrong_token(name: str, token) -> str:
    return f"{name} must hold tokens, integers of at least 0, got {token!r:.80}"


def is_integer(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value) -> bool:
    """Return whether a value is a real number that is finite in float32."""
    return (is_integer(value) or isinstance(value, float | np.floating)) and bool(abs(value) <= LARGEST)

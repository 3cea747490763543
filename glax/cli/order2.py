"""Provide the baseline of the demo: counts of the byte that follows two bytes."""

import numpy as np
from jaxtyping import Float, Int, UInt8

BYTES = 256

Bytes = UInt8[np.ndarray, "n"]


def counts(text: Bytes, order: int) -> Int[np.ndarray, "..."]:
    """Return how often each sequence of `order` bytes occurs in the text, [256, ..., 256]."""
    code = np.zeros(len(text) - order + 1, np.int64)
    for i in range(order):
        code = code * BYTES + text[i : i + len(code)]
    return np.bincount(code, minlength=BYTES**order).reshape((BYTES,) * order)


def probabilities(train: Bytes, text: Bytes) -> Float[np.ndarray, "n-2"]:
    """Return p(c | a b) for each byte c of the text behind its first two, from the counts n() of the training text:

        p(c | a b) = (n(abc) + d(ab) p(c | b)) / (n(ab) + d(ab))

    d(ab) is the number of different bytes that follow ab. p(c | b) is formed likewise from p(c), and p(c) from 1 / 256. A
    context that was never seen leaves the probability of the shorter one. Witten and Bell 1991, method C,
    https://doi.org/10.1109/18.87000.
    """
    a, b, c = text[:-2], text[1:-1], text[2:]
    p = np.full(len(c), 1 / BYTES)
    for context in ((), (b,), (a, b)):
        seen = counts(train, len(context) + 1)
        total, different = seen.sum(-1)[context], (seen > 0).sum(-1)[context]
        p = np.where(total > 0, (seen[*context, c] + different * p) / np.maximum(total + different, 1), p)
    return p


def bits_per_byte(train: Bytes, windows: UInt8[np.ndarray, "windows length+1"]) -> float:
    """Return the mean of -log2 p(c | a b), of each byte c behind bytes a b, over all bytes of the windows but the first of each.

    The windows follow one another, and the first follows the training text.
    """
    p = probabilities(train, np.concatenate([train[-2:], windows.ravel()]))
    return float(-np.log2(p).reshape(windows.shape)[:, 1:].mean())

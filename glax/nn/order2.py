"""Provide the baseline of the demo: counts of the byte that follows two bytes, interpolated with shorter contexts."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int, UInt8

BYTES = 256
BUCKETS = 24  # buckets of contexts, by log2 of how often a context was seen
FITTED_ON = 0.1
ITERATIONS = 20

Bytes = UInt8[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Order2:
    """Model p(c | a b) = w_0 / 256 + w_1 n(c) / n + w_2 n(bc) / n(b) + w_3 n(abc) / n(ab)

    n() counts in the training text. The weights w depend on how often ab was seen. For a context that was never seen, the ratio
    of the next shorter context is used. Jelinek and Mercer 1980: interpolated estimation of Markov source parameters from
    sparse data.
    """

    single: Int[np.ndarray, "256"]
    pair: Int[np.ndarray, "256 256"]
    triple: Int[np.ndarray, "256 256 256"]
    weights: Float[np.ndarray, "buckets 4"]

    @classmethod
    def count(cls, text: Bytes) -> "Order2":
        """Return the counts of the text, with equal weights."""
        wide = text.astype(np.int32)
        codes = wide, wide[:-1] * BYTES + wide[1:], (wide[:-2] * BYTES + wide[1:-1]) * BYTES + wide[2:]
        counts = (
            np.bincount(code, minlength=BYTES**order).astype(np.int32).reshape((BYTES,) * order)
            for order, code in enumerate(codes, start=1)
        )
        return cls(*counts, weights=np.full((BUCKETS, 4), 0.25))

    def probability(self, a: Bytes, b: Bytes, c: Bytes) -> Float[np.ndarray, "n"]:
        """Return p(c | a b) for each entry of the arrays a, b, c."""
        return (self.weights[self.buckets(a, b)] * self.ratios(a, b, c)).sum(-1)

    def bits_per_byte(self, text: Bytes, scored: slice | np.ndarray = slice(None)) -> float:
        """Return the mean of -log2 p over the bytes text[2:][scored], each predicted from the two bytes before it."""
        return float(-np.log2(self.probability(text[:-2], text[1:-1], text[2:])[scored]).mean())

    def buckets(self, a: Bytes, b: Bytes) -> Int[np.ndarray, "n"]:
        seen = self.triple.sum(-1)[a, b]
        return np.minimum(np.ceil(np.log2(seen + 1)).astype(int), BUCKETS - 1)

    def ratios(self, a: Bytes, b: Bytes, c: Bytes) -> Float[np.ndarray, "n 4"]:
        def ratio(count, total, shorter):
            return np.where(total > 0, count / np.maximum(total, 1), shorter)

        uniform = np.full(len(c), 1 / BYTES)
        after_none = ratio(self.single[c], self.single.sum(), uniform)
        after_one = ratio(self.pair[b, c], self.pair.sum(-1)[b], after_none)
        after_two = ratio(self.triple[a, b, c], self.triple.sum(-1)[a, b], after_one)
        return np.stack([uniform, after_none, after_one, after_two], -1)


def fit(text: Bytes) -> Order2:
    """Return the counts of the text with fitted weights. The weights predict the last tenth of the text best by the counts of
    the rest."""
    cut = len(text) - max(int(len(text) * FITTED_ON), 3)
    return dataclasses.replace(Order2.count(text), weights=fit_weights(Order2.count(text[:cut]), text[cut:]))


def fit_weights(model: Order2, text: Bytes) -> Float[np.ndarray, "buckets 4"]:
    """Return weights fitted by expectation maximisation: each step sets a weight to the mean share of its ratio in predicting
    the bytes of its bucket."""
    a, b, c = text[:-2], text[1:-1], text[2:]
    ratios, buckets = model.ratios(a, b, c), model.buckets(a, b)
    weights = model.weights
    for _ in range(ITERATIONS):
        shares = weights[buckets] * ratios
        shares /= shares.sum(-1, keepdims=True)
        # Each weight gets one share more, so that no weight is 0 and no byte is impossible.
        totals = 1 + np.stack([np.bincount(buckets, column, BUCKETS) for column in shares.T], -1)
        weights = totals / totals.sum(-1, keepdims=True)
    return weights

"""Steps of softmax attention over caches, and their outputs by sums in NumPy."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.kernels.common.softmax import StepOperands
from glax._src.kernels.triton.softmax_config import SoftmaxStepConfig

SLOTS = (3, 0, 6, 2)  # of a pool of 6: the third is no row


ONE, PARTS = SoftmaxStepConfig(keys=16), SoftmaxStepConfig(keys=16, parts=3)


@dataclasses.dataclass(frozen=True)
class Step:
    """Shapes of a step. within: whether values are the first V channels of the keys."""

    heads: tuple[int, int] = (2, 1)
    S: int = 100
    D: int = 16
    V: int = 16
    last: tuple[int, ...] = (37, 0, 50, 99)
    window: int | None = None
    slots: tuple[int, ...] | None = SLOTS
    within: bool = False
    dtype: str = "float32"
    stored: str | None = None
    config: SoftmaxStepConfig = ONE

    @property
    def bound(self) -> float:
        return dict(float32=3e-6, float16=2e-3, bfloat16=2e-2)[self.dtype]

    def operands(self) -> StepOperands:
        draw, (Hq, Hk), B = np.random.default_rng(0), self.heads, len(self.last)
        P = B if self.slots is None else 6
        q, k, v = (
            draw.standard_normal(x) for x in ((B, 1, Hq, self.D), (P, self.S, Hk, self.D), (P, self.S, Hk, self.V))
        )
        last = np.array(self.last, np.int32)[:, None]
        first = np.zeros_like(last) if self.window is None else np.maximum(last - self.window + 1, 0)
        q, (k, v) = jnp.asarray(q, self.dtype), (jnp.asarray(x, self.stored or self.dtype) for x in (k, v))
        slots = None if self.slots is None else jnp.asarray(self.slots, jnp.int32)
        return StepOperands(q, k, None if self.within else v, jnp.asarray(first), jnp.asarray(last), slots)

    def wanted(self, scale: float) -> np.ndarray:
        """Return o [B, Hq, V] by sums in float64."""
        q, k, v, first, last, slots = cast(tuple[Any, ...], jax.tree.map(np.asarray, self.operands()))
        q, k = q.astype(np.float64), k.astype(np.float64)
        v = k[..., : self.V] if v is None else v.astype(np.float64)
        o, group = np.zeros((*q.shape[0:3:2], self.V)), self.heads[0] // self.heads[1]
        for b, slot in enumerate(range(len(q)) if slots is None else slots):
            seen = slice(first[b, 0], last[b, 0] + 1)
            for h in range(self.heads[0] if slot < len(k) else 0):
                scores = k[slot, seen, h // group] @ q[b, 0, h] * scale
                weights = np.exp(scores - scores.max(initial=-np.inf))
                o[b, h] = weights @ v[slot, seen, h // group] / max(weights.sum(), 1e-300)
        return o


CASES = {
    "one part": Step(),
    "parts": Step(config=PARTS),
    "more parts than keys": Step(last=(3, 0, 50, 20), config=SoftmaxStepConfig(keys=16, parts=7)),
    "no keys": Step(last=(-1, 5, 50, -1), config=PARTS),
    "whole blocks": Step(last=(31, 15, 47, 95), config=PARTS),
    "window": Step(window=21, config=PARTS),
    "in order": Step(slots=None, heads=(4, 4)),
    "groups": Step(heads=(6, 2), config=PARTS),
    "more heads than rows": Step(heads=(40, 2), config=SoftmaxStepConfig(keys=16, rows=16, parts=2)),
    "D24V40": Step(D=24, V=40),
    "D40V24": Step(D=40, V=24, config=PARTS),
    "bfloat16": Step(dtype="bfloat16", heads=(4, 2), config=PARTS),
    "stored in bfloat16": Step(stored="bfloat16"),
    "float16": Step(dtype="float16"),
    "within": Step(D=40, V=32, heads=(4, 1), within=True, dtype="bfloat16", config=PARTS),
    "within, padded": Step(D=30, V=24, heads=(20, 1), within=True, dtype="float16"),
    "within, nothing else": Step(D=32, V=32, within=True, dtype="bfloat16"),
}

"""Scan sequences under the delta rule that are cut into segments, and find the states that enter segments."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.scan.delta_refs import STRIPE


@dataclasses.dataclass(frozen=True)
class SegmentedScan(abc.ABC):
    """Hold a layout whose segments `scan_segments` scans in parallel. Its results have the field `last`, as those of
    `delta_scan` do."""

    layout: KernelLayout

    @abc.abstractmethod
    def scan_segments(self, kind, start) -> Any:
        """Scan every segment. kind: `DeltaScan.kind`. start: the states that enter them, [E, H, V, K], or None for zeros."""

    def scan(self, kind, start) -> Any:
        """Run the scan over every sequence. kind: `DeltaScan.kind`. start: states [N, H, K, V], or None for zeros.

        Sequences that are cut into segments are scanned twice: first for the states that enter the segments, and then from them.
        """
        p, filled = self.layout, self.layout.start(start)
        filled = None if filled is None else jnp.swapaxes(filled, 2, 3)
        if p.parts == 1:
            return self.scan_segments(kind, filled)
        entering, last = self.entering(kind == "adjoint", filled)
        return self.scan_segments(kind, entering)._replace(last=last)

    def entering(self, adjoint: bool, start):
        """Return the states that enter segments, [E, H, V, K], and those that leave sequences, [N, H, V, K]. adjoint: whether
        these are gradients, and the scan is against time."""
        p = self.layout
        # [N, parts, H, V + K, K] and [N, parts, H, V, K]
        found = self.by_segment(self.scan_segments("transitions", None))
        own = self.by_segment(self.scan_segments("adjoint ends", None)) if adjoint else found[:, :, :, : p.V]
        S = jnp.zeros_like(own[:, 0]) if start is None else start
        through = "nhvk,nhck->nhvc" if adjoint else "nhvc,nhck->nhvk"  # S^T M^T forward; dS^T M for the adjoint
        entering = [S] * p.parts
        for part in range(p.parts)[:: -1 if p.descending(adjoint) else 1]:
            entering[part] = S
            S = own[:, part] + jnp.einsum(through, S, found[:, part, :, p.V :], precision="highest")
        return jnp.stack(entering, 1).reshape(-1, *S.shape[1:]), S

    def by_segment(self, found: Any):
        """Return the last states of segments, by sequence and segment: [N, parts, H, V, K], or with M [N, parts, H, V + K, K]."""
        return found.last.reshape(self.layout.N, self.layout.parts, *found.last.shape[1:])

    def last(self, found: Any):
        """Return the states behind sequences, [N, H, K, V] of r."""
        return self.layout.narrow(jnp.swapaxes(found.last, 2, 3))

    def by_row(self, x):
        """Return x [B, chunks, H, C] in the rows of r, [B, T, H]."""
        return self.layout.rows.put(jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2]))

    def by_sequence(self, x):
        """Return the sums over the tokens of every sequence, [N, H], of x [B, chunks, H, C]."""
        p = self.layout
        x = jnp.where(p.is_token[:, None], x, 0).sum(3)
        return p.by_sequence(x if p.rows.begins is None else jnp.swapaxes(x, 0, 1))


def refuse_columns(config: HopperConfig):
    """Raise ValueError if the config has 128 columns."""
    if config.columns != STRIPE:
        raise ValueError(
            f"columns must be {STRIPE} with beta, for the kernels of the delta rule have no others; got {config.columns}: "
            f"pass cfg=HopperConfig(parts={config.parts})"
        )


def in_chunks(x) -> jax.Array:
    """Return x [B, rows, H], one number of each token and head, in whole chunks: [B, chunks * C, H] in bfloat16 or float32.
    Rows behind the last are 0."""
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % C), (0, 0)))


def by_chunk(x) -> jax.Array:
    """Return x [B, chunks * C, H] as [B, chunks, H, C]. `SegmentedScan.by_row` takes such arrays back to rows."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, C, x.shape[2]), 2, 3)

"""Launch the Hopper kernels of the delta rule with per-key gates. They compute the forward, and have no gradient."""

import dataclasses

import jax
import jax.numpy as jnp

from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.delta_key_pairs import Results as Pairs
from glax._src.kernels.pallas_gpu.delta_key_pairs import pairs_of_chunks
from glax._src.kernels.pallas_gpu.delta_key_scan import delta_key_scan
from glax._src.kernels.pallas_gpu.delta_key_scan_refs import DeltaKeyScan, Results
from glax._src.kernels.pallas_gpu.delta_scan_refs import STRIPE
from glax._src.kernels.pallas_gpu.delta_segments import SegmentedScan, beta_by_chunk, refuse_columns
from glax._src.kernels.pallas_gpu.layout import KernelLayout


@dataclasses.dataclass(frozen=True)
class DeltaKeyLayout(SegmentedScan):
    """Hold a recurrence of the delta rule with per-key gates as the scan reads it.

    pairs: the results of `delta_key_pairs`. beta: [B, chunks, H, C] in float32.
    """

    pairs: Pairs
    beta: jax.Array

    @classmethod
    def of(cls, r: Recurrence, config: HopperConfig) -> "DeltaKeyLayout":
        """Return the layout, in which each packed sequence begins at a chunk's start. Raises ValueError if the config has 128
        columns."""
        refuse_columns(config)
        p, beta = KernelLayout(r, config), r.erasing.beta
        assert beta is not None, "supports refuses other erasures"
        beta, gates = beta_by_chunk(p, beta), p.in_blocks(p.r.decay.key, p.K)
        gates = gates if gates.dtype == jnp.bfloat16 else gates.astype(jnp.float32)
        return cls(p, pairs_of_chunks(r.reverse, p.q, p.k, gates, beta, p.scale_of_chunks()), beta)

    def scan_segments(self, kind, start) -> Results:
        p = self.layout
        w = DeltaKeyScan(kind, p.H, p.K, p.V, p.r.reverse, start=start is not None)
        start = jnp.zeros((1, 1, STRIPE, 64), jnp.float32) if start is None else start
        return delta_key_scan(w, p.chunk_rows, jnp.asarray(p.table), p.v, *self.pairs, self.beta, start)


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states. What chunks need beside their states is formed in parallel, and then every sequence
    is scanned."""
    d = DeltaKeyLayout.of(r, config)
    found, p = d.scan("outputs", r.initial_state), d.layout
    return Outputs(p.sum_of_values(found.output, p.blocks).astype(r.v.dtype), d.last(found))

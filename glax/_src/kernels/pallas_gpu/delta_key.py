"""Launch the Hopper kernels of the delta rule with per-key gates: the recurrence and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, gradient_recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu.chunks.pairs import Results as Pairs
from glax._src.kernels.pallas_gpu.chunks.pairs import pairs_of_chunks
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.delta_segments import SegmentedScan, by_chunk, in_chunks, refuse_columns
from glax._src.kernels.pallas_gpu.gradient import delta_key as delta_key_vjp
from glax._src.kernels.pallas_gpu.gradient.delta_key_refs import D_BETA, D_SCALE
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.scan.delta_key import delta_key_scan
from glax._src.kernels.pallas_gpu.scan.delta_key_refs import DeltaKeyScan
from glax._src.kernels.pallas_gpu.scan.delta_refs import STRIPE, Results


@dataclasses.dataclass(frozen=True)
class DeltaKeyLayout(SegmentedScan):
    """Hold a recurrence of the delta rule with per-key gates as the scan reads it.

    pairs: the results of `chunks/pairs.py`. gates: in bfloat16 or float32, [B, rows, H, K]. beta: [B, chunks, H, C] in float32.
    d_output: dO in rows of chunks, for a gradient.
    """

    pairs: Pairs
    gates: jax.Array
    beta: jax.Array
    d_output: jax.Array | None

    @classmethod
    def of(cls, r: Recurrence, config: HopperConfig, d_output=None) -> "DeltaKeyLayout":
        """Return the layout, in which each packed sequence begins at a chunk's start. Raises ValueError if the config has 128
        columns."""
        refuse_columns(config)
        p, beta = KernelLayout(r, config), r.erasing.beta
        assert beta is not None, "supports refuses other erasures"
        beta, gates = by_chunk(in_chunks(p.rows.take(beta).astype(jnp.float32))), p.in_blocks(p.r.decay.key, p.K)
        gates = gates if gates.dtype == jnp.bfloat16 else gates.astype(jnp.float32)
        pairs = pairs_of_chunks(r.reverse, p.q, p.k, gates, beta, p.scale_of_chunks())
        return cls(p, pairs, gates, beta, None if d_output is None else p.in_blocks(d_output, p.V))

    def scan_segments(self, kind, start) -> Results:
        p = self.layout
        w = DeltaKeyScan(kind, p.H, p.K, p.V, p.r.reverse, start=start is not None)
        start = jnp.zeros((1, 1, STRIPE, 64), jnp.float32) if start is None else start
        d_output = self.d_output if w.is_adjoint else p.v
        return delta_key_scan(w, p.chunk_rows, jnp.asarray(p.table), p.v, d_output, *self.pairs, self.beta, start)


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states. What chunks need beside their states is formed in parallel, and then every sequence
    is scanned."""
    return forward(r, config, "outputs")[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    """Compute `chunked` and the residuals: the states before the chunks and what their tokens write, in one array [B, chunks,
    H, V, K + C]."""
    outputs, found = forward(r, config, "residuals")
    return outputs, Residuals(found.states, jnp.zeros(found.states.shape[:3], jnp.int32))


def forward(r: Recurrence, config: HopperConfig, kind) -> tuple[Outputs, Results]:
    """Return the outputs, and the results of the scan."""
    d = DeltaKeyLayout.of(r, config)
    found, p = d.scan(kind, r.initial_state), d.layout
    return Outputs(p.sum_of_values(found.output, p.blocks).astype(r.v.dtype), d.last(found)), found


def chunked_vjp(r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan stores dL/dS behind the chunks and the gradient of what tokens write. From these and from the residuals, one
    kernel computes the gradients of all chunks in parallel. residuals: what the forward saved, or None to compute it again.
    d_final: None for zeros.
    """
    d = DeltaKeyLayout.of(r, config, d_output)
    p = d.layout
    states = d.scan("states", r.initial_state).states if residuals is None else residuals.states
    adjoint = d.scan("adjoint", d_final)
    operands = p.q, p.k, d.gates, d.beta, d.d_output, states, adjoint.states, p.scale_of_chunks()
    each = delta_key_vjp.delta_key_gradient(r.reverse, multiprocessors(), *operands)
    # [B, chunks, H, TERMS, C]
    terms = each.terms.reshape(*d.beta.shape[:3], -1, *each.terms.shape[3:]).sum(3)
    return gradient_recurrence(
        r,
        *(p.gradient_of_keys(x).astype(jnp.float32) for x in (each.dq, each.dk)),
        p.sum_of_values(adjoint.output, p.blocks).astype(jnp.float32),
        Decay(key=p.gradient_of_keys(each.dg)),
        d.last(adjoint),
        d.by_sequence(terms[:, :, :, D_SCALE]).sum(1),
        Erasure(beta=d.by_row(terms[:, :, :, D_BETA] + adjoint.beta.sum(3))),
    )

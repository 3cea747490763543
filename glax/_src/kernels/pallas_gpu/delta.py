"""Launch the Hopper kernels of the delta rule: the recurrence and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, gradient_recurrence
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu.chunks.inverse import Results as Chunks
from glax._src.kernels.pallas_gpu.chunks.inverse import inverses_of_chunks
from glax._src.kernels.pallas_gpu.config import HopperConfig, in_one_row
from glax._src.kernels.pallas_gpu.delta_segments import SegmentedScan, in_chunks, refuse_columns
from glax._src.kernels.pallas_gpu.gate_operands import head_gates
from glax._src.kernels.pallas_gpu.gradient import delta as delta_vjp
from glax._src.kernels.pallas_gpu.gradient.delta_wide import delta_gradient_wide
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.packed_row import Edges, PackedRow
from glax._src.kernels.pallas_gpu.scan.delta import delta_scan
from glax._src.kernels.pallas_gpu.scan.delta_refs import DeltaScan, Results


@dataclasses.dataclass(frozen=True)
class DeltaLayout(SegmentedScan):
    """Hold a recurrence of the delta rule as the kernels read it, with R and the factors of every chunk and head.

    chunks: the results of `chunks/inverse.py`. d_output: dO in rows of chunks, for a gradient. edges: the fields of
    `EdgeCopies`, or none. packed: the sequences that the layout takes as one row, or None.
    """

    chunks: Chunks
    d_output: jax.Array | None
    edges: tuple[jax.Array, ...]
    packed: PackedRow | None

    @classmethod
    def of(cls, r: Recurrence, config: HopperConfig, one_row: bool, d_output=None) -> "DeltaLayout":
        """Return the layout. one_row: whether to take packed sequences as one row, else each begins at a chunk's start.

        Raises ValueError if the config has 128 columns.
        """
        refuse_columns(config)
        beta, packed = r.erasing.beta, PackedRow(r) if one_row else None
        assert beta is not None, "supports refuses other erasures"
        if packed is None:
            p = KernelLayout(r, config)
        else:
            p, beta = KernelLayout(packed.row, config, edges=Edges.of(r)), jnp.where(packed.is_token[:, None], beta, 0)
        d_output = None if d_output is None else p.in_blocks(d_output, p.V)
        edges = p.edge_copies(p.k, p.q, p.v, *([] if d_output is None else [d_output]))
        numbers = (in_chunks(x) for x in (head_gates(p.r, p.rows, p.q.shape[:2]), p.rows.take(beta)))
        return cls(
            p, inverses_of_chunks(r.reverse, multiprocessors(), p.k, *numbers, *edges[:2]), d_output, edges, packed
        )

    def scan_segments(self, kind, start) -> Results:
        """Scan every segment. start: the states that enter them, [E, H, V, K], or None for zeros."""
        p = self.layout
        w = DeltaScan(kind, p.H, p.K, p.V, p.r.reverse, start=start is not None)
        if w.wide and start is not None:
            start = jnp.swapaxes(start, 2, 3)  # [E, H, K, V], the order of `DeltaScan.upright`
        start = self.chunks.factors if start is None else start  # any array, since the scan does not read it
        d_output, edges = (self.d_output, self.edges) if w.is_adjoint else (p.v, self.edges[:4])
        operands = p.q, p.k, p.v, d_output, *self.chunks, p.scales, start, *edges
        found = delta_scan(w, p.chunk_rows, jnp.asarray(p.table), *operands)
        return found._replace(last=jnp.swapaxes(found.last, 2, 3)) if w.wide else found

    def gates_by_row(self, dg):
        """Return the gradient of per-head gates, [B, T, H]. dg: [B, chunks, H, C]."""
        found = self.by_row(dg)
        return found if self.packed is None else self.packed.gate_gradient(found)

    def by_sequence(self, x):
        """Return the sums over the tokens of every sequence, [N, H], of x [B, chunks, H, C]."""
        return super().by_sequence(x) if self.packed is None else self.packed.per_sequence(self.by_row(x)[0])


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states. The inverses of all chunks are formed in parallel, and then every sequence is
    scanned."""
    return forward(r, config, "outputs")[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    """Compute `chunked` and the residuals: the states before the chunks and what their tokens write, in one array [B, chunks,
    H, V, K + C], or with keys wider than 128 [B, chunks, H, K + C, V]."""
    outputs, found = forward(r, config, "residuals")
    return outputs, Residuals(found.states, jnp.zeros(found.states.shape[:3], jnp.int32))


def forward(r: Recurrence, config: HopperConfig, kind) -> tuple[Outputs, Results]:
    """Return the outputs, and the results of the scan.

    A scan of its own computes the final states of sequences in one row, and no outputs. XLA drops it where they are not used.
    """
    one_row = in_one_row(r)
    d = DeltaLayout.of(r, config, one_row)
    found = d.scan(kind, r.initial_state)
    p, ends = d.layout, found
    if one_row:
        d = DeltaLayout.of(r, dataclasses.replace(config, parts=1), one_row=False)
        ends = d.scan("ends", None)
    return Outputs(p.sum_of_values(found.output, p.blocks).astype(r.v.dtype), d.last(ends)), found


def chunked_vjp(r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan stores dL/dS behind the chunks and the gradient of what tokens write. From these and from the residuals, one
    kernel computes the gradients of all chunks in parallel. residuals: what the forward saved, or None to compute it again.
    d_final: None for zeros. With None, packed sequences may be one row.
    """
    if in_one_row(r) and d_final is not None:
        # The residuals are those of one row. The states are computed again, with each sequence from a chunk's start on.
        residuals, config = None, dataclasses.replace(config, parts=1)
    one_row = in_one_row(r) and d_final is None
    d = DeltaLayout.of(r, config, one_row, d_output)
    p = d.layout
    states = d.scan("states", r.initial_state).states if residuals is None else residuals.states
    adjoint = d.scan("adjoint", d_final)
    scale = p.scales if p.rows.begins is None else p.scale_of_chunks()
    operands = p.q, p.k, d.d_output, states, adjoint.states, d.chunks.factors, scale, *d.edges
    if max(p.K, p.V) <= delta_vjp.WIDEST:
        each = delta_vjp.delta_gradient(r.reverse, multiprocessors(), *operands)
    else:
        each = delta_gradient_wide(r.reverse, *operands)
    # [B, chunks, H, blocks of K, TERMS, C], and the sums over blocks, [B, chunks, H, C] each
    by_block = each.terms.reshape(*each.terms.shape[:2], p.H, -1, *each.terms.shape[3:])
    terms = [by_block[:, :, :, :, i].sum(3) for i in range(delta_vjp.TERMS)]
    decay = dict.fromkeys(("constant", "head", "key"))
    if r.decay.form == "head":
        decay["head"] = d.gates_by_row(terms[delta_vjp.D_GATES])
    elif r.decay.form == "constant":
        decay["constant"] = constant_gradient(d, terms[delta_vjp.D_GATES])
    return gradient_recurrence(
        r,
        *(p.rows.put(x)[..., : r.q.shape[3]].astype(jnp.float32) for x in (each.dq, each.dk)),
        p.sum_of_values(adjoint.output, p.blocks).astype(jnp.float32),
        Decay(**decay),
        None if d.packed is not None else d.last(adjoint),
        d.by_sequence(terms[delta_vjp.D_SCALE]).sum(1),
        Erasure(beta=d.by_row(terms[delta_vjp.D_BETA] + adjoint.beta.sum(3))),
    )


def constant_gradient(d: DeltaLayout, dg):
    """Return the gradient of the constant decays of sequences, [N, H]. dg: the gradient of the tokens' gates, [B, chunks, H,
    C]."""
    if d.packed is None:
        return d.by_sequence(dg)
    return d.packed.per_sequence(d.gates_by_row(dg)[0])

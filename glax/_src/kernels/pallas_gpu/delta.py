"""Launch the Hopper kernels of the delta rule: the recurrence and its gradient, with per-key gates or others.

What chunks need beside their states is formed in parallel, and then every sequence is scanned. Sequences that are cut into
segments are scanned twice: first for the states that enter the segments, and then from them.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, gradient_recurrence, spread_heads
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu.chunks.inverse import Results as Chunks
from glax._src.kernels.pallas_gpu.chunks.inverse import inverses_of_chunks
from glax._src.kernels.pallas_gpu.chunks.pairs import Results as Pairs
from glax._src.kernels.pallas_gpu.chunks.pairs import pairs_of_chunks
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.device.tiles import EdgeCopies
from glax._src.kernels.pallas_gpu.gradient import delta as delta_vjp
from glax._src.kernels.pallas_gpu.gradient import delta_key as delta_key_vjp
from glax._src.kernels.pallas_gpu.gradient.delta_key import D_BETA, D_SCALE
from glax._src.kernels.pallas_gpu.layout import KernelLayout, OneRowLayout, layout_of
from glax._src.kernels.pallas_gpu.plan import STRIPE, C, DeltaScan
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.rows import Form, PackedRow
from glax._src.kernels.pallas_gpu.scan.delta import Results, delta_scan
from glax._src.kernels.pallas_gpu.scan.delta_key import DeltaKeyScan, delta_key_scan
from glax._src.kernels.pallas_gpu.scan.delta_key import Results as KeyResults


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states."""
    return forward(r, Route.of(r, config), "outputs")[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    """Compute the outputs and final states, and the residuals: the states before the chunks and what their tokens write, in one
    array [B, chunks, H, V, K + C], or with keys wider than 128 [B, chunks, H, K + C, V]."""
    outputs, scanned = forward(r, Route.of(r, config), "residuals")
    return outputs, Residuals(scanned.states, jnp.zeros(scanned.states.shape[:3], jnp.int32))


def forward(r: Recurrence, route: Route, kind) -> tuple[Outputs, Results]:
    """Return the outputs and final states, and the results of the scan. kind: what the scan writes, `DeltaScan.kind`.

    The final states of sequences that share one row are computed by another scan, without outputs. XLA drops that scan where
    the states are not used.
    """
    d = laid_out(r, route)
    scanned = d.scan(kind, r.initial_state)
    p, ends = d.layout, scanned
    if route.rows.form is Form.ONE_ROW:
        d = laid_out(r, route.in_one_segment(Form.APART))
        ends = d.scan("ends", None)
    return Outputs(p.sum_of_values(scanned.output, p.blocks).astype(r.v.dtype), d.last(ends)), scanned


def chunked_vjp(r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan stores dL/dS behind the chunks and the gradient of what tokens write. From these and from the residuals, one
    kernel computes the gradients of all chunks in parallel. d_output: [B, T, H, V]. d_final: [N, H, K, V], or None for zeros;
    with None, packed sequences may be one row. residuals: what the forward saved, or None to compute it again.
    """
    route = Route.of(r, config, d_final, residuals)
    if residuals is not None and not route.rows.takes(r, residuals):
        residuals = None
    d = laid_out(r, route, d_output)
    states = d.scan("states", r.initial_state).states if residuals is None else residuals.states
    return d.gradient(r, states, d.scan("adjoint", d_final))


@dataclasses.dataclass(frozen=True)
class SegmentedScan(abc.ABC):
    """Represent a recurrence laid out in segments, which `scan_segments` scans in parallel. E counts the segments of all N
    sequences.

    The results of `scan_segments` have the field `last`, the states behind segments.
    """

    layout: KernelLayout

    @abc.abstractmethod
    def scan_segments(self, kind, start) -> Any:
        """Scan every segment, and return the results of the kernel, whose `last` is [E, H, V, K]. kind: `DeltaScan.kind`.
        start: the states that enter segments, [E, H, V, K], or None for zeros."""

    @abc.abstractmethod
    def gradient(self, r: Recurrence, states, adjoint: Results) -> Recurrence:
        """Return the gradient of r. states: the states before the chunks, and in the same array what their tokens write
        (`Results.states`). adjoint: the results of the adjoint scan."""

    def scan(self, kind, start) -> Any:
        """Run the scan over every sequence, and return its results, whose `last` is [N, H, V, K]. kind: `DeltaScan.kind`.
        start: the states that enter sequences, [N, H, K, V], or for an adjoint the gradients of final states; None for
        zeros."""
        p, filled = self.layout, self.layout.states_to_blocks(start)
        filled = None if filled is None else jnp.swapaxes(filled, 2, 3)
        if p.parts == 1:
            return self.scan_segments(kind, filled)
        entering, last = self.entering(kind == "adjoint", filled)
        return self.scan_segments(kind, entering)._replace(last=last)

    def entering(self, adjoint: bool, start):
        """Return the states that enter segments, [E, H, V, K], and those that leave sequences, [N, H, V, K].

        adjoint: whether these are dL/dS, in a scan against time. start: the states that enter sequences, [N, H, V, K], or None
        for zeros.
        """
        p = self.layout
        # [N, parts, H, V + K, K] and [N, parts, H, V, K]
        states = self.by_segment(self.scan_segments("transitions", None))
        own = self.by_segment(self.scan_segments("adjoint ends", None)) if adjoint else states[:, :, :, : p.V]
        S = jnp.zeros_like(own[:, 0]) if start is None else start
        through = "nhvk,nhck->nhvc" if adjoint else "nhvc,nhck->nhvk"  # S^T M^T forward; dS^T M for the adjoint
        entering = [S] * p.parts
        for part in range(p.parts)[:: -1 if p.descending(adjoint) else 1]:
            entering[part] = S
            S = own[:, part] + jnp.einsum(through, S, states[:, part, :, p.V :], precision="highest")
        return jnp.stack(entering, 1).reshape(-1, *S.shape[1:]), S

    def by_segment(self, scanned: Any):
        """Return the last states of segments as [N, parts, H, V, K]. For a scan of "transitions", which appends the matrix M to
        the state, return [N, parts, H, V + K, K]. scanned: the results of a scan of segments."""
        return scanned.last.reshape(self.layout.N, self.layout.parts, *scanned.last.shape[1:])

    def last(self, scanned: Any):
        """Return the states behind sequences, [N, H, K, V], without padding. scanned: the results of a scan."""
        return self.layout.states_from_blocks(jnp.swapaxes(scanned.last, 2, 3))

    def by_row(self, x):
        """Return x [B, chunks, H, C], a number of each token, as [B, T, H], in the rows of r."""
        return self.layout.put(jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2]))

    def by_sequence(self, x):
        """Return the sums over the tokens of every sequence, [N, H], of x [B, chunks, H, C], a number of each token."""
        p = self.layout
        x = jnp.where(p.is_token[:, None], x, 0).sum(3)
        return p.by_sequence(x if p.apart is None else jnp.swapaxes(x, 0, 1))


@dataclasses.dataclass(frozen=True)
class DeltaLayout(SegmentedScan):
    """Lay out a recurrence of the delta rule with per-head gates for the kernels, with the inverse R and the factors of every
    chunk and head.

    chunks: the results of `chunks/inverse.py`. d_output: dO in rows of chunks, for a gradient, else None. edges: the fields of
    `EdgeCopies`, or (). packed: the sequences that are one row, or None.
    """

    chunks: Chunks
    d_output: jax.Array | None
    edges: tuple[jax.Array | None, ...]
    packed: PackedRow | None

    @classmethod
    def of(cls, r: Recurrence, route: Route, d_output=None) -> "DeltaLayout":
        """Return the layout of r for its route. d_output: dO [B, T, H, V] for a gradient, else None."""
        p, beta = layout_of(r, route), r.erasing.beta
        packed = p.packed if isinstance(p, OneRowLayout) else None
        if packed is not None and beta is not None:
            beta = jnp.where(packed.is_token[:, None], beta, 0)
        d_output = None if d_output is None else p.in_blocks(d_output, p.V)
        edges = p.edge_copies(p.k, p.q, p.v, d_output, p.e, p.w)
        numbers = [p.head_gates(), None if beta is None else p.take(beta)]
        numbers = [None if x is None else in_chunks(x) for x in numbers]
        of_keys = edges and EdgeCopies(*edges)._replace(q=None, v=None, d_output=None, w=None)
        chunks = inverses_of_chunks(r.reverse, r.erasing.before_decay, multiprocessors(), p.k, *numbers, p.e, *of_keys)
        return cls(p, chunks, d_output, edges, packed)

    def scan_segments(self, kind, start) -> Results:
        """Scan every segment, and return the results of `delta_scan`, with `last` as [E, H, V, K]. kind: what the scan writes,
        `DeltaScan.kind`. start: the states that enter segments, [E, H, V, K], or None for zeros."""
        p = self.layout
        w = DeltaScan(kind, p.H, p.K, p.V, p.r.reverse, start=start is not None, form=p.r.erasing.form)
        w = dataclasses.replace(w, together=w.gains_together(p.table.shape[0], multiprocessors()))
        if w.wide and start is not None:
            start = jnp.swapaxes(start, 2, 3)  # [E, H, K, V], the order of `DeltaScan.upright`
        start = self.chunks.factors if start is None else start  # any array, since the scan does not read it
        d_output, edges = (self.d_output if w.is_adjoint else p.v), self.edges
        if edges and not w.is_adjoint:
            edges = EdgeCopies(*edges)._replace(d_output=None)
        operands = p.q, p.k, p.v, d_output, *self.chunks, p.scales, start, p.e, p.w, *edges
        scanned = delta_scan(w, p.chunk_rows, jnp.asarray(p.table), *operands)
        return scanned._replace(last=jnp.swapaxes(scanned.last, 2, 3)) if w.wide else scanned

    def gates_by_row(self, dg):
        """Return the gradient of per-head gates, [B, T, H]. dg: [B, chunks, H, C], the gradient of the gates of rows."""
        by_row = self.by_row(dg)
        return by_row if self.packed is None else self.packed.gate_gradient(by_row)

    def by_sequence(self, x):
        """Return the sums over the tokens of every sequence, [N, H], of x [B, chunks, H, C], a number of each token."""
        return super().by_sequence(x) if self.packed is None else self.packed.per_sequence(self.by_row(x)[0])

    def gradient(self, r: Recurrence, states, adjoint: Results) -> Recurrence:
        """Return the gradient of r. states: the states before the chunks and what their tokens write. adjoint: the results of
        the adjoint scan."""
        p = self.layout
        scale = p.scales if p.apart is None else p.scale_of_chunks()
        dX = None if p.e is None else adjoint.output
        operands = p.q, p.k, self.d_output, states, adjoint.states, self.chunks.factors, scale, p.e, dX, *self.edges
        if p.route.gradient == "delta_gradient":
            each = delta_vjp.delta_gradient(r.reverse, r.erasing.before_decay, multiprocessors(), *operands)
        else:
            each = delta_vjp.delta_gradient_wide(r.reverse, r.erasing.before_decay, *operands)
        # [B, chunks, H, blocks of K, TERMS, C], and the sums over blocks, [B, chunks, H, C] each
        by_block = each.terms.reshape(*each.terms.shape[:2], p.H, -1, *each.terms.shape[3:])
        sums = [by_block[:, :, :, :, i].sum(3) for i in range(by_block.shape[4])]
        decay = Decay()
        if r.decay.form == "head":
            decay = Decay(head=self.gates_by_row(sums[delta_vjp.D_GATES]))
        elif r.decay.form == "constant":
            decay = Decay(constant=self.constant_gradient(sums[delta_vjp.D_GATES]))
        return gradient_recurrence(
            r,
            *(p.put(x)[..., : r.q.shape[3]].astype(jnp.float32) for x in (each.dq, each.dk)),
            self.product_with_values(r, adjoint, r.erasing.write),
            decay,
            None if self.packed is not None else self.last(adjoint),
            self.by_sequence(sums[delta_vjp.D_SCALE]).sum(1),
            self.gradient_of_erasure(r, sums, each, adjoint),
        )

    def gradient_of_erasure(self, r: Recurrence, sums: list, each: delta_vjp.Results, adjoint: Results) -> Erasure:
        """Return the gradients of beta, or of the erase and write vectors.

        sums: the kernel's sums for each token, a list of [B, chunks, H, C], of which sums[D_BETA] is de . k, with de the
        gradient of the erase vector. each: the gradients of chunks. adjoint: the results of the adjoint scan.
        """
        e = r.erasing
        if e.beta is not None:
            return Erasure(beta=self.by_row(sums[delta_vjp.D_BETA] + adjoint.beta.sum(3)))
        d_write = None if e.write is None else self.product_with_values(r, adjoint, spread_heads(r.v, r.num_heads))
        de = self.layout.put(each.de)[..., : r.q.shape[3]]
        if self.packed is not None and e.before_decay:
            de = jnp.where(self.packed.begins[:, None, None], 0, de)
        return e.replace(erase=de, write=d_write)

    def product_with_values(self, r: Recurrence, adjoint: Results, x: jax.Array | None) -> jax.Array:
        """Return dX x of every head, [B, T, H, V] in float32, 0 in padding, where dX is the adjoint scan's result `output`.
        With beta that result is dV instead of dX.

        x: [B, T, H, V], or None for 1.
        """
        p = self.layout
        dX = p.sum_of_values(adjoint.output, p.blocks).astype(jnp.float32)
        if x is None:
            return dX
        product = dX * x.astype(jnp.float32)
        return (
            product if r.boundaries is None else jnp.where(r.is_token[:, None, None], product, 0)
        )  # x is not 0 in padding

    def constant_gradient(self, dg):
        """Return the gradient of the constant decays of sequences, [N, H]. dg: the gradient of the tokens' gates, [B, chunks, H,
        C]."""
        if self.packed is None:
            return self.by_sequence(dg)
        return self.packed.per_sequence(self.gates_by_row(dg)[0])


@dataclasses.dataclass(frozen=True)
class DeltaKeyLayout(SegmentedScan):
    """Lay out a recurrence of the delta rule with per-key gates for the scan.

    pairs: the results of `chunks/pairs.py`. gates: [B, rows, H, K] in bfloat16 or float32. beta: [B, chunks, H, C] in float32;
    None with an erase vector. d_output: dO in rows of chunks, for a gradient, else None.
    """

    pairs: Pairs
    gates: jax.Array
    beta: jax.Array | None
    d_output: jax.Array | None

    @classmethod
    def of(cls, r: Recurrence, route: Route, d_output=None) -> "DeltaKeyLayout":
        """Return the layout of r for its route, in which each packed sequence begins at a chunk's start. d_output: dO [B, T, H,
        V] for a gradient, else None."""
        p, beta = layout_of(r, route), r.erasing.beta
        beta = None if beta is None else by_chunk(in_chunks(p.take(beta).astype(jnp.float32)))
        gates = p.in_blocks(p.r.decay.key, p.K)
        gates = gates if gates.dtype == jnp.bfloat16 else gates.astype(jnp.float32)
        operands = p.q, p.k, gates, beta, p.scale_of_chunks(), p.e
        pairs = pairs_of_chunks(r.reverse, r.erasing.before_decay, *operands)
        return cls(p, pairs, gates, beta, None if d_output is None else p.in_blocks(d_output, p.V))

    def scan_segments(self, kind, start) -> KeyResults:
        """Scan every segment, and return the results of `delta_key_scan`. kind: `DeltaScan.kind`. start: the states that enter
        segments, [E, H, V, K], or None for zeros."""
        p = self.layout
        w = DeltaKeyScan(kind, p.H, p.K, p.V, p.r.reverse, start=start is not None, form=p.r.erasing.form)
        start = jnp.zeros((1, 1, STRIPE, 64), jnp.float32) if start is None else start
        d_output = self.d_output if w.is_adjoint else p.v
        operands = p.v, d_output, *self.pairs.of_scan(), self.beta, start, p.w
        return delta_key_scan(w, p.chunk_rows, jnp.asarray(p.table), *operands)

    def gradient(self, r: Recurrence, states, adjoint: Any) -> Recurrence:
        """Return the gradient of r. states: the states before the chunks and what their tokens write. adjoint: the results of
        the adjoint scan."""
        p = self.layout
        read = states, adjoint.states, p.scale_of_chunks(), self.pairs.levels
        operands = p.q, p.k, self.gates, self.beta, self.d_output, *read, p.e
        each = delta_key_vjp.delta_key_gradient(r.reverse, r.erasing.before_decay, multiprocessors(), *operands)
        # [B, chunks, H, TERMS, C]
        sums = each.terms.reshape(*each.terms.shape[:2], p.H, -1, *each.terms.shape[3:]).sum(3)
        return gradient_recurrence(
            r,
            *(p.gradient_of_keys(x).astype(jnp.float32) for x in (each.dq, each.dk)),
            p.sum_of_values(adjoint.output, p.blocks).astype(jnp.float32),
            Decay(key=p.gradient_of_keys(each.dg)),
            self.last(adjoint),
            self.by_sequence(sums[:, :, :, D_SCALE]).sum(1),
            self.gradient_of_erasure(r, sums, each, adjoint),
        )

    def gradient_of_erasure(self, r: Recurrence, sums, each: delta_key_vjp.Results, adjoint: KeyResults) -> Erasure:
        """Return the gradients of beta, or of the erase and write vectors.

        sums: the kernel's sums for each token, [B, chunks, H, TERMS, C]. each: the gradients of chunks. adjoint: the results of
        the adjoint scan.
        """
        if r.erasing.beta is not None:
            return Erasure(beta=self.by_row(sums[:, :, :, D_BETA] + adjoint.beta.sum(3)))
        p = self.layout
        write = None if adjoint.write is None else p.sum_of_values(adjoint.write, p.blocks)
        return r.erasing.replace(erase=p.gradient_of_keys(each.de), write=write)


def laid_out(r: Recurrence, route: Route, d_output=None) -> SegmentedScan:
    """Return the layout of r for its route. d_output: dO [B, T, H, V] for a gradient, else None. Raises ValueError if the
    config has 128 columns."""
    if route.config.columns != STRIPE:
        raise ValueError(
            f"columns must be {STRIPE} with beta, for the kernels of the delta rule have no others; got "
            f"{route.config.columns}: pass cfg=HopperConfig(parts={route.config.parts})"
        )
    kind = DeltaKeyLayout if r.decay.key is not None else DeltaLayout
    return kind.of(r, route, d_output)


def in_chunks(x) -> jax.Array:
    """Return x [B, rows, H], one number of each token and head, in whole chunks: [B, chunks * C, H] in bfloat16 or float32.
    Rows behind the last are 0."""
    x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % C), (0, 0)))


def by_chunk(x) -> jax.Array:
    """Return x [B, chunks * C, H] as [B, chunks, H, C]."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, C, x.shape[2]), 2, 3)

"""Launch the Hopper kernels of the delta rule: the recurrence and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, gradient_recurrence
from glax._src.kernels.pallas_gpu import delta_vjp
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.delta_pairs import pairs_of_chunks
from glax._src.kernels.pallas_gpu.delta_scan import STRIPE, DeltaScan, Results, delta_scan
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.plan import C


@dataclasses.dataclass(frozen=True)
class DeltaLayout:
    """Hold a recurrence of the delta rule as the kernels read it: beta by chunk, and the pairs R and P of every chunk and head.

    stripes: the warpgroups of a program that carry columns (`DeltaScan`). beta: [B, chunks, H, C] in float32. inverse, scores:
    [B, chunks, H, C, C] in bfloat16, R and P of `delta_pairs`.
    """

    layout: KernelLayout
    stripes: int
    beta: jax.Array
    inverse: jax.Array
    scores: jax.Array

    @classmethod
    def of(cls, r: Recurrence, config: HopperConfig) -> "DeltaLayout":
        """Return the layout. Raises ValueError if the config cuts sequences into segments."""
        if config.parts > 1:
            raise ValueError(
                f"parts must be 1 with beta, for the kernels of the delta rule do not cut sequences into segments; got "
                f"{config.parts}: pass cfg=HopperConfig(columns={config.columns})"
            )
        p, beta = KernelLayout(r, config), r.erasing.beta
        assert beta is not None, "supports refuses other erasures"
        beta = p.rows.take(beta).astype(jnp.float32)
        beta = jnp.pad(beta, ((0, 0), (0, -beta.shape[1] % C), (0, 0)))
        beta = jnp.swapaxes(beta.reshape(beta.shape[0], -1, C, p.H), 2, 3)
        pairs = pairs_of_chunks(r.reverse, p.q, p.k, p.gates, beta, p.scale_of_chunks())
        return cls(p, min(config.columns, p.V) // STRIPE, beta, *pairs)

    def scan(self, kind, values, start) -> Results:
        """Run `delta_scan` over every sequence. kind: `DeltaScan.kind`. values: v, or dO in rows of chunks. start: states [N, H,
        K, V], or None for zeros."""
        p, filled = self.layout, self.layout.start(start)
        w = DeltaScan(kind, p.H, p.K, p.V, p.r.reverse, self.stripes, start=filled is not None)
        start = jnp.zeros((1, 1, STRIPE, 64), jnp.float32) if filled is None else jnp.swapaxes(filled, 2, 3)
        pairs = self.inverse, self.scores, p.gates, self.beta
        return delta_scan(w, p.chunk_rows, jnp.asarray(p.table), p.q, p.k, values, *pairs, p.scales, start)

    def last(self, found: Results):
        """Return the states behind sequences, [N, H, K, V] of r."""
        return self.layout.narrow(jnp.swapaxes(found.last, 2, 3))

    def by_row(self, x):
        """Return x [B, chunks, H, C] in the rows of r, [B, T, H]."""
        return self.layout.rows.put(jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2]))

    def by_sequence(self, x):
        """Return the sums over the chunks of every sequence, [N, H], of x [B, chunks, H]."""
        p = self.layout
        return p.by_sequence(x if p.rows.begins is None else jnp.swapaxes(x, 0, 1))


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """Compute the outputs and final states. The pairs of all chunks are formed in parallel, and then every sequence is
    scanned."""
    d = DeltaLayout.of(r, config)
    return outputs(d, d.scan("outputs", d.layout.v, r.initial_state))


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    """Compute `chunked` and the residuals: the states before the chunks and what their tokens write, in one array [B, chunks,
    H, V, K + C]."""
    d = DeltaLayout.of(r, config)
    found = d.scan("residuals", d.layout.v, r.initial_state)
    return outputs(d, found), Residuals(found.states, jnp.zeros(found.states.shape[:3], jnp.int32))


def outputs(d: DeltaLayout, found: Results) -> Outputs:
    """Return the outputs, [B, T, H, V] in v's dtype, and the final states of a scan."""
    p = d.layout
    return Outputs(p.sum_of_values(found.output, p.blocks).astype(p.r.v.dtype), d.last(found))


def chunked_vjp(r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig) -> Recurrence:
    """Compute the gradient of every input of r.

    A reverse scan stores dL/dS behind the chunks and the gradient of what tokens write. From these and from the residuals, one
    kernel computes the gradients of all chunks in parallel. residuals: what the forward saved, or None to compute it again.
    """
    d, reverse = DeltaLayout.of(r, config), r.reverse
    p = d.layout
    d_output = p.in_blocks(d_output, p.V)
    states = d.scan("states", p.v, r.initial_state).states if residuals is None else residuals.states
    adjoint = d.scan("adjoint", d_output, d_final)
    each = delta_vjp.delta_gradient(
        reverse, p.q, p.k, p.v, d_output, states, adjoint.states, p.gates, d.beta, p.scale_of_chunks()
    )
    terms = [each.terms[:, :, :, i] for i in range(delta_vjp.TERMS)]
    used = terms[delta_vjp.QUERIES]
    dg = gate_gradient(p, terms)
    decay = dict.fromkeys(("constant", "head", "key"))
    if r.decay.form == "head":
        decay["head"] = d.by_row(dg)
    elif r.decay.form == "constant":
        decay["constant"] = d.by_sequence(jnp.where(p.is_token[:, None], dg, 0).sum(3))
    return gradient_recurrence(
        r,
        *(p.rows.put(x)[..., : r.q.shape[3]].astype(jnp.float32) for x in (each.dq, each.dk)),
        p.sum_of_values(adjoint.output, p.blocks).astype(jnp.float32),
        Decay(**decay),
        d.last(adjoint),
        d.by_sequence(used.sum(3)).sum(1),
        Erasure(beta=d.by_row(terms[delta_vjp.BETA])),
    )


def gate_gradient(p: KernelLayout, terms):
    """Return the gradient of the log gates of every token, [B, chunks, H, C]; `delta_vjp` has the formula. terms: the rows of
    its results."""
    scale = p.scale_of_chunks()[..., None, None]
    onward = np.tri(C, dtype=np.float32)  # [i, t]: token i no earlier than token t in memory
    onward = jnp.asarray(onward.T if p.r.reverse else onward)
    behind = scale * terms[delta_vjp.QUERIES] + terms[delta_vjp.KEYS]
    sums = jnp.einsum("bchi,it->bcht", behind, onward, precision="highest")
    sums += jnp.einsum("bchi,it->bcht", terms[delta_vjp.BEFORE], 1 - onward, precision="highest")
    through = jnp.exp2(p.gates[..., 0 if p.r.reverse else C - 1])
    return sums + (through * terms[delta_vjp.EDGE].sum(3))[..., None]

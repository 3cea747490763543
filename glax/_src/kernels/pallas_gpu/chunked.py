"""The Hopper kernels launched: the recurrence and its gradient, whole or in two parts."""

import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Outputs, Recurrence, Residuals, fold_heads, gradient_like
from glax._src.kernels.common.gpu import multiprocessors
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import Problem
from glax._src.kernels.pallas_gpu.vjp_head_gate import gradient_head
from glax._src.kernels.pallas_gpu.vjp_key_gate import gradient_key


def chunked(r: Recurrence, config: HopperConfig) -> Outputs:
    """One walk over every sequence, or over segments of them from the states that a walk before has found."""
    return forward(Problem(r, config), keep=False)[0]


def chunked_with_residuals(r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    """The same, with what `chunked_vjp` would else walk again for."""
    return forward(Problem(r, config, square=True), keep=True)


def forward(p: Problem, keep: bool, begun=None) -> tuple[Outputs, Residuals | None]:
    """begun: what `begin` returns for it, if that has run."""
    r = p.r
    start = p.starts(r.initial_state, p.k, p.v, False) if begun is None else p.begun_from(r.initial_state, *begun)
    walked = p.walk(p.plan(start=start is not None, states=keep, run=p.run if keep else 1), p.k, p.v, start)
    outputs = Outputs(p.rows.put(walked.o)[..., : r.v.shape[3]], p.narrow(walked.last))
    return outputs, p.residuals(walked) if keep else None


def begin(r: Recurrence, config: HopperConfig):
    """The first of two TwoPhase: every segment's own state, and what follows from them and the initial state."""
    p = Problem(r, config, square=True)
    return first_part(p, p.k, p.v, r.initial_state, adjoint=False)


def finish(begun, r: Recurrence, config: HopperConfig) -> Outputs:
    return forward(Problem(r, config, square=True), False, begun)[0]


def finish_with_residuals(begun, r: Recurrence, config: HopperConfig) -> tuple[Outputs, Residuals]:
    return forward(Problem(r, config, square=True), True, begun)


def begin_vjp(r: Recurrence, d_output, d_final, config: HopperConfig):
    """The first of two TwoPhase: what every segment adds to dL/dS, and what follows from that and d_final."""
    p = Problem(r, config, square=True)
    return first_part(p, p.q, p.wide(d_output, p.V), d_final, adjoint=True)


def finish_vjp(begun, r: Recurrence, d_output, d_final, residuals: Residuals | None = None, *, config: HopperConfig):
    return chunked_vjp(r, d_output, d_final, residuals, config, begun)


def first_part(p: Problem, a, b, start, adjoint: bool):
    """What the second part takes, and what other devices are told: the state behind every sequence, [N, H, K, V], and its log
    decays, [N, H, K or 1].

    These do not wait for the states that enter segments, which are formed while the exchange is under way: from zero, for
    what arrives is added to them, decayed.
    """
    own = p.own_states(a, b, adjoint, last=True)
    _, S = p.along(own, p.start(start), adjoint)
    log = own[1].reshape(p.N, p.parts, *own[1].shape[1:])
    told = p.narrow(S), log.sum(1)[..., : p.r.state_shape[2]]
    return (p.entering(own, None, adjoint), p.decayed_before(log, adjoint)), *told


def states(p: Problem) -> Residuals:
    """The state before every chunk."""
    start = p.starts(p.r.initial_state, p.k, p.v, adjoint=False)
    return p.residuals(p.walk(p.plan(outputs=False, states=True, run=p.run, start=start is not None), p.k, p.v, start))


def chunked_vjp(
    r: Recurrence, d_output, d_final, residuals: Residuals | None, config: HopperConfig, begun=None
) -> Recurrence:
    """dL/dS behind every chunk, walking backwards; then, with the states before them, all chunks at once.

    kept: what the forward left; begun: what `begin_vjp` returns for it; if at hand.
    """
    p = Problem(r, config, square=True)
    K, V, rows = r.q.shape[3], r.v.shape[3], (*p.q.shape[:2], p.H)
    residuals = states(p) if residuals is None else residuals
    d_output = p.wide(d_output, p.V)
    d_start = p.starts(d_final, p.q, d_output, True) if begun is None else p.begun_from(d_final, *begun)
    against = p.plan(outputs=False, states=True, adjoint=True, start=d_start is not None)
    walked = p.walk(against, p.q, d_output, d_start, far=residuals.far)
    form = gradient_key if p.key else gradient_head
    operands = p.chunkwise(d_output, residuals, walked.states)
    dq, dk, dv, dg, d_scale = form(*operands, reverse=r.reverse, programs=multiprocessors())
    dq, dk, dv = (p.rows.put(x.reshape(*rows, -1)) for x in (dq, dk, dv))
    decay = dict.fromkeys(("constant", "head", "key"))
    if p.key:
        decay["key"] = p.rows.put(dg.reshape(*rows, -1))[..., :K]
    elif r.decay.form == "head":
        decay["head"] = p.rows.put(dg.reshape(r.q.shape[0], -1, p.H))
    elif r.decay.form == "constant":
        decay["constant"] = p.by_sequence(p.tokens_only(dg).sum(2))
    d = r.replace(
        q=fold_heads(dq[..., :K].astype(jnp.float32), r.q.shape[2]),
        k=fold_heads(dk[..., :K].astype(jnp.float32), r.k.shape[2]),
        v=fold_heads(dv[..., :V].astype(jnp.float32), r.v.shape[2]),
        decay=Decay(**decay),
        initial_state=None if r.initial_state is None else p.narrow(walked.last),
        boundaries=None,
        scale=p.by_sequence(d_scale).sum(1),
    )
    return gradient_like(r, d)

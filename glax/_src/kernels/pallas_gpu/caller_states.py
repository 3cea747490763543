"""Return to the caller the states behind every n tokens, and add their gradients to dL/dS at the same positions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glax._src.kernels.common.limits import LOG_OF_ZERO
from glax._src.kernels.pallas_gpu.device.tiles import LOG2E
from glax._src.kernels.pallas_gpu.layout import KernelLayout
from glax._src.kernels.pallas_gpu.plan import C
from glax._src.kernels.pallas_gpu.resets import LOG_OF_RESET


def number(p: KernelLayout) -> int:
    """Return the number J of the caller's states in a row."""
    return p.r.q.shape[1] // p.r.states_every if p.r.states_every else 0


def plan_fields(p: KernelLayout) -> dict[str, int]:
    """Return the fields of a plan that stores the caller's states, or adds their gradients. They are empty where a row is too
    short for a state."""
    return dict(every=p.every, num_behind=number(p)) if number(p) else {}


def of_heads(p: KernelLayout, behind: Float[Array, "N J H K V"] | None) -> Float[Array, "N J H K V"]:
    """Return the caller's states by head. behind: the states of blocks, as a scan stores them; None where rows are too short
    for a state."""
    if behind is None:
        return jnp.zeros((p.N, 0, *p.r.state_shape[1:]), jnp.float32)
    found = p.narrow(behind.reshape(-1, *behind.shape[2:]))
    return found.reshape(*behind.shape[:2], *found.shape[1:])


def in_blocks(p: KernelLayout, d: Float[Array, "N J H K V"] | None) -> Float[Array, "N J H K V"] | None:
    """Return the gradients of the caller's states in blocks. None stands for zeros, or for no states."""
    if d is None or not number(p):
        return None
    found = p.start(d.reshape(-1, *d.shape[2:]))
    assert found is not None
    return found.reshape(*d.shape[:2], *found.shape[1:])


def starts_against_time(p: KernelLayout, d_final, d_output, behind: Float[Array, "N J H K V"] | None):
    """Return dL/dS behind every segment, [E, H, K, V] in float32; None for zeros.

    d_final: the gradient of the final states of r, [N, H, K, V], or None. d_output: the gradient of the outputs in blocks, [B,
    rows, H, V]. behind: the gradients of the caller's states in blocks, as `in_blocks` returns them.
    """
    if behind is None or p.parts == 1:
        return p.starts(d_final, p.q, d_output, adjoint=True)
    states, log = p.own_states(p.q, d_output, adjoint=True, last=False)
    scale = jnp.repeat(p.scale, p.parts)[:, None, None, None]
    own = states * scale + at_edges(p, behind).reshape(states.shape), log
    return p.entry_states(own, p.start(d_final), adjoint=True, is_scaled=True)


def logs_of_chunks(p: KernelLayout) -> Float[Array, "N chunks heads _"]:
    """Return the log2 decays of every chunk in float32, by channel or one for each head."""
    if not p.key:
        return p.gates[..., 0 if p.r.reverse else C - 1, None]
    # [B, T, heads, K]
    gates: Any = sum(g.astype(jnp.float32) for g in p.gates)
    gates = jnp.pad(jnp.maximum(gates, LOG_OF_ZERO), ((0, 0), (0, -gates.shape[1] % C), (0, 0), (0, 0)))
    logs = gates.reshape(gates.shape[0], -1, C, *gates.shape[2:]).sum(2) * LOG2E
    if p.newest is not None:  # no state passes a chunk with a reset
        logs = jnp.where(p.newest.max(2)[..., None, None] >= 0, LOG_OF_RESET, logs)
    return logs


def at_edges(p: KernelLayout, behind: Float[Array, "N J H K V"]) -> Float[Array, "N parts H K V"]:
    """Return the terms of the caller's gradients in dL/dS, at the edges by which a reverse scan leaves the segments.

    A segment's term is the sum over the caller's states within it of behind_j, decayed through the chunks from state j to the
    edge. All sums are float32.
    """
    count = np.arange(1, behind.shape[1] + 1) * p.every
    through = np.arange(p.chunks)
    chunk = p.chunks - count if p.r.reverse else count - 1
    part = chunk // p.size
    # [J, chunks]: the chunks between a state and the edge of its segment
    passed = (through >= chunk[:, None]) if p.r.reverse else (through <= chunk[:, None])
    passed &= through // p.size == part[:, None]
    logs = jnp.einsum("nchk,jc->njhk", logs_of_chunks(p), passed.astype(np.float32), precision="highest")
    decay = jnp.exp2(jnp.repeat(logs, p.H // logs.shape[2], axis=2))[..., None]
    each = [(decay[:, part == i] * behind[:, part == i]).sum(1) for i in range(p.parts)]
    return jnp.stack(each, axis=1)

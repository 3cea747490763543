"""Time other libraries on the same calls where they are installed.

A function of a peer takes (problem, mode, arrays, d_output, state), as `glax.cli.bench.call` describes them. It raises
UnavailableError if the peer cannot compute the problem.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glax_cli.published
from glax._src.core.registry import Backend
from glax.cli.cases import Problem
from glax.cli.measure import Way
from glax_cli.published import GATES

DEVICE = "cuda"  # of PyTorch


class UnavailableError(Exception):
    """Say why a peer cannot compute a problem here."""


def missing(peer: str) -> list[str]:
    """Return the distributions that a peer needs and that are not installed."""
    needs = glax_cli.published.PEERS.get(peer, {})
    return [distribution for name, distribution in needs.items() if importlib.util.find_spec(name) is None]


def ejkernel(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state) -> Way:
    """Return a `Way` to compute the problem by ejkernel's recurrent_attention, on the platform that ejkernel chooses."""
    if mode == "step":
        raise UnavailableError("has no step of one token")
    if problem.delta:
        raise UnavailableError("has no delta rule")
    # Peers are installed by those who compare.
    from ejkernel.modules import recurrent_attention  # pyright: ignore[reportMissingImports]

    given = {name: x for name, x in arrays.items() if name == "g_gamma"}

    def forward(arrays):
        # "gk" is its per-key gate on all of its platforms, "g" its per-head gate on some; g_gamma must not be traced
        gates: dict[str, Any] = {name: given.get(name, x) for name, x in arrays.items() if name in GATES.values()}
        if problem.gate == "head":
            wide = (*gates["g"].shape, problem.K)
            gates = dict(gk=jnp.broadcast_to(gates["g"][..., None], wide))
        rest = [gates.get(name) for name in ("g", "g_gamma", "gk")]
        packing = {} if problem.packed == 1 else dict(cu_seqlens=jnp.asarray(problem.boundaries))
        return recurrent_attention(arrays["query"], arrays["key"], arrays["value"], *rest, **packing)

    return by_jax("ejkernel", forward, mode, arrays, d_output)


def jla(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state, **insist) -> Way:
    """Return a `Way` to compute the problem by jax-linear-attention. The implementation is insist["impl"]; if absent, the
    library chooses one."""
    if mode == "step":
        raise UnavailableError("has no step of one token")
    if problem.gate == "none" and not problem.delta:
        raise UnavailableError("has no recurrence without gates")
    from jla import ops  # pyright: ignore[reportMissingImports]

    kinds = {True: dict(none="deltanet", key="kda"), False: dict(key="gla")}[problem.delta]
    kind = kinds.get(problem.gate, "gated_deltanet" if problem.delta else "simple_gla")
    # 0 is padding
    options = insist if problem.packed == 1 else insist | dict(segment_ids=jnp.asarray(sequence_of_token(problem) + 1))

    def forward(arrays, repeats=1):
        gates = {name: arrays[name] for name in ("g", "beta") if name in arrays}
        if "gk" in arrays:
            gates["g"] = arrays["gk"]
        if "g_gamma" in arrays:
            gates["g"] = jnp.broadcast_to(arrays["g_gamma"], arrays["value"].shape[:3])
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        if repeats > 1:
            q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
        return ops.linear_attention(kind, q, k, v, **gates, **options)[0]

    try:
        return by_jax("jla", forward, mode, arrays, d_output)
    except (TypeError, ValueError):  # some of its kernels take no shared heads
        if problem.G == problem.H:
            raise
        repeated = functools.partial(forward, repeats=problem.H // problem.G)
        return by_jax("jla", repeated, mode, arrays, d_output)


def by_jax(name: str, forward: Callable[[dict], jax.Array], mode: str, arrays: dict[str, jax.Array], d_output) -> Way:
    """Return a `Way` to compute forward(arrays) by JAX, and its gradient too unless mode is "forward"."""

    def both(arrays):
        output, pull = jax.vjp(forward, arrays)
        return output, pull(d_output)[0]

    program = jax.jit(forward if mode == "forward" else both).lower(arrays).compile()
    return Way(name, functools.partial(program, arrays))


def mamba(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state) -> Way:
    """Return a `Way` to compute the problem by mamba-ssm's kernels of state-space duality.

    They decay a token by exp(dt A) and add dt x B^T: dt = -g and A = -1, x = v / dt, and C = softmax_scale * q.
    """
    if mode == "step" or problem.gate != "head" or problem.delta:
        raise UnavailableError("computes forward and train with a gate per head, without the delta rule")
    of_gpus()
    import torch  # pyright: ignore[reportMissingImports]
    from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
        mamba_chunk_scan_combined,
    )

    A = -torch.ones(problem.H, device=DEVICE)
    dt = -arrays["g"]
    x = (arrays["value"].astype(jnp.float32) / dt[..., None]).astype(problem.dtype)
    given = dict(x=x, dt=dt, B=arrays["key"], C=arrays["query"] * problem.K**-0.5)
    given = {name: tensor(x) for name, x in given.items()}
    packing = {} if problem.packed == 1 else dict(seq_idx=torch.from_numpy(sequence_of_token(problem)).to(DEVICE))

    def run(x, dt, B, C):
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=256, **packing)

    return by_torch("mamba-ssm", run, mode, given, d_output)


def sequence_of_token(problem: Problem) -> np.ndarray:
    """Return the number of each token's packed sequence, [1, B T]."""
    lengths = np.diff(problem.boundaries)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


def fla(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state, **insist) -> Way:
    """Return a `Way` to compute the problem by fla-core: its chunk kernels, which are tuned at the first call, or its kernel of
    one token. insist: further arguments of its function."""
    of_gpus()
    import torch  # pyright: ignore[reportMissingImports]

    names = {"query": "q", "key": "k", "value": "v", "gk": "gk" if mode == "step" and not problem.delta else "g"}
    given = {names.get(name, name): tensor(x) for name, x in arrays.items()}
    options: dict[str, Any] = {}
    if problem.gate == "constant" and problem.delta:
        raise UnavailableError("has no delta rule with a constant gate")
    if mode == "step":
        given = {name: x if name == "g_gamma" else x[:, None] for name, x in given.items()}
        options = dict(initial_state=tensor(state), output_final_state=True)
    elif problem.packed > 1:
        options = dict(cu_seqlens=torch.from_numpy(problem.boundaries).to(DEVICE, torch.int64))
    op, shared = fla_operator(problem, mode), problem.H // problem.G

    def run(q, k, **rest):
        if shared > 1:
            q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
        return op(q=q, k=k, **rest, **options, **insist)[0]

    return by_torch("fla-core", run, mode, given, d_output)


def fla_operator(problem: Problem, mode: str) -> Callable:
    """Return fla-core's function for the problem's gate and rule: its chunk kernel, or its kernel of one token if mode is
    "step"."""
    from fla import ops  # pyright: ignore[reportMissingImports]

    if mode == "step":
        return {
            (False, "key"): ops.fused_recurrent_gla,
            (True, "none"): ops.fused_recurrent_delta_rule,
            (True, "head"): ops.fused_recurrent_gated_delta_rule,
            (True, "key"): ops.fused_recurrent_kda,
        }.get((problem.delta, problem.gate), ops.fused_recurrent_simple_gla)
    return {
        (False, "none"): lambda **x: ops.chunk_linear_attn(**x, normalize=False),
        (False, "key"): ops.chunk_gla,
        (True, "none"): ops.chunk_delta_rule,
        (True, "head"): ops.chunk_gated_delta_rule,
        (True, "key"): ops.chunk_kda,
    }.get((problem.delta, problem.gate), ops.chunk_simple_gla)


def of_gpus():
    """Raise UnavailableError unless JAX computes on a GPU."""
    if Backend.here() is not Backend.GPU:
        raise UnavailableError("needs a GPU")


def tensor(x: jax.Array):
    """Return a copy of an array as a tensor of PyTorch on the GPU."""
    import torch  # pyright: ignore[reportMissingImports]

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return torch.from_numpy(np.array(x, np.float32)).to(DEVICE).to(dtypes[str(x.dtype)])


def by_torch(name: str, run: Callable, mode: str, given: dict, d_output) -> Way:
    """Return a `Way` to compute run(**given) by PyTorch, and its gradient too if mode is "train"."""
    import torch  # pyright: ignore[reportMissingImports]

    def wait(_):
        torch.cuda.synchronize()

    def forward():
        with torch.no_grad():
            return run(**given)

    if mode != "train":
        return Way(name, forward, wait)
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    d = tensor(d_output)

    def both():
        output = run(**leaves)
        return output, torch.autograd.grad(output, list(leaves.values()), d, allow_unused=True)

    return Way(name, both, wait)


PEERS: dict[str, Callable[..., Way]] = dict(zip(glax_cli.published.PEERS, (fla, mamba, jla, ejkernel), strict=True))


def as_numpy(x) -> np.ndarray:
    """Return a result of JAX or of torch as a float64 array."""
    return np.asarray(x if isinstance(x, jax.Array) else x.detach().float().cpu(), np.float64)

"""The subjects of the benchmarks: glax by platform, and peers as small adapters, (call, mode, arrays, d_output) -> Way.

The adapters of fla-core, mamba-ssm, jax-linear-attention and ejkernel are those of `glax bench`. Here are the recurrence as one
writes it in plain JAX, under JAX's own autodiff, and in PyTorch for a CPU.
"""

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from calls import Call
from jax import lax

from glax._src.core.bind import bind
from glax._src.core.known_miscompiles import version_of
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.cli import peers as cli
from glax.cli.cases import GATES
from glax.cli.measure import Way
from glax_cli.published import PEERS

PLATFORMS = ("pallas", "triton", "xla", "cuda", "cpp")
CALLS = 8  # of a loop on the device


# ---- glax ----


def by_glax(call: Call, mode: str, arrays: dict, d_output, loop: bool = False, **insist) -> Way:
    """Return glax's `Way`. insist: `platform` and `cfg`. loop: CALLS calls in one program, without the time of launching them."""

    def outputs(arrays, **more):
        return call.outputs(arrays, **insist, **more)

    def train(arrays, cotangents, **more):
        found, pull = jax.vjp(functools.partial(outputs, **more), arrays)
        return found, pull(cotangents)[0]

    operands, f = ((arrays,), outputs) if mode == "forward" else ((arrays, cotangents(call, arrays, d_output)), train)

    def run(*operands):
        def body(_, scale):
            # Each call's scale depends on every result of the call before, which the barrier keeps whole.
            results = jax.tree.leaves(lax.optimization_barrier(f(*operands, softmax_scale=scale)))
            last = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in results)
            return jnp.where(last == 1.5, 0.5 * scale, scale)

        return lax.fori_loop(0, CALLS, body, jnp.float32(call.K**-0.5))

    program = jax.jit(run if loop else f)  # called as users call it
    return Way("glax", functools.partial(program, *operands), calls=CALLS if loop else 1)


def cotangents(call: Call, arrays: dict, d_output) -> tuple[jax.Array, ...]:
    """Return d_output, normal numbers for stored states, and zeros for a final state."""
    _, *others = jax.eval_shape(call.outputs, arrays)
    made = [jax.random.normal(jax.random.key(5), x.shape, x.dtype) for x in others]
    return d_output, *(jnp.zeros_like(x) if name == "final_state" else x
                       for name, x in zip(call.output_names[1:], made, strict=True))  # fmt: skip


def kernels_here(call: Call, arrays: dict) -> dict[str, dict]:
    """Return what forces each kernel whose forward runs the call here: its platform and its heuristic config."""
    load_kernels()
    r = bind(**arrays, **call.options())
    specs = [s for s in kernel_registry.kernels.values() if not s.is_gradient and s.refusal(r) is None]
    return {
        f"glax {s.algorithm} {s.platform}": dict(platform=str(s.platform), cfg=s.config.heuristic(r)) for s in specs
    }


# ---- plain JAX: query, key [B, T, H, K], value [B, T, H, V], log decays g [B, T, H, K] or [B, T, H], beta [B, T, H] ----


def one_token(S, row):
    """S_bar = exp(g_t) S_{t-1},   S_t = S_bar + k_t u_t^T,   o_t = S_t^T q_t; u_t = v_t, or beta_t (v_t - S_bar^T k_t)."""
    q, k, v, decay, *beta = row
    S = S * decay
    for b in beta:
        v = b[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k))
    S = S + k[..., :, None] * v[..., None, :]
    return S, jnp.einsum("bhk,bhkv->bhv", q, S)


def token_by_token(q, k, v, g, *beta, block: int = 1):
    """Scan over tokens. Autodiff saves a state a token, or a block, whose others it computes again."""
    B, T, H, K = q.shape
    decay = jnp.exp(g)[..., None, None] if g.ndim == 3 else jnp.exp(g)[..., None]
    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (q * K**-0.5, k, v, decay, *beta))
    first = jnp.zeros((B, H, K, v.shape[3]), q.dtype)
    if block == 1:
        return jnp.moveaxis(lax.scan(one_token, first, rows)[1], 0, 1)
    blocks = tuple(x.reshape(T // block, block, *x.shape[1:]) for x in rows)
    o = lax.scan(jax.checkpoint(functools.partial(lax.scan, one_token)), first, blocks)[1]
    return jnp.moveaxis(o.reshape(T, *o.shape[2:]), 0, 1)


def in_chunks(q, k, v, g, *beta, size: int):
    """The chunked form: all that needs no state in batched products, and a lax.scan that passes the state along.

    With G the sum of g inside the chunk, o_i = (q_i e^{G_i}) S + sum_{j <= i} (q_i . k_j e^{G_i - G_j}) u_j and
    S' = e^{G_last} S + sum_j (k_j e^{G_last - G_j}) u_j^T. A gate per channel splits e^{G_i - G_j} about the middle of
    the chunk, which overflows if half a chunk decays by more than e^-88: correct for gates such as log-sigmoid only.
    u = v, or with beta u = v' - w S by one inverse a chunk, as the papers of the delta rule write it.
    """
    B, T, H, K = q.shape
    V, per_head = v.shape[3], g.ndim == 3

    def split(x):
        # [chunks, B, H, size, width]
        return x.reshape(B, T // size, size, H, -1).transpose(1, 0, 3, 2, 4)

    q, k, v, g, *beta = map(split, (q * K**-0.5, k, v, g, *beta))
    G = jnp.cumsum(g, 3)
    last, causal = G[..., -1:, :], jnp.tril(jnp.ones((size, size), bool))
    if per_head:
        decay = jnp.exp(jnp.where(causal, G - G.mT, -jnp.inf))
        pairs = q @ k.mT * decay
    else:
        M = G - G[..., size // 2, None, :]
        pairs = jnp.where(causal, (q * jnp.exp(M)) @ (k * jnp.exp(-M)).mT, 0)
    w = ()
    for b in beta:  # of per-head gates
        A = jnp.eye(size) + jnp.tril((b * k) @ k.mT * decay, -1)
        v, *w = jnp.split(inverse(A) @ jnp.concatenate([b * v, b * jnp.exp(G) * k], -1), [V], axis=-1)

    def step(S, chunk):
        q, k, u, pairs, carried, *w = chunk
        for each in w:
            u = u - each @ S
        return S * carried + k.mT @ u, q @ S + pairs @ u

    rows = (q * jnp.exp(G), k * jnp.exp(last - G), v, pairs, jnp.exp(last).mT, *w)
    o = lax.scan(step, jnp.zeros((B, H, K, V), q.dtype), rows)[1]
    return o.transpose(1, 0, 3, 2, 4).reshape(B, T, H, V)


def inverse(A):
    """The inverse of unit lower triangular matrices, by halves: [[A, 0], [B, C]] to [[A', 0], [-C' B A', C']].

    The gradient of lax.linalg.triangular_solve can stop forever on CPUs with JAX 0.10.
    """
    if A.shape[-1] == 1:
        return jnp.ones_like(A)
    n = A.shape[-1] // 2
    upper, lower = inverse(A[..., :n, :n]), inverse(A[..., n:, n:])
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
    return jnp.concatenate([top, jnp.concatenate([-lower @ A[..., n:, :n] @ upper, lower], -1)], -2)


PLAIN = {
    "scan": token_by_token,
    "scan, a state a block": functools.partial(token_by_token, block=64),
    "chunks of 64": functools.partial(in_chunks, size=64),
    "chunks of 32": functools.partial(in_chunks, size=32),
}


def by_plain_jax(subject: str, call: Call, mode: str, arrays: dict, d_output) -> Way:
    return cli.by_jax(subject, lambda arrays: PLAIN[subject](*positional(call, arrays)), mode, arrays, d_output)


def positional(call: Call, arrays: dict) -> list:
    """Return query, key, value, the gate and beta."""
    if call.gate not in ("key", "head") or call.packed > 1 or call.G != call.H:
        raise cli.UnavailableError(
            "takes a gate per key or per head, as many heads of keys as of values, and no packing"
        )
    return [arrays[name] for name in ("query", "key", "value", GATES[call.gate], "beta") if name in arrays]


# ---- PyTorch on a CPU ----


def by_torch(size: int, call: Call, mode: str, arrays: dict, d_output) -> Way:
    """The chunked form in PyTorch under its own autodiff, without beta: what its users write for a CPU."""
    import torch

    if call.delta:
        raise cli.UnavailableError("has no delta rule")
    inputs, do = ([torch.from_numpy(np.array(x)) for x in xs] for xs in (positional(call, arrays), [d_output]))

    def run():
        if mode == "forward":
            with torch.no_grad():
                return torch_in_chunks(torch, *inputs, size)
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = torch_in_chunks(torch, *leaves, size)
        return output, torch.autograd.grad(output, leaves, do[0])

    return Way("torch", run, lambda _: None)


def torch_in_chunks(torch, q, k, v, g, size):
    (B, T, H, K), per_head = q.shape, g.ndim == 3

    def split(x):
        return x.reshape(B, T // size, size, H, -1).permute(1, 0, 3, 2, 4)

    q, k, v, g = split(q * K**-0.5), split(k), split(v), split(g)
    G = g.cumsum(3)
    last = G[..., -1:, :]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    if per_head:
        pairs = (q @ k.mT) * torch.exp((G - G.mT).masked_fill(~causal, -torch.inf))
    else:
        M = G - G[..., size // 2, None, :]
        pairs = ((q * M.exp()) @ (k * (-M).exp()).mT).masked_fill(~causal, 0)
    added, decays = (k * (last - G).exp()).mT @ v, last.exp().mT
    states = [torch.zeros_like(added[0])]
    for decay, more in zip(decays[:-1], added[:-1], strict=True):
        states.append(states[-1] * decay + more)
    o = (q * G.exp()) @ torch.stack(states) + pairs @ v
    return o.permute(1, 0, 3, 2, 4).reshape(B, T, H, -1)


def added_up(subject: str, call: Call, mode: str, arrays: dict, d_output) -> Way:
    """Move as much memory as a forward and its gradient, without a recurrence: how the machine alone scales with T."""
    return cli.by_jax(subject, lambda arrays: sum(arrays.values()), mode, arrays, d_output)


# ---- the table ----


def of_cli(name: str, **options) -> Callable[..., Way]:
    def prepare(call: Call, mode: str, arrays: dict, d_output) -> Way:
        if lacking := cli.missing(name):
            raise cli.UnavailableError(f"{', '.join(lacking)} not installed")
        if call.packed > 1 and call.packing != "cu_seqlens":
            raise cli.UnavailableError(f"is not measured with documents by {call.packing}")
        return cli.PEERS[name](call, mode, arrays, d_output, None, **options)

    return prepare


def named(call: Call, subject: str) -> str:
    """Return a subject's name in results, a library's with its version."""
    library = {"fla": "fla-core", "safe": "fla-core", "mamba": "mamba-ssm", "mosaic": "jla"}.get(subject, subject)
    if library in PEERS:
        distribution = list(PEERS[library].values())[-1]
        rest = {"safe": ", safe_gate", "mosaic": ", mosaic_gpu"}.get(subject, "")
        return " ".join(filter(None, (distribution, version_of(distribution)))) + rest
    return f"glax, {subject}" if subject in PLATFORMS else subject


def torch_peer(call: Call) -> str:
    """Return the library of PyTorch that users of such a layer run."""
    return "mamba" if call.gate == "head" and not call.delta and call.name else "fla"


SUBJECTS: dict[str, Callable[..., Way]] = {
    "glax": by_glax,
    **{name: functools.partial(by_glax, platform=name) for name in PLATFORMS},
    "fla": of_cli("fla-core"),
    "safe": of_cli("fla-core", safe_gate=True),  # right only where the gates have a lower bound
    "mamba": of_cli("mamba-ssm"),
    "jla": of_cli("jla"),
    "mosaic": of_cli("jla", impl="mosaic_gpu"),
    "ejkernel": of_cli("ejkernel"),
    **{name: functools.partial(by_plain_jax, name) for name in PLAIN},
    "sum": functools.partial(added_up, "sum"),
}
if importlib.util.find_spec("torch"):
    SUBJECTS |= {f"torch, chunks of {size}": functools.partial(by_torch, size) for size in (64, 32)}

"""The chunked form in PyTorch under its own autodiff, where PyTorch is installed: what its users write for a CPU."""

import jax
import jax.numpy as jnp
import numpy as np


def with_torch(operands, gradient: bool) -> dict:
    """Functions of operands (which they ignore: theirs are PyTorch's), by name; each returns what the baselines return."""
    try:
        import torch
    except ImportError:
        return {}

    q, k, v, g, do = (torch.from_numpy(np.array(x)) for x in operands)

    def run(size: int):
        if not gradient:
            with torch.no_grad():
                return as_jax(in_chunks(torch, q, k, v, g, size))
        inputs = [x.detach().requires_grad_() for x in (q, k, v, g)]
        loss = (in_chunks(torch, *inputs, size) * do).sum()
        return as_jax(loss.detach()), [as_jax(d) for d in torch.autograd.grad(loss, inputs)]

    return {f"torch, chunks of {size}": lambda *_, size=size: run(size) for size in (64, 32)}


def as_jax(x) -> jax.Array:
    return jnp.from_dlpack(x.contiguous())  # the same memory


def in_chunks(torch, q, k, v, g, size):
    """As in peers.py: all that needs no state in batched products, and a loop over chunks that passes the state along."""
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

"""The peers of benchmarks/models.py: fla-core, mamba-ssm's Triton kernels, and jax-linear-attention."""

import jax
from layers import Layer, with_gradient

from glax.cli.measure import Way

MIB = 2**20


class TorchPeer:
    """A layer by fla-core or mamba-ssm, called from PyTorch as their users call it."""

    def __init__(self, layer: Layer, operands: list[jax.Array]):
        import torch

        self.torch = torch
        q, k, v, g, self.do = (torch.from_dlpack(x).clone() for x in operands)
        self.inputs, self.op = self.mamba(q, k, v, g) if layer.peer == "mamba" else self.fla(layer, q, k, v, g)
        for x in self.inputs:
            x.requires_grad_()

    @staticmethod
    def mamba(q, k, v, g):
        """State-space duality: a token decays by exp(dt A) and adds dt x B^T, so that dt = -g with A = -1."""
        import torch
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        A = -torch.ones(v.shape[2], device="cuda")
        inputs = [v, (-g).contiguous(), k, q]
        return inputs, lambda: mamba_chunk_scan_combined(inputs[0], inputs[1], A, inputs[2], inputs[3], chunk_size=256)

    @staticmethod
    def fla(layer: Layer, q, k, v, g):
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla

        if layer.gate == "constant":
            inputs = [q, k, v]
            return inputs, lambda: chunk_simple_gla(*inputs, g_gamma=g)[0]
        op, inputs = (chunk_gla if layer.gate == "key" else chunk_simple_gla), [q, k, v, g]
        return inputs, lambda: op(*inputs)[0]

    def forward(self):
        with self.torch.no_grad():
            return self.op()

    def both(self):
        return self.torch.autograd.grad(self.op(), self.inputs, self.do)

    def ways(self) -> dict[str, Way]:
        def wait(_):
            self.torch.cuda.synchronize()

        return dict(forward=Way("forward", self.forward, wait), both=Way("both", self.both, wait))

    def mib(self) -> float:
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self.both()
        self.torch.cuda.synchronize()
        return self.torch.cuda.max_memory_allocated() / MIB


class JaxImplementation:
    """A layer by a function of JAX, (q, k, v, g) -> output."""

    def __init__(self, output, operands: list[jax.Array]):
        self.operands, self.forward, self.both = operands, jax.jit(output), with_gradient(output)
        jax.block_until_ready((self.both(*operands), self.forward(*operands[:4])))

    def ways(self) -> dict[str, Way]:
        return dict(
            forward=Way("forward", lambda: self.forward(*self.operands[:4])),
            both=Way("both", lambda: self.both(*self.operands)),
        )

    def mib(self) -> float:
        need = self.both.lower(*self.operands).compile().memory_analysis()  # compiled already, so this is a lookup
        return (need.argument_size_in_bytes + need.output_size_in_bytes + need.temp_size_in_bytes) / MIB


def jla_output(layer: Layer):
    """Return (q, k, v, g) -> output by jax-linear-attention, documents as its `segment_ids`."""
    import jax.numpy as jnp
    from jla import ops

    name = "gla" if layer.gate == "key" else "simple_gla"
    segments = {}
    if layer.cuts:
        rows = jnp.searchsorted(jnp.asarray(layer.cuts), jnp.arange(layer.T), side="right")
        segments = dict(segment_ids=rows.astype(jnp.int32)[None])

    def output(q, k, v, g):
        return ops.linear_attention(name, q, k, v, g=g, **segments)[0]

    return output

"""Compute attention over depth, which takes the place of residuals in some models: fla's with attnres_block_size, and Kimi K3.

Sublayers, which are mixers and MLPs in turn, form groups of consecutive ones. Each reads a mixture of sources: the embedding, the
sum of the outputs of each whole group before its own, and the sum of those of its own group so far.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glax.models.model import Block, CausalLM, Mixing
from glax.models.names import Rules
from glax.nn import RMSNorm
from glax.nn.parts import EMBED, for_rows, kernel_of, linear
from glax.nn.passes import Rows

Sums = tuple[Float[Array, "*rows D"], ...]  # the embedding, and the sum of each whole group


class AttentionResidual(nnx.Module):
    """Compute sum over i of p_i x_i [*rows, D] of each row's sources x_i,   p = softmax over i of w^T RMSNorm(x_i), in float32.

    w [D] and the scale of RMSNorm are parameters. A call takes the list of sources, [*rows, D] each, and returns their dtype.
    width: D.

    Kimi Team 2026, https://arxiv.org/abs/2603.15031.
    """

    def __init__(self, width: int, *, norm_eps: float, **options):
        self.proj = linear(width, 1, (EMBED, None), **options)
        self.norm = RMSNorm(width, epsilon=norm_eps, param_dtype=options["param_dtype"])

    def __call__(self, sources: Sequence[Float[Array, "*rows D"]]) -> Float[Array, "*rows D"]:
        wide = [x.astype(jnp.float32) for x in sources]
        weight = for_rows(wide[0], kernel_of(self.proj)[:, 0])
        scores = jnp.stack([(self.norm(x) * weight).sum(-1) for x in wide])
        p = jax.nn.softmax(scores, 0)
        return jnp.asarray(sum(p[i][..., None] * x for i, x in enumerate(wide))).astype(sources[0].dtype)


def opened_groups(layer: int, size: int) -> tuple[bool, bool]:
    """Return (whether the mixer of layer number `layer`, from 0, is the first sublayer of a group; whether the MLP is). size:
    the number of sublayers in a group; each layer has two."""
    return 2 * layer % size == 0, (2 * layer + 1) % size == 0


class AttentionResidualBlock(nnx.Module):
    """Compute a mixer and an MLP, each of which reads the norm of an `AttentionResidual` of `sums` and x.

    opens_groups: whether the mixer opens a group, and whether the MLP does. A sublayer that opens a group appends x to `sums`,
    as the sum of the group before or the embedding, and its output is the new x. The output of another sublayer is added to x.
    `mix` takes and returns the pair (x [*rows, D], sums) in place of x.
    """

    def __init__(
        self,
        attn_residual: AttentionResidual,
        attn_norm: Any,
        attn: Mixing,
        mlp_residual: AttentionResidual,
        mlp_norm: Any,
        mlp: Any,
        *,
        opens_groups: tuple[bool, bool],
    ):
        self.attn_residual, self.attn_norm, self.attn = attn_residual, attn_norm, attn
        self.mlp_residual, self.mlp_norm, self.mlp, self.opens_groups = mlp_residual, mlp_norm, mlp, opens_groups

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.attn.empty_state(batch, max_length)

    def mix(
        self, pair: tuple[Float[Array, "*rows D"], Sums], state: dict, rows: Rows, *rest
    ) -> tuple[tuple[Array, Sums], dict]:
        """Return the pair behind the block, and the new state. rest: further arguments of the mixer."""
        x, sums = pair
        attn_opens, mlp_opens = self.opens_groups
        # The first sublayer of a model has one source, and its residual is not read, as in the models' own code.
        read = self.attn_residual([*sums, x]) if sums else x
        y, after = self.attn.mix(self.attn_norm(read), state, rows, *rest)
        x, sums = (y, (*sums, x)) if attn_opens else (x + y, sums)
        y = self.mlp(self.mlp_norm(self.mlp_residual([*sums, x])))
        x, sums = (y, (*sums, x)) if mlp_opens else (x + y, sums)
        return (x, sums), dict(after)


def blocks_of(
    layers: int, size: int | None, residual: Callable, norm: Callable, mixer: Callable, mlp: Callable
) -> list:
    """Return the blocks of a model: `AttentionResidualBlock`s with groups of `size` sublayers, or `Block`s if size is None.

    residual(), norm(), mixer(layer), mlp(layer): return the modules of block number `layer`, from 0, in the order of its parts.
    """

    def block(layer: int) -> Block | AttentionResidualBlock:
        if size is None:
            return Block(norm(), mixer(layer), norm(), mlp(layer))
        parts = residual(), norm(), mixer(layer), residual(), norm(), mlp(layer)
        return AttentionResidualBlock(*parts, opens_groups=opened_groups(layer, size))

    return [block(layer) for layer in range(layers)]


class AttentionResidualLM(CausalLM):
    """Define a CausalLM of `AttentionResidualBlock`s, whose last norm reads an `AttentionResidual` of all sums.

    output_residual: that residual; None for a CausalLM of blocks with plain residuals.
    """

    def __init__(self, *args, output_residual: AttentionResidual | None, **options):
        super().__init__(*args, **options)
        self.output_residual = output_residual

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> Any:
        x = super().begin(tokens, rows)
        return x if self.output_residual is None else (x, ())

    def through(self, x: Any, states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
        x, states = super().through(x, states, rows)
        if self.output_residual is None:
            return x, states
        last, sums = x
        return self.output_residual([*sums, last]), states

    def cannot_scan(self) -> str | None:
        has_plain_residuals = self.output_residual is None
        return None if has_plain_residuals else "with attention residuals a layer reads the outputs of all earlier ones"


def residual_names(output: str, attn: str, mlp: str) -> Rules:
    """Return rules that name each `AttentionResidual` of a model in a checkpoint.

    output, attn, mlp: the names there of the residuals before the last norm, the mixer and the MLP, to which `_norm` or `_proj`
    is added. output includes the name of the module that holds it.
    """
    inside = tuple((rf"\.{part}_residual\.", f".{name}_") for part, name in (("attn", attn), ("mlp", mlp)))
    return ((r"^output_residual\.", f"{output}_"), *inside)

"""Replace residual sums by attention residuals: each sublayer reads a mixture of the outputs of earlier sublayers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glax.models.model import Block, CausalLM
from glax.nn.norms import RMSNorm
from glax.nn.parts import EMBED, kernel_of, linear
from glax.nn.passes import Rows


class Mixture(nnx.Module):
    """Compute sum over i of p_i x_i,   p = softmax over i of w^T RMSNorm(x_i).   https://arxiv.org/abs/2603.15031"""

    def __init__(self, width: int, epsilon: float, options: dict):
        self.proj = linear(width, 1, (EMBED, None), kernel_init=nnx.initializers.zeros, **options)
        self.norm = RMSNorm(width, epsilon=epsilon, param_dtype=options["param_dtype"])

    def __call__(self, sources: Sequence[Float[Array, "*rows D"]]) -> Float[Array, "*rows D"]:
        wide = [x.astype(jnp.float32) for x in sources]
        weight = kernel_of(self.proj)[:, 0].astype(jnp.float32)
        scores = jnp.stack([self.norm(x) @ weight for x in wide])
        p = jax.nn.softmax(scores, 0)
        return jnp.asarray(sum(p[i][..., None] * x for i, x in enumerate(wide))).astype(sources[0].dtype)


def add_mixtures(model: CausalLM, epsilon: float, options: dict):
    """Give each sublayer, and the head, a mixture. Nothing reads the mixture of the first sublayer, as in fla."""
    for block in model.blocks:
        block.attn_res, block.mlp_res = (Mixture(model.width, epsilon, options) for _ in range(2))
    model.res = Mixture(model.width, epsilon, options)


def through_mixtures(model: CausalLM, size: int, x: Array, states: list[dict], rows: Rows) -> tuple[Array, list[dict]]:
    """Return x behind all blocks, and the new states. The outputs of `size` consecutive sublayers are summed to one source of
    the mixtures."""
    sources, written, after = [x], None, []  # written: the sum of the sublayers since the last source

    def mixed(mixture: Mixture, begins_block: bool):
        nonlocal sources, written
        if written is None:
            return mixture(sources) if len(sources) > 1 else sources[0]
        read = [*sources, written]
        if begins_block:
            sources, written = read, None
        return mixture(read)

    for i, (block, state) in enumerate(zip(model.blocks, states, strict=True)):
        h = mixed(block.attn_res, (2 * i) % size == 0)
        y, state = attention_part(block, model.arguments(i), model, h, state, rows)
        written = y if written is None else written + y
        h = mixed(block.mlp_res, (2 * i + 1) % size == 0)
        y = block.mlp(block.mlp_norm(h))
        written = y if written is None else written + y
        after.append(state)
    return model.res([*sources, written]), after


def attention_part(block: Block, arguments: tuple, model: CausalLM, h: Array, state: dict, rows: Rows):
    return model.rematerialised(block.attn.mix, rows)(block.attn_norm(h), state, *arguments)

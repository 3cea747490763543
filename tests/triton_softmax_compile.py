"""Compile the kernels of softmax attention without a GPU, and report the resources of each.

python -m tests.triton_softmax_compile 90 "softmax256 bfloat16 256" prints a line of JSON per kernel of the forward and the
gradient, in the form of `tests.triton_compile`. The last two words are a dtype and the width of heads. With a first word like
"chosen16", rows read blocks of so many keys. A first word that begins with "step" is a step over caches, or with "latent" over
caches whose keys hold their values, with 64 other channels. With "many" in it 40 heads of q read one of k, and with "stored" the
caches are float32.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp

from glax._src.kernels.common.softmax import ReadBlocks, SoftmaxOperands, StepOperands
from glax._src.kernels.triton import config, softmax, softmax_step
from glax._src.kernels.triton.softmax_config import forward_config, gradient_config, step_config
from tests.triton_compile import Launch, compiled, launches


def shipped(dtype: str, width: int, size: int | None) -> list[Launch]:
    """Return the launches of the heuristic configs. size: of chosen blocks of keys."""

    def call():
        q, k, rows = (jnp.zeros((8, 2048, heads, width), dtype) for heads in (16, 4, 1))
        first = rows[:, :, 0, 0].astype(jnp.int32)
        blocks = None if size is None else ReadBlocks(jnp.zeros((*first.shape, 5), jnp.int32), size)
        return SoftmaxOperands(q, k, k, first, first, None, blocks)

    operands = jax.eval_shape(call)
    log_total = jax.ShapeDtypeStruct(operands.q.shape[:3], jnp.float32)

    def gradient(operands, o, log_total):
        return softmax.gradient(operands, o, log_total, o, 0.1, gradient_config(operands))

    found = launches(lambda operands: softmax.forward(operands, 0.1, forward_config(operands)), operands)
    return found + launches(gradient, operands, operands.q, log_total)


def step(kind: str, dtype: str, width: int) -> list[Launch]:
    """Return the launch of the heuristic config of a step."""

    def call():
        within, many = "latent" in kind, "many" in kind
        key, (HQ, HK) = (width + 64, (32, 1)) if within else (width, (16, 4))
        if many:
            HQ, HK = 40, 1
        q, stored = jnp.zeros((8, 1, HQ, key), dtype), "float32" if "stored" in kind else dtype
        k, v = jnp.zeros((8, 2048, HK, key), stored), jnp.zeros((8, 2048, HK, width), stored)
        place = jnp.zeros((8, 1), jnp.int32)
        return StepOperands(q, k, None if within else v, place, place, place[:, 0])

    operands = jax.eval_shape(call)
    return launches(lambda x: softmax_step.forward(x, 0.1, width, step_config(x, width)), operands)


if __name__ == "__main__":
    config.capability = lambda: divmod(int(sys.argv[1]), 10)  # what the heuristics ask about the GPU
    for what in sys.argv[2:]:
        kind, dtype, width = what.split()
        is_step = kind.startswith(("step", "latent"))
        size = re.fullmatch(r"chosen(\d+)", kind)
        found = step(kind, dtype, int(width)) if is_step else shipped(dtype, int(width), size and int(size[1]))
        for each in found:
            usage = compiled(each, int(sys.argv[1]))
            matrix = sorted(set(re.findall(r"wgmma|mma\.sync|tcgen05\.mma", usage.ptx)))
            row = dict(kernel=each.kernel.__name__, runs=what, registers=usage.registers, matrix=matrix)
            print(json.dumps(row | dict(shared=usage.shared, stack=usage.stack)), flush=True)

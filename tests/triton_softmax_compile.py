"""Compile the kernels of softmax attention without a GPU, and report the resources of each.

python -m tests.triton_softmax_compile 90 "softmax256 bfloat16 256" prints a line of JSON per kernel of the forward and the
gradient, in the form of `tests.triton_compile`. The last two words are a dtype and the width of heads.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp

from glax._src.kernels.common.softmax import SoftmaxOperands
from glax._src.kernels.triton import config, softmax
from glax._src.kernels.triton.softmax_config import forward_config, gradient_config
from tests.triton_compile import Launch, compiled, launches


def shipped(dtype: str, width: int) -> list[Launch]:
    """Return the launches of the heuristic configs."""

    def call():
        q, k, rows = (jnp.zeros((8, 2048, heads, width), dtype) for heads in (16, 4, 1))
        first = rows[:, :, 0, 0].astype(jnp.int32)
        return SoftmaxOperands(q, k, k, first, first, None)

    operands = jax.eval_shape(call)
    log_total = jax.ShapeDtypeStruct(operands.q.shape[:3], jnp.float32)

    def gradient(operands, o, log_total):
        return softmax.gradient(operands, o, log_total, o, 0.1, gradient_config(operands))

    found = launches(lambda operands: softmax.forward(operands, 0.1, forward_config(operands)), operands)
    return found + launches(gradient, operands, operands.q, log_total)


if __name__ == "__main__":
    config.capability = lambda: divmod(int(sys.argv[1]), 10)  # what the heuristics ask about the GPU
    for what in sys.argv[2:]:
        _, dtype, width = what.split()
        for each in shipped(dtype, int(width)):
            usage = compiled(each, int(sys.argv[1]))
            matrix = sorted(set(re.findall(r"wgmma|mma\.sync|tcgen05\.mma", usage.ptx)))
            row = dict(kernel=each.kernel.__name__, runs=what, registers=usage.registers, matrix=matrix)
            print(json.dumps(row | dict(shared=usage.shared, stack=usage.stack)), flush=True)

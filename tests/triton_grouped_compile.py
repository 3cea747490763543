"""Compile the kernels of products of grouped rows without a GPU, and report the resources of each.

python -m tests.triton_grouped_compile 90 "prefill bfloat16 262144" prints a line of JSON per kernel, in the form of
`tests.triton_compile`. The last two words are a dtype and how many rows 64 groups have. Matrices are 2304 x 1024. "decoding" has
no gradient.
"""

import json
import re
import sys

import jax

from glax._src.kernels.common.grouped import GroupedOperands
from glax._src.kernels.triton import config, grouped
from glax._src.kernels.triton.grouped_config import product_config, sum_config
from tests.triton_compile import Launch, compiled, launches


def shipped(name: str, dtype: str, M: int) -> list[Launch]:
    """Return the launches of the heuristic configs: the product, by matrices as they are and transposed, and the sums."""
    E, K, N = 64, 2304, 1024
    x, y, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((M, K), (M, N), (E, K, N)))
    counts = jax.ShapeDtypeStruct((E,), "int32")

    def products(given, transposed: bool):
        return launches(lambda o: grouped.products(o, product_config(o), transposed), GroupedOperands(given, w, counts))

    if name == "decoding":
        return products(x, False)
    return (
        products(x, False)
        + products(y, True)
        + launches(lambda o: grouped.sums(o, sum_config(o)), GroupedOperands(x, y, counts))
    )


if __name__ == "__main__":
    config.capability = lambda: divmod(int(sys.argv[1]), 10)  # what the heuristics ask about the GPU
    for what in sys.argv[2:]:
        name, dtype, M = what.split()
        for each in shipped(name, dtype, int(M)):
            usage = compiled(each, int(sys.argv[1]))
            matrix = sorted(set(re.findall(r"wgmma|mma\.sync|tcgen05\.mma", usage.ptx)))
            kernel = each.kernel.__name__ + "^T" * bool(dict(each.constants)["D"].TRANSPOSED)
            row = dict(kernel=kernel, runs=what, registers=usage.registers, matrix=matrix)
            print(json.dumps(row | dict(shared=usage.shared, stack=usage.stack)), flush=True)

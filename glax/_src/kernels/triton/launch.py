"""Launch a Triton kernel from JAX. This is the only file that imports Triton and jax-triton."""

import functools
import inspect
import os
import warnings

# The kernels are tuned with this setting. Triton 3.10 changes the default, and Triton 3.9 warns of that where it is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import jax
import jax_triton
import triton
import triton.language as tl

from glax._src.core.recurrence import varying_like
from glax._src.kernels.triton.compile_ahead import compile_ahead

__all__ = ["launch", "tl", "triton"]

# jax-triton 0.4 renamed this option. It also no longer passes a kernel the output that shares the memory of an operand.
OUTPUTS = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
ALIASES_ARE_PASSED = OUTPUTS == "out_shape"


def launch(kernel, programs: int, operands, outputs, *, warps: int, stages: int, in_place=None, **constants):
    """Run kernel(*operands, *outputs, **constants) with `programs` programs, and return the outputs.

    outputs: (shape, dtype) of each. in_place: {index of an operand: index of the output that shares its memory}.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    call = functools.partial(
        jax_triton.triton_call, kernel=kernel, grid=(programs,), num_warps=warps, num_stages=stages, **constants
    )
    shared = () if ALIASES_ARE_PASSED or not in_place else in_place.values()
    new_outputs = [x for i, x in enumerate(shapes) if i not in shared]
    specialisation = kernel, *(str(x.dtype) for x in (*operands, *new_outputs)), warps, stages, *constants.items()
    compile_ahead(specialisation, functools.partial(call, **{OUTPUTS: new_outputs}), operands)
    aliases = dict(input_output_aliases=in_place) if in_place else {}
    with warnings.catch_warnings():
        # jax-triton 0.4 deprecates this option in favour of references, which 0.3 does not support.
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        results = call(*operands, **{OUTPUTS: shapes}, **aliases)
    return [varying_like(x, operands[0]) for x in results]

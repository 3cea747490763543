"""Launch a Triton kernel from JAX. This is the only file that imports Triton and jax-triton."""

import dataclasses
import functools
import inspect
import os
import re
import warnings
from typing import Any

# The kernels are tuned with this setting. Triton 3.10 changes the default, and Triton 3.9 warns of that where it is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import jax
import jax_triton
import triton
import triton.language as tl

from glax._src.core.recurrence import varying_like
from glax._src.kernels.common.in_place import unfused
from glax._src.kernels.triton.compile_ahead import compile_ahead

__all__ = ["launch", "tl", "triton"]

# jax-triton 0.4 renamed this option. It also no longer passes a kernel the output that shares the memory of an operand.
OUTPUTS = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
ALIASES_ARE_PASSED = OUTPUTS == "out_shape"


def accept_live_operands():
    """Patch jax-triton's rule for dead code, so that it takes the argument that JAX 0.12 adds. jax-triton 0.4.1 raises
    TypeError for it."""
    library = jax_triton.triton_lib
    if not hasattr(library, "pe"):
        return  # jax-triton 0.3 has no such rule
    rule = library.pe.dce_rules[library.triton_kernel_call_p]
    if len(inspect.signature(rule).parameters) == 2:
        library.pe.dce_rules[library.triton_kernel_call_p] = lambda used, *rest: rule(used, rest[-1])


accept_live_operands()


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Hold the constants of a launch, the argument D of every kernel. A kernel reads only those that its launch gives.

    H, HQ, HK, HV: the heads of states, queries, keys and values; HA, HB: the heads of the two operands of a state's scan
    (`chunked.carry_state`). K, V: the rows and columns of a state. C: the tokens of a chunk. BK, BV, BH: the rows, columns and
    heads of a block. IN_BLOCKS: whether a gradient sums over V in blocks of BV columns. SIGN: -1 if a scan is from the last
    token to the first, else 1. DTYPE, PRECISION: of products (`tiles.dot`). FORM: the form of the decay; GATE: what the scans
    of the delta rule read of the decay; HEAD, KEY, VALUE: the parts of the decay that kernels of single tokens read. START,
    D_START: what a scan and its adjoint start from. ADJOINT: whether a scan carries dL/dS. LAST: whether the last segment has
    results too. ERASURE: the form of the erasure. BEFORE: whether e reads the state before the token's decay. PER_TOKEN: the
    rows of a chunk for each token. GRADIENT: whether what the gradient alone reads is stored. GROUP: the heads that a program
    takes in order; GQ, GK, GV: how many of these share a head of the gradient of q, k and v. PAIRS: the (chunk, head) pairs
    that a program of an exact kernel tests.

    Replay: PLACES of a replay ring; REPLAY: the tokens from one write of a state to the next; ALONG: whether what is erased is
    taken along another key; SCALED: the rows of a state in 8 bits that share a scale. Selective scan: LANES lanes share a
    channel, and each has OWN channels; SPAN: the tokens that are unrolled; RESETS, SKIP: whether there are resets and a skip.
    Grouped rows: H groups; TRANSPOSED: whether the second factor is transposed; ROWS: the rows of a block; GROUP: the blocks of
    rows that run beside each other. Step of softmax attention: GROUP heads of q read one of k, ROWS of these heads in a
    program; C keys of a block; PARTS of the keys; VALUE: whether there is an array of values. If not, BK columns hold the
    channels of a key behind its value. Softmax attention over chosen blocks: SIZE, the keys of a block.
    """

    H: int
    HQ: int | None = None
    HK: int | None = None
    HV: int | None = None
    HA: int | None = None
    HB: int | None = None
    K: int = 0
    V: int = 0
    C: int | None = None
    BK: int = 0
    BV: int = 0
    BH: int | None = None
    IN_BLOCKS: bool | None = None
    SIGN: int | None = None
    DTYPE: Any = None
    PRECISION: str | None = None
    FORM: str | None = None
    GATE: str | None = None
    START: int | None = None  # where a scan begins, by the kernel
    D_START: int | None = None
    ADJOINT: bool | None = None
    LAST: bool | None = None
    GROUP: int | None = None
    GQ: int | None = None
    GK: int | None = None
    GV: int | None = None
    PAIRS: int | None = None
    PARTS: int | None = None
    ROWS: int | None = None
    HEAD: str | None = None
    KEY: bool | None = None
    VALUE: bool | None = None
    ERASURE: str | None = None
    BEFORE: bool | None = None
    PER_TOKEN: int | None = None
    GRADIENT: bool | None = None
    PLACES: int | None = None
    REPLAY: int | None = None
    ALONG: bool | None = None
    SCALED: int | None = None
    TRANSPOSED: bool | None = None
    LANES: int | None = None
    OWN: int | None = None
    SPAN: int | None = None
    RESETS: bool | None = None
    SKIP: bool | None = None
    SIZE: int | None = None

    def __repr__(self):
        """Return the constants that are not None, in letters that may stand in the name of a symbol."""
        given = {name: str(x) for name, x in vars(self).items() if x is not None}
        return "D" + "".join(f"_{name}_{re.sub('[^A-Za-z0-9]', '_', x)}" for name, x in given.items())

    @property
    def NK(self) -> int:
        """Return the number of blocks of the state's rows."""
        return -(-self.K // self.BK)

    @property
    def NV(self) -> int:
        """Return the number of blocks of the state's columns."""
        return -(-self.V // self.BV)


def launch(kernel, programs: int, operands, outputs, *, warps: int, stages: int, in_place=None, **constants):
    """Run kernel(*operands, *outputs, D=Dimensions(**constants)) with `programs` programs, and return the outputs as a list.

    operands: arrays. outputs: (shape, dtype) of each. in_place: {index of an operand: index of the output that shares its
    memory}. warps, stages: Triton's num_warps and num_stages. constants: fields of `Dimensions`. Inside `compile_in_parallel`
    the kernel also starts to compile in another thread.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    options = dict(grid=(programs,), num_warps=warps, num_stages=stages, D=Dimensions(**constants))
    call = functools.partial(jax_triton.triton_call, kernel=kernel, **options)
    shared = () if ALIASES_ARE_PASSED or not in_place else in_place.values()
    new_outputs = [x for i, x in enumerate(shapes) if i not in shared]
    specialisation = kernel, *(str(x.dtype) for x in (*operands, *new_outputs)), warps, stages, options["D"]
    compile_ahead(specialisation, functools.partial(call, **{OUTPUTS: new_outputs}), operands)
    in_place = in_place or {}
    aliases = dict(input_output_aliases=in_place) if in_place else {}
    operands = [unfused(x) if i in in_place else x for i, x in enumerate(operands)]
    with warnings.catch_warnings():
        # jax-triton 0.4 deprecates this option in favour of references, which 0.3 does not support.
        warnings.filterwarnings("ignore", "input_output_aliases", DeprecationWarning)
        results = call(*operands, **{OUTPUTS: shapes}, **aliases)
    results = [unfused(x) if i in in_place.values() else x for i, x in enumerate(results)]
    return [varying_like(x, operands[0]) for x in results]

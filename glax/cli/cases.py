"""Define the calls that `glax bench` and `glax tune` measure, and their arguments."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.api.recurrent import recurrent
from glax._src.core.registry import Backend
from glax.cli.arguments import four_numbers

GATES = {"key": "gk", "head": "g", "constant": "g_gamma", "none": None}  # the gate argument of each decay form
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_SHAPES = {
    Backend.CPU: ((1, 1024, 4, 64), (1, 2048, 8, 64)),
    Backend.GPU: ((4, 2048, 16, 128), (1, 8192, 32, 128), (8, 1024, 8, 64)),
    Backend.TPU: ((4, 2048, 16, 128), (1, 8192, 16, 128)),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Hold one call with H heads of query, key and value and D = K = V. The gates are log-sigmoid, per key channel, in the
    query's dtype."""

    B: int
    T: int
    H: int
    D: int
    gate: str
    dtype: str

    def __str__(self):
        return f"B{self.B} T{self.T} H{self.H} D{self.D} {self.gate} {self.dtype}"

    def title(self, mode: str) -> str:
        if mode == "step":
            return f"B{self.B} H{self.H} D{self.D} {self.gate} {self.dtype}, step"
        return f"{self}, {mode}"

    def arrays(self) -> dict[str, jax.Array]:
        """Return the arguments of `recurrent`, drawn at random."""
        rng = np.random.default_rng(0)
        wide = (self.B, self.T, self.H, self.D)
        arrays = {
            name: jnp.asarray(rng.standard_normal(wide, np.float32), self.dtype) for name in ("query", "key", "value")
        }
        argument = GATES[self.gate]
        if argument is not None:
            shape = dict(key=wide, head=wide[:3], constant=(self.H,))[self.gate]
            logs = jax.nn.log_sigmoid(rng.standard_normal(shape, np.float32))
            arrays[argument] = logs.astype(self.dtype if self.gate == "key" else jnp.float32)
        return arrays

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return jax.eval_shape(self.arrays)

    def flops(self, mode: str, kernels: list[dict]) -> int:
        """Return the operations in the matrix products of these kernels, a forward in chunks of C tokens and a gradient in
        chunks of D:

            forward     B T H (4 K V + 2 C (K + V))         q S, k^T v; pairs q k^T, pairs v
            gradient    B T H (10 K V + 2 D (3 K + 2 V))    the states again; dq, dk, dv and dS from states;
                                                            pairs, their gradient; dq, dk, dv from pairs

        C = 0 stands for a kernel that goes token by token. Masked pairs count, because they are computed. Exponentials and
        elementwise operations do not count.
        """
        chunks = {kernel["name"].split("/")[0].endswith(".vjp"): kernel["chunk"] for kernel in kernels}
        forward, _ = flops_of_token(self.D, chunks[False])
        _, gradient = flops_of_token(self.D, chunks.get(True, chunks[False]))
        tokens = 1 if mode == "step" else self.T
        return self.B * tokens * self.H * (forward + gradient if mode == "train" else forward)

    def bytes(self, mode: str) -> int:
        """Return the bytes that must move if every input is read once and every output written once, forward and gradient one
        after the other.

        The forward reads query, key, value and gate, and writes the output. The gradient reads these four and the output's
        gradient, and writes four gradients. A step also reads and writes the float32 state.
        """
        sizes = {name: x.size * x.dtype.itemsize for name, x in self.shapes().items()}
        wide, inputs = sizes["query"], sum(sizes.values())
        match mode:
            case "forward":
                return inputs + wide
            case "train":
                return 3 * inputs + 2 * wide
        constant = sizes.get("g_gamma", 0)
        state = self.B * self.H * self.D**2 * 4
        return (inputs - constant + wide) // self.T + constant + 2 * state


def flops_of_token(D: int, chunk: int) -> tuple[int, int]:
    """Return the operations of the chunked form for one token and head with K = V = D: (forward, gradient). See
    `Problem.flops`."""
    return 4 * D**2 + 4 * chunk * D, 10 * D**2 + 10 * chunk * D


def forward(arrays: dict[str, Any]) -> jax.Array:
    return recurrent(**arrays).output


def train(arrays: dict[str, jax.Array], d_output: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the output, and the gradient of <output, d_output> in every array."""
    output, pull = jax.vjp(forward, arrays)
    return output, pull(d_output)[0]


def add_problems(parser):
    help = "a shape, K = V = D; repeat for more (default: some that suit the device)"
    parser.add_argument("--shape", action="append", type=four_numbers, metavar="B,T,H,D", help=help)
    help = "a decay per key channel, per head, constant, or none; repeat for more (default: key)"
    parser.add_argument("--gate", action="append", choices=GATES, help=help)
    help = "of query, key and value; repeat for more (default: float32 on CPUs, else bfloat16)"
    parser.add_argument("--dtype", action="append", choices=DTYPES, help=help)


def problems_of(args) -> list[Problem]:
    backend = Backend.here()
    dtypes = args.dtype or ["float32" if backend is Backend.CPU else "bfloat16"]
    shapes: Sequence[tuple[int, int, int, int]] = args.shape or DEFAULT_SHAPES.get(backend, DEFAULT_SHAPES[Backend.GPU])
    each = itertools.product(shapes, args.gate or ["key"], dtypes)
    return list(dict.fromkeys(Problem(B, T, H, D, gate, dtype) for (B, T, H, D), gate, dtype in each))

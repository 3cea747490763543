"""Define the calls that `glax bench` and `glax tune` measure."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.api.recurrent import recurrent
from glax._src.core.registry import Backend
from glax.cli.errors import UsageError
from glax_cli.published import GATES, LAYERS

DEFAULT_SHAPES = {
    Backend.CPU: ((1, 1024, 4, 64), (1, 2048, 8, 64)),
    Backend.GPU: ((4, 2048, 16, 128), (1, 8192, 32, 128), (8, 1024, 8, 64)),
    Backend.TPU: ((4, 2048, 16, 128), (1, 8192, 16, 128)),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Hold one call: G heads of query and key serve H heads of value, in B rows of T tokens.

    gate: a name of GATES. Gates are log-sigmoid: per-key gates in the query's dtype, others in float32. delta: whether the call
    is of the delta rule, with beta a sigmoid, and queries and keys of norm 1. packed: above 1, the B rows are one row of B T
    tokens, which holds so many sequences of unequal lengths.
    """

    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    gate: str
    dtype: str
    delta: bool = False
    packed: int = 1
    name: str = ""  # of the model whose layer this is

    @classmethod
    def of_shape(cls, shape: tuple[int, ...], **rest) -> "Problem":
        """Return the problem of B,T,H,D, of B,T,H,K,V or of B,T,G,H,K,V."""
        match shape:
            case B, T, H, D:
                return cls(B, T, H, H, D, D, **rest)
            case B, T, H, K, V:
                return cls(B, T, H, H, K, V, **rest)
            case B, T, G, H, K, V:
                return cls(B, T, G, H, K, V, **rest)
        raise ValueError(f"shape must be B,T,H,D or B,T,H,K,V or B,T,G,H,K,V, got {shape}")

    def __str__(self):
        return f"B{self.B} T{self.T} {self.features}{f' packed {self.packed}' if self.packed > 1 else ''}"

    @property
    def features(self) -> str:
        """Return the part of the problem's text that is the same for one token and for many: all but B, T and packing."""
        heads = f"H{self.H}" if self.G == self.H else f"G{self.G} H{self.H}"
        widths = f"D{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        return f"{heads} {widths} {self.gate}{' delta' if self.delta else ''} {self.dtype}"

    def title(self, mode: str) -> str:
        """Return the problem as the title of a table. mode: "forward", "train" or "step"."""
        text = f"B{self.B} {self.features}" if mode == "step" else str(self)
        return f"{f'{self.name}: ' if self.name else ''}{text}, {mode}"

    @property
    def rows(self) -> tuple[int, int]:
        """Return (the rows of the arrays, the tokens of a row)."""
        return (self.B, self.T) if self.packed == 1 else (1, self.B * self.T)

    @property
    def boundaries(self) -> np.ndarray:
        """Return the boundaries of the packed sequences, drawn at random."""
        tokens = self.B * self.T
        inner = np.random.default_rng(self.packed).choice(np.arange(1, tokens), self.packed - 1, replace=False)
        return np.array([0, *np.sort(inner), tokens], np.int32)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arguments of `recurrent` except cu_seqlens, as shapes."""
        shared, own = (*self.rows, self.G), (*self.rows, self.H)
        shapes: dict[str, tuple[int, ...]] = {}
        shapes["query"] = shapes["key"] = (*shared, self.K)
        shapes["value"] = (*own, self.V)
        if self.delta:
            shapes["beta"] = own
        dtypes = dict.fromkeys(shapes, self.dtype)
        argument = GATES[self.gate]
        if argument is not None:
            shapes[argument] = dict(key=(*own, self.K), head=own, constant=(self.H,))[self.gate]
            dtypes[argument] = self.dtype if self.gate == "key" else "float32"
        return {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()}

    def arrays(self) -> dict[str, jax.Array]:
        """Return the arguments that `shapes` describes, drawn at random."""
        rng, shapes = np.random.default_rng(0), self.shapes()
        arrays = {name: jnp.asarray(rng.standard_normal(x.shape, np.float32)) for name, x in shapes.items()}
        if self.delta:
            arrays |= {x: arrays[x] / jnp.linalg.norm(arrays[x], axis=-1, keepdims=True) for x in ("query", "key")}
            arrays["beta"] = jax.nn.sigmoid(arrays["beta"])
        if (argument := GATES[self.gate]) is not None:
            arrays[argument] = jax.nn.log_sigmoid(arrays[argument])
        return {name: x.astype(shapes[name].dtype) for name, x in arrays.items()}

    def forward(self, arrays: dict[str, Any]) -> jax.Array:
        """Return the output of `recurrent` for these arguments, by name."""
        cu_seqlens = None if self.packed == 1 else jnp.asarray(self.boundaries)
        return recurrent(**arrays, cu_seqlens=cu_seqlens).output

    def train(self, arrays: dict[str, jax.Array], d_output: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output, and the gradient of <output, d_output> in every array."""
        output, pull = jax.vjp(self.forward, arrays)
        return output, pull(d_output)[0]

    def flops(self, mode: str, kernels: list[dict]) -> int | None:
        """Return the operations in the matrix products of these kernels, a forward in chunks of C tokens and a gradient in
        chunks of D:

            forward     B T H (4 K V + 2 C (K + V))         q S, k^T v; pairs q k^T, pairs v
            gradient    B T H (10 K V + 2 D (3 K + 2 V))    the states again; dq, dk, dv and dS from states;
                                                            pairs, their gradient; dq, dk, dv from pairs

        C = 0 stands for a kernel that goes token by token. Masked pairs count, because they are computed. Exponentials and
        elementwise operations do not count. None for the delta rule, whose kernels invert the chunks' matrices in several ways.
        """
        if self.delta:
            return None
        chunks = {kernel["name"].split("/")[0].endswith(".vjp"): kernel["chunk"] for kernel in kernels}
        forward, _ = flops_of_token(self.K, self.V, chunks[False])
        _, gradient = flops_of_token(self.K, self.V, chunks.get(True, chunks[False]))
        tokens = 1 if mode == "step" else self.T
        return self.B * tokens * self.H * (forward + gradient if mode == "train" else forward)

    def bytes(self, mode: str) -> int:
        """Return the bytes that must move if every input is read once and every output written once, forward and gradient one
        after the other.

        The forward reads the inputs, and writes the output. The gradient reads both inputs and the output's gradient, and
        writes the inputs' gradients. A step also reads and writes the float32 state.
        """
        sizes = {name: x.size * x.dtype.itemsize for name, x in self.shapes().items()}
        output, inputs = sizes["value"], sum(sizes.values())
        match mode:
            case "forward":
                return inputs + output
            case "train":
                return 3 * inputs + 2 * output
        constant = sizes.get("g_gamma", 0)
        state = self.B * self.H * self.K * self.V * 4
        return (inputs - constant + output) // self.T + constant + 2 * state


def flops_of_token(K: int, V: int, chunk: int) -> tuple[int, int]:
    """Return (the operations of the forward, those of the gradient) of the chunked form for one token and head, by the formulas
    of `Problem.flops`."""
    return 4 * K * V + 2 * chunk * (K + V), 10 * K * V + 2 * chunk * (3 * K + 2 * V)


def problems_of(args) -> list[Problem]:
    """Return the problems that the arguments name. Raises UsageError for arguments that exclude each other."""
    backend = Backend.here()
    rest = [dict(dtype=dtype, packed=args.packed) for dtype in args.dtype or default_dtypes(backend)]
    if args.like:
        if args.shape or args.gate or args.delta:
            raise UsageError("argument --like: names shape, gate and rule: leave out --shape, --gate and --delta")
        found = [Problem(*LAYERS[name][:6], gate=LAYERS[name].gate, delta=LAYERS[name].delta, name=name, **x)
                 for name, x in itertools.product(args.like, rest)]  # fmt: skip
    else:
        shapes = args.shape or DEFAULT_SHAPES.get(backend, DEFAULT_SHAPES[Backend.GPU])
        each = itertools.product(shapes, args.gate or ["key"], rest)
        found = [Problem.of_shape(shape, gate=gate, delta=args.delta, **x) for shape, gate, x in each]
    for problem in found:
        if problem.H % problem.G:
            raise UsageError(f"argument --shape: G must divide H, got G={problem.G} and H={problem.H}")
        if problem.packed > problem.B * problem.T:
            raise UsageError(f"argument --packed: must be at most B T, {problem.B * problem.T}, got {problem.packed}")
    return list(dict.fromkeys(found))


def default_dtypes(backend: Backend) -> list[str]:
    return ["float32" if backend is Backend.CPU else "bfloat16"]

"""The calls that the TPU kernels are compiled for, with the bytes and the operations of each."""

import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence
from glax.cli.cases import flops_of_token

SOURCES = pathlib.Path(__file__).parents[2] / "glax" / "_src" / "kernels" / "pallas_tpu"
LIMITS = SOURCES.parent / "common" / "limits.py"  # the numbers that the kernels compare with


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip: the name of its topology, the clock (1/s) and HBM bandwidth (B/s) of one core, and its number of cores."""

    topology: str
    clock: float
    bandwidth: float
    cores: int = 1


# JAX states the bandwidth and the bfloat16 rate of a core (pltpu.get_tpu_info). The clock is the rate divided by the
# multiplications and additions of a cycle, on four MXUs of 128 x 128 (v6e, v7x: of 256 x 256).
TARGETS = {
    "v5e": Target("v5e:2x2", 1.50e9, 8.20e11),
    "v5p": Target("v5p:2x2x1", 1.75e9, 1.23e12, cores=2),
    "v6e": Target("v6e:2x2", 1.75e9, 1.64e12),
    "v7x": Target("tpu7x:2x2x1", 2.20e9, 3.70e12, cores=2),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call with K = V = D.

    sequences: if given, T rows pack that many sequences, whose lengths are not known while tracing. erases: whether it is of the
    delta rule, with beta. shared: the heads that read one head of query and key.
    """

    B: int
    T: int
    H: int
    D: int
    form: str
    dtype: str = "bfloat16"
    sequences: int | None = None
    erases: bool = False
    shared: int = 1

    def __str__(self):
        packed = f" packed{self.sequences}" if self.sequences else ""
        heads = f"H{self.H}" if self.shared == 1 else f"H{self.H // self.shared}-{self.H}"
        delta = "delta " if self.erases else ""
        return f"B{self.B} T{self.T} {heads} D{self.D} {delta}{self.form} {self.dtype}{packed}"

    def operands(self, array) -> tuple:
        """Returns (recurrence, d_output, d_final), with arrays made by array(shape, dtype)."""
        return self.recurrence(array)

    def recurrence(self, array) -> tuple:
        """Returns `operands` of a call without a pool."""
        B, T, H, D, N = self.B, self.T, self.H, self.D, self.sequences or self.B
        x, shared = (array((B, T, heads, D), self.dtype) for heads in (H, H // self.shared))
        decay = dict(
            none=lambda: Decay(),
            constant=lambda: Decay(constant=array((N, H), "float32")),
            head=lambda: Decay(head=array((B, T, H), self.dtype)),
            key=lambda: Decay(key=array((B, T, H, D), self.dtype)),
        )[self.form]()
        cuts = array((N + 1,), "int32") if self.sequences else None
        state = array((N, H, D, D), "float32")
        erasure = Erasure(beta=array((B, T, H), self.dtype)) if self.erases else None
        r = Recurrence(shared, shared, x, decay, state, cuts, array((N,), "float32"), erasure=erasure)
        return r, x, state

    @property
    def tensor(self) -> int:
        """The bytes of v."""
        return self.B * self.T * self.H * self.D * jnp.dtype(self.dtype).itemsize

    @property
    def floors(self) -> tuple[int, int]:
        """The least bytes that the forward and the gradient move: every array once."""
        gates, shared = self.gates, 2 * self.tensor // self.shared
        state = (self.sequences or self.B) * self.H * self.D**2 * 4
        forward = shared + 2 * self.tensor + gates + 2 * state
        return forward, 2 * shared + 3 * self.tensor + 2 * gates + 3 * state

    @property
    def gates(self) -> int:
        """The bytes of the gates and of beta."""
        per_head = self.tensor // self.D
        gates = dict(none=0, constant=0, head=per_head, key=self.tensor)[self.form]
        return gates + per_head * self.erases

    def flops(self, chunk: int = 128) -> tuple[int, int]:
        """Returns the operations of the chunked form: four products for each chunk and head forward, ten for the gradient."""
        forward, gradient = flops_of_token(self.D, self.D, max(self.D, chunk))
        tokens = self.B * self.T * self.H
        return tokens * forward, tokens * gradient


@dataclasses.dataclass(frozen=True)
class PoolProblem(Problem):
    """A call on a pool of states in `dtype`, with a row more than sequences. Its tokens are bfloat16."""

    def __str__(self):
        delta = "delta " if self.erases else ""
        return f"pool B{self.B} T{self.T} H{self.H} D{self.D} {delta}{self.form} {self.dtype}"

    def operands(self, array) -> tuple:
        """Returns (recurrence, pool, slots)."""
        r, _, _ = dataclasses.replace(self, dtype="bfloat16").recurrence(array)
        pool = array((self.B + 1, self.H, self.D, self.D), self.dtype)
        return r.replace(initial_state=None), pool, array((self.B,), "int32")


PROBLEMS = [
    *(Problem(*shape, form) for shape in ((4, 2048, 16, 128), (1, 8192, 64, 128), (8, 1024, 8, 64)) for form in ("head", "key")),
    Problem(1, 8192, 64, 128, "constant"),
    Problem(1, 8192, 16, 128, "head", sequences=16),
    Problem(1, 8192, 16, 64, "key", sequences=16),
    Problem(8, 1024, 8, 64, "key", "float32"),
    Problem(1, 8192, 32, 128, "head", erases=True, shared=2),
    Problem(1, 8192, 32, 128, "key", erases=True),
    Problem(1, 8192, 32, 128, "head", sequences=16, erases=True),
    Problem(8, 1024, 8, 64, "key", "float32", erases=True),
]  # fmt: skip
POOLS = [
    PoolProblem(64, 1, 16, 128, "key", "float32"),
    PoolProblem(64, 1, 32, 128, "head", "float32", erases=True),
    PoolProblem(64, 1, 32, 128, "key", "bfloat16", erases=True),
    PoolProblem(16, 4, 30, 64, "head", "float32"),
]
FEW = [*(PROBLEMS[i] for i in (0, 5, 8, 10)), POOLS[0]]


@functools.cache
def fingerprint() -> str:
    """Hashes the code of the kernels, without docstrings and comments that fill a line."""
    import ast

    digest = hashlib.sha256()
    for path in [*sorted(SOURCES.glob("*.py")), LIMITS]:
        text = path.read_text()
        dropped = set()
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if (
                isinstance(body, list)
                and body
                and isinstance(body[0], ast.Expr)
                and isinstance(body[0].value, ast.Constant)
            ):
                dropped |= set(range(body[0].lineno, body[0].end_lineno + 1))
        for number, line in enumerate(text.splitlines(), 1):
            if number not in dropped and line.strip() and not line.strip().startswith("#"):
                digest.update(line.strip().encode())
    return digest.hexdigest()[:16]


def shapes(sharding):
    """Returns a function of (shape, dtype) that makes abstract arrays with a sharding."""
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

"""What the TPU kernels are compiled for, and what each call must move and multiply."""

import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp

from glax._src.core.decay import Decay
from glax._src.core.recurrence import Recurrence

SOURCES = pathlib.Path(__file__).parents[2] / "glax" / "_src" / "kernels" / "pallas_tpu"
LIMITS = SOURCES.parent / "common" / "limits.py"  # whose numbers they compare with


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip: its topology's name; of one core: cycles a second, bytes a second to and from HBM, cores of a chip."""

    topology: str
    clock: float
    bandwidth: float
    cores: int = 1


# Bandwidth and bfloat16 rate as JAX states them for a core (pltpu.get_tpu_info); the clock is that rate divided by what four
# MXUs of 128 x 128 (v6e, v7x: of 256 x 256) multiply and add in a cycle.
TARGETS = {
    "v5e": Target("v5e:2x2", 1.50e9, 8.20e11),
    "v5p": Target("v5p:2x2x1", 1.75e9, 1.23e12, cores=2),
    "v6e": Target("v6e:2x2", 1.75e9, 1.64e12),
    "v7x": Target("tpu7x:2x2x1", 2.20e9, 3.70e12, cores=2),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, K = V = D; `sequences` packs that many into T, of lengths that are not known while tracing."""

    B: int
    T: int
    H: int
    D: int
    form: str
    dtype: str = "bfloat16"
    sequences: int | None = None

    def __str__(self):
        packed = f" packed{self.sequences}" if self.sequences else ""
        return f"B{self.B} T{self.T} H{self.H} D{self.D} {self.form} {self.dtype}{packed}"

    def operands(self, array) -> tuple:
        """(recurrence, d_output, d_final), made by array(shape, dtype)."""
        B, T, H, D, N = self.B, self.T, self.H, self.D, self.sequences or self.B
        x = array((B, T, H, D), self.dtype)
        decay = dict(
            none=lambda: Decay(),
            constant=lambda: Decay(constant=array((N, H), "float32")),
            head=lambda: Decay(head=array((B, T, H), self.dtype)),
            key=lambda: Decay(key=array((B, T, H, D), self.dtype)),
        )[self.form]()
        cuts = array((N + 1,), "int32") if self.sequences else None
        state = array((N, H, D, D), "float32")
        return Recurrence(x, x, x, decay, state, cuts, array((N,), "float32")), x, state

    @property
    def tensor(self) -> int:
        """Bytes of q."""
        return self.B * self.T * self.H * self.D * jnp.dtype(self.dtype).itemsize

    @property
    def floors(self) -> tuple[int, int]:
        """The bytes that the forward and the gradient cannot do without: every array once."""
        gates = dict(none=0, constant=0, head=self.tensor // self.D, key=self.tensor)[self.form]
        state = (self.sequences or self.B) * self.H * self.D**2 * 4
        return 4 * self.tensor + gates + 2 * state, 7 * self.tensor + 2 * gates + 3 * state

    def flops(self, chunk: int = 128) -> tuple[int, int]:
        """Of the products of the chunked form: four a chunk and head forwards, ten for the gradient."""
        product = 2 * self.B * self.T * self.H * self.D * max(self.D, chunk)
        state = 2 * self.B * self.T * self.H * self.D**2
        return 2 * product + 2 * state, 5 * product + 5 * state


PROBLEMS = [
    *(Problem(*shape, form) for shape in ((4, 2048, 16, 128), (1, 8192, 64, 128), (8, 1024, 8, 64)) for form in ("head", "key")),
    Problem(1, 8192, 64, 128, "constant"),
    Problem(1, 8192, 16, 128, "head", sequences=16),
    Problem(1, 8192, 16, 64, "key", sequences=16),
    Problem(8, 1024, 8, 64, "key", "float32"),
]  # fmt: skip
FEW = [PROBLEMS[i] for i in (0, 5, 8)]  # of each width; of each gate; packed


@functools.cache
def fingerprint() -> str:
    """Changes when code of the kernels does; comments of whole lines and docstrings are no code."""
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
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

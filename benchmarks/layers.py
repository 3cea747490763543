"""The mixing layers of published models as calls of glax and of the libraries that users of these models run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import glax

GATES = dict(key="gk", head="g", constant="g_gamma")
NAMED = dict(key="per key", head="per head", constant="constant")
MODES = dict(forward="forward", both="with gradient")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One call: `groups` heads of query and key serve H heads of value.

    gate: "key", "head" or "constant". gate_dtype: of per-key gates; others are float32.
    peer: the PyTorch library that is measured beside glax, "fla" or "mamba"; None for none.
    cuts: the rows at which documents begin, but for row 0; they reach glax as `cu_seqlens`.
    platform: of glax's kernels; None for the one that glax chooses.
    """

    name: str
    B: int
    T: int
    groups: int
    H: int
    K: int
    V: int
    gate: str
    gate_dtype: str = "bfloat16"
    peer: str | None = None
    cuts: tuple[int, ...] = ()
    platform: str | None = None

    @property
    def problem(self) -> str:
        """The shape, as files of results name it."""
        shared = "1 query and key head" if self.groups == 1 else f"{self.groups} query and key heads"
        return f"{self.B},{self.T},{self.H}{f' ({shared})' if self.groups != self.H else ''},{self.K},{self.V}"

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of query, key, value and gates."""
        rows = (self.B, self.T)
        gates = dict(key=(*rows, self.H, self.K), head=(*rows, self.H), constant=(self.H,))[self.gate]
        return (*rows, self.groups, self.K), (*rows, self.groups, self.K), (*rows, self.H, self.V), gates

    def operands(self, strength: float | None = None) -> list[jax.Array]:
        """Return query, key, value, gates and the gradient of the output.

        Gates are log-sigmoids of normal numbers times `strength`: by default 1/16 per key, as models have them, and 1 per head.
        """
        *shapes, gates = self.shapes()
        keys = jax.random.split(jax.random.key(0), 5)
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False))
        if self.gate == "constant":
            logs = jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(self.H)))
        else:
            usual = 1 / 16 if self.gate == "key" else 1.0
            logs = jax.nn.log_sigmoid(jax.random.normal(keys[3], gates)) * (usual if strength is None else strength)
        g = logs.astype(self.gate_dtype if self.gate == "key" else jnp.float32)
        return [q, k, v, g, jax.random.normal(keys[4], v.shape, jnp.bfloat16)]

    @property
    def boundaries(self) -> jax.Array | None:
        return jnp.asarray([0, *self.cuts, self.T], jnp.int32) if self.cuts else None

    def output(self, q, k, v, g) -> jax.Array:
        gates = {GATES[self.gate]: g}
        return glax.recurrent(q, k, v, **gates, cu_seqlens=self.boundaries, platform=self.platform).output


def with_gradient(output):
    """Compile (q, k, v, g, d_output) -> the output and the gradient in each of the four."""

    def both(q, k, v, g, do):
        out, pull = jax.vjp(output, q, k, v, g)
        return out, *pull(do)

    return jax.jit(both)


def least_bytes(operands: list[jax.Array]) -> dict[str, int]:
    """Return the bytes of each mode, if each input is read once and each output written once.

    With gradient the inputs count three times (read twice, their gradients written) and the output twice (written, its gradient
    read).
    """
    *inputs, do = operands
    moved = sum(x.nbytes for x in inputs)
    return dict(forward=moved + do.nbytes, both=3 * moved + 2 * do.nbytes)


def documents(T: int, count: int) -> tuple[int, ...]:
    """Return the rows where `count` documents of unequal length begin, but for row 0."""
    chosen = np.random.default_rng(count).choice(np.arange(1, T), count - 1, replace=False)
    return tuple(int(row) for row in np.sort(chosen))


def neighbours(layer: Layer) -> dict[str, Layer]:
    """Return layers with a T, K or V that is a little smaller, with one token more, and with one more head, or group of heads
    where heads share keys, by what changes.
    The Hopper kernels copy arrays whose T 8 does not divide, unless they join sequences, or whose widths no block divides."""
    each = layer.H // layer.groups
    changes = (
        dict(T=layer.T - 24),
        dict(T=layer.T - 20),
        dict(T=layer.T - 1),
        dict(T=layer.T + 1),
        dict(K=layer.K - 2),
        dict(V=layer.V - 4),
        dict(K=layer.K - 2, V=layer.V - 4),
        dict(groups=layer.groups + 1, H=(layer.groups + 1) * each) if layer.groups > 1 else dict(H=layer.H + 1),
    )
    return {", ".join(f"{k}={v}" for k, v in x.items()): dataclasses.replace(layer, **x) for x in changes}


PUBLISHED = (
    Layer("GLA-340M", 8, 2048, 4, 4, 128, 256, "key", peer="fla"),
    Layer("GLA-340M, float32 gates", 8, 2048, 4, 4, 128, 256, "key", "float32"),
    Layer("GLA-1.3B", 4, 2048, 4, 4, 256, 512, "key", peer="fla"),
    Layer("RetNet-1.3B", 4, 2048, 8, 8, 256, 512, "constant", peer="fla"),
    Layer("Mamba2-1.3B", 4, 2048, 1, 64, 128, 64, "head", peer="mamba"),
    Layer("Nemotron-H-8B", 2, 4096, 8, 128, 128, 64, "head", peer="mamba"),
    Layer("Lightning", 1, 8192, 64, 64, 128, 128, "constant", peer="fla"),
    Layer("HGRN2-1.3B", 4, 2048, 16, 16, 128, 128, "key"),
    Layer("RWKV-6-like", 4, 2048, 40, 40, 64, 64, "key", peer="fla"),
)

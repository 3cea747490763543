"""The calls that are measured: one class, and the calls of every suite."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

import glax
from glax.cli.cases import GATES, Problem
from glax_cli.published import LAYERS

NAMED = dict(none="none", constant="constant", head="per head", key="per key")
RETENTION = -5.0  # the exponent of the first head's decay, 1 - 2^-5


@dataclasses.dataclass(frozen=True)
class Call(Problem):
    """A `Problem` of `glax bench`, with what the benchmarks vary beside its shape. Constant decays are those of retention.

    strength: multiplies log-sigmoid gates; extreme: the value of a twentieth of them, 0 for none.
    gate_dtype: of per-key gates, None for the query's.
    packing: what marks `packed` documents: "cu_seqlens"; "segment_ids", where each of the B rows has documents of its own; or
    "-inf", one row without documents, whose gates are -inf where they begin.
    states_every: the tokens between two stored states. final: whether the final state is a result.
    """

    strength: float = 1.0
    extreme: float = 0.0
    gate_dtype: str | None = None
    packing: str = "cu_seqlens"
    states_every: int | None = None
    final: bool = False

    @property
    def rows(self) -> tuple[int, int]:
        return (self.B, self.T) if self.packing == "segment_ids" else super().rows

    @property
    def shape(self) -> str:
        """The shape, as files of results name it."""
        shared = "1 query and key head" if self.G == 1 else f"{self.G} query and key heads"
        return f"{self.B},{self.T},{self.H}{f' ({shared})' if self.G != self.H else ''},{self.K},{self.V}"

    def named(self) -> dict:
        """Return what identifies the call in a line of results."""
        gate = f"delta rule, {NAMED[self.gate]}" if self.delta else NAMED[self.gate]
        line: dict = dict(problem=self.shape, gate=gate, dtype=self.dtype)
        if self.name:
            line["model"] = self.name
        if self.packed > 1:
            line["packing"] = f"{self.packed} documents, {self.packing}"
        if self.states_every:
            line["states_every"] = self.states_every
        if self.gate in ("key", "head") and (self.strength != 1.0 or self.extreme):
            line["gates"] = f"{self.strength:g} of log-sigmoid{f', {self.extreme:g} on 5%' if self.extreme else ''}"
        return line | (dict(gate_dtype=self.gate_dtype) if self.gate_dtype else {})

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = super().shapes()
        if self.gate_dtype and "gk" in shapes:
            shapes["gk"] = jax.ShapeDtypeStruct(shapes["gk"].shape, self.gate_dtype)
        return shapes

    def arrays(self) -> dict[str, jax.Array]:
        arrays, argument = super().arrays(), GATES[self.gate]
        if argument == "g_gamma":
            return arrays | dict(g_gamma=jnp.log1p(-jnp.exp2(RETENTION - jnp.arange(self.H))))
        if argument:
            gates = self.strength * arrays[argument].astype(jnp.float32)
            if self.extreme:
                chosen = jax.random.uniform(jax.random.key(0), gates.shape) < 0.05
                gates = jnp.where(chosen, self.extreme, gates)
            if self.packed > 1 and self.packing == "-inf":
                gates = gates.at[:, self.boundaries[1:-1]].set(-jnp.inf)
            arrays[argument] = gates.astype(arrays[argument].dtype)
        return arrays

    def options(self) -> dict:
        """Return the arguments of `glax.recurrent` that are no operands of the recurrence."""
        options: dict = dict(states_every=self.states_every) if self.states_every else {}
        if self.packed > 1 and self.packing == "cu_seqlens":
            options["cu_seqlens"] = jnp.asarray(self.boundaries)
        if self.packed > 1 and self.packing == "segment_ids":
            options["segment_ids"] = jnp.asarray(np.stack([self.segments(row) for row in range(self.B)]))
        return options

    def segments(self, row: int) -> np.ndarray:
        """Return the segment of each token of a row, from 1 on."""
        inner = np.random.default_rng(self.packed + row).choice(np.arange(1, self.T), self.packed - 1, replace=False)
        return np.searchsorted(np.sort(inner), np.arange(self.T), "right").astype(np.int32) + 1

    def outputs(self, arrays: dict[str, jax.Array], **insist) -> tuple[jax.Array, ...]:
        """Return the results that `output_names` lists. insist: `platform`, `cfg` and `softmax_scale`."""
        found = glax.recurrent(**arrays, **self.options(), **insist)
        return tuple(getattr(found, name) for name in self.output_names)

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("output", *["states"] * bool(self.states_every), *["final_state"] * self.final)

    def forward(self, arrays: dict[str, jax.Array]) -> jax.Array:
        return self.outputs(arrays)[0]

    def small(self) -> "Call":
        """Return a call whose reference, a loop over tokens, takes seconds: at most two rows of 1024 tokens and few heads."""
        each = self.H // self.G
        groups = min(self.G, max(1, 4 // each))
        B = 1 if self.packed > 1 and self.packing != "segment_ids" else min(self.B, 2)
        return dataclasses.replace(self, B=B, T=min(self.T, 1024), G=groups, H=groups * each)


def calls(shapes: Iterable[tuple[int, ...]], gates: Iterable[str], **rest) -> list[Call]:
    return [Call.of_shape(shape, gate=gate, **dict(dtype="bfloat16") | rest) for shape in shapes for gate in gates]


def published() -> list[Call]:
    """The layers of models. Per-key gates are a sixteenth of log-sigmoid, as models have them; the delta rule's are float32."""
    found = []
    for name, layer in LAYERS.items():
        rest = dict(gate_dtype="float32" if layer.delta else None, strength=1.0 if layer.delta else 1 / 16)
        rest = rest if layer.gate == "key" else {}
        name = "Lightning" if name == "MiniMax-Text-01" else name
        found.append(Call(*layer[:7], dtype="bfloat16", delta=layer.delta, name=name, **rest))
    first, key = found[0], dict(gate="key", dtype="bfloat16", strength=1 / 16)
    wide = dataclasses.replace(first, name=f"{first.name}, float32 gates", gate_dtype="float32")
    return [*found, wide, Call(4, 2048, 40, 40, 64, 64, name="RWKV-6-like", **key)]


def neighbours(call: Call) -> list[Call]:
    """Return calls with a T, K or V that is a little smaller, with one token more, and with one more head, or group of heads
    where heads share keys.

    The Hopper kernels copy arrays whose T 8 does not divide, unless they join sequences, or whose widths no block divides.
    """
    changes: list[dict] = [dict(T=call.T + more) for more in (-24, -20, -1, 1)]
    changes += [dict(K=call.K - 2), dict(V=call.V - 4), dict(K=call.K - 2, V=call.V - 4)]
    changes.append(dict(G=call.G + 1, H=(call.G + 1) * (call.H // call.G)) if call.G > 1 else dict(H=call.H + 1))
    return [
        dataclasses.replace(call, name=f"{call.name}, {', '.join(f'{k}={v}' for k, v in change.items())}", **change)
        for change in changes
    ]


# The grid of suite "choice": (B, T, H), on both sides of every border of the choice among kernels.
SQUARE = [(1, T, H) for T, heads in {512: [16], 1024: [4, 8], 2048: [4, 8, 12, 16, 32], 4096: [4, 8], 8192: [2, 4, 16]}.items()
          for H in heads]  # fmt: skip
SQUARE += [(B, T, 16) for B, T in ((2, 512), (2, 1024), (2, 2048), (4, 512), (4, 1024), (4, 2048), (8, 512), (16, 256))]
FEW = [(1, 1024, 8), (1, 2048, 8), (1, 8192, 4), (4, 512, 16), (2, 2048, 16), (4, 2048, 16)]
SHORT = [(1, 64, 16), (16, 32, 16), (64, 64, 16), (1, 128, 16), (4, 128, 16), (32, 128, 16), (1, 256, 4), (1, 256, 16),
         (4, 256, 16)]  # fmt: skip
WIDE = [(1, 2048, 4), (1, 4096, 8), (4, 2048, 8)]
UNEVEN = [(96, 96), (80, 160), (160, 160), (192, 384), (96, 192)]
# Rules of the delta rule, "delta-head", and plain ones; the sizes; heads of q and k, and of v, as multiples of H; and widths.
GRID = [
    *(("delta-head delta-key key head", sizes, 1, 1, width, width)
      for sizes, width in ((SQUARE, 128), (FEW, 64), (SHORT, 128))),
    *(("delta-head delta-key key head", WIDE, 1, 1, K, V) for K, V in ((96, 192), (128, 256), (64, 128))),
    *(("key head constant", [(2, 4096, 8)], 1, 1, K, V) for K, V in UNEVEN),
    ("delta-head delta-key", [(2, 4096, 30)], 1, 1, 96, 192),
    ("delta-head key head", WIDE, 1, 1, 256, 256),
    ("delta-none constant", FEW, 1, 1, 128, 128),
    ("delta-head", FEW, 1, 2, 128, 128),
    ("head", FEW, 0, 4, 128, 64),  # one head of q and k
    ("key", WIDE[:2], 1, 1, 256, 512),
]  # fmt: skip


def grid() -> list[Call]:
    """Return square heads at many sizes, other widths and grouped heads at fewer, and the delta rule in float32."""
    rows = [(kind, *rest, "bfloat16") for kinds, *rest in GRID for kind in kinds.split()]
    small = [(1, 512, 4), (2, 2048, 8), (8, 1024, 32)]
    rows += [(f"delta-{gate}", small, 1, 1, 128, 128, "float32") for gate in ("none", "head", "key")]
    found = [
        Call(B, T, G * H or 1, times * H, K, V, gate=kind.removeprefix("delta-"), dtype=dtype, delta="-" in kind)
        for kind, sizes, G, times, K, V, dtype in rows
        for B, T, H in sizes
    ]
    return list(dict.fromkeys(found))

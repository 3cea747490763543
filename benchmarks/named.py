"""Measure the recurrences that glax has by name, each beside the libraries that have it.

python benchmarks/named.py                           # every row, by every library that is installed
python benchmarks/named.py rwkv7 --by glax jla       # rows in whose name the text stands
python benchmarks/named.py --compile 16              # the peers' candidates compiled first, by 16 processes
python benchmarks/named.py --errors                  # against float64, in thousandths, on short rows; nothing is timed

A row's subjects are timed in turns in one process; medians of calls one after another. Inputs are bfloat16; log gates, beta and
biases are float32, but for RWKV-7, all of whose inputs are bfloat16. "with gradient" is a forward and the gradient of every
input. kernels: those that glax chose. times_glax: a peer's time over glax's. Small calls of PyTorch may be bound by launching
their kernels: see --device.

mlstm-kernels 2.0.6 needs block pointers, which Triton 3.9 refuses. Triton 3.6 has them: with it, --by mlstm-kernels.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
import triton_tuning
from meters import distance, kernels_ms, peak_mib
from output import table, without, write

import glax
from glax._src.core.known_miscompiles import version_of
from glax.cli import measure, peers

Arrays = dict[str, jax.Array]
MODES = {"forward": "forward", "train": "with gradient"}


def normal(i: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype)


def unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# ---- inputs, by B, T, H, K, V ----


def delta_inputs(B: int, T: int, H: int, K: int, V: int, n: int = 1) -> Arrays:
    """Return those of a gated delta rule with n updates a token, whose queries and keys have norm 1."""
    q, k = unit(normal(0, B, T, H, K)), unit(normal(1, B, T * n, H, K))
    g = jax.nn.log_sigmoid(normal(3, B, T, H, dtype="float32"))
    beta = jax.nn.sigmoid(normal(4, B, T * n, H, dtype="float32"))
    return dict(q=q.astype("bfloat16"), k=k.astype("bfloat16"), v=normal(2, B, T * n, H, V), g=g, beta=beta)


def comba_inputs(B: int, T: int, H: int, K: int, V: int) -> Arrays:
    found = delta_inputs(B, T, H, K, V)
    return found | dict(p=(0.8 * found["k"].astype(jnp.float32)).astype("bfloat16"))


def gates_inputs(B: int, T: int, H: int, K: int, V: int) -> Arrays:
    """Return those of Gated DeltaNet-2, with gates per channel, of what is erased and of what is written."""
    found = delta_inputs(B, T, H, K, V)
    del found["beta"]
    gates = dict(b=jax.nn.sigmoid(normal(5, B, T, H, K)), w=jax.nn.sigmoid(normal(6, B, T, H, V)))
    return found | gates | dict(g=jax.nn.log_sigmoid(normal(3, B, T, H, K, dtype="float32")))


def rwkv7_inputs(B: int, T: int, H: int, K: int, V: int) -> Arrays:
    """Return those that a layer of RWKV-7 forms: decays above e^-.607, and a and b along one direction of norm 1."""
    kk, rate = unit(normal(1, B, T, H, K)), jax.nn.sigmoid(normal(4, B, T, H, K, dtype="float32"))
    w = -0.606531 * jax.nn.sigmoid(normal(3, B, T, H, K, dtype="float32"))
    found = dict(r=normal(0, B, T, H, K), w=w, k=normal(5, B, T, H, K), v=normal(2, B, T, H, V), a=-kk, b=kk * rate)
    return {name: x.astype("bfloat16") for name, x in found.items()}


def mlstm_inputs(B: int, T: int, H: int, K: int, V: int) -> Arrays:
    """Return those of an mLSTM. f is the forget gate before its log-sigmoid."""
    i, f = -10 + normal(3, B, T, H, dtype="float32"), 4 + normal(4, B, T, H, dtype="float32")
    return dict(q=normal(0, B, T, H, K), k=normal(1, B, T, H, K), v=normal(2, B, T, H, V), i=i, f=f)


def mamba3_inputs(B: int, T: int, H: int, K: int, V: int) -> Arrays:
    """Return those of Mamba-3 with one head of q and k, as mamba_ssm names them, but for angles of a quarter of K."""
    dt = jax.nn.softplus(normal(3, B, H, T, dtype="float32") - 2)
    rest = dict(trap=normal(5, B, H, T, dtype="float32"), angles=normal(6, B, T, H, K // 4, dtype="float32"))
    biases = dict(q_bias=normal(7, H, K, dtype="float32"), k_bias=normal(8, H, K, dtype="float32"))
    return (
        dict(q=normal(0, B, T, 1, K), k=normal(1, B, T, 1, K), v=normal(2, B, T, H, V), adt=-dt, dt=dt, **rest) | biases
    )


# ---- glax ----


def glax_rwkv7(r, w, k, v, a, b, **insist) -> jax.Array:
    return glax.rwkv7(r, w, k, v, a, b, **insist).output


def glax_product(q, k, v, g, beta, **insist) -> jax.Array:
    return glax.gated_delta_product(q, k, v, g, beta, num_updates=2, **insist).output


def glax_comba(q, k, v, p, g, beta, **insist) -> jax.Array:
    return glax.comba(q, k, v, p, g, beta, **insist).output


def glax_gates(q, k, v, g, b, w, **insist) -> jax.Array:
    return glax.gated_delta_rule_2(q, k, v, g, b, w, **insist).output


def glax_mlstm(q, k, v, i, f, **insist) -> jax.Array:
    return glax.mlstm(q, k, v, i, jax.nn.log_sigmoid(f), **insist).output


def glax_mamba3(q, k, v, adt, dt, trap, angles, q_bias, k_bias, **insist) -> jax.Array:
    return glax.mamba3(q, k, v, adt, dt, trap, q_bias, k_bias, angles, **insist).output


# ---- jax-linear-attention ----


def by_jla(kind: str, **options) -> Callable[..., jax.Array]:
    """Return its operator of the arrays."""

    def run(**arrays):
        from jla import ops  # pyright: ignore[reportMissingImports]

        return ops.linear_attention(kind, **arrays, **options)[0]

    return run


def jla_rwkv7(r, **arrays) -> jax.Array:
    return by_jla("rwkv7", scale=1.0)(q=r, **arrays)


def jla_mlstm(f, **arrays) -> jax.Array:
    return by_jla("mlstm")(g=jax.nn.log_sigmoid(f), **arrays)


def jla_mamba3(q, k, v, adt, dt, trap, angles, q_bias, k_bias) -> jax.Array:
    """Rotate queries and keys as a layer does, which its operator leaves to the layer."""
    by_token = functools.partial(jnp.moveaxis, source=2, destination=1)
    adt, dt, trap = by_token(adt), by_token(dt), jax.nn.sigmoid(by_token(trap))
    turned = jnp.cumsum(jnp.pi * jnp.tanh(angles) * dt[..., None], 1)
    cos, sin = jnp.cos(turned), jnp.sin(turned)

    def rotated(x, bias):
        x = x.astype(jnp.float32) + bias
        pairs, rest = jnp.split(x, [2 * turned.shape[-1]], -1)
        a, b = pairs[..., ::2], pairs[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(pairs.shape)
        return jnp.concatenate([pairs, rest], -1).astype(v.dtype)

    beta = (1 - trap) * dt * jnp.exp(adt)
    return by_jla("mamba3")(q=rotated(q, q_bias), k=rotated(k, k_bias), v=v, g=adt, beta=beta, gamma=trap * dt)


# ---- PyTorch: fla-core and mlstm-kernels ----


def by_fla(path: str, **options) -> Callable:
    """Return fla.ops.MODULE.FUNCTION of the arrays, by its name "MODULE.FUNCTION"."""

    def run(**tensors):
        import importlib

        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(f"fla.ops.{module}"), name)(**tensors, **options)[0]

    return run


def torch_mlstm(kernel: str, **options) -> Callable:
    """Return a kernel of mlstm-kernels, whose arrays are [B, H, T, ...]."""

    def run(**tensors):
        from mlstm_kernels.torch import chunkwise  # pyright: ignore[reportMissingImports]

        h = chunkwise.registry[kernel](**{name: x.transpose(1, 2) for name, x in tensors.items()}, **options)
        return h.transpose(1, 2)

    return run


class Row(NamedTuple):
    """One line of the table. glax: a function of the arrays; jax, torch: those of other libraries, by name."""

    name: str
    shape: tuple[int, ...]
    inputs: Callable[..., Arrays]
    glax: Callable[..., Any]
    jax: Mapping[str, Callable] = MappingProxyType({})
    torch: Mapping[str, Callable] = MappingProxyType({})

    def short(self) -> "Row":
        """Return the row with few tokens and heads, for which float64 takes seconds on a CPU."""
        return self._replace(shape=(1, 512, 4, *self.shape[3:]))


# As fla's own layer calls it: right only where the gates are above lower_bound. glax and jax-linear-attention take any gates.
SAFE = dict(safe_gate=True, lower_bound=-0.6065306597126334, chunk_size=64)
MLSTM = {
    "mlstm-kernels xl": torch_mlstm("triton_xl_chunk"),
    "mlstm-kernels limit": torch_mlstm("triton_limit_chunk"),
}
ROWS = (
    *(
        Row("rwkv7", shape, rwkv7_inputs, glax_rwkv7, dict(jla=jla_rwkv7), dict(fla=by_fla("rwkv7.chunk_rwkv7", **SAFE)))
        for shape in ((4, 2048, 32, 64, 64), (2, 4096, 64, 64, 64))
    ),
    Row(
        "gated_delta_product, 2 updates", (4, 2048, 16, 128, 128), functools.partial(delta_inputs, n=2), glax_product,
        dict(jla=by_jla("gated_deltaproduct")),
        dict(fla=by_fla("gated_delta_product.chunk_gated_delta_product", num_householder=2)),
    ),
    Row("comba", (4, 2048, 16, 128, 128), comba_inputs, glax_comba, torch=dict(fla=by_fla("comba.chunk_comba"))),
    Row("gated_delta_rule_2", (4, 2048, 16, 128, 128), gates_inputs, glax_gates, dict(jla=by_jla("gdn2"))),
    Row("mlstm", (4, 2048, 4, 256, 512), mlstm_inputs, glax_mlstm, dict(jla=jla_mlstm), MLSTM),
    Row("mamba3", (4, 2048, 32, 128, 64), mamba3_inputs, glax_mamba3, dict(jla=jla_mamba3)),
)  # fmt: skip


def ways(row: Row, mode: str, arrays: Arrays, d_output, only: list[str] | None):
    """Yield (name, a `Way` that has run once, or what was raised) for each subject of a row."""
    made = {
        "glax": lambda: peers.by_jax("glax", lambda x: row.glax(**x), mode, arrays, d_output),
        **{name: functools.partial(by_jax, name, f, mode, arrays, d_output) for name, f in row.jax.items()},
        **{name: functools.partial(by_torch, name, f, mode, arrays, d_output) for name, f in row.torch.items()},
    }
    for name, make in made.items():
        if only and not name.startswith(tuple(only)):
            continue
        try:
            way = make()
            way.wait(way.run())
            yield name, way
        except Exception as error:  # of a library or a compiler: a result
            # The first line has the kind; of an error of Triton, only the last has the reason.
            found = f"{type(error).__name__}: {error}".splitlines()
            yield name, " ".join(dict.fromkeys((found[0], found[-1])))[:300]


def by_jax(name: str, f: Callable, mode: str, arrays: Arrays, d_output) -> measure.Way:
    return peers.by_jax(name, lambda x: f(**x).astype(d_output.dtype), mode, arrays, d_output)


def by_torch(name: str, f: Callable, mode: str, arrays: Arrays, d_output) -> measure.Way:
    peers.of_gpus()
    given = {name: peers.tensor(x) for name, x in arrays.items()}
    return peers.by_torch(name, f, mode, given, d_output)


def operands(row: Row) -> tuple[Arrays, jax.Array]:
    arrays = row.inputs(*row.shape)
    B, T, H, _, V = row.shape
    return arrays, normal(9, B, T, H, V)


def kernels_of(row: Row, mode: str, arrays: Arrays, d_output) -> list[str]:
    def call(x):
        return row.glax(**x) if mode == "forward" else jax.vjp(lambda y: row.glax(**y), x)[1](d_output)

    return [each.kernel for each in glax.explain(call, arrays)]


DISTRIBUTIONS = dict(jla="jax-linear-attention", fla="fla-core") | {"mlstm-kernels": "mlstm_kernels"}


def in_full(subject: str) -> str:
    """Return a subject's name in results: a library's distribution, with its version where that is known."""
    library, _, rest = subject.partition(" ")
    distribution = DISTRIBUTIONS.get(library)
    if distribution is None:
        return subject
    return " ".join(filter(None, (distribution, version_of(distribution), rest)))


def line_of(row: Row, mode: str, subject: str) -> dict[str, Any]:
    """Return what names a line of the results."""
    return dict(problem=",".join(map(str, row.shape)), gate=row.name, mode=mode, implementation=in_full(subject))


def measured(row: Row, args) -> list[dict]:
    arrays, d_output = operands(row)
    lines = []
    for mode, title in MODES.items():
        found = dict(ways(row, mode, arrays, d_output, args.by))
        ready = {name: way for name, way in found.items() if isinstance(way, measure.Way)}
        times = dict(zip(ready, measure.interleaved(list(ready.values()), args.iters), strict=True))
        for name, way in found.items():
            line = line_of(row, title, name)
            lines.append(line)
            if name not in ready:
                line["refusal"] = way
                continue
            line |= dict(ms=round(times[name].median, 4), p20=round(times[name].p20, 4), p80=round(times[name].p80, 4))
            if "glax" in times:
                line["times_glax"] = round(times[name].median / times["glax"].median, 2)
            if args.device:
                line["kernels_ms"] = round(kernels_ms(ready[name]), 4)
            line |= dict(mib=round(mib, 1)) if (mib := peak_mib(ready[name])) else {}
            if name == "glax":
                line["kernels"] = kernels_of(row, mode, arrays, d_output)
        print("\n".join(map(json.dumps, lines[-len(found) :])), flush=True)
    jax.clear_caches()
    return lines


def exact(row: Row, arrays: Arrays, d_output) -> list[np.ndarray]:
    """Return the output and every gradient in float64, by XLA's kernels on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        given = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        output, pull = jax.vjp(lambda x: row.glax(**x, platform="xla"), given)
        (d,) = pull(jnp.asarray(np.asarray(d_output, np.float64)))
        return [np.asarray(output), *(np.asarray(d[name]) for name in arrays)]


def errors_of(row: Row, args) -> list[dict]:
    row = row.short()
    arrays, d_output = operands(row)
    want, lines = exact(row, arrays, d_output), []
    for name, way in ways(row, "train", arrays, d_output, args.by):
        line = line_of(row, "errors", name)
        if isinstance(way, measure.Way):
            output, gradients = way.run()
            gradients = [gradients[x] for x in arrays] if isinstance(gradients, dict) else gradients
            found = zip(("output", *(f"d_{x}" for x in arrays)), [output, *gradients], want, strict=True)
            line |= {what: round(1e3 * distance(got, exactly), 3) for what, got, exactly in found if got is not None}
        else:
            line["refusal"] = way
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def compile_part(rows: list[Row], part: tuple[int, ...]):
    """Compile a part of the candidates of every peer in PyTorch, and time nothing."""
    triton_tuning.compile_a_part(*part)
    for row in rows:
        arrays, d_output = operands(row)
        for name in row.torch:
            for _ in ways(row, "train", arrays, d_output, [name]):
                pass


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="rows in whose name the text stands")
    parser.add_argument("--by", nargs="+", metavar="SUBJECT", help="glax, jla, fla, mlstm-kernels")
    parser.add_argument("--errors", action="store_true", help="nothing is timed")
    parser.add_argument(
        "--device", action="store_true", help="the sum of the kernels' times as well, by JAX's profiler"
    )
    parser.add_argument("--iters", type=int, default=9, help="rounds")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="processes that compile first")
    parser.add_argument("--part", type=triton_tuning.a_part, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all results")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.name]
    if args.part:
        return compile_part(rows, args.part)
    if args.compile:
        command = [__file__, *without(sys.argv[1:], "--compile", "--json"), "--part"]
        triton_tuning.compile_in_parts(command, args.compile)
    if version_of("triton") is not None:
        triton_tuning.short_tuning()
    lines = []
    if args.errors:  # rows of one name differ in their sizes alone
        rows = list({row.name: row for row in rows}.values())
    for row in rows:
        lines += (errors_of if args.errors else measured)(row, args)
        if args.json:
            write(args.json, lines)
    shown = [{name: x for name, x in line.items() if name != "kernels"} for line in lines]
    for mode in dict.fromkeys(line["mode"] for line in lines):
        print(table([line for line in shown if line["mode"] == mode]))


if __name__ == "__main__":
    main()

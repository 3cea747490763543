"""Time decoding on an NVIDIA GPU: steps of many layers in one program, by each platform, beside fla-core and mamba-ssm.

python benchmarks/decode_gpu.py                        # every shape, platforms cuda, triton and xla, and the peers installed
python benchmarks/decode_gpu.py --platform cuda --alone
python benchmarks/decode_gpu.py --profile              # also the time of one kernel by JAX's profiler
python benchmarks/decode_gpu.py --draft 4 --draft 16 --platform cuda      # verify and commit drafts of so many tokens
python benchmarks/decode_gpu.py --draft 16 --platform cuda --gathered     # the same by kernels of whole sequences

A program advances the layers of one model by TOKENS tokens or drafts, each layer in a pool of its own that is donated.
The calls of a peer for one token are captured in one CUDA graph. Times are those of one layer's step, verification or commit.
"of a copy": the bytes of its states over the time, as a share of the rate of a copy. A step and a commit read and write a state
once, a verification reads it once.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from timing import table

import glax
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax.cli.measure import Way, copy_gbytes, interleaved


@dataclasses.dataclass(frozen=True)
class Decode:
    """B sequences in P slots; `groups` heads of query and key serve H heads. gate: "gk", "g" or "g_gamma". erases: the delta rule
    with beta. draft: the tokens that are verified and committed together, 0 for steps of one token.
    """

    name: str
    B: int
    groups: int
    H: int
    K: int
    V: int
    gate: str
    layers: int = 32
    P: int | None = None
    state: str = "float32"
    erases: bool = False
    draft: int = 0

    @property
    def moved(self) -> int:
        """The bytes of the states that one pass moves."""
        return self.B * self.H * self.K * self.V * jnp.dtype(self.state).itemsize

    def tokens(self) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 5)
        shapes = dict(query=(self.groups, self.K), key=(self.groups, self.K), value=(self.H, self.V))
        rows = (self.B, self.draft) if self.draft else (self.B,)
        arrays = {
            name: jax.random.normal(key, (*rows, *shape))
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        if self.erases:
            arrays["key"] /= jnp.linalg.norm(arrays["key"], axis=-1, keepdims=True)
            arrays["beta"] = jax.nn.sigmoid(jax.random.normal(keys[4], (*rows, self.H)))
        gates = dict(gk=(*rows, self.H, self.K), g=(*rows, self.H), g_gamma=(self.H,))[self.gate]
        logs = jax.nn.log_sigmoid(jax.random.normal(keys[3], gates))
        return {name: x.astype(jnp.bfloat16) for name, x in arrays.items()} | {self.gate: logs}


TOKENS = 8  # in one program, so that calling it from Python is a small part

SHAPES = (
    Decode("GLA-1.3B", 64, 4, 4, 256, 512, "gk", layers=16),
    Decode("Mamba2-1.3B", 64, 1, 64, 128, 64, "g", layers=16),
    Decode("Lightning", 64, 32, 32, 128, 128, "g_gamma", layers=16),
    Decode("HGRN2-1.3B", 64, 16, 16, 128, 128, "gk"),
    Decode("pool", 256, 16, 16, 128, 128, "gk", layers=4, P=1024),
    Decode("pool, bfloat16 states", 256, 16, 16, 128, 128, "gk", layers=4, P=1024, state="bfloat16"),
    Decode("one sequence", 1, 64, 64, 128, 128, "g_gamma"),
    Decode("one sequence, GLA-1.3B", 1, 4, 4, 256, 512, "gk"),
    Decode("Gated DeltaNet", 64, 16, 32, 128, 128, "g", layers=16, erases=True),
    Decode("one sequence, Gated DeltaNet", 1, 16, 32, 128, 128, "g", erases=True),
)
DRAFTS = tuple(
    dataclasses.replace(shape, name=name if B > 1 else f"one sequence, {name}", B=B, layers=4 if B > 1 else 16)
    for name, shape in {shape.name: shape for shape in SHAPES}.items()
    if name in ("HGRN2-1.3B", "Gated DeltaNet", "GLA-1.3B")
    for B in (64, 1)
)


class Steps:
    """`layers` steps of glax in one program."""

    passes = 2  # of a state: it is read once and written once

    def __init__(self, shape: Decode, platform: str):
        self.shape, self.platform, self.tokens = shape, platform, shape.tokens()
        rows = shape.B if shape.P is None else shape.P
        slots = np.random.default_rng(0).permutation(rows)[: shape.B].astype(np.int32)
        self.slots = None if shape.P is None else jnp.asarray(slots)

        def advanced(_, carry):
            pools, query = list(carry[0]), carry[1]
            outputs = []
            for i, pool in enumerate(pools):
                output, pools[i] = self.layer(pool, query)
                outputs.append(output)
            # Every number of every output counts, or XLA would leave out what forms it.
            return tuple(pools), query + 1e-3 * sum(x.mean((-2, -1), keepdims=True) for x in outputs).astype(
                query.dtype
            )

        def steps(pools):
            return jax.lax.fori_loop(0, TOKENS, advanced, (pools, self.tokens["query"]))

        self.run_steps = jax.jit(steps, donate_argnums=0)
        self.pools = tuple(jnp.zeros((rows, shape.H, shape.K, shape.V), shape.state) for _ in range(shape.layers))
        jax.block_until_ready(self())

    def layer(self, pool, query):
        return glax.recurrent_step(
            **self.tokens | dict(query=query), state=pool, slots=self.slots, platform=self.platform
        )

    def __call__(self):
        self.pools, query = self.run_steps(self.pools)
        return query


class Verifications(Steps):
    """`layers` verifications of a draft in one program."""

    passes = 1

    def layer(self, pool, query):
        tokens = self.tokens | dict(query=query)
        return glax.recurrent_verify(**tokens, state=pool, slots=self.slots, platform=self.platform)[0], pool


class Commits(Steps):
    """`layers` commits of a draft in one program. All but one of its tokens are accepted."""

    def layer(self, pool, query):
        _, draft = glax.recurrent_verify(**self.tokens, state=pool, slots=self.slots, platform=self.platform)
        pool = glax.commit(pool, draft, jnp.full(self.shape.B, self.shape.draft - 1, jnp.int32))
        return jnp.zeros((1, 1, 1)), pool


def leave_out_pools():
    """Leave out the kernels that verify or advance several tokens in a pool, as on a machine that has none."""
    load_kernels()
    for name in ("recurrent.verify/cuda/gpu", "recurrent.step/cuda/gpu"):
        del kernel_registry.kernels[name]


def graph_of(call, layers: int):
    """Capture `layers` calls in a CUDA graph."""
    import torch

    for _ in range(3):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    return graph.replay


def peer(shape: Decode):
    """Return the peer's name and its `layers` steps: mamba-ssm for gates a head of grouped keys, else fla-core."""
    import torch

    t = {name: torch.from_dlpack(x).clone() for name, x in shape.tokens().items()}
    q, k, v, g = t["query"], t["key"], t["value"], t[shape.gate]
    if shape.gate == "g" and not shape.erases:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        states = [torch.zeros(shape.B, shape.H, shape.V, shape.K, device="cuda") for _ in range(shape.layers)]
        dt = (-g)[..., None].expand(-1, -1, shape.V)
        A = -torch.ones(shape.H, device="cuda")[:, None, None].expand(-1, shape.V, shape.K)
        zeros = torch.zeros(shape.H, device="cuda")[:, None].expand(-1, shape.V)  # it raises where D or dt_bias is None

        def call(layer):
            return selective_state_update(states[layer], v, dt, A, k, q, D=zeros, dt_bias=zeros)

        return "mamba-ssm", graph_of(call, shape.layers)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.gla import fused_recurrent_gla
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    states = [torch.zeros(shape.B, shape.H, shape.K, shape.V, device="cuda") for _ in range(shape.layers)]
    q, k, v = (x[:, None] for x in (q, k, v))

    def call(layer):
        options = dict(initial_state=states[layer], output_final_state=True)
        with torch.no_grad():
            if shape.erases:
                return fused_recurrent_gated_delta_rule(q, k, v, g=g[:, None], beta=t["beta"][:, None], **options)
            if shape.gate == "gk":
                return fused_recurrent_gla(q, k, v, gk=g[:, None], **options)
            return fused_recurrent_simple_gla(q, k, v, g_gamma=g, **options)

    return "fla-core", graph_of(call, shape.layers)


def kernel_us(run, name: str = "scan") -> float | None:
    """Return the median microseconds of the kernels whose names begin so, by JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        spent = [
            event.duration_ns / 1e3
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if event.name.startswith(name)
        ]
    return float(np.median(spent)) if spent else None


def measured(shape: Decode, args, gbytes: float) -> dict:
    """Return one row of the table, in microseconds a layer's step and as a share of the rate of a copy."""
    made: dict[str, Steps] = {}
    for platform in args.platform or ("cuda", "triton", "xla"):
        try:
            if shape.draft:
                made[f"{platform} verify"] = Verifications(shape, platform)
                made[f"{platform} commit"] = Commits(shape, platform)
            else:
                made[platform] = Steps(shape, platform)
        except glax.UnsupportedError as refused:
            print(f"{shape.name}: {platform}: {refused}", file=sys.stderr)
    ways = [Way(name, run, calls=TOKENS) for name, run in made.items()]
    if not args.alone and importlib.util.find_spec("fla") and shape.P is None and not shape.draft:
        import torch

        try:
            name, run = peer(shape)
            ways.append(Way(name, run, lambda _: torch.cuda.synchronize()))
        except Exception as error:  # a peer's own: it may refuse a shape in any way
            print(f"{shape.name}: peer: {error!r:.300}", file=sys.stderr)
    row: dict = dict(model=shape.name, problem=f"{shape.B},{shape.H},{shape.K},{shape.V}", gate=shape.gate)
    if shape.draft:
        row["tokens"] = shape.draft
    for way, t in zip(ways, interleaved(ways, args.iters), strict=True):
        us = 1e3 * t.median / shape.layers
        row[f"{way.name} us"] = round(us, 2)
        passes = made[way.name].passes if way.name in made else Steps.passes
        row[f"{way.name} of a copy"] = round(passes * shape.moved / us / 1e3 / gbytes, 3)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", action="append", choices=("cuda", "triton", "xla"))
    parser.add_argument("--only", action="append", metavar="NAME", help="of a shape; may be given more than once")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument(
        "--draft", action="append", type=int, metavar="TOKENS", help="instead of steps; may be given more than once"
    )
    parser.add_argument(
        "--gathered", action="store_true", help="without the kernels that take several tokens in a pool"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--iters", type=int, default=9)
    args = parser.parse_args()
    if args.draft and args.profile:
        parser.error("--profile is for steps: leave out --draft")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if args.gathered:
        leave_out_pools()
    shapes = [dataclasses.replace(shape, draft=tokens) for shape in DRAFTS for tokens in args.draft or ()] or SHAPES
    gbytes, rows = copy_gbytes(7), []
    for shape in shapes:
        if args.only and shape.name not in args.only:
            continue
        rows.append(measured(shape, args, gbytes))
        print(json.dumps(rows[-1]), flush=True)
    if args.profile:  # behind all timings, which it cannot disturb there
        for row in rows:
            shape = next(shape for shape in SHAPES if shape.name == row["model"])
            row["cuda kernel us"] = kernel_us(Steps(shape, "cuda"))
    print(table(rows))


if __name__ == "__main__":
    main()

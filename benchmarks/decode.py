"""Time decoding: steps of many layers in one program, with or without a pool, by each platform, beside fla-core and mamba-ssm.

python benchmarks/decode.py                            # a GPU: the shapes of models; a CPU: a pool, and one sequence in a loop
python benchmarks/decode.py --platform cuda --alone
python benchmarks/decode.py --profile                  # also the time of one kernel by JAX's profiler
python benchmarks/decode.py --draft 4 16 --platform cuda       # verify and commit drafts of so many tokens
python benchmarks/decode.py --draft 16 --platform cuda --gathered     # the same by kernels of whole sequences
python benchmarks/decode.py --replay 8 --platform cuda --alone # also by a StatePool that writes a state every 8 tokens
python benchmarks/decode.py --prefix                   # the demo's model by steps against recomputing the prefix, and a picture

A program advances the layers of one model by several tokens or drafts, each layer in a pool of its own that is donated.
The calls of a peer for one token are captured in one CUDA graph. Times are those of one layer's step, verification or commit.
`copy_share`: the bytes of its states over the time, as a share of the rate of a copy. A step and a commit read and write a state
once, a verification reads it once. The bytes of a step with --replay are counted as those of a plain step, so its share may be
above 1; its slots are at different places of their rings. It runs by the kernel of the one --platform, or by the kernel that is
chosen among several; `implementation` names it, and is "by parts" where none takes states and rings.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from meters import interleaved, kernels
from output import table, write

import glax
import glax.serving
from glax._src.core.registry import Backend, Role, kernel_registry
from glax._src.kernels import load_kernels
from glax.cli.measure import Way, copy_gbytes

NAMED = dict(gk="per key", g="per head", g_gamma="constant")
PREFIXES = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Decode:
    """B sequences in P slots; G heads of query and key serve H heads. gate: "gk", "g" or "g_gamma". delta: the delta rule.

    tokens: of one program, so that calling it from Python is a small part. draft: the tokens that are verified and committed
    together, 0 for steps of one token. dtype: of the arrays; state: of the states.
    """

    name: str
    B: int
    G: int
    H: int
    K: int
    V: int
    gate: str
    layers: int = 32
    P: int | None = None
    state: str = "float32"
    delta: bool = False
    draft: int = 0
    tokens: int = 8
    dtype: str = "bfloat16"

    @property
    def moved(self) -> int:
        """The bytes of the states that one pass moves."""
        return self.B * self.H * self.K * self.V * jnp.dtype(self.state).itemsize

    def arrays(self) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 5)
        rows = (self.B, self.draft) if self.draft else (self.B,)
        shapes = dict(query=(self.G, self.K), key=(self.G, self.K), value=(self.H, self.V))
        arrays = {x: jax.random.normal(key, (*rows, *shapes[x])) for key, x in zip(keys, shapes, strict=False)}
        if self.delta:
            arrays["key"] /= jnp.linalg.norm(arrays["key"], axis=-1, keepdims=True)
            arrays["beta"] = jax.nn.sigmoid(jax.random.normal(keys[4], (*rows, self.H)))
        gates = dict(gk=(*rows, self.H, self.K), g=(*rows, self.H), g_gamma=(self.H,))[self.gate]
        logs = jax.nn.log_sigmoid(jax.random.normal(keys[3], gates))
        return {name: x.astype(self.dtype) for name, x in arrays.items()} | {self.gate: logs}


SHAPES = (
    Decode("GLA-1.3B", 64, 4, 4, 256, 512, "gk", layers=16),
    Decode("Mamba2-1.3B", 64, 1, 64, 128, 64, "g", layers=16),
    Decode("Lightning", 64, 32, 32, 128, 128, "g_gamma", layers=16),
    Decode("HGRN2-1.3B", 64, 16, 16, 128, 128, "gk"),
    Decode("pool", 256, 16, 16, 128, 128, "gk", layers=4, P=1024),
    Decode("pool, bfloat16 states", 256, 16, 16, 128, 128, "gk", layers=4, P=1024, state="bfloat16"),
    Decode("one sequence", 1, 64, 64, 128, 128, "g_gamma"),
    Decode("one sequence, GLA-1.3B", 1, 4, 4, 256, 512, "gk"),
    Decode("Gated DeltaNet", 64, 16, 32, 128, 128, "g", layers=16, delta=True),
    Decode("one sequence, Gated DeltaNet", 1, 16, 32, 128, 128, "g", delta=True),
)
CPU = dict(layers=1, dtype="float32")
CPU_SHAPES = (
    Decode("without a pool", 256, 16, 16, 128, 128, "gk", tokens=1, **CPU),
    Decode("pool", 256, 16, 16, 128, 128, "gk", P=1024, tokens=1, **CPU),
    Decode("one sequence", 1, 4, 4, 64, 64, "gk", tokens=2000, **CPU),
)
DRAFTS = tuple(
    dataclasses.replace(
        shape, name=shape.name if B > 1 else f"one sequence, {shape.name}", B=B, layers=4 if B > 1 else 16
    )
    for shape in SHAPES
    if shape.name in ("HGRN2-1.3B", "Gated DeltaNet", "GLA-1.3B")
    for B in (64, 1)
)


class Steps:
    """`layers` steps of glax in one program."""

    passes = 2  # of a state: it is read once and written once

    def __init__(self, shape: Decode, platform: str | None):
        self.shape, self.platform, self.arrays = shape, platform, shape.arrays()
        rows = shape.P or shape.B
        slots = np.random.default_rng(0).permutation(rows)[: shape.B].astype(np.int32)
        self.slots = None if shape.P is None else jnp.asarray(slots)

        def advanced(_, carry):
            pools, query = list(carry[0]), carry[1]
            outputs = []
            for i, pool in enumerate(pools):
                output, pools[i] = self.layer(pool, query)
                outputs.append(output)
            # Every number of every output counts, or XLA would leave out what forms it.
            seen = 1e-3 * sum(x.mean((-2, -1), keepdims=True) for x in outputs)
            return tuple(pools), query + seen.astype(query.dtype)

        def steps(pools):
            return jax.lax.fori_loop(0, shape.tokens, advanced, (pools, self.arrays["query"]))

        self.run_steps = jax.jit(steps, donate_argnums=0)
        self.pools = tuple(self.pool(rows) for _ in range(shape.layers))
        jax.block_until_ready(self())

    def pool(self, rows: int):
        return jnp.zeros((rows, self.shape.H, self.shape.K, self.shape.V), self.shape.state)

    def layer(self, pool, query):
        arrays = self.arrays | dict(query=query)
        return glax.recurrent_step(**arrays, state=pool, slots=self.slots, platform=self.platform)

    def __call__(self):
        self.pools, query = self.run_steps(self.pools)
        return query


class Replays(Steps):
    """`layers` steps of glax in one program, with pools that write a state every `replay` tokens."""

    def __init__(self, shape: Decode, replay: int, state: str):
        self.replay, self.state = replay, state
        super().__init__(shape, platform=None)

    def pool(self, rows: int):
        form = {"gk": "key", "g": "head", "g_gamma": "constant"}[self.shape.gate] + "+beta" * self.shape.delta
        heads, widths = (self.shape.G, self.shape.G, self.shape.H), (self.shape.K, self.shape.V)
        own = dict(replay=self.replay, form=form, token_dtype=self.shape.dtype)
        pool = glax.serving.StatePool(rows, heads, widths, self.state, **own)
        return pool.replace(length=jnp.arange(rows, dtype=jnp.int32) % self.replay)

    def layer(self, pool, query):
        return pool.step(**self.arrays | dict(query=query), slots=self.slots)

    @property
    def name(self) -> str:
        """The platform of the kernel that runs."""
        chosen = (x.kernel for x in glax.explain(self.layer, self.pools[0], self.arrays["query"]))
        return next((name.split("/")[1] for name in chosen if ".replay/" in name), "by parts")


class Verifications(Steps):
    """`layers` verifications of a draft in one program."""

    passes = 1

    def layer(self, pool, query):
        arrays = self.arrays | dict(query=query)
        return glax.recurrent_verify(**arrays, state=pool, slots=self.slots, platform=self.platform)[0], pool


class Commits(Steps):
    """`layers` commits of a draft in one program. All but one of its tokens are accepted."""

    def layer(self, pool, query):
        _, draft = glax.recurrent_verify(**self.arrays, state=pool, slots=self.slots, platform=self.platform)
        pool = glax.commit(pool, draft, jnp.full(self.shape.B, self.shape.draft - 1, jnp.int32))
        return jnp.zeros((1, 1, 1)), pool


def leave_out_pools():
    """Leave out the kernels that verify or advance several tokens in a pool, as on a machine that has none."""
    load_kernels()
    for name in ("recurrent.verify/cuda/gpu", "recurrent.step/cuda/gpu"):
        del kernel_registry.kernels[name]


def leave_out_replays(but: str):
    """Leave out the kernels of a step with --replay of every other platform: `StatePool.step` takes none."""
    load_kernels()
    for spec in [*kernel_registry.kernels.values()]:
        if spec.role is Role.REPLAY and spec.platform != but:
            del kernel_registry.kernels[spec.name]


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

    t = {name: torch.from_dlpack(x).clone() for name, x in shape.arrays().items()}
    q, k, v, g = t["query"], t["key"], t["value"], t[shape.gate]
    if shape.gate == "g" and not shape.delta:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        states = [torch.zeros(shape.B, shape.H, shape.V, shape.K, device="cuda") for _ in range(shape.layers)]
        dt = (-g)[..., None].expand(-1, -1, shape.V)
        A = -torch.ones(shape.H, device="cuda")[:, None, None].expand(-1, shape.V, shape.K)
        zeros = torch.zeros(shape.H, device="cuda")[:, None].expand(-1, shape.V)  # it raises where D or dt_bias is None

        def call(layer):
            return selective_state_update(states[layer], v, dt, A, k, q, D=zeros, dt_bias=zeros)

        return "mamba-ssm", graph_of(call, shape.layers)
    from fla import ops

    states = [torch.zeros(shape.B, shape.H, shape.K, shape.V, device="cuda") for _ in range(shape.layers)]
    q, k, v = (x[:, None] for x in (q, k, v))

    def call(layer):
        options = dict(initial_state=states[layer], output_final_state=True)
        with torch.no_grad():
            if shape.delta:
                beta = t["beta"][:, None]
                return ops.fused_recurrent_gated_delta_rule(q, k, v, g=g[:, None], beta=beta, **options)
            if shape.gate == "gk":
                return ops.fused_recurrent_gla(q, k, v, gk=g[:, None], **options)
            return ops.fused_recurrent_simple_gla(q, k, v, g_gamma=g, **options)

    return "fla-core", graph_of(call, shape.layers)


def measured(shape: Decode, args, gbytes: float) -> list[dict]:
    """Return a line of results for each platform and peer, in microseconds a layer's step."""
    ways, passes = [], {}
    modes = dict(verify=Verifications, commit=Commits) if shape.draft else dict(decode=Steps)
    for platform in args.platform:
        for mode, make in modes.items():
            try:
                ways.append(Way(platform, make(shape, None if platform == "auto" else platform), calls=shape.tokens))
                passes[len(ways) - 1] = mode, make.passes
            except glax.UnsupportedError as refused:
                print(f"{shape.name}: {platform}: {refused}", file=sys.stderr)
    for replay, state in itertools.product(args.replay, dict.fromkeys((shape.state, *args.states))):
        steps = Replays(shape, replay, state)
        ways.append(Way(steps.name, steps, calls=shape.tokens))
        passes[len(ways) - 1] = f"replay {replay}, {state}", Replays.passes
    if not args.alone and importlib.util.find_spec("fla") and shape.P is None and not shape.draft:
        import torch

        try:
            name, run = peer(shape)
            ways.append(Way(name, run, lambda _: torch.cuda.synchronize()))
        except Exception as error:  # a peer's own: it may refuse a shape in any way
            print(f"{shape.name}: peer: {error!r:.300}", file=sys.stderr)
    problem = f"{shape.B},{shape.draft or 1},{shape.H},{shape.K},{shape.V}"
    lines = []
    for i, (way, t) in enumerate(zip(ways, interleaved(ways, args.iters, 8.0), strict=True)):
        us, (mode, count) = 1e3 * t.median / shape.layers, passes.get(i, ("decode", Steps.passes))
        rule = "delta rule, " if shape.delta else ""
        line = dict(model=shape.name, problem=problem, gate=f"{rule}{NAMED[shape.gate]}", mode=mode)
        line["implementation"] = f"glax, {way.name}" if i in passes else way.name
        lines.append(line | dict(us=round(us, 2), copy_share=round(count * shape.moved / us / 1e3 / gbytes, 3)))
        print(json.dumps(lines[-1]), flush=True)
    return lines


def kernel_us(shape: Decode, name: str = "scan") -> float | None:
    """Return the median microseconds of the CUDA kernels whose names begin so, by JAX's profiler."""
    way = Way("cuda", Steps(shape, "cuda"))
    spent = [1e3 * ms for kernel, times in kernels(way, 1).items() if kernel.startswith(name) for ms in times]
    return float(np.median(spent)) if spent else None


# ---- the demo's model ----


def prefix(args) -> list[dict]:
    """Return the time of one step, and of recomputing a prefix by its length, with a picture of both."""
    import matplotlib
    from flax import nnx

    from glax.cli.demo_run import MODEL
    from glax.models import from_config

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lm = from_config(MODEL, rngs=nnx.Rngs(0))
    graph, params = nnx.split(lm)
    whole = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens)[:, -1])
    one = jax.jit(lambda params, token, states: nnx.merge(graph, params).step(token, states))
    states = lm.initial_states(1)
    ways = [Way("one step", lambda: one(params, jnp.zeros(1, jnp.int32), states))]
    for T in PREFIXES:
        tokens = jnp.zeros((1, T), jnp.int32)
        ways.append(Way(f"prefix {T}", lambda tokens=tokens: whole(params, tokens)))
    ms = [t.median for t in interleaved(ways, args.iters, 8.0)]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(PREFIXES, ms[1:], "o-", label="reading the prefix again")
    axes.axhline(ms[0], color="C1", label="one step from its state")
    axes.set(xlabel="bytes before", ylabel="ms for the next byte", title="The demo's model, batch 1")
    axes.legend()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, bbox_inches="tight")
    print(f"Written: {args.out}")
    return [dict(what=way.name, value=round(x, 4), unit="ms") for way, x in zip(ways, ms, strict=True)]


def main():
    on_cpu = Backend.here() is Backend.CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--platform", nargs="+", choices=("cuda", "triton", "xla", "cpp", "auto"),
        default=["auto"] if on_cpu else ["cuda", "triton", "xla"])  # fmt: skip
    add("--only", nargs="+", metavar="NAME", help="of a shape")
    add("--alone", action="store_true", help="without peers")
    add("--draft", nargs="+", type=int, default=[], metavar="TOKENS", help="instead of steps")
    add(
        "--replay",
        nargs="+",
        type=int,
        default=[],
        metavar="TOKENS",
        help="also steps that write states every so many tokens",
    )
    add("--states", nargs="+", default=[], metavar="DTYPE", help="of the states of --replay, beside the shape's own")
    add("--gathered", action="store_true", help="without the kernels that take several tokens in a pool")
    add("--profile", action="store_true")
    add("--prefix", action="store_true")
    add("--iters", type=int, default=9)
    add("--out", type=Path, default=Path("benchmarks/out/decode.png"), help="the picture of --prefix")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.draft and args.profile:
        parser.error("--profile is for steps: leave out --draft")
    if args.draft and args.replay:
        parser.error("--replay is for steps: leave out --draft")
    if args.states and not args.replay:
        parser.error("--states is of --replay: add it")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, glax {glax.__version__}", flush=True)
    if args.gathered:
        leave_out_pools()
    if len(args.platform) == 1 and args.platform != ["auto"]:
        leave_out_replays(*args.platform)
    shapes = [dataclasses.replace(shape, draft=tokens) for shape in DRAFTS for tokens in args.draft]
    shapes = [x for x in shapes or (CPU_SHAPES if on_cpu else SHAPES) if not args.only or x.name in args.only]
    if args.prefix:
        lines = prefix(args)
    else:
        gbytes = copy_gbytes(7)
        lines = [line for shape in shapes for line in measured(shape, args, gbytes)]
    if args.profile:  # behind all timings, which it cannot disturb there
        for shape in shapes:
            lines.append(dict(model=shape.name, what="CUDA kernel", value=kernel_us(shape), unit="us"))
    print(table(lines))
    if args.json is not None:
        write(args.json, lines)


if __name__ == "__main__":
    main()

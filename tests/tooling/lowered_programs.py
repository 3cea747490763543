"""Lowers a fixed set of calls and compares them between two commits: what a refactoring must leave as it was.

    python tests/tooling/lowered_programs.py write OUT      every call's program as text, one file a call, in folder OUT
    python tests/tooling/lowered_programs.py compare A B    the calls whose programs differ; exit status 1 if there are any

`--only REGEX` restricts either to the calls whose names the expression finds: `--only '^hopper.*delta.*gradient'`.
`list` prints the names. A name is platform, gates, packing and what is called, with more behind it:

    hopper-key-packed-gradient   the per-key gate, packed by cu_seqlens, in Hopper's kernels
    triton-delta-head-segments-forward   the delta rule with a per-head gate, packed by segment_ids
    parallel-key-sequence_axis.a-gradient   on a mesh

Run `write` with PYTHONPATH set to the checkout of each commit, and behind it the folders of `make triton-compiler`,
`make hopper-compiler` and `make cuda-compiler`. It needs no accelerator: programs for GPUs and TPUs are lowered for one that
is not there. A call that is refused, or whose compiler is missing, is recorded with its error. Two runs of `--half 0` and
`--half 1` share the work. `compare` counts a call that only one folder has as different, unless --only leaves it out.

Names and locations are taken out: symbols are numbered in order of appearance, the modules inside of custom calls (Pallas for
TPUs and Hopper, PTX of Triton) are printed without debug information, and long constants are hashed. `compare` prints a unified
diff of the first program that differs. The file imports the public API alone, so that it runs on commits far apart.
"""

import argparse
import base64
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import json
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax._src.interpreters import partial_eval
from jax._src.lib.mlir import ir
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

import glax
from glax import parallel

GATES = {
    "none": (),
    "constant": ("g_gamma",),
    "head": ("g",),
    "key": ("gk",),
    "value": ("gv",),
    "key+value": ("gk", "gv"),
    "delta": ("beta",),
    "delta-head": ("g", "beta"),
    "delta-key": ("gk", "beta"),
    "delta-erase": ("gk", "erase", "write"),
    "delta-along": ("gk", "erase", "erase_along", "write"),
}
PACKINGS = ("whole", "packed", "segments")
# What most kernels take.
IN_CHUNKS = tuple(name for name, gates in GATES.items() if "value" not in name and "erase" not in gates)


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform of glax, the backend that it is lowered for, the dtype of q, k and v, and the kernel whose config it takes."""

    platform: str
    backend: str
    dtype: str
    kernel: str | None = None
    gates: tuple[str, ...] = tuple(GATES)
    packings: tuple[str, ...] = PACKINGS

    @property
    def config(self) -> glax.Config | None:
        return None if self.kernel is None else registered()[self.kernel].config()


WITHOUT_SEGMENTS = PACKINGS[:2]
TARGETS = {
    "xla": Target("xla", "cpu", "float32", "chunked/xla/any"),
    "xla-tokens": Target(
        "xla", "cpu", "float32", "recurrent/xla/any", ("head", "key+value", "delta-erase"), WITHOUT_SEGMENTS
    ),
    "xla-cuda": Target("xla", "cuda", "bfloat16", None, ("head", "key", "delta-head"), WITHOUT_SEGMENTS),
    "cpp": Target("cpp", "cpu", "float32"),
    "cuda": Target("cuda", "cuda", "bfloat16", packings=WITHOUT_SEGMENTS),
    "triton": Target("triton", "cuda", "bfloat16", None, (*IN_CHUNKS, "delta-erase", "delta-along")),
    "triton-tokens": Target(
        "triton", "cuda", "bfloat16", "recurrent/triton/gpu", ("head", "key", "key+value"), WITHOUT_SEGMENTS
    ),
    "hopper": Target("pallas", "cuda", "bfloat16", None, IN_CHUNKS),
    "tpu": Target("pallas", "tpu", "bfloat16", None, IN_CHUNKS[:4]),
    "chosen": Target("auto", "cpu", "float32", packings=("whole",)),
    "chosen-cuda": Target("auto", "cuda", "bfloat16", None, ("head", "value", "delta-key"), ("whole",)),
}
DEVICES = dict(cuda=("NVIDIA H100 80GB HBM3", "gpu"), tpu=("TPU v5e", "tpu"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and options of a call: T tokens of B sequences, or of one row of packed ones; Hq heads of queries and keys."""

    B: int = 2
    T: int = 512
    H: int = 2
    Hq: int = 2
    K: int = 64
    V: int = 64
    gates: str | None = None  # their dtype
    state: bool = False
    final: bool = True  # whether the gradient is of the final state, too
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: tuple[str, dict[str, int]] | None = None  # its class and fields

    @property
    def given(self) -> dict[str, Any]:
        """The options, with the config made."""
        cfg = None if self.config is None else getattr(glax.configs, self.config[0])(**self.config[1])
        return self.options | dict(cfg=cfg)


# In what kernels differ beside gates and packing.
SHAPES = {
    "128": Shape(K=128, V=128),
    "256x512": Shape(K=256, V=512),
    "64x192": Shape(K=64, V=192),
    "groups": Shape(K=128, Hq=1),
    "pairs": Shape(K=128, Hq=1, config=("HopperConfig", dict(columns=128))),
    "columns": Shape(K=128, V=128, config=("HopperConfig", dict(columns=128))),
    "split": Shape(T=2048, K=128, V=128, config=("HopperConfig", dict(parts=4))),
    "float32": Shape(K=128, V=128, gates="float32"),
    "joined": Shape(T=516, K=128, V=128, final=False),
    "odd": Shape(B=1, T=511, K=128, V=128, final=False),
    "reverse": Shape(K=128, V=128, options=dict(reverse=True)),
    "state": Shape(state=True),
    "no-final": Shape(final=False),
    "states": Shape(options=dict(states_every=256)),
}
# Targets and gates: the shapes of each; p- before a shape: packed by cu_seqlens.
VARIANTS = {
    ("hopper", "head"): "128 256x512 groups pairs split joined odd states p-no-final p-groups",
    ("hopper", "key"): "128 256x512 columns split float32 joined reverse states p-no-final p-state",
    ("hopper", "delta-head"): "128 256x512 64x192 groups split reverse states p-no-final p-state",
    ("hopper", "delta-key"): "128 64x192 groups split float32 reverse p-state",
    ("triton", "head"): "256x512 groups states p-state",
    ("triton", "key"): "256x512 float32 reverse p-state",
    ("triton", "delta-head"): "256x512 groups reverse p-state",
    ("triton", "delta-key"): "256x512 float32 p-state",
    ("tpu", "head"): "128 256x512 groups odd states p-state",
    ("tpu", "key"): "128 256x512 float32 reverse p-state",
}


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    run: Callable[..., Any]
    arguments: dict[str, jax.ShapeDtypeStruct]
    backend: str


def registered() -> dict[str, glax.KernelSpec]:
    _ = glax.configs.ChunkedConfig  # which loads the kernels
    return glax.kernel_registry.kernels


def arrays(gates: tuple[str, ...], packing: str, shape: Shape, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arguments of `glax.recurrent`."""
    array, B, T, H = jax.ShapeDtypeStruct, 1 if packing == "packed" else shape.B, shape.T, shape.H
    gate = jnp.dtype(shape.gates or dtype)
    q, v = (array((B, T, heads, D), jnp.dtype(dtype)) for heads, D in ((shape.Hq, shape.K), (H, shape.V)))
    key, value = (array((B, T, H, D), gate) for D in (shape.K, shape.V))
    head, constant = array((B, T, H), jnp.float32), array((H,), jnp.float32)
    each = dict(g=head, g_gamma=constant, gk=key, gv=value, beta=array((B, T, H), v.dtype), erase=key, write=value)
    each |= dict(erase_along=key)
    given = dict(query=q, key=q, value=v) | {name: each[name] for name in gates}
    given |= dict(cu_seqlens=array((4,), jnp.int32)) if packing == "packed" else {}
    given |= dict(segment_ids=array((B, T), jnp.int32)) if packing == "segments" else {}
    if shape.state:
        given["initial_state"] = array((3 if packing == "packed" else B, H, shape.K, shape.V), jnp.float32)
    return given


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def gradient(run: Callable, final: bool, **given):
    """The gradient of all results, or of all but the final state."""
    integers = {name: x for name, x in given.items() if not jnp.issubdtype(x.dtype, jnp.floating)}

    def total(real):
        output, *states = run(**real, **integers)
        return sum(x.astype(jnp.float32).sum() for x in floats((output, states if final else states[1:])))

    return jax.grad(total)({name: x for name, x in given.items() if name not in integers})


def both_ways(name, run, given, backend, final=True) -> Iterator[Call]:
    yield Call(f"{name}-forward", run, given, backend)
    yield Call(f"{name}-gradient", functools.partial(gradient, run, final), given, backend)


def sequences() -> Iterator[Call]:
    for label, target in TARGETS.items():
        run = functools.partial(glax.recurrent, platform=target.platform, cfg=target.config)
        for form, packing in itertools.product(target.gates, target.packings):
            given = arrays(GATES[form], packing, Shape(), target.dtype)
            yield from both_ways(f"{label}-{form}-{packing}", run, given, target.backend)
    for (label, form), names in VARIANTS.items():
        target = TARGETS[label]
        for name in names.split():
            shape, packing = SHAPES[name.removeprefix("p-")], "packed" if name.startswith("p-") else "whole"
            run = functools.partial(glax.recurrent, platform=target.platform, **shape.given)
            given = arrays(GATES[form], packing, shape, target.dtype)
            yield from both_ways(
                f"{label}-{form}-{packing}-{name.removeprefix('p-')}", run, given, target.backend, shape.final
            )


def serving() -> Iterator[Call]:
    """Steps, drafts and prompts, with states in a pool and beside it."""
    array = jax.ShapeDtypeStruct
    pool, slots = array((9, 2, 64, 64), jnp.float32), array((2,), jnp.int32)
    for label, form in itertools.product(
        ("xla", "cpp", "triton", "cuda", "chosen"), ("none", "head", "key", "delta-key")
    ):
        target = TARGETS[label]
        shape, options = Shape(T=4), dict(platform=target.platform)
        draft = arrays(GATES[form], "whole", shape, target.dtype)
        token = {name: array((x.shape[0], *x.shape[2:]), x.dtype) for name, x in draft.items()}
        state = array((2, *pool.shape[1:]), pool.dtype)
        step = functools.partial(glax.recurrent_step, **options)
        verify = functools.partial(glax.recurrent_verify, **options)
        yield Call(f"{label}-{form}-step", step, token | dict(state=state), target.backend)
        yield Call(f"{label}-{form}-step-pool", step, token | dict(state=pool, slots=slots), target.backend)
        yield Call(f"{label}-{form}-verify-pool", verify, draft | dict(state=pool, slots=slots), target.backend)
    for label, form in itertools.product(("xla", "cpp", "triton", "hopper", "chosen"), ("head", "key", "delta-key")):
        target = TARGETS[label]
        prefill = functools.partial(glax.prefill_into, platform=target.platform)
        for packing in ("whole", "packed"):
            given = arrays(GATES[form], packing, Shape(), target.dtype)
            given |= dict(pool=pool, slots=slots if packing == "whole" else array((3,), jnp.int32))
            yield Call(f"{label}-{form}-{packing}-prefill", prefill, given, target.backend)


def on_meshes() -> Iterator[Call]:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spreads = (
        dict(batch_axis="a", head_axis="b"),
        dict(sequence_axis="a"),
        dict(batch_axis="a", sequence_axis="b"),
    )
    for form, axes in itertools.product(("constant", "head", "key", "delta", "delta-key"), spreads):
        run = functools.partial(parallel.recurrent, mesh=mesh, **axes)
        named = "-".join(f"{k}.{v}" for k, v in axes.items())
        yield from both_ways(f"parallel-{form}-{named}", run, arrays(GATES[form], "whole", Shape(), "float32"), "cpu")
    run = functools.partial(parallel.recurrent, mesh=mesh, sequence_axis="a")
    for form, packing in itertools.product(("head", "key", "delta-key"), PACKINGS[1:]):
        given = arrays(GATES[form], packing, Shape(), "float32")
        yield from both_ways(f"parallel-{form}-{packing}-sequence_axis.a", run, given, "cpu")


def calls() -> list[Call]:
    return [*sequences(), *serving(), *on_meshes()]


# ---- without names and locations -------------------------------------------------------------------------------------


def module_text(bytecode: bytes, dialect: str) -> str:
    """The module of a Pallas kernel, printed without locations."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    if dialect == "tpu":
        from jax._src.lib import tpu

        tpu.register_dialect(context)
    else:
        from jax._src.lib import mosaic_gpu_dialect

        mosaic_gpu_dialect.register_dialect(context)
        from jax._src.interpreters import mlir

        context.append_dialect_registry(mlir.upstream_dialects)
        context.load_all_available_dialects()
    with context, ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        return module.operation.get_asm(enable_debug_info=False)


def ptx_of(opaque: bytes) -> str:
    """The PTX inside of a Triton call, without its debug sections."""
    text = zlib.decompress(opaque).decode("latin1")
    found = "\n".join(re.findall(r"\.version.*?\n}\n", text, flags=re.DOTALL))
    lines = [line for line in found.splitlines() if not re.match(r"\s*\.(loc|file)\b|\s*//|\s*\$L__", line)]
    names = {name: f"kernel{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\.entry (\w+)", found)))}
    return re.sub(r"\b(" + "|".join(map(re.escape, names)) + r")(?=_param|\()", lambda m: names[m[1]], "\n".join(lines))


def unescaped(text: str) -> bytes:
    """The bytes of an MLIR string literal."""
    return re.sub(
        rb"\\([0-9A-Fa-f]{2})|\\(.)", lambda m: bytes([int(m[1], 16)]) if m[1] else m[2], text.encode("latin1")
    )


def inner(match: re.Match) -> str:
    """A custom call's configuration, with what is encoded in it as text."""
    raw = unescaped(match[1])
    if raw[:1] == b"{":
        config = json.loads(raw)
        body = config.get("custom_call_config", {}).pop("body", None)
        config.get("custom_call_config", {}).pop("debug_locations", None)
        text = module_text(base64.b64decode(body), "tpu") if body else ""
        return f"config {json.dumps(config, sort_keys=True)}\n{text}\n"
    try:
        return ptx_of(raw)
    except zlib.error:
        return match[0]


def plain(text: str) -> str:
    """A program with its symbols numbered in order of appearance, and its long constants hashed."""
    text = re.sub(r'"0x([0-9A-F]{200,})"', lambda m: f"sha256 {hashlib.sha256(m[1].encode()).hexdigest()}", text)
    text = re.sub(r'backend_config = "((?:[^"\\]|\\.)*)"', inner, text)
    text = re.sub(r'\bopaque = "((?:[^"\\]|\\.)*)"', inner, text)
    text = re.sub(r'\bmodule = "((?:[^"\\]|\\.)*)"', lambda m: "module\n" + module_text(unescaped(m[1]), "gpu"), text)
    text = re.sub(r'(kernel_hash|kernel_name|name|jax\.uses_shape_polymorphism) = ("[^"]*"|\w+)', r"\1", text)
    numbers: dict[str, str] = {}
    text = re.sub(r"@[\w.\-$]+|@\"[^\"]*\"", lambda m: numbers.setdefault(m[0], f"@s{len(numbers)}"), text)
    text = re.sub(r"\b(glax_)?[A-Za-z_]\w*(?=\s*\()(?<=entry )", "kernel", text)
    return re.sub(r" loc\(.*?\)", "", text)


# ---- writing and comparing -------------------------------------------------------------------------------------------


def mend_jax_triton():
    """Let jax-triton 0.4.1 lower for a GPU that is not here, on JAX 0.12.

    JAX's rules for dead code take one argument more there, and threads that compile ahead see no abstract device.
    """
    for primitive, rule in list(partial_eval.dce_rules.items()):
        if primitive.name == "triton_kernel_call" and len(inspect.signature(rule).parameters) == 2:
            partial_eval.dce_rules[primitive] = lambda used, *rest, rule=rule: rule(used, rest[-1])
    from jax._src.pallas.triton import gpu_info

    ask = gpu_info.get_gpu_info

    def asked_of_the_target():
        with device("cuda"):
            return ask()

    gpu_info.get_gpu_info = asked_of_the_target


def device(backend: str):
    """The context in which there is a device of the backend, as far as tracing can tell."""
    if backend not in DEVICES:
        return contextlib.nullcontext()
    kind, platform = DEVICES[backend]
    there = AbstractDevice(kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=there))


def program(call: Call) -> str:
    with device(call.backend):
        return plain(jax.jit(call.run).trace(**call.arguments).lower(lowering_platforms=(call.backend,)).as_text())


def write(out: pathlib.Path, wanted: list[Call]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    refused = []
    with contextlib.suppress(ModuleNotFoundError):
        import jax_triton as _  # noqa: F401

        mend_jax_triton()
    for call in wanted:
        try:
            text = program(call)
        except Exception as error:
            # A kernel that refuses, or whose compiler is not here: the reason is part of the record.
            text = f"not lowered: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            refused.append(f"{call.name}: {text[:160]}")
        (out / f"{call.name}.txt").write_text(text + "\n")
    print(f"{len(wanted) - len(refused)} programs in {out}; {len(refused)} calls not lowered:", *refused, sep="\n  ")
    return 0


def compare(a: pathlib.Path, b: pathlib.Path, only: re.Pattern) -> int:
    names = sorted({path.name for folder in (a, b) for path in folder.glob("*.txt") if only.search(path.stem)})
    texts = {name: [(f / name).read_text() if (f / name).exists() else "" for f in (a, b)] for name in names}
    differing = [name for name, (old, new) in texts.items() if old != new]
    lowered = sum(not old.startswith("not lowered") for old, _ in texts.values())
    print(f"{len(names)} calls, {lowered} of them programs; {len(differing)} differ", *differing, sep="\n  ")
    if differing:
        old, new = (text.splitlines() for text in texts[differing[0]])
        diff = difflib.unified_diff(old, new, "before", "after", lineterm="", n=1)
        print(*(line[:160] for line in itertools.islice(diff, 40)), sep="\n")
    return int(bool(differing))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("write", "compare", "list"))
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--only", default="", type=re.compile, help="calls in whose names the expression is found")
    parser.add_argument("--half", type=int, choices=(0, 1), help="with write: every second call, from this one on")
    args = parser.parse_args()
    if len(args.folders) != dict(write=1, compare=2, list=0)[args.mode]:
        parser.error("write needs one folder, compare two, list none")
    if args.mode == "compare":
        sys.exit(compare(*args.folders, args.only))
    wanted = [call for call in calls() if args.only.search(call.name)]
    wanted = wanted if args.half is None else wanted[args.half :: 2]
    if args.mode == "list":
        print(*(call.name for call in wanted), sep="\n")
    else:
        sys.exit(write(*args.folders, wanted))

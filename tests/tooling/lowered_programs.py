"""Lowers a fixed set of calls and compares them between two commits: what a refactoring must leave as it was.

    python tests/tooling/lowered_programs.py write OUT      every call's program as text, one file a call, in folder OUT
    python tests/tooling/lowered_programs.py compare A B    the calls whose programs differ; exit status 1 if there are any

Names and locations are taken out: symbols are numbered in order of appearance, and the modules inside of custom calls
(Pallas for TPUs and Hopper, PTX of Triton) are printed without debug information. Run `write` with PYTHONPATH set to the
checkout of each commit. Needs no accelerator; Triton and Hopper calls are left out, and listed, where their compilers are
missing. The second form prints a unified diff of the first program that differs.
"""

import argparse
import base64
import contextlib
import difflib
import functools
import itertools
import json
import os
import pathlib
import re
import sys
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

import glax
from glax import parallel

try:
    from glax._src.core.bind import bind
    from glax._src.kernels import load_kernels
except ModuleNotFoundError:  # a commit from before the private package glax._src: its programs are compared as well
    from glax.bind import bind
    from glax.kernels import load_kernels

# The platform that each is lowered for, and the dtype of q, k and v.
KERNELS = {
    "recurrent/xla/any": ("cpu", "float32"),
    "chunked/xla/any": ("cpu", "float32"),
    "chunked.vjp/xla/any": ("cpu", "float32"),
    "recurrent/cpp/cpu": ("cpu", "float32"),
    "recurrent.vjp/cpp/cpu": ("cpu", "float32"),
    "chunked/triton/gpu": ("cuda", "bfloat16"),
    "chunked.vjp/triton/gpu": ("cuda", "bfloat16"),
    "recurrent/triton/gpu": ("cuda", "bfloat16"),
    "chunked/pallas/gpu": ("cuda", "bfloat16"),
    "chunked.vjp/pallas/gpu": ("cuda", "bfloat16"),
    "chunked/pallas/tpu": ("tpu", "bfloat16"),
    "chunked.vjp/pallas/tpu": ("tpu", "bfloat16"),
}
# The device that jax-triton compiles for, where there is none.
H100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"))
FORMS = {
    "none": (),
    "constant": ("g_gamma",),
    "head": ("g",),
    "key": ("gk",),
    "value": ("gv",),
    "key+value": ("gk", "gv"),
}


def arguments(gates, packed, B=2, T=512, H=4, D=64, dtype="bfloat16"):
    """Shapes of the arguments of `glax.recurrent`."""
    shape = functools.partial(jax.ShapeDtypeStruct)
    B = 1 if packed else B
    wide = shape((B, T, H, D), jnp.dtype(dtype))
    each = dict(g=shape((B, T, H), jnp.float32), g_gamma=shape((H,), jnp.float32), gk=wide, gv=wide)
    given = dict(query=wide, key=wide, value=wide) | {name: each[name] for name in gates}
    if packed:
        given["cu_seqlens"] = shape((4,), jnp.int32)
    return given


def through_the_registry(name, **given):
    """A kernel of the registry on what `bind` makes of the arguments; a gradient with ones for its cotangents."""
    kernel, r = kernels()[name], bind(**given)
    if (reason := kernel.supports(r)) is not None and "needs" not in reason:
        raise ValueError(reason)
    config = kernel.config.heuristic(r)
    if not kernel.is_gradient:
        return tuple(kernel.run(r, config=config))
    ones = jnp.ones((*r.q.shape[:3], r.v.shape[3]), r.q.dtype), jnp.ones(r.state_shape, jnp.float32)
    return kernel.run(r, *ones, config=config)


def kernels():
    load_kernels()
    return glax.kernel_registry.kernels


def gradient(**arrays):
    return jax.grad(lambda x: glax.recurrent(**x).output.astype("float32").sum())(arrays)


def gradient_through(run, **arrays):
    return jax.grad(lambda x: run(**x)[0].sum())(arrays)


def calls():
    """(name, function, keyword arguments in shapes, lowering platform) of every call."""
    for kernel, targets in KERNELS.items():
        target, dtype = targets
        for form, gates in FORMS.items():
            for packed in (False, True):
                given = arguments(gates, packed, dtype=dtype)
                label = f"{kernel.replace('/', '-')}-{form}{'-packed' * packed}"
                yield label, functools.partial(through_the_registry, kernel), given, target
    for form, gates in FORMS.items():
        yield f"as-chosen-{form}-forward", glax.recurrent, arguments(gates, False, dtype="float32"), "cpu"
        yield f"as-chosen-{form}-gradient", gradient, arguments(gates, False, dtype="float32"), "cpu"
    x, state = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 2, 64), (4, 2, 64, 64)))
    slots, pool = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((9, 2, 64, 64), jnp.float32)
    tokens = dict(query=x, key=x, value=x, gk=x)
    for platform in ("xla", "cpp"):
        step = functools.partial(glax.recurrent_step, platform=platform)
        yield f"step-{platform}", step, tokens | dict(state=state), "cpu"
        yield f"step-{platform}-pool", step, tokens | dict(state=pool, slots=slots), "cpu"
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for form in ("head", "key"):
        given = arguments(FORMS[form], packed=False, dtype="float32")
        for axes in (
            dict(batch_axis="a", head_axis="b"),
            dict(sequence_axis="a"),
            dict(batch_axis="a", sequence_axis="b"),
        ):
            run = functools.partial(parallel.recurrent, mesh=mesh, **axes)
            pull = functools.partial(gradient_through, run)
            name = "-".join(f"{k}.{v}" for k, v in axes.items())
            yield f"parallel-{form}-{name}-forward", run, given, "cpu"
            yield f"parallel-{form}-{name}-gradient", pull, given, "cpu"


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
    """A program with its symbols numbered in order of appearance."""
    text = re.sub(r'backend_config = "((?:[^"\\]|\\.)*)"', inner, text)
    text = re.sub(r'\bopaque = "((?:[^"\\]|\\.)*)"', inner, text)
    text = re.sub(r'\bmodule = "((?:[^"\\]|\\.)*)"', lambda m: "module\n" + module_text(unescaped(m[1]), "gpu"), text)
    text = re.sub(r'(kernel_hash|kernel_name|name|jax\.uses_shape_polymorphism) = ("[^"]*"|\w+)', r"\1", text)
    numbers: dict[str, str] = {}
    text = re.sub(r"@[\w.\-$]+|@\"[^\"]*\"", lambda m: numbers.setdefault(m[0], f"@s{len(numbers)}"), text)
    text = re.sub(r"\b(glax_)?[A-Za-z_]\w*(?=\s*\()(?<=entry )", "kernel", text)
    return re.sub(r" loc\(.*?\)", "", text)


def write(out: pathlib.Path, only: str):
    out.mkdir(parents=True, exist_ok=True)
    written, left = 0, []
    for name, run, given, target in calls():
        if only not in name:
            continue
        try:
            with jax.sharding.use_abstract_mesh(H100) if "triton" in name else contextlib.nullcontext():
                lowered = jax.jit(run).trace(**given).lower(lowering_platforms=(target,))
        except Exception as error:
            # A kernel that refuses, or whose compiler is not here: the reason is part of the record.
            text = f"not lowered: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            left.append(f"{name}: {text}")
        else:
            text = plain(lowered.as_text())
            written += 1
        (out / f"{name}.txt").write_text(text + "\n")
    print(f"{written} programs in {out}; {len(left)} calls not lowered:", *left, sep="\n  ")


def compare(a: pathlib.Path, b: pathlib.Path) -> int:
    names = sorted({path.name for folder in (a, b) for path in folder.glob("*.txt")})
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
    parser.add_argument("mode", choices=("write", "compare"))
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--only", default="", help="with write: calls whose name contains this text")
    args = parser.parse_args()
    sys.exit(write(*args.folders, args.only) if args.mode == "write" else compare(*args.folders))

"""Write the support matrix of docs/variants.md from the registry of kernels.

python docs/support_matrix.py            prints the tables
python docs/support_matrix.py --write    replaces them in both files
"""

import argparse
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp

from glax import Backend, KernelSpec, Platform, Recurrence, kernel_registry
from glax._src.core.bind import bind
from glax._src.core.registry import Role
from glax._src.kernels import load_kernels

DOCS = pathlib.Path(__file__).parent
PAGE = DOCS / "variants.md"
BEGIN, END = "<!-- support matrix: begin -->\n", "<!-- support matrix: end -->"

PLATFORMS = {
    (Platform.XLA, Backend.ANY): "XLA (any device)",
    (Platform.CPP, Backend.CPU): "C++ (CPU)",
    (Platform.TRITON, Backend.GPU): "Triton (GPU)",
    (Platform.CUDA, Backend.GPU): "CUDA (GPU)",
    (Platform.PALLAS, Backend.GPU): "Pallas (Hopper GPU)",
    (Platform.PALLAS, Backend.TPU): "Pallas (TPU)",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
FORMS = {
    "none": (),
    "constant (`retention`, `lightning_attention`)": ("g_gamma",),
    "per-head (`simple_gla`)": ("g",),
    "per-key (`recurrent_gla`)": ("gk",),
    "per-value": ("gv",),
    "per-key and per-value": ("gk", "gv"),
    "delta rule (`delta_rule`)": ("beta",),
    "delta rule, per-head (`gated_delta_rule`)": ("g", "beta"),
    "delta rule, per-key (`kda`)": ("gk", "beta"),
}
# Reasons that name what this machine lacks, not what the kernel does not support.
OF_THE_MACHINE = re.compile(r"needs |its library|is (written )?for Hopper")

T, H, WIDTH = 2048, 2, 64


def example(
    gates: tuple[str, ...] = (), dtype: str = "bfloat16", length: int = T, heads: int = H, **options
) -> Recurrence:
    """A recurrence in shapes alone, with those gates."""
    tokens = jax.ShapeDtypeStruct((1, length, heads, WIDTH), dtype)
    narrow = jax.ShapeDtypeStruct((1, length, 1, WIDTH), dtype)
    dense = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)
    shapes = dict(g_gamma=jax.ShapeDtypeStruct((heads,), jnp.float32), g=dense, gk=tokens, gv=tokens, beta=dense)
    arrays = dict(query=narrow if options.pop("grouped", False) else tokens, key=tokens, value=tokens)
    arrays |= {gate: shapes[gate] for gate in gates}
    if options.pop("segments", False):
        arrays["segment_ids"] = jax.ShapeDtypeStruct((1, length), jnp.int32)
    if options.pop("packed", False):
        arrays["cu_seqlens"] = jax.ShapeDtypeStruct((4,), jnp.int32)
    if options.pop("state", False):
        arrays["initial_state"] = jax.ShapeDtypeStruct((1, heads, WIDTH, WIDTH), jnp.float32)
    return jax.eval_shape(lambda **arrays: bind(**arrays, **options).folded, **arrays)


def runs(spec: KernelSpec, r: Recurrence) -> bool:
    """Whether the kernel supports the call on a machine that has all that it needs."""
    if spec.other_form(r, r.decay.form) is not None:
        return False
    reason = spec.supports(r)
    return reason is None or OF_THE_MACHINE.match(reason) is not None


def kernels(platform, backend) -> list[KernelSpec]:
    return [s for s in kernel_registry.kernels.values() if (s.platform, s.backend) == (platform, backend)]


def directions(specs: list[KernelSpec], gates: tuple[str, ...]) -> str:
    """Which of forward, gradient, step, verification and replay a platform's kernels compute with these gates, in any dtype."""
    found = []
    for name, role in (
        ("forward", Role.FORWARD),
        ("gradient", Role.VJP),
        ("step", Role.STEP),
        ("verify", Role.VERIFY),
        ("replay", Role.REPLAY),
    ):
        chosen = [s for s in specs if s.role is role]
        pooled = role in (Role.STEP, Role.VERIFY, Role.REPLAY)
        calls = [example(gates, dtype, 1 if pooled else T, state=pooled) for dtype in DTYPES[:2]]
        if any(runs(spec, r) for spec, r in itertools.product(chosen, calls)):
            found.append(name)
    return ", ".join(found) or "-"


def features(specs: list[KernelSpec], **options) -> str:
    """Whether the forward kernels of a platform support the call with a per-head gate, in any dtype."""
    forward = [s for s in specs if s.role is Role.FORWARD]
    calls = [example(("g",), dtype, **options) for dtype in DTYPES[:2]]
    return "yes" if any(runs(spec, r) for spec, r in itertools.product(forward, calls)) else "-"


def states_along(specs: list[KernelSpec]) -> str:
    """How the states behind every n tokens are found: by a kernel that stores them, or in pieces (glax._src.solve.pieces)."""
    r = example(("g",), "bfloat16")
    stored = any(s.stores_states(r) is None for s in specs if s.role is Role.FORWARD)
    return "in one scan; packed, in pieces" if stored else "in pieces"


def dtypes(specs: list[KernelSpec]) -> str:
    forward = [s for s in specs if s.role is Role.FORWARD]
    return ", ".join(d for d in DTYPES if any(runs(s, example(("g",), d)) for s in forward))


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (headings, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]]) + "\n"


def by_gate() -> str:
    """What each platform's kernels compute with each form of gates, as a Markdown table."""
    specs = registered()
    return table(
        ["gates", *specs], [[form, *(directions(s, gates) for s in specs.values())] for form, gates in FORMS.items()]
    )


def by_feature() -> str:
    """Which dtypes and options each platform's kernels support, as a Markdown table."""
    specs = registered()
    with jax.enable_x64(True):
        rows = [["dtypes", *(dtypes(s) for s in specs.values())]]
        for name, options in (
            ("`cu_seqlens`", dict(packed=True)),
            ("`segment_ids`", dict(segments=True)),
            ("`initial_state`, final state", dict(state=True)),
            ("`reverse`", dict(reverse=True)),
            ("grouped heads", dict(grouped=True)),
        ):
            rows.append([name, *(features(s, **options) for s in specs.values())])
        rows.append(["`states_every`", *map(states_along, specs.values())])
    return table(["feature", *specs], rows)


def matrix() -> str:
    return f"{by_gate()}\n{by_feature()}"


def registered() -> dict[str, list[KernelSpec]]:
    load_kernels()
    return {name: kernels(*key) for key, name in PLATFORMS.items()}


def between(text: str) -> str:
    return f"{BEGIN}{text}{END}"


def replace(path: pathlib.Path, text: str):
    before, rest = path.read_text().split(BEGIN)
    path.write_text(before + between(text) + rest.split(END)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/variants.md")
    if not parser.parse_args().write:
        print(matrix())
        return
    replace(PAGE, matrix())


if __name__ == "__main__":
    main()

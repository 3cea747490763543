"""Compile the launches of a traced call without a GPU, and report the resources of each kernel.

python -m tests.triton_compile 90 "key bfloat16 128" prints a line of JSON per kernel, for compute capability 9.0. The last
argument is a gate, a dtype and a width, or two as in 256x512 for K and V. delta or kda in the place of a gate is the delta rule
with a per-head or a per-key gate, delta-erase or kda-erase has erase and write in the place of beta, and rwkv7 erase and
erase_along, read before the decay. "key bfloat16 256x512 chunked" prints the kernels of that algorithm alone, and
"key bfloat16 128 recurrent.replay/int8" the one of a step of a StatePool with states in int8. Per-key gates have the dtype of the
queries; "key/float32 bfloat16 128" gives them another. TRITON_INTERPRET must not be set.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import jax_triton
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glax._src.kernels.triton import config

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}
TYPES |= {"int8": "i8", "float8_e4m3fn": "fp8e4nv"}
TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: object
    operands: tuple
    warps: int
    stages: int
    constants: tuple


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes of shared memory per program, registers and bytes of stack (spills) per thread, and the PTX."""

    shared: int
    registers: int
    stack: int
    ptx: str


def launches(f, *operands) -> list[Launch]:
    """Return the launches of f(*operands). Operands may be shapes."""
    found = []

    def record(
        *given,
        kernel,
        grid,
        num_warps,
        num_stages,
        input_output_aliases=None,
        out_type=None,
        out_shape=None,
        **constants,
    ):
        outputs = out_type if out_type is not None else out_shape
        passed = [
            x for i, x in enumerate(outputs) if out_type is None or i not in (input_output_aliases or {}).values()
        ]
        kinds = tuple(TYPES[str(x.dtype)] for x in (*given, *passed))
        found.append(Launch(kernel, kinds, num_warps, num_stages, tuple(constants.items())))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    original, jax_triton.triton_call = jax_triton.triton_call, record
    try:
        jax.eval_shape(f, *operands)
    finally:
        jax_triton.triton_call = original
    return found


def compiled(launch: Launch, capability: int) -> Usage:
    names, constants = launch.kernel.arg_names, dict(launch.constants)
    arrays = [name for name in names if name not in constants]
    signature = {name: "constexpr" for name in constants} | {
        name: f"*{kind}" for name, kind in zip(arrays, launch.operands, strict=True)
    }
    source = ASTSource(
        fn=launch.kernel,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in arrays},
    )
    options = dict(num_warps=launch.warps, num_stages=launch.stages)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        pathlib.Path(file.name).write_bytes(binary.asm["cubin"])
        report = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    return Usage(binary.metadata.shared, registers, stack, binary.asm["ptx"])


def shipped(gate: str, dtype: str, widths: str, algorithm: str = "") -> list[Launch]:
    """Return the launches of the heuristic configs: of a forward, a gradient, a short sequence and a step, or of an algorithm."""
    from glax._src.core.bind import bind
    from glax._src.core.registry import kernel_registry
    from glax._src.kernels import load_kernels
    from glax.serving import StatePool

    load_kernels()
    B, T, H = 8, 2048, 16
    algorithm, _, stored = algorithm.partition("/")
    gate, _, gate_dtype = gate.partition("/")
    gate, _, erase = gate.partition("-")
    if gate_dtype and gate not in ("key", "kda", "rwkv7"):
        raise ValueError(f"{gate}/{gate_dtype}: expected a dtype of per-key gates, key or kda, got {gate}")
    K, V = (int(x) for x in (widths.split("x") * 2)[:2])

    def call():
        x = jnp.zeros((B, T, H, K), dtype)
        gates = dict(gk=x.astype(gate_dtype or dtype)) if gate in ("key", "kda") else dict(g=jnp.zeros((B, T, H)))
        gates = dict(g_gamma=jnp.zeros(H)) if gate == "constant" else gates
        if gate == "rwkv7":
            gates = dict(gk=x.astype(gate_dtype or dtype), erase=x, erase_along=x, erase_before_decay=True)
        elif erase:
            gates |= dict(erase=x, write=jnp.zeros((B, T, H, V), dtype))
        elif gate in ("delta", "kda"):
            gates["beta"] = jnp.zeros((B, T, H), dtype)
        return bind(x, x, jnp.zeros((B, T, H, V), dtype), **gates)

    def runs(name: str, r, *rest):
        spec = kernel_registry.kernels[f"{name}/triton/gpu"]
        return launches(lambda r, *rest: spec.run(r, *rest, config=spec.config.heuristic(r)), r, *rest)

    r = jax.eval_shape(call)
    state = jax.ShapeDtypeStruct(r.state_shape, jnp.float32)
    token = jax.eval_shape(lambda: jax.tree.map(lambda x: x[:, :1] if x.ndim > 2 else x, call()))
    slots = jax.ShapeDtypeStruct((B,), jnp.int32)
    algorithms = {"chunked": (r,), "chunked.vjp": (r, r.v, state)}
    if algorithm == "recurrent.replay":
        decay = {"head": "head", "delta": "head", "constant": "constant"}.get(gate, "key")
        form = decay if token.erasure is None else f"{decay}+{token.erasure.form}"
        pool = jax.eval_shape(
            lambda: StatePool(2 * B, H, (K, V), stored or "float32", replay=8, form=form, token_dtype=dtype).ringed()
        )
        algorithms[algorithm] = (token.replace(initial_state=pool.arrays()[0]), pool, slots)
    elif gate not in ("delta", "kda", "rwkv7"):
        algorithms |= {"recurrent": (token,), "recurrent.step": (token, state, slots)}
    return [each for name, given in algorithms.items() if algorithm in ("", name) for each in runs(name, *given)]


if __name__ == "__main__":
    config.capability = lambda: divmod(int(sys.argv[1]), 10)  # what the heuristics ask about the GPU
    for what in sys.argv[2:]:
        for each in dict.fromkeys(shipped(*what.split())):
            usage = compiled(each, int(sys.argv[1]))
            matrix = sorted(set(re.findall(r"wgmma|mma\.sync|tcgen05\.mma", usage.ptx)))
            row = dict(kernel=each.kernel.__name__, runs=what, registers=usage.registers, matrix=matrix)
            print(json.dumps(row | dict(shared=usage.shared, stack=usage.stack)), flush=True)

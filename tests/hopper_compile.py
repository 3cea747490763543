"""Compiles a call of the Hopper kernels for an H100 that is not here, and reports what each kernel would take of it.

python -m tests.hopper_compile gradient key 128 compiles one: what a call does, a gate, a width. Needs what `make hopper-compiler`
lays apart, JAX's CUDA plugin and NVIDIA's compiler, and no GPU.
"""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import glax
from glax._src.core.bind import bind
from glax._src.core.recurrence import StoredStates
from glax._src.core.segments import Segments
from glax._src.kernels.pallas_gpu import delta, isolation, plain
from glax._src.kernels.pallas_gpu.config import HopperConfig

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Read when JAX loads. With MOSAIC_GPU_DUMP_TO it would write all its passes, too, which takes longer than to compile.
SAY = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("RESOURCES", "PTX", "PTXAS", "SASS")}
SEGMENTS = 8
T = (
    SEGMENTS * 1024
)  # so that programs have several chunks each: the compiler spills less in a loop that ends immediately


@functools.cache
def device() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def shaped(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An operand on an H100."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device())


def lowered(what: str, gate: str, width: str) -> jax.stages.Lowered:
    """width: K and V, or the one number that both are."""
    K, V = (int(x) for x in (width.split("x") * 2)[:2])
    columns = 64 if "narrow" in what or min(K, V) <= 64 else 128
    columns = 128 if "pairs" in what else columns
    packed = "packed" in what or "one row" in what
    joined, odd = "joined" in what, "odd row" in what
    rows = T + 4 * joined - odd  # tokens of a sequence; joined, 8 divides those of two

    if what == "repair":
        arrays = shaped(T, 512), shaped(64, 1024, dtype=jnp.float32)
        return (
            jax.jit(isolation.repair)
            .trace(shaped(1, dtype=jnp.int32), arrays, arrays)
            .lower(lowering_platforms=("cuda",))
        )

    def call(q, k, v, g, d_output, d_final, cu_seqlens, resets):
        given = {"g" if gate == "head" else "gk": g}
        given |= {"beta": v[..., 0]} if "delta" in what and "erase" not in what else {}
        if "erase" in what:
            given |= {"erase": jnp.broadcast_to(k, (*v.shape[:3], k.shape[3])), "erase_before_decay": "before" in what}
        given |= {"write": v} if "write" in what else {}
        given |= {"initial_state": d_final} if "packed" in what else {}
        given |= {"erase_before_decay": "before" in what}
        r = bind(q, k, v, **given, cu_seqlens=cu_seqlens if packed else None, reverse="reverse" in what)
        if "resets" in what:
            r = r.replace(segments=Segments(resets, None))
        kernels = delta if "delta" in what else plain
        config = HopperConfig(parts=SEGMENTS if "segments" in what else 1, columns=columns)
        config = HopperConfig(config.parts) if "delta" in what else config
        if "states" in what:
            r = r.replace(states_every=256)
            d_states = jnp.broadcast_to(d_final[:, None], (2, T // 256, *d_final.shape[1:]))
            d_final = StoredStates(d_final, d_states)
        if "gradient" in what:
            without = "one row" in what or joined
            return kernels.chunked_vjp(r, d_output, None if without else d_final, None, config)
        return (kernels.chunked_with_residuals if "residuals" in what else kernels.chunked)(r, config)

    B, N = (1, 8) if packed else (2 - odd, 2 - odd)
    H = 60 if "many heads" in what else 4  # 120 programs of two stripes, fewer than multiprocessors
    q, v = shaped(B, rows, 1 if "groups" in what else H, K), shaped(B, rows, H, V)
    gates = shaped(B, rows, H, *[K] * (gate != "head"), dtype=jnp.float32 if "float32" in gate else jnp.bfloat16)
    cuts, resets = shaped(N + 1, dtype=jnp.int32), shaped(B, rows, dtype=bool)
    operands = q, q, v, gates, v, shaped(N, H, K, V, dtype=jnp.float32), cuts, resets
    return jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))


def spread_over_two() -> jax.stages.Lowered:
    """A forward with per-key gates by `glax.recurrent`, its batch over two H100."""
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x2")
    over = jax.sharding.NamedSharding(jax.sharding.Mesh(topology.devices, "x"), jax.P("x"))
    x = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16, sharding=over)
    run = jax.jit(lambda q, k, v, gk: glax.recurrent(q, k, v, gk=gk, platform="pallas"))
    return run.trace(x, x, x, x).lower(lowering_platforms=("cuda",))


def waits_for_registers(ptx: str, at_launch: int, scalers: int) -> bool:
    """Whether warpgroups ask for more registers than their program was launched with: they would wait for ever.

    Those that scale, in scans with per-key gates, or the one that loads give some of theirs. Under the delta rule each has a
    count of its own."""
    found = re.findall(r"setmaxnreg\.(dec|inc)\S* (\d+);", ptx)
    requested = {way: int(count) for way, count in found}
    warpgroups = int(re.search(r"maxntid (\d+)", ptx).group(1)) // 128
    if len(found) == warpgroups:
        return sum(int(count) for _, count in found) > warpgroups * at_launch
    giving = scalers if "key_scan" in ptx else 1
    return (
        bool(requested)
        and giving * requested["dec"] + (warpgroups - giving) * requested["inc"] > warpgroups * at_launch
    )


def registers_of(instruction: str) -> int:
    """How many registers an instruction that is no product writes."""
    if re.search(r"\.128|\.4$", instruction):
        return 4
    return 2 if re.search(r"\.64|WIDE", instruction) else 1


def unwritten(disassembly: str) -> list[int]:
    """Registers that a product takes its left side from before any instruction, as they stand, has written them: ptxas 13.0
    does that to constants which two products read."""
    written, found = set(), []
    for name, operands in re.findall(r"\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)\s+(.*)", disassembly):
        if product := re.match(r"R\d+, R(\d+), gdesc", operands if name.startswith("HGMMA") else ""):
            left = int(product.group(1))
            found += sorted({*range(left, left + 4)} - written)
        if first := re.match(r"(?:U?P\w+, ?)*R(\d+)", operands):
            register, columns = int(first.group(1)), re.match(r"HGMMA\.64x(\d+)", name)
            written |= {*range(register, register + (int(columns.group(1)) // 2 if columns else registers_of(name)))}
    return found


def compiled(what: str, gate: str, width: str) -> tuple[list[int], list[dict]]:
    """Bytes of shared memory of every kernel; and of every one registers at launch, spilled bytes, whether its disassembly has
    products of a warpgroup and bulk copies, whether it waits for ever, and registers that are read too early.

    In a process of its own: JAX 0.12 says nothing of a kernel that it has compiled before.
    """
    command = [sys.executable, "-m", "tests.hopper_compile", what, gate, width]
    said = subprocess.run(command, env=os.environ | SAY, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = []
    for kernel in said.split(".version ")[1:]:
        registers, spilled = (
            re.search(x, kernel).group(1) for x in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        found.append(
            dict(
                registers=int(registers),
                spilled=int(spilled),
                products="HGMMA" in kernel,
                copies="UTMALDG" in kernel,
                waits=waits_for_registers(kernel, int(registers), scalers=-(-min(int(width.split("x")[0]), 128) // 64)),
                unwritten=unwritten(kernel),
            )
        )
    return [int(size) for size in re.findall(r"smem_scratch_bytes=(\d+)", said)], found


if __name__ == "__main__":
    lowered(*sys.argv[1:]).compile()

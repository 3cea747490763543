"""The Hopper kernels compiled to machine code for an H100 that is not here: registers, spills, shared memory, instructions.

Needs what `make hopper` lays apart: JAX's CUDA plugin and NVIDIA's compiler, no GPU.
"""

import importlib.util
import multiprocessing
import os
import pathlib
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

if importlib.util.find_spec("jax_plugins") is None or "MOSAIC_GPU_DUMP_TO" not in os.environ:
    pytest.skip("needs JAX's CUDA plugin and its dumps: make hopper", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from glax.bind import bind
from glax.kernels.pallas_gpu import launch
from glax.kernels.pallas_gpu.config import HopperConfig

DUMPS = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])  # read when JAX loads: `make hopper` sets it
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

# How many kernels a call launches. None of them spills a register.
KERNELS = {
    ("forward", "key", 128): 2,
    ("forward", "key", 64): 2,
    ("forward", "head", 128): 1,
    ("forward", "head", 64): 1,
    ("forward, segments", "key", 128): 4,
    ("forward, segments", "head", 128): 3,
    ("forward, kept", "key", 128): 2,
    ("forward, kept", "head", 128): 1,
    ("forward, kept, segments", "key", 128): 4,
    ("gradient", "key", 128): 5,
    ("gradient", "key", 64): 5,
    ("gradient", "head", 128): 3,
    ("gradient", "head", 64): 3,
}
# What goes token by token, for gates a channel that are out of range, has no products, nor what hands states from segment to
# segment, which copies nothing in bulk either. The gradient walks both ways before.
WITHOUT_PRODUCTS = {("forward", "key"): 1, ("forward, kept", "key"): 1, ("gradient", "key"): 2}
WITHOUT_PRODUCTS |= {("forward, segments", "key"): 2, ("forward, segments", "head"): 1, ("forward, kept, segments", "key"): 2}
SEGMENTS = 8
T = SEGMENTS * 1024  # so that programs have several chunks each: of a loop that ends at once the compiler spills less


def waits_for_registers(ptx: str, at_launch: int) -> bool:
    """Whether warpgroups ask for more registers than their program was launched with: they would wait for ever."""
    asked = {way: int(count) for way, count in re.findall(r"setmaxnreg\.(dec|inc)\S* (\d+);", ptx)}
    warpgroups = int(re.search(r"maxntid (\d+)", ptx).group(1)) // 128
    giving = warpgroups // 2 if warpgroups == 4 else 1  # scalers, or the one that loads
    return bool(asked) and giving * asked["dec"] + (warpgroups - giving) * asked["inc"] > warpgroups * at_launch


def compiled(what: str, gate: str, width: int) -> list[dict]:
    """Spilled bytes, shared memory, and whether products and bulk copies are there, of every kernel."""
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1")
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def call(q, k, v, g, d_output, d_final):
        r = bind(q, k, v, **{"gk" if gate == "key" else "g": g})
        config = HopperConfig(parts=SEGMENTS if "segments" in what else 1, columns=width)
        if what == "gradient":
            return launch.chunked_vjp(r, d_output, d_final, None, config)
        return (launch.chunked_and_kept if "kept" in what else launch.chunked)(r, config)

    x = shaped(2, T, 4, width)
    gates = x if gate == "key" else shaped(2, T, 4)
    for file in DUMPS.glob("*"):
        file.unlink()
    operands = (x, x, x, gates, x, shaped(2, 4, width, width, dtype=jnp.float32))
    jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    found = []
    for report in DUMPS.glob("*.ptxas"):
        ptx, resources = (report.with_suffix(end).read_text() for end in (".ptx", ".resources.txt"))
        spilled = re.findall(r"(\d+) bytes spill stores", report.read_text())
        found.append(
            dict(
                spilled=max(map(int, spilled)),
                shared=int(re.search(r"smem_scratch_bytes=(\d+)", resources).group(1)),
                products="wgmma.mma_async" in ptx,
                copies="cp.async.bulk.tensor" in ptx,
                waits=waits_for_registers(ptx, int(re.search(r"Used (\d+) registers", report.read_text()).group(1))),
            )
        )
    return found


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: " ".join(map(str, case)))
def test_within_budget(case):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:  # JAX 0.12 dumps no kernel twice
        found = alone.submit(compiled, *case).result()
    print(case, found)
    assert len(found) == KERNELS[case]
    assert not any(x["spilled"] for x in found)
    assert sum(not x["copies"] for x in found) == int("segments" in case[0])
    assert sum(not x["products"] for x in found) == WITHOUT_PRODUCTS.get(case[:2], 0)
    assert all(x["shared"] <= 232_448 for x in found)
    assert not any(x["waits"] for x in found)

"""The Hopper kernels compiled to machine code for an H100 that is not here: registers, spills, shared memory, instructions."""

import importlib.util
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("jax_plugins") is None or not any(
    pathlib.Path(path, "cu13/bin/nvdisasm").exists()
    for path in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", ())
):
    pytest.skip("needs JAX's CUDA plugin and NVIDIA's compiler and disassembler: make hopper", allow_module_level=True)

import glax
from glax._src.core.registry import Backend
from glax._src.kernels.pallas_gpu import isolation
from glax._src.kernels.pallas_gpu.device import cache as lowering_cache
from tests.hopper_compile import compiled, lowered, shaped, spread_over_two

# How many kernels a call launches. None of them spills a register.
KERNELS = {
    ("forward", "key", "128"): 2,
    ("forward, narrow", "key", "128"): 2,
    ("forward", "key", "64"): 2,
    ("forward", "head", "128"): 1,
    ("forward", "head", "64"): 1,
    ("forward, segments", "key", "128"): 5,
    ("forward, segments", "head", "128"): 3,
    ("forward, residuals", "key", "128"): 2,
    ("forward, residuals, narrow", "key", "128"): 2,
    ("forward, residuals", "head", "128"): 1,
    ("forward, residuals, segments", "key", "128"): 5,
    ("gradient", "key", "128"): 4,
    ("gradient", "key", "64"): 4,
    ("gradient", "key, float32", "128"): 4,
    ("gradient, narrow", "key, float32", "128"): 4,
    ("gradient", "head", "128"): 3,
    ("gradient", "head", "64"): 3,
    ("forward, residuals, resets", "key", "128"): 2,
    ("forward, residuals, resets, narrow", "key", "128"): 2,
    ("gradient, resets", "key", "128"): 4,
    ("gradient, resets", "key, float32", "128"): 4,
    ("gradient, resets", "key", "256x512"): 4,
    ("forward, one row, segments", "key", "128"): 6,
    ("gradient, one row, segments", "key", "128"): 7,
    ("forward, residuals, packed", "key", "128"): 2,
    ("gradient, packed", "key", "128"): 4,
    ("forward, residuals", "key", "96x192"): 2,
    ("gradient, packed", "key", "96"): 4,
    ("gradient", "key, float32", "192x384"): 4,
    ("forward", "key", "256x512"): 2,
    ("gradient", "head", "96x192"): 3,
    ("gradient", "head", "192x384"): 3,
    ("gradient, groups", "head", "96x192"): 3,
    ("forward, residuals, groups, pairs", "head", "96x64"): 1,
    ("forward", "head", "256x512"): 1,
    ("gradient", "key", "256x512"): 4,
    ("gradient", "key, float32", "128x256"): 4,
    ("gradient", "head", "256x512"): 3,
    ("forward, residuals, groups, pairs", "head", "128x64"): 1,
    ("gradient, groups", "head", "128x64"): 3,
    ("gradient, groups", "head", "64"): 3,
    ("forward, one row, segments", "head", "128"): 4,
    ("gradient, one row, segments", "head", "128"): 5,
    ("forward, one row, groups, pairs", "head", "128x64"): 2,
    ("gradient, one row, groups", "head", "128x64"): 3,
    ("forward, residuals, joined", "key", "128"): 5,
    ("gradient, joined", "key", "256x512"): 5,
    ("gradient, joined", "head", "128"): 4,
    ("gradient, joined, groups", "head", "128x64"): 4,
    ("forward, residuals, odd row, segments", "head", "128"): 3,
    ("forward, residuals, odd row, groups, pairs", "head", "128x64"): 1,
    ("gradient, odd row", "head", "256x512"): 3,
    ("gradient, odd row, groups", "head", "128x64"): 3,
    ("forward, residuals, delta, groups", "head", "128"): 2,
    ("forward, delta", "head", "128"): 2,
    ("forward, residuals, delta, many heads", "head", "128"): 2,
    ("forward, delta, many heads, reverse", "head", "64x128"): 2,
    ("gradient, delta, many heads", "head", "128"): 4,
    ("forward, delta, segments", "head", "128"): 3,
    ("forward, delta, one row, segments", "head", "128"): 5,
    ("forward, delta", "key, float32", "128"): 2,
    ("forward, delta, segments", "key", "128"): 3,
    ("forward, delta, segments", "key, float32", "64"): 3,
    ("forward, residuals, delta", "key", "128"): 2,
    ("gradient, delta, segments", "key, float32", "128"): 6,
    ("gradient, delta, groups", "key", "128"): 4,
    ("gradient, delta, segments", "key", "64"): 6,
    ("gradient, delta, groups", "key", "64x192"): 4,
    ("gradient, delta, groups, reverse", "key", "128"): 4,
    ("gradient, delta, segments, reverse", "key, float32", "128"): 6,
    ("gradient, delta, erase, segments", "key, float32", "128"): 6,
    ("gradient, delta, erase, write, groups, reverse", "key", "64"): 4,
    ("forward, residuals, delta, erase, write, before", "key, float32", "128"): 2,
    ("gradient, delta, segments", "head", "128"): 6,
    ("gradient, delta, segments", "head", "64"): 6,
    ("gradient, delta, groups", "head", "128"): 4,
    ("gradient, delta", "head", "64"): 4,
    ("gradient, delta, groups", "head", "128x256"): 4,
    ("gradient, delta, segments", "head", "64x192"): 6,
    ("forward, residuals, delta, erase, groups", "head", "128"): 2,
    ("gradient, delta, erase, segments", "head", "128"): 6,
    ("gradient, delta, erase, reverse", "head", "128"): 4,
    ("gradient, delta, erase, before", "head", "128"): 4,
    ("gradient, delta, erase", "head", "64"): 4,
    ("gradient, delta, erase, write", "head", "128x256"): 4,
    ("forward, residuals, delta, groups", "head", "256x512"): 2,
    ("forward, residuals, delta", "head", "96x192"): 2,
    ("gradient, delta, segments", "head", "96x192"): 6,
    ("gradient, delta", "head", "192x384"): 4,
    ("forward, delta", "head", "256"): 2,
    ("forward, delta, one row, segments", "head", "256"): 5,
    ("gradient, delta, groups", "head", "256x512"): 4,
    ("gradient, delta, segments", "head", "256x64"): 6,
    ("forward, residuals, states", "head", "128"): 1,
    ("gradient, states", "head", "128"): 3,
    ("forward, residuals, states", "key", "128"): 2,
    ("forward, residuals, narrow, states", "key", "128"): 2,
    ("gradient, states", "key", "128"): 4,
}
# What goes token by token, for per-key gates that are out of range, has no products, nor what hands states from segment to
# segment, which copies nothing in bulk either. The gradient scans both ways before.
WITHOUT_PRODUCTS = {("forward", "key"): 1, ("forward, residuals", "key"): 1, ("gradient", "key"): 1}
WITHOUT_PRODUCTS |= {
    ("forward, narrow", "key"): 1,
    ("forward, residuals, narrow", "key"): 1,
    ("gradient", "key, float32"): 1,
    ("gradient, narrow", "key, float32"): 1,
    ("forward, residuals, resets", "key"): 1,
    ("forward, residuals, resets, narrow", "key"): 1,
    ("gradient, resets", "key"): 1,
    ("forward, residuals, joined", "key"): 1,
    ("gradient, joined", "key"): 1,
    ("forward, residuals, odd row, segments", "head"): 1,
    ("gradient, resets", "key, float32"): 1,
    ("forward, one row, segments", "key"): 2,
    ("gradient, one row, segments", "key"): 2,
    ("forward, residuals, packed", "key"): 1,
    ("gradient, packed", "key"): 1,
    ("forward, segments", "key"): 2,
    ("forward, segments", "head"): 1,
    ("forward, residuals, segments", "key"): 2,
    ("forward, one row, segments", "head"): 1,
    ("forward, residuals, states", "key"): 1,
    ("forward, residuals, narrow, states", "key"): 1,
    ("gradient, states", "key"): 1,
    ("gradient, one row, segments", "head"): 1,
}


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: " ".join(map(str, case)))
def test_within_budget(case):
    shared, found = compiled(*case)
    print(case, shared, found)
    assert len(shared) == len(found) == KERNELS[case]
    assert not any(x["spilled"] for x in found)
    assert sum(not x["copies"] for x in found) == int("segments" in case[0] and "delta" not in case[0])
    assert sum(not x["products"] for x in found) == WITHOUT_PRODUCTS.get(case[:2], 0)
    assert all(size <= 232_448 for size in shared)
    assert not any(x["waits"] or x["unwritten"] for x in found)


def test_what_replaces_results_is_within_budget():
    _, found = compiled("repair", "", "128")
    assert len(found) == 1
    assert not any(x["spilled"] or x["waits"] or x["unwritten"] for x in found)


def of_a_slice(flag, found, others):
    """Write over a part of an array, as of results with more rows than the caller's."""
    return isolation.repair(flag, [found[:, :210].reshape(105, 256)], [others])[0]


def into_an_array(flag, found, others):
    """Write results into a larger array in a loop."""

    def step(i, whole):
        written = isolation.repair(flag, [found[:, :210].reshape(105, 256) * i.astype(found.dtype)], [others])[0]
        return jax.lax.dynamic_update_slice(whole, written, (i * 105, 0))

    return jax.lax.fori_loop(0, 4, step, jnp.zeros((420, 256), found.dtype))


@pytest.mark.parametrize("call", [of_a_slice, into_an_array])
def test_a_call_that_writes_over_an_operand_is_no_part_of_a_fusion(call):
    """A fusion has memory of its own for what it returns, which such a call does not fill."""
    shapes = shaped(1, dtype=jnp.int32), shaped(1, 216, 2, 64), shaped(105, 256)
    text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).compile().as_text()
    found = re.findall(r"(?m)^(?:ENTRY )?%([\w.-]+) .*\{$|(output_to_operand_aliasing)", text)
    computations = list(itertools.accumulate((name for name, _ in found), lambda last, name: name or last))
    within = [name for name, (_, aliased) in zip(computations, found, strict=True) if aliased]
    assert within and not any("fusion" in name or "fused" in name for name in within), within


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """Kernels are lowered by themselves, as where they will run; no thread compiles them, and no earlier run has stored them."""
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(lowering_cache.Kernel, "compile", lambda self: None)
    monkeypatch.setattr(lowering_cache, "known", {})
    monkeypatch.setattr(lowering_cache, "longest", {})


def test_arrays_spread_over_devices(a_gpu):
    """Under automatic sharding the kernels of each device's part are lowered while XLA compiles."""
    found = spread_over_two().compile().as_text()
    launched = [kernel for kernel in lowering_cache.known.values() if "lowered" in vars(kernel)]
    assert found.count('custom_call_target="mosaic_gpu_v2"') == len(launched) > 1
    assert "all-gather" not in found and "bf16[1,1024,2,64]" in found


def test_a_gradient_of_heads_in_pairs_needs_memory_for_its_states_alone(a_gpu):
    """Beside arguments and results the peak has the states of the forward and of the adjoint: no dq and dk of each head."""
    B, T, H, K, V = 2, 2048, 8, 128, 128

    def gradient(q, k, v, g, beta, d_output):
        def f(*x):
            return glax.recurrent(*x[:3], g=x[3], beta=x[4], platform="pallas").output

        return jax.vjp(f, q, k, v, g, beta)[1](d_output)

    keys, values = shaped(B, T, H // 2, K), shaped(B, T, H, V)
    numbers = shaped(B, T, H, dtype=jnp.float32)
    traced = jax.jit(gradient).trace(keys, keys, values, numbers, numbers, values)
    found = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=dict(xla_gpu_autotune_level=0))
    states = 2 * B * (T // 64) * H * V * (K + 64) * 2  # bytes
    assert found.memory_analysis().temp_size_in_bytes < 1.05 * states


def test_lowered_once_they_stand_in_a_program_as_without(request):
    """All but the modules themselves, which count the kernels that a process has lowered."""

    def program():
        text = lowered("gradient", "key", "64").as_text()
        return re.sub(r'(kernel_hash|module) = "(?:[^"\\]|\\.)*"', r"\1", text)

    want = program()
    jax.clear_caches()  # of scans as they were traced
    request.getfixturevalue("a_gpu")
    assert program() == want
    assert len(lowering_cache.known) == want.count("@mosaic_gpu_v2") == KERNELS["gradient", "key", "64"]

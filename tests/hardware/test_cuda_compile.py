"""The CUDA kernels compiled by NVRTC for every architecture: registers, spills and shared memory.

NVRTC needs no GPU. The test is skipped where it is not installed: `make cuda` installs it.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from glax import serving
from glax._src.core.bind import bind
from glax._src.core.ring import RingedStates
from glax._src.kernels.cuda import CudaConfig, ReplayConfig, config, replay, scan
from glax._src.kernels.cuda.images import image_of, options, program_text
from glax._src.kernels.cuda.nvrtc import CompileError, Compiler, load_compiler

compiler = load_compiler()
pytestmark = pytest.mark.skipif(not isinstance(compiler, Compiler), reason="NVRTC is not installed: make cuda")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# B, T, groups, H, K, V, gates and the arrays of the delta rule, dtype of states, where they lie
UPDATED, READ, APART = scan.States.POOL_UPDATED, scan.States.POOL_READ, scan.States.APART
CALLS = {
    "step 4x256x512 per key": (64, 1, 4, 4, 256, 512, ("gk",), "float32", UPDATED),
    "step 64x128x64 per head": (64, 1, 1, 64, 128, 64, ("g",), "float32", UPDATED),
    "step 16x128x128 per key": (64, 1, 16, 16, 128, 128, ("gk",), "float32", UPDATED),
    "step 16x128x128 bfloat16 states": (256, 1, 16, 16, 128, 128, ("gk",), "bfloat16", UPDATED),
    "step 1 sequence 64x128x128": (1, 1, 64, 64, 128, 128, ("g_gamma",), "float32", UPDATED),
    "step 16x128x128 key and value": (64, 1, 16, 16, 128, 128, ("gk", "gv"), "float32", UPDATED),
    "step of the delta rule 32x128x128": (64, 1, 16, 32, 128, 128, ("g", "beta"), "float32", UPDATED),
    "step of the delta rule, bfloat16": (64, 1, 16, 32, 128, 128, ("gk", "beta"), "bfloat16", UPDATED),
    "step of the delta rule 4x256x256": (64, 1, 4, 4, 256, 256, ("gk", "erase", "write"), "float32", UPDATED),
    "16 tokens 16x128x128 per key": (64, 16, 16, 16, 128, 128, ("gk",), "float32", APART),
    "16 tokens of the delta rule": (64, 16, 16, 32, 128, 128, ("gk", "beta"), "float32", APART),
    "verify 16 tokens 16x128x128 per key": (64, 16, 16, 16, 128, 128, ("gk",), "float32", READ),
    "verify 16 tokens, bfloat16 states": (64, 16, 16, 16, 128, 128, ("gk",), "bfloat16", READ),
    "verify 16 of the delta rule, bfloat16": (64, 16, 16, 32, 128, 128, ("g", "beta"), "bfloat16", READ),
    "commit 16 tokens 4x256x512": (64, 16, 4, 4, 256, 512, ("gk",), "float32", UPDATED),
}
MOST_REGISTERS = 128  # of a thread: two blocks of 256 threads then share a multiprocessor


# The same of one token and the ring before it; replay and drafts; the dtype of the ring's keys.
REPLAYED = {
    "replay 4x256x512 per key": (64, 1, 4, 4, 256, 512, ("gk",), "float32", (8, 0, "bfloat16")),
    "replay 64x128x64 per head": (64, 1, 1, 64, 128, 64, ("g",), "float32", (8, 0, "bfloat16")),
    "replay 16x128x128 per key": (64, 1, 16, 16, 128, 128, ("gk",), "float32", (8, 0, "float32")),
    "replay 16x128x128 bfloat16 states": (256, 1, 16, 16, 128, 128, ("gk",), "bfloat16", (8, 4, "bfloat16")),
    "replay 16x128x128 key and value": (64, 1, 16, 16, 128, 128, ("gk", "gv"), "float32", (8, 0, "float32")),
    "replay of the delta rule 32x128x128": (64, 1, 16, 32, 128, 128, ("g", "beta"), "float32", (8, 0, "bfloat16")),
    "replay of the delta rule, bfloat16": (64, 1, 16, 32, 128, 128, ("gk", "beta"), "bfloat16", (16, 0, "bfloat16")),
    "replay, erase and write 4x256x256": (64, 1, 4, 4, 256, 256, ("gk", "erase", "write"), "float32", (8, 0, "float32")),
    "replay 16x128x128 int8": (256, 1, 16, 16, 128, 128, ("gk",), "int8", (8, 0, "bfloat16")),
    "replay of the delta rule, int8": (64, 1, 16, 32, 128, 128, ("gk", "beta"), "int8", (8, 0, "bfloat16")),
    "replay 16x128x256 float8": (64, 1, 16, 16, 128, 256, ("gk",), "float8_e4m3fn", (8, 0, "bfloat16")),
    "replay 40 tokens of 16x128x128": (64, 1, 16, 16, 128, 128, ("gk", "beta"), "float32", (40, 0, "bfloat16")),
    "replay, erase_along 8x128x128": (64, 1, 8, 8, 128, 128, ("gk", "erase", "erase_along"), "float32", (8, 0, "float32")),
}  # fmt: skip


def program(call: str) -> tuple[str, dict[str, int]]:
    """Return the kernel of a call and its constants."""
    B, T, groups, H, K, V, gates, state, where = (CALLS | REPLAYED)[call]
    shapes = dict(g=(B, T, H), gk=(B, T, H, K), gv=(B, T, H, V), g_gamma=(H,))
    shapes |= dict(beta=(B, T, H), erase=(B, T, H, K), write=(B, T, H, V), erase_along=(B, T, H, K))
    x = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in gates}
    q, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, T, groups, K), (B, T, H, V)))
    r = jax.eval_shape(lambda q, v, x: bind(q, q, v, **x), q, v, x)
    states = jax.ShapeDtypeStruct((B, H, K, V), state)
    if call in CALLS:
        return "scan", scan.plan(r, CudaConfig.heuristic(r), scan.flags_of(r, where, states))[0]
    form = r.decay.form if r.erasure is None else f"{r.decay.form}+{r.erasure.form}"
    layout = dict(zip(("replay", "drafts", "token_dtype"), where, strict=True))
    pool = jax.eval_shape(lambda: serving.StatePool(B, (groups, groups, H), (K, V), state, form=form, **layout))
    ringed = RingedStates(pool.states, pool.ring, pool.length, pool.drafted, layout["replay"])
    return "replay", replay.plan(r, ringed, ReplayConfig.heuristic(r.replace(initial_state=states)))[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_spilled(architecture, monkeypatch):
    major, minor = architecture.removeprefix("sm_")[:-1], architecture[-1]
    for module in (config, replay):
        monkeypatch.setattr(module, "capability", lambda: (int(major), int(minor)))
    for call in CALLS | REPLAYED:
        kernel, constants = program(call)
        source = program_text(kernel, tuple(constants.items()))
        _, log = compiler.cubin(source, [*options(architecture), "--ptxas-options=-v"])
        registers, spilled = (
            max(map(int, re.findall(pattern, log))) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill")
        )
        shared = max(map(int, re.findall(r"(\d+) bytes smem", log)))
        print(f"{architecture:7} {call:37} {registers:4} registers {spilled:4} bytes spilled {shared:6} bytes shared")
        assert spilled == 0 and registers <= MOST_REGISTERS and shared <= scan.SHARED_BYTES


def test_an_image_is_stored_and_a_damaged_one_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    kernel, constants = program("step 1 sequence 64x128x128")
    given = kernel, tuple(constants.items()), "sm_90"
    image_of.cache_clear()
    first = image_of(*given)
    (path,) = tmp_path.rglob("*.cubin")
    whole = path.read_bytes()
    monkeypatch.setattr(Compiler, "cubin", lambda *_: pytest.fail("compiled again"))
    image_of.cache_clear()
    assert image_of(*given) == first
    monkeypatch.undo()
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path))
    for damaged in (whole[:-1], b"", whole[:100] + b"?" + whole[101:]):
        path.write_bytes(damaged)
        image_of.cache_clear()
        assert image_of(*given) == first
        assert path.read_bytes() == whole
    image_of.cache_clear()


def test_a_rejected_program_shows_the_compilers_log():
    with pytest.raises(CompileError, match=r"glax\.cu"):
        compiler.cubin("__global__ void f() { undeclared(); }", options("sm_90"))

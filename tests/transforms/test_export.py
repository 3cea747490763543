"""Programs that outlive their process: exported, serialised once compiled, and in JAX's persistent compilation cache."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import export

import glax
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from tests.close import assert_close
from tests.compiling import quick_jit

pytestmark = pytest.mark.fast

# Two processes run this, one after the other. The second reads what the first wrote before it makes any call of glax.
PROGRAM = """
import json, pathlib, pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax import export
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import glax

folder, writes = pathlib.Path(sys.argv[1]), sys.argv[2] == "write"
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
checks = glax.export_checks()

x = jnp.sin(jnp.arange(4 * 40 * 2 * 16.0)).reshape(4, 40, 2, 16)
forward = lambda x: glax.recurrent(x, x, x, gk=-abs(x)).output
gradient = jax.grad(lambda x: (forward(x) ** 2).sum())
step = lambda x: glax.recurrent_step(x[:, 0], x[:, 0], x[:, 0], jnp.ones((4, 2, 16, 16)))
by_xla = lambda x: glax.recurrent(x, x, x, gk=-abs(x), platform="xla").output

def mesh(kind):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    return jax.device_put(x, NamedSharding(mesh, P("batch")))

calls = dict(
    forward=(forward, x), gradient=(gradient, x), step=(step, x), auto=(forward, mesh(AxisType.Auto)),
    auto_gradient=(gradient, mesh(AxisType.Auto)), explicit=(gradient, mesh(AxisType.Explicit)),
)
errors = {}

def compare(name, got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        errors[name] = max(errors.get(name, 0), float(np.linalg.norm(x - y) / np.linalg.norm(y)))

if writes:
    for name, (f, x) in calls.items():
        exported = export.export(jax.jit(f), disabled_checks=checks)(x)
        (folder / f"{name}.exported").write_bytes(exported.serialize())
        if x.sharding.num_devices == 1:
            (folder / f"{name}.compiled").write_bytes(pickle.dumps(serialize(jax.jit(f).lower(x).compile())))
else:
    read = {}
    for name, (_, x) in calls.items():
        exported = export.deserialize(bytearray((folder / f"{name}.exported").read_bytes()))
        read[f"{name}, exported"] = jax.jit(exported.call)(x)
        if x.sharding.num_devices == 1:
            compiled = pickle.loads((folder / f"{name}.compiled").read_bytes())
            read[f"{name}, compiled"] = deserialize_and_load(*compiled, execution_devices=jax.devices()[:1])(x)
    for name, got in read.items():
        f, x = calls[name.split(",")[0]]
        compare(name, got, jax.jit(f)(np.asarray(x)))

found = {}
for name, f in dict(forward=forward, gradient=gradient, by_xla=by_xla).items():
    before = set((folder / "cache").glob("*-cache")) if (folder / "cache").exists() else set()
    compare(f"{name}, cached", jax.jit(f)(calls["auto"][1]), jax.jit(f)(np.asarray(x)))
    found[name] = len(set((folder / "cache").glob("*-cache")) - before)
print(json.dumps(dict(errors=errors, new_in_cache=found)))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("programs")

    def run(what: str) -> dict:
        command = [sys.executable, "-c", PROGRAM, str(folder), what]
        done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return [run("write"), run("read")]


def test_programs_run_in_a_process_that_has_only_imported_glax(processes):
    """Native kernels too; and on a mesh, where XLA's stand in for what it cannot see into."""
    errors = {name: error for name, error in processes[1]["errors"].items() if "cached" not in name}
    assert len(errors) == 9
    assert max(errors.values()) < 2e-6, errors


def test_the_compilation_cache_knows_a_program_on_a_mesh_again(processes):
    first, second = processes
    assert all(first["new_in_cache"].values()), "nothing was cached, so that this test tells nothing"
    assert second["new_in_cache"] == dict(forward=0, gradient=0, by_xla=0)
    assert max(error for name, error in second["errors"].items() if "cached" in name) < 2e-6


CALLS = dict(
    chosen=dict(gk=True),
    constant=dict(g_gamma=True, cfg=ChunkedConfig(16), reverse=True),
    **{"key+value": dict(gk=True, gv=True, cfg=ChunkedConfig(16))},
    packed=dict(gk=True, cfg=ChunkedConfig(16), cu_seqlens=True),
    token=dict(gv=True, platform="xla"),
)


@pytest.mark.parametrize("call", CALLS)
def test_symbolic_shapes(call):
    """One program for every batch and length: shorter than a chunk, and not a multiple of one."""
    gates = {name: x for name, x in CALLS[call].items() if name in ("gk", "gv", "g_gamma")}
    options = {name: x for name, x in CALLS[call].items() if name not in (*gates, "cu_seqlens")}
    packed = "cu_seqlens" in CALLS[call]

    def loss(x, cuts):
        given = {name: -jnp.ones(2) / 8 if name == "g_gamma" else -jnp.abs(x) for name in gates}
        output, state = glax.recurrent(x, x, x, **given, **options, cu_seqlens=cuts)
        return (output**2).sum() + (state**2).sum()

    program = quick_jit(jax.value_and_grad(loss))
    shape = export.symbolic_shape("1, t, 2, 8" if packed else "b, t, 2, 8")
    cuts = jax.ShapeDtypeStruct((3,), jnp.int32) if packed else None
    checks = [export.DisabledSafetyCheck.custom_call(f"glax_{name}") for name in ("forward", "gradient")]
    exported = export.export(program, disabled_checks=checks)(jax.ShapeDtypeStruct(shape, jnp.float32), cuts)
    for B, T in ((1, 5), (1 if packed else 3, 40)):
        x = jnp.sin(jnp.arange(B * T * 2 * 8.0)).reshape(B, T, 2, 8)
        cuts = jnp.array([0, 2, T - 1], jnp.int32) if packed else None
        got, want = quick_jit(exported.call)(x, cuts), program(x, cuts)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close("with symbols", a, b, 2e-6)

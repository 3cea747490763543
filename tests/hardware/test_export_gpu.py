"""Programs with Triton and Hopper kernels that outlive their process, on a GPU. tests/transforms/test_export.py is for CPUs."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

# Two processes run this, one after the other. The second reads what the first wrote before it makes any call of glax.
PROGRAM = """
import json, pathlib, pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax import export
from jax.experimental.serialize_executable import deserialize_and_load, serialize
import glax

folder, writes, platforms = pathlib.Path(sys.argv[1]), sys.argv[2] == "write", sys.argv[3:]
jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
checks = glax.export_checks()
x = jnp.sin(jnp.arange(2 * 192 * 2 * 64.0)).reshape(2, 192, 2, 64).astype(jnp.bfloat16)

def calls(platform):
    forward = lambda x: glax.recurrent(x, x, x, gk=-abs(x), platform=platform).output
    return dict(forward=forward, gradient=jax.grad(lambda x: (forward(x).astype(jnp.float32) ** 2).sum()))

every = {f"{platform} {name}": f for platform in platforms for name, f in calls(platform).items()}
errors, read = {}, {}
for name, f in every.items():
    if writes:
        exported = export.export(jax.jit(f), disabled_checks=checks)(x)
        (folder / f"{name}.exported").write_bytes(exported.serialize())
        (folder / f"{name}.compiled").write_bytes(pickle.dumps(serialize(jax.jit(f).lower(x).compile())))
        continue
    exported = export.deserialize(bytearray((folder / f"{name}.exported").read_bytes()))
    read[name, "exported"] = jax.block_until_ready(jax.jit(exported.call)(x))
    compiled = pickle.loads((folder / f"{name}.compiled").read_bytes())
    read[name, "compiled"] = jax.block_until_ready(deserialize_and_load(*compiled, execution_devices=jax.devices()[:1])(x))
before = set((folder / "cache").glob("*-cache")) if (folder / "cache").exists() else set()
direct = {name: np.asarray(jax.jit(f)(x).astype(jnp.float32)) for name, f in every.items()}
new = len(set((folder / "cache").glob("*-cache")) - before)
for (name, how), got in read.items():
    got = np.asarray(got.astype(jnp.float32))
    errors[f"{name}, {how}"] = float(np.linalg.norm(got - direct[name]) / np.linalg.norm(direct[name]))
print(json.dumps(dict(errors=errors, new_in_cache=new)))
"""


@pytest.mark.parametrize("platform", ["triton", "pallas"])
def test_programs_run_in_a_process_that_has_only_imported_glax(platform, tmp_path):
    def run(what: str) -> dict:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), what, platform]
        done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    run("write")
    second = run("read")
    assert len(second["errors"]) == 4
    assert max(second["errors"].values()) == 0, second["errors"]
    assert second["new_in_cache"] == 0, "the compilation cache does not know the programs again"

"""What glax ships: measured configs of kernels, found on the device that they were measured on."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import glax
from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.cuda.config import layout_of
from glax._src.solve.dispatch import executor
from glax._src.tuning.cache import check

FILES = sorted((pathlib.Path(glax.__file__).parent / "_src" / "tuning" / "tuned").glob("*/*.json"))
load_kernels()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_file_is_of_a_kernel_and_its_version(path):
    content = check(json.loads(path.read_text()))
    spec = kernel_registry.kernels[content["kernel"]]
    assert content["device"] == path.parent.name
    assert path.name == f"{spec.name.replace('/', '.')}@{spec.version}.json"
    for entry in content["entries"].values():
        config = spec.config(**entry["config"])
        assert entry["type"] == type(config).__name__
        assert entry["candidates"][str(config)] == entry["ms"] == min(entry["candidates"].values())


def test_what_is_shipped_is_chosen(monkeypatch):
    monkeypatch.setattr("glax._src.tuning.invocation.device_kind", lambda: "nvidia_h200")
    x = jnp.zeros((4, 2048, 16, 128), jnp.bfloat16)
    r = jax.eval_shape(lambda: bind(x, x, x, gk=x))
    spec = kernel_registry.kernels["chunked/triton/gpu"]
    inv = glax.Invocation.of(spec, (r,), {})
    stored = json.loads(next(path for path in FILES if path.name.startswith("chunked.triton")).read_text())
    assert executor.chain.shipped.get(inv) == spec.config(**stored["entries"][inv.key]["config"])


def test_a_config_is_found_under_the_former_name_of_its_class():
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    r = jax.eval_shape(lambda x: bind(x, x, x), x)
    spec = kernel_registry.kernels["chunked/triton/gpu"]
    found = glax.Invocation.of(spec, (r,), {}).config_from("ChunkedConfig", dict(chunk=64, columns=32))
    assert found == glax.configs.TritonChunkedConfig(64, 32)


@pytest.mark.parametrize("V, programs", [(97, 6), (128, 12)])
def test_no_two_candidates_of_cuda_are_one_program(V, programs):
    """A thread reads one column of odd V, and no more than 32 threads share a row: wider blocks have 32 columns, too."""
    x, v = (jax.ShapeDtypeStruct((2, 8, 4, width), jnp.float32) for width in (64, V))
    r = jax.eval_shape(lambda x, v: bind(x, x, v), x, v)
    spec = kernel_registry.kernels["recurrent/cuda/gpu"]
    found = [(c.threads, layout_of(V, c.columns, 4), layout_of(V, c.columns, 2)) for c in spec.config.candidates(r)]
    assert len(found) == len(set(found)) == programs
    assert spec.config.heuristic(r) == next(iter(spec.config.candidates(r)))

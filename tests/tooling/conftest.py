"""A folder for measurements and a registry of one's own, for tests of the command `glax`."""

import pytest

from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import executor


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder for measurements that no other test sees, and none in memory."""
    monkeypatch.setenv("GLAX_CACHE_DIR", str(tmp_path / "cache"))
    executor.chain.cache.clear()
    yield tmp_path / "cache" / "recurrent"
    executor.chain.cache.clear()


@pytest.fixture
def register(monkeypatch):
    """Registers faulty kernels, beside XLA's alone, until the test ends."""
    load_kernels()
    sound = {name: spec for name, spec in kernel_registry.kernels.items() if spec.platform is Platform.XLA}
    monkeypatch.setattr(kernel_registry, "kernels", sound)

    def add(run, algorithm="recurrent", platform=Platform.CPP, backend=Backend.ANY, **traits):
        traits = dict(priority=lambda r: -1) | traits
        spec = KernelSpec(algorithm, platform, backend, run, **traits)
        kernel_registry.kernels[spec.name] = spec
        return spec.name

    return add

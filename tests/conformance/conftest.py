"""Choose kernels as on a TPU."""

import jax
import pytest

from glax._src.core.registry import Backend


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses kernels as on a TPU, in calls that no other test of the file makes for a CPU: traces stay."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: cls.TPU))


@pytest.fixture
def on_tpu_anew(on_tpu):
    """Chooses kernels as on a TPU, in calls that are also made for a CPU: both are traced anew."""
    jax.clear_caches()
    yield
    jax.clear_caches()

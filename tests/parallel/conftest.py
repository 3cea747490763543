"""How shards overlap the state exchange with computation, chosen for a test."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from glax._src.core.registry import TwoPhase, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.parallel import boundary, sequence


@pytest.fixture
def short_windows(monkeypatch):
    """Shortens the windows, so that small shards have several."""
    monkeypatch.setattr(boundary, "FIRST_ROWS", 3)
    monkeypatch.setattr(boundary, "NEXT_ROWS", 4)
    monkeypatch.setattr(boundary, "CONSTANT_ROWS", 5)


@pytest.fixture
def correcting(monkeypatch):
    """Makes shards correct where they can, as on accelerators whose kernels have one phase."""
    monkeypatch.setattr(sequence, "overlap_of", lambda choice, r, gradient: "correct" if r.decay.by_token else "wait")
    jax.clear_caches()  # programs traced with another choice
    yield
    jax.clear_caches()


@pytest.fixture
def in_two_phases(monkeypatch):
    """Gives every kernel two phases where kernels may have them. Each phase runs the whole kernel."""
    load_kernels()
    begun = []

    def parts(spec, r, config):
        def begin(r, *cotangents, config):
            begun.append(spec.name)
            found = spec.run(r, *cotangents, config=config)
            return (r.scale,), found.initial_state if cotangents else found.final_state, logs(r)

        return (
            None
            if r.decay.value is not None
            else TwoPhase(begin, lambda begun, *given, **config: spec.run(*given, **config))
        )

    for name, spec in kernel_registry.kernels.items():
        patched = dataclasses.replace(spec, two_phase=functools.partial(parts, spec))
        monkeypatch.setitem(kernel_registry.kernels, name, patched)
    jax.clear_caches()
    yield begun
    jax.clear_caches()


def logs(r):
    """The sum of log decays of every sequence, [N, H, K or 1]."""
    d = r.decay
    rows = jnp.zeros((*r.q.shape[:2], r.num_heads)) if d.head is None else d.head
    rows = rows[..., None] if d.key is None else d.key
    rows = rows if d.constant is None else r.by_token(d.constant)[..., None]
    return r.per_sequence(jnp.where(r.is_token[:, None, None], rows, 0))

"""Which layouts are equal is found for JAX 0.11 as that version finds it, but for the order."""

import jax
import pytest
from jax.experimental.mosaic.gpu import constraints

from glax._src.kernels.pallas_gpu.device import cache

pytestmark = pytest.mark.fast
ORIGINAL = constraints.compute_transitively_equal_vars


def variable(name):
    return constraints.Variable(name)


def system(*pairs):
    known = constraints.Equals(variable("b"), constraints.RegisterLayout(None))
    return constraints.ConstraintSystem(
        constraints=[known, *(constraints.Equals(variable(x), variable(y)) for x, y in pairs)]
    )


@pytest.mark.parametrize("pairs", ["", "ab", "ab cd", "ab cd bc", "ab bc ca", "ab ab ba", "fe dc ba ec ad", "aa ab"])
def test_finds_what_jax_finds(pairs):
    given = system(*pairs.split())
    expected = ORIGINAL(given)
    found = cache.equal_variables(given)
    assert {k: set(v) for k, v in found.items()} == {k: set(v) for k, v in expected.items()}
    assert all(len(v) == len(set(v)) for v in found.values())


def test_order_follows_the_constraints():
    found = cache.equal_variables(system("db", "ca", "ab"))
    assert [x.key for x in found[variable("b")]] == ["c", "a", "d"]


@pytest.mark.parametrize(
    "version, used", [((0, 11, 2), cache.equal_variables), ((0, 12, 0), ORIGINAL), ((0, 10, 2), ORIGINAL)]
)
def test_replaces_what_jax_0_11_has_while_a_kernel_is_lowered(version, used, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    for _ in range(2):
        with cache.equal_variables_used_by_jax():
            assert constraints.compute_transitively_equal_vars is used
        assert constraints.compute_transitively_equal_vars is ORIGINAL


def test_an_error_in_lowering_leaves_jax_as_it_was(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with pytest.raises(ValueError, match="no such layout"), cache.equal_variables_used_by_jax():
        raise ValueError("no such layout")
    assert constraints.compute_transitively_equal_vars is ORIGINAL
    assert not cache.replacing.locked()

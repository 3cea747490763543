"""Which layouts are equal is found for JAX 0.11 as that version finds it, but for the order."""

import jax
import pytest
from jax.experimental.mosaic.gpu import constraints

from glax._src.kernels.pallas_gpu import equal_layouts

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
    found = equal_layouts.equal_variables(given)
    assert {k: set(v) for k, v in found.items()} == {k: set(v) for k, v in expected.items()}
    assert all(len(v) == len(set(v)) for v in found.values())


def test_order_follows_the_constraints():
    found = equal_layouts.equal_variables(system("db", "ca", "ab"))
    assert [x.key for x in found[variable("b")]] == ["c", "a", "d"]


def test_replaces_only_what_jax_0_11_has(monkeypatch):
    monkeypatch.setattr(constraints, "compute_transitively_equal_vars", ORIGINAL)
    for version, used in (((0, 11, 2), equal_layouts.equal_variables), ((0, 12, 0), ORIGINAL)):
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(constraints, "compute_transitively_equal_vars", ORIGINAL)
        equal_layouts.use_in_jax.__wrapped__()
        assert constraints.compute_transitively_equal_vars is used

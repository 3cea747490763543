"""A seventh form of decay: one kernel that names it computes it, and all else refuses it, with the reason."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from glax import Backend, Platform, UnsupportedError, kernel_registry
from glax._src.core.decay import PARTS, USUAL_FORMS, Decay
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.kernels import load_kernels
from glax._src.kernels.xla import isolated
from glax._src.parallel.sharding import Spread, solve_on_mesh
from glax._src.solve import autodiff
from glax._src.solve.autodiff import differentiable, solve
from glax._src.solve.dispatch import Choice
from tests.cases import FORMS, Case, recurrence

pytestmark = pytest.mark.fast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithElements(Decay):
    """Hold a log decay of each element of the state, too."""

    element: Float[Array, "B T H K V"] | None = None


def example() -> Recurrence:
    r = recurrence(Case("", B=2, T=6, K=3, V=5, gates=()), "mild")
    log = -jax.random.uniform(jax.random.key(0), (2, 6, 2, 3, 5))
    return r.replace(decay=WithElements(element=log))


def expected(r: Recurrence) -> np.ndarray:
    """Return o_t = scale S_t^T q_t with S_t = exp(element_t) S_{t-1} + k_t v_t^T, in float64."""
    q, k, v, S, log = (np.asarray(x, np.float64) for x in (r.q, r.k, r.v, r.initial_state, r.decay.element))
    rows = []
    for t in range(q.shape[1]):
        S = np.exp(log[:, t]) * S + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append(np.einsum("bhk,bhkv->bhv", q[:, t], S) * np.asarray(r.scale)[:, None, None])
    return np.stack(rows, axis=1)


@pytest.fixture
def elementwise(monkeypatch):
    """Register a kernel that names the form."""
    load_kernels()
    monkeypatch.setattr(kernel_registry, "kernels", dict(kernel_registry.kernels))

    @kernel_registry.register("elementwise", Platform.XLA, Backend.ANY, forms=("element",))
    def run(r: Recurrence, *, config) -> Outputs:
        def step(S, row):
            q, k, v, log = row
            S = jnp.exp(log) * S + k[..., None] * v[..., None, :]
            return S, jnp.einsum("bhk,bhkv->bhv", q * r.scale[:, None, None], S, precision="highest")

        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (r.q, r.k, r.v, r.decay.element))
        final, output = jax.lax.scan(step, r.start_state, rows)
        return Outputs(jnp.moveaxis(output, 0, 1), final)


def test_every_kernel_names_its_forms():
    load_kernels()
    for spec in kernel_registry.kernels.values():
        assert {*spec.forms, *(spec.erasing_forms or ())} <= set(USUAL_FORMS), spec.name
    assert set(FORMS) == set(USUAL_FORMS)
    assert [field.name for field in dataclasses.fields(Decay)] == list(PARTS)


def test_a_new_form_is_computed_by_the_kernel_that_names_it(elementwise):
    r = example()
    assert kernel_registry.find(r).name == "elementwise/xla/any"
    np.testing.assert_allclose(solve(Choice(), r).output, expected(r), rtol=1e-5, atol=1e-6)


def test_every_other_kernel_refuses_a_new_form(elementwise):
    r = example()
    others = [spec for spec in kernel_registry.kernels.values() if spec.name != "elementwise/xla/any"]
    assert len(others) > 15
    for spec in others:
        assert "; got element (given by element)" in spec.other_form(r, r.decay.form), spec.name
    here = [spec for spec in others if spec.backend in (Backend.ANY, Backend.here())]
    assert all("got element" in spec.refusal(r) for spec in here)


def test_a_new_form_has_no_derived_gradient(elementwise):
    r = differentiable(example())
    with pytest.raises(UnsupportedError, match=r"the derived gradient takes decays of the form none, .*; got element"):
        jax.grad(lambda q: solve(Choice(), r.replace(q=q)).output.sum())(r.q)


@pytest.fixture
def learned(elementwise, monkeypatch):
    """Name the form where XLA's kernel token by token and the derived gradient do, as if they had learned it."""
    for name in ("recurrent/xla/any", "recurrent.vjp/xla/any"):
        spec = kernel_registry.kernels[name]
        monkeypatch.setitem(kernel_registry.kernels, name, dataclasses.replace(spec, forms=(*spec.forms, "element")))
    monkeypatch.setattr(autodiff, "DERIVED_FORMS", (*USUAL_FORMS, "element"))


def test_a_form_that_is_learned_without_an_erasure_is_refused_with_one(learned):
    r = example()
    r = r.replace(erasure=Erasure(beta=jnp.ones((2, 6, 2))))
    for name in ("recurrent/xla/any", "recurrent.vjp/xla/any"):
        assert "takes decays beside an erasure" in kernel_registry.kernels[name].other_form(r, r.decay.form)
    with pytest.raises(UnsupportedError, match=r"with an erasure, .* takes decays .*; got element"):
        autodiff.derived_gradient(Choice(), r, jnp.zeros_like(r.v), None)
    with pytest.raises(UnsupportedError, match=r"apart from what is not finite, takes decays .*; got element"):
        isolated.isolated_outputs(r.replace(erasure=None), None)


def test_shards_of_the_sequence_refuse_a_new_form(elementwise):
    spread = Spread(jax.make_mesh((1,), ("t",)), sequence_axis="t")
    with pytest.raises(UnsupportedError, match=r"sequence_axis takes decays of the form none, .*; got element"):
        solve_on_mesh(Choice(), spread, example())

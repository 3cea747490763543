"""The Triton kernels of products of grouped rows in Triton's interpreter: values and gradients beside a loop in float64."""

import dataclasses
import importlib.util
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

from glax import nn  # noqa: E402
from glax._src.core.backend import Backend  # noqa: E402
from glax._src.kernels.common.grouped import GroupedOperands, row_table  # noqa: E402
from glax._src.kernels.triton import grouped_config  # noqa: E402
from glax._src.kernels.triton.grouped_config import GroupedConfig, GroupedSumConfig  # noqa: E402
from glax._src.solve import grouped as solve  # noqa: E402

PRODUCTS, SUMS = GroupedConfig(16, 16, 16, 4, 1), GroupedSumConfig(16, 16, 32, 4, 1)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The rows of each group, how many rows come behind them, and the widths of both sides of a matrix."""

    sizes: tuple[int, ...]
    behind: int = 0
    K: int = 32
    N: int = 32
    dtype: str = "float32"

    def arrays(self):
        """Return x, w, the cotangent of y, and the rows of each group."""
        draw, M = np.random.default_rng(0), sum(self.sizes) + self.behind
        shapes = (M, self.K), (len(self.sizes), self.K, self.N), (M, self.N)
        return *(jnp.asarray(draw.standard_normal(s), self.dtype) for s in shapes), jnp.array(self.sizes, jnp.int32)


CASES = {
    "several": Grouped((16, 40, 5, 32)),
    "empty": Grouped((0, 19, 0, 0, 3, 0)),
    "one": Grouped((33,)),
    "behind": Grouped((7, 0, 21), behind=30),
    "all-behind": Grouped((0, 0), behind=5),
    "one-row": Grouped((0, 1, 0)),
    "many-groups": Grouped((1, 0) * 20),
    "K40N24": Grouped((17, 4), K=40, N=24),
    "K8N50": Grouped((17, 4), behind=3, K=8, N=50),
    "bfloat16": Grouped((20, 0, 31), behind=2, K=48, dtype="bfloat16"),
    "float16": Grouped((20, 0, 31), dtype="float16"),
}


@pytest.fixture
def on_gpu(monkeypatch):
    """Choose kernels as on a GPU, and in small blocks."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    for name, config in (("TRITON", PRODUCTS), ("TRITON_SUMS", SUMS)):
        kernel = dataclasses.replace(getattr(solve, name), heuristic=lambda operands, config=config: config)
        monkeypatch.setattr(solve, name, kernel)


def values_and_gradients(x, w, d_y, sizes):
    y, pull = jax.vjp(lambda x, w: solve.grouped_product(x, w, sizes), x, w)
    return [np.asarray(a) for a in (y, *pull(d_y))]


def by_a_loop(x, w, d_y, sizes):
    x, w, d_y = (np.asarray(a, np.float64) for a in (x, w, d_y))
    y, d_x, d_w, end = np.zeros_like(d_y), np.zeros_like(x), np.zeros_like(w), 0
    for e, size in enumerate(np.asarray(sizes)):
        own, end = slice(end, end + size), end + size
        y[own], d_x[own], d_w[e] = x[own] @ w[e], d_y[own] @ w[e].T, x[own].T @ d_y[own]
    return y, d_x, d_w


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_a_loop(on_gpu, name):
    case = CASES[name]
    arrays = case.arrays()
    bound = dict(float32=2e-5, float16=4e-3, bfloat16=3e-2)[case.dtype]
    for result, got, want in zip(("y", "dx", "dw"), values_and_gradients(*arrays), by_a_loop(*arrays), strict=True):
        assert got.dtype == case.dtype
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=bound, atol=bound, err_msg=result)
        np.testing.assert_array_equal(got[want == 0], 0, err_msg=result)


@pytest.mark.parametrize("config", [grouped_config.product_config, grouped_config.sum_config])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("M", [4, 200, 4096])
def test_heuristic_configs_are_valid(config, dtype, M, monkeypatch):
    x, w = jax.ShapeDtypeStruct((M, 64), dtype), jax.ShapeDtypeStruct((8, 64, 32), dtype)
    for large in (True, False):
        monkeypatch.setattr(grouped_config, "has_large_tiles", lambda large=large: large)
        config(GroupedOperands(x, w, jax.ShapeDtypeStruct((8,), "int32")))


@pytest.mark.parametrize("name", ["several", "empty", "behind", "one-row", "many-groups"])
def test_each_row_lies_in_one_block_of_its_group(name):
    case = CASES[name]
    M, E = sum(case.sizes) + case.behind, len(case.sizes)
    found = np.full(M, -1)
    for start, rows, group in np.asarray(row_table(jnp.array(case.sizes), M, 16)):
        assert rows == 0 or group == E or case.sizes[group] > 0
        assert 0 <= rows <= 16 and (found[start : start + rows] == -1).all()
        found[start : start + rows] = group
    np.testing.assert_array_equal(found, np.repeat(np.arange(E + 1), (*case.sizes, case.behind)))


def test_a_row_that_is_not_finite_reaches_its_own_results_alone(on_gpu):
    x, w, d_y, sizes = CASES["behind"].arrays()
    clean = values_and_gradients(x, w, d_y, sizes)
    found = values_and_gradients(x.at[8, 3].set(jnp.nan).at[40].set(jnp.inf), w, d_y.at[50].set(jnp.nan), sizes)
    for got, want in zip(found, clean, strict=True):
        np.testing.assert_array_equal(np.where(np.isfinite(got), got, want), want)
    y, _, d_w = values_and_gradients(x.at[8, 3].set(jnp.nan), w, d_y, sizes)
    np.testing.assert_array_equal(np.isnan(y).any(1), np.arange(len(y)) == 8)
    np.testing.assert_array_equal(np.isnan(d_w).any((1, 2)), [False, False, True])


def test_second_derivatives_and_vmap(on_gpu):
    x, w, _, sizes = Grouped((5, 0, 9), behind=2, K=16, N=16).arrays()
    several = jnp.stack([sizes, sizes[::-1]])

    def by_masks(x, w, sizes):  # `jax.lax.ragged_dot` has no second derivative
        ends, rows = jnp.cumsum(sizes), jnp.arange(x.shape[0])[:, None]
        return jnp.einsum("mk,ekn,me->mn", x, w, ((rows < ends) & (rows >= ends - sizes)).astype(x.dtype))

    def results(product):
        def derivative(x, w, sizes):
            d_x, d_w = jax.grad(lambda x, w: (product(x, w, sizes) ** 2).sum(), (0, 1))(x, w)
            return (d_x**2).sum() + (d_w**2).sum()

        second = jax.grad(derivative, (0, 1))
        return second(x, w, sizes), jax.vmap(second, (0, None, 0))(jnp.stack([x, -x]), w, several)

    for got, want in zip(*(jax.tree.leaves(results(f)) for f in (solve.grouped_product, by_masks)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5 * float(abs(want).max()))


def test_forward_mode_raises_an_error_that_names_the_remedy(on_gpu):
    x, w, _, sizes = CASES["one"].arrays()
    with pytest.raises(TypeError, match="glax has no forward mode"):
        jax.jvp(lambda x: solve.grouped_product(x, w, sizes), (x,), (x,))


@pytest.mark.parametrize("form", ["split", "plain"])
def test_experts_run_the_kernels_on_a_gpu(on_gpu, caplog, monkeypatch, form):
    experts = nn.Experts(24, 16, 4, form=form, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (10, 24))
    chosen = jax.nn.softmax(x[:, :2]), jax.random.randint(jax.random.key(2), (10, 2), 0, 4)
    run = nnx.value_and_grad(lambda experts, x: (experts(x, chosen) ** 2).sum(), argnums=(0, 1))
    with caplog.at_level(logging.DEBUG, "glax"):
        found = run(experts, x)
    count = 3 if form == "split" else 2
    names = [record.message.split(":")[0] for record in caplog.records]
    assert (names.count("grouped/triton/gpu"), names.count("grouped.sums/triton/gpu")) == (2 * count, count)
    monkeypatch.undo()
    with caplog.at_level(logging.DEBUG, "glax"):
        wanted = run(experts, x)
    assert "not grouped/triton/gpu: needs a gpu, JAX computes on cpu here" in caplog.records[-1].message
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_a_program_for_another_backend_runs_xla(on_gpu, monkeypatch):
    arrays = CASES["several"].arrays()
    traced = jax.jit(lambda x, w, d_y, sizes: jax.vjp(lambda x, w: solve.grouped_product(x, w, sizes), x, w)[1](d_y))
    traced = traced.trace(*arrays)
    monkeypatch.undo()
    for got, want in zip(traced.lower().compile()(*arrays), by_a_loop(*arrays)[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "shapes, dtypes, why",
    [
        (((0, 4), (2, 4, 4)), ("float32",) * 2, "takes arrays with elements, got rows [0, 4] and matrices [2, 4, 4]"),
        (((3, 4), (2, 4, 4)), ("float32", "bfloat16"), "takes rows and matrices of one dtype, bfloat16 or float16 or float32, "),
        (((3, 65536), (2, 65536, 32768)), ("bfloat16",) * 2, "takes matrices of fewer than 2^31 numbers"),
    ],
)  # fmt: skip
def test_refusals_state_the_reason(shapes, dtypes, why):
    x, w = (jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True))
    found = grouped_config.refusal(GroupedOperands(x, w, jax.ShapeDtypeStruct((2,), "int32")))
    assert found is not None and found.startswith(why)

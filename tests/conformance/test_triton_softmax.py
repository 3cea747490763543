"""The Triton kernels of softmax attention in Triton's interpreter: values and gradients beside XLA's, and poisoned rows."""

import dataclasses
import importlib.util
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
    pytest.skip("Triton and jax-triton are not installed: pip install triton jax-triton", allow_module_level=True)

from tests import triton_interpreter

triton_interpreter.install()

from glax._src.core.backend import Backend  # noqa: E402
from glax._src.kernels.common.softmax import Intervals, ReadBlocks, SoftmaxOperands  # noqa: E402
from glax._src.kernels.triton import softmax as kernels  # noqa: E402
from glax._src.kernels.triton import softmax_config  # noqa: E402
from glax._src.kernels.triton.softmax_config import SoftmaxConfig, SoftmaxGradientConfig  # noqa: E402
from glax._src.kernels.xla import softmax as xla  # noqa: E402
from glax._src.solve import softmax as solve  # noqa: E402

FORWARD = SoftmaxConfig(rows=16, keys=16, warps=4, stages=1)
GRADIENT = SoftmaxGradientConfig(32, 16, 4, 1, 32, 16, 4, 1)
CUTS = np.array([0, 9, 9, 31, 42])  # of 45 rows: the last three are padding
# The interpreter takes a maximum of scores that are all NaN.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Shapes of a call, the kind of its intervals, and the size of the blocks of keys that its rows choose."""

    kind: str = "causal"
    B: int = 1
    T: int = 45
    S: int = 45
    heads: tuple[int, int] = (2, 1)
    D: int = 16
    V: int = 16
    window: int | None = None
    dtype: str = "float32"
    size: int | None = None
    share: float = 0.3  # of the blocks that a row reads
    most_words: int = 99  # blocks behind them have no bit

    def intervals(self):
        rows = np.arange(self.T)
        own = np.minimum(np.searchsorted(CUTS, rows, side="right") - 1, len(CUTS) - 2)
        of_token = rows < CUTS[-1]
        if self.kind == "causal":
            first, last = np.zeros_like(rows), rows
        elif self.kind == "packed":
            first, last = CUTS[own], np.where(of_token, rows, -1)
        elif self.kind == "cached":  # the keys of sequence n lie from row 40 n on, behind 3 n others
            first = own * 40
            last = np.where(of_token, first + rows - CUTS[own] + 3 * own, -1)
        else:  # some rows read nothing, others any interval
            draw = np.random.default_rng(7)
            first = draw.integers(0, self.S, self.T)
            last = first + draw.integers(-3, 40, self.T)
        if self.window is not None:
            first = np.maximum(first, last - self.window + 1)
        first, last = (np.broadcast_to(x, (self.B, self.T)) + 5 * np.arange(self.B)[:, None] for x in (first, last))
        return first, np.minimum(last, self.S - 1)

    def operands(self, poison=None):
        """Return the operands and the cotangent of o. poison: (which of them, batch element and row, value)."""
        draw, (Hq, Hk) = np.random.default_rng(0), self.heads
        shapes = (self.B, self.T, Hq, self.D), (self.B, self.S, Hk, self.D), (self.B, self.S, Hk, self.V)
        arrays = [draw.standard_normal(shape) for shape in (*shapes, (self.B, self.T, Hq, self.V))]
        if poison is not None:
            which, row, value = poison
            arrays[which][(*row, 0, 3)] = value  # one channel of one head
        q, k, v, d_o = (jnp.asarray(x, self.dtype) for x in arrays)
        first, last = (jnp.asarray(x, jnp.int32) for x in self.intervals())
        cuts = jnp.asarray(CUTS) if self.kind == "cached" else None
        return SoftmaxOperands(q, k, v, first, last, cuts, self.blocks()), d_o

    def blocks(self) -> ReadBlocks | None:
        if self.size is None:
            return None
        first, last = self.intervals()
        words = min(-(-int((last - first + 1).max()) // (32 * self.size)), self.most_words)
        bits = np.random.default_rng(3).random((self.B, self.T, words, 32)) < self.share
        bits[:, : self.T // 2, 1:] = False  # whole words of a block of rows are 0
        packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
        return ReadBlocks(jnp.asarray(packed[..., 0]), self.size)


def by_triton(operands, d_o, scale, config=GRADIENT, forward=FORWARD):
    o, log_total = kernels.forward(operands, scale, forward)
    return [np.asarray(x) for x in (o, *kernels.gradient(operands, o, log_total, d_o, scale, config))]


def by_xla(operands, d_o, scale):
    operands, d_o = jax.tree.map(lambda x: x.astype("float32") if x.dtype != jnp.int32 else x, (operands, d_o))
    o, pull = jax.vjp(lambda q, k, v: xla.whole(operands._replace(q=q, k=k, v=v), scale), *operands[:3])
    return [np.asarray(x) for x in (o, *pull(d_o))]


CASES = {
    "causal": Softmax(),
    "batch": Softmax(B=2, S=50, heads=(4, 2), window=21),
    "packed": Softmax("packed", heads=(2, 2)),
    "cached": Softmax("cached", S=150, heads=(3, 1)),
    "cached-window": Softmax("cached", S=150, window=7),
    "any": Softmax("any", T=40, S=60),
    "D24V40": Softmax(D=24, V=40),
    "D80": Softmax("packed", D=80, V=16),
    "few-rows": Softmax(T=3, S=50),
    "bfloat16": Softmax(dtype="bfloat16", heads=(4, 2)),
    "float16": Softmax(dtype="float16", D=32),
    "chosen": Softmax(size=4),
    "chosen-tokens": Softmax(B=2, S=50, heads=(4, 2), size=1),
    "chosen-pairs": Softmax(T=20, S=90, size=2, share=0.05),
    "chosen-threes": Softmax("any", T=40, S=60, size=3),
    "chosen-packed": Softmax("packed", heads=(2, 2), size=4),
    "chosen-cached": Softmax("cached", S=150, heads=(3, 1), size=4),
    "chosen-long": Softmax("any", T=40, S=300, B=2, size=16, share=0.1),
    "chosen-without-bits": Softmax("any", B=2, T=20, S=200, size=2, most_words=1),
    "chosen-none": Softmax(size=4, share=0.0),
    "chosen-bfloat16": Softmax(dtype="bfloat16", heads=(4, 2), size=16),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_xla(name):
    case = CASES[name]
    found, wanted = (f(*case.operands(), 0.3) for f in (by_triton, by_xla))
    bound = dict(float32=2e-5, float16=4e-3, bfloat16=3e-2)[case.dtype]
    for result, got, want in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        assert got.dtype == case.dtype
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=bound, atol=bound, err_msg=result)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 64, 1000])
def test_a_tile_has_the_most_keys_whose_blocks_fit_into_a_word(size):
    operands, d_o = Softmax("any", T=20, S=150, size=size, share=0.5).operands()
    keys = softmax_config.most_keys(operands, 256)

    def most_touched(keys):
        return max((start + keys - 1) // size - start // size + 1 for start in range(size))

    assert most_touched(keys) <= 32 and (keys == 256 or most_touched(2 * keys) > 32)
    config = dataclasses.replace(GRADIENT, keys=keys, own_keys=keys)
    forward = dataclasses.replace(FORWARD, keys=keys)
    found, wanted = by_triton(operands, d_o, 0.3, config, forward), by_xla(operands, d_o, 0.3)
    for result, got, want in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=result)


@pytest.mark.parametrize("name", ["batch", "cached-window", "any", "D24V40", "bfloat16", "chosen-packed"])
def test_gradients_of_keys_and_values_apart_are_those_of_one_kernel(name):
    operands, d_o = CASES[name].operands()
    apart = dataclasses.replace(GRADIENT, apart=True)
    together, found = (by_triton(operands, d_o, 0.3, config) for config in (GRADIENT, apart))
    for result, got, want in zip(("o", "dq", "dk", "dv"), found, together, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=result)


@pytest.mark.parametrize(
    "kind, size", [("causal", None), ("packed", None), ("cached", None), ("causal", 4), ("cached", 2)]
)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "d_o"])
def test_what_is_not_finite_reaches_the_rows_that_read_it_alone(kind, size, which):
    case = Softmax(kind, S=150 if kind == "cached" else 45, heads=(2, 2), size=size)
    _, last = case.intervals()
    row = 20
    at = row if which in (0, 3) else last[0, row]
    clean = by_triton(*case.operands(), 0.3)
    for value in (np.nan, -np.inf):
        operands, d_o = case.operands((which, (0, at), value))
        found, wanted = by_triton(operands, d_o, 0.3), by_xla(operands, d_o, 0.3)
        for result, got, want, sound in zip(("o", "dq", "dk", "dv"), found, wanted, clean, strict=True):
            message = f"{value} in input {which}, {result}"
            np.testing.assert_array_equal(np.isnan(got).any(-1), np.isnan(want).any(-1), err_msg=message)
            others = ~np.isnan(want).any(-1)
            np.testing.assert_allclose(got[others], want[others], rtol=2e-5, atol=2e-5, err_msg=message)
            # The second head reads no row that is not finite.
            np.testing.assert_array_equal(got[:, :, 1], sound[:, :, 1], err_msg=message)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_read_nothing_are_zero_and_reach_nothing(value):
    case = Softmax("packed")
    clean = by_triton(*case.operands(), 0.3)
    for which, row in itertools.product((0, 1, 2, 3), (42, 44)):
        found = by_triton(*case.operands((which, (0, row), value)), 0.3)
        for got, want in zip(found, clean, strict=True):
            np.testing.assert_array_equal(got, want)
    assert not clean[0][:, 42:].any()


# ---- calls of layers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch):
    """Choose kernels as on a GPU, and in small blocks."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(softmax_config, "FEW_ROWS", 1)
    for name, config in (("TRITON", FORWARD), ("TRITON_GRADIENT", GRADIENT)):
        kernel = getattr(solve, name)
        monkeypatch.setattr(solve, name, dataclasses.replace(kernel, heuristic=lambda operands, config=config: config))


def by_layers(case: Softmax, attend):
    (q, k, v, first, last, cuts, blocks), d_o = case.operands()
    more = [x for x in (cuts, blocks) if x is not None]
    o, pull = jax.vjp(lambda q, k, v: attend(q, k, v, Intervals(first, last), None, *more), q, k, v)
    return [np.asarray(x) for x in (o, *pull(d_o))]


@pytest.mark.parametrize(
    "kind, attend",
    [
        ("causal", "attend_whole"), ("packed", "attend_in_blocks"), ("cached", "attend_by_sequence"),
        ("chosen", "attend_in_blocks"), ("chosen-cached", "attend_by_sequence"),
    ],
)  # fmt: skip
def test_layers_run_the_kernels_on_a_gpu(on_gpu, caplog, monkeypatch, kind, attend):
    case = CASES[kind]
    with caplog.at_level(logging.DEBUG, "glax"):
        found = by_layers(case, getattr(solve, attend))
    assert [x.message.split(":")[0] for x in caplog.records] == ["softmax/triton/gpu", "softmax.vjp/triton/gpu"]
    monkeypatch.undo()
    with caplog.at_level(logging.DEBUG, "glax"):
        wanted = by_layers(case, getattr(solve, attend))
    assert "not softmax/triton/gpu: needs a gpu, JAX computes on cpu here" in caplog.records[-1].message
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_second_derivatives_and_vmap(on_gpu, monkeypatch):
    (q, k, v, first, last, *_), _ = Softmax(B=2, T=18, S=18, heads=(2, 1)).operands()

    def derivative(q, k, v, first, last):
        def summed(q, k, v):
            return (solve.attend_in_blocks(q, k, v, Intervals(first, last), None) ** 2).sum()

        return sum((d**2).sum() for d in jax.grad(summed, (0, 1, 2))(q, k, v))

    def apart(*operands):
        return jax.vmap(jax.grad(derivative, (0, 1, 2)))(*(x[:, None] for x in operands))

    operands = q, k, v, first, last
    found, mapped = jax.grad(derivative, (0, 1, 2))(*operands), apart(*operands)
    monkeypatch.undo()
    for got, one, want in zip(found, mapped, jax.grad(derivative, (0, 1, 2))(*operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(one[:, 0], want, rtol=1e-4, atol=1e-4)


def test_a_program_for_another_backend_runs_xla(on_gpu, monkeypatch):
    case = Softmax(T=18, S=18)
    (q, k, v, first, last, *_), d_o = case.operands()

    @jax.jit
    def run(q, k, v):
        return jax.vjp(lambda q, k, v: solve.attend_in_blocks(q, k, v, Intervals(first, last), None), q, k, v)[1](d_o)

    traced = run.trace(q, k, v)
    monkeypatch.undo()
    for got, want in zip(traced.lower().compile()(q, k, v), by_layers(case, solve.attend_in_blocks)[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(D=264, dtype="bfloat16"), "takes heads of bfloat16 up to 256 wide, got query 264 and value 16 wide"),
        (dict(V=192), "takes heads of float32 up to 128 wide, got query 16 and value 192 wide"),
        (dict(T=8, S=9), "takes 16 rows or more than 32768 scores, got 8 rows of 9 keys"),
        (dict(T=0), "takes arrays with elements, got query [1, 0, 2, 16] and key [1, 45, 1, 16]"),
    ],
)
def test_refusals_state_the_reason(change, why):
    operands, _ = Softmax(**change).operands()
    assert softmax_config.refusal(operands, 1.0) == why
    assert softmax_config.refusal(Softmax().operands()[0], -1.0) == "takes a scale above 0, got -1.0"


def test_a_config_with_more_keys_than_a_word_has_bits_is_an_error():
    """A user's config for all keys may reach rows that read chosen blocks."""
    operands, d_o = CASES["chosen-tokens"].operands()
    text = "keys must be at most 32 where rows read chosen blocks of 1 keys, got 64"
    with pytest.raises(ValueError, match=f"^{text}$"):
        kernels.forward(operands, 0.3, dataclasses.replace(FORWARD, keys=64))
    o, log_total = kernels.forward(operands, 0.3, dataclasses.replace(FORWARD, keys=32))
    with pytest.raises(ValueError, match=f"^own_{text}$"):
        kernels.gradient(operands, o, log_total, d_o, 0.3, dataclasses.replace(GRADIENT, own_keys=64))

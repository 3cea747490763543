"""NaN, inf and overflow in one document change no other document's results: the Hopper kernels, through the interpreter.

`python -m tests.poison_table` tries more poisons on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip(
        "the interpreter of Hopper kernels needs JAX 0.12: make hopper PYTHON=python3.13 VENV=.venv-3.13",
        allow_module_level=True,
    )

from glax._src.core.bind import bind
from glax._src.core.registry import kernel_registry
from glax._src.core.segments import Segments
from glax._src.kernels import load_kernels
from glax._src.kernels.pallas_gpu import delta, isolation, plain
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.rows import takes_segments
from glax._src.solve.dispatch import Choice, Resolution, by_folding
from glax.testing.cases import Case
from tests.hopper import Interpreter
from tests.poison import MIDDLE, Layout, batch, operands_of, packed, poisoned, poisons, spoiled

BAR = 1e-2  # of what differs in documents that share a chunk with the poison
T = 136
INSIDE = (0, 20, 41, 64, 100, 130)  # the middle document lies in one chunk with two others
EDGE = (0, 64, 100, 130)  # it begins at a chunk's edge and ends inside


def segmented(cuts) -> Layout:
    """Return one row of documents with these boundaries, by segment_ids with padding."""
    row = packed(cuts, T).document_of
    ids = tuple(tuple(x) for x in (row + 1).tolist())
    return Layout("segment_ids", dict(B=1, T=T, ids=ids), row, (tuple(range(len(cuts) - 1)),))


HEAD, KEY, DELTA = dict(gates=("g",)), dict(gates=("gk",)), dict(erasure=("beta",))
# the documents, the fields of the case, and the segments of a row
ROUTES = {
    "per head, one row": (packed(INSIDE, T), HEAD, 1),
    "per key, one row with marks": (packed(INSIDE, T), KEY | dict(K=72), 1),
    "per key, each from a chunk's start": (packed(INSIDE, T), KEY, 1),
    "no gates, one row, reversed": (packed(EDGE, T), dict(gates=(), reverse=True), 1),
    "constant, one row, cut into segments": (packed(INSIDE, T), dict(gates=("g_gamma",)), 2),
    "gated delta rule, one row": (packed(EDGE, T), HEAD | DELTA, 1),
    "erase and write, one row": (packed(EDGE, T), HEAD | dict(erasure=("erase", "write")), 1),
    "per-key delta rule, each from a chunk's start": (packed(INSIDE, T), KEY | DELTA, 1),
    "per head, segment_ids": (segmented(INSIDE), HEAD, 1),
    "per head, segment_ids, shared heads, reversed": (
        segmented(EDGE), HEAD | dict(heads=(1, 1, 2), reverse=True), 1
    ),
    "per key, segment_ids with marks, cut into segments": (segmented(INSIDE), KEY | dict(K=72), 2),
    "per key, folded segment_ids": (segmented(INSIDE), KEY, 1),
    "gated delta rule, segment_ids, cut into segments": (segmented(INSIDE), HEAD | DELTA, 2),
    "per-key delta rule, segment_ids, reversed": (segmented(INSIDE), KEY | DELTA | dict(reverse=True), 1),
    "per head, joined rows": (batch(B=4, T=66), HEAD, 1),
    "per key, joined rows": (batch(B=4, T=66), KEY | dict(K=72), 1),
}  # fmt: skip


def programs(r, config: HopperConfig):
    """Return the forward with residuals and the gradient of r's kernels, in which documents are isolated."""
    module = delta if r.erasure is not None else plain

    def forward(r):
        if r.segments is None or takes_segments(r):
            return module.chunked_with_residuals(r, config)
        outputs, residuals = module.chunked_with_residuals(r.folded, config)
        return outputs._replace(output=r.segments.masked(outputs.output)), residuals

    def backward(r, d_output, d_final, residuals):
        run = functools.partial(module.chunked_vjp, config=config)
        run = run if r.segments is None or takes_segments(r) else by_folding(run)
        return run(r, d_output, d_final, residuals)

    return functools.partial(isolation.isolated, forward), functools.partial(isolation.isolated, backward)


@pytest.fixture
def interpreted(monkeypatch):
    interpreter = Interpreter(monkeypatch)
    interpreter.programs(2)
    with interpreter.on():
        yield


@pytest.mark.parametrize(
    "route", [pytest.param(name, marks=[pytest.mark.few] * (i == 0)) for i, name in enumerate(ROUTES)]
)
def test_a_poisoned_document_harms_no_other(route, interpreted):
    layout, fields, parts = ROUTES[route]
    states = "float32" if layout.name == "segment_ids" else None
    shape = dict(K=64, V=64, heads=(1, 1, 1), dtype="bfloat16", state_dtype=states)
    operands = operands_of(Case(route, **(shape | layout.fields | fields)))
    r = operands[0]
    forward, backward = programs(r, HopperConfig(parts=parts))

    @jax.jit
    def both(r, d_output, d_final):
        outputs, residuals = forward(r)
        return outputs, backward(r, d_output, d_final if r.segments is not None else None, residuals)

    clean = jax.block_until_ready(both(*operands))
    found = []
    for poison in poisons(layout, operands, few=True):
        if poison.array == "d_final" and r.segments is None:
            continue
        got = jax.block_until_ready(both(*poisoned(operands, poison)))
        for name, a, b in zip(("forward", "gradient"), got, clean, strict=True):
            found += [f"{name}, {poison}: {x}" for x in spoiled(layout, poison.owners, a, b, r.reverse, BAR)]
        if poison.array == "v" and poison.owners:  # what is wrong is not hidden
            assert not np.isfinite(np.asarray(got[0].output, np.float32)[layout.document_of == MIDDLE]).all()
    assert not found, "\n".join(found)


@pytest.mark.fast
def test_results_are_replaced_where_the_flag_says_so(interpreted):
    x, y = jnp.arange(1280.0).reshape(10, 128), jnp.ones((4, 1024), jnp.bfloat16)
    for flag in (0, 1):
        found = isolation.repair(jnp.full(1, flag, jnp.int32), [x, y], [-x, 2 * y])
        np.testing.assert_array_equal(found[0], -x if flag else x)
        np.testing.assert_array_equal(found[1], 2 * y if flag else y)


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
def test_documents_are_bad_from_their_first_bad_token_on(reverse):
    x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    r = bind(x, x, x, g=x[..., 0], reverse=reverse)
    ids = jnp.asarray([[1, 1, 1, 0, 2, 2, 2, 2]])
    documents = isolation.Documents.of(r.replace(segments=Segments.from_ids(ids, 0, reverse)))
    so_far, whole = documents.reach(jnp.arange(8)[None] == 5)
    want = [4, 5] if reverse else [5, 6, 7]
    assert np.flatnonzero(so_far & documents.is_token).tolist() == want
    assert np.flatnonzero(whole & documents.is_token).tolist() == [4, 5, 6, 7]


@pytest.mark.fast
def test_segments_reach_every_hopper_kernel():
    """A kernel that received gates of -inf could not tell a document's boundary from a gate of the caller's."""
    load_kernels()
    forward, gradient = (kernel_registry.kernels[f"{name}/pallas/gpu"] for name in ("chunked", "chunked.vjp"))
    x = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    r = bind(x, x, x, g=x[..., 0], segment_ids=jnp.arange(128)[None] // 50)
    assert not forward.takes_segments(r)
    assert Resolution(Choice(), forward, gradient, Choice()).takes_segments(r)
    assert isolation.shares_rows(r)

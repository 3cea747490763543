"""Sequences whose length 8 does not divide, joined to rows: forward and gradient through the interpreter, against the float64
reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the interpreter of Pallas Mosaic GPU needs JAX 0.12", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

import glax
from glax._src.core.backend import Backend
from glax._src.core.bind import bind
from glax._src.core.segments import Segments
from glax._src.kernels.pallas_gpu import plain
from glax._src.kernels.pallas_gpu.config import HopperConfig
from glax._src.kernels.pallas_gpu.layout import JoinedLayout, KernelLayout
from glax._src.kernels.pallas_gpu.route import Route
from glax._src.kernels.pallas_gpu.rows import Form, newest_resets
from glax._src.solve.dispatch import by_folding
from glax.testing.reference import reference, reference_gradient
from tests import mosaic_interpreter

BAR = 3.5e-3  # docs/numerics.md: bfloat16
DEFAULT = HopperConfig()


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of joined rows and its gradient. `save`: the forward saves residuals. `resets`: tokens at which a segment of every
    sequence begins. `padding`: tokens that are padding, which hold NaN."""

    gate: str | None
    B: int = 8
    T: int = 65
    K: int = 64
    V: int = 64
    heads: tuple[int, int, int] = (1, 1, 1)
    reverse: bool = False
    strength: float = 0.25
    gate_dtype: Any = jnp.bfloat16
    save: bool = True
    initial: bool = False
    d_final: bool = False
    resets: tuple[int, ...] | None = None
    padding: tuple[int, ...] = ()
    config: HopperConfig = DEFAULT


CASES = {
    "head": Call("g"),
    "head, all in one row": Call("g", B=3, T=67, K=72),
    "groups of heads, all in one row, reversed": Call("g", B=3, T=91, heads=(1, 1, 2), reverse=True, save=False),
    "constant, all in one row, cut into segments": Call("g_gamma", B=2, T=270, V=128, config=HopperConfig(parts=2)),
    "head, two in a row, reversed, states formed again": Call("g", B=4, T=132, reverse=True, save=False),
    "head, cut into segments": Call("g", B=2, T=260, heads=(1, 2, 2), config=HopperConfig(parts=2)),
    "head, cut into segments, reversed": Call("g", B=2, T=260, reverse=True, config=HopperConfig(parts=2)),
    "head, gradient of final states": Call("g", B=2, T=68, d_final=True),
    "groups of heads": Call("g", B=4, T=70, heads=(1, 1, 2), K=72, V=40),
    "pairs of heads": Call("g", B=4, T=70, heads=(1, 1, 2), config=HopperConfig(columns=128)),
    "head, wide": Call("g", B=2, T=68, K=160, V=130),
    "constant": Call("g_gamma", T=71),
    "constant, reversed": Call("g_gamma", B=4, T=66, reverse=True),
    "no gates": Call(None, B=4, T=66),
    "key": Call("gk", K=72),
    "key, reversed, shared heads, states formed again": Call(
        "gk", B=4, T=130, K=72, heads=(1, 2, 2), reverse=True, save=False
    ),
    "key, cut into segments, out of range": Call("gk", B=2, T=260, K=72, strength=20, config=HopperConfig(parts=2)),
    "key, wide, float32 gates": Call("gk", B=2, T=68, K=130, V=200, gate_dtype=jnp.float32),
    "key, packed, 64 wide": Call("gk", B=4, T=66, strength=20),
    "key, packed, 64 wide, reversed, states formed again": Call(
        "gk", B=2, T=100, heads=(2, 1, 2), reverse=True, save=False, d_final=True, gate_dtype=jnp.float32
    ),
    "key, packed, states": Call("gk", B=8, T=65, K=72, initial=True, d_final=True),
    "key, packed, wide, initial states": Call("gk", B=2, T=68, K=130, V=100, initial=True),
    "key, segments and padding": Call("gk", B=4, T=66, K=72, resets=(1, 40, 60), padding=(40, 41, 65)),
}


def distance(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)


def one_scan_at_a_time(monkeypatch):
    """Wait for every scan: the scans for outputs and for final states side by side may leave the interpreter no thread on a
    machine of two cores."""
    scan = KernelLayout.scan

    def waited(p, *operands, **options):
        return jax.block_until_ready(scan(p, *jax.block_until_ready(operands), **options))

    monkeypatch.setattr(KernelLayout, "scan", waited)


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(case, monkeypatch):
    c = CASES[case]
    rng, H, (B, T) = np.random.default_rng(0), max(c.heads), (c.B, c.T)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (normal(B, T, h, width) for h, width in zip(c.heads, (c.K, c.K, c.V), strict=True))
    shape = dict(g=(B, T, H), gk=(B, T, H, c.K), g_gamma=(H,)).get(c.gate or "", ())
    dtype = jnp.float32 if c.gate == "g_gamma" else c.gate_dtype
    logs = jax.nn.log_sigmoid(normal(*shape, dtype=jnp.float32)) * c.strength
    d_output, d_final = normal(B, T, H, c.V), normal(B, H, c.K, c.V, dtype=jnp.float32)
    is_padding = jnp.isin(jnp.arange(T), jnp.asarray(c.padding, jnp.int32))
    if c.padding:
        q, k, v, d_output, logs = (
            jnp.where(is_padding[None, :, None, None], jnp.nan, x) for x in (q, k, v, d_output, logs)
        )
    gates = {c.gate: logs.astype(dtype)} if c.gate else {}
    state = normal(B, H, c.K, c.V, dtype=jnp.float32) if c.initial else None
    r = bind(q, k, v, **gates, initial_state=state, reverse=c.reverse)
    r = r.replace(scale=r.scale * 0.9)
    if c.resets is not None:
        resets = jnp.isin(jnp.arange(T), jnp.asarray(c.resets, jnp.int32)) & ~is_padding
        masks = (jnp.broadcast_to(x, (B, T)) for x in (resets, ~is_padding))
        r = r.replace(segments=Segments(*masks))
    assert Route.of(r, c.config).rows.form in (Form.JOINED, Form.EQUAL)
    mosaic_interpreter.install(monkeypatch)
    one_scan_at_a_time(monkeypatch)
    monkeypatch.setattr(plain, "multiprocessors", lambda: 3)  # the interpreter runs idle programs, too
    with plgpu.force_gpu_interpret_mode(mosaic_interpreter.parameters()):
        found, residuals = plain.chunked_with_residuals(r, c.config) if c.save else (plain.chunked(r, c.config), None)
        d = plain.chunked_vjp(r, d_output, d_final if c.d_final else None, residuals, c.config)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, r)
    errors = [distance(a, b) for a, b in zip(found, reference(exact.folded), strict=True)]
    of_reference = reference_gradient if r.segments is None else by_folding(reference_gradient)
    expected = of_reference(exact, d_output.astype(jnp.float32), d_final if c.d_final else 0 * d_final)
    cut = (r.floats, expected.replace(boundaries=None))
    assert jax.tree.structure(d) == jax.tree.structure(cut[0])
    for (path, a), b in zip(jax.tree.leaves_with_path(d), jax.tree.leaves(cut[1]), strict=True):
        sums = 10 if path[-1].name in ("scale", "constant") else 1  # over all of T, with cancellation
        errors.append(distance(a, b) / sums)
    print("errors", errors)
    assert max(errors) < BAR, errors


@pytest.fixture
def one_gpu(monkeypatch):
    """A process with one GPU, where no compiler spreads the sequences of a batch."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("B, T, pieces", [(8, 65, 1), (8, 333, 3), (4, 66, 1), (2, 68, 1), (2, 1500, 4), (16, 2047, 1)])
def test_every_segment_begins_behind_the_chunk_of_a_reset(B, T, pieces, reverse):
    """Segments cover every chunk once, and the first segment of a sequence follows the chunk with its reset, in scan order. That
    chunk alone gives the state that enters."""
    x = jnp.zeros((B, T, 1, 64), jnp.bfloat16)
    r = bind(x, x, x, g=x[..., 0], reverse=reverse)
    p = JoinedLayout(r, Route.of(r, HopperConfig(parts=pieces)))
    joined = p.joined
    assert joined.T % 8 == 0 and p.chunks == -(-joined.T // 64)
    for adjoint in (False, True):
        table = p.table_of(adjoint).reshape(p.N, joined.number, pieces, 4)
        for row, segments in enumerate(table.reshape(p.N, -1, 4)):
            covered = [first + i for _, first, count, _ in segments for i in range(count)]
            assert covered == list(range(p.chunks)) and set(segments[:, 0]) == {row}
        own = p.whole_segments(adjoint, last=False).reshape(p.N, joined.number, pieces, 5)
        assert (own[..., 4] == adjoint).all()
        downwards = p.descending(adjoint)
        ends = own[:, :, 0 if downwards else -1]
        for n in range(joined.number):
            follower = n - 1 if downwards else n + 1
            if not 0 <= follower < joined.number:
                assert (ends[:, n, 2] == 0).all()
                continue
            # of the two sequences, the reset of the one that the recurrence reaches later
            chunk = joined.resets[min(n, follower) + (not reverse)] // 64
            assert (ends[:, n, 1:3] == (chunk, 1)).all()
            first, count = table[:, follower, -1 if downwards else 0, 1:3].T
            assert ((first + count if downwards else first - 1) == chunk).all()


@pytest.mark.fast
@pytest.mark.parametrize("reverse", [False, True])
def test_resets_of_joined_rows_are_known_while_tracing(reverse):
    x = jnp.zeros((16, 333, 1, 72), jnp.bfloat16)
    r = bind(x, x, x, gk=x, reverse=reverse)
    p = JoinedLayout(r, Route.of(r, HopperConfig()))
    segments = p.joined.row.segments
    assert segments is not None
    np.testing.assert_array_equal(p.newest, newest_resets(segments.resets, reverse))


@pytest.mark.fast
@pytest.mark.parametrize(
    "B, T, given, why",
    [
        (8, 2047, {}, None),
        (8, 2048, {}, None),
        (2, 2044, {}, None),
        (4, 2049, {}, "8 sequences, which 8 divides together, do not divide B=4"),
        (1, 2046, {}, "B=1"),
        (4, 2049, dict(gate="g"), None),
        (1, 2049, dict(gate="g", initial_state=True, uses_final_state=True), None),
        (3, 2049, dict(gate="g", initial_state=True), "initial states enter"),
        (8, 63, {}, "sequences are shorter than 64 tokens"),
        (8, 2047, dict(initial_state=True), "initial states enter"),
        (8, 2047, dict(beta=True), "beta is given"),
        (8, 2047, dict(K=64), "with per-key gates, keys of at most 64 channels have no marks for resets"),
        (8, 2047, dict(uses_final_state=True), "the gradient of final states enters"),
    ],
)
def test_explain_says_why_sequences_are_not_joined(B, T, given, why, one_gpu):
    K = given.get("K", 128)
    x = jax.ShapeDtypeStruct((B, T, 4, K), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((B, 4, K, K), jnp.float32) if "initial_state" in given else None

    def loss(x, state):
        options = dict(g=x[..., 0]) if "gate" in given or "beta" in given else dict(gk=x)
        options |= dict(beta=x[..., 0]) if "beta" in given else {}
        found = glax.recurrent(x, x, x, **options, initial_state=state, platform="pallas")
        used = found.final_state if "uses_final_state" in given else found.output
        return used.astype(jnp.float32).sum()

    said = str(glax.explain(jax.grad(loss), x, state))
    assert ("arrays as they are given" in said) == (why is not None)
    assert why is None or f"sequences are not joined: {why}" in said
    cut = f"results in arrays of T tokens: 8 does not divide {B * T} tokens, so they are cut from longer arrays"
    assert (cut in said) == (why is None and B * T % 8 > 0)


@pytest.mark.fast
def test_sequences_that_devices_may_share_are_not_joined(monkeypatch):
    """The compiler may spread a batch over the devices of a process, but not inside shard_map over all axes."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    x = jax.ShapeDtypeStruct((64, 2047, 4, 128), jnp.bfloat16)

    def run(x):
        return glax.recurrent(x, x, x, gk=x, platform="pallas").output

    assert "several devices may share the batch" in str(glax.explain(run, x))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), "x")
    spread = jax.shard_map(run, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    assert "arrays as they are given" not in str(glax.explain(spread, x))


@pytest.mark.fast
def test_examples_with_scales_of_their_own_are_not_joined(one_gpu):
    """A row has one scale. Examples of vmap with the same scale are joined."""
    x, scales = jax.ShapeDtypeStruct((8, 1, 2047, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.float32)

    def run(x, scale):
        return glax.recurrent(x, x, x, gk=x, softmax_scale=scale, platform="pallas").output

    def said_of_all(f, *operands) -> str:
        """What is said of the examples together, not of each."""
        return str(glax.explain(jax.vmap(f), *operands)).split("for B8 ")[1]

    assert "examples have scales of their own" in said_of_all(run, x, scales)
    # The outer vmap maps no scale, and traces what jit holds again.
    nested = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    for staged in (jax.jit, jax.checkpoint):
        said = str(glax.explain(jax.vmap(staged(jax.vmap(run)), in_axes=(0, None)), nested, scales))
        assert "examples have scales of their own" in said.split("for B24 ")[1]
    assert "arrays as they are given" not in said_of_all(lambda x: run(x, 0.1), x)


@pytest.mark.fast
def test_residuals_say_whether_sequences_were_joined(one_gpu):
    """A pullback may be merged with others, under vmap, to a batch that could be joined where the forward's was not."""
    x = jax.ShapeDtypeStruct((1, 2047, 4, 128), jnp.bfloat16)

    def jacobian(x):
        out, pull = jax.vjp(lambda x: glax.recurrent(x, x, x, gk=x, platform="pallas").output, x)
        return jax.vmap(pull)(jnp.stack([out] * 8))

    shapes = jax.eval_shape(jacobian, x)
    assert shapes[0].shape == (8, *x.shape)


@pytest.mark.fast
@pytest.mark.parametrize("parts", [1, 2])
def test_explain_judges_by_the_config_that_runs(parts, one_gpu):
    """Sequences in whole are read in place as packed ones; sequences in two segments are copied. `overlay` counts as cfg does."""
    x, config = jax.ShapeDtypeStruct((8, 2047, 4, 128), jnp.bfloat16), HopperConfig(parts=parts)
    state = jax.ShapeDtypeStruct((8, 4, 128, 128), jnp.float32)

    def run(x, state, cfg=None):
        return glax.recurrent(x, x, x, gk=x, initial_state=state, platform="pallas", cfg=cfg).output

    said = [str(glax.explain(lambda x, state: run(x, state, config), x, state))]
    with glax.overlay({"chunked/pallas/gpu": config}):
        said.append(str(glax.explain(run, x, state)))
    for text in said:
        assert ("arrays as they are given" in text) == (parts == 2)
        assert ("results in arrays of T tokens" in text) == (parts == 1)

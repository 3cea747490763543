"""What the Hopper kernels support, why they copy arrays, and when they are chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
    pytest.skip("the Hopper kernels need JAX 0.12", allow_module_level=True)

import glax
from glax._src.core.backend import Backend
from glax._src.core.bind import bind
from glax._src.kernels.pallas_gpu import delta, registration
from glax._src.kernels.pallas_gpu.config import HopperConfig, delta_supports


@pytest.mark.fast
def test_explain_says_why_packed_sequences_are_copied(monkeypatch):
    """Packed sequences are one row unless states, or gradients of states, enter at boundaries."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    x, state = jax.ShapeDtypeStruct((1, 2048, 16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 16, 64, 64), jnp.float32)
    cuts = jax.ShapeDtypeStruct((3,), jnp.int32)

    def explained(field: str, initial_state=None) -> str:
        def loss(x, initial_state, cuts):
            found = glax.recurrent(
                x, x, x, g=x[..., 0], initial_state=initial_state, cu_seqlens=cuts, platform="pallas"
            )
            return getattr(found, field).astype(jnp.float32).sum()

        return str(glax.explain(jax.grad(loss), x, initial_state, cuts))

    assert "packed sequences as one row" not in explained("output")
    assert "packed sequences as one row: initial states enter at boundaries" in explained("output", state)
    assert "packed sequences as one row: the gradient of final states enters at boundaries" in explained("final_state")


@pytest.mark.fast
@pytest.mark.parametrize(
    "T,K,V,why",
    [
        (2048, 64, 128, None),
        (2048, 96, 192, None),
        (2048, 192, 384, None),
        (2049, 64, 128, "8 does not divide T=2049"),
        (2040, 200, 100, "128 does not divide key (K)=200, 128 does not divide value (V)=100"),
    ],
)
def test_explain_says_why_arrays_are_copied(T, K, V, why, monkeypatch):
    """Tiles have 8 rows and 64 columns, and blocks of per-key gates 64 or 128 channels."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    q, v = (jax.ShapeDtypeStruct((1, T, 16, width), jnp.bfloat16) for width in (K, V))
    said = str(glax.explain(lambda q, v: glax.recurrent(q, q, v, gk=q, platform="pallas").output, q, v))
    assert ("arrays as they are given" in said) == (why is not None)
    assert why is None or f"arrays as they are given: {why}, so they are copied and filled up" in said


def test_keys_wider_than_128_are_chosen(monkeypatch):
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    q, v, beta = (jax.ShapeDtypeStruct((4, 2048, 16, *width), jnp.bfloat16) for width in ((256,), (512,), ()))

    def said(**platform):
        return str(glax.explain(lambda q, v, beta: glax.delta_rule(q, q, v, beta, **platform)[0], q, v, beta))

    assert said().startswith("chunked/pallas/gpu") and said(platform="pallas").startswith("chunked/pallas/gpu")


def test_unsupported_calls_name_the_reason():
    x, beta = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))
    assert delta_supports(bind(x, x, x, g=beta, beta=beta)) is None
    assert delta_supports(bind(x, x, x, erase=x, write=x)) is None
    wide = jnp.zeros((1, 64, 1, 520), jnp.bfloat16)
    assert "value (V) up to 512 wide, got 64 and 520" in str(delta_supports(bind(x, x, wide, beta=beta)))
    assert "key (K) up to 256 wide and value (V) up to 512 wide, got 520" in str(
        delta_supports(bind(wide, wide, x, beta=beta))
    )
    keys = jnp.zeros((1, 64, 1, 136), jnp.bfloat16)
    assert "with per-key gates, with key (K) up to 128" in str(delta_supports(bind(keys, keys, x, gk=keys, beta=beta)))
    with pytest.raises(ValueError, match="columns must be 64 with beta"):
        delta.chunked(bind(x, x, x, beta=beta), HopperConfig(columns=128))
    state = jnp.zeros((2, 1, 64, 64))
    r = bind(x, x, x, beta=beta, initial_state=state, cu_seqlens=jnp.asarray([0, 30, 64]))
    for run in (delta.chunked, lambda r, config: delta.chunked_vjp(r, x, state, None, config)):
        with pytest.raises(ValueError, match="parts must be 1 for packed sequences with states"):
            run(r, HopperConfig(parts=2))


def test_what_is_supported_and_chosen():
    x, beta = jnp.zeros((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))
    r = bind(x, x, x, gk=x, beta=beta)
    assert delta_supports(r) is None
    assert registration.forward_priority(r) == registration.gradient_priority(r) == registration.FASTER
    packed = bind(x, x, x, gk=x, beta=beta, cu_seqlens=jnp.asarray(np.array([0, 10, 64]), jnp.int32))
    _, reasons = registration.forward_route(packed, config=HopperConfig())
    assert "each sequence begins a chunk" in reasons["packed sequences as one row"]
    with pytest.raises(ValueError, match="columns must be 64 with beta"):
        delta.chunked(r, HopperConfig(columns=128))


@pytest.fixture
def one_gpu(monkeypatch):
    """A process with one GPU, where no compiler spreads the sequences of a batch."""
    monkeypatch.setattr(Backend, "here", classmethod(lambda cls: Backend.GPU))
    monkeypatch.setattr(jax, "device_count", lambda: 1)


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

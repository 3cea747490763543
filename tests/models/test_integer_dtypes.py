"""Integers in every dtype, byte order and container, drawn by hypothesis: a call gives what int32 gives, or names the argument.

Longer, and with other draws:  GLAX_FUZZ_SEED=7 GLAX_FUZZ_TIMES=20 python -m pytest tests/models/test_integer_dtypes.py
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import glax
import glax.parallel
from glax.models import from_config, generate
from glax.nn import Attention, GatedLinearAttention
from glax.nn.losses import next_token_loss

SEED, TIMES = int(os.environ.get("GLAX_FUZZ_SEED", "0")), float(os.environ.get("GLAX_FUZZ_TIMES", "1"))
VOCABULARY = 300  # beyond uint8
# The dtypes that hold integers, in NumPy's spelling; ">" is the other byte order. The last two are no integers.
DTYPES = ("i1", "u1", "i2", "u2", "u4", "i8", "u8", ">i4", ">u2", ">i8", "?", "f4")
CONFIG = dict(
    model_type="gla",
    vocab_size=VOCABULARY,
    hidden_size=8,
    num_hidden_layers=2,
    num_heads=2,
    intermediate_size=8,
    attn=dict(layers=[1], num_heads=2),
)


@functools.cache
def model():
    return from_config(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def rows(*shape: int):
    return jax.random.normal(jax.random.key(sum(shape)), shape)


@functools.cache
def packed(T: int = 6):
    return [rows(1, T, 2, 4) + i for i in range(3)]


def loss_and_gradient(tokens, targets=None, segment_ids=None, pad_id=None):
    graph, params = nnx.split(model())

    def loss(params):
        return nnx.merge(graph, params).loss(tokens, targets, segment_ids, pad_id)

    value, gradient = jax.value_and_grad(loss)(params)
    return [value, *jax.tree.leaves(gradient)]


def prefill(tokens, slots, cu_seqlens):
    return model().prefill(tokens, model().initial_states(3, 8), slots, cu_seqlens)


def step(tokens, slots):
    pools = jax.tree.map(lambda x: x + 1, model().initial_states(3, 8))
    return model().step(tokens, pools, slots)


def verified(accepted, slots):
    q, k, v = packed()
    state = rows(4, 2, 4, 4)
    _, draft = glax.recurrent_verify(*(jnp.concatenate([x, x + 1]) for x in (q, k, v)), state=state, slots=slots)
    return glax.commit(state, draft, accepted)


def prefilled(slots, write_slots, state_slots, cu_seqlens):
    q, k, v = (rows(130, 1, 2) + i for i in range(3))
    more = dict(cu_seqlens=cu_seqlens, write_slots=write_slots, state_slots=state_slots, states_every=64)
    return glax.prefill_into(rows(6, 1, 2, 2), slots, q, k, v, **more)


def tokens(count: int, most: int = VOCABULARY):
    return st.lists(st.integers(0, most - 1), min_size=count, max_size=count)


def ids(count: int):
    return st.lists(st.sampled_from([0, 1, 2, 3]), min_size=count, max_size=count)


pads = st.sampled_from([None, -1, 0, 1, 255, 256, 257, 2**32, 2**32 + 1])
slots = st.permutations([0, 1, 2]).map(lambda x: x[:2]) | st.sampled_from([[-1, 1], [2, -1]])
cuts = st.sampled_from([[0, 2, 6], [0, 0, 5], [0, 3, 3]])


@dataclasses.dataclass(frozen=True)
class Call:
    """Hold a function of integers, the values of each array, by argument, the arrays' shapes, and other arguments."""

    run: Callable
    values: dict[str, st.SearchStrategy]
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 16


def recurrence(function, **fixed):
    q, k, v = packed()
    return functools.partial(function, q, k, v, g_gamma=jnp.full(2, -0.5), **fixed)


def layer(kind):
    return kind(8, num_heads=2, rngs=nnx.Rngs(0))


BT = (2, 4)
CALLS = dict(
    loss=Call(lambda tokens: model().loss(tokens), dict(tokens=tokens(8)), dict(tokens=BT)),
    targets=Call(
        loss_and_gradient,
        dict(tokens=tokens(8), targets=st.lists(st.integers(-2, VOCABULARY - 1), min_size=8, max_size=8)),
        dict(tokens=BT, targets=BT),
        count=8,
    ),
    packed_loss=Call(
        loss_and_gradient,
        dict(tokens=tokens(8), segment_ids=ids(8)),
        dict(tokens=BT, segment_ids=BT),
        dict(pad_id=pads),
        count=8,
    ),
    model=Call(
        lambda **arguments: model()(**arguments),
        dict(tokens=tokens(8), segment_ids=ids(8)),
        dict(tokens=BT, segment_ids=BT),
        dict(pad_id=pads),
    ),
    prefill=Call(prefill, dict(tokens=tokens(6), slots=slots, cu_seqlens=cuts)),
    step=Call(step, dict(tokens=tokens(2), slots=slots)),
    generate=Call(
        lambda **arguments: generate(model(), max_new_tokens=2, **arguments),
        dict(tokens=tokens(8), lengths=st.sampled_from([[1, 4], [3, 2]])),
        dict(tokens=BT),
    ),
    next_token_loss=Call(
        lambda targets: jax.value_and_grad(next_token_loss)(rows(2, 4, 8), rows(8, VOCABULARY), targets),
        dict(targets=st.lists(st.integers(-2, VOCABULARY - 1), min_size=8, max_size=8)),
        dict(targets=BT),
    ),
    recurrent=Call(recurrence(glax.recurrent), dict(cu_seqlens=cuts)),
    segments=Call(recurrence(glax.recurrent), dict(segment_ids=ids(6)), dict(segment_ids=(1, 6)), dict(pad_id=pads)),
    parallel=Call(
        recurrence(glax.parallel.recurrent, mesh=jax.make_mesh((1,), ("data",)), batch_axis="data"),
        dict(segment_ids=ids(6)),
        dict(segment_ids=(1, 6)),
    ),
    recurrent_step=Call(
        lambda slots: glax.recurrent_step(*(x[0, :2] for x in packed()), rows(4, 2, 4, 4), slots=slots),
        dict(slots=slots),
    ),
    prefill_into=Call(
        prefilled,
        dict(
            slots=slots,
            write_slots=st.permutations([3, 4]),
            state_slots=st.sampled_from([[5], [0]]),
            cu_seqlens=st.sampled_from([[0, 64, 120], [0, 10, 110]]),
        ),
    ),
    commit=Call(verified, dict(accepted=st.lists(st.integers(0, 6), min_size=2, max_size=2), slots=slots)),
    lightning=Call(
        lambda layer_idx: glax.lightning_attention(*packed(), layer_idx, 4), dict(layer_idx=st.integers(0, 4))
    ),
    attention=Call(
        lambda **arguments: layer(Attention)(rows(2, 4, 8), **arguments),
        dict(segment_ids=ids(8)),
        dict(segment_ids=BT),
        dict(pad_id=pads),
    ),
    gated_layer=Call(
        lambda **arguments: layer(GatedLinearAttention)(rows(2, 4, 8), **arguments),
        dict(segment_ids=ids(8)),
        dict(segment_ids=BT),
        dict(pad_id=pads),
    ),
    packed_attention=Call(
        lambda cu_seqlens: layer(Attention)(rows(1, 6, 8), cu_seqlens=cu_seqlens), dict(cu_seqlens=cuts)
    ),
)


TRACED = (
    "loss",
    "next_token_loss",
    "segments",
    "attention",
)  # calls that compile fast enough to be traced in each dtype


def converted(values, dtype: str, container: str):
    """Return the values in the dtype, as an array of NumPy or of JAX, or with a mask. Return None where they do not fit."""
    exact = np.asarray(values)
    x = exact.astype(dtype)
    if [int(i) for i in x.ravel()] != exact.ravel().tolist():
        return None
    if container == "masked":
        return np.ma.masked_array(x, mask=np.zeros(x.shape, bool))
    return jnp.asarray(x) if container in ("jax", "traced") and x.dtype.isnative else x


def check(name: str, values: dict, dtypes: dict, container: str, more: dict):
    call = CALLS[name]
    plain = {
        argument: np.asarray(x, np.int32).reshape(call.shapes.get(argument, np.shape(x)))
        for argument, x in values.items()
    }
    given = {argument: converted(x, dtypes[argument], container) for argument, x in plain.items()}
    given = {argument: plain[argument] if x is None else x for argument, x in given.items()}
    if not all(x.dtype.isnative for x in given.values()) and container == "traced":
        container = "numpy"  # JAX itself refuses another byte order as an argument of jit
    want = call.run(**plain, **more)
    try:
        run = functools.partial(call.run, **more)
        got = jax.jit(run)(**given) if container == "traced" else run(**given)
    except (TypeError, ValueError) as error:
        named = [argument for argument in given if str(error).startswith(argument)]
        assert named, f"the error names no argument: {error}"
        dtype = given[named[0]].dtype
        refused = dtype.kind in "bf" or not dtype.isnative or container == "masked"
        assert refused, f"an integer dtype is refused: {error}"
        return
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_int32_gives_or_names_the_argument(name):
    call = CALLS[name]
    draws = dict(
        values=st.fixed_dictionaries(call.values),
        dtypes=st.fixed_dictionaries({argument: st.sampled_from(DTYPES) for argument in call.values}),
        container=st.sampled_from(
            ["numpy", "jax", "traced", "masked"] if name in TRACED else ["numpy", "jax", "masked"]
        ),
        more=st.fixed_dictionaries(call.more),
    )
    options = dict(deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck))

    @seed(SEED)
    @settings(max_examples=max(1, round(call.count * TIMES)), **options)
    @given(**draws)
    def drawn(**example):
        check(name, **example)

    drawn()


READS = dict(
    model=lambda tokens: model()(tokens),
    loss=lambda tokens: model().loss(tokens),
    step=lambda tokens: model().step(tokens[0], model().initial_states(4, 4))[0],
    prefill=lambda tokens: prefill(tokens[0], np.array([0, 1]), np.array([0, 3, 4]))[0],
    targets=lambda tokens: next_token_loss(rows(2, 4, 8), rows(8, VOCABULARY), tokens),
)


@seed(SEED)
@settings(max_examples=max(1, round(24 * TIMES)), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(list(READS)),
    st.sampled_from([-1, -2, VOCABULARY, VOCABULARY + 1, 2**15, 2**31, 2**32]),
    st.sampled_from(["i1", "i2", "u2", "i4", "u4", "i8", "u8"]),
    st.sampled_from(["numpy", "jax", "traced"]),
    st.integers(0, 3),
)
def test_what_is_no_token_is_an_error_or_nan(name, token, dtype, container, place):
    limits = np.iinfo(dtype)
    if not limits.min <= token <= limits.max or (name == "targets" and token < 0):
        return
    tokens = np.ones((2, 4), dtype)
    tokens[0, place] = token
    if container == "traced":
        if limits.bits < 64:  # JAX drops the upper bits of others before glax reads them
            got = np.asarray(jax.jit(READS[name])(tokens))
            assert np.isnan(got).any(), "another token is read"
        return
    if container == "jax" and limits.bits == 64:
        return
    with pytest.raises(ValueError, match=r"(tokens|targets) must"):
        READS[name](jnp.asarray(tokens) if container == "jax" else tokens)

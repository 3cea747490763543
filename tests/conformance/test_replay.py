"""State pools with replay rings: steps, drafts and prompts against the token loop in float64."""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from glax import serving
from glax._src.core.bind import bind
from glax._src.core.decay import USUAL_FORMS
from glax._src.core.recurrence import Outputs
from glax._src.core.registry import Backend, KernelSpec, Platform, kernel_registry
from glax._src.core.stored_states import CompactStates
from glax._src.kernels.cpu.library import missing
from glax._src.kernels.xla.recurrent import recurrent
from glax._src.serving import replayed_pool
from glax._src.serving.state_pool import put, take
from glax.testing.cases import EXTREME, FORMS
from glax.testing.reference import reference
from tests.close import assert_close, assert_outputs_close
from tests.delta_cases import DeltaCase, Draw

B, T, DRAFTS = 3, 26, 3
SLOTS = np.array([4, 0, 2], np.int32)
NO_TOKENS = ("g_gamma", "initial_state")
# The argument of the delta rule, and whether it erases before the decay and along another key.
ERASURES = {
    "": ((), False, False),
    "+beta": (("beta",), False, False),
    "+erase": (("erase",), True, False),
    "+erase+write": (("erase", "write"), False, False),
    "+erase+along": (("erase",), False, True),
    "+erase+write+along": (("erase", "write"), True, True),
}


def case_of(form: str, erasure: str = "", **changes) -> DeltaCase:
    names, before, along = ERASURES[erasure]
    sizes = dict(B=B, T=T, heads=(4, 2, 1), K=6, V=5, before_decay=before, along=along)
    return DeltaCase(form + erasure, FORMS[form], names, **sizes | changes)


def pool_of(case: DeltaCase, replay: int, drafts: int = DRAFTS, **changes) -> serving.StatePool:
    layout = dict(replay=replay, drafts=drafts, form=case.name, token_dtype=case.dtype)
    return serving.StatePool(6, case.heads, (case.K, case.V), **layout | changes)


def flags(case: DeltaCase) -> dict:
    return dict(erase_before_decay=True) if case.before_decay else {}


def rows(inputs: dict, at: np.ndarray, count: int | None = None, valid=None) -> dict:
    """The `count` tokens of each sequence from at[b], [B, count, ...], or one token [B, ...]; NaN where they are not valid."""
    found = {}
    for name, x in inputs.items():
        if name in NO_TOKENS:
            if name == "g_gamma":
                found[name] = x
            continue
        places = np.minimum(at[:, None] + np.arange(count or 1), x.shape[1] - 1)
        y = np.array(x)[np.arange(B)[:, None], places]
        if valid is not None:
            y[~valid] = np.nan
        found[name] = jnp.asarray(y if count else y[:, 0], x.dtype)
    return found


def served(case: DeltaCase, inputs: dict, pool, seed: int) -> tuple[np.ndarray, serving.StatePool]:
    """The outputs of all tokens, in steps and drafts at random, and the pool: sequences go on at a pace of their own."""
    step, verify, commit = programs(case.before_decay)
    rng, at, T = np.random.default_rng(seed), np.zeros(B, int), case.T
    output = np.zeros((B, T, max(case.heads), case.V), np.float64)
    while (at < T).any():
        active = (rng.random(B) < 0.7) & (at < T)
        slots = jnp.asarray(np.where(active, SLOTS, -1))
        if pool.layout.drafts and rng.random() < 0.4:
            accepted = np.minimum(rng.integers(0, DRAFTS + 1, B), T - at) * active
            tokens = rows(inputs, at, DRAFTS, np.arange(DRAFTS) < accepted[:, None])
            got, pool = verify(pool, tokens, slots)
            pool = commit(pool, jnp.asarray(accepted), slots)
        else:
            accepted = active.astype(int)
            got, pool = step(pool, rows(inputs, at, valid=active[:, None]), slots)
            got = got[:, None]
        for b in range(B):
            output[b, at[b] : at[b] + accepted[b]] = np.asarray(got[b, : accepted[b]], np.float64)
        at += accepted
    return output, pool


@functools.cache
def programs(before_decay: bool):
    own = dict(erase_before_decay=True) if before_decay else {}
    return (
        jax.jit(lambda pool, tokens, slots: pool.step(**tokens, slots=slots, **own)),
        jax.jit(lambda pool, tokens, slots: pool.verify(**tokens, slots=slots, **own)),
        jax.jit(lambda pool, accepted, slots: pool.commit(accepted, slots=slots)),
    )


def assert_served(case: DeltaCase, draw: Draw, replay: int, **changes):
    inputs = case.inputs(draw)
    first = inputs["initial_state"]
    pool = pool_of(case, replay, **changes)
    pool = pool.replace(states=pool.states.at[SLOTS].set(first.astype(pool.states.dtype)))
    # What an earlier request left in a ring is not read.
    pool = pool.replace(ring=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool.ring))
    r = bind(**inputs, **flags(case))
    want = reference(r)
    output, pool = served(case, inputs, pool, seed=0)
    got = Outputs(output.astype(case.dtype), pool.states_of(jnp.asarray(SLOTS)))
    assert_outputs_close(r, got, want, extreme=draw.strength in EXTREME)
    flushed = pool.flush()
    assert not flushed.length.any()
    assert_close("flushed", flushed.states[SLOTS], np.asarray(got.final_state), 1e-6)
    np.testing.assert_array_equal(flushed.states[np.array([1, 3, 5])], 0)


DRAWS = (Draw(), Draw("-inf on 5%", "to 2"), Draw("-1e-6", "1"))


@pytest.mark.parametrize("erasure", ERASURES)
@pytest.mark.parametrize("form", USUAL_FORMS)
def test_steps_and_drafts_are_the_token_loop(form, erasure):
    for draw in DRAWS[: 3 if form in ("key", "head") else 2]:
        assert_served(case_of(form, erasure), draw, replay=5)


@pytest.mark.parametrize("form", USUAL_FORMS)
def test_steps_by_parts_are_the_token_loop(form):
    """Where no kernel takes states and rings, as under a gradient."""
    with kernels_on_a_pool():
        for erasure in ERASURES:
            assert_served(case_of(form, erasure, T=12), DRAWS[1], replay=5)


native = pytest.mark.skipif(missing("glax_replay") is not None, reason=f"needs the native library: {missing()}")


@native
@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_a_step_is_one_native_kernel(dtype):
    case = case_of("key", "+beta", dtype="bfloat16" if dtype == "bfloat16" else "float32")
    pool, token = pool_of(case, 4, dtype=dtype), rows(case.inputs(Draw()), np.zeros(B, int))
    (decision,) = glax.explain(lambda pool: pool.step(**token, slots=jnp.asarray(SLOTS)), pool)
    assert decision.kernel == "recurrent.replay/cpp/cpu"


@native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("erasure", ["", "+erase+write+along"])
def test_a_native_step_with_states_of_sixteen_bits(dtype, erasure):
    """Beside the steps by parts, which read and round the same states."""
    case = case_of("key+value", erasure, T=9)
    inputs, found = case.inputs(Draw()), []
    for by_parts in (False, True):
        with kernels_on_a_pool() if by_parts else contextlib.nullcontext():
            pool, outputs = pool_of(case, 4, dtype=dtype), []
            states = inputs["initial_state"].astype(dtype)
            pool = pool.replace(states=pool.states.at[SLOTS].set(states))
            for t in range(case.T):
                token = rows(inputs, np.full(B, t))
                output, pool = programs(case.before_decay)[0](pool, token, jnp.asarray(SLOTS))
                outputs.append(output)
            found.append((np.asarray(outputs), np.asarray(pool.states_of())))
    bar = dict(bfloat16=3.5e-3, float16=1e-3)[dtype]
    for name, got, want in zip(("output", "states"), *found, strict=True):
        assert_close(name, got, want, bar)


@pytest.mark.parametrize("replay", [1, 2, 9, 40])
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_any_length_of_the_ring(replay, drafts):
    assert_served(case_of("key", "+beta"), Draw(), replay, drafts=drafts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("erasure", ["", "+beta"])
def test_tokens_of_sixteen_bits(dtype, erasure):
    assert_served(case_of("key", erasure, dtype=dtype), Draw(), replay=4)


@pytest.mark.fast
@pytest.mark.parametrize("form", ["constant", "key", "head+beta"])
def test_errors_do_not_grow_with_the_tokens(form):
    """Equal gates near 0 must not round alike in every state that is written."""
    decay, _, erasure = form.partition("+")
    case = case_of(decay, "+" + erasure if erasure else "", B=1, T=2600, heads=(1, 1, 1), K=8, V=8)
    for draw in (Draw("-1e-6", "1e-3"), Draw("mild")):
        inputs = case.inputs(draw)
        pool = serving.StatePool(1, 1, 8, replay=8, form=case.name)
        pool = pool.replace(states=inputs["initial_state"])
        r = bind(**inputs)
        final, output = decoded(case.gates == ("g_gamma",), pool, inputs)
        got = Outputs(jnp.moveaxis(output, 0, 1), final.states_of())
        assert_outputs_close(r, got, reference(r))


@functools.partial(jax.jit, static_argnums=0)
def decoded(is_constant: bool, pool, inputs):
    whole = dict(g_gamma=inputs["g_gamma"]) if is_constant else {}
    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items() if name not in NO_TOKENS}
    return jax.lax.scan(lambda pool, token: pool.step(**token, **whole)[::-1], pool, tokens)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["key", "head+beta", "none+beta"])
def test_states_of_8_bits_do_not_drift(name, dtype):
    assert_no_drift(name, dtype)


def assert_no_drift(name: str, dtype: str, T: int = 600, **changes):
    """Outputs are off by the rounding of one read, and the state in full by far less, however often it was written."""
    decay, _, erasure = name.partition("+")
    sizes = dict(B=2, T=T, heads=(2, 2, 2), K=32, V=32)
    case = case_of(decay, "+" + erasure if erasure else "", **sizes)
    inputs = case.inputs(Draw("mild"))
    pool = serving.StatePool(2, 2, 32, dtype, **dict(replay=4) | changes, form=name)
    first = inputs.pop("initial_state")
    pool = pool.replace(states=CompactStates.of(first, dtype))
    final, output = decoded(False, pool, inputs)
    r = bind(**inputs, initial_state=first)
    want = reference(r)
    once, whole = dict(int8=(0.02, 2e-3), float8_e4m3fn=(0.06, 2e-2))[dtype]
    if "beta" in name:  # what a token erases is read from the rounded state, and so is written with its error
        whole = once
    for half in (slice(0, T // 2), slice(T // 2, T)):
        assert_close("output", np.moveaxis(output, 0, 1)[:, half], want.output[:, half], once)
    assert_close("state", final.states_of(), want.final_state, whole)


@contextlib.contextmanager
def kernels_on_a_pool(**kernels):
    """Kernels, functions (r, pool, slots) by their roles, are chosen for every pool; without one for steps of rings, these go
    by parts. Yields the calls that each role had while tracing."""
    calls = collections.Counter()

    def counted(role, run):
        def call(r, pool, slots, *, config):
            calls[role] += 1
            return run(r, pool, slots)

        return call

    jax.clear_caches()
    programs.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if "replay" not in kernels:
            patch.setattr(replayed_pool, "replay_kernel", lambda r, pool, rounding_key: None)
        for role, run in kernels.items():
            spec = KernelSpec(
                f"recurrent.{role}", Platform.XLA, Backend.ANY, counted(role, run), priority=lambda r: 99, erases=True,
                erases_before_decay=True, erases_along=True,
            )  # fmt: skip
            patch.setitem(kernel_registry.kernels, spec.name, spec)
        yield calls
    jax.clear_caches()
    programs.cache_clear()


@pytest.fixture
def pooled():
    """Kernels that read and advance states in the pool, as those of CUDA do, here by XLA."""

    def step(r, pool, slots):
        used = slots >= 0
        rows = jnp.where(used, slots, len(pool))
        output, final = recurrent(r.replace(initial_state=take(pool, rows)), config=None)
        return jnp.where(used[:, None, None, None], output, 0), put(pool, rows, final)

    def verify(r, pool, slots):
        return step(r, pool, slots)[0]

    with kernels_on_a_pool(step=step, verify=verify) as calls:
        yield calls


@pytest.mark.parametrize(("form", "erasure"), [
    ("none", ""), ("constant", "+beta"), ("key", ""), ("head", "+erase"), ("value", "+erase+write"), ("key+value", "+beta"),
    ("key", "+erase+along"), ("head", "+erase+write+along"),
])  # fmt: skip
def test_kernels_on_a_pool_read_and_advance_the_states(pooled, form, erasure):
    for draw in DRAWS[:2]:
        assert_served(case_of(form, erasure), draw, replay=5)
    assert pooled["verify"] and pooled["step"]


def test_kernels_on_a_pool_read_with_a_bonus(pooled):
    case = case_of("key", K=16, V=8)
    inputs, bonus = case.inputs(Draw()), jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
    pool, states = pool_of(case, 4), jnp.zeros((6, 4, 16, 8))
    for t in range(6):
        token = rows(inputs, np.full(B, t))
        output, pool = pool.step(**token, slots=jnp.asarray(SLOTS), bonus=bonus)
        want, states = glax.recurrent_step(**token, state=states, slots=jnp.asarray(SLOTS), bonus=bonus)
        assert_close("output", output, np.asarray(want), 1e-5)
    assert pooled["verify"]

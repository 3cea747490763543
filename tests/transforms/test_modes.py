"""Every public function, forward and gradient, under the options that JAX users hold their own code to."""

import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import glax
import glax.models
from glax import parallel
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from glax._src.kernels.xla.chunk_scan import ChunkedConfig
from glax.nn import GatedLinearAttention
from glax.nn.losses import next_token_loss
from tests.cases import FORMS, Case, cotangents, inputs, recurrence
from tests.close import assert_close
from tests.compiling import quick_jit

SMALL = Case("", B=2, T=10, heads=(2, 1, 2), K=4, V=3)
PACKED = dict(cuts=(0, 0, 4, 9), T=10, B=1)
HELD_TO = dict(
    strict=functools.partial(jax.numpy_dtype_promotion, "strict"),
    ranks=functools.partial(jax.numpy_rank_promotion, "raise"),
)


def total(results):
    return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(results))


def gradient(f, arrays: dict):
    return jax.value_and_grad(lambda arrays: total(f(**arrays)))(arrays)


def solving(dtype: str, platform: str, form: str, packed: bool, **options):
    """recurrent with its gradient."""
    more = PACKED if packed else {}
    case = Case("", **vars_of(SMALL) | more, gates=FORMS[form], dtype=dtype, state_dtype=dtype, gate_dtype=dtype)
    arrays, cuts = inputs(case, "log-sigmoid"), jnp.array(case.cuts) if packed else None
    if packed:
        arrays = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0, x), arrays)
    return functools.partial(
        gradient, functools.partial(glax.recurrent, cu_seqlens=cuts, platform=platform, **options)
    ), arrays


def vars_of(case: Case) -> dict:
    return dict(B=case.B, T=case.T, heads=case.heads, K=case.K, V=case.V)


def serving(dtype: str, platform: str):
    """A prompt into a pool, a token, a draft and what of it is accepted, with the gradient."""
    case = Case("", **vars_of(SMALL), gates=FORMS["key"], dtype=dtype, state_dtype=None)
    arrays = inputs(case, "log-sigmoid") | dict(pool=jnp.ones((5, 2, 4, 3), dtype))
    slots = jnp.array([3, 1])

    def serve(pool, **tokens):
        first, pool = glax.prefill_into(pool, slots, **tokens, fresh=jnp.array([True, False]), platform=platform)
        one = {name: x[:, 0] for name, x in tokens.items()}
        second, pool = glax.recurrent_step(**one, state=pool, slots=slots, platform=platform)
        own, states = glax.recurrent_step(**one, state=pool[slots], platform=platform)
        third, draft = glax.recurrent_verify(**tokens, state=pool, slots=slots, platform=platform)
        return first, second, own, states, third, glax.commit(pool, draft, jnp.array([7, 0]))

    return functools.partial(gradient, serve), arrays


def variants(dtype: str):
    case = Case("", **vars_of(SMALL), gates=FORMS["key"], dtype=dtype, gate_dtype=dtype, state_dtype=None)

    def every(query, key, value, gk):
        tensors, g = (query, key, value), gk[..., 0]
        return (
            glax.retention(*tensors),
            glax.lightning_attention(*tensors, 1, 4),
            glax.simple_gla(*tensors, g, softmax_scale=0.5),
            jax.vmap(lambda query: glax.recurrent_gla(query, key, value, gk))(query[None]),
            glax.recurrent_attention(*tensors, g=g, gk=gk, g_gamma=-jnp.ones(2), softmax_scale=jnp.float32(0.5)),
        )

    return functools.partial(gradient, every), inputs(case, "log-sigmoid")


def second_derivative(dtype: str):
    case = Case("", **vars_of(SMALL), gates=("gk", "gv"), dtype=dtype, state_dtype=None)

    def twice(**arrays):
        return gradient(glax.recurrent, arrays)[1]

    return functools.partial(gradient, twice), inputs(case, "log-sigmoid")


def spread(dtype: str):
    mesh = jax.make_mesh((2, 2), ("h", "s"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    case = Case("", **vars_of(SMALL) | dict(T=9), gates=("gk",), dtype=dtype, state_dtype=dtype)
    f = functools.partial(parallel.recurrent, mesh=mesh, head_axis="h", sequence_axis="s")
    return functools.partial(gradient, f), inputs(case, "log-sigmoid")


def layer(dtype: str):
    graph, state = nnx.split(GatedLinearAttention(8, num_heads=2, num_kv_heads=1, dtype=dtype, rngs=nnx.Rngs(0)))
    x = inputs(Case("", B=2, T=6, heads=(1, 1, 1), K=8, dtype=dtype, gates=(), state_dtype=None), "0")["query"][:, :, 0]

    def run(state, x):
        own = nnx.merge(graph, state)
        pool = own.initial_state(4)
        slots = jnp.array([2, 0])
        _, filled = own.prefill_into(x[0], pool, slots, jnp.array([0, 3, 6]))
        return own(x), own.step(x[:, 0], own.initial_state(2)), own.step(x[:, 0], filled, slots)

    return functools.partial(gradient, run), dict(state=state, x=x)


def segmented(platform: str | None, every: int | None):
    """Segments with padding, and states along the way."""
    x = jnp.sin(jnp.arange(2 * 128 * 2 * 4.0)).reshape(2, 128, 2, 4)
    ids = jnp.repeat(jnp.array([[1, 2, 0], [3, 0, 3]]), jnp.array([50, 30, 48]), axis=1, total_repeat_length=128)

    def call(x):
        return glax.recurrent(x, x, x, gk=-abs(x), segment_ids=ids, pad_id=0, states_every=every, platform=platform)

    return functools.partial(gradient, call), dict(x=x)


def packed_states():
    """Packed prompts from a pool, with the states along the way."""
    x, slots = jnp.sin(jnp.arange(128 * 2 * 4.0)).reshape(128, 2, 4), jnp.array([2, 0])
    cuts, written = jnp.array([0, 70, 128]), jnp.array([1, -1])

    def call(x, pool):
        states = dict(states_every=64, state_slots=written)
        return glax.prefill_into(pool, slots, x, x, x, gk=-abs(x), cu_seqlens=cuts, **states)

    return functools.partial(gradient, call), dict(x=x, pool=jnp.ones((3, 2, 4, 4)))


def loss():
    """The loss of rows, of which some do not count."""
    targets = jnp.array([[0, 3, -1], [4, -1, 1]])
    return functools.partial(gradient, functools.partial(next_token_loss, targets=targets)), dict(
        x=jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4), kernel=jnp.cos(jnp.arange(20.0)).reshape(4, 5)
    )


SEGMENTED = (("native", "cpp", None), ("xla", "xla", None), ("states", None, 64))
CALLS = {
    f"{form}{'-packed' * packed}-{name}": functools.partial(solving, "bfloat16", platform, form, packed, **options)
    for form, packed in (
        ("none", False),
        ("constant", True),
        ("head", False),
        ("key+value", False),
        ("key+value", True),
    )
    for name, platform, options in (
        ("native", "cpp", {}),
        ("recurrent", "xla", {}),
        ("chunked", None, dict(cfg=ChunkedConfig(4))),
    )
}
CALLS |= {f"segments-{name}": functools.partial(segmented, platform, every) for name, platform, every in SEGMENTED}
CALLS |= {f"serving-{platform}": functools.partial(serving, "bfloat16", platform) for platform in ("cpp", "xla")}
CALLS |= {f.__name__: functools.partial(f, "bfloat16") for f in (variants, second_derivative, spread, layer)}
CALLS |= dict(packed_states=packed_states, loss=loss)


def program(f, *operands) -> str:
    """What is traced, without the addresses and names that differ from trace to trace."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*operands)))


@pytest.mark.fast
@pytest.mark.parametrize("call", CALLS)
def test_promotion_is_said(call):
    """The program is the one that JAX's defaults give: every dtype and rank that is promoted is so by glax's own saying."""
    f, operands = CALLS[call]()
    usual = program(f, operands)
    for name, option in HELD_TO.items():
        with option():
            assert program(f, operands) == usual, name


FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_models_say_what_they_promote(name):
    """The loss of packed rows, and a step in pools, of every type of model."""
    tokens, ids = jnp.arange(12).reshape(2, 6), jnp.array([[1, 1, 0, 2, 2, 0]] * 2)

    def calls():
        model = glax.models.from_config(FIXTURES / name, rngs=nnx.Rngs(0))
        return model.loss(tokens, None, ids, 0), model.step(tokens[:, 0], model.initial_states(3, 6), jnp.array([2, 0]))

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        loss, (logits, _) = jax.eval_shape(calls)
    assert loss.shape == () and logits.shape[0] == 2


RUN = {
    "native": functools.partial(solving, "float32", "cpp", "key+value", True),
    "recurrent": functools.partial(solving, "float32", "xla", "key+value", False),
    "chunked": functools.partial(solving, "float32", None, "head", True, cfg=ChunkedConfig(4)),
    "serving": functools.partial(serving, "float32", "cpp"),
}


@functools.cache
def usually(call: str):
    f, operands = RUN[call]()
    return quick_jit(f)(operands)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("option", "call"),
    [
        *itertools.product(["jax_enable_x64", "jax_debug_nans"], RUN),
        *itertools.product(["jax_disable_jit"], ["native", "chunked", "serving"]),
    ],
)
def test_results_are_as_ever(option, call):
    f, operands = RUN[call]()
    want = usually(call)
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        got = f(operands) if option == "jax_disable_jit" else quick_jit(f)(operands)
    finally:
        jax.config.update(option, before)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert_close(option, x, y, 2e-6)


@pytest.mark.fast
@pytest.mark.parametrize("form", ["head", "key"])
def test_kernels_of_accelerators_are_traced_as_ever(form):
    """Also where jax_enable_x64 makes an index of 64 bits of every Python number."""
    load_kernels()
    case = Case("", T=300, heads=(2, 1, 2), K=64, V=64, gates=FORMS[form], dtype="bfloat16", cuts=(0, 0, 100, 250))
    r = recurrence(case, "log-sigmoid")
    given = cotangents(case, r)
    kernels = [kernel_registry.kernels[f"chunked{gradient}/pallas/tpu"] for gradient in ("", ".vjp")]
    for kernel in kernels:
        operands = (r, *given) if kernel.is_gradient else (r,)
        run = functools.partial(kernel.run, config=kernel.config.heuristic(r))
        usual = program(run, *operands)
        for option in (*HELD_TO.values(), functools.partial(jax.enable_x64, True)):
            with option():
                assert program(run, *operands) == usual


@pytest.mark.fast
@pytest.mark.parametrize("platform", ["cpp", "xla"])
def test_resets_are_no_infinities_of_the_caller(platform):
    """Gates of -inf at resets are glax's own, so jax_debug_infs passes them, also where nothing is jitted."""
    f, operands = segmented(platform, None)
    want = f(operands)
    with jax.debug_infs(True):
        got = f(operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("jax_debug_infs", x, y, 2e-6)

"""A forward's residuals reach its gradient for the same sequence and head, through every transformation."""

import contextlib
import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax
from glax import parallel
from glax._src.core.recurrence import Residuals, spread_heads, sum_heads
from glax._src.core.registry import kernel_registry
from glax._src.kernels import load_kernels
from tests.cases import Case, inputs
from tests.close import assert_close
from tests.compiling import quick_jit

CASE = Case("", B=4, T=40, heads=(4, 4, 4), gates=("gk",), K=6, V=5)
ARGUMENTS = inputs(CASE, "log-sigmoid")


@contextlib.contextmanager
def saving_kernel():
    """Register a kernel of highest priority that saves a mark of every sequence and head, and a gradient that is wrong where it
    receives another mark. Yields a list of whether each gradient received residuals."""
    load_kernels()
    forward, gradient = (kernel_registry.kernels[f"chunked{end}/xla/any"] for end in ("", ".vjp"))
    received = []

    def marks(r):
        return spread_heads(r.k, r.num_heads).astype(jnp.float32).sum((1, 3))[:, None]  # [B, 1, H]

    def forward_with_residuals(r, *, config):
        states = jnp.broadcast_to(marks(r)[..., None, None], (*marks(r).shape, 3, 2))
        return forward.run(r, config=config), Residuals(states, (marks(r) > 0).astype(jnp.int32))

    def run_vjp(r, d_output, d_final, residuals=None, *, config):
        received.append(residuals is not None)
        d = gradient.run(r, d_output, d_final, config=config)
        if residuals is None:
            return d
        right = (jnp.abs(residuals.states - marks(r)[..., None, None]).max((3, 4)) < 1e-4) & (
            residuals.out_of_range == (marks(r) > 0)
        )
        off = sum_heads(jnp.where(right, 0.0, 1.0), r.q.shape[2])[..., None]
        return d.replace(q=d.q + off.astype(d.q.dtype))

    added = [
        dataclasses.replace(
            forward, algorithm="saving", forward_with_residuals=forward_with_residuals, priority=lambda r: 1000
        ),
        dataclasses.replace(gradient, algorithm="saving.vjp", run=run_vjp, priority=lambda r: 1000),
    ]
    kernel_registry.kernels |= {spec.name: spec for spec in added}
    jax.clear_caches()  # what was traced with other kernels
    try:
        yield received
    finally:
        for spec in added:
            del kernel_registry.kernels[spec.name]
        jax.clear_caches()


def loss(arguments, run=glax.recurrent, **options):
    output, state = run(**arguments, **options)
    return (output**2).sum() + (state**2).sum()


def compare(f, *arguments, placed=None, using=contextlib.nullcontext, bar=2e-6):
    """Compare f with the saving kernel, on `placed` and `using` a mesh if given, to f without it."""
    want = quick_jit(lambda *x: f(*x))(*arguments)
    with saving_kernel() as received, using():
        got = quick_jit(lambda *x: f(*x))(*(arguments if placed is None else placed))
    assert received and all(received)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("residuals", x, np.asarray(y), bar)


@pytest.mark.fast
def test_gradient_checkpoint_and_second_derivative():
    value = functools.partial(loss, platform="xla")
    compare(jax.value_and_grad(value), ARGUMENTS)
    compare(jax.grad(jax.checkpoint(value)), ARGUMENTS)
    few = {name: x[:1, :5] if name != "initial_state" else x[:1] for name, x in ARGUMENTS.items()}
    compare(jax.grad(lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(value)(x)))), few, bar=2e-5)


def test_no_residuals_without_a_gradient():
    with saving_kernel() as received:
        output, _ = quick_jit(functools.partial(glax.recurrent, platform="xla"))(**ARGUMENTS)
    assert not received and output.shape == ARGUMENTS["value"].shape


@pytest.mark.parametrize("cuts", [None, ((0, 7, 40), (0, 0, 40), (3, 3, 9))], ids=["batch", "packed"])
def test_vmap(cuts):
    """Examples merge into the batch, or, packed, run one after another."""
    if cuts is None:
        stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 2]), ARGUMENTS)
        compare(jax.vmap(jax.grad(functools.partial(loss, platform="xla"))), stacked)
        return
    rows = {name: x[:3, None] for name, x in ARGUMENTS.items() if name != "initial_state"}

    def packed(arguments, cuts):
        return loss(arguments, cu_seqlens=cuts, platform="xla")

    compare(jax.vmap(jax.grad(packed)), rows, jnp.asarray(cuts))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_spread_over_devices(spec, kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    state = P("x") if spec == P("x") else P(None, "x")
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, state if name == "initial_state" else spec))
        for name, x in ARGUMENTS.items()
    }
    using = functools.partial(jax.set_mesh, mesh) if kind is AxisType.Explicit else contextlib.nullcontext
    compare(jax.grad(functools.partial(loss, platform="xla")), ARGUMENTS, placed=(placed,), using=using)


def test_spread_sequence():
    mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Auto,))
    run = functools.partial(parallel.recurrent, mesh=mesh, sequence_axis="s", platform="xla")
    compare(jax.grad(functools.partial(loss, run=run)), ARGUMENTS)


# ---- names for jax.checkpoint ----------------------------------------------------------------------------------------

RESIDUALS = ("glax_states", "glax_out_of_range")
SHAPES = dict(glax_output="f32[2,256,2,16]", glax_states="f32[2,4,2,16,16]", glax_out_of_range="i32[2,4,2]")
LONG = Case("", B=2, T=256, gates=("gk",), K=16, V=16, state_dtype=None)  # with states between its chunks


@functools.cache
def plain_gradient() -> dict[str, jax.Array]:
    return quick_jit(jax.grad(lambda a: jnp.sin(glax.recurrent(**a, platform="xla").output).sum()))(
        inputs(LONG, "mild")
    )


def kernels_in(jaxpr) -> int:
    """The number of kernels that a program calls."""
    inner = [x for eqn in jaxpr.eqns for p in eqn.params.values() for x in jax.tree.leaves(p, is_leaf=has_equations)]
    called = sum(eqn.primitive.name == "glax_kernel" for eqn in jaxpr.eqns)
    return called + sum(kernels_in(getattr(x, "jaxpr", x)) for x in inner if has_equations(x))


def has_equations(x) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("names", "kernels", "saved"),
    [
        (("glax_output", *RESIDUALS), 2, {"glax_output", *RESIDUALS}),  # nothing is computed again
        (("glax_output",), 3, {"glax_output"}),  # the forward, for its residuals
        (RESIDUALS, 3, set(RESIDUALS)),  # the forward, for its output
        ((), 3, set()),
    ],
)
def test_policies_save_by_name(names, kernels, saved):
    """A layer whose output is needed again: the number of kernels in its gradient, and what is saved beside its arguments."""
    arguments = inputs(LONG, "mild")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(arguments):
        return jnp.sin(glax.recurrent(**arguments, platform="xla").output)

    gradient = jax.grad(lambda arguments: layer(arguments).sum())
    assert kernels_in(jax.make_jaxpr(gradient)(arguments).jaxpr) == kernels
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(layer, arguments)
    lines = [line for line in printed.getvalue().splitlines() if "from the argument" not in line]
    assert sorted(line.split()[0] for line in lines) == sorted(SHAPES[name] for name in saved)
    want = plain_gradient()
    for name, x in quick_jit(gradient)(arguments).items():
        assert_close(f"d {name}", x, np.asarray(want[name]), 1e-6)


@pytest.mark.fast
def test_offloading_by_name():
    """States go to the host's memory and come back."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["glax_output"],
        names_which_can_be_offloaded=list(RESIDUALS),
        offload_src="device",
        offload_dst="pinned_host",
    )
    arguments = inputs(LONG, "mild")
    layer = jax.checkpoint(lambda a: jnp.sin(glax.recurrent(**a, platform="xla").output), policy=policy)
    program = jax.make_jaxpr(jax.grad(lambda a: layer(a).sum()))(arguments)
    assert kernels_in(program.jaxpr) == 2
    assert str(program).count("device_put") >= 2 * len(RESIDUALS)

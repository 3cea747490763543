"""The delta rule over shards of the sequence by the TPU kernels: in their interpreter on simulated devices, and lowered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import glax
from glax import parallel
from tests.close import assert_close
from tests.compiling import quick_jit
from tests.conformance.test_pallas_tpu import lowered
from tests.parallel.meshes import mesh_of

H, K, V = 1, 64, 128
FUNCTIONS = dict(delta_rule=None, gated_delta_rule=(), kda=(K,))


def operands(name: str, T: int, dtype="float32") -> list:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, T, H, width)) for width in (K, K, V))
    gates = [] if FUNCTIONS[name] is None else [np.log(rng.random((1, T, H, *FUNCTIONS[name])))]
    beta = [2 * rng.random((1, T, H))]
    return [jnp.asarray(x, dtype) for x in (q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, *gates, *beta)]


def results(run, arrays, options):
    """Compute the output, the final state and the gradient of every array."""

    def loss(*arrays):
        output, state = run(*arrays, **options)
        return jnp.square(output).sum() + jnp.square(state).sum(), (output, state)

    both = quick_jit(jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))
    gradient, outputs = both(*arrays)
    return [*outputs, *gradient]


# One sequence spans a shard of 45 tokens, three share one, and padding lies behind.
CUTS = [0, 100, 104, 150, 170]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delta_rule", {}),
        ("gated_delta_rule", dict(cu_seqlens=jnp.array(CUTS))),
        pytest.param("kda", dict(cu_seqlens=jnp.array(CUTS), reverse=True), marks=pytest.mark.thorough),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_four_shards_equal_one_device(name, options, request):
    arrays = operands(name, 180)
    want = results(getattr(glax, name), arrays, options)
    request.getfixturevalue("on_tpu_anew")
    on_mesh = functools.partial(getattr(parallel, name), mesh=mesh_of(s=4), sequence_axis="s")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = results(on_mesh, arrays, options)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_close(f"{name} {i}", x, np.asarray(y, np.float64), 2e-5)


def collectives(text: str) -> list[tuple[str, str]]:
    """Each collective of a lowered program, with the type of its result."""
    found = re.findall(r'"stablehlo\.(all_gather|all_reduce|all_to_all|collective_\w+)".*?-> (tensor<\S+>)', text, re.S)
    return sorted(found)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bytes_do_not_grow_with_the_sequence(name, on_tpu_anew):
    """Four shards gather K (K + V) numbers a head forward, and as many for the gradient, around the TPU kernels."""
    run = functools.partial(getattr(parallel, name), mesh=mesh_of(s=4), sequence_axis="s")
    message = "all_gather", f"tensor<4x1x{H}x{K * (K + V)}xf32>"
    for T in (512, 2048):
        arrays = operands(name, T, dtype="bfloat16")
        text = lowered(lambda *arrays: run(*arrays).output, *arrays)
        assert collectives(text) == [message]
        assert text.count("glax_forward") >= 3  # the state that leaves, the map, and the outputs
    if name == "gated_delta_rule":
        text = lowered(jax.grad(lambda *arrays: run(*arrays).output.astype(jnp.float32).sum()), *arrays)
        assert collectives(text) == [message] * 2
        assert text.count("glax_backward") >= 2  # for the message, and from what arrives

"""Define the public functions of `glax.parallel`: the functions of `glax._src.api.recurrent` with arrays sharded over a mesh."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from glax._src.api import delta
from glax._src.api import recurrent as api
from glax._src.api.recurrent import bound_and_solved
from glax._src.core.bind import ScanOptions, check_before_tracing, check_flag, transferred
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Config, Platform
from glax._src.parallel.sharding import Axis, Spread, solve_on_mesh
from glax._src.solve.dispatch import Choice
from glax._src.solve.pieces import solve_with_states
from glax._src.tuning.executor import compiled


class MeshOptions(TypedDict, total=False):
    """List the fields of `Spread` as arguments."""

    mesh: Mesh | AbstractMesh | None
    batch_axis: Axis
    head_axis: Axis
    sequence_axis: str | None


class AttentionOptions(MeshOptions, total=False):
    """List the arguments that `recurrent_attention` passes on to `recurrent` unchanged."""

    softmax_scale: float | Float[Array, ""] | None
    reverse: bool
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None
    pad_id: int | None
    states_every: int | None
    states_dtype: DTypeLike | None
    platform: str | None
    cfg: Config | None


def recurrent(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    beta: Float[Array, "B T H"] | None = None,
    erase: Float[Array, "B T H K"] | None = None,
    write: Float[Array, "B T H V"] | None = None,
    use_qk_l2norm: bool = False,
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None = None,
    pad_id: int | None = None,
    bonus: Float[Array, "H K"] | None = None,
    states_every: int | None = None,
    states_dtype: DTypeLike | None = None,
    platform: str | None = None,
    cfg: Config | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: Axis = None,
    head_axis: Axis = None,
    sequence_axis: str | None = None,
) -> Outputs:
    """Compute `glax.recurrent` on a mesh:   S_out = D S_in + S   for every shard of T. The shards exchange only D and S.

    With beta or erase, D is a dense [K, K] matrix.

    The arrays have the shapes of the whole problem and any sharding. The output is sharded as `Spread` says, and the final
    states are sharded over batch and heads. For mesh and the three axes see `Spread`. With cu_seqlens, batch_axis shards T. All
    else is as in `glax.recurrent`.

    Raises the errors of `glax.recurrent`, and ValueError if an axis is not an axis of the mesh, is named twice, or does not
    divide the batch or the heads.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.recurrent(q, q, q, **axes).output.shape
    (1, 8, 2, 4)
    """
    arrays = dict(
        query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, erase=erase, write=write,
        softmax_scale=softmax_scale, initial_state=initial_state, cu_seqlens=cu_seqlens, segment_ids=segment_ids,
        bonus=bonus,
    )  # fmt: skip
    options = ScanOptions(reverse, pad_id, states_every, states_dtype, use_qk_l2norm)
    check_before_tracing(arrays, platform, cfg, options)
    spread = Spread.of(mesh, batch_axis, head_axis, sequence_axis)
    if not isinstance(query, Tracer) and isinstance(spread.mesh, Mesh):
        # jit shards the larger arrays itself
        small = {name: x for name, x in arrays.items() if x is None or np.ndim(x) < 2}
        arrays |= transferred(small, NamedSharding(spread.mesh, PartitionSpec()))
    return bind_and_solve(Choice(Platform.parse(platform), cfg), spread, options.static, arrays)


@compiled(static_argnums=(0, 1, 2))
def bind_and_solve(choice: Choice, spread: Spread, options: ScanOptions, arrays: dict) -> Outputs:
    every, dtype = options.states_every, options.states_dtype

    def prepared(r: Recurrence) -> tuple[Recurrence, Callable]:
        if every is None:
            return r, functools.partial(solve_on_mesh, choice, spread)
        own = spread if r.boundaries is None else spread.for_packed
        pieces = functools.partial(solve_on_mesh, dataclasses.replace(choice, pieces=every), own)
        return r, functools.partial(solve_with_states, pieces, every=every, dtype=dtype)

    return bound_and_solved(prepared, options, arrays)


def recurrent_attention(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[AttentionOptions],
) -> Float[Array, "B T H V"] | Outputs:
    """Compute `recurrent` on a mesh and return the output alone, or (output, final_state) if `return_state`. With states_every,
    return all three.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.recurrent_attention(q, q, q, **axes).shape
    (1, 8, 2, 4)
    """
    check_flag("return_state", return_state)
    outputs = recurrent(
        query, key, value, g, g_gamma, gk, gv, initial_state=initial_state, cu_seqlens=cu_seqlens, **options
    )
    return outputs if return_state or options.get("states_every") is not None else outputs.output


def on_mesh(variant: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Return a variant of `glax` on a mesh: a function of the same arguments and of those of `Spread`."""
    arguments, signature = inspect.unwrap(variant), inspect.signature(variant)

    @functools.wraps(arguments)
    def run(*args, **options) -> Outputs:
        places: Any = {name: options.pop(name) for name in MeshOptions.__annotations__ if name in options}
        return recurrent(**arguments(*args, **options), **places)

    parameters = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in MeshOptions.__annotations__:
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    rest = [p for p in signature.parameters.values() if p.name not in parameters]
    run.__signature__ = signature.replace(parameters=[*parameters.values(), *rest])  # pyright: ignore[reportAttributeAccessIssue]
    vars(run).pop("__wrapped__")  # it has fewer arguments than the signature, which confuses who reads its source
    run.__module__, run.__doc__ = __name__, f"{variant.__doc__}{ON_MESH}"
    return run


ON_MESH = """
    On a mesh: for mesh, batch_axis, head_axis and sequence_axis see `Spread`.
    """
recurrent_gla = on_mesh(api.recurrent_gla)
simple_gla = on_mesh(api.simple_gla)
retention = on_mesh(api.retention)
lightning_attention = on_mesh(api.lightning_attention)
delta_rule = on_mesh(delta.delta_rule)
gated_delta_rule = on_mesh(delta.gated_delta_rule)
kda = on_mesh(delta.kda)

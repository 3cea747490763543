"""Define the public functions of `glax.parallel`: the functions of `glax` with arrays sharded over a mesh."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glax._src.api import delta
from glax._src.api import recurrent as api
from glax._src.api.recurrent import bound_and_solved
from glax._src.core.bind import ScanOptions, check_before_tracing, check_flag, transferred
from glax._src.core.recurrence import Outputs, Recurrence
from glax._src.core.registry import Platform
from glax._src.parallel.sharding import Spread, solve_on_mesh
from glax._src.solve.dispatch import Choice
from glax._src.solve.pieces import solve_with_states
from glax._src.tuning.executor import compiled

PLACES = tuple(field.name for field in dataclasses.fields(Spread))
OPTIONS = tuple(field.name for field in dataclasses.fields(ScanOptions))
ARRAYS = tuple(
    name for name in inspect.signature(api.recurrent).parameters if name not in (*OPTIONS, "platform", "cfg")
)


def recurrent_on_mesh(arguments: dict, places: dict) -> Outputs:
    """Return the results of `glax.recurrent(**arguments)` on a mesh. places: the fields of `Spread` by name."""
    arrays = {name: arguments.get(name) for name in ARRAYS}
    options = ScanOptions(**{name: arguments[name] for name in OPTIONS if name in arguments})
    platform, cfg = arguments.get("platform"), arguments.get("cfg")
    check_before_tracing(arrays, platform, cfg, options)
    spread = Spread.of(*(places.get(name) for name in PLACES))
    if not isinstance(arrays["query"], Tracer) and isinstance(spread.mesh, Mesh):
        # jit shards the larger arrays itself
        small = {name: x for name, x in arrays.items() if x is None or np.ndim(x) < 2}
        arrays |= transferred(small, NamedSharding(spread.mesh, PartitionSpec()))
    return bind_and_solve(Choice(Platform.parse(platform), cfg), spread, options.static, arrays)


@compiled(static_argnums=(0, 1, 2))
def bind_and_solve(choice: Choice, spread: Spread, options: ScanOptions, arrays: dict) -> Outputs:
    """Bind the arguments and solve the recurrence on the mesh of `spread`, compiled by jit. arrays: the array arguments by
    name."""
    every, dtype = options.states_every, options.states_dtype

    def prepared(r: Recurrence) -> tuple[Recurrence, Callable]:
        if every is None:
            return r, functools.partial(solve_on_mesh, choice, spread)
        own = spread if r.boundaries is None else spread.for_packed
        pieces = functools.partial(solve_on_mesh, dataclasses.replace(choice, pieces=every), own)
        return r, functools.partial(solve_with_states, pieces, every=every, dtype=dtype)

    return bound_and_solved(prepared, options, arrays)


def on_mesh(function: Callable, doc: str = "") -> Callable:
    """Return a function of `glax.parallel`: `function` of `glax` with arrays sharded over a mesh, and the arguments of
    `Spread`.

    doc: the docstring of the result; made from function's if empty.
    """
    signature, variant = inspect.signature(function), inspect.unwrap(function)

    def bound(*args, **options) -> dict:
        return dict(signature.bind(*args, **options).arguments)

    arguments_of = bound if variant is function else variant

    @functools.wraps(variant)
    def run(*args, **options):
        places = {name: options.pop(name) for name in PLACES if name in options}
        arguments = arguments_of(*args, **options)
        returns_state = arguments.pop("return_state", "return_state" not in signature.parameters)
        check_flag("return_state", returns_state)
        outputs = recurrent_on_mesh(arguments, places)
        return outputs if returns_state or arguments.get("states_every") is not None else outputs.output

    own = list(signature.parameters.values())
    rest = [own.pop()] if own[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    own += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in PLACES]
    run.__signature__ = signature.replace(parameters=[*own, *rest])  # pyright: ignore[reportAttributeAccessIssue]
    vars(run).pop("__wrapped__")  # it has fewer arguments than the signature, which confuses who reads its source
    run.__module__, run.__doc__ = __name__, doc or doc_on_mesh(function)
    return run


ON_MESH = """On a mesh: the arrays have the shapes of the whole problem and any sharding. mesh, batch_axis, head_axis and
    sequence_axis are as in `glax.parallel.Spread`; an axis of None shards nothing. How results are sharded, and the errors of
    these arguments: as in `glax.parallel.recurrent`.

    >>> axes = dict(mesh=jax.make_mesh((1,), ("data",)), batch_axis="data")
    """


def doc_on_mesh(function: Callable) -> str:
    """Return the docstring of `function`, to which the arguments of a mesh are added, and an example on a mesh."""
    text, example = (function.__doc__ or "").split(">>> ", 1)
    called = example.replace(f"glax.{function.__name__}(", f"glax.parallel.{function.__name__}(")
    return f"{text}{ON_MESH}>>> {called.replace(').', ', **axes).')}"


recurrent = on_mesh(
    api.recurrent,
    """Compute `glax.recurrent` on a mesh:   S_out = D S_in + S   for every shard of T. The shards exchange only D and S.

    S_in and S_out are the states that enter and leave a shard. S is its final state if none enters. D is the decay through all
    of its tokens: with beta or erase a dense [K, K] matrix, and else factors of the state's rows and columns.

    The arrays have the shapes of the whole problem and any sharding. mesh: a jax.sharding.Mesh; None for the one that
    jax.set_mesh has set. batch_axis, head_axis, sequence_axis: the axes of the mesh that shard B, H and T; None shards nothing.
    The first two are names or tuples of names, the third one name. The size of batch_axis divides B. With cu_seqlens B is 1,
    and T is sharded over batch_axis and then over sequence_axis, each of which may be None. The size of head_axis divides H, the
    largest of the head counts. No size needs to divide T. `Spread` says what the shards exchange. The output is sharded over the
    same axes, and the final states over batch and heads; with cu_seqlens over heads alone. The other arguments, the results and
    the gradients are those of `glax.recurrent`.

    Raises the errors of `glax.recurrent`. Raises ValueError if there is no mesh, if an axis is not an axis of the mesh or is
    named twice, if the size of batch_axis does not divide B, without cu_seqlens, or if the size of head_axis does not divide H.
    Raises TypeError if mesh is no mesh.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> axes = dict(mesh=jax.make_mesh((1,), ("sequence",)), sequence_axis="sequence")
    >>> glax.parallel.recurrent(q, q, q, **axes).output.shape
    (1, 8, 2, 4)
    """,
)
recurrent_attention = on_mesh(api.recurrent_attention)
recurrent_gla = on_mesh(api.recurrent_gla)
simple_gla = on_mesh(api.simple_gla)
retention = on_mesh(api.retention)
lightning_attention = on_mesh(api.lightning_attention)
delta_rule = on_mesh(delta.delta_rule)
gated_delta_rule = on_mesh(delta.gated_delta_rule)
kda = on_mesh(delta.kda)

"""Shard a recurrence over a mesh, and solve it there."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glax._src.core.recurrence import Outputs, Recurrence, spread_heads
from glax._src.core.registry import check_form
from glax._src.parallel.sequence import solve_sequence
from glax._src.solve.autodiff import differentiable, solve
from glax._src.solve.dispatch import Choice
from glax._src.solve.exclusive_read import passing_padding
from glax._src.solve.partitioning import Axis, flat_axes, output_specs, recurrence_specs


@dataclasses.dataclass(frozen=True)
class Spread:
    """Name the mesh axes that shard the arrays of a call. Users need no Spread, and no function takes one: each function of
    `glax.parallel` takes these four fields as arguments of the same names. The functions raise TypeError if mesh is no mesh.
    They raise ValueError if there is no mesh, for an axis that the mesh does not have or that is named twice, and for a size
    that does not divide B or H as below. To make a Spread raises nothing. An axis of None shards nothing.

    batch_axis: an axis or a tuple of axes that shards B, which its size must divide. No communication. With cu_seqlens B is 1,
        and T is sharded over the axes of batch_axis, then over sequence_axis, which may be None. All that is said of
        sequence_axis below then holds for these axes together. No size needs to divide T.
    head_axis: an axis or a tuple of axes that shards H, the largest of the head counts, which its size must divide. No
        communication. Queries, keys or values with fewer heads than shards are repeated.
    sequence_axis: the name of one axis that shards T; a tuple raises ValueError. Its n shards have T / n tokens each, after
        padding if n does not divide T. Each shard sends its final state and the decay through its tokens. Results and gradients
        are those of one device, with any gates, initial and final states, `reverse`, and packed sequences that cross shards.
    mesh: the mesh of these axes; None for the one that jax.set_mesh has set. Arrays are replicated over its other axes.

    Forward and gradient each send, per shard along sequence_axis,

        F * (K V + K' + V') * H * B * 4 bytes

        F     1 for up to 4 shards, else 1 + ceil(log2(n - 1))
        K'    K for per-key gates, K K for the delta rule, else 1
        V'    V for per-value gates, else 0

    with B and H of a shard, and B = 1 for packed sequences. The number does not depend on T. The shards also sum the final
    states, if used, and the gradient of the initial states: N H K V * 4 bytes each, where N is B of a shard, or the number of
    packed sequences.

    JAX's array types have equal shards alone. If n does not divide T and sequence_axis is an explicit axis, the output is
    therefore not sharded over it: each device along it receives all of T.

    >>> mesh = jax.make_mesh((1,), ("sequence",))
    >>> glax.parallel.Spread(mesh, sequence_axis="sequence").batch_axis is None
    True
    """

    mesh: Mesh | AbstractMesh | None = None
    batch_axis: Axis = None
    head_axis: Axis = None
    sequence_axis: Axis = None

    @classmethod
    def of(cls, mesh, batch_axis, head_axis, sequence_axis) -> "Spread":
        """Return the four arguments of a function of `glax.parallel` as a `Spread`, after a check.

        mesh: a jax.sharding.Mesh or AbstractMesh, or None for the one that jax.set_mesh has set, which the result then holds.
        batch_axis, head_axis: the name of an axis of the mesh, a tuple of such names, or None. sequence_axis: one name, or None.
        Raises TypeError if mesh is something else. Raises ValueError if there is no mesh, for a name that the mesh does not have,
        for a name that stands twice, and for a sequence_axis that is a tuple.
        """
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
        mesh = cls(mesh).mesh_in_use
        named: dict[str, str] = {}
        arguments = dict(batch_axis=axis_names(batch_axis), head_axis=axis_names(head_axis))
        arguments["sequence_axis"] = () if sequence_axis is None else (sequence_axis,)  # never several
        for argument, names in arguments.items():
            for name in names:
                if name not in mesh.axis_names:
                    raise ValueError(f"{argument} must be of the mesh's axes {mesh.axis_names}, got {name!r}")
                if name in named:
                    raise ValueError(f"{argument} must be another axis than {named[name]}, got {name!r} for both")
                named[name] = argument
        return cls(mesh, batch_axis, head_axis, sequence_axis)

    @property
    def mesh_in_use(self) -> Mesh | AbstractMesh:
        """Return `mesh`, or the mesh that jax.set_mesh has set. Raises ValueError if there is none."""
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if self.mesh is None and mesh.empty:
            raise ValueError("mesh must be given, or be in use by jax.set_mesh: there is none")
        return mesh

    def size(self, axis: Axis) -> int:
        """Return the number of devices along an axis, or along several axes together; 1 for None."""
        return math.prod(self.mesh_in_use.shape[name] for name in flat_axes(axis))

    @property
    def for_packed(self) -> "Spread":
        """Return the layout for packed arrays, whose B is 1: T is divided over the axes of batch_axis first, and then over
        sequence_axis."""
        axes = (*flat_axes(self.batch_axis), *flat_axes(self.sequence_axis))
        return dataclasses.replace(self, batch_axis=None, sequence_axis=axes or None)

    def specs(self, r: Recurrence) -> Recurrence:
        """Return a PartitionSpec for every array of r."""
        return recurrence_specs(r, self.batch_axis, self.head_axis, self.sequence_axis, shared_heads=self.head_axis)

    def reshard(self, arrays, specs, shape=None):
        """Reshard a tree of arrays over the explicit axes of the mesh. specs: a tree of PartitionSpecs, one for each array.

        A dimension whose size its mesh axes do not divide is not sharded, because the type of a JAX array has shards of equal
        size. shape: one shape whose sizes decide this for every array of the tree; the array's own if None. A caller gives it
        with a single array, of which it will cut padding off: the shape that remains. Without explicit axes the arrays are
        returned as they are.
        """
        mesh = self.mesh_in_use
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind is AxisType.Explicit}
        if not explicit:
            return arrays

        def typed(axis: Axis, size: int) -> Axis:
            names = tuple(name for name in flat_axes(axis) if name in explicit)
            return names if names and size % self.size(names) == 0 else None

        def place(x, spec):
            spec = P(*(typed(axis, size) for axis, size in zip(spec, shape or x.shape, strict=False)))
            return jax.sharding.reshard(x, NamedSharding(mesh, spec))

        return jax.tree.map(place, arrays, specs)

    def check(self, r: Recurrence):
        """Raise ValueError unless the sizes of batch_axis and head_axis divide B and H of r.

        Raises UnsupportedError if sequence_axis is given and does not support the decay form of r.
        """
        if self.sequence_axis is not None:
            check_form(r, "sequence_axis")
        for argument, axis, what, count in (
            ("batch_axis", self.batch_axis, "B", r.q.shape[0]),
            ("head_axis", self.head_axis, "H", r.num_heads),
        ):
            if count % (size := self.size(axis)):
                raise ValueError(
                    f"{argument} must have a size that divides {what}={count}, got {axis!r} of size {size}"
                )


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the names that an unchecked axis argument holds; an empty tuple for None."""
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def solve_on_mesh(choice: Choice, spread: Spread, r: Recurrence) -> Outputs:
    """Solve r shard by shard, with its arrays sharded over the mesh axes of `spread`."""
    if r.segments is not None and r.segments.is_token is not None and spread.sequence_axis is not None:
        outputs = solve_on_mesh(choice, spread, passing_padding(r))
        return outputs._replace(output=r.segments.masked(outputs.output))
    if r.boundaries is not None:
        spread = spread.for_packed
    spread.check(r)
    T, shards = r.q.shape[1], spread.size(spread.sequence_axis)
    # Before and after the shapes change: a dimension that changes must not be sharded by its type.
    r = spread.reshard(r, spread.specs(r))
    r = repeat_heads(append_rows(r, -T % shards), spread.size(spread.head_axis))
    specs = spread.specs(r)
    r = spread.reshard(r, specs)
    out_specs = output_specs(spread.batch_axis, spread.head_axis, spread.sequence_axis)
    inside = functools.partial(solve_on_shard, choice, spread.sequence_axis, shards)
    # check_vma is off because it cannot type kernels of Pallas Mosaic GPU. Cotangents are summed nevertheless.
    run = jax.shard_map(inside, mesh=spread.mesh_in_use, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    outputs = run(r)
    if outputs.output.shape[1] == T:
        return outputs
    output = spread.reshard(outputs.output, out_specs.output, (outputs.output.shape[0], T, *outputs.output.shape[2:]))
    return outputs._replace(output=output[:, :T])


def solve_on_shard(choice: Choice, sequence_axis: Axis, shards: int, r: Recurrence) -> Outputs:
    """Return the outputs of one device's shard, and the final states: all of them on each of the `shards` devices of
    sequence_axis."""
    r = differentiable(r)
    if sequence_axis is None:
        return solve(choice, r)
    output, final = solve_sequence(choice, sequence_axis, shards, r)
    return Outputs(output, jax.lax.psum(final, sequence_axis))


def append_rows(r: Recurrence, rows: int) -> Recurrence:
    """Return r with `rows` tokens appended in T that change nothing: k = v = 0 and no decay. In packed arrays they are
    padding."""
    if rows == 0:
        return r

    def grow(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, rows)] + [(0, 0)] * (x.ndim - 2))

    decay = r.decay.with_tokens(r.by_token) if r.boundaries is None else r.decay
    erasure, segments = jax.tree.map(grow, (r.erasure, r.segments))
    decay = decay.map_tokens(grow)
    return r.replace(q=grow(r.q), k=grow(r.k), v=grow(r.v), decay=decay, erasure=erasure, segments=segments)


def repeat_heads(r: Recurrence, shards: int) -> Recurrence:
    """Return r with heads of queries, keys and values repeated, such that `shards` divides their numbers and a shard reads only
    its own heads."""
    q, k, v = (spread_heads(x, math.lcm(x.shape[2], shards)) for x in (r.q, r.k, r.v))
    return r.replace(q=q, k=k, v=v)

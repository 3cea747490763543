"""Define `Recurrence`, the operand of every kernel, and its results `Outputs` and `Residuals`."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.decay import Decay, promoted
from glax._src.core.erasure import Erasure
from glax._src.core.segments import Segments, expanded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Hold the operands of a call, already validated, as every kernel takes them. In every sequence and head:

        S_t = decay_t * S_{t-1} + k_t v_t^T,     o_t = scale * S_t^T q_t

    H is the largest of the three head counts. The others divide H, and head h of H reads head h * heads // H. `scale` is one
    number per sequence, so that batches can be merged. With `erasure` this is the delta rule:

        S_t = decay_t * S_{t-1} + k_t (w_t * v_t)^T - a_t (R_t^T e_t)^T

        e_t    the erase vector [K]: `erase`, or beta_t k_t with `beta`
        w_t    the write gate [V]: `write`, or beta_t with `beta`, or 1 with `erase` alone
        a_t    the key [K] along which R_t^T e_t is subtracted: k_t, or with `along` another key
        R_t    the state that e_t reads: decay_t * S_{t-1}, or with `before_decay` S_{t-1}

    In packed arrays B is 1, and sequence n has the tokens from boundaries[n] up to, and without, boundaries[n + 1]; those before
    the first boundary and behind the last are padding. `boundaries` is the `cu_seqlens` of the public functions. `reverse` scans
    every sequence from its last token to its first. `segments` divides the sequences of an unpacked batch further: it marks the
    tokens that start from a state of zeros, and padding. `folded` expresses this division by gates, which every kernel accepts.

    The public functions make it of their arguments, with gates as logarithms. decay: the arrays `constant` [N, H], `head`
    [B, T, H], `key` [B, T, H, K] and `value` [B, T, H, V], whose sum is the log decay; None for 0. erasure: None without a delta
    rule, else an `Erasure`. initial_state: None for zeros. boundaries: None if no sequences are packed. segments: None if
    sequences are whole.

    states_every: None, or a number n: kernels then also return the states after every n tokens. The `final_state` of their
    `Outputs` is then a `StoredStates`, the tuple (final_state, states [N, J, H, K, V]), and so is its cotangent. Kernels that
    store no states refuse such a recurrence.

    >>> from glax.testing.cases import CASES, recurrence
    >>> recurrence(CASES[0], "log-sigmoid").q.shape
    (2, 150, 2, 32)
    """

    q: Float[Array, "B T Hq K"]
    k: Float[Array, "B T Hk K"]
    v: Float[Array, "B T Hv V"]
    decay: Decay
    initial_state: Float[Array, "N H K V"] | None
    boundaries: Int[Array, "N+1"] | None
    scale: Float[Array, "N"]
    reverse: bool = dataclasses.field(default=False, metadata=dict(static=True))
    segments: Segments | None = None
    erasure: Erasure | None = None
    states_every: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    replace = dataclasses.replace

    @property
    def erasing(self) -> Erasure:
        """Return the erasure, which is not None. The caller knows that there is one."""
        assert self.erasure is not None
        return self.erasure

    @property
    def num_heads(self) -> int:
        return max(x.shape[2] for x in (self.q, self.k, self.v))

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.boundaries is None else self.boundaries.shape[0] - 1

    @property
    def is_symbolic(self) -> bool:
        """Return whether B, T or N is a symbol of jax.export.symbolic_shape, whose value only a running program has."""
        return any(map(is_symbol, (*self.q.shape[:2], self.num_sequences)))

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.num_sequences, self.num_heads, self.q.shape[3], self.v.shape[3])

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of sums and states: float32, or float64 for float64 inputs."""
        return promoted(self.q.dtype, jnp.float32)

    @property
    def start_state(self) -> Float[Array, "N H K V"]:
        """Return the initial state, of shape `state_shape`, in `dtype`, in which sums are formed; zeros if there is none."""
        if self.initial_state is None:
            return varying_like(jnp.zeros(self.state_shape, self.dtype), self.q)
        return self.initial_state.astype(self.dtype)

    @property
    def transposed(self) -> "Recurrence":
        """Return the recurrence of the transposed states [N, H, V, K]. The caller then replaces q, k and v.

        The decays of keys and of values are exchanged, and the initial state is transposed. All else stays as it is.
        """
        state = self.initial_state
        return self.replace(decay=self.decay.transposed, initial_state=None if state is None else state.mT)

    @property
    def folded(self) -> "Recurrence":
        """Return the same recurrence without `segments`.

        Gates of -inf reset the state instead, and padding rows are zeros. Outputs at padding are not masked.
        """
        s = self.segments
        if s is None:
            return self
        decay = s.folded(self.decay, self.by_token, (self.q.shape[0], self.q.shape[1], self.num_heads), self.dtype)
        folded = self.replace(segments=None).map_tokens(s.masked).replace(decay=decay)
        erasure = folded.erasure
        if erasure is None or not erasure.before_decay or erasure.erase is None:
            return folded
        # Before its gate of -inf, a token that resets would read the last segment's state.
        erase = jnp.where(expanded(s.resets, 4), 0, erasure.erase)
        return folded.replace(erasure=erasure.replace(erase=erase))

    @property
    def without_padding(self) -> "Recurrence":
        """Return the recurrence with zeros at the padding of `segments`, in every array that has an axis of tokens.

        The result's `segments` mark the same resets, but no padding. Without padding this is the recurrence itself.
        """
        s = self.segments
        if s is None or s.is_token is None:
            return self
        return self.replace(segments=None).map_tokens(s.masked).replace(segments=Segments(s.resets, None))

    @property
    def floats(self) -> "Recurrence":
        """Return the recurrence without boundaries and segments, so that it has only the arrays that have gradients."""
        return self.replace(boundaries=None, segments=None)

    def with_integers(self, r: "Recurrence") -> "Recurrence":
        """Return this recurrence with the boundaries and segments of r."""
        return self.replace(boundaries=r.boundaries, segments=r.segments)

    # ---- arrays with tokens, and the others --------------------------------------------------------------------------

    @property
    def tokens_alone(self) -> "Recurrence":
        """Return the recurrence with only the arrays that have an axis of tokens, [B, T, ...]. All other arrays are None."""
        decay = dataclasses.replace(self.decay, constant=None)
        return self.replace(decay=decay, initial_state=None, boundaries=None, scale=None)

    def with_whole(self, r: "Recurrence") -> "Recurrence":
        """Return this recurrence with those arrays of r that have no axis of tokens: the constant decay, initial_state,
        boundaries and scale. `tokens_alone` is a recurrence without them."""
        decay = dataclasses.replace(self.decay, constant=r.decay.constant)
        return self.replace(decay=decay, initial_state=r.initial_state, boundaries=r.boundaries, scale=r.scale)

    def map_tokens(self, f: Callable[[Array], Array]) -> "Recurrence":
        """Return the recurrence with f applied to every array that has an axis of tokens."""
        return jax.tree.map(f, self.tokens_alone).with_whole(self)

    # ---- packed sequences ----------------------------------------------------------------------------------------

    @property
    def sequence_of(self) -> Int[Array, "T"]:
        """Return the number of the sequence, 0 to N - 1, that holds each of the T places in time, [T].

        Padding counts to the last sequence. Without packing every number is 0.
        """
        rows = jnp.arange(self.q.shape[1])
        if self.boundaries is None:
            return jnp.zeros_like(rows)
        found = jnp.searchsorted(self.boundaries, rows, side="right") - 1
        return jnp.clip(found, 0, self.num_sequences - 1)

    @property
    def is_token(self) -> Bool[Array, "T"]:
        """Return which of the T places in time belong to a packed sequence, bool [T]; false for padding. All are true without
        packing."""
        rows = jnp.arange(self.q.shape[1])
        if self.boundaries is None:
            return jnp.ones(rows.shape, bool)
        return (rows >= self.boundaries[0]) & (rows < self.boundaries[-1])

    def ends(self, scan_end: bool) -> Bool[Array, "T"]:
        """Return which tokens are the last of their sequence in the order of the scan, or if not `scan_end` the first: bool [T].

        Padding of packed sequences is neither. `segments` have no effect.
        """
        rows, last = jnp.arange(self.q.shape[1]), scan_end != self.reverse
        if self.boundaries is None:
            return rows == (self.q.shape[1] - 1 if last else 0)
        own = self.sequence_of
        return self.is_token & (rows == (self.boundaries[own + 1] - 1 if last else self.boundaries[own]))

    def by_token(self, x: Float[Array, "N *rest"]) -> Float[Array, "B T *rest"]:
        """Return x with the row of each sequence repeated for every token of the sequence, [B, T, *rest]."""
        if self.boundaries is not None:
            return x[self.sequence_of][None]
        return jnp.broadcast_to(x[:, None], (x.shape[0], self.q.shape[1], *x.shape[1:]))

    def per_sequence(self, x: Float[Array, "B T *rest"]) -> Float[Array, "N *rest"]:
        """Return the sums of x over the tokens of each sequence, [N, *rest]. Padding rows of x must be zero."""
        if self.boundaries is None:
            return x.sum(1)
        return jax.ops.segment_sum(x[0], self.sequence_of, self.num_sequences)


def gradient_like(r: Recurrence, d: Recurrence) -> Recurrence:
    """Return d, a gradient with respect to r, in the dtypes of r's arrays."""
    return jax.tree.map(lambda x, dx: dx.astype(x.dtype), r.floats, d)


def gradient_recurrence(
    r: Recurrence,
    dq: Float[Array, "B T _ K"],
    dk: Float[Array, "B T _ K"],
    dv: Float[Array, "B T _ V"],
    decay: Decay,
    initial_state: Float[Array, "N H K V"] | None,
    scale: Float[Array, "N"],
    erasure: Erasure | None = None,
) -> Recurrence:
    """Return the gradient with respect to every array of r, assembled from its parts, in the dtypes of r's arrays.

    dq, dk, dv: gradients of each of the H heads, or already summed over heads that share a query, key or value; the sum is
    taken here if it is missing. decay: the gradient of the log decays, in the form of r.decay. initial_state: its gradient,
    ignored where r has no initial state. scale, erasure: the gradients of r's scale and erasure. The parts may have any float
    dtype.
    """
    d = r.replace(
        q=sum_heads(dq, r.q.shape[2]),
        k=sum_heads(dk, r.k.shape[2]),
        v=sum_heads(dv, r.v.shape[2]),
        decay=decay,
        initial_state=None if r.initial_state is None else initial_state,
        boundaries=None,
        segments=None,
        scale=scale,
        erasure=erasure,
    )
    return gradient_like(r, d)


class Outputs(NamedTuple):
    """Hold `output` [B, T, H, V] in the query's dtype and `final_state` [N, H, K, V] in float32 (float64 for float64 inputs).

    H is the largest of the head counts. N is B, or the number of packed sequences. final_state is the state behind the last
    token of each sequence in the order of the scan. It is a tuple: output, final_state = glax.recurrent(...).

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> output, final_state = glax.recurrent(q, q, q)
    >>> final_state.dtype
    dtype('float32')
    """

    output: Float[Array, "B T H V"]
    final_state: Float[Array, "N H K V"]


class StoredStates(NamedTuple):
    """Hold the final state of a recurrence with states_every=n, and the J states after every n tokens of each sequence.

    As a cotangent it holds the cotangents of both, where `states` may be None for zeros.
    """

    final_state: Float[Array, "N H K V"]
    states: Float[Array, "N J H K V"] | None


class PackedStates(NamedTuple):
    """Hold the states of packed sequences behind every n tokens of each sequence: the `states` of a call with cu_seqlens and
    states_every=n.

    states [J, H, K, V] are in `states_dtype`, J = T // n. offsets [N + 1] are int32. The states of sequence i are
    states[offsets[i] : offsets[i + 1]], in the order of its scan: one for each whole n tokens of it. Those from offsets[-1] on
    are zeros.

    >>> q, cuts = jnp.ones((128, 2, 4)), jnp.array([0, 64, 128])
    >>> glax.recurrent(q, q, q, cu_seqlens=cuts, states_every=64).states.offsets.tolist()
    [0, 1, 2]
    """

    states: Float[Array, "J H K V"]
    offsets: Int[Array, "N+1"]


class OutputsWithStates(NamedTuple):
    """Hold the results of a call with states_every=n: `output` and `final_state` as in `Outputs`, and `states`.

    states [N, T // n, H, K, V], in `states_dtype`, are those behind every n tokens of a row in the order of the scan; a tail of
    fewer tokens has none. With cu_seqlens they are `PackedStates`.

    >>> q = jnp.ones((1, 128, 2, 4))
    >>> glax.recurrent(q, q, q, states_every=64).states.shape
    (1, 2, 2, 4, 4)
    """

    output: Float[Array, "B T H V"]
    final_state: Float[Array, "N H K V"]
    states: Float[Array, "N J H K V"] | PackedStates


class Residuals(NamedTuple):
    """Hold what a forward saves for its gradient in addition to its operands: states at chunks, and one flag for each chunk.

    The kernel defines the chunks, which runs of chunks have a state (the axis "runs"), the padded widths K and V, and the
    meaning of the flags. Hopper's kernels of the delta rule append a row or a column to each state for each token of the chunk:
    what the token writes.
    """

    states: Float[Array, "B runs H K V"]
    out_of_range: Int[Array, "B chunks H"]


def spread_heads(x: Array, heads: int, axis: int = 2) -> Array:
    """Return x with each head repeated, so that there are `heads` heads along `axis`."""
    return x if x.shape[axis] == heads else jnp.repeat(x, heads // x.shape[axis], axis)


def sum_heads(x: Array, heads: int, axis: int = 2) -> Array:
    """Return x with its heads along `axis` summed in groups of adjacent heads, so that `heads` heads are left.

    This is the adjoint of `spread_heads`.
    """
    if x.shape[axis] == heads:
        return x
    return x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :]).sum(axis + 1)


def to_int32(x: Int[Array | np.ndarray, "*shape"]) -> Int[Array, "*shape"]:
    """Return integers as int32. Values outside its range become the nearest end, so that an index out of bounds stays out of
    bounds."""
    if x.dtype == jnp.int32:
        return jnp.asarray(x)
    own, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    clip = np.clip if isinstance(x, np.ndarray) else jnp.clip  # JAX would first drop the upper bits of NumPy's int64
    return jnp.asarray(clip(x, max(own.min, wanted.min), min(own.max, wanted.max)).astype(jnp.int32))


def varying_axes(x: Array) -> frozenset[str]:
    """Return the mesh axes over which x varies inside shard_map. The set is empty elsewhere."""
    return frozenset(jax.typeof(x).mat.varying)


def varying_like(x: Array, like: Array) -> Array:
    """Return x as varying over the mesh axes of `like`. Inside shard_map, the carry of a loop must have the type of its
    result."""
    missing = tuple(varying_axes(like) - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def aligned(r):
    """Return every array of r, a Recurrence or any tree, as varying over the same mesh axes inside shard_map.

    Callers do this before a function with a custom gradient. The transpose of the cast then sums the gradient of a replicated
    input, such as g_gamma, over the mesh once.
    """
    leaves, structure = jax.tree.flatten(r)
    axes = frozenset[str]().union(*(varying_axes(x) for x in leaves))
    missing = [tuple(axes - varying_axes(x)) for x in leaves]
    cast = [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(leaves, missing, strict=True)]
    return structure.unflatten(cast)


def is_symbol(n) -> bool:
    """Return whether a size is a symbol of jax.export.symbolic_shape, and not an int."""
    return not isinstance(n, int)


def bucket(n: int) -> int:
    """Return the smallest power of two that is at least n. A symbol is returned unchanged."""
    return n if is_symbol(n) else 1 << max(n - 1, 0).bit_length()


def describe(r: Recurrence) -> str:
    """Return the shapes and dtypes of r as text, the key under which configs are stored. T and a packed N are rounded up to
    powers of two."""
    B, T, Hq, K = r.q.shape
    parts = [f"B{B} T{bucket(T)} Hq{Hq} Hk{r.k.shape[2]} Hv{r.v.shape[2]} K{K} V{r.v.shape[3]} {r.q.dtype}"]
    parts += [f"{name}={gate.dtype}" for name, gate in vars(r.decay).items() if gate is not None]
    if r.erasure is not None:
        parts += [f"{name}={x.dtype}" for name, x in r.erasure.arrays.items() if x is not None]
        parts += ["before-decay"] * r.erasure.before_decay
    if r.initial_state is not None:
        parts.append(f"state={r.initial_state.dtype}")
    if r.boundaries is not None:
        parts.append(f"packed{bucket(r.num_sequences)}")
    if r.states_every is not None:
        parts.append(f"states{r.states_every}")
    if r.segments is not None:
        parts.append("segments" if r.segments.is_token is None else "segments, padded")
    return " ".join(parts + ["reverse"] * r.reverse)

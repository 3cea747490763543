"""Define `selective_scan`, the recurrence of Mamba-1, in which every entry of the state has a decay of its own."""

import functools
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from glax._src.api.named import check_options, given
from glax._src.core.bind import (
    DTYPES,
    ScanOptions,
    as_float,
    check_array,
    check_boundaries,
    check_ids,
    check_known_boundaries,
    check_segment_ids,
    is_array,
    transferred,
)
from glax._src.core.decay import promoted
from glax._src.core.explicit_axes import spec_of, with_automatic_axes
from glax._src.core.recurrence import Outputs
from glax._src.core.registry import Platform
from glax._src.core.segments import Segments, differs_from_padding, expanded
from glax._src.core.stored_states import DROPPED, check_rounding_key, check_state_dtype, stored
from glax._src.kernels.common.selective import Packing, SelectiveOperands, StepOperands
from glax._src.kernels.xla.selective_scan import Tokens, one_token
from glax._src.serving.state_pool import check_slot_values, put, take, usable
from glax._src.solve import selective_scan as solver
from glax._src.tuning.executor import compiled

LEAST = -1e38  # of A: products with it and with log2(e) are finite or -inf, and 0 times it is 0

# The axes of each argument: D channels, and states of N numbers. As axes, B is the batch and D the channels; the arguments of
# the same names are those of the paper.
SHAPES = dict(x="B T D", dt="B T D", A="D N", B="B T N", C="B T N", D="D")
ROWWISE = ("x", "dt", "B", "C")


class SelectiveScanOptions(TypedDict, total=False):
    """List the options of `selective_scan`, as in `recurrent`. initial_state: [sequences, D, N], or [D, N] for all of them."""

    initial_state: Float[Array, "sequences D N"] | Float[Array, "D N"] | None
    reverse: bool
    cu_seqlens: Int[Array, "cuts"] | None
    segment_ids: Int[Array, "B T"] | Int[Array, "T"] | None
    pad_id: int | None
    platform: str | None


class SelectiveStepOptions(TypedDict, total=False):
    """List the options of `selective_scan_step`, as in `recurrent_step`."""

    slots: Int[Array, "B"] | None
    rounding_key: Key | None
    platform: str | None


def selective_scan(
    x: Float[Array, "B T D"],
    dt: Float[Array, "B T D"],
    A: Float[Array, "D N"],
    B: Float[Array, "B T N"],
    C: Float[Array, "B T N"],
    D: Float[Array, "D"] | None = None,
    **options: Unpack[SelectiveScanOptions],
) -> Outputs:
    """Compute the selective scan of Mamba-1. For every channel d, with a state h [N]:

        h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n]        y_t = sum over n of C_t[n] h_t[n] + D x_t

    x: float32, bfloat16, float16 or float64. The other arguments may have any float dtype. dt: the step sizes, after bias and
    softplus. A: below 0 for decay; -inf acts as -1e38. D: the factors of the skip connection; none if None. Returns `Outputs`:
    y [B, T, D] in the dtype of x, and the final states [sequences, D, N] in float32, or float64 for such x. Sums are in the
    dtype of the states.

    The batch axis may be absent: x and dt are then [T, D], and the arguments B and C are [T, N].

    The gradient of every input is exact. For it the scan saves the states between chunks of tokens, but no array [B, T, D, N].
    Options are initial_state ([sequences, D, N], or [D, N] for all; zeros if None), reverse, cu_seqlens, segment_ids and pad_id,
    as in `recurrent`, and platform. Raises TypeError and ValueError, as `recurrent` does.

    platform: "cpp", native code for CPUs; "triton", for GPUs of NVIDIA; "xla"; or None for the fastest one that is able. With
    several devices None is "xla", whose program XLA divides over the devices; inside a jax.shard_map over all axes of the mesh
    it may be another. Outside of jax.shard_map, a call that names "cpp" or "triton" gathers sharded arrays on each device.
    Raises UnsupportedError, with the reason, if no kernel of that platform can run the call.

    Gu and Dao 2023, https://arxiv.org/abs/2312.00752.

    >>> x, B = jnp.ones((1, 8, 6)), jnp.ones((1, 8, 4))
    >>> glax.selective_scan(x, 0.1 * x, -jnp.ones((6, 4)), B, B).final_state.shape
    (1, 6, 4)
    """
    arrays = by_name(x, dt, A, B, C, D)
    check_options(options, set(SelectiveScanOptions.__annotations__))
    static = ScanOptions(options.get("reverse", False), options.get("pad_id"))
    rest: dict[str, Any] = {name: options.get(name) for name in ("initial_state", "cu_seqlens", "segment_ids")}
    static.check(has_segments=rest["segment_ids"] is not None)
    for name, array in (arrays | given(initial_state=rest["initial_state"])).items():
        check_array(name, array)
    if rest["segment_ids"] is not None:
        check_ids("segment_ids", rest["segment_ids"])
    shape = np.shape(x)
    if is_array(rest["cu_seqlens"]):
        check_known_boundaries(rest["cu_seqlens"], shape[-2] if len(shape) > 1 else None, "x")
    platform = Platform.parse(options.get("platform"))
    return bind_scan(static.static, platform, transferred(arrays), transferred(rest))


def selective_scan_step(
    x: Float[Array, "B D"],
    dt: Float[Array, "B D"],
    A: Float[Array, "D N"],
    B: Float[Array, "B N"],
    C: Float[Array, "B N"],
    state: Float[Array, "_ D N"],
    D: Float[Array, "D"] | None = None,
    **options: Unpack[SelectiveStepOptions],
) -> tuple[Float[Array, "B D"], Float[Array, "_ D N"]]:
    """Compute one token of `selective_scan` for each of B sequences:

        h'[n] = exp(dt A[n]) h[n] + dt x B[n]        y = sum over n of C[n] h'[n] + D x        for every channel

    x to D: as in `selective_scan`, without T. state: h [B, D, N], or a pool [P, D, N] with slots. Returns (y [B, D] in the dtype
    of x; the new state, or the new pool, in the dtype of `state`). A state or pool that is donated to jit is updated in place;
    any other keeps its values. slots and rounding_key: as in `recurrent_step`. platform: as in `selective_scan`. Raises
    TypeError, ValueError and UnsupportedError, as `recurrent_step` does.

    Gu and Dao 2023, https://arxiv.org/abs/2312.00752.

    >>> x, B, state = jnp.ones((1, 6)), jnp.ones((1, 4)), jnp.zeros((1, 6, 4))
    >>> glax.selective_scan_step(x, 0.1 * x, -jnp.ones((6, 4)), B, B, state)[0].shape
    (1, 6)
    """
    arrays = by_name(x, dt, A, B, C, D)
    check_options(options, set(SelectiveStepOptions.__annotations__))
    for name, array in (arrays | dict(state=state)).items():
        check_array(name, array)
    slots, key = options.get("slots"), options.get("rounding_key")
    check_rounding_key(key)
    if is_array(slots) and not isinstance(slots, Tracer) and jnp.issubdtype(slots.dtype, jnp.integer):
        check_slot_values(slots, np.shape(state)[0] if np.ndim(state) else 0, "state")
    own = transferred(dict(state=state, slots=slots))
    return bind_scan_step(Platform.parse(options.get("platform")), transferred(arrays), **own, rounding_key=key)


# ---- for both functions ---------------------------------------------------------------------------------------------------


def bounded_below(A: Float[Array, "D N"], dtype) -> Float[Array, "D N"]:
    """Return max(A, LEAST) in dtype. Then exp(dt A) is 1 for dt = 0, as in padding, also where A is -inf."""
    return jnp.maximum(A.astype(dtype), LEAST)


def by_name(x, dt, A, B, C, D) -> dict[str, Any]:
    """Return the arguments by name, without D if it is None."""
    return dict(x=x, dt=dt, A=A, B=B, C=C) | given(D=D)


def checked(arrays: dict[str, jax.Array], absent: str = "") -> tuple[dict[str, jax.Array], dict[str, int]]:
    """Return (the arrays with the axes B and T, the size of every letter of SHAPES).

    absent: the axis that x, dt, B and C lack, "B" or "T", which is added; "" for none. Raises TypeError for a dtype, and
    ValueError for the first argument whose shape disagrees with SHAPES or with those before.
    """
    sizes: dict[str, int] = {}
    found = {}
    for name, form in SHAPES.items():
        if name not in arrays:
            continue
        x = as_float(name, arrays[name])
        letters = [letter for letter in form.split() if letter != absent or name not in ROWWISE]
        known = "".join(f", {letter}={sizes[letter]} as before" for letter in letters if letter in sizes)
        wanted = f"{name} must be [{', '.join(letters)}]{known.replace(',', ' with', 1)}, got shape {x.shape}"
        if len(letters) != x.ndim:
            raise ValueError(wanted)
        for letter, size in zip(letters, x.shape, strict=True):
            if size != sizes.setdefault(letter, size):
                raise ValueError(wanted)
            if size == 0 and letter in "DN":
                raise ValueError(f"{name} must have a {letter} of at least 1, got shape {x.shape}")
        found[name] = jnp.expand_dims(x, "BT".index(absent)) if absent and name in ROWWISE else x
    if str(found["x"].dtype) not in DTYPES:
        raise TypeError(f"x must be float32, bfloat16, float16 or float64, got {found['x'].dtype}")
    return found, dict(B=1, T=1) | sizes


class Bound(NamedTuple):
    """Hold how the rows of a call are packed; a mask of the rows that are tokens and not padding, None for all; and the number
    of sequences."""

    packing: Packing
    is_token: Array | None
    num_sequences: int


def bound(sizes: dict[str, int], rest: dict, options: ScanOptions, flat: bool) -> Bound:
    """Return the packing that cu_seqlens or segment_ids in `rest` describe. flat: whether x lacks the batch axis. Raises
    ValueError for wrong shapes."""
    cuts, ids = rest["cu_seqlens"], rest["segment_ids"]
    if ids is not None:
        check_segment_ids(ids, sizes, flat, cuts is not None)
    if cuts is not None:
        cuts = check_boundaries(cuts, sizes)
        return Bound(Packing(cuts, None), (jnp.arange(sizes["T"]) < cuts[-1])[None], cuts.shape[0] - 1)
    if ids is None or sizes["T"] == 0:
        return Bound(Packing(None, None), None, sizes["B"])
    ids = jnp.asarray(ids[None] if flat else ids)
    resets = Segments.from_ids(ids, options.pad_id, options.reverse).resets
    return Bound(Packing(None, resets), differs_from_padding(ids, options.pad_id), sizes["B"])


def initial_states(given, shape: tuple[int, int, int], dtype) -> Float[Array, "sequences D N"]:
    """Return `given`, the argument initial_state, in the shape (sequences, D, N) and in dtype; zeros for None.

    Raises ValueError for another shape.
    """
    if given is None:
        return jnp.zeros(shape, dtype)
    given = as_float("initial_state", given)
    if given.shape not in (shape, shape[1:]):
        sizes = ", ".join(f"{name}={size}" for name, size in zip(("sequences", "D", "N"), shape, strict=True))
        raise ValueError(f"initial_state must be [sequences, D, N] or [D, N] with {sizes}, got shape {given.shape}")
    return jnp.broadcast_to(given.astype(dtype), shape)


def masked(is_token: Array | None, x: Array) -> Array:
    """Return x with zeros in padding, whose gradient is 0."""
    return x if is_token is None else jnp.where(expanded(is_token, x.ndim), x, 0)


@compiled(static_argnums=(0, 1))
def bind_scan(options: ScanOptions, platform: Platform | None, arrays: dict, rest: dict) -> Outputs:
    """Return the results of `selective_scan`, compiled by jit. arrays: x to D by name. rest: initial_state, cu_seqlens,
    segment_ids."""
    spec = spec_of(arrays["x"])
    rows = None if rest["cu_seqlens"] is not None or len(spec) < 3 else spec[0]
    specs = Outputs(cast(Any, spec), cast(Any, PartitionSpec(rows, spec[-1] if len(spec) else None)))
    return with_automatic_axes(functools.partial(scan_rows, options, platform), specs, arrays, rest)


def scan_rows(options: ScanOptions, platform: Platform | None, arrays: dict, rest: dict) -> Outputs:
    """Return the results of `selective_scan` for arrays without explicit axes. arrays, rest: as in `bind_scan`."""
    flat = arrays["x"].ndim == 2
    arrays, sizes = checked(arrays, absent="B" if flat else "")
    call = bound(sizes, rest, options, flat)
    x, dt, B, C = (masked(call.is_token, arrays[name]) for name in ROWWISE)
    dtype = promoted(x.dtype, jnp.float32)
    states = initial_states(rest["initial_state"], (call.num_sequences, *arrays["A"].shape), dtype)
    y, final = jnp.zeros(x.shape, x.dtype), states
    if 0 not in (*x.shape, call.num_sequences):
        operands = SelectiveOperands(x, dt, bounded_below(arrays["A"], dtype), B, C, states, call.packing)
        y, final = solver.scan(platform, options.reverse, operands, arrays.get("D"))
    y = masked(call.is_token, y)
    return Outputs(y[0] if flat else y, final)


@compiled(static_argnums=(0,))
def bind_scan_step(platform: Platform | None, arrays: dict, state, slots, rounding_key) -> tuple[Array, Array]:
    specs = spec_of(arrays["x"]), spec_of(state)
    return with_automatic_axes(functools.partial(step_rows, platform), specs, arrays, state, slots, rounding_key)


def step_rows(platform: Platform | None, arrays: dict, state, slots, rounding_key) -> tuple[Array, Array]:
    """Return (y, the states or the pool) of `selective_scan_step` for arrays without explicit axes. arrays: x to D by name.

    slots, rounding_key: as in `selective_scan_step`, or None.
    """
    arrays, sizes = checked(arrays, absent="T")
    check_state_dtype("state", state.dtype)
    form, wanted = "[P, D, N]", (sizes["D"], sizes["N"])
    if slots is None:
        form, wanted = "[B, D, N]", (sizes["B"], *wanted)
    if state.ndim != 3 or state.shape[-len(wanted) :] != wanted:
        raise ValueError(f"state must be {form} with {list(wanted)} at its end, got shape {state.shape}")
    used = None
    if slots is not None:
        slots, used = usable(slots, state.shape[0], sizes["B"], ("B", "x"))
    x, dt, B, C = (arrays[name][:, 0] for name in ROWWISE)
    A = bounded_below(arrays["A"], promoted(x.dtype, jnp.float32))
    refusal = None
    if rounding_key is not None and str(state.dtype) in DROPPED:
        refusal = f"rounds {state.dtype} to nearest, got rounding_key"
    gathered = functools.partial(step_gathered, rounding_key)
    y, after = solver.step(platform, StepOperands(x, dt, A, B, C, state, slots), gathered, refusal)
    y = solver.with_skip(y, x, arrays.get("D")).astype(x.dtype)
    return y if used is None else jnp.where(used[:, None], y, 0), after


def step_gathered(rounding_key: Key | None, operands: StepOperands) -> tuple[Array, Array]:
    """Return y, in the dtype of A, and the pool behind one token, on states gathered from the pool."""
    *tokens, pool, slots = operands
    x, dt, A, B, C = tokens
    before = pool if slots is None else take(pool, slots)
    step = jax.vmap(one_token, in_axes=(None, 0, 0))
    after, y = step(A.T, before.astype(A.dtype).mT, Tokens(x, dt, B, C))
    if slots is None:
        return y, stored(after.mT, pool.dtype, rounding_key)
    return y, put(pool, slots, after.mT, rounding_key)

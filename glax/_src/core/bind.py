"""Validate the arguments of a call and bind them to a `Recurrence`, the operand of every kernel.

The argument `cu_seqlens` is the field `boundaries` of a `Recurrence`: below `bind` all code uses that name.
"""

import dataclasses
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from glax._src.core.backend import x64_is_enabled
from glax._src.core.decay import Decay, promoted
from glax._src.core.erasure import Erasure
from glax._src.core.recurrence import Recurrence, to_int32
from glax._src.core.registry import Config, Platform
from glax._src.core.segments import Segments

# The shapes that every argument may have. Hq, Hk and Hv divide H, the largest of them; N is the number of sequences.
SHAPES = dict(
    query=("B T Hq K",),
    key=("B T Hk K",),
    value=("B T Hv V",),
    g=("B T H", "B T H K"),
    g_gamma=("H", "N H"),
    gk=("B T H K",),
    gv=("B T H V",),
    beta=("B T H",),
    erase=("B T H K",),
    write=("B T H V",),
    erase_along=("B T H K",),
    initial_state=("N H K V", "H K V"),
    erase_key=("B T Hk K",),
    erase_gate=("B T H K",),
    write_gate=("B T H V",),
    log_decay=("B T H K",),
    input_gate=("B T H",),
    a=("B T H K",),
    b=("B T H K",),
)
DTYPES = ("float32", "bfloat16", "float16", "float64")  # the dtypes of query, key and value
LARGEST = {name: float(np.finfo(name).max) for name in ("float32", "float64")}
# Arguments by token. They have no B in packed [T, heads, width] input, and no T in a step of one token.
ROWWISE = tuple(name for name in SHAPES if name not in ("g_gamma", "initial_state"))


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """Hold the arguments of `recurrent` that are no arrays and are known while tracing, by the same names."""

    reverse: bool = False
    pad_id: int | None = None
    states_every: int | None = None
    states_dtype: DTypeLike | None = None
    use_qk_l2norm: bool = False
    erase_before_decay: bool = False

    @property
    def static(self) -> "ScanOptions":
        """Return the options as plain Python values, so that equal options give one compiled program."""
        pad_id = None if self.pad_id is None else known_integer("pad_id", self.pad_id)
        every = None if self.states_every is None else known_integer("states_every", self.states_every)
        dtype = None if self.states_dtype is None else str(jnp.dtype(self.states_dtype))
        flags = bool(self.use_qk_l2norm), bool(self.erase_before_decay)
        return ScanOptions(bool(self.reverse), pad_id, every, dtype, *flags)

    @property
    def of_bind(self) -> dict:
        """Return reverse, pad_id, use_qk_l2norm and erase_before_decay by name: the options that are arguments of `bind`."""
        return dict(reverse=self.reverse, pad_id=self.pad_id, **self.flags)

    @property
    def flags(self) -> dict:
        """Return use_qk_l2norm and erase_before_decay by name: the options that a step of one token has, too."""
        return dict(use_qk_l2norm=self.use_qk_l2norm, erase_before_decay=self.erase_before_decay)

    def check(self, has_segments: bool):
        """Raise TypeError or ValueError for an option of another type or range. has_segments: whether the call has segment_ids,
        without which pad_id must be None."""
        check_flag("reverse", self.reverse)
        check_flag("use_qk_l2norm", self.use_qk_l2norm)
        check_flag("erase_before_decay", self.erase_before_decay)
        if self.pad_id is not None:
            known_integer("pad_id", self.pad_id)
            if not has_segments:
                raise ValueError(f"pad_id must be None without segment_ids, got {self.pad_id}")
        if self.states_every is not None:
            every = known_integer("states_every", self.states_every)
            if every < 1 or every % 64:
                raise ValueError(f"states_every must be a multiple of 64, from 64 on, got {self.states_every}")
        if self.states_dtype is not None:
            check_states_dtype(self.states_dtype)
            if self.states_every is None:
                raise ValueError(f"states_dtype must be None without states_every, got {self.states_dtype}")


def bind(
    query, key, value, *, g=None, g_gamma=None, gk=None, gv=None,
    beta=None, erase=None, write=None, erase_along=None, softmax_scale=None, initial_state=None, cu_seqlens=None,
    segment_ids=None, reverse=False, pad_id=None, use_qk_l2norm=False, erase_before_decay=False, one_token=False,
) -> Recurrence:  # fmt: skip
    """Check every argument, add a missing B, fold the gates, and broadcast g_gamma and initial_state to all sequences.

    The arguments are those of `recurrent`. one_token: whether the arguments of ROWWISE are [B, ...] without T; the recurrence
    then has one token. Raises TypeError or ValueError that names the argument. Values of arrays are not checked, since they may
    be traced.
    """
    arrays = dict(query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv)
    arrays |= dict(beta=beta, erase=erase, write=write, erase_along=erase_along, initial_state=initial_state)
    arrays = {name: as_float(name, x) for name, x in arrays.items() if x is not None}
    check_dtypes(arrays)
    flat = arrays["query"].ndim == 3 and not one_token
    sizes = check_shapes(arrays, absent="T" if one_token else "B" * flat)
    if flat or one_token:
        arrays |= {name: jnp.expand_dims(x, int(one_token)) for name, x in arrays.items() if name in ROWWISE}
    boundaries = None if cu_seqlens is None else check_boundaries(cu_seqlens, sizes)
    segments = None
    if segment_ids is not None:
        check_segment_ids(segment_ids, sizes, flat, cu_seqlens is not None)
        if sizes["T"] != 0:
            segments = Segments.from_ids(jnp.asarray(segment_ids[None] if flat else segment_ids), pad_id, reverse)

    N = sizes["N"] if boundaries is None else boundaries.shape[0] - 1
    check_per_sequence(arrays, N, cu_seqlens is not None)
    for name, rank in (("g_gamma", 2), ("initial_state", 4)):
        if name in arrays and arrays[name].ndim < rank:
            arrays[name] = jnp.broadcast_to(arrays[name], (N, *arrays[name].shape))
    wide = promoted(arrays["query"].dtype, jnp.float32)
    scale = sizes["K"] ** -0.5 if softmax_scale is None else softmax_scale
    r = Recurrence(
        q=arrays["query"],
        k=arrays["key"],
        v=arrays["value"],
        decay=Decay(),
        initial_state=arrays.get("initial_state"),
        boundaries=boundaries,
        scale=jnp.broadcast_to(jnp.asarray(scale, wide), (N,)),
        erasure=Erasure.from_arguments(
            *(arrays.get(name) for name in ("beta", "erase", "write", "erase_along")), before_decay=erase_before_decay
        ),
        reverse=reverse,
        segments=segments,
    )
    if use_qk_l2norm:
        r = r.replace(q=l2_normalized(r, r.q), k=l2_normalized(r, r.k))
    gates = (arrays.get(name) for name in ("g", "g_gamma", "gk", "gv"))
    r = r.replace(decay=Decay.from_gates(*gates, to_tokens=r.by_token, dtype=r.dtype))
    if r.erasure is not None and r.decay.form == "none":  # the state is the same before and behind the decay
        return r.replace(erasure=r.erasure.replace(before_decay=False))
    return r


def l2_normalized(r: Recurrence, x: Float[Array, "B T _ K"]) -> Float[Array, "B T _ K"]:
    """Return x with each row [K] divided by its norm, x * rsqrt(sum x^2 + 1e-6), in x's dtype. Padding becomes zeros.

    The quotient is formed in the dtype of sums of r, and rounded once.
    """
    if r.boundaries is not None:
        x = jnp.where(r.is_token[:, None, None], x, 0)
    elif r.segments is not None:
        x = r.segments.masked(x)
    wide = x.astype(r.dtype)
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def as_float(name: str, x) -> jax.Array:
    """Return x as a JAX array. Raises TypeError unless its dtype is floating point."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    return jnp.asarray(x)


def check_dtypes(arrays: dict[str, jax.Array]):
    """Raise TypeError unless query, key and value have one dtype of DTYPES. arrays: the arguments by name."""
    dtype = arrays["query"].dtype
    if str(dtype) not in DTYPES:
        raise TypeError(f"query must be float32, bfloat16, float16 or float64, got {dtype}")
    for name in ("key", "value"):
        if arrays[name].dtype != dtype:
            raise TypeError(f"{name} must be {dtype} as query is, got {arrays[name].dtype}")


def check_shapes(arrays: dict[str, jax.Array], absent: str = "") -> dict[str, int]:
    """Return the size of every letter of SHAPES, taken from the first argument that has the letter.

    absent: the letter that arguments by token lack, "B" or "T"; "" if they lack none. The size of an absent B is 1. Raises
    ValueError at the first argument that disagrees.
    """
    sizes: dict[str, int] = {}
    setter: dict[str, str] = {}
    for name, x in arrays.items():
        lacks = absent if name in ROWWISE else ""
        forms = [" ".join(letter for letter in form.split() if letter != lacks) for form in SHAPES[name]]
        form = next((form for form in forms if len(form.split()) == x.ndim), None)
        wanted = " or ".join(f"[{', '.join(form.split())}]" for form in forms)
        if form is None:
            as_query = " (query has no B)" if lacks == "B" and name != "query" else ""
            raise ValueError(f"{name} must be {wanted}{as_query}, got shape {x.shape}")
        for letter, size in zip(form.split(), x.shape, strict=True):
            if letter == "N":
                continue  # known once cu_seqlens is: check_per_sequence
            expected = sizes.setdefault(letter, size)
            by = setter.setdefault(letter, f"as in {name}")
            if size != expected:
                shape = f"[{', '.join(form.split())}]"
                raise ValueError(f"{name} must be {shape} with {letter}={expected} {by}, got shape {x.shape}")
            if size == 0 and letter not in "BT":
                raise ValueError(f"{name} must be {wanted} with {letter} of at least 1, got shape {x.shape}")
        if name == "value":
            heads = {name: sizes[letter] for name, letter in (("query", "Hq"), ("key", "Hk"), ("value", "Hv"))}
            largest = max(heads, key=lambda name: heads[name])
            sizes["H"], setter["H"] = heads[largest], f"as many as {largest} has heads"
            for name, count in heads.items():
                if heads[largest] % count:
                    raise ValueError(
                        f"{name} must have a number of heads that divides the {heads[largest]} of {largest}, got {count}"
                    )
    sizes.setdefault("B", 1)
    return sizes | {"N": sizes["B"]}


def check_boundaries(cu_seqlens, sizes: dict[str, int]) -> jax.Array:
    """Return cu_seqlens [N + 1] as int32. Raises TypeError or ValueError for another dtype or shape, and where B is not 1."""
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens must be [N + 1], got shape {cu_seqlens.shape}")
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens packs the sequences along T, so query must have B=1, got B={sizes['B']}")
    return to_int32(cu_seqlens)


def check_segment_ids(segment_ids, sizes: dict[str, int], flat: bool, packed: bool):
    """Raise TypeError or ValueError unless segment_ids are integers [B, T], or [T] if `flat`, that is where query has no B.

    packed: whether cu_seqlens is given, which is an error.
    """
    check_integers("segment_ids", segment_ids)
    if packed:
        raise ValueError("segment_ids must be None with cu_seqlens, for both divide T: pass one of them")
    B, T = sizes["B"], sizes["T"]
    if segment_ids.shape != ((T,) if flat else (B, T)):
        wanted = f"[T] with T={T} as in query, which has no B" if flat else f"[B, T] with B={B} and T={T} as in query"
        raise ValueError(f"segment_ids must be {wanted}, got shape {segment_ids.shape}")


def check_per_sequence(arrays: dict[str, jax.Array], N: int, packed: bool):
    """Raise ValueError unless g_gamma [N, H] and initial_state [N, H, K, V], where they have an axis N, have N entries."""
    by = "one fewer than cu_seqlens has entries" if packed else "B as in query"
    for name, rank in (("g_gamma", 2), ("initial_state", 4)):
        x = arrays.get(name)
        if x is not None and x.ndim == rank and x.shape[0] != N:
            wanted = " or ".join(f"[{', '.join(form.split())}]" for form in SHAPES[name])
            raise ValueError(f"{name} must be {wanted} with N={N}, {by}, got shape {x.shape}")


# ---- checks before tracing: types that JAX cannot trace, known values, and static arguments --------------------------

REQUIRED = ("query", "key", "value")


def check_before_tracing(
    arrays: dict, platform, cfg, options: ScanOptions | None = None, required: tuple[str, ...] = REQUIRED
):
    """Raise TypeError or ValueError for arguments that JAX cannot trace, or whose known values are wrong.

    arrays: the array arguments by name, None for each that is absent, with "query", "softmax_scale" and "cu_seqlens" among
    them. required: the names that must not be None. platform, cfg: as users pass them.
    """
    for name, x in arrays.items():
        if name != "softmax_scale" and (x is not None or name in required):
            check_array(name, x)
    if arrays.get("segment_ids") is not None:
        check_ids("segment_ids", arrays["segment_ids"])
    if arrays["softmax_scale"] is not None:
        check_real("softmax_scale", arrays["softmax_scale"], arrays["query"].dtype)
    Platform.parse(platform)
    if cfg is not None and not isinstance(cfg, Config):
        raise TypeError(
            f"cfg must be the Config of a kernel, such as glax.configs.ChunkedConfig(chunk=64), got {cfg!r}"
        )
    options = ScanOptions() if options is None else options
    options.check(has_segments=arrays.get("segment_ids") is not None)
    shape = np.shape(arrays["query"])
    check_known_boundaries(arrays["cu_seqlens"], shape[-3] if len(shape) > 2 else None)


GUARDS = ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_device")


def transferred(arrays: dict, to: jax.sharding.Sharding | None = None) -> dict:
    """Return the arrays with numbers and NumPy arrays transferred explicitly to the sharding `to`.

    If `to` is None, they are replicated over the devices of the first committed array; without one, and while tracing, JAX
    chooses the device. jit makes the same transfers implicitly and faster. Without a `jax.transfer_guard` the arrays are
    therefore returned as they are.
    """
    if all(getattr(jax.config, guard) in (None, "allow") for guard in GUARDS):
        return arrays
    if any(isinstance(x, Tracer) for x in arrays.values()):
        to = None  # the program's devices are unknown while tracing
    elif to is None:
        to = next((replicated(x) for x in arrays.values() if is_known(x) and x.committed), None)
    return {
        name: jax.device_put(x, to) if isinstance(x, int | float | np.ndarray | np.generic) else x
        for name, x in arrays.items()
    }


def replicated(x: jax.Array) -> jax.sharding.Sharding | None:
    """Return the sharding that replicates an array over the devices of x. Return None where no sharding expresses this."""
    if isinstance(x.sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
    return x.sharding if x.sharding.num_devices == 1 else None


def is_known(x) -> bool:
    """Return whether x is a JAX array with values, and not traced."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_array(x) -> TypeGuard[jax.Array | np.ndarray]:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) or hasattr(x, "__jax_array__")


def check_array(name: str, x):
    """Raise TypeError unless x is an array that JAX can trace. A list is refused, because JAX would trace each of its numbers."""
    if not is_array(x):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    # issubdtype is slow, so NumPy's kind decides first; bfloat16 has the kind of records there.
    if getattr(x.dtype, "kind", None) not in ("f", "i", "u", "b", "c") and not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"{name} must be an array of numbers, got dtype {x.dtype}")
    if isinstance(x, np.ndarray):
        check_memory(name, x)


def check_memory(name: str, x: np.ndarray):
    """Raise TypeError for what JAX does not read in a NumPy array: another byte order than this machine's, and a mask."""
    if not x.dtype.isnative:
        native = x.dtype.newbyteorder("=")
        raise TypeError(f"{name} must have the byte order of this machine, got {x.dtype.str}: pass astype('{native}')")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must have no mask, got a MaskedArray: pass filled(value)")


def check_memory_of_leaves(name: str, tree):
    """Raise TypeError for a NumPy array of a tree, such as a state or a pool, that has another byte order than this machine's,
    or a mask."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, np.ndarray):
            check_memory(name + jax.tree_util.keystr(path), x)


def check_integers(name: str, x):
    """Raise TypeError unless x is an array of integers, of any dtype."""
    check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {x.dtype}")


def check_ids(name: str, x):
    """Raise TypeError or ValueError unless x is an array of integers whose known values JAX can hold.

    JAX reads int64 as int32 and uint64 as uint32 without jax_enable_x64, and drops the upper bits: different ids become equal.
    """
    check_integers(name, x)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.itemsize == 8 and x.size and not x64_is_enabled():
        held = jnp.iinfo(jnp.int32 if x.dtype.kind == "i" else jnp.uint32)
        for value in (x.min(), x.max()):
            if not held.min <= value <= held.max:
                raise ValueError(f"{name} must hold {held.dtype}, as which JAX reads {x.dtype}, got {value}")


def known_values(x) -> np.ndarray | None:
    """Return the values of an array x of integers. Return None if x is traced or lies on the devices of another process.

    Narrow dtypes are converted to int64, so that values can be compared with numbers that do not fit the dtype.
    """
    if not isinstance(x, np.ndarray | np.generic) and not (is_known(x) and x.is_fully_addressable):
        return None
    known = np.asarray(jax.device_get(x))
    return known if known.dtype.itemsize == 8 else known.astype(np.int64)


def check_flag(name: str, x):
    """Raise TypeError unless x is True or False."""
    if not isinstance(x, bool | np.bool_):
        got = f"an array of {x.dtype}" if is_array(x) else repr(x)
        raise TypeError(f"{name} must be True or False, known while tracing, got {got}")


def check_states_dtype(dtype):
    try:
        known = str(jnp.dtype(dtype)) in DTYPES
    except TypeError:  # NumPy raises it for a value that names no dtype
        known = False
    if not known:
        raise TypeError(f"states_dtype must be {', '.join(DTYPES)} or None, got {dtype}")


def check_integer(name: str, x):
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an integer, known while tracing, got {x!r}")


def known_integer(name: str, x) -> int:
    """Return x, an integer or an array of one integer, as int. Raises TypeError for anything else, traced arrays included.

    name: the argument, for the message.
    """
    if isinstance(x, np.ndarray):
        check_memory(name, x)
    if is_array(x) and x.shape == () and jnp.issubdtype(x.dtype, jnp.integer):
        x = x if (value := known_number(x)) is None else value
    check_integer(name, x)
    return int(x)


def checked_size(name: str, x, least: int) -> int:
    """Return x as int. Raises TypeError unless x is an integer known while tracing, and ValueError if x is below `least`."""
    if (size := known_integer(name, x)) < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
    return size


def check_real(name: str, x, dtype=np.float32):
    """Check that x is one real number and, where its value is known, finite in the dtype of sums over inputs of `dtype`."""
    if isinstance(x, bool) or not (isinstance(x, int | float) or is_array(x)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if isinstance(x, np.ndarray):
        check_memory(name, x)
    if is_array(x):
        if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer)):
            raise TypeError(f"{name} must be a real number, got {x.dtype}")
        if x.shape != ():
            raise ValueError(f"{name} must be one number, got shape {x.shape}")
    value = known_number(x)
    sums = "float64" if dtype == np.float64 and x64_is_enabled() else "float32"
    # A Python int may exceed every float, so it is compared without conversion.
    if value is not None and not abs(value) <= LARGEST[sums]:
        raise ValueError(f"{name} must be finite in {sums}, the dtype of sums, got {value}")


def known_number(x) -> int | float | None:
    """Return the value of a scalar. Return None if the scalar is traced or lies on the devices of another process."""
    if isinstance(x, int | float):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return x.item() if jnp.issubdtype(x.dtype, jnp.integer) else float(x)
    if is_known(x) and x.is_fully_addressable:
        return known_number(jax.device_get(x))  # an explicit transfer, which "disallow" permits
    return None


def check_known_boundaries(cu_seqlens, T: int | None, by: str = "query"):
    """Raise ValueError if known values of cu_seqlens [N + 1] do not begin with 0, decrease, or end above T.

    T: the number of tokens of the argument `by`. Nothing is checked if T is None or the values are traced. `bind` checks shape
    and dtype.
    """
    if T is None or not is_array(cu_seqlens) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        return
    if (cuts := known_values(cu_seqlens)) is None:
        return
    if cuts[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {cuts[0]}")
    drops = np.flatnonzero(
        cuts[1:] < cuts[:-1]
    )  # a comparison, because a difference of unsigned integers is never negative
    if drops.size:
        i = int(drops[0])
        raise ValueError(f"cu_seqlens must not decrease, got {cuts[i]} before {cuts[i + 1]} at position {i + 1}")
    if cuts[-1] > T:
        raise ValueError(f"cu_seqlens must not pass T={T} as in {by}, got {cuts[-1]} at its end")

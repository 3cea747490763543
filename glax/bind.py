"""From what users pass to the one value that kernels take. All validation happens here, once."""

import jax
import jax.numpy as jnp
import numpy as np

from glax.decay import Decay
from glax.recurrence import Recurrence, to_int32
from glax.registry import Config, Platform

# What every argument may be, in letters. Hq, Hk and Hv divide H, the largest of them; N is the number of sequences.
SHAPES = dict(
    query=("B T Hq K",),
    key=("B T Hk K",),
    value=("B T Hv V",),
    g=("B T H", "B T H K"),
    g_gamma=("H", "N H"),
    gk=("B T H K",),
    gv=("B T H V",),
    initial_state=("N H K V", "H K V"),
)
ROWWISE = ("query", "key", "value", "g", "gk", "gv")  # lose their B in packed [T, heads, width] input


def bind(
    query, key, value, *, g=None, g_gamma=None, gk=None, gv=None,
    softmax_scale=None, initial_state=None, cu_seqlens=None, reverse=False,
) -> Recurrence:  # fmt: skip
    """Checks every argument, adds a missing B, folds the gates, and spreads what is given once over the sequences."""
    arrays = dict(query=query, key=key, value=value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, initial_state=initial_state)
    arrays = {name: as_float(name, x) for name, x in arrays.items() if x is not None}
    check_dtypes(arrays)
    flat = arrays["query"].ndim == 3
    sizes = check_shapes(arrays, flat)
    if flat:
        arrays |= {name: x[None] for name, x in arrays.items() if name in ROWWISE}
    boundaries = None if cu_seqlens is None else check_boundaries(cu_seqlens, sizes)

    N = sizes["N"] if boundaries is None else boundaries.shape[0] - 1
    check_per_sequence(arrays, N, cu_seqlens is not None)
    for name, rank in (("g_gamma", 2), ("initial_state", 4)):
        if name in arrays and arrays[name].ndim < rank:
            arrays[name] = jnp.broadcast_to(arrays[name], (N, *arrays[name].shape))
    wide = jnp.promote_types(arrays["query"].dtype, jnp.float32)
    scale = sizes["K"] ** -0.5 if softmax_scale is None else softmax_scale
    r = Recurrence(
        q=arrays["query"],
        k=arrays["key"],
        v=arrays["value"],
        decay=Decay(),
        initial_state=arrays.get("initial_state"),
        boundaries=boundaries,
        scale=jnp.broadcast_to(jnp.asarray(scale, wide), (N,)),
        reverse=reverse,
    )
    gates = (arrays.get(name) for name in ("g", "g_gamma", "gk", "gv"))
    return r.replace(decay=Decay.from_gates(*gates, to_tokens=r.by_token))


def as_float(name: str, x) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    return jnp.asarray(x)


def check_dtypes(arrays: dict[str, jax.Array]):
    dtype = arrays["query"].dtype
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise TypeError(f"query must be float32, bfloat16, float16 or float64, got {dtype}")
    for name in ("key", "value"):
        if arrays[name].dtype != dtype:
            raise TypeError(f"{name} must be {dtype} as query is, got {arrays[name].dtype}")


def check_shapes(arrays: dict[str, jax.Array], flat: bool) -> dict[str, int]:
    """The size of every letter of SHAPES, each set by the first argument that has it. Raises at the first that disagrees."""
    sizes: dict[str, int] = {}
    setter: dict[str, str] = {}
    for name, x in arrays.items():
        forms = [form.removeprefix("B ") if flat and name in ROWWISE else form for form in SHAPES[name]]
        form = next((form for form in forms if len(form.split()) == x.ndim), None)
        wanted = " or ".join(f"[{', '.join(form.split())}]" for form in forms)
        if form is None:
            as_query = " (query has no B)" if flat and name in ROWWISE and name != "query" else ""
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
            largest = max(heads, key=heads.get)
            sizes["H"], setter["H"] = heads[largest], f"as many as {largest} has heads"
            for name, count in heads.items():
                if heads[largest] % count:
                    raise ValueError(
                        f"{name} must have a number of heads that divides the {heads[largest]} of {largest}, got {count}"
                    )
    sizes.setdefault("B", 1)
    return sizes | {"N": sizes["B"]}


def check_boundaries(cu_seqlens, sizes: dict[str, int]) -> jax.Array:
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise TypeError(f"cu_seqlens must hold integers, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens must be [N + 1], got shape {cu_seqlens.shape}")
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens packs the sequences along T, so query must have B=1, got B={sizes['B']}")
    return to_int32(cu_seqlens)


def check_per_sequence(arrays: dict[str, jax.Array], N: int, packed: bool):
    by = "one fewer than cu_seqlens has entries" if packed else "B as in query"
    for name, rank in (("g_gamma", 2), ("initial_state", 4)):
        x = arrays.get(name)
        if x is not None and x.ndim == rank and x.shape[0] != N:
            wanted = " or ".join(f"[{', '.join(form.split())}]" for form in SHAPES[name])
            raise ValueError(f"{name} must be {wanted} with N={N}, {by}, got shape {x.shape}")


def check_scale(softmax_scale):
    if softmax_scale is None:
        return
    if not isinstance(softmax_scale, int | float | np.number | np.ndarray | jax.Array) or isinstance(
        softmax_scale, bool
    ):
        raise TypeError(f"softmax_scale must be a number, got {type(softmax_scale).__name__}")
    if np.shape(softmax_scale) != ():
        raise ValueError(f"softmax_scale must be one number, got shape {np.shape(softmax_scale)}")


# ---- what must be checked before tracing: types that JAX cannot trace, values, and what is part of the program -------


REQUIRED = ("query", "key", "value")


def check_before_tracing(arrays: dict, platform, cfg, reverse, required: tuple[str, ...] = REQUIRED):
    for name, x in arrays.items():
        if name == "softmax_scale":
            check_scale(x)
        elif not hasattr(x, "dtype") and (x is not None or name in required):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    Platform.parse(platform)
    if cfg is not None and not isinstance(cfg, Config):
        raise TypeError(f"cfg must be the Config of a kernel, such as ChunkedConfig(chunk=64), got {cfg!r}")
    if not isinstance(reverse, bool | np.bool_):
        raise TypeError(f"reverse must be True or False, known while tracing, got {reverse!r}")
    check_known_boundaries(arrays["cu_seqlens"], arrays["query"])


def check_known_boundaries(cu_seqlens, query):
    """The values of cu_seqlens, where they are known; its shape and dtype are left to `bind`."""
    if not isinstance(cu_seqlens, np.ndarray | jax.Array) or isinstance(cu_seqlens, jax.core.Tracer):
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0 or np.ndim(query) < 3:
        return
    cuts, T = np.asarray(cu_seqlens), query.shape[-3]
    if cuts[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {cuts[0]}")
    if (drops := np.flatnonzero(cuts[1:] < cuts[:-1])).size:  # compared: a difference of unsigned integers is never negative
        i = int(drops[0])
        raise ValueError(f"cu_seqlens must not decrease, got {cuts[i]} before {cuts[i + 1]} at position {i + 1}")
    if cuts[-1] > T:
        raise ValueError(f"cu_seqlens must not pass T={T} as in query, got {cuts[-1]} at its end")

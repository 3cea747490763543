"""Provide the recurrent family of ejkernel by its names: change the import, and leave the calls.

`g` of shape [B, T, H] is a per-head gate, and of shape [B, T, H, K] a per-key gate. (ejkernel reads its `g` in either way,
depending on the platform.) `g_gamma` may be [1, H]. The states of N packed sequences may be [1, N, H, K, V], and then the final
states have that shape, too.

Sizes of blocks, warps and stages have no meaning here. Only the functions of this module accept them; they are ignored, with
one warning per process.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

import glax
from glax import (
    AutotunePolicy,
    Backend,
    Config,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Outputs,
    PersistentCache,
    Platform,
    Tuner,
)

__all__ = [
    "AutotunePolicy",
    "Backend",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "Invocation",
    "Kernel",
    "PersistentCache",
    "Platform",
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "Tuner",
    "UnsupportedError",
    "detect_platform",
    "kernel_registry",
    "lightning_attn",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
]


class UnsupportedError(glax.UnsupportedError, ValueError):
    """Say that no kernel can run a call, as `glax.UnsupportedError` does, and as the ValueError that ejkernel raises.

    The functions of this module raise it. The message lists the reason of each kernel.

    >>> issubclass(glax.compat.ejkernel.UnsupportedError, ValueError)
    True
    """


@contextlib.contextmanager
def value_errors() -> Iterator[None]:
    """Raise glax's UnsupportedError inside the context as this module's, which is a ValueError, too."""
    try:
        yield
    except glax.UnsupportedError as error:
        raise UnsupportedError(str(error)) from error


# ---- configs ---------------------------------------------------------------------------------------------------------


# "cute" and "tilelang" are platforms of ejkernel. glax has no kernels for them, and a call that requires one raises an error.
PLATFORMS = ("auto", *map(str, Platform), "cute", "tilelang")


@dataclasses.dataclass(frozen=True)
class RecurrentAttentionConfig:
    """Hold the config of ejkernel, for `cfg` of this module's functions.

    platform: the platform of the kernel, as in `glax.recurrent`; "auto" or None for the one that glax chooses.
    backend: "any", or the backend that JAX computes on.
    block_q: the tokens per chunk of the XLA kernel. A value other than 64, ejkernel's default, chooses that kernel if platform
        is "auto".

    The other fields are ignored, with one warning per process if they are not ejkernel's defaults. Raises TypeError or
    ValueError for other platforms and backends, and for a block_q that is no integer of at least 1.

    >>> glax.compat.ejkernel.RecurrentAttentionConfig(block_q=32).platform
    'auto'
    """

    platform: str = "auto"
    backend: str = "any"
    block_q: int = 64
    block_k: int = 64
    block_d: int = 64
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self):
        if not (self.platform is None or (isinstance(self.platform, str) and self.platform in PLATFORMS)):
            raise ValueError(f"platform must be None, {', '.join(map(repr, PLATFORMS))}, got {self.platform!r}")
        if isinstance(self.block_q, bool) or not isinstance(self.block_q, int | np.integer):
            raise TypeError(f"block_q must be an integer, got {self.block_q!r}")
        if self.block_q < 1:
            raise ValueError(f"block_q must be at least 1, got {self.block_q}")
        if self.backend not in (Backend.ANY, here := Backend.here()):
            raise ValueError(
                f"backend must be 'any' or {str(here)!r}, on which JAX computes here, got {self.backend!r}"
            )


IGNORED = dict(block_k=64, block_d=64, block_v=64, num_warps=4, num_stages=1)  # ejkernel's defaults


@functools.cache
def say_ignored():
    """Warn, once in a process, that sizes of blocks, warps and stages are ignored."""
    warnings.warn(
        "glax ignores block_k, block_d, block_v, num_warps and num_stages, and block_q but on XLA: its kernels have configs "
        "of their own, which glax.tune measures. This is said once.",
        stacklevel=4,
    )


def native_choice(cfg, platform) -> tuple[str | None, Config | None]:
    """Return (platform, cfg) as `glax.recurrent` takes them, from a config of ejkernel or of glax. The platform of the call
    comes before cfg.platform."""
    if not isinstance(cfg, RecurrentAttentionConfig):
        return platform, cfg
    platform = cfg.platform if platform is None else platform
    chunked = Platform.parse(platform) in (None, Platform.XLA)
    chooses_chunk = cfg.block_q != RecurrentAttentionConfig.block_q
    if (chooses_chunk and not chunked) or any(IGNORED.get(name, x) != x for name, x in vars(cfg).items()):
        say_ignored()
    chunked_config: Any = glax.configs.ChunkedConfig
    return platform, chunked_config(int(cfg.block_q)) if chooses_chunk and chunked else None


# ---- functions -------------------------------------------------------------------------------------------------------


def recurrent(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | Float[Array, "1 H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "1 N H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    block_k: int = 64,
    block_v: int = 64,
    num_warps: int = 4,
    num_stages: int = 1,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    pad_id: int | None = None,
    platform: str | None = None,
    cfg: RecurrentAttentionConfig | Config | None = None,
) -> Outputs:
    """Compute `glax.recurrent`, which has the formula, with ejkernel's arguments.

    query to pad_id: as in `glax.recurrent`; g_gamma may also be [1, H], and with cu_seqlens initial_state [1, N, H, K, V].
    segment_ids and pad_id are glax's own. block_k, block_v, num_warps, num_stages: ignored, with one warning per process unless
    they are ejkernel's defaults. platform, cfg: the platform of the kernel and its config, a `RecurrentAttentionConfig` or the
    config of one of glax's kernels; glax chooses if None.

    Returns `glax.Outputs`: output [B, T, H, V], and the final states [N, H, K, V], or [1, N, H, K, V] as the initial states are.
    Raises TypeError or ValueError, which names the argument, and `UnsupportedError`.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.ejkernel.recurrent(q, q, q, g=jnp.full((1, 8, 2), -0.1))[0].shape
    (1, 8, 2, 4)
    """
    return solved(
        glax.recurrent,
        (block_k, block_v, num_warps, num_stages),
        *(query, key, value, g, one_row(g_gamma), gk, gv),
        softmax_scale=softmax_scale, initial_state=initial_state, reverse=reverse, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, pad_id=pad_id, platform=platform, cfg=cfg,
    )  # fmt: skip


def solved(
    function: Callable[..., Outputs],
    tiles: tuple[int, ...],
    *arrays,
    initial_state=None,
    cu_seqlens=None,
    platform=None,
    cfg=None,
    **options,
) -> Outputs:
    """Return function(*arrays, **options), a function of glax, for arguments in ejkernel's form.

    tiles: block_k, block_v, num_warps and num_stages, which are ignored. initial_state, cu_seqlens, platform, cfg: as in
    `recurrent` of this module.
    """
    if tiles != (64, 64, 4, 1):  # ejkernel's defaults
        say_ignored()
    platform, cfg = native_choice(cfg, platform)
    states = dict(initial_state=unpacked(initial_state, cu_seqlens), cu_seqlens=cu_seqlens)
    with value_errors():
        outputs = function(*arrays, **states, **options, platform=platform, cfg=cfg)
    return outputs._replace(final_state=outputs.final_state[None]) if wide(initial_state, 5) else outputs


def recurrent_attention(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | Float[Array, "1 H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "1 N H K V"] | None = None,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    pad_id: int | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: RecurrentAttentionConfig | Config | None = None,
) -> Float[Array, "B T H V"] | Outputs:
    """Compute `recurrent`, and return the output [B, T, H, V] alone, or (output, final_state) if `return_state`.

    The arguments, results and errors are those of `recurrent`; TypeError for a return_state that is no bool.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.ejkernel.recurrent_attention(q, q, q).shape
    (1, 8, 2, 4)
    """
    check_return_state(return_state)
    gates = (g, g_gamma, gk, gv)
    rest = (softmax_scale, initial_state, reverse, cu_seqlens)
    outputs = recurrent(
        query, key, value, *gates, *rest, segment_ids=segment_ids, pad_id=pad_id, platform=platform, cfg=cfg
    )
    return outputs if return_state else outputs.output


def recurrent_gla(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, "H"] | Float[Array, "N H"] | Float[Array, "1 H"] | None = None,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "1 N H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    *tiles: int,
    **options,
) -> Outputs:
    """Compute gated linear attention:   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = softmax_scale * S_t^T q_t.

    g: log decays, [B, T, H, K], one per key channel, or [B, T, H], one per head; none if None. tiles: block_k to num_stages of
    `recurrent`, in its order. options: segment_ids, pad_id, platform and cfg, and the tiles by name. The other arguments, the
    results and the errors are those of `recurrent`.

    Yang et al. 2024, https://arxiv.org/abs/2312.06635.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.ejkernel.recurrent_gla(q, q, q, jnp.full(q.shape, -0.1))[0].shape
    (1, 8, 2, 4)
    """
    gates = (g, g_gamma, None, None)
    return recurrent(query, key, value, *gates, softmax_scale, initial_state, reverse, cu_seqlens, *tiles, **options)


def lightning_attn(
    query: Float[Array, "B T Hq K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T Hv V"],
    layer_idx: int | Int[Array, ""],
    num_layers: int,
    softmax_scale: float | Float[Array, ""] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "1 N H K V"] | None = None,
    reverse: bool = False,
    cu_seqlens: Int[Array, "N+1"] | None = None,
    block_k: int = 64,
    block_v: int = 64,
    num_warps: int = 4,
    num_stages: int = 1,
    **options,
) -> Outputs:
    """Compute lightning attention, in head h = 0, 1, ...:

        S_t = exp(-(8 h / H) (1 - layer_idx / num_layers)) S_{t-1} + k_t v_t^T,     o_t = softmax_scale * S_t^T q_t

    layer_idx, num_layers: the layer's number in its model, which may be traced, and the number of layers. initial_state:
    [N, H, K, V], or with cu_seqlens [1, N, H, K, V]. block_k, block_v, num_warps, num_stages: ignored, as in `recurrent`.
    options: segment_ids, pad_id, platform and cfg. The other arguments, the results and the errors are those of `recurrent`,
    and of `glax.lightning_attention`.

    Qin et al. 2024, https://arxiv.org/abs/2401.04658.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.ejkernel.lightning_attn(q, q, q, layer_idx=0, num_layers=12)[0].shape
    (1, 8, 2, 4)
    """
    return solved(
        glax.lightning_attention,
        (block_k, block_v, num_warps, num_stages),
        *(query, key, value, layer_idx, num_layers),
        softmax_scale=softmax_scale, initial_state=initial_state, reverse=reverse, cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip


def check_return_state(x):
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"return_state must be True or False, known while tracing, got {x!r}")


def wide(x, rank: int) -> bool:
    """Return whether x is an array with `rank` axes."""
    return getattr(x, "ndim", None) == rank


def one_row(g_gamma):
    """Return g_gamma as [H] if it is [1, H], which ejkernel takes for all sequences."""
    return g_gamma[0] if wide(g_gamma, 2) and g_gamma.shape[0] == 1 else g_gamma


def unpacked(initial_state, cu_seqlens):
    """Return initial states [N, H, K, V] as they are, and those of packed sequences with a batch axis, [1, N, H, K, V], without
    it.

    Raises ValueError for a batch axis without cu_seqlens or of another size than 1.
    """
    if not wide(initial_state, 5):
        return initial_state
    if cu_seqlens is None or initial_state.shape[0] != 1:
        wanted = "[1, N, H, K, V] with cu_seqlens, or [N, H, K, V]"
        raise ValueError(f"initial_state must be {wanted}, got shape {initial_state.shape}")
    return initial_state[0]


# ---- operations and their registry -----------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Outputs]] = dict(
    recurrent=recurrent, lightning_attn=lightning_attn, gla=recurrent_gla
)


class KernelRegistry(glax.KernelRegistry):
    """Provide glax's registry, and the functions in front of it by ejkernel's names of algorithms.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.compat.ejkernel.kernel_registry.get("recurrent", platform="xla")(q, q, q)[0].shape
    (1, 8, 2, 4)
    """

    def __init__(self, kernels: dict[str, glax.KernelSpec]):
        self.kernels = kernels

    def get(self, algorithm: str, platform: str | None = None, backend: str | None = None) -> Callable[..., Outputs]:
        """Return the function of an algorithm, restricted to that platform. The function returns (output, final_state).

        algorithm: "recurrent", "lightning_attn" or "gla". platform: any if None or "auto". backend: a `Backend` as text; any if
        None.

        Raises ValueError if algorithm, platform or backend is unknown, and UnsupportedError if no kernel of that platform and
        backend runs here.
        """
        function, wanted = function_of(algorithm), Platform.parse(platform)
        backends = [str(each) for each in Backend]
        if backend is not None and backend not in backends:
            raise ValueError(f"backend must be None or {' or '.join(map(repr, backends))}, got {backend!r}")
        _ = glax.configs.ChunkedConfig  # which loads the kernels
        here = Backend.here()
        forward = [spec for spec in self.kernels.values() if spec.role == "forward"]
        usable = [spec for spec in forward if spec.backend in (here, Backend.ANY)]
        eligible = [
            spec for spec in usable if backend in (None, Backend.ANY, spec.backend) or spec.backend is Backend.ANY
        ]
        if not any(wanted in (None, spec.platform) for spec in eligible):
            names = ", ".join(sorted({repr(str(spec.platform)) for spec in usable}))
            kernel = f"no kernel of {algorithm!r} on platform {platform!r} for backend {backend!r}"
            raise UnsupportedError(f"{kernel} runs on a {here}, which JAX computes on here; those of {names} do")
        return functools.partial(function, platform=platform)


kernel_registry = KernelRegistry(glax.kernel_registry.kernels)


def function_of(algorithm: str) -> Callable[..., Outputs]:
    """Return this module's public function of the name `algorithm`: "recurrent", "lightning_attn" or "gla", in any case of
    letters. Raises ValueError for another name."""
    if not isinstance(algorithm, str) or algorithm.lower() not in FUNCTIONS:
        raise ValueError(f"algorithm must be {' or '.join(map(repr, FUNCTIONS))}, got {algorithm!r}")
    return FUNCTIONS[algorithm.lower()]


def detect_platform(algorithm: str, platform: str | None = "auto") -> Platform:
    """Return the platform that is named. For "auto" or None, return the one that runs a usual call of the algorithm here: of
    float32 query, key and value [1, 1024, 4, 64].

    algorithm: "recurrent", "lightning_attn" or "gla". platform: a name of a `Platform`. Raises ValueError for unknown names.

    >>> glax.compat.ejkernel.detect_platform("recurrent", "xla")
    <Platform.XLA: 'xla'>
    """
    function, wanted = function_of(algorithm), Platform.parse(platform)
    if wanted is not None:
        return wanted
    layers = dict(layer_idx=0, num_layers=1) if function is lightning_attn else {}
    return glax.detect_platform(functools.partial(function, **layers))


class RecurrentAttention(glax.RecurrentAttention):
    """Define ejkernel's operation: RecurrentAttention().run(query, ..., cfg=cfg), or executor(RecurrentAttention(), query, ...).

    The results and the errors are those of `recurrent_attention`. The arguments are those of `run`, in ejkernel's order, which
    differs from the order of `recurrent_attention`. `run` needs cfg, by name; an executor chooses it if left out. cfg: a
    RecurrentAttentionConfig, the Config of one of glax's kernels, which tuning finds, or None, by which glax chooses. Other
    methods: as in `glax.Kernel`.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> operation = glax.compat.ejkernel.RecurrentAttention()
    >>> operation.run(q, q, q, cfg=glax.compat.ejkernel.RecurrentAttentionConfig()).shape
    (1, 8, 2, 4)
    """

    op_id = "recurrent"
    positions = (
        "query", "key", "value", "g", "g_gamma", "gk", "gv", "softmax_scale", "initial_state", "reverse", "cu_seqlens",
        "return_state", "platform",
    )  # fmt: skip

    def run(
        self,
        query: Float[Array, "B T Hq K"],
        key: Float[Array, "B T Hk K"],
        value: Float[Array, "B T Hv V"],
        g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
        g_gamma: Float[Array, "H"] | Float[Array, "N H"] | Float[Array, "1 H"] | None = None,
        gk: Float[Array, "B T H K"] | None = None,
        gv: Float[Array, "B T H V"] | None = None,
        softmax_scale: float | Float[Array, ""] | None = None,
        initial_state: Float[Array, "N H K V"] | Float[Array, "1 N H K V"] | None = None,
        reverse: bool = False,
        cu_seqlens: Int[Array, "N+1"] | None = None,
        return_state: bool = False,
        platform: str | None = None,
        *,
        cfg: RecurrentAttentionConfig | Config | None,
    ) -> Float[Array, "B T H V"] | Outputs:
        """Compute `recurrent_attention` with that config; glax chooses if cfg is None. The arguments have ejkernel's order."""
        return recurrent_attention(
            query, key, value, g, g_gamma, gk, gv, initial_state, cu_seqlens, softmax_scale=softmax_scale,
            reverse=reverse, return_state=return_state, platform=platform, cfg=cfg,
        )  # fmt: skip

    def get_impl(self, cfg: RecurrentAttentionConfig | Config) -> Callable[..., Outputs]:
        """Return `recurrent` with that config, as `kernel_registry.get` returns it. The function returns (output,
        final_state)."""
        if not isinstance(cfg, RecurrentAttentionConfig):
            return functools.partial(recurrent, cfg=cfg)
        return functools.partial(kernel_registry.get("recurrent", cfg.platform, cfg.backend), cfg=cfg)

    def runner(self, cfg):
        return functools.partial(self.run, cfg=cfg)

    def heuristic_cfg(self, inv) -> RecurrentAttentionConfig:
        """Return the default config, which leaves the choice to glax."""
        return RecurrentAttentionConfig()

    def able(self, inv):
        with value_errors():
            return super().able(inv)

    def as_bound(self, arguments: dict) -> dict:
        state = unpacked(arguments.get("initial_state"), arguments.get("cu_seqlens"))
        return arguments | dict(g_gamma=one_row(arguments.get("g_gamma")), initial_state=state)

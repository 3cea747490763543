"""Exact, fast kernels for gated linear attention and the recurrent linear attentions around it, in JAX."""

from glax._version import __version__
from glax.api import (
    lightning_attention,
    recurrent,
    recurrent_attention,
    recurrent_gla,
    retention,
    simple_gla,
)
from glax.execution.cache import ConfigCache, PersistentCache, overlay
from glax.execution.executor import Executor
from glax.execution.invocation import Invocation
from glax.execution.kernel import Kernel
from glax.execution.selection import AutotunePolicy, ConfigSelectorChain
from glax.execution.tuner import Tuner
from glax.kernels.cpu import native
from glax.operation import RecurrentAttention
from glax.prefill import prefill_into
from glax.recurrence import Outputs, Recurrence
from glax.registry import Backend, Config, KernelRegistry, KernelSpec, Platform, UnsupportedError, kernel_registry
from glax.speculative import Draft, commit, recurrent_verify
from glax.step import recurrent_step
from glax.tuning import detect_platform, explain, tune

native.library()  # XLA must know its kernels where a program that holds them is read back, with no call of glax before

__all__ = [
    "AutotunePolicy",
    "Backend",
    "Config",
    "ConfigCache",
    "ConfigSelectorChain",
    "Draft",
    "Executor",
    "Invocation",
    "Kernel",
    "KernelRegistry",
    "KernelSpec",
    "Outputs",
    "PersistentCache",
    "Platform",
    "Recurrence",
    "RecurrentAttention",
    "Tuner",
    "UnsupportedError",
    "__version__",
    "commit",
    "detect_platform",
    "explain",
    "kernel_registry",
    "lightning_attention",
    "overlay",
    "prefill_into",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "recurrent_step",
    "recurrent_verify",
    "retention",
    "simple_gla",
    "tune",
]

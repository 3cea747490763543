"""Exact, fast kernels for gated linear attention and the recurrent linear attentions around it, in JAX."""

from glax import configs
from glax._src.api.delta import delta_rule, gated_delta_rule, kda
from glax._src.api.explain import detect_platform, explain, tune
from glax._src.api.export import export_checks
from glax._src.api.mamba3 import Mamba3State, mamba3, mamba3_step
from glax._src.api.mlstm import MLSTMState, mlstm, mlstm_step
from glax._src.api.named import (
    comba,
    gated_delta_product,
    gated_delta_product_step,
    gated_delta_rule_2,
    rwkv7,
    rwkv7_step,
)
from glax._src.api.operation import RecurrentAttention
from glax._src.api.recurrent import (
    lightning_attention,
    recurrent,
    recurrent_attention,
    recurrent_gla,
    retention,
    simple_gla,
)
from glax._src.api.selective_scan import selective_scan, selective_scan_step
from glax._src.core.recurrence import Outputs, OutputsWithStates, PackedStates, Recurrence
from glax._src.core.registry import (
    Backend,
    Config,
    KernelRegistry,
    KernelSpec,
    Platform,
    UnsupportedError,
    kernel_registry,
)
from glax._src.kernels import import_pallas
from glax._src.kernels.common.gpu import locate_mosaic_runtime
from glax._src.kernels.cpu.library import load_library as load_cpu_library
from glax._src.kernels.cuda.library import load_library as load_cuda_library
from glax._src.serving.decode_step import recurrent_step
from glax._src.serving.prefill import prefill_into
from glax._src.serving.speculative import Draft, commit, recurrent_verify
from glax._src.tuning.cache import ConfigCache, PersistentCache, overlay
from glax._src.tuning.executor import Executor
from glax._src.tuning.invocation import Invocation
from glax._src.tuning.op import Kernel
from glax._src.tuning.selection import AutotunePolicy, ConfigSelectorChain
from glax._src.tuning.tuner import Tuner
from glax._version import __version__

# XLA must know the kernels where a program that holds them is read back, with no call of glax before.
load_cpu_library()
load_cuda_library()
locate_mosaic_runtime()
import_pallas()

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
    "MLSTMState",
    "Mamba3State",
    "Outputs",
    "OutputsWithStates",
    "PackedStates",
    "PersistentCache",
    "Platform",
    "Recurrence",
    "RecurrentAttention",
    "Tuner",
    "UnsupportedError",
    "__version__",
    "comba",
    "commit",
    "configs",
    "delta_rule",
    "detect_platform",
    "explain",
    "export_checks",
    "gated_delta_product",
    "gated_delta_product_step",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "kda",
    "kernel_registry",
    "lightning_attention",
    "mamba3",
    "mamba3_step",
    "mlstm",
    "mlstm_step",
    "overlay",
    "prefill_into",
    "recurrent",
    "recurrent_attention",
    "recurrent_gla",
    "recurrent_step",
    "recurrent_verify",
    "retention",
    "rwkv7",
    "rwkv7_step",
    "selective_scan",
    "selective_scan_step",
    "simple_gla",
    "tune",
]

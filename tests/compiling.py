"""Options of XLA for tests: programs that compile in a fraction of the time, and programs as users run them; and their count.

What LLVM makes of a program takes more than half of the time. Without its optimizations, and with the plainer of the two ways to
emit fusions that JAX 0.10 has, the values are those of the same operations in the same order. tests/conftest.py makes that the
default on CPUs. The conformance suite holds the kernels with OPTIMIZED code for every form of decay, in the cases that
`is_optimized` of tests/conformance/test_conformance.py names.
"""

import functools

import jax

TWO_EMITTERS = jax.__version_info__ < (0, 11)
UNOPTIMIZED = dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
UNOPTIMIZED |= dict(xla_cpu_use_fusion_emitters=False) if TWO_EMITTERS else {}
quick_jit = functools.partial(jax.jit, compiler_options=UNOPTIMIZED)

# XLA's own defaults.
OPTIMIZED = dict(xla_backend_optimization_level=3, xla_llvm_disable_expensive_passes=False)
OPTIMIZED |= dict(xla_cpu_use_fusion_emitters=True) if TWO_EMITTERS else {}


class Compiled:
    """Count the programs that XLA compiles while the context is open."""

    def __enter__(self):
        self.count, self.is_open = 0, True
        jax.monitoring.register_event_duration_secs_listener(self.note)
        return self

    def note(self, event: str, duration: float, **_):
        self.count += self.is_open and event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        self.is_open = False

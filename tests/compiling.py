"""Options of XLA for tests: programs that compile in half the time, and programs as users run them.

The HLO is what users run in every test; it is the machine code that LLVM leaves as it is, whose optimizations take more than
half of the time. tests/conftest.py makes that the default on CPUs. The conformance suite holds the kernels with OPTIMIZED code
for every form of decay, in the cases that `is_optimized` of tests/conformance/test_conformance.py names.
"""

import functools

import jax

UNOPTIMIZED = dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
quick_jit = functools.partial(jax.jit, compiler_options=UNOPTIMIZED)

OPTIMIZED = dict(xla_backend_optimization_level=3, xla_llvm_disable_expensive_passes=False)  # XLA's own defaults

# For code of the CPU that only imitates another machine's; from 0.11 on, JAX has one way to make fusions.
IMITATION = UNOPTIMIZED | (dict(xla_cpu_use_fusion_emitters=False) if jax.__version_info__ < (0, 11) else {})

"""jit that compiles in less time, for tests of something else than the code that comes out.

The HLO is what users run; it is the machine code that LLVM leaves as it is, whose optimizations take more than half of the
time. The conformance suite holds the kernels as users run them.
"""

import functools

import jax

UNOPTIMIZED = dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
quick_jit = functools.partial(jax.jit, compiler_options=UNOPTIMIZED)

# For code of the CPU that only imitates another machine's; from 0.11 on, JAX has one way to make fusions.
IMITATION = UNOPTIMIZED | (dict(xla_cpu_use_fusion_emitters=False) if jax.__version_info__ < (0, 11) else {})

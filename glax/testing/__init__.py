"""Provide the float64 reference, the cases and the tolerances that kernels are held to, glax's own and others.

`check_kernel` compares a kernel with the reference. The reference itself is `glax.testing.reference`, and the tolerances are
`glax.testing.tolerances`.
"""

from glax.testing.cases import CASES, Case
from glax.testing.check import Result, check_kernel, check_kernels

__all__ = ["CASES", "Case", "Result", "check_kernel", "check_kernels"]

"""Kernels in C++ for CPUs, called by XLA through its foreign function interface."""

from glax.kernels.cpu import recurrent

__all__ = ["recurrent"]

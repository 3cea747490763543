"""Kernels in C++ for CPUs, called by XLA through its foreign function interface."""

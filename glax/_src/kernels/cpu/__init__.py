"""Register kernels in C++ for CPUs. XLA calls them through its foreign function interface."""

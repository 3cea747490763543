"""Provide the functions of other packages, by their names and signatures, on glax's kernels."""

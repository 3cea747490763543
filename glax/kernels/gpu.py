"""What the kernels of all GPU platforms ask about the machine."""

import jax


def multiprocessors() -> int:
    """Of the GPU that JAX computes on; an H100's where there is none, for compiling ahead of time."""
    return getattr(jax.local_devices()[0], "core_count", None) or 132

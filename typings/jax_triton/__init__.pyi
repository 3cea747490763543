"""jax-triton: not installed where types are checked, and its kernels are written in a language of its own."""

from typing import Any

def __getattr__(name: str) -> Any: ...

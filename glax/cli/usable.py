"""Check what must be in order before any subcommand computes."""

import os

import jax

from glax._src.kernels.cpu.library import check_instructions
from glax._src.solve.dispatch import executor
from glax.cli.errors import UsageError
from glax.testing.check import one_line


def require_usable_jax():
    """Raise UsageError if JAX has no device to compute on, or if a variable of glax has an invalid value."""
    try:
        _ = executor.chain.policy
        check_instructions()
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        jax.devices()
    except RuntimeError as error:
        chosen = os.environ.get("JAX_PLATFORMS")
        remedy = f"unset JAX_PLATFORMS, which is {chosen!r}" if chosen else "set JAX_PLATFORMS=cpu"
        raise UsageError(f"JAX cannot use its device: {one_line(error)}: {remedy}") from error

"""What the tests of `glax` share: a small problem, a command's report, and a kernel that is wrong."""

import json

import jax

from glax._src.core.registry import kernel_registry
from glax_cli import main

SHAPE = ["--shape", "1,24,1,8", "--gate", "none"]


def json_of(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def wrong(r, *, config):
    """Right within a thousandth."""
    return jax.tree.map(lambda x: x * 1.001, kernel_registry.kernels["recurrent/xla/any"].run(r, config=config))

"""Time other libraries on the same calls where they are installed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glax._src.core.registry import Backend
from glax.cli.cases import GATES, Problem
from glax.cli.measure import Way


class UnavailableError(Exception):
    """A peer cannot compute a problem here, for the reason in the message."""


def installed(*packages: str):
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UnavailableError(f"{', '.join(missing)} not installed")


def ejkernel(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state) -> Way:
    """Return a `Way` to compute the problem by ejkernel's recurrent_attention, on the platform that ejkernel chooses."""
    installed("ejkernel")
    if mode == "step":
        raise UnavailableError("has no step of one token")
    # Peers are installed by those who compare.
    from ejkernel.modules import recurrent_attention  # pyright: ignore[reportMissingImports]

    given = {name: x for name, x in arrays.items() if name == "g_gamma"}

    def forward(arrays):
        # "gk" is its per-key gate on all of its platforms, "g" its per-head gate on some; g_gamma must not be traced
        gates: dict[str, Any] = {name: given.get(name, x) for name, x in arrays.items() if name in GATES.values()}
        if problem.gate == "head":
            gates = dict(gk=jnp.broadcast_to(gates["g"][..., None], arrays["key"].shape))
        rest = [gates.get(name) for name in ("g", "g_gamma", "gk")]
        return recurrent_attention(arrays["query"], arrays["key"], arrays["value"], *rest)

    def both(arrays):
        output, pull = jax.vjp(forward, arrays)
        return output, pull(d_output)[0]

    program = jax.jit(forward if mode == "forward" else both).lower(arrays).compile()
    return Way("ejkernel", lambda: program(arrays))


def fla(problem: Problem, mode: str, arrays: dict[str, jax.Array], d_output, state) -> Way:
    """Return a `Way` to compute the problem by fla-core: its chunk kernels, which are tuned at the first call, or its kernel of
    one token."""
    installed("torch", "triton", "fla")
    if Backend.here() is not Backend.GPU:
        raise UnavailableError("needs a GPU")
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.gla import chunk_gla, fused_recurrent_gla  # pyright: ignore[reportMissingImports]
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import (  # pyright: ignore[reportMissingImports]
        chunk_simple_gla,
        fused_recurrent_simple_gla,
    )

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

    def tensor(x):
        copied = torch.from_numpy(np.array(x, np.float32)).to("cuda")
        return copied.to(dtypes[str(x.dtype)])

    names = {"query": "q", "key": "k", "value": "v", "gk": "g"}
    given = {names.get(name, name): tensor(x) for name, x in arrays.items()}
    chunked = {"key": chunk_gla, "none": lambda **given: chunk_linear_attn(**given, normalize=False)}
    run = chunked.get(problem.gate, chunk_simple_gla)
    if mode == "step":
        given = {name: x if name == "g_gamma" else x[:, None] for name, x in given.items()}
        if problem.gate == "key":
            given["gk"] = given.pop("g")
        step = fused_recurrent_gla if problem.gate == "key" else fused_recurrent_simple_gla
        given |= dict(initial_state=tensor(state), output_final_state=True)
        run = step

    def forward():
        with torch.no_grad():
            return run(**given)[0]

    leaves = {name: x.clone().requires_grad_() for name, x in given.items()} if mode == "train" else {}
    d = tensor(d_output)

    def both():
        output = run(**leaves)[0]
        return output, torch.autograd.grad(output, list(leaves.values()), d, allow_unused=True)

    return Way("fla-core", both if mode == "train" else forward, wait=lambda _: torch.cuda.synchronize())


PEERS: dict[str, Callable[..., Way]] = {"fla-core": fla, "ejkernel": ejkernel}


def as_numpy(x) -> np.ndarray:
    """Return a result of JAX or of torch as a float64 array."""
    return np.asarray(x if isinstance(x, jax.Array) else x.detach().float().cpu(), np.float64)

"""Counts what a call of glax on an H100 passes through while it is traced: calls, functions, files, and moves between files.

    PYTHONPATH=. python tests/tooling/traced_call.py            the counts of a forward, and of a forward with its gradient
    PYTHONPATH=. python tests/tooling/traced_call.py --moves    also the pairs of files between which the calls move most

The call is `glax.recurrent` with per-key gates, B=2, H=4, K=V=64, and a T that the process has not traced before; the H100 is not
there. Each call of a Python function of the package counts, generators included. A move is a call into another file of the
package than the call before it. The kernels are loaded before, so no import counts. PYTHONPATH may be the checkout of another
commit. Needs JAX 0.11.
"""

import argparse
import collections
import itertools
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

import glax

ROOT = str(pathlib.Path(glax.__file__).parent)
H100 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"))


def forward(arrays):
    return glax.recurrent(**arrays).output


def with_gradient(arrays):
    return jax.grad(lambda arrays: forward(arrays).astype(jnp.float32).sum())(arrays)


def trace(f, T: int):
    x = jax.ShapeDtypeStruct((2, T, 4, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(H100):
        jax.jit(f).trace(dict(query=x, key=x, value=x, gk=x))


def calls(f, T: int) -> list[tuple[str, str]]:
    """The file and the name of every function of the package that tracing f calls, in order."""
    called = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            called.append((file.removeprefix(ROOT + "/"), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        trace(f, T)
    finally:
        sys.setprofile(None)
    return called


def main(shows_moves: bool):
    trace(with_gradient, 448)  # loads the kernels
    for f, T in ((forward, 512), (with_gradient, 576)):
        called = calls(f, T)
        moves = [(a, b) for (a, _), (b, _) in itertools.pairwise(called) if a != b]
        files = {file for file, _ in called}
        print(
            f"{f.__name__}: {len(called)} calls of {len(set(called))} functions in {len(files)} files, {len(moves)} moves"
        )
        if shows_moves:
            print(*(f"  {n} {a} -> {b}" for (a, b), n in collections.Counter(moves).most_common(40)), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", action="store_true", help="print the pairs of files")
    main(parser.parse_args().moves)

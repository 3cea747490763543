"""Sequence parallelism on the devices of one host: forward and gradient of one long sequence on 1, 2, 4, ... of them.

    python benchmarks/parallel.py                       # B1 T131072 H16 K=V=128 bfloat16, log-sigmoid gates a key channel
    python benchmarks/parallel.py --gates retention     # a state that never dies: the correction walks the whole shard

One line for each number of devices: time, speed-up over one device with the same kernels, error against it. --json FILE
adds a record of versions, device and times.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import glax
from glax import parallel

GATES = ("log-sigmoid", "mild", "head", "retention", "none")


def inputs(arguments) -> dict[str, jax.Array]:
    shape = (1, arguments.T, arguments.heads, arguments.width)
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, shape, arguments.dtype) for key in keys[:3])
    logs = jax.nn.log_sigmoid(jax.random.normal(keys[3], shape, jnp.float32)).astype(arguments.dtype)
    match arguments.gates:
        case "log-sigmoid":
            gates = dict(gk=logs)
        case "mild":
            gates = dict(gk=logs / 16)
        case "head":
            gates = dict(g=logs[..., 0] / 16)
        case "retention":
            gates = dict(g_gamma=jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(arguments.heads))))
        case "none":
            gates = {}
    return dict(query=q, key=k, value=v, **gates)


def timed(run, given, repeats: int) -> float:
    """Median seconds of a call, compiled before."""
    jax.block_until_ready(run(given))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(given))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("--T", 131072), ("--heads", 16), ("--width", 128), ("--repeats", 10)):
        parser.add_argument(flag, type=int, default=default, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--gates", default=GATES[0], choices=GATES)
    parser.add_argument("--json", help="where to add a line with what was measured")
    arguments = parser.parse_args()
    given = inputs(arguments)
    weight = jax.random.normal(jax.random.key(5), given["value"].shape, given["value"].dtype)

    def value_and_gradient(f, given):
        return jax.value_and_grad(lambda x: (f(**x).output * weight).astype(jnp.float32).mean())(given)

    record = dict(
        jax=jax.__version__, glax=glax.__version__, device=jax.devices()[0].device_kind, **vars(arguments), seconds={}
    )
    sizes = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    reference = alone = None
    for n in sizes:
        mesh = jax.make_mesh((n,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:n])
        spread = {
            name: jax.device_put(x, NamedSharding(mesh, P() if x.ndim == 1 else P(None, "sequence")))
            for name, x in given.items()
        }
        f = glax.recurrent if n == 1 else lambda **x: parallel.recurrent(**x, mesh=mesh, sequence_axis="sequence")  # noqa: B023
        run = jax.jit(lambda given: value_and_gradient(f, given))  # noqa: B023
        seconds = timed(run, spread, arguments.repeats)
        gradient = [np.asarray(x, np.float32) for x in jax.tree.leaves(run(spread)[1])]
        reference = reference or gradient
        error = max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(gradient, reference, strict=True))
        alone = alone or seconds
        record["seconds"][n] = seconds
        print(
            f"{n} devices  {1e3 * seconds:9.2f} ms  {alone / seconds:5.2f} x  gradient off by {error:.1e}", flush=True
        )
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

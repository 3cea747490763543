"""Train the demo's model on several processes, spread over batch and sequence, with a checkpoint that any number resumes.

On each of two hosts, i = 0 and 1:

    python examples/train_multihost.py --coordinator host0:1234 --processes 2 --process i --data 2 --sequence 2 --out run

The mesh is data x sequence over all devices of all processes. Parameters are the same everywhere; a window's bytes lie
along the sequence axis, and the recurrence hands its states on from shard to shard (`glax.parallel`). All processes write
one checkpoint together (Orbax), in a folder that all of them see. Started again, on whatever mesh, it goes on from there:
batches depend on the step alone. Another text or recipe is refused. Without --coordinator it is one process with all of its
devices.
"""

import argparse
import functools
import hashlib
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glax import parallel
from glax.models.runs import DamagedCheckpoint, attempted, by_name, content, is_finite, refuse_another
from glax.nn import ByteLM, ByteLMConfig
from glax.nn.text import random_windows, read_text
from glax.nn.train import Recipe, next_byte_bits


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="address:port of process 0")
    for flag, default, meaning in (
        ("--processes", 1, "processes"),
        ("--process", 0, "the number of this one"),
        ("--data", 1, "shards of the batch"),
        ("--sequence", 1, "shards of the sequence"),
        ("--steps", 100, "training steps"),
        ("--batch", 8, "windows a step"),
        ("--length", 1024, "bytes predicted in a window"),
        ("--every", 50, "steps between checkpoints"),
        ("--width", 128, "of the model"),
        ("--layers", 3, "of the model"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="what to train on (default: Python's standard library)")
    parser.add_argument("--out", type=Path, default=Path("multihost-out"), help="folder of the checkpoints")
    return parser.parse_args()


def main(arguments):
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    shape = (arguments.data, arguments.sequence)
    mesh = jax.make_mesh(shape, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "sequence"))

    recurrence = functools.partial(parallel.recurrent_gla, mesh=mesh, batch_axis="data", sequence_axis="sequence")
    config = ByteLMConfig(width=arguments.width, layers=arguments.layers, mlp_width=2 * arguments.width)
    make = functools.partial(ByteLM, config, recurrence=recurrence)
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    optimizer = Recipe(arguments.steps, arguments.batch, arguments.length).optimizer()

    @functools.partial(jax.jit, out_shardings=everywhere)
    def begin():
        params = nnx.split(make(rngs=nnx.Rngs(0)))[1]
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def update(state, read, following):
        """Return the new state, the loss before the update, and whether both are finite."""
        params, moments = state
        loss, gradient = jax.value_and_grad(
            lambda params: next_byte_bits(nnx.merge(graph, params), read, following).mean()
        )(params)
        change, moments = optimizer.update(gradient, moments, params)
        state = optax.apply_updates(params, change), moments
        return state, loss, is_finite((state, loss))

    text = read_text(arguments.text, arguments.length).train
    record = {name: getattr(arguments, name) for name in ("batch", "length", "width", "layers")}
    record["text"] = content(str(arguments.text), hashlib.sha256(text).hexdigest())
    checkpoints = ocp.CheckpointManager(
        arguments.out.absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        item_handlers=ocp.StandardCheckpointHandler(),
    )
    state, done = resumed(checkpoints, jax.eval_shape(begin), everywhere, record)
    state = begin() if state is None else state
    for step in range(done + 1, arguments.steps + 1):
        windows = random_windows(text, arguments.batch, arguments.length, np.random.default_rng((0, step)))
        read, following = (placed(x, spread) for x in (windows[:, :-1], windows[:, 1:]))
        state, loss, good = update(state, read, following)
        if not good:
            raise SystemExit(
                f"step {step}: the loss is {float(loss)}, or an update is not finite: the newest checkpoint, "
                f"{checkpoints.latest_step()}, is of a step before"
            )
        print(f"step {step}/{arguments.steps}: {float(loss)!r} bits per byte", flush=True)
        if step % arguments.every == 0 or step == arguments.steps:
            checkpoints.save(step, args=ocp.args.StandardSave(by_name(state)), custom_metadata=record)
            print(f"saved step {step}", flush=True)
    checkpoints.close()


def placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return x spread over all processes. Every process has all of x, and passes on what its devices hold."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def resumed(checkpoints: ocp.CheckpointManager, shapes, sharding: NamedSharding, record: dict):
    """Return the newest checkpoint, laid out on this mesh, and its step; (None, 0) if there is none. Raises ValueError if it
    is of a run with another record."""
    step = checkpoints.latest_step()
    if step is None:
        return None, 0
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in by_name(shapes).items()}
    try:
        earlier = attempted(checkpoints.metadata, step).custom_metadata or {}
        refuse_another(f"the checkpoint of step {step} in {checkpoints.directory}", earlier, record)
        found = attempted(checkpoints.restore, step, args=ocp.args.StandardRestore(wanted))
    except DamagedCheckpoint as error:
        folder = checkpoints.directory / str(step)
        raise SystemExit(
            f"{folder} is damaged or of another model: {error}: move it away to go on from the step before"
        ) from error
    print(f"resumed from step {step}", flush=True)
    return jax.tree.structure(shapes).unflatten([found[name] for name in wanted]), step


if __name__ == "__main__":
    main(parse())

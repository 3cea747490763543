"""Train a model over bytes on several processes, spread over batch and sequence, with a checkpoint that any number resumes.

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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glax.models.training import Checkpoints, Text, TrainingConfig, is_finite, make_model, record_of, spread_sequence


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
    text = Path(__file__).parents[1] / "README.md"
    parser.add_argument("--text", type=Path, default=text, help="what to train on (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("multihost-out"), help="folder of the checkpoints")
    return parser.parse_args()


def config_of(arguments) -> TrainingConfig:
    sizes = dict(hidden_size=arguments.width, intermediate_size=2 * arguments.width, num_hidden_layers=arguments.layers)
    options = dict(model_type="gla", vocab_size=256, num_heads=4, expand_k=1.0, initializer_range=0.09)
    named = {name: getattr(arguments, name) for name in ("steps", "batch", "length", "data", "sequence")}
    return TrainingConfig(sizes | options, str(arguments.text), out=str(arguments.out), learning_rate=4e-3, **named)


def main(arguments):
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    config = config_of(arguments)
    mesh = jax.make_mesh((config.data, config.sequence), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "sequence"))
    model, tokenizer = make_model(config)
    text, record = Text.read(arguments.text, tokenizer, config.length), record_of(config, model, tokenizer)
    spread_sequence(model, mesh)
    graph, params = nnx.split(model)
    params = jax.tree.map(np.asarray, params)  # the same in all processes
    optimizer = config.optimizer()

    @functools.partial(jax.jit, out_shardings=everywhere)
    def begin(params):
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def update(state, read, following):
        """Return the new state, the loss before the update, and whether both are finite."""
        params, moments = state
        loss, gradient = jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(read, following))(params)
        change, moments = optimizer.update(gradient, moments, params)
        state = optax.apply_updates(params, change), moments
        return state, loss / jnp.log(2.0), is_finite((state, loss))

    arguments.out.mkdir(parents=True, exist_ok=True)
    with Checkpoints(arguments.out, record) as checkpoints:
        state, done = checkpoints.restore(begin(params), everywhere)
        if done:
            print(f"resumed from step {done}", flush=True)
        for step in range(done + 1, config.steps + 1):
            windows = text.windows(config.batch, config.length, np.random.default_rng((0, step)))
            read, following = (placed(x, spread) for x in (windows[:, :-1], windows[:, 1:]))
            state, loss, good = update(state, read, following)
            if not good:
                raise SystemExit(
                    f"step {step}: the loss is {float(loss)}, or an update is not finite: the newest checkpoint, "
                    f"{checkpoints.newest()}, is of a step before"
                )
            print(f"step {step}/{config.steps}: {float(loss)!r} bits per byte", flush=True)
            if step % arguments.every == 0 or step == config.steps:
                checkpoints.save(step, state)
                print(f"saved step {step}", flush=True)


def placed(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return x spread over all processes. Every process has all of x, and passes on what its devices hold."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


if __name__ == "__main__":
    main(parse())

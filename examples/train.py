"""Train any model of glax.models on a text: by a config, or by the loop itself.

    python examples/train.py examples/train_gla.toml

The config names the model, the text and the recipe (`glax.models.training.TrainingConfig`). The mesh is named by its
axes (docs/training.md), remat is chosen by name, and a run that was interrupted resumes from its newest Orbax
checkpoint. `glax train CONFIG` does the same with a bar.
"""

import argparse
from pathlib import Path

from glax.models.operations import utilisation
from glax.models.training import NotFiniteLoss, TrainingConfig, train


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--out", help="instead of the config's")
    arguments = parser.parse_args()
    changes = {name: x for name, x in vars(arguments).items() if name != "config" and x is not None}
    try:
        config = TrainingConfig.read(arguments.config, **changes)
    except (OSError, ValueError, TypeError) as error:
        parser.error(str(error))
    tokens = config.batch * config.length

    def each_step(step: int, loss: float, seconds: float) -> bool:
        if step % 10 == 0 or step == config.steps:
            print(f"step {step}/{config.steps}: {loss:.4f} nats/token, {tokens / seconds:,.0f} tokens/s", flush=True)
        return False

    def begin(beginning):
        print(f"start: {beginning.start}; {beginning.data}; step {beginning.step} of {config.steps} is done")

    try:
        model, history = train(config, each_step, begin)
    except ValueError as error:  # the text, the tokenizer, the model or the output folder
        parser.error(str(error))
    except NotFiniteLoss as error:
        raise SystemExit(str(error)) from error
    share = utilisation(model, config.length, 1.0)
    if share is not None:
        print(f"MFU is tokens/s times {share:.2e}")
    print(f"held out: {list(history.held_out.values())[-1]:.4f} nats/token; saved in {config.out}/model")


if __name__ == "__main__":
    main()

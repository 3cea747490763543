"""Seconds to trace and to compile a training step, by the number of layers: with one scan over equal layers, and without.

python -m benchmarks.compile_depth --type gla --layers 4 24
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax

from glax.models.meshes import AXES, training_mesh
from glax.models.runs import Checkpoints
from glax.models.training import Run, TrainingConfig, WindowsOfText, make_model


@contextlib.contextmanager
def begun(config: TrainingConfig) -> Iterator[Run]:
    """Give a run before its first step, which is not being compiled: that is what is timed."""
    mesh = training_mesh({name: getattr(config, name) for name in AXES})
    model, tokenizer = make_model(config, mesh)
    with Checkpoints(Path(config.out), {}) as checkpoints:
        with mock.patch.object(Run, "begin_compiling", return_value=None):
            run = Run(config, mesh, model, WindowsOfText(config, tokenizer), checkpoints)
        try:
            yield run
        finally:
            run.journal.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="gla", help="the model_type of a config of one width")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--remat", default=None)
    given = parser.parse_args()
    print(
        f"{given.type} on {jax.devices()[0].device_kind}: trace and compile of a step, in seconds; lines of the lowered program"
    )
    for scan in (True, False):
        for layers in given.layers:
            model = dict(model_type=given.type, vocab_size=256, hidden_size=64, num_hidden_layers=layers, num_heads=4)
            with tempfile.TemporaryDirectory() as folder:
                text = Path(folder, "text.txt")
                text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
                sizes = dict(batch=2, length=128, steps=1, remat=given.remat, scan_layers=scan)
                with begun(TrainingConfig(model, str(text), out=str(Path(folder, "out")), **sizes)) as run:
                    arguments = run.arguments(1, False)
                    start = time.perf_counter()
                    lowered = run.update.lower(*arguments)
                    traced = time.perf_counter()
                    lowered.compile()
                    seconds = traced - start, time.perf_counter() - traced
                    lines = len(lowered.as_text().splitlines())
            print(
                f"scan_layers={scan!s:5}  {layers:3} layers: {seconds[0]:6.2f} + {seconds[1]:6.2f} s, {lines:,} lines",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Write the values of a run's steps to TensorBoard or Weights & Biases, beside its `history.jsonl`."""

import hashlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol


class Logger(Protocol):
    """Take the values of a run's steps. A run that resumes writes the steps after its checkpoint again.

    package: the package that the logger needs. out: the folder of the run. done: the step of the checkpoint that the run
    resumes from, 0 for none. config: values that describe the run.
    """

    package: ClassVar[str]

    def __init__(self, out: Path, done: int, config: Mapping[str, Any]): ...

    def write(self, step: int, values: Mapping[str, float]): ...

    def close(self): ...


class TensorBoard(Logger):
    """Write events to `out`/tensorboard. Those after the step `done` are hidden."""

    package = "tensorboardX"

    def __init__(self, out: Path, done: int, config: Mapping[str, Any]):
        from tensorboardX import SummaryWriter

        # A file is named by the second it begins in. Without more, a run that resumes in that second would replace it.
        own = f".{time.time_ns()}"
        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1, filename_suffix=own)

    def write(self, step: int, values: Mapping[str, float]):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self):
        self.writer.close()


class WeightsAndBiases(Logger):
    """Write to the project of WANDB_PROJECT, "glax" without one. The id is a digest of the path of `out`, so that a run that
    resumes goes on in the same place."""

    package = "wandb"

    def __init__(self, out: Path, done: int, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]  (it is installed where it is wanted)

        project, path = os.environ.get("WANDB_PROJECT", "glax"), str(out.absolute())
        digest = hashlib.sha256(path.encode()).hexdigest()[:16]
        self.run = wandb.init(
            project=project,
            name=out.name,
            id=digest,
            dir=path,
            config=dict(config),
            resume="allow",
            reinit="finish_previous",
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]):
        self.run.log(dict(values) | dict(step=step))

    def close(self):
        self.run.finish()


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_loggers(names: object):
    """Raise ValueError unless `names` is a list of names of LOGGERS whose packages are installed. It says what to install."""
    if not isinstance(names, list | tuple) or any(name not in tuple(LOGGERS) for name in names):
        raise ValueError(f"loggers must be a list of {', '.join(map(repr, LOGGERS))}, got {names!r:.80}")
    for name in names:
        package = LOGGERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"loggers {name!r} needs the package {package}: pip install {package}")


def started(names: Sequence[str], out: Path, done: int, config: Mapping[str, Any]) -> list[Logger]:
    """Return the loggers of these names, each once. out, done, config: the arguments of each `Logger`."""
    return [LOGGERS[name](out, done, config) for name in dict.fromkeys(names)]

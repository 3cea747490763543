"""Runs of `glax train` in processes, for tests that compare or kill them."""

import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
from safetensors.numpy import load_file

import glax
from tests.compiling import UNOPTIMIZED

ROOT = str(pathlib.Path(glax.__file__).parents[1])
GLA = dict(model_type="gla", vocab_size=256, hidden_size=32, num_hidden_layers=1, num_heads=4, intermediate_size=32)


@dataclasses.dataclass
class Runs:
    """Start `glax train` in the folder `root`, in as many processes of as many devices as a call names. Devices are simulated.

    gpus: whether they are GPUs: process i then has GPUs number i * devices and the next. environment: of the processes, beside
    this one's.
    """

    root: pathlib.Path
    gpus: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    started: list = dataclasses.field(default_factory=list)

    def __enter__(self) -> "Runs":
        text = "".join(f"{i} is followed by {i + 1}, and {i * i} is its square\n" for i in range(2000))
        (self.root / "text.txt").write_text(text)
        return self

    def __exit__(self, *_):
        for process, errors in self.started:
            process.kill()
            process.wait()
            process.stdout.close()
            errors.close()

    def start(self, out: str, processes: int, devices: int, **changes) -> list[subprocess.Popen]:
        values = dict(model=GLA, text="text.txt", out=out, steps=8, batch=4, length=32, learning_rate=4e-3)
        path = self.root / f"{out}-{len(self.started)}.json"
        path.write_text(json.dumps(values | dict(checkpoint_every=4) | changes))
        paths = [ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | dict(PYTHONPATH=os.pathsep.join(filter(None, paths)))
        if not self.gpus:
            options = dict(xla_force_host_platform_device_count=devices) | UNOPTIMIZED
            env |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS=" ".join(f"--{name}={value}" for name, value in options.items()))
        env |= self.environment
        if processes > 1:
            env |= dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}", JAX_NUM_PROCESSES=str(processes))
        made = []
        for number in range(processes):
            errors = open(self.root / f"{path.stem}-{number}.err", "w+")  # noqa: SIM115 - closed by `__exit__`
            command = [sys.executable, "-u", "-m", "glax_cli", "train", str(path)]
            own = dict(JAX_PROCESS_ID=str(number))
            if self.gpus:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(str(number * devices + i) for i in range(devices))
            process = subprocess.Popen(command, env=env | own, text=True, stdout=subprocess.PIPE, stderr=errors)
            self.started.append((process, errors))
            made.append(process)
        return made

    def finish(self, made: list[subprocess.Popen], code: int = 0) -> str:
        """Return what process 0 wrote."""
        outputs = [process.communicate(timeout=300)[0] for process in made]
        for process in made:
            errors = next(file for other, file in self.started if other is process)
            errors.seek(0)
            assert process.returncode == code, errors.read()[-3000:]
        # Threads of Gloo write its lines in pieces, which may come one within another.
        gloo = re.compile(r"\[Gloo\]|Rank \d+ is|peer ranks|^[\d\s]*$")
        said = [line for output in outputs[1:] for line in output.splitlines() if not gloo.search(line)]
        assert said == [] or self.gpus  # process 0 speaks for all, but libraries of GPUs may write, too
        return outputs[0]

    def losses(self, out: str) -> dict[int, float]:
        """By step, in all digits."""
        lines = [json.loads(line) for line in (self.root / out / "history.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def parameters(self, out: str) -> dict[str, np.ndarray]:
        return load_file(self.root / out / "model" / "model.safetensors")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def kill(made: list[subprocess.Popen], victim: int, line: str, delay: float):
    """End one process by SIGKILL, so many seconds after the first wrote a line, and then the others."""
    for written in made[0].stdout:
        if line in written:
            break
    time.sleep(delay)
    for process in (made[victim], *made):
        process.kill()
        process.wait()

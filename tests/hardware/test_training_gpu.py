"""`glax train` in two processes, on two NVIDIA GPUs of one host: the losses of one process, and the same bits after kills.

JAX_PLATFORMS=cuda python -m pytest -q tests/hardware/test_training_gpu.py
"""

import os
import random
import shutil
import subprocess

import numpy as np
import pytest

from tests.training_runs import Runs, kill

MODEL = dict(model_type="gla", vocab_size=256, hidden_size=256, num_hidden_layers=2, num_heads=2, intermediate_size=256)
RECIPE = dict(model=MODEL, steps=20, batch=4, length=256, learning_rate=1e-3, checkpoint_every=2)
# JAX would multiply float32 in fewer bits, and XLA would choose kernels by their times, which differ between two runs.
EXACT = dict(
    JAX_DEFAULT_MATMUL_PRECISION="highest",
    XLA_FLAGS="--xla_gpu_deterministic_ops=true",
)


def gpus() -> int:
    """The number of GPUs. JAX would take their memory, which the processes need."""
    if "cuda" not in os.environ.get("JAX_PLATFORMS", "") or shutil.which("nvidia-smi") is None:
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


@pytest.mark.skipif(gpus() < 2, reason="needs two NVIDIA GPUs and JAX_PLATFORMS=cuda")
def test_two_processes_have_the_losses_of_one_and_the_same_bits_after_kills(tmp_path):
    draw = random.Random(0)
    with Runs(tmp_path, gpus=True, environment=EXACT) as runs:
        runs.finish(runs.start("one", 1, 1, **RECIPE))
        runs.finish(runs.start("two", 2, 1, **RECIPE, fsdp=2))
        wanted, got = (runs.losses(out) for out in ("one", "two"))
        assert list(got) == list(wanted) == list(range(1, 21))
        # Adam makes whole steps of the rounding of small gradients, which grow later.
        np.testing.assert_allclose(list(got.values())[:8], list(wanted.values())[:8], rtol=0, atol=1e-5)
        for victim, first in ((0, 2), (1, 11)):
            made = runs.start("killed", 2, 1, **RECIPE, fsdp=2)
            kill(made, victim, f"step {draw.randrange(first, first + 6)}/20: ", draw.uniform(0.0, 0.2))
            assert len(runs.losses("killed")) < 20
        assert ": resumes" in runs.finish(runs.start("killed", 2, 1, **RECIPE, fsdp=2))
        assert runs.losses("killed") == got
        for name, x in runs.parameters("two").items():
            np.testing.assert_array_equal(x, runs.parameters("killed")[name], err_msg=name)

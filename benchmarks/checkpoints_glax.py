"""What checkpoints.py measures of glax. Each part is a function, which runs in a process of its own and yields results."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints_folder import WORDS, weight_files
from checkpoints_job import (
    CLIP,
    GIB,
    LEARNING_RATE,
    PROMPT,
    RANK,
    TARGETS,
    HostMemory,
    Job,
    copy_seconds,
    decoded,
    drawn_tokens,
    prefilled,
    seconds_of,
)
from flax import nnx

import glax.models


def peak() -> dict[str, float]:
    found = jax.local_devices()[0].memory_stats()  # None on a CPU
    return dict(gib=found["peak_bytes_in_use"] / GIB) if found else {}


def opened(job: Job) -> glax.models.CausalLM:
    model = glax.models.from_pretrained(job.folder, dtype=jnp.dtype(job.dtype))
    jax.block_until_ready(nnx.state(model))
    return model


def load(job: Job) -> Iterator[dict[str, Any]]:
    jax.block_until_ready(jnp.zeros(8))
    held = []
    for case in ("first load", "second load"):
        with HostMemory() as memory:
            seconds = seconds_of(lambda: held.append(opened(job)))
        yield dict(problem=case, seconds=seconds, **memory.figures, **peak())
        if case == "first load":
            yield from logits(job, held[0])
            held.clear()
    reading, sending = copy_seconds(weight_files(job.folder), lambda x: jax.device_put(x).block_until_ready())
    yield dict(problem="copy", seconds=reading + sending, read_s=reading, put_s=sending)


def logits(job: Job, model: glax.models.CausalLM | None = None) -> Iterator[dict[str, Any]]:
    """Write the logits of a few tokens to a file, in float32."""
    graph, params = nnx.split(opened(job) if model is None else model)
    tokens = drawn_tokens(1, job.sizes.compared, nnx.merge(graph, params).vocabulary)
    program = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).astype(jnp.float32))
    began = time.perf_counter()
    np.save(job.arrays, np.asarray(program(params, tokens)[0]))
    yield dict(problem="logits", seconds=time.perf_counter() - began)


def prefill(job: Job) -> Iterator[dict[str, Any]]:
    model, sizes = opened(job), job.sizes
    tokens = jnp.asarray(drawn_tokens(*sizes.prefill, model.vocabulary))
    line = prefilled(lambda: jax.block_until_ready(glax.models.generate(model, tokens, 1)), sizes)
    yield dict(problem="{} x {}".format(*sizes.prefill), **line, **peak())


def decode(job: Job) -> Iterator[dict[str, Any]]:
    model, sizes = opened(job), job.sizes
    for batch in sizes.batches:  # in rising order, for the peak of a process never falls
        prompts = jnp.asarray(drawn_tokens(batch, sizes.prompt, model.vocabulary))

        def run(count, prompts=prompts):
            jax.block_until_ready(glax.models.generate(model, prompts, count))

        yield dict(problem=f"B = {batch}", **decoded(run, batch, sizes), **peak())


class EnoughSteps(Exception):
    """Raised from a step of training, so that the run ends without a checkpoint."""


def tune(job: Job, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Take the steps of `glax.models.training.train`, with a text of random words."""
    from glax.models.training import TrainingConfig, train

    folder = job.small if whole else job.folder
    assert folder is not None
    sizes, config = job.sizes, glax.models.ModelConfig.read(folder)
    (rows, length), vocabulary = sizes.tune, config.values["vocab_size"]
    more: dict[str, Any] = {} if whole else dict(lora_rank=RANK, lora_targets=TARGETS[config.values["model_type"]])
    steps: list[tuple[float, float]] = []

    def each_step(step: int, loss: float, seconds: float) -> bool:
        steps.append((loss, seconds))
        if len(steps) == sizes.warm + sizes.steps:
            raise EnoughSteps
        return False

    with tempfile.TemporaryDirectory() as home:
        text = Path(home) / "text.txt"
        text.write_text(" ".join(map(str, drawn_tokens(40 * rows, length, vocabulary).ravel())))
        recipe = TrainingConfig(
            str(folder), str(text), tokenizer=str(folder / WORDS), out=f"{home}/out", steps=1000, batch=rows,
            length=length, dtype="bfloat16", remat="full", learning_rate=LEARNING_RATE, clip=CLIP, schedule="constant",
            checkpoint_every=1000, **more,
        )  # fmt: skip
        with contextlib.suppress(EnoughSteps):
            train(recipe, each_step)
    seconds = sum(x for _, x in steps[sizes.warm :]) / sizes.steps
    line = dict(ms=1e3 * seconds, tokens_per_second=rows * length / seconds, first_s=steps[0][1], loss=steps[0][0])
    yield dict(problem=f"{'all' if whole else f'LoRA {RANK}'}, {rows} x {length}", **line, **peak())


def first(job: Job) -> Iterator[dict[str, Any]]:
    """Run `glax generate` in fresh processes: without stored programs, with an empty folder for them, and with a filled one."""
    command = [sys.executable, "-m", "glax", "generate", str(job.folder), "--prompt", PROMPT, "--dtype", job.dtype]
    # The first of 16 tokens is timed: for one alone, the program of further tokens would not be compiled.
    command += ["--max-new-tokens", "16"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment |= dict(GLAX_CACHE_DIR=cache)
        for case, more in (("no cache", ["--no-compilation-cache"]), ("empty cache", []), ("filled cache", [])):
            began = time.perf_counter()
            pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            with subprocess.Popen([*command, *more], env=environment, **pipes) as process:
                assert process.stdout is not None
                process.stdout.read(1)
                seconds = time.perf_counter() - began
                _, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"glax generate failed: {errors[-2000:]}")
            yield dict(problem=case, seconds=seconds)

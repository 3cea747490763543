"""Run fla-core's chunk kernels as its users call them from PyTorch, and limit the time of its tuning.

Triton's autotuner tunes its kernels: the first call compiles and times every candidate, which takes minutes.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time

import jax
import numpy as np

from glax.cli.cases import Problem
from glax.cli.measure import Way

MIB = 2**20


class UntunedError(Exception):
    """Raised where a candidate would have to be timed."""


class Fla:
    """fla-core for a problem. tuned: whether it is tuned; with tune=False only if Triton's cache has an earlier result."""

    def __init__(self, problem: Problem, operands: list[jax.Array], tune: bool = True):
        import torch
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla

        self.torch, self.op = torch, chunk_gla if problem.gate == "key" else chunk_simple_gla
        self.inputs = [torch.from_dlpack(x).clone().requires_grad_() for x in operands[:4]]
        self.do = torch.from_dlpack(operands[4]).clone()
        began = time.perf_counter()
        with contextlib.nullcontext() if tune else no_tuning():
            try:
                self.both()
                self.forward()
                self.tuned = True
            except UntunedError:
                self.tuned = False
        torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - began

    def forward(self):
        with self.torch.no_grad():
            return self.op(*self.inputs)[0]

    def both(self):
        out, state = self.op(*self.inputs, output_final_state=True)
        return out, state, *self.torch.autograd.grad(out, self.inputs, self.do)

    def ways(self) -> list[Way]:
        def wait(_):
            self.torch.cuda.synchronize()

        return [Way("forward", self.forward, wait), Way("both", self.both, wait)]

    def peak_mib(self) -> float:
        self.torch.cuda.synchronize()
        self.torch.cuda.reset_peak_memory_stats()
        self.both()
        return self.torch.cuda.max_memory_allocated() / MIB

    def results(self) -> list[np.ndarray]:
        return [x.detach().float().cpu().numpy() for x in self.both()]


@contextlib.contextmanager
def no_tuning():
    """Make Triton's autotuner raise UntunedError where it would time a candidate."""
    from triton.runtime.autotuner import Autotuner

    def refuse(self, *args, **rest):
        raise UntunedError(self.base_fn.__name__)

    whole, Autotuner._bench = Autotuner._bench, refuse
    try:
        yield
    finally:
        Autotuner._bench = whole


def short_tuning():
    """Make Triton's autotuner time each candidate for 8 ms instead of 100."""
    from triton import testing
    from triton.backends.nvidia.driver import CudaDriver

    whole = testing.do_bench

    def short(f, warmup=None, rep=None, **rest):
        return whole(f, warmup=2, rep=8, **rest)

    CudaDriver.get_benchmarker = lambda self: short


def first_candidate():
    """Make Triton's autotuner take the first candidate that runs, so that the others are not compiled."""
    from triton.runtime.autotuner import Autotuner

    os.environ["FLA_CACHE_RESULTS"] = "0"  # this choice must not enter the cache
    whole, done = Autotuner._bench, {}

    def first(self, *args, config, **rest):
        if done.get(self) is self.nargs:  # the call's own dict
            return [float("inf")]
        timing = whole(self, *args, config=config, **rest)
        if timing[0] < float("inf"):
            done[self] = self.nargs
        return timing

    Autotuner._bench = first


def compile_in_parts(command: list[str], parts: int):
    """Compile every candidate of fla-core into Triton's cache, divided among `parts` processes.

    command, followed by "part/parts", calls `compile_a_part` and then fla-core.
    """
    started = [
        subprocess.Popen([sys.executable, *command, f"{part}/{parts}"], stdout=subprocess.DEVNULL)
        for part in range(parts)
    ]
    if failed := [process.args for process in started if process.wait()]:
        raise RuntimeError(f"compiling fla-core's candidates: {len(failed)} of {parts} failed, the first: {failed[0]}")


def compile_a_part(part: int, parts: int):
    """Make Triton's autotuner compile every parts-th candidate and launch none. The outputs are undefined."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    turn = itertools.cycle(range(parts))

    def compile_only(self, *args, **rest):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(rest):
            self.best_config = config  # which some of mamba-ssm's functions read after a call
            if next(turn) == part:
                try:
                    self.fn.run(*args, **rest | dict(warmup=True), **config.all_kwargs())
                except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
                    continue  # as in tuning, where such a candidate is not taken

    Autotuner.run = compile_only

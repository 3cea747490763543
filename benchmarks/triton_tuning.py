"""Limit the time of Triton's autotuner, by which fla-core and mamba-ssm tune their kernels.

The first call compiles and times every candidate, which takes minutes.
"""

import itertools
import os
import subprocess
import sys


class UntunedError(Exception):
    """Raised where a candidate would have to be timed."""


def no_tuning():
    """Make Triton's autotuner raise UntunedError where it would time a candidate."""
    from triton.runtime.autotuner import Autotuner

    def refuse(self, *args, **rest):
        raise UntunedError(self.base_fn.__name__)

    Autotuner._bench = refuse


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
    """Compile every candidate into Triton's cache, divided among `parts` processes.

    command, followed by "part/parts", calls `compile_a_part` and then the peers.
    """
    started = [
        subprocess.Popen([sys.executable, *command, f"{part}/{parts}"], stdout=subprocess.DEVNULL)
        for part in range(parts)
    ]
    if failed := [process.args for process in started if process.wait()]:
        raise RuntimeError(f"compiling candidates: {len(failed)} of {parts} failed, the first: {failed[0]}")


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


def a_part(text: str) -> tuple[int, ...]:
    """Return (i, n) from "i/n"."""
    return tuple(map(int, text.split("/")))

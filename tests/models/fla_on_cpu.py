"""Makes flash-linear-attention's own Triton kernels run on a machine without a GPU: import this before fla.

Triton's interpreter executes them, its autotuner takes the first config instead of timing all, and `x.to(tl.int64)` in fla's
installed operators becomes `tl.cast(x, tl.int64)`, for there x may be a Python integer. Results may be float64: casts name no
rounding, which is to nearest in any case. Slow: tens of tokens, a few heads.
Needs torch 2.13.0 (CPU), triton 3.9.0, flash-linear-attention 0.6.0, in an environment of their own: its files are rewritten.
"""

import importlib.util
import os
import pathlib
import re

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.autotuner import Autotuner

FLA = pathlib.Path(importlib.util.find_spec("fla").origin).parent
for path in (*FLA.joinpath("ops").rglob("*.py"), *FLA.joinpath("modules").rglob("*.py")):
    text = path.read_text()
    mended = re.sub(r"\b([A-Za-z_]\w*)\.to\(tl\.int64\)", r"tl.cast(\1, tl.int64)", text)
    mended = mended.replace(", fp_downcast_rounding='rtne'", "")
    if mended != text:
        path.write_text(mended)


def run_first_config(self, *args, **kwargs):
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.prune_configs(kwargs)[0]
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


Autotuner.run = run_first_config
torch.set_num_threads(1)

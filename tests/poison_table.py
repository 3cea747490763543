"""Print, for each kernel that runs on this machine, what a poisoned document changes in other documents' results.

    python -m tests.poison_table [--kernels WORD ...] [--layouts WORD ...] [--forms FORM ...] [--width K] [--dtype NAME] [--few]

Without options: every kernel and form, three documents in 400 tokens, in bfloat16. The exit status is 1 if anything leaks.
"""

import argparse
import collections
import dataclasses
import functools
import sys
import time

import jax

from glax._src.core.registry import KernelSpec, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import Choice, run_spec
from glax.testing.cases import Case
from tests.poison import Layout, batch, leaks, operands_of, packed, segmented

CUTS, T = (0, 150, 256, 390), 400


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", nargs="*", default=[""], help="parts of the names of kernels")
    parser.add_argument("--layouts", nargs="*", default=[""], help="parts of the names of layouts")
    parser.add_argument("--forms", nargs="*", help='names of cases, such as "head" or "key beta"')
    parser.add_argument("--width", type=int, default=64, help="K and V")
    parser.add_argument("--dtype", default="bfloat16", help="the dtype of q, k and v")
    parser.add_argument("--few", action="store_true", help="one poison for each array")
    options = parser.parse_args()
    load_kernels()
    specs = [
        s for s in kernel_registry.kernels.values() if not s.is_pooled and any(x in s.name for x in options.kernels)
    ]
    layouts = [x for x in (packed(CUTS, T), segmented(CUTS, T), batch()) if any(y in x.name for y in options.layouts)]
    print(f"{jax.devices()[0].device_kind}, {options.dtype}, K = V = {options.width}")
    leaking = 0
    for layout in layouts:
        for case in layout.cases(K=options.width, V=options.width, dtype=options.dtype):
            if options.forms is None or case.name in options.forms:
                leaking += sum(
                    row_of(layout, case, spec, options.few, ends) for spec in specs for ends in (True, False)
                )
    print(f"{leaking} of the rows above leak")
    return int(leaking > 0)


def row_of(layout: Layout, case: Case, spec: KernelSpec, few: bool, ends: bool) -> bool:
    """Print the row of one kernel, unless it refuses the call. Return whether it leaks or fails. ends: whether initial and final
    states have a part in the call. Without them, some kernels take sequences as one row."""
    case = case if ends else dataclasses.replace(case, state_dtype=None)
    operands = operands_of(case)
    if spec.refusal(operands[0].folded) is not None:
        return False
    run, begin = functools.partial(run_spec, spec, Choice()), time.time()
    omits = not ends and spec.is_gradient and spec.omits_d_final(operands[0])
    program = jax.jit((lambda r, d_output, d_final: run(r, d_output, None)) if omits else run)
    programs = (None, program) if spec.is_gradient else (program, None)
    try:
        found = leaks(layout, operands, *programs, few=few, bar=0.02)
    except Exception as error:  # the table goes on with the next kernel
        found = [f"{type(error).__name__}: {str(error)[:200]}"]
    arrays = collections.Counter(text.split(", ")[1] if ", " in text else text for text in found)
    where = "; ".join(f"{text} ({count})" for text, count in arrays.items())
    name = f"{layout.name:12} {case.name:18} {'with' if ends else 'no':4} states {spec.name:24}"
    print(f"{name} {len(found):4} leaks {time.time() - begin:6.1f} s  {where[:200]}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

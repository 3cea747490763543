"""NaN, inf and overflow in one document change no other document's outputs, final states or gradients.

A sample of forms and poisons. `python -m tests.poison_table` tries all of them, on every kernel that runs on a machine.
"""

import functools

import jax
import pytest

from glax._src.core.registry import KernelSpec, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.solve.dispatch import Choice, run_spec
from glax.testing.cases import Case
from tests.poison import LAYOUTS, Layout, leaks, operands_of

load_kernels()
NATIVE = ("recurrent/cpp/cpu", "recurrent.vjp/cpp/cpu")
CHUNKED = ("chunked/xla/any", "chunked.vjp/xla/any")
TOKENS = ("recurrent/xla/any", "recurrent.vjp/xla/any")
FORMS = ("none", "constant", "head", "key", "key+value", "none beta", "head beta", "key erase+write")
SAMPLE = {
    "segment_ids": {NATIVE: FORMS, CHUNKED: ("none", "key+value", "head beta"), TOKENS: ("key", "key erase")},
    "cu_seqlens": {NATIVE: ("head", "key beta"), CHUNKED: ("head", "key erase"), TOKENS: ("value",)},
    "rows": {NATIVE: ("key", "head beta"), CHUNKED: ("constant",), TOKENS: ("none",)},
}


def sample():
    for name, chosen in SAMPLE.items():
        for kernels, forms in chosen.items():
            for case in LAYOUTS[name].cases():
                for kernel in kernels:
                    takes = case.erasure or kernel != "recurrent.vjp/xla/any"
                    if case.name in forms and takes:
                        fast = [pytest.mark.fast] if kernels is NATIVE else []
                        yield pytest.param(LAYOUTS[name], case, kernel, id=f"{name}-{case.name}-{kernel}", marks=fast)


def programs_of(spec: KernelSpec):
    program = jax.jit(functools.partial(run_spec, spec, Choice()))
    return (None, program) if spec.is_gradient else (program, None)


@pytest.mark.parametrize(("layout", "case", "kernel"), list(sample()))
def test_a_poisoned_document_harms_no_other(layout: Layout, case: Case, kernel: str):
    spec, operands = kernel_registry.kernels[kernel], operands_of(case)
    found = leaks(layout, operands, *programs_of(spec), few=True)
    assert not found, "\n".join(found)

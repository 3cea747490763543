"""Every call of the CUDA kernels once, for each form of decay with and without the delta rule.

    compute-sanitizer --tool memcheck python -m tests.cuda_once --form key --erasure beta  # or all, without the two

`tests/hardware/sanitize_cuda` runs each combination in a process of its own. Needs an NVIDIA GPU; says whether all results are
finite.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glax
import glax.serving
from glax.testing.cases import FORMS, Case, inputs

ERASURES = dict(none=(), beta=("beta",), both=("erase", "write"))
# Heads in groups, and widths that are no multiples of a block's rows and columns.
SHAPE: dict[str, Any] = dict(heads=(1, 2, 4), K=100, V=60, dtype="bfloat16")
CUTS = (0, 0, 13, 14, 37)


def in_pool(case: Case) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Return (the tokens, a pool of the states and two other rows, the slots). The second sequence has no slot."""
    tokens = inputs(case, "log-sigmoid")
    states = tokens.pop("initial_state")
    pool = jnp.concatenate([states, jnp.full((2, *states.shape[1:]), 7.0, states.dtype)])[::-1]
    slots = np.arange(case.B + 1, 1, -1, dtype=np.int32)
    slots[1] = -1
    return tokens, pool, jnp.asarray(slots)


def of_sequences(case: Case, platform: str):
    options: dict[str, Any] = dict(reverse=case.reverse, platform=platform)
    if case.cuts is not None:
        options["cu_seqlens"] = jnp.asarray(case.cuts, jnp.int32)
    return jax.jit(lambda x: glax.recurrent(**x, **options))(inputs(case, "log-sigmoid"))


def of_step(case: Case, platform: str):
    tokens, pool, slots = in_pool(case)
    tokens = {name: x if name == "g_gamma" else x[:, 0] for name, x in tokens.items()}
    step = jax.jit(
        lambda pool, x: glax.recurrent_step(**x, state=pool, slots=slots, platform=platform), donate_argnums=0
    )
    return step(pool, tokens)


def of_draft(case: Case, platform: str):
    tokens, pool, slots = in_pool(case)

    def run(pool, x, accepted):
        output, draft = glax.recurrent_verify(**x, state=pool, slots=slots, platform=platform)
        return output, glax.commit(pool, draft, accepted)

    return jax.jit(run, donate_argnums=0)(pool, tokens, jnp.array([16, 3, 0, 5], jnp.int32))


REPLAYED = dict(none="", beta="+beta", both="+erase+write")  # as a form of a StatePool


def of_replay(form: str, erasure: str):
    """Return a call that advances a StatePool with rings of 3 by 5 tokens, so that states are written, too. Its kernel is the
    one that is chosen."""

    def call(case: Case, _: str):
        tokens, _, slots = in_pool(case)
        tokens = {name: x if name == "g_gamma" else x[:, 0] for name, x in tokens.items()}
        pool = glax.serving.StatePool(
            case.B + 2, case.heads, (case.K, case.V), replay=3, form=form + REPLAYED[erasure], token_dtype=case.dtype,
            dtype=case.state_dtype,
        )  # fmt: skip
        step = jax.jit(lambda pool, x: pool.step(**x, slots=slots), donate_argnums=0)
        for _ in range(5):
            output, pool = step(pool, tokens)
        return output, pool.states_of(slots)

    return call


def calls(form: str, erasure: str) -> Iterator[tuple[str, Callable[[Case, str], Any], Case]]:
    shape = SHAPE | dict(gates=FORMS[form], erasure=ERASURES[erasure])
    yield "sequences", of_sequences, Case("", B=2, T=20, **shape)
    yield "packed, reverse", of_sequences, Case("", T=40, cuts=CUTS, reverse=True, **shape)
    for state in ("float32", "bfloat16"):
        yield f"step, {state}", of_step, Case("", B=4, T=1, state_dtype=state, **shape)
        yield f"draft, {state}", of_draft, Case("", B=4, T=16, state_dtype=state, **shape)
    for state in ("float32", "int8"):
        yield f"replay, {state}", of_replay(form, erasure), Case("", B=4, T=1, state_dtype=state, **shape)


def finite(case: Case, results) -> bool:
    """Return whether all results are finite. The padding behind packed sequences is not looked at."""
    output, states = (np.asarray(x.astype(jnp.float32)) for x in results)
    if case.cuts is not None:
        output = output[:, : case.cuts[-1]]
    return bool(np.isfinite(output).all() and np.isfinite(states).all())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--erasure", choices=ERASURES)
    parser.add_argument("--platform", choices=("cuda", "xla"), default="cuda")
    args = parser.parse_args()
    wrong = 0
    for form, erasure in itertools.product(
        [args.form] if args.form else FORMS, [args.erasure] if args.erasure else ERASURES
    ):
        for name, call, case in calls(form, erasure):
            passed = finite(case, call(case, args.platform))
            wrong += not passed
            print(f"{form}, erasure {erasure}, {name}: {'finite' if passed else 'NOT FINITE'}", flush=True)
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()

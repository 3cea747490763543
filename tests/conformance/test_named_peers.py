"""The named recurrences against the values that other packages' own references compute: tests/named_peers.py writes them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glax
from tests.close import assert_close
from tests.named_peers import UPDATES, VALUES

STORED = json.loads(VALUES.read_text())
GIVEN = {name: jnp.asarray(x, jnp.float32) for name, x in STORED["inputs"].items()}
ONE = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")


def of(*names):
    return [GIVEN[name] for name in names]


def several():
    """The arguments of Mamba-3 with a rank."""
    own = dict(Q=GIVEN["Qr"], K=GIVEN["Kr"], Q_bias=GIVEN["Qr_bias"], K_bias=GIVEN["Kr_bias"])
    return (
        dict(zip(ONE, of(*ONE), strict=True)) | own | {name: GIVEN[name] for name in ("MIMO_V", "MIMO_Z", "MIMO_Out")}
    )


CALLS = dict(
    rwkv7=functools.partial(
        glax.rwkv7, *of("q", "gk", "k", "v", "a", "b"), softmax_scale=0.5, initial_state=GIVEN["S"]
    ),
    gated_delta_product=functools.partial(
        glax.gated_delta_product, *of("q", "kn", "vn", "g", "betan"), num_updates=UPDATES, initial_state=GIVEN["S"]
    ),
    mlstm=functools.partial(
        glax.mlstm, *of("q", "k", "v", "i"), jax.nn.log_sigmoid(GIVEN["f"]), initial_state=tuple(of("S", "n", "m"))
    ),
    mamba3=functools.partial(glax.mamba3, *of(*ONE)),
    mamba3_mimo=functools.partial(glax.mamba3, **several()),
)


@pytest.mark.fast
@pytest.mark.parametrize("name", CALLS)
def test_a_named_recurrence_equals_the_references_of_others(name):
    """Those of fla for RWKV-7 and DeltaProduct, of transformers for the mLSTM, and of mamba's tests for Mamba-3."""
    output, final = CALLS[name]()
    states = [final] if isinstance(final, jax.Array) else list(final)
    if name.startswith("mamba3"):
        states = states[1:]  # without the angle, which mamba's references wrap otherwise
    for x, y in zip((output, *states), STORED["values"][name], strict=True):
        assert_close(name, x, np.asarray(y), 1e-5)

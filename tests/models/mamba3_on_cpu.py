"""Makes fla's Mamba-3 run without a GPU: mamba's own references over tokens stand in for its kernels.

The environment variable MAMBA names a clone of github.com/state-spaces/mamba, whose tests hold the references.
"""

import os
import pathlib
import sys

import fla.layers.mamba3
import torch

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from named_peers import functions

TESTS = pathlib.Path(os.environ["MAMBA"]) / "tests" / "ops"
(one_input,) = functions(TESTS / "triton" / "test_mamba3_siso.py", "mamba3_siso_step_ref")
(several_inputs,) = functions(TESTS / "tilelang" / "test_mamba3_mimo.py", "mamba3_MIMO_step_ref")
KERNELS = ("chunk_size", "rotary_dim_divisor", "dtype", "return_state", "return_final_states", "cu_seqlens")


def arrays_of(options: dict) -> dict:
    return {name: x for name, x in options.items() if name not in (*KERNELS, "Input_States")}


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """Return x with the columns i and N / 2 + i, which the kernel rotates, as 2 i and 2 i + 1, which the reference rotates."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def mamba3_siso_combined(**options):
    return one_input(**arrays_of(options))[0]


def mamba3_mimo_combined(MIMO_Out=None, **options):
    """The output [B, T, H, V]; without MIMO_Out its R rows, each by a MIMO_Out that is 1 in one row."""
    arrays = arrays_of(options)
    arrays |= {name: interleaved(arrays[name]) for name in ("Q", "K", "Q_bias", "K_bias")}
    if MIMO_Out is not None:
        return several_inputs(**arrays, MIMO_O=MIMO_Out)[0]
    arrays |= dict(Z=None, MIMO_Z=None)
    rank, shape = arrays["Q"].shape[2], arrays["MIMO_V"]
    rows = [torch.zeros_like(shape).index_fill(1, torch.tensor(r), 1) for r in range(rank)]
    return torch.stack([several_inputs(**arrays, MIMO_O=row)[0] for row in rows], 2)


def forward(self, hidden_states, past_key_values=None, **options):
    return self.cuda_kernels_forward(hidden_states)[0], None, past_key_values


fla.layers.mamba3.mamba3_siso_combined = mamba3_siso_combined
fla.layers.mamba3.mamba3_mimo_combined = mamba3_mimo_combined
fla.layers.mamba3.Mamba3.forward = forward

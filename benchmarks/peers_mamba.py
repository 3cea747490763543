"""Run transformers' Mamba-2 by mamba-ssm's Triton kernels where the package causal-conv1d is not installed.

mamba-ssm's fused training path convolves by the CUDA kernels of causal-conv1d. fla's Triton kernels have the same arithmetic
and stand in for them here, so that the path runs as its users run it.
"""

import importlib.machinery
import importlib.util
import sys
import types


def stand_in_for_causal_conv1d() -> str:
    """Make `import causal_conv1d` succeed, and return what it runs. Call it before mamba-ssm or transformers is imported."""
    if importlib.util.find_spec("causal_conv1d"):
        return "causal-conv1d"
    package, functions = types.ModuleType("causal_conv1d"), types.ModuleType("causal_conv1d.cpp_functions")
    package.__path__, package.__spec__ = [], importlib.machinery.ModuleSpec("causal_conv1d", None)
    package.causal_conv1d_fn, package.causal_conv1d_update = convolve, update
    functions.causal_conv1d_fwd_function, functions.causal_conv1d_bwd_function = forward, backward
    functions.causal_conv1d_update_function = update
    package.cpp_functions = functions
    sys.modules |= {"causal_conv1d": package, "causal_conv1d.cpp_functions": functions}
    return "fla's Triton convolution"


def convolve(x, weight, bias=None, seq_idx=None, activation=None):
    """Return the causal depthwise convolution of x [B, D, T] with weight [D, W], with its gradient."""
    from fla.modules.causal_conv1d import causal_conv1d

    refuse(seq_idx=seq_idx)
    return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)


def forward(x, weight, bias, seq_idx, initial_states, final_states_out, silu):
    """Return the output [B, D, T] for x [B, D, T]."""
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    refuse(seq_idx=seq_idx, initial_states=initial_states, final_states_out=final_states_out)
    y, _ = causal_conv1d_fwd(x.transpose(1, 2), weight, bias, None, activation="silu" if silu else None)
    return y.transpose(1, 2)


def backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu):
    """Return the gradients in x [B, D, T], weight [D, W] and bias [D], the first written into dx."""
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    refuse(seq_idx=seq_idx, initial_states=initial_states, dfinal_states=dfinal_states)
    x, dout, activation = x.transpose(1, 2), dout.transpose(1, 2), "silu" if silu else None
    found, dw, db, *_ = causal_conv1d_bwd(x, dout, None, weight, bias, activation=activation)
    return dx.copy_(found.transpose(1, 2)), dw, db, None


def update(x, conv_state, weight, bias=None, activation=None):
    """Return the output for one token x [B, D], and roll the state [B, D, W]."""
    from fla.modules.causal_conv1d import causal_conv1d_update

    return causal_conv1d_update(x, conv_state, weight=weight, bias=bias, activation=activation)[0]


def refuse(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}; install causal-conv1d")

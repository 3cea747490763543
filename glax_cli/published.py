"""List what commands name: gates, peers, and the mixing layers of published models as the shapes of one call, for `--like`."""

from typing import NamedTuple

# The argument of each gate.
GATES = {"key": "gk", "head": "g", "constant": "g_gamma", "none": None}
# What each peer needs: the packages, and the distributions that have them.
PEERS = {
    "fla-core": {"torch": "torch", "triton": "triton", "fla": "fla-core"},
    "mamba-ssm": {"torch": "torch", "triton": "triton", "mamba_ssm": "mamba-ssm"},
    "jla": {"jla": "jax-linear-attention"},
    "ejkernel": {"ejkernel": "ejkernel"},
}


class Layer(NamedTuple):
    """Hold one call: G heads of query and key serve H heads of value. `gate` is a name of GATES."""

    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    gate: str
    delta: bool = False


LAYERS = {
    "GLA-340M": Layer(8, 2048, 4, 4, 128, 256, "key"),
    "GLA-1.3B": Layer(4, 2048, 4, 4, 256, 512, "key"),
    "HGRN2-1.3B": Layer(4, 2048, 16, 16, 128, 128, "key"),
    "RetNet-1.3B": Layer(4, 2048, 8, 8, 256, 512, "constant"),
    "MiniMax-Text-01": Layer(1, 8192, 64, 64, 128, 128, "constant"),
    "Mamba2-1.3B": Layer(4, 2048, 1, 64, 128, 64, "head"),
    "Nemotron-H-8B": Layer(2, 4096, 8, 128, 128, 64, "head"),
    "DeltaNet-1.3B": Layer(4, 2048, 16, 16, 128, 128, "none", delta=True),
    "Qwen3-Next-80B-A3B": Layer(1, 8192, 16, 32, 128, 128, "head", delta=True),
    "Kimi-Linear-48B-A3B": Layer(1, 8192, 32, 32, 128, 128, "key", delta=True),
}

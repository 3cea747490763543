"""Write what other packages compute for the named recurrences, by their own references in PyTorch, on the CPU.

    python tests/named_peers.py FLA TRANSFORMERS MAMBA    folders of the packages fla and transformers, and of mamba's repository

It needs torch and einops, and neither Triton nor a GPU: it executes the functions of the references alone. The values stand in
tests/conformance/named_peers.json, and tests/conformance/test_named_peers.py holds glax to them.
"""

import ast
import json
import math
import pathlib
import sys
import typing

import numpy as np

VALUES = pathlib.Path(__file__).parent / "conformance" / "named_peers.json"
B, T, H, G, K, V, A, R, UPDATES = 1, 8, 2, 1, 4, 3, 2, 2, 2


def inputs() -> dict[str, np.ndarray]:
    """The arrays of all calls, rounded so that the file is short."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) * 64).round() / 64

    tokens = dict(
        q=normal(B, T, H, K),
        k=normal(B, T, H, K) / 2,
        v=normal(B, T, H, V),
        a=normal(B, T, H, K) / 2,
        b=normal(B, T, H, K) / 2,
    )
    gates = dict(gk=-abs(normal(B, T, H, K)), g=-abs(normal(B, T, H)), i=20 + 4 * normal(B, T, H), f=normal(B, T, H))
    rows = dict(
        kn=normal(B, T * UPDATES, H, K) / 2, vn=normal(B, T * UPDATES, H, V), betan=abs(normal(B, T * UPDATES, H)) / 2
    )
    starts = dict(S=normal(B, H, K, V), n=normal(B, H, K), m=normal(B, H))
    mamba = dict(
        Q=normal(B, T, G, K),
        K=normal(B, T, G, K),
        V=normal(B, T, H, V),
        ADT=-abs(normal(B, H, T)),
        DT=abs(normal(B, H, T)),
    )
    mamba |= dict(
        Trap=normal(B, H, T),
        Q_bias=normal(H, K),
        K_bias=normal(H, K),
        Angles=normal(B, T, H, A),
        D=normal(H),
        Z=normal(B, T, H, V),
    )
    mimo = {f"{name}r": normal(B, T, R, G, K) for name in "QK"} | {f"{name}r_bias": normal(H, R, K) for name in "QK"}
    mimo |= {name: normal(H, R, V) for name in ("MIMO_V", "MIMO_Z", "MIMO_Out")}
    return tokens | gates | rows | starts | mamba | mimo


def functions(path: pathlib.Path, *names: str) -> list:
    """Functions of a file, without its imports and wherever in it they are."""
    import torch
    import torch.nn.functional as F
    from einops import rearrange, repeat

    scope = dict(vars(typing), torch=torch, F=F, math=math, rearrange=rearrange, repeat=repeat)
    nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef) and x.name in names]
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return [scope[name] for name in names]


def values(fla: pathlib.Path, transformers: pathlib.Path, mamba: pathlib.Path, a: dict) -> dict:
    """The output and the final state of each call."""
    (dplr,) = functions(fla / "ops/generalized_delta_rule/dplr/naive.py", "dplr_recurrence")
    (product,) = functions(fla / "ops/gated_delta_product/naive.py", "naive_recurrent_gated_delta_product")
    xlstm = transformers / "models/xlstm/modeling_xlstm.py"
    step, sequence = functions(xlstm, "mlstm_recurrent_step_native", "mlstm_recurrent_sequence_native")
    sequence.__globals__.update(mlstm_recurrent_step_native=step)
    (siso,) = functions(mamba / "tests/ops/triton/test_mamba3_siso.py", "mamba3_siso_step_ref")
    (mimo,) = functions(mamba / "tests/ops/tilelang/test_mamba3_mimo.py", "mamba3_MIMO_step_ref")

    def by_head(*names):
        return [a[name].transpose(1, 2) for name in names]

    output, state = dplr(*by_head("q", "k", "v", "a", "b", "gk"), a["S"])
    found = dict(rwkv7=[output.transpose(1, 2), state])
    rest = dict(initial_state=a["S"].clone(), output_final_state=True, num_householder=UPDATES)
    found["gated_delta_product"] = product(a["q"], a["kn"], a["vn"], a["g"], a["betan"], K**-0.5, **rest)
    gates, starts = by_head("i", "f"), (a["S"], a["n"], a["m"][..., None])
    output, (C, n, m) = sequence(*by_head("q", "k", "v"), *gates, *starts, return_last_states=True)
    found["mlstm"] = [output.transpose(1, 2), C, n, m[..., 0]]
    one = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
    output, (_, S, key, value) = siso(**{name: a[name] for name in one})
    found["mamba3"] = [output, S.transpose(2, 3), key, value]
    several = {name: a[name] for name in one} | dict(Q=a["Qr"], K=a["Kr"], Q_bias=a["Qr_bias"], K_bias=a["Kr_bias"])
    output, (_, S, key, _) = mimo(**several, MIMO_V=a["MIMO_V"], MIMO_Z=a["MIMO_Z"], MIMO_O=a["MIMO_Out"])
    found["mamba3_mimo"] = [output, S.transpose(2, 3), key, a["V"][:, -1]]
    return found


def main():
    import torch

    given = inputs()
    arrays = {name: torch.tensor(x, dtype=torch.float32) for name, x in given.items()}
    found = values(*map(pathlib.Path, sys.argv[1:4]), arrays)
    text = {name: [np.round(np.asarray(x, np.float64), 7).tolist() for x in each] for name, each in found.items()}
    VALUES.write_text(json.dumps(dict(inputs={name: x.tolist() for name, x in given.items()}, values=text)) + "\n")


if __name__ == "__main__":
    main()

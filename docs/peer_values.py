"""Write what other packages compute for the calls of docs/coming_from.md, by their own references in PyTorch.

    python docs/peer_values.py FLA MAMBA TRANSFORMERS    the folders of the packages fla, mamba_ssm and transformers

It needs torch and einops, and neither Triton nor a GPU: it executes the functions of the references alone. The values stand in
docs/peer_values.json, and a test holds the page's code to them.
"""

import ast
import json
import pathlib
import sys

PAGE = pathlib.Path(__file__).parent / "peer_values.json"
B, T, H, K, V = 2, 8, 2, 4, 3


def functions(path: pathlib.Path, *names: str) -> list:
    """Return functions of a file, without the imports of that file."""
    import torch
    import torch.nn.functional as F
    from einops import rearrange, repeat

    nodes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef) and x.name in names]
    for node in nodes:
        node.decorator_list.clear()  # of transformers, which would take a kernel from a hub
    scope = dict(torch=torch, F=F, rearrange=rearrange, repeat=repeat, is_torchdynamo_exporting=bool)
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return [scope[name] for name in names]


def inputs() -> dict:
    """Return the arrays of all calls, rounded so that the file is short."""
    import torch

    made = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (torch.randn(*shape, generator=made) * 64).round() / 64

    def gate(*shape):
        return -(normal(*shape).abs())

    return dict(
        q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, V), gk=gate(B, T, H, K), g=gate(B, T, H),
        beta=normal(B, T, H).sigmoid(), start=normal(B, H, K, V),
        x=normal(B, T, H, V), dt=normal(B, T, H), A=-normal(H).exp(), Bs=normal(B, T, 1, K), Cs=normal(B, T, 1, K),
        D=normal(H), z=normal(B, T, H, V), dt_bias=normal(H),
    )  # fmt: skip


def values(fla: pathlib.Path, mamba: pathlib.Path, transformers: pathlib.Path, a: dict) -> dict:
    """Return the output of each call, and its final state where the reference has one."""
    (gla,) = functions(fla / "ops/gla/naive.py", "naive_recurrent_gla")
    (simple,) = functions(fla / "ops/simple_gla/naive.py", "naive_recurrent_simple_gla")
    (gated,) = functions(fla / "ops/gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule")
    (kda,) = functions(fla / "ops/kda/naive.py", "naive_recurrent_kda")
    triton = mamba / "ops/triton"
    (scan,) = functions(triton / "ssd_chunk_scan.py", "chunk_scan_ref")
    (passing,) = functions(triton / "ssd_state_passing.py", "state_passing_ref")
    (state,) = functions(triton / "ssd_chunk_state.py", "chunk_state_ref")
    (combined,) = functions(triton / "ssd_combined.py", "ssd_chunk_scan_combined_ref")
    combined.__globals__.update(chunk_scan_ref=scan, state_passing_ref=passing, chunk_state_ref=state)
    qwen = transformers / "models/qwen3_next/modeling_qwen3_next.py"
    _, chunk = functions(qwen, "l2norm", "torch_chunk_gated_delta_rule")
    q, k, v, start = a["q"], a["k"], a["v"], a["start"]
    rest = dict(initial_state=start.clone(), output_final_state=True)
    return dict(
        chunk_gla=gla(q, k, v, a["gk"], **rest),
        chunk_simple_gla=simple(q, k, v, a["g"], **rest),
        chunk_gated_delta_rule=gated(q, k, v, a["beta"], a["g"], **rest),
        chunk_kda=kda(q, k, v, a["gk"], a["beta"], **rest),
        jax_chunk_gated_delta_rule=chunk(q, k, v, a["g"], a["beta"], use_qk_l2norm_in_kernel=True, **rest),
        mamba_chunk_scan_combined=[
            combined(a["x"], a["dt"], a["A"], a["Bs"], a["Cs"], 4, a["D"], a["z"], a["dt_bias"], dt_softplus=True)
        ],
    )


def main():
    arrays = inputs()
    found = values(*map(pathlib.Path, sys.argv[1:4]), arrays)
    held = dict(
        inputs={name: x.tolist() for name, x in arrays.items()},
        values={name: [x.tolist() for x in results] for name, results in found.items()},
    )
    PAGE.write_text(json.dumps(json.loads(json.dumps(held), parse_float=lambda x: float(f"{float(x):.8g}"))) + "\n")


if __name__ == "__main__":
    main()

"""Measure tokens per second of generate on a CPU beside transformers: Mamba-2 370M of random weights, float32, one sequence.

python benchmarks/generate_cpu.py --peer PYTHON [--json FILE]      PYTHON: an interpreter that has torch and transformers

Both processes hold the model that glax writes to a folder, and continue one prompt in turns, so that a machine that others slow
down slows both. A turn reads the prompt and writes the tokens. The time of the processors does not depend on others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = dict(
    model_type="mamba2",
    hidden_size=1024,
    num_hidden_layers=48,
    num_heads=32,
    head_dim=64,
    state_size=128,
    n_groups=1,
    expand=2,
    vocab_size=50288,
    layer_norm_epsilon=1e-5,
    rms_norm=True,
    use_bias=False,
    tie_word_embeddings=True,
    eos_token_id=None,
)
PROMPT, THREADS = list(range(100, 116)), 2


def by_glax(folder: str, count: int):
    import jax.numpy as jnp

    from glax.models import from_pretrained, generate

    model = from_pretrained(folder, dtype=jnp.float32)
    return lambda: generate(model, [PROMPT], count)[0].tolist()


def by_transformers(folder: str, count: int):
    import torch
    from transformers import Mamba2ForCausalLM

    torch.set_num_threads(THREADS)
    model = Mamba2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])

    @torch.inference_mode()
    def run() -> list[int]:
        written = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return written[0, len(PROMPT) :].tolist()

    return run


BY = dict(glax=by_glax, transformers=by_transformers)


def child(name: str, folder: str, count: int):
    """Continue the prompt once for each line of standard input, and write a line of times and tokens for it."""
    run = BY[name](folder, count)
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        tokens = run()
        found = dict(seconds=time.perf_counter() - wall, processor=time.process_time() - processor, tokens=tokens)
        print(json.dumps(found), flush=True)


def turn_of(process: subprocess.Popen) -> dict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def lines_of(name: str, turns: list[dict], count: int) -> list[dict]:
    rates = [count / x["seconds"] for x in turns]
    spent = [x["processor"] / count for x in turns]
    what = f"generate, Mamba-2 370M, one sequence, {len(PROMPT)} tokens and {count} more"
    spread = f"{len(turns)} turns, from {min(rates):.2f} to {max(rates):.2f}"
    found = dict(implementation=name, what=what)
    return [
        found | dict(value=statistics.median(rates), unit="tokens/s", note=spread),
        found | dict(value=statistics.median(spent), unit="seconds of all processors a token"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", required="--child" not in sys.argv, metavar="PYTHON", help="with torch and transformers"
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N")
    parser.add_argument("--turns", type=int, default=7, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs=2, metavar=("BY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args.tokens)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    from flax import nnx
    from output import table, write

    from glax.models import from_config, save_pretrained

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(from_config(MODEL, rngs=nnx.Rngs(0)), folder)
        children = {}
        for name, python in dict(glax=sys.executable, transformers=args.peer).items():
            command = [python, __file__, "--child", name, folder, "--tokens", str(args.tokens)]
            children[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = {name: turn_of(process) for name, process in children.items()}  # compiles
        turns = [{name: turn_of(process) for name, process in children.items()} for _ in range(args.turns)]
        for process in children.values():
            process.communicate()
    lines = [x for name in children for x in lines_of(name, [turn[name] for turn in turns], args.tokens)]
    same = next(
        (i for i, pair in enumerate(zip(*(x["tokens"] for x in first.values()), strict=True)) if len(set(pair)) > 1),
        None,
    )
    print(table(lines))
    print("The tokens are equal." if same is None else f"The tokens differ from token {same} on.")
    if args.json:
        write(args.json, lines)


if __name__ == "__main__":
    main()

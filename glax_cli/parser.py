"""Define the arguments of every command. `docs/command_line.py` writes them into the reference."""

import argparse
from pathlib import Path

from glax_cli.arguments import INT32, a_path, integers, number, within
from glax_cli.published import GATES, LAYERS, PEERS

DTYPES = ("float32", "bfloat16", "float16")
MODES = ("forward", "train", "step")
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")  # those of shtab
DEMO_STEPS = 1200  # with fewer, the model need not win
SEEDS = 2**63 - 1  # the most that jax.random.key takes


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> Parser:
    parser = Parser(prog="glax", description="Gated linear attention and the delta rule in JAX.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for add in (
        add_doctor,
        add_check,
        add_bench,
        add_tune,
        add_cache,
        add_demo,
        add_generate,
        add_serve,
        add_train,
        add_completion,
    ):
        add(commands)
    return parser


def add_command(commands, name: str, help: str, description: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=help, description=description)


def add_json(parser):
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_doctor(commands):
    parser = add_command(
        commands,
        "doctor",
        "say what runs here, what does not, and what would help",
        "Says in three lines whether glax works here and what is lost; then every kernel that runs, the others by reason and "
        "remedy, and versions, devices and the cache of measurements. Exit code 1 if no kernel is usable.",
    )
    add_json(parser)


def add_check(commands):
    parser = add_command(
        commands,
        "check",
        "compare every kernel with the reference on this machine",
        "Runs every usable kernel on a set of telling cases, forward and gradients, and compares the results with a "
        "token-by-token reference in float64. Minutes on 2 cores, for compilers. Exit code 1 if any result misses its bar or "
        "is not finite.",
    )
    parser.add_argument("--quick", action="store_true", help="a few of the cases; with --states, fewer tokens")
    help = "the kernels of this device alone, with what to report; an error where JAX does not compute on one"
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help=help)
    parser.add_argument(
        "--states",
        action="store_true",
        help="instead, the error of states stored in each dtype, after 4096 and 65536 tokens",
    )
    add_json(parser)


def add_bench(commands):
    parser = add_command(
        commands,
        "bench",
        "time glax on this device, beside its limits and other libraries",
        "Times calls: medians with the 20th and 80th percentile of the device's time (accelerators: many calls in flight; "
        "CPUs: one at a time), the rates that they amount to, what a copy and a matrix product reach in the same run, and "
        "other libraries where they are installed. Exit code 1 if glax is wrong.",
    )
    add_problems(parser)
    help = (
        "train is forward and backward, step is one token for B sequences; repeat for more (default: forward and train)"
    )
    parser.add_argument("--mode", action="append", choices=MODES, help=help)
    help = "a library beside glax, which must be installed; repeat for more (default: all that are)"
    parser.add_argument("--peer", action="append", choices=PEERS, help=help)
    parser.add_argument("--iters", type=within(1), default=20, metavar="N", help="samples (default: %(default)s)")
    parser.add_argument("--out", type=a_path, metavar="FOLDER", help="write bench.json and roofline.png there")
    add_json(parser)


def add_tune(commands):
    parser = add_command(
        commands,
        "tune",
        "measure which configs are fastest here, and remember them",
        "Measures the configs of the kernels that each call uses on this device, forward and gradient, each checked before it "
        "may win, and keeps the fastest in the cache that all later calls look into. Exit code 1 if no config of a kernel can "
        "be used.",
    )
    add_problems(parser)
    add_json(parser)


def add_problems(parser):
    help = (
        "a shape; without V, K = V = D; G heads of query and key for H of value (default: H); repeat for more (default: some "
        "that suit the device)"
    )
    shape = integers("B,T,H,D", "B,T,H,K,V", "B,T,G,H,K,V")
    parser.add_argument("--shape", action="append", type=shape, metavar="B,T,[G,]H,K[,V]", help=help)
    help = "a decay per key channel, per head, constant, or none; repeat for more (default: key)"
    parser.add_argument("--gate", action="append", choices=GATES, help=help)
    help = (
        "with the delta rule: DeltaNet without a gate, Gated DeltaNet with one per head, KDA with one per key channel"
    )
    parser.add_argument("--delta", action="store_true", help=help)
    help = (
        f"the layer of a published model, instead of --shape, --gate and --delta; repeat for more: {', '.join(LAYERS)}"
    )
    parser.add_argument("--like", action="append", choices=LAYERS, metavar="MODEL", help=help)
    help = "the B rows as one, of N packed sequences of unequal lengths"
    parser.add_argument("--packed", type=within(1), default=1, metavar="N", help=help)
    help = "of query, key and value; repeat for more (default: float32 on CPUs, else bfloat16)"
    parser.add_argument("--dtype", action="append", choices=DTYPES, help=help)


def add_cache(commands):
    parser = add_command(
        commands,
        "cache",
        "list, show, clear, export or import what tuning has measured",
        "The measurements of this user, in GLAX_CACHE_DIR or else the user's cache folder.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name, takes, meaning in (
        ("list", None, "the files and how much is in each"),
        ("show", ("NAME", "of a file in the list, or a part of it"), "the entries of one file"),
        ("clear", None, "remove every file of measurements"),
        ("export", ("FILE", "to write"), "write all measurements to one JSON file"),
        ("import", ("FILE", "that was exported"), "add the measurements of a file; of two for a call the faster stays"),
    ):
        action = add_command(actions, name, meaning, meaning[0].upper() + meaning[1:] + ".")
        if takes is not None:
            metavar, help = takes
            action.add_argument("file", metavar=metavar, help=help, type=str if metavar == "NAME" else a_path)
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="do not ask")
        add_json(action)


def add_demo(commands):
    parser = add_command(
        commands,
        "demo",
        "run every kernel, train a small language model, generate from it",
        "Runs every kernel that this machine can run; then trains a byte-level language model of gated linear attention, "
        "compares it with an order-2 model, and generates text from what it saved. About a minute on 2 cores. A demo that was "
        "interrupted goes on where it was. Exit code 1 if the order-2 model wins (unless --steps is lowered) or decoding is "
        "wrong.",
    )
    for flag, least, most, default, meaning in (
        ("--steps", 1, INT32, DEMO_STEPS, "training steps"),
        ("--batch", 1, INT32, 4, "windows a step"),
        ("--length", 1, INT32, 128, "bytes predicted in a window"),
        ("--seed", 0, SEEDS, 0, "of weights, windows and sampling"),
    ):
        help = f"{meaning} (default: %(default)s)"
        parser.add_argument(flag, type=within(least, most), default=default, metavar="N", help=help)
    help = "what to train on (default: Python's standard library)"
    parser.add_argument("--text", type=a_path, metavar="FILE", help=help)
    help = "for the text, checkpoints, model and loss.png (default: %(default)s)"
    parser.add_argument("--out", type=a_path, metavar="FOLDER", default=Path("demo-out"), help=help)


def add_generate(commands):
    parser = add_command(
        commands,
        "generate",
        "continue a prompt by a model in a folder",
        "Continues a prompt by a checkpoint of fla, transformers or glax: a folder of config.json and safetensors. Its "
        "tokenizer.json is used where it has one; a vocabulary of 256 without one is bytes. A text ends with the end tokens "
        "of generation_config.json, else with those of config.json.",
    )
    parser.add_argument("folder", type=a_path, metavar="FOLDER", help="of the checkpoint")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue")
    help = "at most so many (default: as generation_config.json says, else 100)"
    parser.add_argument("--max-new-tokens", type=within(1), metavar="N", help=help)
    help = "0 takes the likeliest token (default: as generation_config.json says if it has do_sample, else 0)"
    parser.add_argument("--temperature", type=number(0, 1e6), metavar="X", help=help)
    help = "draw among the N likeliest tokens; needs --temperature"
    parser.add_argument("--top-k", type=within(1), metavar="N", help=help)
    help = "draw among the likeliest tokens that together have this probability; needs --temperature"
    parser.add_argument("--top-p", type=number(1e-9, 1), metavar="X", help=help)
    help = (
        "divide logits of tokens that were there, or multiply those below 0 (default: as generation_config.json says)"
    )
    parser.add_argument("--repetition-penalty", type=number(1e-6, 1e6), metavar="X", help=help)
    parser.add_argument("--seed", type=within(0, SEEDS), default=0, metavar="N", help="of drawing (default: 0)")
    help = "continue the prompt so many times (default: 1); needs --temperature"
    parser.add_argument("--samples", type=within(1), default=1, metavar="N", help=help)
    help = "end before this text; repeat for more (default: as generation_config.json says)"
    parser.add_argument("--stop", action="append", metavar="TEXT", help=help)
    help = "print the logarithm of each token's probability in the model"
    parser.add_argument("--log-probs", action="store_true", help=help)
    add_loading(parser)
    parser.add_argument("--adapter", type=a_path, metavar="FOLDER", help="an adapter of peft, added to the model")


def add_loading(parser):
    """Add the options of commands that load a folder and compile its model."""
    help = "do not store compiled programs in the cache folder, nor read them from there"
    parser.add_argument("--no-compilation-cache", dest="compilation_cache", action="store_false", help=help)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the parameters and the activations (default: as in the folder)"
    )
    parser.add_argument("--tokenizer", type=a_path, metavar="FILE", help="a tokenizer.json")


def add_serve(commands):
    parser = add_command(
        commands,
        "serve",
        "answer OpenAI's clients by a model in a folder",
        "Serves a checkpoint of fla, transformers or glax over HTTP: /v1/completions, /v1/chat/completions and /v1/models of "
        "OpenAI's interface, /health and /metrics. Needs the extra `serving`. SIGTERM and Ctrl-C refuse new calls, finish those "
        "that are open, and end the server; a second one does not wait for them.",
    )
    parser.add_argument("folder", type=a_path, metavar="FOLDER", help="of the checkpoint")
    help = "the address to listen at; others than 127.0.0.1 can be reached from outside (default: %(default)s)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=help)
    help = "0 takes a free one, which is printed (default: %(default)s)"
    parser.add_argument("--port", type=within(0, 65535), default=8000, metavar="N", help=help)
    stored = "0 stores none (default: 256 blocks of 128 tokens, within 1 GiB, and 256 MiB on a CPU)"
    for flag, least, default, meaning in (
        ("--capacity", 1, 8, "requests that are answered together, each in a slot"),
        ("--rows", 1, None, "tokens of prompts that are read in one round (default: 128 on a CPU, 2048 elsewhere)"),
        ("--max-length", 2, 4096, "the most tokens of a prompt and its answer together"),
        ("--queue", 1, 64, "requests that may wait for a slot; a call beyond is answered with 429"),
        ("--prefix-bytes", 0, None, f"memory for the states of prefixes that requests share; {stored}"),
        ("--body-bytes", 1, 4 << 20, "the most bytes of a call's body"),
    ):
        help = meaning if default is None else f"{meaning} (default: %(default)s)"
        most = 2**63 - 1 if flag.endswith("bytes") else INT32
        parser.add_argument(flag, type=within(least, most), default=default, metavar="N", help=help)
    help = "memory for the states of running requests; more requests wait (default: without limit)"
    parser.add_argument("--state-bytes", type=within(1, 2**63 - 1), metavar="N", help=help)
    help = "devices over which heads, MLPs and the vocabulary are sharded (default: %(default)s)"
    parser.add_argument("--tensor", type=within(1), default=1, metavar="N", help=help)
    help = "seconds until a request ends unfinished (default: %(default)s)"
    parser.add_argument("--timeout", type=number(0.001, 1e6), default=600.0, metavar="X", help=help)
    help = "seconds that open calls have to finish after SIGTERM (default: %(default)s)"
    parser.add_argument("--grace", type=number(0, 1e6), default=30.0, metavar="X", help=help)
    help = "a file with the key that clients must send (default: the variable GLAX_API_KEY, else none)"
    parser.add_argument("--api-key-file", type=a_path, metavar="FILE", help=help)
    add_loading(parser)


def add_train(commands):
    parser = add_command(
        commands,
        "train",
        "train or fine-tune a model on a text",
        "Trains the model of a TOML or JSON config on a text: glax.models.training.TrainingConfig lists its keys. A run that "
        "was interrupted resumes from its newest whole checkpoint, if its model, text and recipe are the same. The folder "
        "`model` in its output is what glax, fla and transformers load.",
    )
    parser.add_argument("config", type=a_path, metavar="CONFIG", help="a file in TOML or JSON")
    parser.add_argument("--steps", type=within(1), metavar="N", help="instead of the config's")
    parser.add_argument("--out", type=a_path, metavar="FOLDER", help="instead of the config's")


def add_completion(commands):
    parser = add_command(
        commands,
        "completion",
        "print the completion of this command for a shell",
        'Prints a script that completes commands and options. In bash: eval "$(glax completion bash)".',
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))

"""Parse the arguments of `glax demo`. `glax.cli.demo_run` runs it, and is imported once its packages are known to be
installed."""

from pathlib import Path

from glax.cli.arguments import INT32, a_path, within
from glax.cli.packages import require

PACKAGES = ("flax", "matplotlib", "optax", "rich", "safetensors")
STEPS = 1000
SEEDS = 2**63 - 1  # the most that jax.random.key takes


def add_parser(subparsers):
    parser = subparsers.add_parser(
        "demo",
        help="run every kernel, train a small language model, generate from it",
        description="Runs every kernel that this machine can run; then trains a byte-level language model of gated "
        "linear attention, compares it with an order-2 model, and generates text from its checkpoint. About two "
        "minutes on 2 cores. Exit code 1 if the order-2 model wins (unless --steps is lowered) or decoding is wrong.",
    )
    for flag, least, most, default, meaning in (
        ("--steps", 1, INT32, STEPS, "training steps"),
        ("--batch", 1, INT32, 4, "windows a step"),
        ("--length", 1, INT32, 256, "bytes predicted in a window"),
        ("--seed", 0, SEEDS, 0, "of weights, windows and sampling"),
    ):
        help = f"{meaning} (default: %(default)s)"
        parser.add_argument(flag, type=within(least, most), default=default, metavar="N", help=help)
    help = "what to train on (default: Python's standard library)"
    parser.add_argument("--text", type=a_path, metavar="FILE", help=help)
    help = "for model.safetensors and loss.png (default: %(default)s)"
    parser.add_argument("--out", type=a_path, metavar="FOLDER", default=Path("demo-out"), help=help)
    return parser


def run(args) -> int:
    require(PACKAGES)
    from glax.cli.demo_run import Settings, tour

    return tour(
        Settings(
            out=args.out,
            text=args.text,
            steps=args.steps,
            batch=args.batch,
            length=args.length,
            seed=args.seed,
            must_win=args.steps >= STEPS,
        )
    )

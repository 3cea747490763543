"""Run `glax demo`. `glax.cli.demo_run` is imported once its packages are known to be installed."""

from glax.cli.errors import require
from glax_cli.parser import DEMO_STEPS

PACKAGES = ("flax", "matplotlib", "optax", "orbax", "rich", "safetensors")


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
            must_win=args.steps >= DEMO_STEPS,
        )
    )

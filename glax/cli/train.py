"""Run `glax train`: train or fine-tune a model as a config says. `glax.models.training` does the work."""

import sys
from pathlib import Path

from glax.cli.errors import UsageError, reason, require

PACKAGES = ("flax", "matplotlib", "optax", "orbax", "rich", "safetensors")


def run(args) -> int:
    require(PACKAGES)
    from rich.console import Console

    from glax.cli.loss_plot import save_plot
    from glax.models.meshes import is_first
    from glax.models.training import NotFiniteLoss, TrainingConfig, train

    changes = dict(steps=args.steps, out=None if args.out is None else str(args.out))
    try:
        config = TrainingConfig.read(args.config, **{name: x for name, x in changes.items() if x is not None})
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(reason(error)) from None
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=not is_first())
    try:
        history, code = shown(config, train, console)
    except ValueError as error:  # the model's config, the text, the tokenizer or the folder is wrong
        raise UsageError(str(error)) from error
    except NotFiniteLoss as error:
        print(f"glax train: {error}", file=sys.stderr)
        return 1
    if not is_first():
        return code
    plot = Path(config.out) / "loss.png"
    save_plot(plot, history)
    held = list(history.held_out.values())
    console.print(f"held out: {held[-1]:.3f} nats/token\nWritten: {Path(config.out) / 'model'}, {plot}")
    return code


def shown(config, train, console, *, bits: bool = False, smoothed: int = 1):
    """Train with a progress bar. Return (the history, the exit code, which names a signal that has ended the training).

    config: a `TrainingConfig`. train: the function `glax.models.training.train`. console: where the bar is shown. bits: whether
    losses are shown in bits per byte instead of nats per token. smoothed: the number of last steps whose mean loss is shown.
    """
    import math

    import jax

    from glax.cli.interrupt import noted_interrupt
    from glax.models.operations import utilisation

    tokens = config.batch * config.length
    every, seconds, losses, shares = math.ceil(config.steps / 20), [], [], []
    scale, unit = (math.log(2), "bits/byte") if bits else (1.0, "nats/token")
    with noted_interrupt() as interrupt, bar(console, config.steps) as update:

        def begin(beginning):
            # Not the model: where layers are stacked, it holds a copy of the parameters.
            shares.append(utilisation(beginning.model, config.length, 1.0))
            parameters = sum(x.size for x in jax.tree.leaves(model_parameters(beginning.model)))
            console.print(
                f"start: {beginning.start}; {parameters:,} parameters\n"
                f"text: {beginning.data}\n"
                f"{config.steps} steps of {config.batch} x {config.length} tokens: {resumption(beginning.step, config)}\n"
                f"layers: {beginning.layers}"
            )

        def each_step(step: int, loss: float, took: float) -> bool:
            seconds.append(took)
            losses.append(loss / scale)
            mean = sum(losses[-smoothed:]) / len(losses[-smoothed:])
            recent = sorted(seconds[1:][-50:]) or [took]  # the first step compiles
            rate = tokens / recent[len(recent) // 2]
            mfu = "" if shares[0] is None else f", MFU {shares[0] * rate:.1%}"
            is_due = step == 1 or step % every == 0 or step == config.steps
            update(step, f"{mean:.3f} {unit}, {rate:,.0f} tokens/s{mfu}", is_due)
            return interrupt.requested

        _, history = train(config, each_step, begin)
    return history, interrupt.exit_code if interrupt.requested else 0


def resumption(step: int, config) -> str:
    """Return a text that says where the run begins: at the start, or at the checkpoint of `step`."""
    if step == 0:
        return f"a new run in {config.out}"
    left = "resumes" if step < config.steps else "no step is left; the model is written again"
    return f"{config.out} has step {step}: {left}"


def model_parameters(model):
    """Return the model's parameters as a tree of arrays."""
    from flax import nnx

    return nnx.state(model, nnx.Param)


def bar(console, steps: int):
    """Return a context manager that yields update(step, status, is_line_due): it shows a bar on a terminal, and else prints a
    line when one is due."""
    import contextlib

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextlib.contextmanager
    def on_terminal():
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=steps, status="compiling")
            yield lambda step, status, due: progress.update(task, completed=step, status=status)

    @contextlib.contextmanager
    def in_lines():
        yield lambda step, status, due: console.print(f"step {step}/{steps}: {status}") if due else None

    return on_terminal() if console.is_terminal else in_lines()

"""Run the demo: kernels, training, comparison on held-out text, and generation from the checkpoint."""

import dataclasses
import math
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.text import Text as Styled

from glax._src.core.files import unwritable
from glax.cli.errors import UsageError
from glax.cli.interrupt import noted_interrupt
from glax.cli.kernels_table import show_kernels, timed
from glax.cli.loss_plot import SMOOTHED_OVER, save_plot
from glax.cli.progress import progress
from glax.nn import order2
from glax.nn.checkpoint import load, save
from glax.nn.generate import generate, token_by_token
from glax.nn.model import ByteLM, ByteLMConfig
from glax.nn.text import Text, TextError, read_text
from glax.nn.train import NotFiniteLoss, Recipe, held_out_bits, train

EVALUATIONS = 8  # evaluations during training, on WATCHED windows each
WATCHED = 64
PROMPT, GENERATED = 64, 512
COMPARED = 16  # windows
DECODING_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """Configure the demo. text: None for Python's standard library. must_win: whether losing to the order-2 model is a
    failure."""

    out: Path
    text: Path | None
    steps: int
    batch: int
    length: int
    seed: int
    must_win: bool
    model: ByteLMConfig = dataclasses.field(default_factory=ByteLMConfig)


@dataclasses.dataclass
class History:
    """Hold bits per byte: of each training step, and of the held-out text by step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)


def tour(settings: Settings) -> int:
    """Run the whole demo, and return its exit code."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    text = prepare(settings)
    # A GPU would otherwise round float32 products to TensorFloat-32, and two ways to compute one sum would differ by that.
    with jax.default_matmul_precision("float32"):
        headline(console, "Kernels")
        show_kernels(console, settings.seed)
        try:
            return language_model(settings, text, console)
        except NotFiniteLoss as error:
            complain(str(error))
            return 1


def prepare(settings: Settings) -> Text:
    """Return the text, after making the folder for results. What can fail because of the user's settings fails here, before the
    work."""
    try:
        text = read_text(settings.text, settings.length)
    except TextError as error:
        raise UsageError(str(error)) from None
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {settings.out}: {error.strerror}") from None
    if reason := unwritable(settings.out):
        raise UsageError(f"cannot write to {settings.out}: {reason}")
    return text


def language_model(settings: Settings, text: Text, console: Console) -> int:
    headline(console, "Training")
    baseline = order2_bits(text)
    model = ByteLM(settings.model, rngs=nnx.Rngs(settings.seed))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    console.print(
        f"{text.name}: {len(text.train):,} bytes to train on, {text.held_out.size:,} behind them held out\n"
        f"{parameters:,} parameters, {settings.model.layers} layers; "
        f"{settings.steps} steps of {settings.batch} x {settings.length} bytes"
    )
    model, history, finished = train_shown(settings, text, model, console)
    if not finished:
        console.print(f"Interrupted after {len(history.losses)} steps.")
        write_results(settings, console, model, history, baseline, f"Interrupted at step {len(history.losses)}")
        return 130

    headline(console, "Held out")
    mine = held_out_bits(model, text.held_out)
    history.held_out[settings.steps] = mine
    won = mine < baseline
    console.print(f"gated linear attention  {mine:.3f} bits per byte")
    console.print(f"order-2 byte model      {baseline:.3f} bits per byte, from counts of the same training text")
    console.print(f"{'Gated linear attention' if won else 'The order-2 model'} wins by {abs(baseline - mine):.3f}.")
    title = f"{text.name}: {parameters:,} parameters"
    checkpoint, complete = write_results(settings, console, model, history, baseline, title)

    headline(console, f"Generation from {'the model in memory' if checkpoint is None else checkpoint}")
    model = model if checkpoint is None else load(checkpoint)
    show_generation(console, model, text, settings.seed)
    same = show_equality(console, model, text)
    return 0 if same and complete and (won or not settings.must_win) else 1


def write_results(
    settings: Settings, console: Console, model: ByteLM, history: History, baseline: float, title: str
) -> tuple[Path | None, bool]:
    """Write the checkpoint and the plot, and return (the checkpoint's path, whether both are in settings.out).

    If the disk is full, the checkpoint is written to another folder, so that the training is not lost.
    """
    checkpoint, plot = save_somewhere(model, settings.out / "model.safetensors"), settings.out / "loss.png"
    written = [] if checkpoint is None else [checkpoint]
    try:
        save_plot(plot, history.losses, history.held_out, baseline, title)
        written.append(plot)
    except OSError as error:
        complain(f"cannot write {plot}: {error.strerror or error}")
    console.print(f"Written: {', '.join(map(str, written)) or 'nothing'}")
    return checkpoint, checkpoint is not None and written == [settings.out / checkpoint.name, plot]


def save_somewhere(model: ByteLM, path: Path) -> Path | None:
    """Return the path of the saved checkpoint: `path`, or a new temporary folder on disk or in memory if `path` cannot be
    written. Return None if nothing can be written."""
    try:
        save(model, path)
        return path
    except OSError as error:
        reason = str(error.strerror or error)
    for place in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm", os.curdir):
        try:
            folder = tempfile.mkdtemp(prefix="glax-demo-", dir=place)
        except OSError:
            continue  # try the next folder; the user sees the error of `path` itself
        try:
            save(model, Path(folder, path.name))
        except OSError:
            os.rmdir(folder)
            continue
        complain(f"cannot write {path}: {reason}. The trained model is saved: move it from {Path(folder, path.name)}")
        return Path(folder, path.name)
    complain(f"cannot write {path}: {reason}, nor any folder for temporary files. The trained model is in memory only")
    return None


def complain(text: str):
    print(f"glax demo: {text}", file=sys.stderr)


def order2_bits(text: Text) -> float:
    """Return the order-2 model's bits per byte on the bytes that the ByteLM is scored on: all of each window but its first."""
    scored = np.ones(text.held_out.shape, bool)
    scored[:, 0] = False
    following = np.concatenate([text.train[-2:], text.held_out.ravel()])
    return order2.fit(text.train).bits_per_byte(following, scored.ravel())


def train_shown(settings: Settings, text: Text, model: ByteLM, console: Console) -> tuple[ByteLM, History, bool]:
    """Return the trained model, its history, and whether the training ran to its end."""
    recipe = Recipe(settings.steps, settings.batch, settings.length)
    watched = text.held_out[:: math.ceil(len(text.held_out) / WATCHED)]
    evaluate_every = math.ceil(settings.steps / EVALUATIONS)
    history = History(held_out={0: held_out_bits(model, watched)})
    per_step = settings.batch * settings.length
    with noted_interrupt() as interrupt, progress(console, settings.steps, per_step) as show:

        def each_step(step: int, loss: float, model: ByteLM) -> bool:
            history.losses.append(loss)
            if step % evaluate_every == 0 and step < settings.steps:
                history.held_out[step] = held_out_bits(model, watched)
            show(step, float(np.mean(history.losses[-SMOOTHED_OVER:])))
            return interrupt.requested

        model = train(model, text.train, recipe, settings.seed, each_step)
    return model, history, not interrupt.requested


def show_generation(console: Console, model: ByteLM, text: Text, seed: int):
    """Generate text from the first held-out bytes, and print it and the speed."""
    prompt = jnp.asarray(text.held_out.reshape(1, -1)[:, :PROMPT], jnp.int32)

    def run():
        return jax.block_until_ready(generate(model, prompt, jax.random.key(seed), length=GENERATED))

    tokens = run()
    _, seconds = timed(run)
    console.print(Styled(printable(prompt[0]), style="dim"), end="")
    console.print(Styled(printable(tokens[0])))
    size = sum(x.nbytes for x in jax.tree.leaves(model.initial_states(1)))
    console.print(
        f"\n{GENERATED} bytes behind a prompt of {prompt.shape[1]} (dim): {GENERATED / seconds:,.0f} tokens/s, "
        f"from a state of {size:,} bytes however long the text"
    )


def printable(tokens) -> str:
    """Return bytes as text. Characters that a terminal might obey, or cannot show, become replacement characters."""
    decoded = np.asarray(tokens, np.uint8).tobytes().decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded)


def show_equality(console: Console, model: ByteLM, text: Text) -> bool:
    """Print and return whether token-by-token decoding gives the logits of one parallel pass."""
    tokens = jnp.asarray(text.held_out[:COMPARED, :-1], jnp.int32)
    parallel, stepped = np.asarray(nnx.jit(ByteLM.__call__)(model, tokens)), np.asarray(token_by_token(model, tokens))
    difference, largest = np.abs(parallel - stepped).max(), np.abs(parallel).max()
    same = bool(difference <= DECODING_TOLERANCE * largest)
    console.print(
        f"Token by token against one parallel pass over {tokens.shape[0]} x {tokens.shape[1]} bytes: the logits "
        f"{'agree' if same else 'DISAGREE'}.\n"
        f"Largest difference {difference:.1e}, largest logit {largest:.1f}: {difference / largest:.1e} relative"
    )
    return same


def headline(console: Console, title: str):
    console.print(f"\n[bold]{title}[/bold]")

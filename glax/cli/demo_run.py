"""Run the demo: kernels, training, comparison on held-out text, and generation from the saved model."""

import dataclasses
import math
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from rich.console import Console
from rich.text import Text as Styled

from glax._src.core.files import read_regular, replacing, unwritable
from glax.cli import order2
from glax.cli.errors import UsageError, reason
from glax.cli.kernels_table import show_kernels, timed
from glax.cli.loss_plot import SMOOTHED_OVER, save_plot
from glax.cli.train import shown
from glax.models import CausalLM, from_pretrained, generate
from glax.models.training import NotFiniteLoss, TrainingConfig, train

LIBRARY_BYTES = 4_000_000
HELD_OUT = 0.05  # the share of bytes at the end that training never reads
EVALUATED = 16  # held-out windows that are evaluated together
EVALUATIONS = 5  # evaluations, and checkpoints, during training
LEARNING_RATE = 8e-3
PROMPT, GENERATED = 64, 512
TEMPERATURE = 0.8
DECODING_TOLERANCE = 1e-3
MODEL = dict(
    model_type="gla", vocab_size=256, hidden_size=96, num_hidden_layers=2, num_heads=3, expand_k=1.0, expand_v=1.0,
    intermediate_size=192, initializer_range=0.1,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """Configure the demo.

    out: the folder for results. text: the file to train on; None for Python's standard library. length: the bytes predicted in
    a window. must_win: whether losing to the order-2 model is a failure. model: the content of a config.json.
    """

    out: Path
    text: Path | None
    steps: int
    batch: int
    length: int
    seed: int
    must_win: bool
    model: dict = dataclasses.field(default_factory=lambda: MODEL)

    @property
    def recipe(self) -> TrainingConfig:
        return TrainingConfig(
            model=self.model,
            text=str(self.out / "text.txt"),
            out=str(self.out),
            steps=self.steps,
            batch=self.batch,
            length=self.length,
            learning_rate=LEARNING_RATE,
            checkpoint_every=math.ceil(self.steps / EVALUATIONS),
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class Halves:
    """Hold a text in two parts. train: all but the last 5%. held_out: the rest, in windows of length + 1 bytes, of which the
    first is not predicted."""

    name: str
    train: UInt8[np.ndarray, "bytes"]
    held_out: UInt8[np.ndarray, "windows length+1"]


def tour(settings: Settings) -> int:
    """Run the whole demo: kernels, training, comparison and generation. Return its exit code."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    text = prepare(settings)
    # A GPU would otherwise round float32 products to TensorFloat-32, and two ways to compute one sum would differ by that.
    with jax.default_matmul_precision("float32"):
        headline(console, "Kernels that run here")
        show_kernels(console, settings.seed)
        try:
            return language_model(settings, text, console)
        except NotFiniteLoss as error:
            print(f"glax demo: {error}", file=sys.stderr)
            return 1


def prepare(settings: Settings) -> Halves:
    """Return the text, and write the part to train on into the folder for results. Errors of the user's settings are raised
    here, before the work."""
    out, path = settings.out, settings.text
    try:
        raw = library_text() if path is None else read_regular(path)[1]
    except OSError as error:
        raise UsageError(f"cannot read the text {error.filename or path}: {error.strerror or error}") from None
    text = halves(raw, settings.length, "Python's standard library" if path is None else path.name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}") from None
    if why := unwritable(out):
        raise UsageError(f"cannot write to {out}: {why}")
    with replacing(out / "text.txt") as new:
        new.write_bytes(text.train.tobytes())
    return text


def library_text(limit: int = LIBRARY_BYTES) -> bytes:
    """Return the modules of Python's standard library, one after another by name, until `limit` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    if not text:
        raise UsageError(f"no Python sources in {folder}: name a text with --text")
    return text[:limit]


def halves(raw: bytes, length: int, name: str) -> Halves:
    """Return a text in two parts. Raises UsageError if it holds out less than one window."""
    window = length + 1
    windows = int(len(raw) * HELD_OUT) // window
    if windows < 1:
        needed = math.ceil(window / HELD_OUT)
        raise UsageError(f"the text {name} is too short: {len(raw)} bytes, windows of {length} need {needed}")
    data = np.frombuffer(raw, np.uint8)
    cut = len(data) - windows * window
    return Halves(name, data[:cut], data[cut:].reshape(windows, window))


def language_model(settings: Settings, text: Halves, console: Console) -> int:
    """Train on the text, compare the model with the order-2 model, and generate. Return the exit code of the demo."""
    headline(console, "Training")
    console.print(f"{text.name}: {len(text.train):,} bytes to train on, {text.held_out.size:,} behind them held out")
    try:
        history, code = shown(settings.recipe, train, console, bits=True, smoothed=SMOOTHED_OVER)
    except ValueError as error:  # the folder holds a run of another model, text or recipe
        raise UsageError(reason(error)) from error
    plot = settings.out / "loss.png"
    if code:
        save_plot(plot, history, bits=True)
        console.print(
            f"Interrupted after step {max(history.losses)}: the same command goes on from there\nLosses: {plot}"
        )
        return code

    headline(console, f"Held out, by {settings.out / 'model'}")
    model = from_pretrained(settings.out / "model")
    won, baseline = show_comparison(console, model, text)
    headline(console, "Generation")
    show_generation(console, model, text, settings.seed)
    same = show_equality(console, model, text)
    save_plot(plot, history, baseline, f"{text.name}, {settings.steps} steps", bits=True)
    console.print(f"\nModel:  {settings.out / 'model'}\nLosses: {plot}")
    return 0 if same and (won or not settings.must_win) else 1


def show_comparison(console: Console, model: CausalLM, text: Halves) -> tuple[bool, float]:
    """Print the losses on the held-out text, in bits per byte. Return (whether the model beats the order-2 model, the latter's
    loss)."""
    mine, baseline = held_out_bits(model, text.held_out), order2.bits_per_byte(text.train, text.held_out)
    won = mine < baseline
    console.print(f"gated linear attention  {mine:.3f} bits per byte")
    console.print(f"order-2 byte model      {baseline:.3f} bits per byte, from counts of the same training text")
    console.print(f"{'Gated linear attention' if won else 'The order-2 model'} wins by {abs(baseline - mine):.3f}.")
    return won, baseline


def held_out_bits(model: CausalLM, windows: UInt8[np.ndarray, "windows T+1"]) -> float:
    """Return the mean of -log2 p(byte | the bytes before it in the window) over all bytes of each window but the first."""
    run, losses = nnx.jit(CausalLM.loss), []
    for some in np.split(windows.astype(np.int32), range(EVALUATED, len(windows), EVALUATED)):
        losses.append(float(run(model, jnp.asarray(some[:, :-1]), jnp.asarray(some[:, 1:]))) * len(some))
    return sum(losses) / len(windows) / math.log(2)


def show_generation(console: Console, model: CausalLM, text: Halves, seed: int):
    """Generate text from the first held-out bytes. Print the text and the speed."""
    prompt = jnp.asarray(text.held_out.reshape(1, -1)[:, :PROMPT], jnp.int32)

    def run():
        drawn = generate(model, prompt, GENERATED, key=jax.random.key(seed), temperature=TEMPERATURE)
        return jax.block_until_ready(drawn)

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
    """Return tokens, which are bytes, as text. Characters that a terminal might obey, or cannot show, become replacement
    characters."""
    decoded = np.asarray(tokens, np.uint8).tobytes().decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded)


def show_equality(console: Console, model: CausalLM, text: Halves) -> bool:
    """Print and return whether token-by-token decoding gives the logits of one parallel pass."""
    tokens = jnp.asarray(text.held_out[:EVALUATED, :-1], jnp.int32)
    parallel, stepped = np.asarray(nnx.jit(CausalLM.__call__)(model, tokens)), np.asarray(token_by_token(model, tokens))
    difference, largest = np.abs(parallel - stepped).max(), np.abs(parallel).max()
    same = bool(difference <= DECODING_TOLERANCE * largest)
    console.print(
        f"Token by token against one parallel pass over {tokens.shape[0]} x {tokens.shape[1]} bytes: the logits "
        f"{'agree' if same else 'DISAGREE'}.\n"
        f"Largest difference {difference:.1e}, largest logit {largest:.1f}: {difference / largest:.1e} relative"
    )
    return same


@nnx.jit
def token_by_token(model: CausalLM, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocabulary"]:
    """Return model(tokens), computed by T steps."""

    def one(states, token):
        logits, states = model.step(token, states)
        return states, logits

    _, logits = jax.lax.scan(one, model.initial_states(tokens.shape[0]), tokens.T)
    return logits.swapaxes(0, 1)


def headline(console: Console, title: str):
    console.print(f"\n[bold]{title}[/bold]")

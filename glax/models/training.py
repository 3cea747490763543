"""Train and fine-tune models: windows of a text, AdamW, data and sequence parallelism, and checkpoints to resume from."""

import dataclasses
import functools
import hashlib
import json
import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glax import parallel
from glax._src.core.bind import check_real
from glax._src.core.files import parse, read_regular
from glax.models.folders import has_weights
from glax.models.load import from_config, from_pretrained
from glax.models.model import REMAT, CausalLM
from glax.models.qwen3_next import FusedGatedDeltaNet
from glax.models.runs import (
    CHECKPOINTS,
    Checkpoints,
    History,
    by_name,
    content,
    digest,
    is_finite,
    locked,
    read_history,
    write_history,
)
from glax.models.saving import save
from glax.models.tokens import TOKENIZER, Tokenizer, find_tokenizer, read_tokens
from glax.nn import LightningAttention, Mamba2
from glax.nn.linear_attention import LinearAttention
from glax.nn.rwkv6 import RWKV6Attention

DTYPES = ("float32", "bfloat16")
SEEDS, INT32 = 2**63 - 1, 2**31 - 1  # the most that jax.random.key takes, and a dimension or a counter of steps
RECURRENT = (
    LinearAttention,
    LightningAttention,
    Mamba2,
    RWKV6Attention,
    FusedGatedDeltaNet,
)  # with a field `recurrence`
# What a resumed run has in common with the run that wrote its checkpoints, beside the start, the text and the tokenizer.
RECIPE = ("batch", "length", "learning_rate", "warmup", "weight_decay", "clip", "dtype", "seed")
HELD_OUT = 0.05  # the share of tokens at the end that is held out
EVALUATED = 16  # the held-out windows that are evaluated
# Dense operations a second in bfloat16, by a part of the device's name, as its maker states them.
PEAKS = {
    "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "v5 lite": 197e12, "v5p": 459e12, "v6": 918e12,
}  # fmt: skip


class NotFiniteLoss(ArithmeticError):
    """A loss or a parameter is not finite."""


def matrices(params):
    """Return which parameters have weight decay: all but biases and the scales of norms."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Configure `glax train`; read from TOML or JSON.

    model:      the content of a config.json, or a folder. Weights in the folder are the start of the training.
    text:       the file to train on; its last 5% are held out.
    tokenizer:  a file of the package tokenizers. If None, the tokenizer in the model's folder, or bytes.
    out:        the folder for checkpoints, the plot, and the model as `save_pretrained` writes it.
    steps, batch, length: the optimizer steps, the windows per step, the tokens per window.
    learning_rate, weight_decay, clip: options of AdamW. warmup: the share of steps with a linear warmup, before a cosine decay
        to a tenth.
    dtype:      the dtype of activations. Parameters are float32.
    remat:      what the backward pass recomputes: "full", "dots", "dots_no_batch" or None.
    checkpoint_every: the steps between checkpoints. seed: the seed of weights and windows.
    data, sequence: how many devices shard the batch, and how many shard the sequence.
    """

    model: dict | str
    text: str
    tokenizer: str | None = None
    out: str = "train-out"
    steps: int = 1000
    batch: int = 8
    length: int = 512
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "float32"
    remat: str | None = None
    checkpoint_every: int = 200
    seed: int = 0
    data: int = 1
    sequence: int = 1

    def __post_init__(self):
        self.check_names()
        for name in ("steps", "batch", "length", "checkpoint_every", "data", "sequence", "seed"):
            value, least, most = getattr(self, name), *((0, SEEDS) if name == "seed" else (1, INT32))
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r:.80}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value!r:.80}")
        for name in ("learning_rate", "warmup", "weight_decay", "clip"):
            check_real(name, getattr(self, name))
        for name, is_valid, wanted in (
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("clip", self.clip > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("warmup", 0 <= self.warmup <= 1, "from 0 to 1, the share of the steps"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        for name, over in (("batch", "data"), ("length", "sequence")):
            value, shards = getattr(self, name), getattr(self, over)
            if value % shards:
                raise ValueError(
                    f"{name} must be a multiple of {over}={shards}, the devices that shard it, got {value}"
                )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.remat is not None and self.remat not in REMAT:
            raise ValueError(f"remat must be one of {', '.join(map(repr, REMAT))}, got {self.remat!r}")

    def check_names(self):
        """Raise ValueError unless model is a dict of JSON or a name, and the other names are strings that a file can have."""
        if isinstance(self.model, dict):
            try:
                json.dumps(self.model, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"model must be the content of a config.json, got {self.model!r:.80}: {error}"
                ) from None
        for name in ("model", "text", "tokenizer", "out", "dtype", "remat"):
            value = getattr(self, name)
            if (name == "model" and isinstance(value, dict)) or (name in ("tokenizer", "remat") and value is None):
                continue
            if not isinstance(value, str) or not value or "\0" in value:
                wanted = "the content of a config.json or the name of a folder" if name == "model" else "a name"
                raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW with a linear warmup and a cosine decay to a tenth. Gradients are clipped by their global norm, and biases
        and the scales of norms have no weight decay."""
        peak, warmup = self.learning_rate, max(1, round(self.warmup * self.steps))
        steps = max(self.steps, warmup + 1)
        schedule = optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, end_value=peak / 10)
        adamw = optax.adamw(schedule, b2=0.99, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)

    @classmethod
    def read(cls, path: Path, **changes) -> "TrainingConfig":
        """Return the config in a file, with changes. Paths in it are relative to its folder. Raises ValueError, which names the
        wrong entry, and OSError if the file cannot be read."""
        _, raw = read_regular(path)
        try:
            values = parse(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is neither TOML nor JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of keys, got {type(values).__name__}")
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise ValueError(f"{path} has keys that are not known: {', '.join(unknown)}")
        if missing := sorted({"model", "text"} - values.keys()):
            raise ValueError(f"{path} must have {' and '.join(missing)}")
        for name in ("model", "text", "tokenizer", "out"):
            if isinstance(values.get(name), str):
                values[name] = str(path.parent / values[name])
        return cls(**values | changes)


@dataclasses.dataclass(frozen=True)
class Text:
    train: np.ndarray
    held_out: np.ndarray  # [windows, length + 1]

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, length: int) -> "Text":
        tokens, window = read_tokens(path, tokenizer), length + 1
        windows = min(int(len(tokens) * HELD_OUT) // window, EVALUATED) or 1
        if len(tokens) < (windows + 1) * window:
            raise ValueError(f"{path} is too short: {len(tokens)} tokens, windows of {length} need {2 * window}")
        cut = len(tokens) - windows * window
        return cls(tokens[:cut], tokens[cut:].reshape(windows, window))

    def windows(self, batch: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return windows at random positions of the text, [batch, length + 1] tokens."""
        first = rng.integers(0, len(self.train) - length, batch)
        return self.train[first[:, None] + np.arange(length + 1)]


def make_model(config: TrainingConfig) -> tuple[CausalLM, Tokenizer]:
    """Return the model to be trained, in float32, and its tokenizer."""
    folder = Path(config.model) if isinstance(config.model, str) else None
    given = config.model if folder is None else folder
    model = from_config(given, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))
    if folder is not None and has_weights(folder):
        nnx.update(model, nnx.state(from_pretrained(folder, dtype=jnp.float32), nnx.Param))
    model.set_remat(config.remat)
    if config.tokenizer is None:
        return model, find_tokenizer(folder, model.vocabulary)
    model.folder = None  # that folder's tokenizer is not this run's tokenizer
    return model, find_tokenizer(folder, model.vocabulary, Path(config.tokenizer))


def spread_sequence(model: CausalLM, mesh: jax.sharding.Mesh):
    """Change the model in place: every layer with a recurrence then solves its shard of the sequence, and exchanges states.

    mesh: a mesh with the axes "data", which shards the batch, and "sequence".
    """
    recurrence = functools.partial(parallel.recurrent, mesh=mesh, batch_axis="data", sequence_axis="sequence")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, RECURRENT):
            module.recurrence = recurrence


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Hold what a run is before its first step.

    start: what the parameters were before step 1. tokens, held_out: the tokens of the text to train on, and those behind them.
    step: the step of the checkpoint that the run resumes from; 0 for none.
    """

    model: CausalLM
    start: str
    tokens: int
    held_out: int
    step: int


def train(
    config: TrainingConfig,
    each_step: Callable[[int, float, float], bool] = lambda step, loss, seconds: False,
    begin: Callable[[Beginning], None] = lambda beginning: None,
) -> tuple[CausalLM, History]:
    """Train from the newest whole checkpoint in `config.out`, or from the start if there is none. Return the model and its
    losses.

    each_step(step, loss, seconds since the step before) is called after each step. If it returns True, training ends there,
    with a checkpoint. begin(beginning) is called before the first step. A resumed run computes what an uninterrupted run
    computes, because the windows depend on the step alone. `steps` may differ in a resumed run.

    Raises ValueError if `config.out` holds a run of another start, text or recipe, or if another process trains there. Raises
    NotFiniteLoss, and saves nothing more, if a loss or a parameter is not finite.
    """
    try:
        model, tokenizer = make_model(config)
        text = Text.read(Path(config.text), tokenizer, config.length)
        record = record_of(config, model, tokenizer)
    except OSError as error:
        what = f"cannot read {error.filename}: {error.strerror}" if error.filename else str(error)
        raise ValueError(what) from error
    with locked(Path(config.out)), Checkpoints(Path(config.out), record) as checkpoints:
        run = Run(config, model, text, checkpoints)
        if run.done > config.steps:
            raise ValueError(f"steps must be at least {run.done}, the steps that {config.out} has, got {config.steps}")
        begin(Beginning(model, record["model"]["source"], len(text.train), text.held_out.size, run.done))
        run.train(each_step)
        model = nnx.merge(run.graph, run.state[0])
        tokenizers = {} if config.tokenizer is None else {TOKENIZER: Path(config.tokenizer)}
        save(model, Path(config.out) / "model", tokenizers)
    return model, run.history


def record_of(config: TrainingConfig, model: CausalLM, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the run trains, by the names of `TrainingConfig`. See `glax.models.runs.refuse_another`."""
    options = hashlib.sha256(model.config.text.encode())
    source = f"random parameters, seed {config.seed}"
    if isinstance(config.model, str):
        if has_weights(Path(config.model)):
            options.update(digest(by_name(nnx.state(model, nnx.Param))).encode())
            source = f"the parameters in {config.model}"
        else:
            source = f"{source}, of the config in {config.model}"
    record: dict[str, Any] = {name: getattr(config, name) for name in RECIPE}
    record["model"] = content(source, options.hexdigest())
    with open(config.text, "rb") as file:
        record["text"] = content(config.text, hashlib.file_digest(file, "sha256").hexdigest())
    record["tokenizer"] = content(tokenizer.source, tokenizer.sha256)
    return record


class Run:
    """Hold the compiled programs of a run, and its state: (parameters, moments), the steps done and the losses."""

    def __init__(self, config: TrainingConfig, model: CausalLM, text: Text, checkpoints: Checkpoints):
        self.config, self.text, self.checkpoints = config, text, checkpoints
        self.out = Path(config.out)
        if config.data * config.sequence > (devices := jax.device_count()):
            raise ValueError(
                f"data times sequence must be at most {devices}, the number of devices, got {config.data} times {config.sequence}"
            )
        mesh = jax.make_mesh((config.data, config.sequence), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
        plain = nnx.graphdef(model)  # held-out windows are few, and need not divide over the devices
        if config.sequence > 1:
            spread_sequence(model, mesh)
        everywhere, self.spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "sequence"))
        self.graph, params = nnx.split(model)
        graph = self.graph
        optimizer = config.optimizer()

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(everywhere, everywhere))
        def update(state, read, following):
            params, moments = state
            loss, gradient = jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(read, following))(params)
            change, moments = optimizer.update(gradient, moments, params)
            return (optax.apply_updates(params, change), moments), loss

        @jax.jit
        def evaluate(params, read, following):
            return nnx.merge(plain, params).loss(read, following)

        self.update, self.evaluate = update, evaluate
        state = jax.jit(lambda params: (params, optimizer.init(params)), out_shardings=everywhere)(params)
        self.state, self.done = checkpoints.restore(state, everywhere)
        self.history = read_history(self.out, self.done)

    def train(self, each_step: Callable[[int, float, float], bool]):
        config = self.config
        if self.done and self.done not in self.history.held_out:
            self.history.held_out[self.done] = self.held_out_loss()
        since = time.perf_counter()
        for step in range(self.done + 1, config.steps + 1):
            windows = self.text.windows(config.batch, config.length, np.random.default_rng((config.seed, step)))
            read, following = (jax.device_put(x, self.spread) for x in (windows[:, :-1], windows[:, 1:]))
            self.state, loss = self.update(self.state, read, following)
            loss = float(loss)
            if not math.isfinite(loss):
                raise self.not_finite(f"the loss of step {step} is {loss}")
            self.history.losses[step] = loss
            now = time.perf_counter()
            stop = bool(each_step(step, loss, now - since))
            since = time.perf_counter()
            if stop or step % config.checkpoint_every == 0 or step == config.steps:
                self.save(step)
                since = time.perf_counter()
            if stop:
                return

    def held_out_loss(self) -> float:
        held = self.text.held_out
        return float(self.evaluate(self.state[0], held[:, :-1], held[:, 1:]))

    def save(self, step: int):
        """Write the losses and then the checkpoint, so that no checkpoint lacks its losses."""
        loss = self.held_out_loss()
        if not math.isfinite(loss):
            raise self.not_finite(f"the held-out loss behind step {step} is {loss}")
        if not is_finite(self.state):
            raise self.not_finite(f"the parameters or moments behind step {step} are not finite")
        self.history.held_out[step] = loss
        write_history(self.out, self.history)
        self.checkpoints.save(step, self.state)
        self.done = step

    def not_finite(self, what: str) -> NotFiniteLoss:
        write_history(self.out, self.history)
        newest = self.checkpoints.newest()
        good = "no checkpoint was written" if newest is None else f"the last good checkpoint is of step {newest}"
        return NotFiniteLoss(
            f"{what}: {good} in {self.out / CHECKPOINTS}: train into another out, with a learning_rate below "
            f"{self.config.learning_rate} or a clip below {self.config.clip}"
        )


def flops_per_token(model: CausalLM) -> float:
    """Return the floating-point operations of a training step per token: 6 for each parameter that a matrix product reads."""
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    lookup = 0 if model.head is None else model.vocabulary * model.width
    return 6.0 * (sum(sizes) - lookup)


def utilisation(model: CausalLM, tokens_per_second: float, devices: int) -> float | None:
    """Return the model FLOPs utilisation, the share of the devices' peak in bfloat16. Return None if the peak is unknown."""
    kind = jax.devices()[0].device_kind
    peak = next((value for name, value in PEAKS.items() if name in kind), None)
    return None if peak is None else flops_per_token(model) * tokens_per_second / (peak * devices)

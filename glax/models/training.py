"""Train and fine-tune models: windows of a text, AdamW, data and sequence parallelism, and checkpoints to resume from."""

import dataclasses
import functools
import json
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glax import parallel
from glax._src.core.bind import check_real
from glax._src.core.files import replacing
from glax.models.folders import has_weights
from glax.models.load import from_config, from_pretrained
from glax.models.model import REMAT, CausalLM
from glax.models.qwen3_next import FusedGatedDeltaNet
from glax.models.saving import save_pretrained
from glax.models.tokens import TOKENIZER, Tokenizer, find_tokenizer, read_tokens
from glax.nn import LightningAttention, Mamba2
from glax.nn.linear_attention import LinearAttention
from glax.nn.rwkv6 import RWKV6Attention
from glax.nn.train import Recipe

DTYPES = ("float32", "bfloat16")
RECURRENT = (
    LinearAttention,
    LightningAttention,
    Mamba2,
    RWKV6Attention,
    FusedGatedDeltaNet,
)  # with a field `recurrence`
HELD_OUT = 0.05  # the share of tokens at the end that is held out
EVALUATED = 16  # the held-out windows that are evaluated
# Dense operations a second in bfloat16, by a part of the device's name, as its maker states them.
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "v5 lite": 197e12,
    "v5p": 459e12,
    "v6": 918e12,
}


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
        for name in ("steps", "batch", "length", "checkpoint_every", "data", "sequence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
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

    @classmethod
    def read(cls, path: Path, **changes) -> "TrainingConfig":
        """Return the config in a file, with changes. Paths in it are relative to its folder. Raises ValueError, which names the
        wrong entry."""
        raw = path.read_bytes()
        try:
            values = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
        except ValueError as error:
            raise ValueError(f"{path} is neither TOML nor JSON: {error}") from None
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise ValueError(f"{path} has keys that are not known: {', '.join(unknown)}")
        if missing := sorted({"model", "text"} - values.keys()):
            raise ValueError(f"{path} must have {' and '.join(missing)}")
        for name in ("model", "text", "tokenizer", "out"):
            if isinstance(values.get(name), str):
                values[name] = str(path.parent / values[name])
        return cls(**values | changes)


@dataclasses.dataclass
class History:
    """Hold losses in nats per token: of each step's windows by step, and of the held-out windows by step."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    held_out: dict[int, float] = dataclasses.field(default_factory=dict)


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
    dtype, folder = jnp.dtype(config.dtype), None
    if isinstance(config.model, str):
        folder = Path(config.model)
        if has_weights(folder):
            model = from_pretrained(folder, dtype=jnp.float32)
            trained = from_config(folder, dtype=dtype, rngs=nnx.Rngs(config.seed))
            nnx.update(trained, nnx.state(model, nnx.Param))
            model = trained
        else:
            model = from_config(folder, dtype=dtype, rngs=nnx.Rngs(config.seed))
    else:
        model = from_config(config.model, dtype=dtype, rngs=nnx.Rngs(config.seed))
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


def train(
    config: TrainingConfig, each_step: Callable[[int, float, float], bool] = lambda step, loss, seconds: False
) -> tuple[CausalLM, History]:
    """Train from the newest checkpoint in `config.out`, or from the start if there is none. Return the model and its losses.

    each_step(step, loss, seconds since the step before) is called after each step. If it returns True, training ends there,
    with a checkpoint. A resumed run computes what an uninterrupted run computes, because the windows depend on the step alone.
    """
    model, tokenizer = make_model(config)
    text = Text.read(Path(config.text), tokenizer, config.length)
    mesh = jax.make_mesh((config.data, config.sequence), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    plain = nnx.graphdef(model)  # held-out windows are few, and need not divide over the devices
    if config.sequence > 1:
        spread_sequence(model, mesh)
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "sequence"))
    graph, params = nnx.split(model)
    recipe = Recipe(
        config.steps, config.batch, config.length, config.learning_rate, config.warmup, config.weight_decay, config.clip
    )
    optimizer = recipe.optimizer()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(everywhere, everywhere))
    def update(state, read, following):
        params, moments = state
        loss, gradient = jax.value_and_grad(lambda params: nnx.merge(graph, params).loss(read, following))(params)
        change, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, change), moments), loss

    @jax.jit
    def evaluate(params, read, following):
        return nnx.merge(plain, params).loss(read, following)

    out = Path(config.out)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    state = jax.jit(lambda params: (params, optimizer.init(params)), out_shardings=everywhere)(params)
    history = History()
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as checkpoints:
        state, done = resumed(checkpoints, state, everywhere)
        history = read_history(out, done)
        since = time.perf_counter()
        for step in range(done + 1, config.steps + 1):
            windows = text.windows(config.batch, config.length, np.random.default_rng((config.seed, step)))
            state, loss = update(state, *(jax.device_put(x, spread) for x in (windows[:, :-1], windows[:, 1:])))
            history.losses[step] = float(loss)
            now = time.perf_counter()
            stop = bool(each_step(step, float(loss), now - since))
            since = time.perf_counter()
            if stop or step % config.checkpoint_every == 0 or step == config.steps:
                held = text.held_out
                history.held_out[step] = float(evaluate(state[0], held[:, :-1], held[:, 1:]))
                checkpoints.save(step, args=ocp.args.StandardSave(by_name(state)))
                write_history(out, history)
                since = time.perf_counter()
            if stop:
                break
    model = nnx.merge(graph, state[0])
    save_pretrained(model, out / "model")
    if config.tokenizer is not None:
        with replacing(out / "model" / TOKENIZER) as new:
            shutil.copyfile(config.tokenizer, new)
    return model, history


def by_name(state) -> dict:
    """Return the arrays of a tree by their paths, so that a checkpoint does not depend on the classes in the tree."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def resumed(checkpoints: ocp.CheckpointManager, state, sharding: NamedSharding):
    """Return the state and the step of the newest checkpoint; `state` and 0 if there is none. Raises ValueError if it belongs
    to another model."""
    step = checkpoints.latest_step()
    if step is None:
        return state, 0
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in by_name(state).items()}
    try:
        found = checkpoints.restore(step, args=ocp.args.StandardRestore(wanted))
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"the checkpoint of step {step} in {checkpoints.directory} is of another model: {error}"
        ) from None
    return jax.tree.structure(state).unflatten([found[name] for name in wanted]), step


HISTORY = "history.json"


def write_history(out: Path, history: History):
    (out / HISTORY).write_text(json.dumps(dataclasses.asdict(history)))


def read_history(out: Path, done: int) -> History:
    """Return the losses of the steps up to the checkpoint."""
    if not done or not (out / HISTORY).is_file():
        return History()
    values = json.loads((out / HISTORY).read_text())
    return History(*({int(k): v for k, v in values[name].items() if int(k) <= done} for name in ("losses", "held_out")))


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

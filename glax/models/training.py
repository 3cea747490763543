"""Train and fine-tune models on a mesh of one or many processes, with checkpoints to resume from."""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glax import parallel
from glax._src.core.bind import check_real
from glax._src.core.compiling import start_compiling
from glax._src.core.files import parse, read_regular
from glax.models.adapters import ALL, lora, save_adapter
from glax.models.folders import has_weights
from glax.models.forming import formed
from glax.models.layer_scan import Layers
from glax.models.load import from_config, from_pretrained
from glax.models.loggers import check_loggers
from glax.models.meshes import (
    AXES,
    ROWS,
    TOKENS,
    check_one_open_axis,
    gathered_texts,
    is_first,
    on_mesh,
    placed,
    placed_rows,
    rows_here,
    shardings_like,
    shardings_of,
    training_mesh,
)
from glax.models.model import REMAT, CausalLM
from glax.models.qwen3_next import FusedGatedDeltaNet
from glax.models.runs import (
    CHECKPOINTS,
    Checkpoints,
    History,
    Journal,
    by_name,
    content,
    digest,
    is_finite,
    locked,
)
from glax.models.saving import save
from glax.models.shardings import head_counts
from glax.models.tokens import TOKENIZER, Tokenizer, find_tokenizer, read_tokens
from glax.nn import MLSTM, RGLRU, Experts, HGRNAttention, LightningAttention, Mamba2, Mamba3
from glax.nn.linear_attention import LinearAttention
from glax.nn.rwkv4 import RWKV4Attention
from glax.nn.rwkv6 import RWKV6Attention
from glax.nn.rwkv7 import RWKV7Attention

DTYPES = ("float32", "bfloat16")
SEEDS, INT32 = 2**63 - 1, 2**31 - 1  # the most that jax.random.key takes, and a dimension or a counter of steps
RECURRENT = (
    LinearAttention,
    HGRNAttention,
    LightningAttention,
    MLSTM,
    RGLRU,
    Mamba2,
    Mamba3,
    RWKV4Attention,
    RWKV6Attention,
    RWKV7Attention,
    FusedGatedDeltaNet,
)  # with a field `recurrence`
# The keys that must not change when a run resumes, beside the model, the text and the tokenizer.
RECIPE = (
    "batch", "length", "learning_rate", "warmup", "weight_decay", "clip", "dtype", "seed", "lora_rank", "lora_targets",
    "lora_alpha", "frozen", "schedule", "decay", "optimizer", "moment_dtype", "ema", "z_loss",
)  # fmt: skip
HELD_OUT = 0.05  # the share of tokens at the end that is held out
EVALUATED = 16  # the held-out windows that are evaluated
# Names of the parameters that matrix products read, beside those of experts.
MULTIPLIED = ("kernel", "router", "fn", "lora_a", "lora_b")
# The options of XLA with which a step on several GPUs runs collectives beside compute.
OVERLAP = dict(xla_gpu_enable_latency_hiding_scheduler=True)
LATE = 2  # how many further steps the host begins before it reads the values of a step


class NotFiniteLoss(ArithmeticError):
    """Say that a loss or a parameter is not finite. `train` raises it."""


def names_in(path: tuple) -> list[str]:
    """Return the names in the path of a parameter, without indices; the last is the parameter's own. path: keys of
    `jax.tree_util`."""
    return [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]


def is_multiplied(path: tuple) -> bool:
    """Return whether the parameter at this path is a matrix, or a stack of matrices, that a matrix product reads."""
    *modules, name = names_in(path)
    return name in MULTIPLIED or modules[-1:] == ["experts"]


def have_weight_decay(params):
    """Return a tree of bools in the structure of params, True for parameters with weight decay: matrices, tables and filters of
    convolutions."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: is_multiplied(path) or names_in(path)[-1] in ("embedding", "filter"), params
    )


def muon_dimensions(params):
    """Return a tree of the input and output axes of each parameter that Muon trains, the matrices of layers; None for others."""

    def numbers(path, x):
        is_hidden = is_multiplied(path) and names_in(path)[0] != "head"
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if is_hidden else None

    return jax.tree_util.tree_map_with_path(numbers, params)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Configure `train`, and the command `glax train`; `read` takes it from TOML or JSON.

    model:      the content of a config.json, or a folder. Weights in the folder are the start of the training.
    text:       one file to train on, of which each step reads windows at random places. Its last 5%, but at most 16 windows,
        are held out. Give either it or `documents`.
    documents:  tables of files to train on. A document is a line of a .jsonl file, a row of a .parquet file, or any other file
        as a whole. Each step reads the next documents, packed one after another. `files` of a table is a folder, a glob or a
        file. `weight` is the share of documents that a table gives, relative to the others; 1 if missing. `field` is the key
        of the text; "text" if missing.
    held_out:   the files to evaluate on: a folder, a glob or a file, read with the first table's `field`. `documents` need it,
        and a `text` takes none. held_out_tokens: how many of their tokens are evaluated, rounded up to whole windows.
    end_token:  the token after each document; None for none. workers: the processes that read and tokenise documents on each
        host; 0 for a thread.
    tokenizer:  a file of the package tokenizers. If None, the tokenizer.json in the model's folder, else bytes for a vocabulary
        of 256. With a file, nothing else is copied from the model's folder to `out`/model: no chat template, no
        generation_config.json, and none of the tensors that glax does not read, such as those of a vision tower.
    out:        the folder for checkpoints, the plot, and the model as `save_pretrained` writes it.
    steps, batch, length: the optimizer steps, the windows per step, the tokens per window.
    learning_rate, weight_decay, clip: the peak rate, the decay of parameters, and the largest global norm of a gradient.
    warmup:     the share of `steps` in which the rate rises linearly. schedule: the rate after it: "cosine", which falls to a
        tenth; "constant"; or "wsd", which is constant, and in the last share `decay` of `steps` falls linearly to 0.
    optimizer:  "adamw"; or "muon", which takes the matrices of layers, and leaves tables, heads, convolutions and all others to
        AdamW with Nesterov's momentum. Muon's steps are scaled to the size of AdamW's.
    moment_dtype: the dtype of the first moment: "float32" or "bfloat16".
    accumulate: the number of parts of a batch, whose gradients are formed one after another.
    profile:    [first, last], the steps of which a profile is written to `out`/profile; None for none.
    loggers:    what takes the values of steps beside `out`/history.jsonl: "tensorboard", in `out`/tensorboard; "wandb".
    ema:        the decay of an average of the parameters, which is evaluated and written as the model; None for none.
    z_loss:     the weight of the mean of (log sum exp logits)^2, which is added to the loss of a step and not to held-out losses.
    dtype:      the dtype of activations. Parameters are float32.
    remat:      what the backward pass recomputes: "full", "dots", "dots_no_batch" or None, as in `CausalLM.set_remat`.
    scan_layers: whether layers that repeat are stacked and run by one scan, so that one is compiled for all. With True a model
        without such layers is an error. None stacks them on TPUs, if there are some. On CPUs and GPUs None is False, because a
        step takes longer in a scan there.
    checkpoint_every: the steps between checkpoints. seed: the seed of weights and of the order of the data.
    checkpoints: how many of the newest checkpoints stay. checkpoint_hours: None, or h for a second rule by which others stay:
        the first checkpoint, and each that is written at least h hours after the last one that this rule keeps.
    lora_rank:  the rank of low-rank terms; None for none. With a rank only the terms are trained, `out` also gets a folder
        `adapter`, and weights that are loaded have `dtype`. lora_targets, lora_alpha: as in `glax.models.lora`; its defaults if
        None.
    frozen:     a regular expression. Parameters whose name it matches, by `re.search`, are not trained. The name is the one
        that `save_pretrained` writes, such as "model.layers.0.attn.q_proj.weight", with "*" for the number of an expert.
    data, fsdp, tensor, expert, sequence: the sizes of the mesh's axes; one may be -1, for as many as the devices allow. `data`,
        `fsdp` and `expert` shard the batch. `fsdp` also shards parameters and moments, `expert` those of experts, by expert,
        `tensor` heads, MLPs and the vocabulary, and `sequence` the tokens of a window.

    Raises ValueError, which names the field.

    >>> from glax.models.training import TrainingConfig
    >>> TrainingConfig(dict(model_type="gla", hidden_size=64), text="book.txt", steps=100).schedule
    'cosine'
    """

    model: dict | str
    text: str | None = None
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
    checkpoints: int = 2
    checkpoint_hours: float | None = None
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: int = 1
    lora_rank: int | None = None
    lora_targets: str | list[str] | None = None
    lora_alpha: float | None = None
    frozen: str | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    held_out: str | None = None
    held_out_tokens: int = 2**16
    end_token: int | None = None
    workers: int = 0
    schedule: str = "cosine"
    decay: float = 0.2
    optimizer: str = "adamw"
    moment_dtype: str = "float32"
    accumulate: int = 1
    ema: float | None = None
    profile: Sequence[int] | None = None
    scan_layers: bool | None = None
    z_loss: float = 0.0
    loggers: Sequence[str] = ()

    def __post_init__(self):
        self.check_names()
        self.check_documents()
        counts = ("steps", "batch", "length", "accumulate", "checkpoint_every", "checkpoints", "held_out_tokens")
        for name in (*counts, "workers", "seed", *AXES):
            value, least = getattr(self, name), int(name not in ("seed", "workers"))
            most = SEEDS if name == "seed" else INT32
            if name in AXES and value == -1:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                left = ", or -1 for what is left of the devices" if name in AXES else ""
                raise ValueError(f"{name} must be an integer of at least {least}{left}, got {value!r:.80}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value!r:.80}")
        self.check_trained()
        for name in ("learning_rate", "warmup", "weight_decay", "clip", "decay", "z_loss"):
            check_real(name, getattr(self, name))
        for name, is_valid, wanted in (
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("clip", self.clip > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("z_loss", self.z_loss >= 0, "at least 0"),
            ("warmup", 0 <= self.warmup <= 1, "from 0 to 1, the share of the steps"),
            ("decay", 0 <= self.decay <= 1, "from 0 to 1, the share of the steps"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if self.checkpoint_hours is not None:
            check_real("checkpoint_hours", self.checkpoint_hours)
            if self.checkpoint_hours <= 0:
                raise ValueError(f"checkpoint_hours must be above 0, got {self.checkpoint_hours!r}")
        check_one_open_axis({name: getattr(self, name) for name in AXES})
        self.check_shards({name: max(getattr(self, name), 1) for name in AXES})  # -1 is checked when devices are known
        for name, known in (
            ("dtype", DTYPES),
            ("moment_dtype", DTYPES),
            ("schedule", ("cosine", "wsd", "constant")),
            ("optimizer", ("adamw", "muon")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r:.80}")
        if self.profile is not None:
            first, last = self.profile if isinstance(self.profile, list | tuple) and len(self.profile) == 2 else (0, 0)
            if not isinstance(first, int) or not isinstance(last, int) or not 1 <= first <= last:
                raise ValueError(f"profile must be a first step and a last one behind it, got {self.profile!r:.80}")
            if first > self.steps:
                raise ValueError(f"profile must begin at one of the {self.steps} steps, got {self.profile!r:.80}")
        if self.ema is not None:
            check_real("ema", self.ema)
            if not 0 < self.ema < 1:
                raise ValueError(f"ema must be between 0 and 1, or None for no average, got {self.ema!r}")
        check_loggers(self.loggers)
        if self.scan_layers is not None and not isinstance(self.scan_layers, bool):
            raise ValueError(f"scan_layers must be true, false or None, got {self.scan_layers!r:.80}")
        if self.remat is not None and self.remat not in REMAT:
            raise ValueError(f"remat must be one of {', '.join(map(repr, REMAT))}, got {self.remat!r}")

    def check_trained(self):
        """Raise ValueError for a wrong lora_rank, lora_targets, lora_alpha or frozen, and for the first three without a rank."""
        if self.lora_rank is None:
            if given := [name for name in ("lora_targets", "lora_alpha") if getattr(self, name) is not None]:
                raise ValueError(
                    f"{given[0]} needs lora_rank, got {given[0]}={getattr(self, given[0])!r:.80} without it"
                )
        elif isinstance(self.lora_rank, bool) or not isinstance(self.lora_rank, int) or self.lora_rank < 1:
            raise ValueError(f"lora_rank must be an integer of at least 1, got {self.lora_rank!r:.80}")
        targets = self.lora_targets
        is_list = isinstance(targets, list) and all(isinstance(x, str) for x in targets)
        if targets is not None and not isinstance(targets, str) and not is_list:
            raise ValueError(f"lora_targets must be a string or a list of names, got {targets!r:.80}")
        if self.lora_alpha is not None:
            check_real("lora_alpha", self.lora_alpha)
        try:
            re.compile("" if self.frozen is None else self.frozen)
        except (TypeError, re.error) as error:
            raise ValueError(
                f"frozen must be a regular expression of names, got {self.frozen!r:.80}: {error}"
            ) from None

    def check_shards(self, sizes: Mapping[str, int]):
        """Raise ValueError unless the axes of a mesh divide the batch, its parts by `accumulate`, and the length. sizes: {an
        axis: its size}."""
        for name, axes in (("batch", ROWS), ("length", ("sequence",))):
            shards, over = math.prod(sizes[axis] for axis in axes), " * ".join(x for x in axes if sizes[x] > 1)
            if (value := getattr(self, name)) % shards:
                raise ValueError(
                    f"{name} must be a multiple of {over}={shards}, the devices that shard it, got {value}"
                )
            if name == "batch" and value % (shards * self.accumulate):
                raise ValueError(
                    f"batch must be a multiple of accumulate={self.accumulate} times the {shards} shards of a part, got {value}"
                )

    def check_names(self):
        """Raise ValueError unless `model` is a dict of JSON or a name, and every other name is a string that a file can have."""
        if isinstance(self.model, dict):
            try:
                json.dumps(self.model, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"model must be the content of a config.json, got {self.model!r:.80}: {error}"
                ) from None
        for name in ("model", "text", "held_out", "tokenizer", "out", "dtype", "remat"):
            value = getattr(self, name)
            if (name == "model" and isinstance(value, dict)) or (
                name in ("tokenizer", "remat", "held_out") and value is None
            ):
                continue
            if name == "text" and value is None and self.documents is not None:
                continue
            if not isinstance(value, str) or not value or "\0" in value:
                wanted = "the content of a config.json or the name of a folder" if name == "model" else "a name"
                raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")

    def check_documents(self):
        """Raise ValueError, which names the entry, unless `documents` are tables of files with held_out and without a text."""
        if self.documents is None:
            for name in ("held_out", "end_token"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} belongs to documents, got {getattr(self, name)!r:.80} with a text: leave it out"
                    )
            return
        if self.text is not None or self.held_out is None:
            raise ValueError("documents must come without a text, and with the files of held_out: name these alone")
        if self.end_token is not None and (isinstance(self.end_token, bool) or not isinstance(self.end_token, int)):
            raise ValueError(f"end_token must be a token or None, got {self.end_token!r:.80}")
        if self.end_token is not None and not 0 <= self.end_token <= INT32:
            raise ValueError(f"end_token must be from 0 to {INT32}, got {self.end_token!r:.80}")
        if not isinstance(self.documents, list | tuple) or not self.documents:
            raise ValueError(f"documents must be a list of tables, got {self.documents!r:.80}")
        for each in self.documents:
            if not isinstance(each, dict) or "files" not in each or each.keys() - {"files", "field", "weight"}:
                raise ValueError(f"documents must be tables of files, field and weight, got {each!r:.80}")
            for name in ("files", "field"):
                if not isinstance(x := each.get(name, "text"), str) or not x or "\0" in x:
                    raise ValueError(f"{name} of documents must be a name, got {x!r:.80}")
            check_real("weight", each.get("weight", 1.0))
            if each.get("weight", 1.0) <= 0:
                raise ValueError(f"weight of documents must be above 0, got {each['weight']!r}")

    def learning_rates(self) -> optax.Schedule:
        """Return the learning rate by the step: a linear warmup, and what `schedule` names."""
        peak, warmup = self.learning_rate, max(1, round(self.warmup * self.steps))
        steps = max(self.steps, warmup + 1)
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, end_value=peak / 10)
        parts, ends = [optax.linear_schedule(peak / warmup, peak, warmup), optax.constant_schedule(peak)], [warmup]
        if self.schedule == "wsd":
            falling = max(1, min(round(self.decay * self.steps), steps - warmup))
            parts, ends = [*parts, optax.linear_schedule(peak, 0.0, falling)], [*ends, steps - falling]
        return optax.join_schedules(parts, ends)

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer with its schedule. Gradients are clipped by their global norm, and only matrices, tables and
        filters have weight decay."""
        rates, dtype = self.learning_rates(), None if self.moment_dtype == "float32" else jnp.bfloat16
        clip = optax.clip_by_global_norm(self.clip)
        if self.optimizer == "adamw":
            return optax.chain(
                clip,
                optax.adamw(rates, b2=0.99, weight_decay=self.weight_decay, mask=have_weight_decay, mu_dtype=dtype),
            )
        # With rate 1 Muon gives -u. The weight decay of all matrices is added to it before the rate scales both.
        # Their steps have the RMS of AdamW's: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
        muon = optax.contrib.muon(
            1.0, adam_b2=0.99, mu_dtype=dtype, consistent_rms=0.2, muon_weight_dimension_numbers=muon_dimensions
        )
        decay = optax.add_decayed_weights(-self.weight_decay, mask=have_weight_decay)
        return optax.chain(clip, muon, decay, optax.scale_by_schedule(rates))

    @classmethod
    def read(cls, path: Path, **changes) -> "TrainingConfig":
        """Return the config in a file, with changes. Paths in it are relative to its folder.

        path: a file of JSON if its name ends with .json, else of TOML. changes: fields, in place of the file's. Raises
        ValueError, which names the wrong entry, and OSError if the file cannot be read.
        """
        _, raw = read_regular(path)
        try:
            values = parse(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is neither TOML nor JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of keys, got {type(values).__name__}")
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise ValueError(f"{path} has keys that are not known: {', '.join(unknown)}")
        if missing := sorted({"model", "documents" if "documents" in values else "text"} - values.keys()):
            raise ValueError(f"{path} must have {' and '.join(missing)}")
        tables = values["documents"] if isinstance(values.get("documents"), list) else []
        for name, table in [
            *((name, values) for name in ("model", "text", "held_out", "tokenizer", "out")),
            *(("files", table) for table in tables if isinstance(table, dict)),
        ]:
            if isinstance(table.get(name), str):
                table[name] = str(path.parent / table[name])
        return cls(**values | changes)


@dataclasses.dataclass(frozen=True)
class Text:
    """Hold the tokens of one text: those to train on, `train` [tokens], and the windows at its end that are held out, `held_out`
    [windows, length + 1]. Both are integers.

    >>> import numpy as np
    >>> from glax.models.training import Text
    >>> Text(np.arange(100), np.zeros((1, 9), int)).windows(4, 8, np.random.default_rng(0)).shape
    (4, 9)
    """

    train: np.ndarray
    held_out: np.ndarray  # [windows, length + 1]

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, length: int) -> "Text":
        """Return the tokens of a text file as a `Text`. Its last 5% are held out, in whole windows, at least one and at most 16.

        tokenizer: as `make_model` returns it. length: the tokens of a window, without the one that is only a target. Raises
        ValueError if the file has fewer than two windows, and OSError if it cannot be read.
        """
        tokens, window = read_tokens(path, tokenizer), length + 1
        windows = min(int(len(tokens) * HELD_OUT) // window, EVALUATED) or 1
        if len(tokens) < (windows + 1) * window:
            raise ValueError(f"{path} is too short: {len(tokens)} tokens, windows of {length} need {2 * window}")
        cut = len(tokens) - windows * window
        return cls(tokens[:cut], tokens[cut:].reshape(windows, window))

    def windows(self, batch: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return `batch` windows at random positions of `train`, [batch, length + 1] in its dtype.

        rng: draws the positions. Raises ValueError if `train` has at most length tokens.
        """
        first = rng.integers(0, len(self.train) - length, batch)
        return self.train[first[:, None] + np.arange(length + 1)]


class Data(Protocol):
    """Define the data of a run: the rows of each step, as tokens and segment ids, [rows, length + 1] each, or None for no
    segment ids.

    rows: the numbers of the rows of the batch that this process reads. held_out: the (tokens, segment ids) that are evaluated.
    description: what the data are, in words. source, sha256: their entry in the record of a run.
    """

    rows: Sequence[int]
    held_out: tuple[np.ndarray, np.ndarray | None]
    description: str
    source: str
    sha256: str

    def read(self, step: int) -> tuple[np.ndarray, np.ndarray | None]: ...

    def position(self) -> Any:
        """Return the position of all processes in the data, as a value of JSON that is the same on every process."""

    def seek(self, position: Any):
        """Continue from `position`, a result of the method of that name, on any number of processes."""

    def close(self): ...


class WindowsOfText(Data):
    """Give windows at random places of one text, which depend on the step alone."""

    def __init__(self, config: TrainingConfig, tokenizer: Tokenizer):
        assert config.text is not None
        self.config, self.source = config, config.text
        self.text = Text.read(Path(config.text), tokenizer, config.length)
        self.rows, self.held_out = range(config.batch), (self.text.held_out, None)
        count, held = len(self.text.train), self.text.held_out.size
        self.description = f"{config.text}, {count:,} tokens to train on, {held:,} held out"
        with open(config.text, "rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()

    def read(self, step: int) -> tuple[np.ndarray, None]:
        rng = np.random.default_rng((self.config.seed, step))
        return self.text.windows(self.config.batch, self.config.length, rng), None

    def position(self) -> None:
        return None

    def seek(self, position: None):
        pass

    def close(self):
        pass


class PackedDocuments(Data):
    """Give the rows of many files of documents, packed by `glax.models.documents`."""

    def __init__(self, config: TrainingConfig, tokenizer: Tokenizer, mesh: Mesh):
        try:
            from glax.models.documents import Mixture, Reader, held_out_rows
        except ImportError:
            raise ValueError("documents need the package grain: pip install grain") from None
        assert config.documents is not None and config.held_out is not None
        sizes = dict(batch=config.batch, length=config.length, seed=config.seed, end=config.end_token)
        mixture = Mixture.of(config.documents, tokenizer, **sizes)
        self.rows = rows_here(NamedSharding(mesh, TOKENS), (config.batch, config.length))
        self.reader = Reader(mixture, self.rows, config.workers)
        self.held_out = held_out_rows(mixture, config.held_out, config.held_out_tokens)
        self.source, self.sha256 = ", ".join(each["files"] for each in config.documents), mixture.sha256
        held = int((self.held_out[1] > 0).sum())
        self.description = f"{self.source}, {mixture.count:,} documents to train on, {held:,} tokens held out"

    def read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self.reader.read()

    def position(self) -> dict[str, str]:
        states = [json.loads(each) for each in gathered_texts(json.dumps(self.reader.states))]
        return dict(sorted(each for position in states for each in position.items()))

    def seek(self, position: dict[str, str]):
        self.reader.seek(position)

    def close(self):
        self.reader.close()


def make_model(config: TrainingConfig, mesh: Mesh | None = None) -> tuple[CausalLM, Tokenizer]:
    """Return (the model to be trained, its tokenizer). What is trained is float32.

    mesh: as `training_mesh` returns it; one device if None. On several devices each parameter is formed or loaded as its shards,
    and is whole on none. On one device the parameters are the same to a rounding. Raises the errors of `glax.models.from_config`,
    `from_pretrained` and `lora`, and ValueError if there is no tokenizer for the vocabulary.

    >>> from glax.models.training import TrainingConfig, make_model
    >>> sizes = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2)
    >>> make_model(TrainingConfig(sizes, text="book.txt"))[0].vocabulary
    256
    """
    model = outlined(config, mesh)
    if folder_of_weights(config) is None:
        nnx.update(model, drawn_parameters(config, mesh, model))
    return model, tokenizer_of(config, model)


def of_several(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh if it has several devices, else None."""
    return None if mesh is None or mesh.size == 1 else mesh


def folder_of_weights(config: TrainingConfig) -> Path | None:
    """Return the folder of the weights that a run begins with; None where they are drawn."""
    return Path(config.model) if isinstance(config.model, str) and has_weights(Path(config.model)) else None


def drawn_model(config: TrainingConfig) -> CausalLM:
    """Return a model of drawn parameters, which are float32."""
    return from_config(config.model, dtype=jnp.dtype(config.dtype), rngs=nnx.Rngs(config.seed))


def with_terms(config: TrainingConfig, model: CausalLM) -> CausalLM:
    """Return the model with the low-rank terms of the config, changed in place."""
    targets = ALL if config.lora_targets is None else config.lora_targets
    if config.lora_rank is not None:
        lora(model, config.lora_rank, targets, alpha=config.lora_alpha, rngs=nnx.Rngs(config.seed))
    return model


def outlined(config: TrainingConfig, mesh: Mesh | None) -> CausalLM:
    """Return the model of a run: with parameters if they are loaded from a folder, or with shapes if they are drawn. mesh: as
    `training_mesh` returns it, or None."""
    source, mesh = folder_of_weights(config), of_several(mesh)
    if source is None:
        model = nnx.eval_shape(lambda: with_terms(config, drawn_model(config)))
    elif config.lora_rank is None:
        model = drawn_model(config) if mesh is None else nnx.eval_shape(lambda: drawn_model(config))
        nnx.update(model, nnx.state(from_pretrained(source, dtype=jnp.float32, mesh=mesh), nnx.Param))
    else:
        model = with_terms(config, from_pretrained(source, dtype=jnp.dtype(config.dtype), mesh=mesh))
        if mesh is not None:
            graph, params = nnx.split(model)
            model = nnx.merge(graph, jax.tree.map(on_mesh, params, shardings_of(model, params, mesh)))
    model.set_remat(config.remat)
    return model


def drawn_parameters(config: TrainingConfig, mesh: Mesh | None, model: CausalLM) -> nnx.State:
    """Return drawn parameters for a model whose arrays are shapes, sharded over the mesh. mesh: as `training_mesh` returns it;
    None for one device."""
    mesh = of_several(mesh)

    def values() -> nnx.State:
        return nnx.state(with_terms(config, drawn_model(config)))

    return values() if mesh is None else formed(values, shardings_of(model, nnx.state(model), mesh))


def tokenizer_of(config: TrainingConfig, model: CausalLM) -> Tokenizer:
    """Return the tokenizer of a run. If it is not the one in the model's folder, `folder` of the model is set to None, in
    place."""
    folder = Path(config.model) if isinstance(config.model, str) else None
    if config.tokenizer is None:
        return find_tokenizer(folder, model.vocabulary)
    model.folder = None
    return find_tokenizer(folder, model.vocabulary, Path(config.tokenizer))


def trained_filter(config: TrainingConfig, model: CausalLM) -> Callable[[tuple, nnx.Variable], bool]:
    """Return a filter of flax.nnx for the parameters that are trained.

    Raises ValueError if there are none, or if `config.frozen` matches no parameter.
    """
    kind = nnx.Param if config.lora_rank is None else nnx.LoRAParam
    frozen = re.compile(r"(?!)" if config.frozen is None else config.frozen)

    def name(path: tuple) -> str:
        return model.names(".".join(map(str, path)))

    def is_trained(path: tuple, variable: nnx.Variable) -> bool:
        # After a split a variable has its kind in `type`.
        is_kind = issubclass(getattr(variable, "type", type(variable)), kind)
        return is_kind and not frozen.search(name(path))

    if not nnx.to_flat_state(nnx.state(model, is_trained)):
        raise ValueError(f"frozen must leave a parameter to train, got {config.frozen!r}, which matches all")
    names = [name(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    if config.frozen is not None and not any(map(frozen.search, names)):
        ends = ", ".join(sorted({x.removesuffix(".weight").rpartition(".")[2] for x in names}))
        raise ValueError(f"frozen must match a parameter, got {config.frozen!r}: their names end with {ends}")
    return is_trained


def spread_sequence(model: CausalLM, mesh: Mesh):
    """Change the model in place: every layer with a recurrence then solves its shard of the sequence, and exchanges states.

    mesh: a jax.sharding.Mesh with the axis "sequence". Its axes "data", "fsdp" and "expert", as far as it has them, shard the
    batch, and "tensor" the heads of the layers whose heads it divides. Returns None.

    Layers of softmax attention, Mamba-1, convolutions and MLPs stay as they are: jit divides them as it divides their inputs.
    Nothing is raised here. A call of the model raises ValueError if the mesh has no axis "sequence", or if the product of the
    batch's axes does not divide B. "sequence" need not divide T: sequences are padded.

    >>> from glax.models.training import spread_sequence
    >>> model = glax.models.from_pretrained(folder)
    >>> spread_sequence(model, jax.make_mesh((1,), ("sequence",)))
    """
    rows = tuple(name for name in ROWS if name in mesh.axis_names)
    tensor = mesh.shape.get("tensor", 1)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, RECURRENT):
            divides = tensor > 1 and all(count % tensor == 0 for count in head_counts(module, ""))
            module.recurrence = functools.partial(
                parallel.recurrent,
                mesh=mesh,
                batch_axis=rows,
                head_axis="tensor" if divides else None,
                sequence_axis="sequence",
            )


def keep_rows(model: CausalLM, mesh: Mesh):
    """Change the model in place, such that between blocks and in experts every device has its own rows and gathers parameters
    for them.

    mesh: as `training_mesh` returns it.
    """
    model.activations = NamedSharding(mesh, P(*TOKENS, None))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Experts):
            module.rows = NamedSharding(mesh, P((*ROWS, "sequence"), None))


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Hold what a run begins with, for `begin` of `train` to report.

    model:  the model as training begins. Training may go on with other arrays: a reference to the model that outlives the call
            of `begin` then keeps a second copy of its parameters in memory.
    start:  where the parameters came from before step 1, in words. data: what the run trains on, and how much of it, in words.
    step:   the step of the checkpoint that the run resumes from; 0 for none.
    layers: how many of the layers are compiled, in words. Where one scan runs over equal layers, one of these is compiled: "2
            of 24 compiled". Where none does, each is, and the reason follows: "each of 24 compiled: scan_layers is false".
    """

    model: CausalLM
    start: str
    data: str
    step: int
    layers: str


def train(
    config: TrainingConfig,
    each_step: Callable[[int, float, float], bool] = lambda step, loss, seconds: False,
    begin: Callable[[Beginning], None] = lambda beginning: None,
) -> tuple[CausalLM, History]:
    """Train from the newest whole checkpoint in `config.out`, or from the start if there is none. Return (the model, its losses),
    of which the second is a `History`. `config.out` then holds the model, its losses and checkpoints.

    each_step(step, loss, seconds since the step before) is called for each step. Up to two further steps have begun by then.
    If it returns True for step n, training ends with a checkpoint of its last step. The last step is at most n + 2 in a run of
    one process, and at most n + 5 in a run of several. each_step is also called for the steps after n.
    begin(beginning) is called before the first step. Every process calls both, and True from one ends the run of all.

    A resumed run computes what an uninterrupted run computes. With `config.text` the windows of a step depend on `seed` and the
    step alone. With `config.documents` a checkpoint holds how far they were read. `steps` may differ in a resumed run. Every
    process of a run calls `train`.

    Raises ValueError if `config.out` holds a run of another record (`record_of`: the model, the data, the tokenizer, and fields
    such as batch and seed), if it holds more than `steps` steps, or if another process trains there. Raises NotFiniteLoss, and
    saves nothing more, if a loss or a parameter is not finite.
    """
    mesh = training_mesh({name: getattr(config, name) for name in AXES})
    config.check_shards(mesh.shape)
    try:
        model = outlined(config, mesh)
        tokenizer = tokenizer_of(config, model)
        if config.end_token is not None and config.end_token >= model.vocabulary:
            raise ValueError(f"end_token must be below vocab_size={model.vocabulary}, got {config.end_token}")
        data = (
            WindowsOfText(config, tokenizer) if config.documents is None else PackedDocuments(config, tokenizer, mesh)
        )
        record = record_of(config, model, tokenizer, data)
    except OSError as error:
        what = f"cannot read {error.filename}: {error.strerror}" if error.filename else str(error)
        raise ValueError(what) from error
    out = Path(config.out)
    with locked(out), Checkpoints(out, record, config.checkpoints, config.checkpoint_hours) as checkpoints:
        run = Run(config, mesh, model, data, checkpoints)
        try:
            if run.done > config.steps:
                had = f"the steps that {config.out} has"
                raise ValueError(f"steps must be at least {run.done}, {had}, got {config.steps}")
            begin(Beginning(run.model(), record["model"]["source"], data.description, run.done, run.layers.description))
            run.train(each_step)
        finally:
            run.stop_profile()
            run.journal.close()
            data.close()
        model = run.model()
        write_model(config, model)
    return model, run.journal.history


def write_model(config: TrainingConfig, model: CausalLM):
    """Write the model to the folder `model` of `config.out`, and low-rank terms to `adapter`. All processes gather the
    parameters, and process 0 writes them."""
    if jax.process_count() > 1:
        graph, params = nnx.split(model)
        model = nnx.merge(graph, jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), params))
    if is_first():
        if config.lora_rank is not None:
            save_adapter(model, Path(config.out) / "adapter")
        tokenizers = {} if config.tokenizer is None else {TOKENIZER: Path(config.tokenizer)}
        save(model, Path(config.out) / "model", tokenizers)


def record_of(config: TrainingConfig, model: CausalLM, tokenizer: Tokenizer, data: Data) -> dict[str, Any]:
    """Return the record of a run: what must not change when it resumes, by the names of `TrainingConfig`, as values of JSON.

    These are batch, length, learning_rate, warmup, weight_decay, clip, dtype, seed, lora_rank, lora_targets, lora_alpha, frozen,
    schedule, decay, optimizer, moment_dtype, ema and z_loss, and, each as {source, sha256}, model, text and tokenizer.

    model, tokenizer: as `make_model` returns them; drawn parameters may be shapes. data: what the run trains on, a
    `glax.models.training.Data`. `Checkpoints` takes the record; `glax.models.runs.refuse_another` compares it with the record in
    a checkpoint.
    """
    options = hashlib.sha256(model.config.text.encode())
    source = f"random parameters, seed {config.seed}"
    if isinstance(config.model, str):
        if has_weights(Path(config.model)):
            own = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
            options.update(digest(by_name(nnx.state(model, own))).encode())
            source = f"the parameters in {config.model}"
        else:
            source = f"{source}, of the config in {config.model}"
    record: dict[str, Any] = {name: getattr(config, name) for name in RECIPE}
    record["model"] = content(source, options.hexdigest())
    record["text"] = content(data.source, data.sha256)
    record["tokenizer"] = content(tokenizer.source, tokenizer.sha256)
    return record


class Run:
    """Hold the compiled programs of a run, and its progress.

    state: (the parameters that are trained, the optimizer's state). done: the step of the newest checkpoint, 0 for none.
    layers: how the model's layers are stacked. They are stacked in `state` and `frozen`, and separate in checkpoints and in the
    model that is written. graph: the model's graph as it is trained on the mesh. alone: the graph of the model that is written,
    and the shapes of its parameters, the optimizer's state and its other variables. frozen: the model's other variables.
    compiling: the compilation of `update`, if it has begun; `train` waits for it.
    """

    def __init__(self, config: TrainingConfig, mesh: Mesh, model: CausalLM, data: Data, checkpoints: Checkpoints):
        """Begin a run. model: the result of `make_model`, or the same with shapes: the parameters are then drawn while the step
        is compiled."""
        self.config, self.mesh, self.data, self.checkpoints = config, mesh, data, checkpoints
        self.out, self.is_profiled = Path(config.out), False
        is_trained, optimizer = trained_filter(config, model), with_average(config.make_optimizer(), config.ema)
        self.layers = Layers.of(model, is_trained, config.scan_layers)
        graph, params, frozen = nnx.split(model, is_trained, ...)
        self.alone = graph, *jax.eval_shape(lambda x, y: (x, optimizer.init(x), y), params, frozen)
        outline, model = model, self.layers.model(model)
        if mesh.shape["sequence"] > 1 or (mesh.size > 1 and jax.default_backend() == "tpu"):
            spread_sequence(model, mesh)
        if mesh.size > 1:
            keep_rows(model, mesh)
        self.graph, stacks, others = nnx.split(model, self.layers.filter(is_trained), ...)
        self.held_out_batches = list(in_batches(*data.held_out, config.batch // config.accumulate))
        everywhere = NamedSharding(mesh, P())
        of_params = shardings_of(model, stacks, mesh)
        shapes = stacks, jax.eval_shape(optimizer.init, stacks)
        self.shardings = of_params, shardings_like(shapes[1], by_name(of_params), everywhere)
        self.compile(optimizer)
        newest = checkpoints.newest()
        self.compiling = None
        # XLA's CPU client compiles in the threads that run programs, and a collective that finds no thread ends the process.
        can_compile = mesh.size == 1 or jax.default_backend() != "cpu"
        # The shardings of frozen variables are known once they are there, and whether a checkpoint is this run's once it is read.
        if can_compile and not frozen and newest is None:
            self.compiling = self.begin_compiling(shapes, data)
        is_outline = all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((params, frozen)))
        if is_outline and (frozen or newest is None):  # a checkpoint has no frozen variables
            values = drawn_parameters(config, mesh, outline)
            params, frozen = nnx.split_state(values, is_trained, ...)
        self.frozen = self.layers.stacked(frozen, others)
        if newest is None:
            with_moments = jax.jit(
                lambda params: (params, optimizer.init(params)), donate_argnums=0, out_shardings=self.shardings
            )
            self.state, self.done = with_moments(self.layers.stacked(params, stacks)), 0
        else:
            for x in jax.tree.leaves(params):
                if isinstance(x, jax.Array):
                    x.delete()  # else they would lie in memory beside those of the checkpoint
            restored, self.done, position = checkpoints.restore(self.layers.shapes(self.alone[1:3], self.shardings))
            self.state = self.layers.stacked(restored, shapes)
            data.seek(position)
        self.journal = Journal(self.out, self.done, config.loggers, dataclasses.asdict(config))

    def compile(self, optimizer: optax.GradientTransformation):
        """Set `update` and `evaluate`, the jitted functions of a step and of the held-out loss.

        update(state, frozen, read, following, segments, asked) returns (the new state, {"loss", "gradient_norm", "asked"}), and
        donates the buffers of state. evaluate(params, frozen, read, following, segments) returns (the mean loss, the number of
        targets).
        """
        graph, shardings = self.graph, self.shardings
        overlap = OVERLAP if self.mesh.size > 1 and jax.default_backend() == "gpu" else None
        out = shardings, NamedSharding(self.mesh, P())

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=out, compiler_options=overlap)
        def update(state, frozen, read, following, segments, asked):
            params, moments = state

            def one(batch):
                """Return the loss of a batch or a part of it, and its gradient."""

                def loss_of(params):
                    return nnx.merge(graph, params, frozen).loss(*batch, z_loss=self.config.z_loss)

                loss, gradient = jax.value_and_grad(loss_of)(params)
                if self.mesh.size > 1:
                    gradient = jax.lax.with_sharding_constraint(gradient, shardings[0])
                return loss, gradient

            loss, gradient = self.accumulated(one, (read, following, segments))
            change, moments = optimizer.update(gradient, moments, params)
            values = dict(loss=loss, gradient_norm=optax.tree.norm(gradient), asked=asked.sum())
            return (optax.apply_updates(params, change), moments), values

        @functools.partial(jax.jit, out_shardings=NamedSharding(self.mesh, P()))
        def evaluate(params, frozen, read, following, segments):
            return nnx.merge(graph, params, frozen).loss(read, following, segments), (following >= 0).sum()

        self.update, self.evaluate = update, evaluate

    def begin_compiling(self, shapes, data: Data) -> Future:
        """Trace `update` and begin to compile it in a thread. shapes: the shapes of the state, of a model without frozen
        variables.

        The first step then finds its program compiled, if its arguments have the same dtypes and shardings.
        """

        def shape(x, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))

        def blank(held_out: np.ndarray) -> np.ndarray:
            return np.zeros((len(data.rows), self.config.length + 1), held_out.dtype)

        tokens, segments = data.held_out
        marks = None if segments is None else blank(segments)
        rows = self.placed(blank(tokens), marks, data.rows, self.config.batch)
        state = jax.tree.map(shape, shapes, self.shardings)
        (compiling,) = start_compiling([self.update.lower(state, nnx.State({}), *rows, self.on_each_device(False))])
        return compiling

    def accumulated(self, one: Callable, batch: tuple) -> tuple[jax.Array, Any]:
        """Return the loss and the gradient of a batch: the means of those of its parts, weighted by their numbers of targets.

        one: (part of a batch) -> (loss, gradient).
        """
        if (parts := self.config.accumulate) == 1:
            return one(batch)

        def divided(x):
            x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(None, *TOKENS)))

        def add(carry, part):
            total, sums = carry
            count = (part[1] >= 0).sum().astype(jnp.float32)
            return (total + count, jax.tree.map(lambda x, y: x + count * y, sums, one(part))), None

        batch = jax.tree.map(divided, batch)
        first = jax.tree.map(lambda x: x[0], batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))
        (total, sums), _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), batch)
        return jax.tree.map(lambda x: x / jnp.maximum(total, 1), sums)

    def averaged(self):
        """Return the parameters that are evaluated and written: their average with `ema`, else those that are trained."""
        params, moments = self.state
        return params if self.config.ema is None else moments[-1]

    def model(self) -> CausalLM:
        """Return the model with the parameters that are evaluated and written."""
        graph, params, _, frozen = self.alone
        unstacked = self.layers.unstacked
        return nnx.merge(graph, unstacked(self.averaged(), params), unstacked(self.frozen, frozen))

    def train(self, each_step: Callable[[int, float, float], bool]):
        """Run the steps that are left. The values of a step are read when LATE further steps have begun, so that no device
        waits for the host; before a checkpoint all are read."""
        config, waiting, stop = self.config, collections.deque(), False
        first, last = config.profile or (0, 0)
        self.restore_held_out()
        if self.compiling is not None:
            self.compiling.result()
        self.since = time.perf_counter()
        for step in range(self.done + 1, config.steps + 1):
            if step == first:
                jax.profiler.start_trace(self.out / "profile")
                self.is_profiled = True
            self.state, values = self.update(*self.arguments(step, stop))
            waiting.append((step, values))
            if step == min(last, config.steps):
                jax.block_until_ready(values)
                self.stop_profile()
            is_due = step % config.checkpoint_every == 0 or step == config.steps
            agreed = False
            while waiting and (is_due or agreed or len(waiting) > LATE):
                asked, by_all = self.read(*waiting.popleft(), each_step)
                stop |= asked
                agreed |= by_all or (asked and jax.process_count() == 1)
            if agreed or is_due:
                self.save(step)
                self.since = time.perf_counter()
            if agreed:
                return

    def arguments(self, step: int, stop: bool) -> tuple:
        """Return the arguments of `update` in a step. stop: whether this process asks for the end of the run."""
        rows = self.placed(*self.data.read(step), self.data.rows, self.config.batch)
        return self.state, self.frozen, *rows, self.on_each_device(stop)

    def stop_profile(self):
        if self.is_profiled:
            jax.profiler.stop_trace()
        self.is_profiled = False

    def read(self, step: int, values, each_step) -> tuple[bool, bool]:
        """Wait for the end of a step and record its values. Return (whether `each_step` asks for the end of the run after this
        step, whether some process had asked for it when the step began). values: the second result of `update`. Raises
        NotFiniteLoss."""
        values = jax.device_get(values)
        loss, now = float(values["loss"]), time.perf_counter()
        if not math.isfinite(loss):
            raise self.not_finite(f"the loss of step {step} is {loss}")
        seconds, self.since = now - self.since, now
        tokens = self.config.batch * self.config.length
        norm = float(values["gradient_norm"])
        self.journal.write(step, loss=loss, gradient_norm=norm, seconds=seconds, tokens_per_second=tokens / seconds)
        return bool(each_step(step, loss, seconds)), bool(values["asked"])

    def on_each_device(self, stop: bool) -> jax.Array:
        """Return an array with one element for each device: whether its process asks for the end of the run. Every process then
        reads the same sum."""
        return placed(np.full(self.mesh.size, stop, np.int32), NamedSharding(self.mesh, P(AXES)))

    def placed(
        self, tokens: np.ndarray, segments: np.ndarray | None, rows: Sequence[int], count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return (the tokens to read, the targets, the segment ids), [count, length] each, on the mesh. A token's target is the
        next token, or -1 where its segment ends.

        tokens, segments: [rows, length + 1]. rows: their numbers among the `count` rows.
        """
        place = functools.partial(placed_rows, rows=rows, count=count, sharding=NamedSharding(self.mesh, TOKENS))
        read, following = np.maximum(tokens[:, :-1], 0), tokens[:, 1:]
        if segments is None:
            return place(read), place(following), None
        following = np.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), following, -1)
        return place(read), place(following), place(np.ascontiguousarray(segments[:, :-1]))

    def held_out_loss(self) -> float:
        """Return the mean loss of the held-out tokens. Its batches have as many rows as a part of a training batch, and rows
        without targets fill the last one."""
        total, count = 0.0, 0
        for tokens, segments in self.held_out_batches:
            placed = self.placed(tokens, segments, range(len(tokens)), len(tokens))
            loss, targets = jax.device_get(self.evaluate(self.averaged(), self.frozen, *placed))
            total, count = total + float(loss) * int(targets), count + int(targets)
        return total / count

    def restore_held_out(self):
        """Compute the held-out loss of the checkpoint again if the history has lost it."""
        known = gathered_texts(str(self.done in self.journal.history.held_out))[0] == "True"
        if self.done and not known:
            self.journal.write(self.done, held_out=self.held_out_loss())

    def save(self, step: int):
        """Write the held-out loss and then the checkpoint, so that no checkpoint lacks its losses. Raises NotFiniteLoss."""
        loss = self.held_out_loss()
        if not math.isfinite(loss):
            raise self.not_finite(f"the held-out loss behind step {step} is {loss}")
        if not is_finite(self.state):
            raise self.not_finite(f"the parameters or moments behind step {step} are not finite")
        self.journal.write(step, held_out=loss)
        self.checkpoints.save(step, self.layers.unstacked(self.state, self.alone[1:3]), self.data.position())
        self.done = step

    def not_finite(self, what: str) -> NotFiniteLoss:
        """Return the error that says that `what` is not finite, and names the last good checkpoint."""
        self.checkpoints.wait()
        newest = self.checkpoints.newest()
        good = "no checkpoint was written" if newest is None else f"the last good checkpoint is of step {newest}"
        return NotFiniteLoss(
            f"{what}: {good} in {self.out / CHECKPOINTS}: train into another out, with a learning_rate below "
            f"{self.config.learning_rate} or a clip below {self.config.clip}"
        )


def with_average(optimizer: optax.GradientTransformation, decay: float | None) -> optax.GradientTransformation:
    """Return the optimizer with an average of the parameters as the last part of its state: a' = decay a + (1 - decay) p',
    where p' are the parameters after the update. Return the optimizer unchanged if decay is None."""
    if decay is None:
        return optimizer

    def init(params):
        return optimizer.init(params), params

    def update(updates, state, params=None):
        assert params is not None
        change, inner = optimizer.update(updates, state[0], params)
        after = optax.apply_updates(params, change)
        return change, (inner, jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state[1], after))

    return optax.GradientTransformation(init, update)


def in_batches(
    tokens: np.ndarray, segments: np.ndarray | None, rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield (tokens, segments) of `rows` rows each, from all rows in order. The last batch is filled with rows of -1, which
    have no targets. segments is None in each batch if it is None."""
    for first in range(0, len(tokens), rows):
        missing = ((0, rows - len(tokens[first : first + rows])), (0, 0))

        def filled(x: np.ndarray, first=first, missing=missing) -> np.ndarray:
            return np.pad(x[first : first + rows], missing, constant_values=-1)

        yield filled(tokens), None if segments is None else filled(segments)

"""Read documents of many files as packed rows of tokens, in an order that no number of hosts or workers changes.

A part is one table of `TrainingConfig.documents`. Row j of every batch comes from a stream of its own, number j: the documents j,
j + batch, j + 2 batch, ... of each shuffled part are mixed by the weights of the parts, joined one after another, and cut into
rows. A host reads only the streams of its rows. A state of a few numbers, which comes with each row, says where its stream
continues, so any number of hosts and workers may go on from a checkpoint.
"""

import bisect
import collections
import dataclasses
import functools
import glob
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags
from grain import experimental

from glax.models.tokens import Tokenizer

BLOCK = 64  # lines of a JSON lines file for which one offset is stored
WINDOW = 4096  # documents that are shuffled among each other in an epoch
OPEN_GROUPS = 8  # row groups of parquet files that a process holds in memory
LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
NOT_READ = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".arrow")
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def files_of(pattern: str) -> list[str]:
    """Return the regular files, sorted by name, of a folder with its subfolders, of a glob, or the one file.

    Raises ValueError if there is none, or one of a kind that is not supported.
    """
    inside = os.path.join(pattern, "**", "*") if os.path.isdir(pattern) else pattern
    found = sorted(path for path in glob.glob(inside, recursive=True) if os.path.isfile(path))
    if not found:
        raise ValueError(f"documents must name files, got {pattern!r}, where there are none")
    for path in found:
        if path.lower().endswith(NOT_READ):
            raise ValueError(
                f"documents must be text, .jsonl or .parquet, got {path}, which is not supported: unpack or convert it"
            )
    return found


class Documents:
    """Index the documents of files: each line of a .jsonl or .ndjson file, each row of a .parquet file, each other file whole.

    documents[i] reads document i. The index is formed by reading the files once; no document stays in memory. A block is BLOCK
    lines, a row group, or a file. seed: draws the order of the blocks; None for the order of the files. field: the key or the
    column of the text.
    """

    def __init__(self, files: Sequence[str], field: str = "text", seed: int | None = None):
        self.files, self.field = list(files), field
        self.blocks: list[tuple[int, int, int]] = []  # (file, offset or row group, documents)
        for number, path in enumerate(self.files):
            self.blocks += [(number, *block) for block in blocks_of(path, field)]
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(self.blocks))
            self.blocks = [self.blocks[i] for i in order]
        self.ends = np.cumsum([count for _, _, count in self.blocks])
        self.groups: collections.OrderedDict[tuple[str, int], list] = collections.OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> str:
        block = bisect.bisect_right(self.ends, index)
        file, start, count = self.blocks[block]
        path, place = self.files[file], index - int(self.ends[block]) + count
        if path.lower().endswith(PARQUET):
            text = self.group(path, start)[place]
        elif path.lower().endswith(LINES):
            text = self.line(path, start, place)
        else:
            text = Path(path).read_bytes().decode("utf-8", "replace")
        if not isinstance(text, str):
            raise ValueError(f"{self.field} must be a text in every document, got {text!r:.80} in {path}")
        return text

    def line(self, path: str, offset: int, place: int) -> Any:
        """Return the text of the line that is `place` lines, from 0, behind the byte `offset` of a file; "" for an empty line,
        and None if the line has no field `field`. Raises ValueError if the line holds no JSON."""
        with open(path, "rb") as file:
            file.seek(offset)
            for _ in range(place):
                file.readline()
            raw = file.readline()
        if not raw.strip():
            return ""
        try:
            values = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path} must hold JSON in every line, got {raw!r:.80}: {error}") from None
        return values.get(self.field) if isinstance(values, dict) else None

    def group(self, path: str, number: int) -> list:
        """Return the texts of row group `number` of a parquet file. The last OPEN_GROUPS groups stay in memory."""
        from pyarrow import parquet

        key = path, number
        if key not in self.groups:
            self.groups[key] = parquet.ParquetFile(path).read_row_group(number, [self.field])[self.field].to_pylist()
        self.groups.move_to_end(key)
        found = self.groups[key]
        while len(self.groups) > OPEN_GROUPS:
            self.groups.popitem(last=False)
        return found


class Shuffled:
    """Repeat documents without an end. Each epoch has all documents, and shuffles them anew within each WINDOW documents."""

    def __init__(self, documents: Documents, seed: int):
        self.documents, self.seed = documents, seed

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> str:
        epoch, place = divmod(index, len(self.documents))
        start = place - place % WINDOW
        size = min(WINDOW, len(self.documents) - start)
        if size > 1:
            seed = np.random.SeedSequence((self.seed, epoch, start)).generate_state(1)[0]
            drawn = experimental.index_shuffle(place - start, max_index=size - 1, seed=int(seed), rounds=4)
            place = start + drawn
        return self.documents[place]


def blocks_of(path: str, field: str) -> list[tuple[int, int]]:
    """Return (the byte offset of its first line, or the number of its row group; the number of documents) of each block of a
    file; (0, 1) for a file that is one document. Raises ValueError for a parquet file without the column `field`."""
    if path.lower().endswith(PARQUET):
        try:
            from pyarrow import parquet
        except ImportError:
            raise ValueError(f"{path} needs the package pyarrow: pip install pyarrow") from None
        metadata = parquet.ParquetFile(path).metadata
        columns = metadata.schema.to_arrow_schema().names
        if field not in columns:
            raise ValueError(f"field must be a column of {path}, got {field!r}, where there are {columns!r:.80}")
        return [(group, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
    if not path.lower().endswith(LINES):
        return [(0, 1)]
    blocks, start, offset, count = [], 0, 0, 0
    with open(path, "rb") as file:
        for line in file:
            offset, count = offset + len(line), count + 1
            if count == BLOCK:
                blocks.append((start, count))
                start, count = offset, 0
    return [*blocks, (start, count)] if count else blocks


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Describe the streams of a run: which documents they mix, and how documents become rows of tokens.

    sources: (the files, the field of the text, the weight) of each part. batch: the number of streams. length: the tokens of a
    row, less one. seed: draws the order of documents. end: the token after each document, or None.
    """

    sources: tuple[tuple[tuple[str, ...], str, float], ...]
    tokenizer: Tokenizer
    batch: int
    length: int
    seed: int
    end: int | None = None

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options) -> "Mixture":
        """Return the mixture of `documents`, a list of tables {"files": pattern, "field": ..., "weight": ...}, one for each
        part. options: the other fields of the class. Raises the errors of `files_of`."""
        sources = tuple(
            (tuple(files_of(each["files"])), each.get("field", "text"), float(each.get("weight", 1.0)))
            for each in documents
        )
        return cls(sources, tokenizer, **options)

    @functools.cached_property
    def documents(self) -> list[Documents]:
        return [Documents(files, field, self.seed + i) for i, (files, field, _) in enumerate(self.sources)]

    @property
    def count(self) -> int:
        return sum(len(documents) for documents in self.documents)

    @property
    def sha256(self) -> str:
        """Return a digest of everything that decides the order of tokens: names, sizes, fields, weights and the end token."""
        files = [
            [[[Path(path).name, os.path.getsize(path)] for path in files], field, weight]
            for files, field, weight in self.sources
        ]
        return hashlib.sha256(json.dumps([files, self.end]).encode()).hexdigest()

    @functools.cached_property
    def endless(self) -> list[grain.MapDataset]:
        """Return the documents of each part, repeated without an end, each time in another order."""
        parts = []
        for i, documents in enumerate(self.documents):
            if not len(documents):
                raise ValueError(f"documents must hold at least one document, got none in {self.sources[i][0][0]}")
            parts.append(grain.MapDataset.source(Shuffled(documents, self.seed + i)))
        return parts

    def texts(self, number: int) -> grain.MapDataset:
        """Return the documents of stream `number`, mixed by the weights. Streams begin with different parts."""
        parts = [
            (each[number :: self.batch], source[2]) for each, source in zip(self.endless, self.sources, strict=True)
        ]
        first = number % len(parts)
        mixed, weights = zip(*parts[first:], *parts[:first], strict=True)
        return grain.MapDataset.mix(mixed, weights) if len(parts) > 1 else mixed[0]

    def stream(self, number: int) -> grain.IterDataset:
        """Return the packed rows of stream `number`, [length + 1] tokens with segment ids."""
        return self.packed(self.texts(number))

    def packed(self, texts: grain.MapDataset) -> grain.IterDataset:
        """Return dicts of `tokens` and `tokens_segment_ids`, both [length + 1]: a row of tokens, and the number of each token's
        document within the row, from 1 on.

        Documents follow one another. A document that does not fit in a row continues in the next.
        """
        tokens = texts.map(self.encode).to_iter_dataset(NO_THREADS).filter(has_tokens)
        return experimental.ConcatThenSplitIterDataset(tokens, length_struct=dict(tokens=self.length + 1))

    def encode(self, text: str) -> dict[str, np.ndarray]:
        tokens = self.tokenizer.encode(text)
        return dict(tokens=np.asarray(tokens if self.end is None else [*tokens, self.end], np.int32))


def has_tokens(element: Mapping[str, np.ndarray]) -> bool:
    return len(element["tokens"]) > 0


class StreamRows(grain.IterDataset):
    """Iterate over rows: each step gives the next row of each of `streams`, and the streams' states after these rows, as
    `StreamRowsIterator` returns them.

    streams: numbers of streams of the mixture. states: a state of each, as JSON, from which it continues; None for its
    beginning.
    """

    def __init__(self, mixture: Mixture, streams: Sequence[int], states: Sequence[str] | None = None):
        super().__init__()
        self.mixture, self.streams, self.states = mixture, list(streams), states

    def __iter__(self) -> "StreamRowsIterator":
        return StreamRowsIterator(self)


class StreamRowsIterator(grain.DatasetIterator):
    """Iterate over `StreamRows`: a step returns a dict of tokens and tokens_segment_ids, [streams, length + 1] each, and
    states, a text of JSON for each stream."""

    def __init__(self, rows: StreamRows):
        super().__init__()
        self.iterators = [iter(rows.mixture.stream(number)) for number in rows.streams]
        if rows.states is not None:
            self.set_state(rows.states)

    def __next__(self) -> dict[str, Any]:
        rows = [next(iterator) for iterator in self.iterators]
        names = ("tokens", "tokens_segment_ids")
        return {name: np.stack([row[name] for row in rows]) for name in names} | dict(states=self.get_state())

    def get_state(self) -> list[str]:
        return [json.dumps(iterator.get_state()) for iterator in self.iterators]

    def set_state(self, state: Sequence[str]):
        for iterator, each in zip(self.iterators, state, strict=True):
            found = json.loads(each)
            # The packing tells "no remainder" by equality with a tuple, and JSON has lists alone.
            found["remainder_slices"] = {name: tuple(ends) for name, ends in found["remainder_slices"].items()}
            iterator.set_state(found)


class Reader:
    """Read the rows of some streams ahead of the steps: in a thread, or in `workers` processes, each with some of the streams.

    states: {the number of a stream: its state after the rows that were read, as JSON}.
    """

    def __init__(self, mixture: Mixture, streams: Sequence[int], workers: int = 0):
        self.mixture, self.streams, self.workers = mixture, list(streams), workers
        self.states: dict[int, str] = {}
        self.iterators: list[tuple[list[int], Any]] | None = None

    def seek(self, states: Mapping[str, str]):
        """Continue each stream after the row that came with its state. states: {the number of a stream: its state}."""
        self.close()
        self.states = {int(number): states[str(number)] for number in self.streams}

    def close(self):
        """End the thread or the processes."""
        for _, iterator in self.iterators or ():
            iterator.close()
        self.iterators = None

    def start(self) -> list[tuple[list[int], Any]]:
        """Start the thread or the processes. Return a list of (the numbers of its streams, the iterator of their rows), one for
        each."""
        made = []
        for i in range(min(max(self.workers, 1), len(self.streams))):
            streams = self.streams[i :: max(self.workers, 1)]
            rows: Any = StreamRows(self.mixture, streams, [self.states[n] for n in streams] if self.states else None)
            if self.workers:
                if not flags.FLAGS.is_parsed():  # grain hands flags on to its processes
                    flags.FLAGS.mark_as_parsed()
                rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2))
            else:
                rows = experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=2)
            made.append((streams, iter(rows)))
        return made

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the segment ids of the next row of each stream, [streams, length + 1]."""
        if self.iterators is None:
            self.iterators = self.start()
        shape = len(self.streams), self.mixture.length + 1
        tokens, segments = np.empty(shape, np.int32), np.empty(shape, np.int32)
        for streams, iterator in self.iterators:
            found = next(iterator)
            places = [self.streams.index(number) for number in streams]
            tokens[places], segments[places] = found["tokens"], found["tokens_segment_ids"]
            self.states |= dict(zip(streams, found["states"], strict=True))
        return tokens, segments


def held_out_rows(mixture: Mixture, pattern: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` tokens, or all, of the files of `pattern` in their order, as packed rows: (tokens, segment ids).

    Both are [rows, length + 1], and the segment ids are -1 in padding. The text is read from the field of the mixture's first
    source. Raises ValueError if there is no document.
    """
    field = mixture.sources[0][1]
    packed = mixture.packed(grain.MapDataset.source(Documents(files_of(pattern), field)))
    rows = []
    for row in packed:
        rows.append((row["tokens"], np.where(row["tokens_segment_ids"] > 0, row["tokens_segment_ids"], -1)))
        if len(rows) * mixture.length >= count:
            break
    if not rows:
        raise ValueError(f"held_out must have at least one document, got none in {pattern}")
    return np.stack([row for row, _ in rows]), np.stack([segments for _, segments in rows])

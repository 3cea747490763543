"""Documents of many files: packed, shuffled, mixed and resumed; no token is lost or read twice on any number of hosts."""

import collections
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import glax
from glax.models.documents import BLOCK, Documents, Mixture, Reader, files_of, held_out_rows
from glax.models.tokens import Bytes
from glax.models.training import TrainingConfig, train

LENGTH, BATCH = 31, 4


def texts(files: int, each: int, start: int = 0) -> list[list[str]]:
    """Documents that hold their own number again and again, of very different lengths."""
    rng = np.random.default_rng(start)
    return [[f"<{start + f * each + i}>" * int(rng.integers(1, 30)) for i in range(each)] for f in range(files)]


def write(folder: pathlib.Path, kind: str, documents: list[list[str]]) -> str:
    folder.mkdir()
    for number, content in enumerate(documents):
        path = folder / f"{number:03}.{kind}"
        if kind.lower() in ("jsonl", "ndjson"):
            path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in content))
        elif kind.lower() == "parquet":
            parquet.write_table(pyarrow.table(dict(text=content)), path, row_group_size=5)
        else:
            path.write_text("".join(content))
    return str(folder)


def mixture(*folders: str, weights=None, seed: int = 0, batch: int = BATCH) -> Mixture:
    tables = [dict(files=folder, weight=1.0 if weights is None else weights[i]) for i, folder in enumerate(folders)]
    return Mixture.of(tables, Bytes(), batch=batch, length=LENGTH, seed=seed)


def rows_of(reader: Reader, steps: int) -> np.ndarray:
    """[steps, streams, 2, length + 1]"""
    with contextlib.closing(reader):
        return np.stack([np.stack(reader.read(), 1) for _ in range(steps)])


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "JSONL", "parquet", "PARQUET", "txt"])
def test_documents_are_those_of_the_files(tmp_path, kind):
    content = texts(3, 2 * BLOCK + 3)
    folder = write(tmp_path / "files", kind, content)
    documents = Documents(files_of(folder))
    wanted = ["".join(each) for each in content] if kind == "txt" else [text for each in content for text in each]
    assert [documents[i] for i in range(len(documents))] == wanted
    shuffled = Documents(files_of(folder), seed=3)
    order = [shuffled[i] for i in range(len(shuffled))]
    assert sorted(order) == sorted(wanted) and (order != wanted or kind == "txt")


def test_an_epoch_has_every_document_once_cut_into_rows_with_segments(tmp_path):
    content = texts(4, 50)
    read = mixture(write(tmp_path / "files", "jsonl", content))
    streams = []
    for number in range(BATCH):  # each stream has 50 documents in an epoch
        wanted = sum(len(text) for text in (read.texts(number)[i] for i in range(50)))
        tokens, seen = b"", []
        for row in read.stream(number):
            segments = row["tokens_segment_ids"]
            assert (segments >= 1).all() and (np.diff(segments) >= 0).all()
            tokens += bytes(row["tokens"].astype(np.uint8))
            seen.append(segments)
            if len(tokens) >= wanted:
                break
        streams.append(tokens[:wanted].decode())
        starts = np.concatenate([np.diff(x, prepend=x[0]) != 0 for x in seen])[:wanted]
        text = streams[-1]
        for place in np.flatnonzero(starts):  # a segment begins where a document begins
            assert (
                text[place] == "<"
                and text[text.rfind("<", 0, place) : place] != text[place : text.find(">", place) + 1]
            )
    counted = collections.Counter("".join(streams).replace(">", ">\n").split())
    assert counted == collections.Counter("".join(t for each in content for t in each).replace(">", ">\n").split())


def test_the_number_of_hosts_changes_no_row_and_a_resume_loses_none(tmp_path):
    read = mixture(write(tmp_path / "a", "jsonl", texts(3, 40)), write(tmp_path / "b", "parquet", texts(2, 30, 1000)))
    whole = rows_of(Reader(read, range(BATCH)), 30)
    hosts = [Reader(read, rows) for rows in ([0, 3], [1], [2])]
    first = [rows_of(host, 11) for host in hosts]
    np.testing.assert_array_equal(np.concatenate(first, 1)[:, [0, 2, 3, 1]], whole[:11])
    states = {str(number): state for host in hosts for number, state in host.states.items()}
    states = json.loads(json.dumps(states))  # as a checkpoint stores them
    for groups in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        resumed = [Reader(read, rows) for rows in groups]
        for reader in resumed:
            reader.seek(states)
        np.testing.assert_array_equal(np.concatenate([rows_of(reader, 19) for reader in resumed], 1), whole[11:])


@pytest.mark.parametrize("rows", [1, 2, 1.5], ids=lambda rows: f"{rows}rows")
def test_a_resume_at_every_cut_repeats_and_skips_no_document(tmp_path, rows):
    """Documents end with rows, or in every second one."""
    size = int(rows * (LENGTH + 1))
    content = [[f"{i:03}".ljust(size, ".") for i in range(40)]]
    read = mixture(write(tmp_path / "a", "jsonl", content))
    whole, reader = rows_of(Reader(read, range(BATCH)), 12), Reader(read, range(BATCH))
    with contextlib.closing(reader):
        for cut in range(1, 12):
            reader.read()
            resumed = Reader(read, range(BATCH))
            resumed.seek({str(number): state for number, state in reader.states.items()})
            np.testing.assert_array_equal(rows_of(resumed, 12 - cut), whole[cut:])


def test_processes_read_what_a_thread_reads(tmp_path):
    read = mixture(write(tmp_path / "a", "jsonl", texts(3, 40)))
    whole, first, then = (
        rows_of(Reader(read, range(BATCH)), 8),
        Reader(read, range(BATCH)),
        Reader(read, range(BATCH), 2),
    )
    np.testing.assert_array_equal(rows_of(first, 3), whole[:3])
    then.seek({str(number): state for number, state in first.states.items()})
    np.testing.assert_array_equal(rows_of(then, 5), whole[3:])


def test_the_seed_and_the_epoch_change_the_order(tmp_path):
    folder = write(tmp_path / "files", "jsonl", texts(2, 100))
    first, other = mixture(folder), mixture(folder, seed=1)
    epochs = [[read.endless[0][i] for i in range(e * 200, e * 200 + 200)] for read in (first, other) for e in (0, 1)]
    assert len({tuple(epoch) for epoch in epochs}) == 4 and len({tuple(sorted(epoch)) for epoch in epochs}) == 1


@pytest.mark.parametrize("batch", [4, 7, 8])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
def test_every_stream_of_a_mixture_has_its_weights(tmp_path, batch, weights):
    parts = [write(tmp_path / name, "jsonl", texts(1, 30, start)) for name, start in (("a", 0), ("b", 1000))]
    read = mixture(*parts, weights=weights, batch=batch)
    for number in range(batch):
        of_stream = [int(read.texts(number)[i][1:].split(">")[0]) for i in range(80)]
        assert sum(document >= 1000 for document in of_stream) == 80 * weights[1] // sum(weights)
    if weights == (1, 1):  # neither part alone fills the first rows
        assert {int(read.texts(number)[0][1:].split(">")[0]) >= 1000 for number in range(batch)} == {False, True}


def test_held_out_rows_are_the_first_tokens(tmp_path):
    content = texts(1, 20)
    folder = write(tmp_path / "held", "jsonl", content)
    tokens, segments = held_out_rows(mixture(folder), folder, 2 * LENGTH)
    assert bytes(tokens.reshape(-1).astype(np.uint8)).decode() == "".join(content[0])[: 2 * (LENGTH + 1)]
    tokens, segments = held_out_rows(mixture(folder), folder, 10**6)
    assert (segments > 0).sum() == len("".join(content[0]))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl must hold JSON in every line"),
        ("a.jsonl", b'{"other": "x"}\n{"text": 1}\n', "text must be a text in every document, got"),
        ("A.JSONL", b'{"text": 1}\n', "text must be a text in every document, got"),
        ("a.ndjson", b'{"other": "x"}\n', "text must be a text in every document, got"),
        ("a.jsonl.GZ", b"", "documents must be text, .jsonl or .parquet, got"),
        ("a.jsonl.gz", b"", "documents must be text, .jsonl or .parquet, got"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        documents = Documents(files_of(str(tmp_path)))
        [documents[i] for i in range(len(documents))]
    with pytest.raises(ValueError, match="where there are none"):
        files_of(str(tmp_path / "*.txt"))


def test_a_table_without_the_column_is_named_before_it_is_read(tmp_path):
    parquet.write_table(pyarrow.table(dict(body=["x"], id=[1])), tmp_path / "a.PARQUET")
    files = files_of(str(tmp_path))
    with pytest.raises(ValueError, match=r"a\.PARQUET, got 'text', where there are \['body', 'id'\]"):
        Documents(files)
    assert Documents(files, "body")[0] == "x"


def test_the_memory_of_a_reader_does_not_grow(tmp_path):
    """10 million tokens in 200 files: the process that has read them all has the size of the one that has read a tenth."""
    line = json.dumps(dict(text="abcdefgh " * 55)) + "\n"
    (tmp_path / "files").mkdir()
    for number in range(200):
        (tmp_path / "files" / f"{number:03}.jsonl").write_text(line * 100)
    code = """
        import resource, sys
        from glax.models.documents import Mixture, Reader
        from glax.models.tokens import Bytes
        reader = Reader(Mixture.of([dict(files=sys.argv[1])], Bytes(), batch=8, length=2047, seed=0), range(8))
        sizes, tokens = [], 0
        while tokens < 10_000_000:
            tokens += reader.read()[0].size
            if tokens > 1_000_000:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(sizes[0], sizes[-1])
        reader.close()
    """
    program = "\n".join(line[8:] for line in code.splitlines())
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(pathlib.Path(glax.__file__).parents[1]), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "files")], env=env, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    early, late = map(int, done.stdout.split())
    assert late < early + 8 * 1024  # KiB


GLA = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)


def test_a_run_over_documents_resumes_exactly_and_on_another_mesh(tmp_path):
    sizes = dict(steps=6, batch=BATCH, length=LENGTH, learning_rate=0.02, checkpoint_every=3, held_out_tokens=200)
    tables = [
        dict(files=write(tmp_path / "train", "jsonl", texts(2, 60))),
        dict(files=write(tmp_path / "more", "txt", texts(3, 3))),
    ]
    held = write(tmp_path / "held", "jsonl", texts(1, 10, 500))
    config = dict(model=GLA, documents=tables, held_out=held, end_token=0) | sizes
    _, whole = train(TrainingConfig(**config, out=str(tmp_path / "whole")))
    train(TrainingConfig(**config, out=str(tmp_path / "out")), lambda step, loss, seconds: step == 3)
    _, parts = train(TrainingConfig(**config | dict(data=2, fsdp=2), out=str(tmp_path / "out")))
    np.testing.assert_allclose(list(parts.losses.values()), list(whole.losses.values()), rtol=0, atol=1e-5)
    _, again = train(TrainingConfig(**config | dict(steps=7), out=str(tmp_path / "whole")))
    assert list(again.losses) == list(range(1, 8))
    with pytest.raises(ValueError, match="end_token must be below vocab_size=256, got 256"):
        train(TrainingConfig(**config | dict(end_token=256), out=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="is of another text"):
        train(TrainingConfig(**config | dict(end_token=1), out=str(tmp_path / "whole")))

"""Documents of 200 files on 1, 2 and 4 hosts, each a process: one order, and no token twice or never."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import glax
from tests.training_runs import free_port

pytest.importorskip("grain")
FILES, LINES, BATCH, LENGTH, END = 200, 20, 8, 255, 0
STEPS = 145


def text(number: int) -> str:
    """Return document `number`, of 6 to 126 bytes. Its first word is in no other."""
    return f"{number:05d} " + "abcdefgh" * (number % 16)


@pytest.fixture
def read(tmp_path):
    """read(hosts, first, last, position="") -> (tokens, segment ids, the file of the position)."""
    (tmp_path / "files").mkdir()
    for file in range(FILES):
        lines = [json.dumps(dict(text=text(LINES * file + line))) for line in range(LINES)]
        (tmp_path / "files" / f"{file:03d}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "held.txt").write_text("held out")
    values = dict(model=dict(vocab_size=256), documents=[dict(files="files")], held_out="held.txt", end_token=END)
    (tmp_path / "config.json").write_text(json.dumps(values | dict(batch=BATCH, length=LENGTH, seed=3)))

    def run(hosts: int, first: int, last: int, position: str = ""):
        out = str(tmp_path / f"{hosts}-{first}-{last}-{pathlib.Path(position).stem}")
        env = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(pathlib.Path(glax.__file__).parents[1]))
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        if hosts > 1:
            env |= dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}", JAX_NUM_PROCESSES=str(hosts))
        command = [sys.executable, "-m", "tests.parallel.read_documents", str(tmp_path / "config.json")]
        command += [str(first), str(last), position, out]
        made = [
            subprocess.Popen(command, env=env | dict(JAX_PROCESS_ID=str(i)), stderr=subprocess.PIPE, text=True)
            for i in range(hosts)
        ]
        try:
            errors = [process.communicate(timeout=300)[1] for process in made]
        finally:
            for process in made:
                process.kill()
        assert [process.returncode for process in made] == [0] * hosts, errors
        parts = [np.load(f"{out}-{i}.npz") for i in range(hosts)]
        rows = np.concatenate([part["rows"] for part in parts])
        assert sorted(rows) == list(range(BATCH))  # no host reads a row of another
        order = np.argsort(rows)
        tokens, segments = (
            np.concatenate([part[name] for part in parts], 1)[:, order] for name in ("tokens", "segments")
        )
        return tokens, segments, f"{out}.json"

    return run


def test_hosts_read_one_order_and_a_resumed_run_repeats_and_skips_no_token(read):
    """145 steps read 296,960 tokens, beyond one epoch of 4000 documents."""
    tokens, segments, _ = read(1, 1, STEPS)
    for hosts in (2, 4):
        got = read(hosts, 1, STEPS)
        np.testing.assert_array_equal(got[0], tokens, err_msg=f"{hosts} hosts")
        np.testing.assert_array_equal(got[1], segments, err_msg=f"{hosts} hosts")
    position, parts = "", []
    for hosts, first, last in ((4, 1, 37), (1, 38, 61), (2, 62, STEPS)):
        *part, position = read(hosts, first, last, position)
        parts.append(part)
    for each, whole in zip(map(np.concatenate, zip(*parts, strict=True)), (tokens, segments), strict=True):
        np.testing.assert_array_equal(each, whole)
    counted = collections.Counter()
    for stream in range(BATCH):
        words = bytes(tokens[:, stream].reshape(-1).astype(np.uint8)).split(bytes([END]))
        whole = words[: FILES * LINES // BATCH]  # its share of the first epoch
        assert len(whole) == FILES * LINES // BATCH and len(words) > len(whole)
        counted.update(word.decode() for word in whole)
    assert counted == collections.Counter(text(number) for number in range(FILES * LINES))

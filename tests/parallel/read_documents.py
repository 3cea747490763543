"""Read steps FIRST to LAST of documents as one host of a run, and write its rows and where the data stand behind them.

    python -m tests.parallel.read_documents CONFIG FIRST LAST POSITION OUT

POSITION is a file from an earlier read, "" for the beginning. The variables of `glax.cli.processes` name the hosts.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from glax.cli.processes import start_processes
from glax.models.meshes import AXES, training_mesh
from glax.models.tokens import find_tokenizer
from glax.models.training import PackedDocuments, TrainingConfig


def main():
    path, first, last, position, out = sys.argv[1:]
    start_processes()
    config = TrainingConfig.read(Path(path), data=jax.device_count())
    data = PackedDocuments(config, find_tokenizer(None, 256), training_mesh({x: getattr(config, x) for x in AXES}))
    if position:
        data.seek(json.loads(Path(position).read_text()))
    steps = [data.read(step) for step in range(int(first), int(last) + 1)]
    tokens, segments = (np.stack(each) for each in zip(*steps, strict=True))
    number = jax.process_index()
    np.savez(f"{out}-{number}.npz", rows=list(data.rows), tokens=tokens, segments=segments)
    where = data.position()
    if number == 0:
        Path(f"{out}.json").write_text(json.dumps(where))
    data.close()


if __name__ == "__main__":
    main()

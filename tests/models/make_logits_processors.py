"""Write logits_processors.json: what transformers' own logits processors return. Needs torch and transformers.

python tests/models/make_logits_processors.py
"""

import json
import math
import pathlib

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

OPTIONS = dict(
    penalty=dict(repetition_penalty=1.3),
    reward=dict(repetition_penalty=0.7),
    temperature=dict(temperature=0.6),
    top_k=dict(top_k=5),
    top_p=dict(top_p=0.8),
    narrow=dict(top_p=0.05),
    all=dict(repetition_penalty=1.9, temperature=1.7, top_k=12, top_p=0.9),
)
# The order of generate: penalties first, then what draws.
PROCESSORS = dict(
    repetition_penalty=RepetitionPenaltyLogitsProcessor,
    temperature=TemperatureLogitsWarper,
    top_k=TopKLogitsWarper,
    top_p=TopPLogitsWarper,
)


def main():
    rng, cases = np.random.default_rng(0), []
    for name, options in OPTIONS.items():
        logits = torch.tensor(rng.normal(0, 3, (3, 40)).astype(np.float32))
        tokens = torch.tensor(rng.integers(0, 40, (3, 9)))
        processors = LogitsProcessorList([make(options[key]) for key, make in PROCESSORS.items() if key in options])
        scores = processors(tokens, logits.clone()).tolist()
        rows = [[None if math.isinf(x) else x for x in row] for row in scores]
        cases.append(dict(name=name, options=options, logits=logits.tolist(), tokens=tokens.tolist(), scores=rows))
    pathlib.Path(__file__).with_name("logits_processors.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()

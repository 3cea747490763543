"""Write the table of docs/models.md that lists glax's parameters beside those of checkpoints.

python docs/parameter_names.py --write
"""

import pathlib
import sys

from flax import nnx

import glax.models
from glax.models.checkpoints import parameters

PAGE = pathlib.Path(__file__).parent / "models.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- end of parameters -->"
SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1)
FLA = SIZES | dict(num_heads=2, intermediate_size=24)
MODELS = {
    "gla": FLA | dict(use_short_conv=True),
    "retnet": FLA,
    "hgrn2": FLA | dict(expand_ratio=8),
    "rwkv6": FLA,
    "mamba2": SIZES | dict(state_size=8, head_dim=8, num_heads=4, n_groups=1),
}


def table() -> str:
    """One row for each parameter of a model of one layer: its path here, its shape, and its name in the checkpoint."""
    rows = ["| model | here | shape | in the checkpoint |", "|---|---|---|---|"]
    for kind, config in MODELS.items():
        model = nnx.eval_shape(lambda config=config, kind=kind: built(kind, config))
        rows += [
            f"| {kind} | `{path}` | {list(param.shape)} | `{model.names(path)}` |" for path, param in parameters(model)
        ]
    return "\n".join(rows) + "\n"


def built(kind: str, config: dict):
    return glax.models.from_config(config | dict(model_type=kind), rngs=nnx.Rngs(0))


def between(text: str) -> str:
    return BEGIN + text + END


if __name__ == "__main__":
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    page = before + between(table()) + rest.split(END)[1]
    if "--write" in sys.argv:
        PAGE.write_text(page)
    else:
        print(table())

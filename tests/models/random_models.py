"""Make models random, and run them in float64: what the scripts that make fixtures share, for any version of transformers."""

import contextlib

import torch

TOKENS = (2, 21)
# The ends of the names of buffers that a checkpoint holds, though the config determines them.
DERIVED = (
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
    "layer_multipliers",
    "ngram_heads_vocab_sizes",
    "ngram_heads_offsets",
)


def randomise(model: torch.nn.Module):
    """Every parameter becomes random, those too that begin as zeros or ones, and the corrections of routers, at a size that keeps
    the model lively."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim > 1 and "mu" not in name:
                parameter.normal_(0, 0.3 if "conv1d" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(0, 2)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # the corrections of routers, which no gradient changes
            buffer.normal_(0, 0.3)


@contextlib.contextmanager
def in_float64():
    """Make what a model's own code casts to float32 float64: in float32, sums that cancel differ by more than the bars."""
    to, single, cast = torch.Tensor.to, torch.Tensor.float, torch.Tensor.type

    def wider(function):
        def call(x, *args, **options):
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            options = {key: torch.float64 if arg is torch.float32 else arg for key, arg in options.items()}
            return function(x, *args, **options)

        return call

    torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = wider(to), torch.Tensor.double, wider(cast)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = to, single, cast
        torch.set_default_dtype(torch.float32)

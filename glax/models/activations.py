"""Map the names that configs of transformers and flash-linear-attention use to names in `glax.nn.parts.ACTIVATIONS`."""

FLA = {
    name: name for name in ("relu", "sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu")
}  # gelu here is the approximation by tanh
TRANSFORMERS = {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_python": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "hardswish": "hardswish",
    "leaky_relu": "leaky_relu",
    "linear": "identity",
    "mish": "mish",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "sqrelu",
    "relu6": "relu6",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

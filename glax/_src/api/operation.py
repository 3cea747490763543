"""Define `recurrent_attention` as an operation that a user's own executor can run."""

import inspect

import jax
import jax.numpy as jnp

from glax._src.api.recurrent import recurrent_attention
from glax._src.core.bind import ScanOptions, bind, check_before_tracing
from glax._src.core.recurrence import Recurrence, describe
from glax._src.core.registry import Config, KernelSpec, Platform, kernel_registry
from glax._src.kernels import load_kernels
from glax._src.tuning.op import Kernel, example_of

# `run` refuses what is not among these: `one_token` is of steps alone.
BOUND = tuple(name for name in inspect.signature(bind).parameters if name != "one_token")
GATES = ("g", "g_gamma", "gk", "gv")
ARRAYS = ("query", "key", "value", *GATES, "initial_state", "cu_seqlens", "segment_ids", "softmax_scale")


class RecurrentAttention(Kernel):
    """Run `glax.recurrent_attention` by an executor, with the same arguments: executor(RecurrentAttention(), query, key, ...).

    The arguments, results and errors are those of `glax.recurrent_attention`. A config is the config of a registered kernel, such
    as glax.configs.ChunkedConfig(chunk=64), and selects that kernel. Its methods are those of `Kernel`.

    >>> q = jnp.ones((1, 8, 2, 4))
    >>> glax.Executor()(glax.RecurrentAttention(), q, q, q).shape
    (1, 8, 2, 4)
    """

    op_id = "recurrent_attention"
    positions: tuple[str, ...] = (
        "query",
        "key",
        "value",
        *GATES,
        "initial_state",
        "cu_seqlens",
    )  # the names of positional arguments

    def run(self, *args, cfg: Config, **kwargs):
        """Return glax.recurrent_attention(*args, cfg=cfg, **kwargs)."""
        return recurrent_attention(*args, cfg=cfg, **kwargs)

    def key(self, inv) -> str:
        return describe(self.able(inv)[1])

    def heuristic_cfg(self, inv) -> Config:
        specs, r = self.able(inv)
        return specs[0].config.heuristic(r)

    def candidate_cfgs(self, inv) -> list[Config]:
        specs, r = self.able(inv)
        return list(dict.fromkeys(config for spec in specs for config in spec.config.candidates(r)))

    def able(self, inv) -> tuple[list[KernelSpec], Recurrence]:
        """Return (the registered kernels that can run a call, the best first; the `Recurrence` of the call, which has a
        jax.ShapeDtypeStruct in place of each array).

        inv: the `Invocation`, which is the call with shapes in place of arrays. With states_every=n, where no kernel stores the
        states after every n tokens, these are the kernels that solve n tokens at a time. Raises UnsupportedError if no kernel
        can run the call.
        """
        load_kernels()
        arguments = self.named(inv.args, inv.kwargs)
        every = arguments.get("states_every")
        options = ScanOptions(
            arguments.get("reverse", False), arguments.get("pad_id"), every, arguments.get("states_dtype")
        )
        check_before_tracing({name: arguments.get(name) for name in ARRAYS}, arguments.get("platform"), None, options)
        platform = Platform.parse(arguments.get("platform"))
        bound = {name: x for name, x in arguments.items() if name in BOUND}
        r = jax.eval_shape(lambda: bind(**self.as_bound(example_of(bound))).folded)
        stored = r.replace(states_every=options.static.states_every)
        if able := kernel_registry.able(stored, platform)[0]:
            return able, stored
        kernel_registry.find(r, platform)  # raises with every reason if none can
        return kernel_registry.able(r, platform)[0], stored

    def as_bound(self, arguments: dict) -> dict:
        """Return the arguments of a call of this operation in the shapes that `glax.recurrent` takes.

        arguments: {name: value}, without those that choose the kernel or the form of the result, such as platform. Here they have
        these shapes already, and are returned. A subclass whose arguments have others overrides it.
        """
        return arguments

    def named(self, args: tuple, kwargs: dict) -> dict:
        """Return the arguments of a call by their names."""
        return dict(zip(self.positions, args, strict=False)) | kwargs

    def example(self, inv):
        """Return (args, kwargs) to measure a call on, with log-sigmoid gates and packed sequences of equal length."""
        args, kwargs = super().example(inv)
        arrays = self.named(args, kwargs)
        realistic = {name: jax.nn.log_sigmoid(x) for name, x in arrays.items() if name in GATES and x is not None}
        if (cuts := arrays.get("cu_seqlens")) is not None:
            T = arrays["query"].shape[-3]
            realistic["cu_seqlens"] = (jnp.arange(cuts.shape[0]) * T // max(cuts.shape[0] - 1, 1)).astype(cuts.dtype)
        args = tuple(realistic.get(name, x) for name, x in zip(self.positions, args, strict=False))
        return args, {name: realistic.get(name, x) for name, x in kwargs.items()}

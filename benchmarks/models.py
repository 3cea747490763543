"""Train or decode with a whole model on one NVIDIA GPU: tokens per second, peak memory and device time, by glax or a peer.

python benchmarks/models.py                     # GLA-340M: glax's layer in plain NNX, bfloat16, AdamW by optax
python benchmarks/models.py --model gated_deltanet                 # Gated DeltaNet-340M, by glax, models, fla or jla
python benchmarks/models.py --model mamba2 --by models             # Mamba2-370M, by models, fla or transformers
python benchmarks/models.py --by models         # the model of glax.models with its own loss
python benchmarks/models.py --by fla            # fla's model under autocast, PyTorch's fused AdamW
python benchmarks/models.py --model gated_deltanet --by jla        # the model of jax-linear-attention with its own loss
python benchmarks/models.py --model mamba2 --by transformers       # transformers' model with mamba-ssm's Triton kernels
python benchmarks/models.py --decode --by models                   # glax.models.generate, 64 sequences behind 2048 tokens
python benchmarks/models.py --decode --by fla   # fla's model with its cache, one call a token
python benchmarks/models.py --by fla --part 0/16    # compiles a sixteenth of the candidates of its kernels, and times nothing
python benchmarks/models.py --profile           # the kernels that take longest, and the time of glax's own

GLA and Gated DeltaNet have width 1024, heads of K = 128 and V = 256, SwiGLU of 2816 and a vocabulary of 32000; GLA has 24 layers
of 4 heads, and Gated DeltaNet 21 layers of 6 heads, the proportions of fla's own config. Mamba2-370M has the published sizes: 48
layers of width 1024, 32 heads of 64 with 128 states, and a tied vocabulary of 50288. Training takes batches of 8 x 2048 tokens.
The time of a decoded token is the difference of two calls that go on by different numbers of tokens, without the prompt.
The last line is a result in the form of results/README.md.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import os
import re
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import triton_tuning

WIDTH, KEY_WIDTH, VALUE_WIDTH, VOCABULARY, HIDDEN = 1024, 128, 256, 32000, 2816
STEPS = 10
PEAK_FLOPS = 989e12  # of an H100 SXM, bfloat16
FEW, MANY, REPEATS = 8, 72, 3  # tokens decoded behind the prompt
BY = ("glax", "models", "fla", "jla", "transformers")


@dataclasses.dataclass(frozen=True)
class Choice:
    """layers, heads: of the model. config: its further options in fla's config. by: what trains it.

    layer: the name in glax.nn, of models that --by glax trains.
    """

    name: str
    layers: int
    heads: int
    config: dict
    by: tuple[str, ...]
    layer: str = ""
    vocabulary: int = VOCABULARY


WITH_MLP = dict(intermediate_size=HIDDEN, tie_word_embeddings=False)
MODELS = {
    "gla": Choice("GLA-340M", 24, 4, WITH_MLP | dict(expand_k=0.5, expand_v=1.0), BY[:3], layer="GatedLinearAttention"),
    "gated_deltanet": Choice(
        "Gated DeltaNet-340M",
        21,
        6,
        WITH_MLP | dict(head_dim=KEY_WIDTH, expand_v=2.0),
        BY[:4],
        layer="GatedDeltaNet",
    ),
    "mamba2": Choice(
        "Mamba2-370M",
        48,
        32,
        dict(head_dim=64, state_size=128, expand=2, n_groups=1, norm_eps=1e-5, tie_word_embeddings=True),
        ("models", "fla", "transformers"),
        vocabulary=50288,
    ),
}


def config_of(args) -> dict:
    """The options of fla's config."""
    choice = MODELS[args.model]
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=args.layers, num_heads=choice.heads)
    return dict(model_type=args.model, vocab_size=choice.vocabulary, **sizes, **choice.config)


# ---- models and losses of JAX ----


def language_model(args):
    """Return the model as a user writes it: glax's layer, and everything else by NNX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import glax.nn

    choice = MODELS[args.model]
    sizes = dict(num_heads=choice.heads, key_width=KEY_WIDTH, value_width=VALUE_WIDTH)

    class Block(nnx.Module):
        def __init__(self, rngs):
            def linear(width, out):
                return nnx.Linear(width, out, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

            self.before_mixing, self.before_mlp = (nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
            self.mixing = getattr(glax.nn, choice.layer)(WIDTH, **sizes, dtype=jnp.bfloat16, rngs=rngs)
            self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

        def __call__(self, x):
            x = x + self.mixing(self.before_mixing(x))[0]
            y = self.before_mlp(x)
            return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(args.layers)])
            self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
            self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model(nnx.Rngs(0))


def published_model(args, **dtypes):
    """The same model as `glax.models` builds it from a config of fla."""
    import jax.numpy as jnp
    from flax import nnx

    import glax.models

    return glax.models.from_config(config_of(args), dtype=jnp.bfloat16, **dtypes, rngs=nnx.Rngs(0))


def glax_loss(args) -> tuple:
    """Return the parameters and loss(params, tokens) of a model of glax."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    build = functools.partial(published_model if args.by == "models" else language_model, args)
    graph, params = nnx.split(nnx.eval_shape(build) if args.compile else build())

    def loss(params, tokens):
        if args.by == "models":
            return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])
        logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return params, loss


def jla_config(sizes: dict, scan: bool):
    """Return jla's config with the sizes of a config of fla. scan: whether its layers run in one loop.

    The other settings are those of jla's own benchmark of Gated DeltaNet at 16,384 tokens per step on one GPU: nothing
    recomputed, layers unrolled unless `scan`, and norms, SwiGLU and gates that store their inputs alone.
    """
    from jla.models import AttentionConfig, LinearAttentionConfig, ModelConfig

    heads, width, layers = sizes["num_heads"], sizes["head_dim"], sizes["num_hidden_layers"]
    value_width = int(width * sizes["expand_v"])
    return ModelConfig(
        vocab_size=sizes["vocab_size"],
        d_model=sizes["hidden_size"],
        n_layers=layers,
        d_ff=sizes["intermediate_size"],
        tie_embeddings=sizes["tie_word_embeddings"],
        layer_types=(sizes["model_type"],) * layers,
        linear_attention=LinearAttentionConfig(heads, heads, head_k_dim=width, head_v_dim=value_width),
        attention=AttentionConfig(heads, heads, width),  # of no layer here, but a required field
        remat="none",
        lean_vjp=True,
        scan_layers=scan,
    )


def jla_loss(args) -> tuple:
    """Return the parameters and the loss of jla's model, with the kernels that it chooses.

    Its benchmarks set these XLA flags, and this loss, which forms the gradient of the head in the forward pass.
    """
    import equinox
    import jax
    from jla.config import RuntimeConfig
    from jla.launch_env import launch
    from jla.models import build_model
    from jla.training.step import LossConfig, lm_loss

    launch(RuntimeConfig(xla_tuning_level=1))
    config = jla_config(config_of(args), args.scan)
    sum_of_losses = lm_loss(LossConfig(impl="auto", grad_in_forward=True))

    def build():
        return equinox.partition(build_model(config, key=jax.random.key(0)), equinox.is_inexact_array)

    params, rest = equinox.filter_eval_shape(build) if args.compile else build()

    def loss(params, tokens):
        batch = dict(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        value, measured = sum_of_losses(equinox.combine(params, rest), batch, None)  # no dropout, so no key
        return value / measured["tokens"]

    return params, loss


# ---- training ----


def timed_training(steps: Callable, compilation: float = 0.0, warm: Callable = lambda: None) -> dict:
    """Return the seconds of the first step and of each of STEPS later ones. steps: count -> (loss, seconds). warm: runs before
    these."""
    _, first = steps(1)
    steps(3)
    warm()
    value, seconds = steps(STEPS)
    return dict(first_s=compilation + first, loss=value, seconds=seconds / STEPS)


def train_in_jax(args) -> dict | None:
    """Time training steps by AdamW of (params, loss): a tree of arrays, and (params, tokens [batch, tokens + 1]) -> mean
    cross-entropy. With --compile, which has the parameters' shapes, compile one step and return None."""
    import jax
    import optax

    params, loss = (jla_loss if args.by == "jla" else glax_loss)(args)
    optimizer = optax.adamw(3e-4)
    state = jax.eval_shape(optimizer.init, params) if args.compile else jax.jit(optimizer.init)(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    vocabulary = MODELS[args.model].vocabulary
    tokens = jax.random.randint(jax.random.key(1), (args.batch, args.tokens + 1), 0, vocabulary)
    began = time.perf_counter()
    compiled = step.lower(params, state, tokens).compile()
    compilation = time.perf_counter() - began
    if args.compile:
        return None

    def steps(count):
        nonlocal params, state
        began = time.perf_counter()
        for _ in range(count):
            params, state, value = compiled(params, state, tokens)
        return float(value), time.perf_counter() - began

    row = timed_training(steps, compilation)
    if args.profile:
        print_profile(lambda: steps(1), compiled.as_text() or "")
    return row | dict(gib=peak_gib(), parameters=sum(x.size for x in jax.tree.leaves(params)))


def peak_gib() -> float | None:
    import jax

    found = jax.local_devices()[0].memory_stats()  # None on a CPU
    return found and found["peak_bytes_in_use"] / 2**30


def print_profile(run, program: str, most: int = 24):
    """Print the kernels that take longest, in ms of device time, and the operations of the model that take longest.

    program: the text of the compiled program, which names the operation behind each instruction.
    """
    from meters import device_events

    source = {}
    for name, operation in re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = .*op_name=\"([^\"]*)\"", program, re.MULTILINE):
        operation = re.sub(r"\b(jit|jvp|transpose|checkpoint|remat)\(([^()]*)\)", r"\1 \2", operation)
        source[name] = source[name.replace(".", "_")] = operation[-70:]
    kernels, operations, count = collections.Counter(), collections.Counter(), collections.Counter()
    for event in device_events(run):
        name = event.name[:60]
        operation = source.get(event.instruction) or source.get(event.name) or "?"
        kernels[name] += event.milliseconds
        operations[operation] += event.milliseconds
        count.update((name, operation))
    print(f"on the device: {kernels.total():.1f} ms")
    for table in (kernels, operations):
        for name, ms in table.most_common(most):
            print(f"  {ms:8.2f} ms  {count[name]:5} x  {name}")


def torch_model(args, **more):
    """fla's or transformers' model, on the GPU, with further options of its config."""
    options = {name: x for name, x in config_of(args).items() if name != "model_type"} | more
    if args.by == "transformers":
        from peers_mamba import stand_in_for_causal_conv1d

        print(f"causal convolutions by {stand_in_for_causal_conv1d()}", flush=True)
        from transformers import Mamba2Config, Mamba2ForCausalLM

        return Mamba2ForCausalLM(Mamba2Config(layer_norm_epsilon=options.pop("norm_eps"), **options)).cuda()
    from fla import models

    name = dict(gla="GLA", gated_deltanet="GatedDeltaNet", mamba2="Mamba2")[args.model]
    return vars(models)[f"{name}ForCausalLM"](vars(models)[f"{name}Config"](**options)).cuda()


def train_in_torch(args) -> dict | None:
    import torch

    if args.by == "transformers":
        model = torch_model(args).train()
    else:
        model = torch_model(args, use_cache=False, fuse_cross_entropy=True)
        if args.model == "mamba2" and not importlib.util.find_spec("causal_conv1d"):
            model.eval()  # no dropout, and gradients all the same: in training its layer needs the package causal-conv1d
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, MODELS[args.model].vocabulary, (args.batch, args.tokens), device="cuda")

    def steps(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                value = model(input_ids=tokens, labels=tokens).loss
            value.backward()
            if not args.part:  # its gradients are undefined, and its memory is shared with the other parts
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return value.item(), time.perf_counter() - began

    if args.part:
        steps(1)
        return None
    row = timed_training(steps, warm=torch.cuda.reset_peak_memory_stats)
    return row | dict(
        gib=torch.cuda.max_memory_allocated() / 2**30, parameters=sum(p.numel() for p in model.parameters())
    )


# ---- decoding ----


def decode_in_jax(args) -> dict:
    import jax
    import jax.numpy as jnp

    import glax.models

    model = published_model(args, param_dtype=jnp.bfloat16)
    prompts = jax.random.randint(jax.random.key(1), (args.batch, args.tokens), 0, model.vocabulary)
    row = timed_decoding(lambda count: jax.block_until_ready(glax.models.generate(model, prompts, count)))
    return row | dict(gib=peak_gib())


def decode_in_torch(args) -> dict | None:
    import torch

    model = torch_model(args).to(torch.bfloat16).eval()
    prompts = torch.randint(0, MODELS[args.model].vocabulary, (args.batch, args.tokens), device="cuda")

    @torch.no_grad()
    def run(count):
        tokens, cache = prompts, None
        for _ in range(count):
            out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        torch.cuda.synchronize()

    if args.part:
        return run(2)
    return timed_decoding(run) | dict(gib=torch.cuda.max_memory_allocated() / 2**30)


def timed_decoding(run) -> dict:
    """Return the seconds of the first calls, of a prompt with its first tokens, and of one further token."""
    began = time.perf_counter()
    for count in (FEW, MANY):
        run(count)
    first, seconds = time.perf_counter() - began, {}
    for count in (FEW, MANY):
        each = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run(count)
            each.append(time.perf_counter() - began)
        seconds[count] = statistics.median(each)
    return dict(first_s=first, prompt_s=seconds[FEW], seconds=(seconds[MANY] - seconds[FEW]) / (MANY - FEW))


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="gla")
    add("--by", choices=BY, help="glax, or models where glax has no layer of the model and with --decode")
    add("--decode", action="store_true")
    add("--batch", type=int, help="8, or 64 with --decode")
    add("--tokens", type=int, default=2048, help="of a row, or of each prompt")
    add("--layers", type=int, help="of the model, for a shorter look")
    add("--profile", action="store_true")
    add("--compile", action="store_true", help="a step of JAX into its cache, and train nothing")
    add("--scan", action="store_true", help="with --by jla: its layers in one loop, which compiles sooner")
    add("--part", type=triton_tuning.a_part, help="i/n; with --by fla or transformers")
    args = parser.parse_args()
    choice = MODELS[args.model]
    args.layers, args.batch = args.layers or choice.layers, args.batch or (64 if args.decode else 8)
    runs = ("models", "fla") if args.decode else choice.by
    args.by = args.by or runs[0]
    if args.by not in runs:
        parser.error(f"--by {args.by} does not run {choice.name} here: choose one of {', '.join(runs)}")
    if args.scan and args.by != "jla":
        parser.error(f"--scan is an option of --by jla, got --by {args.by}: leave out --scan")
    if args.part and args.by not in ("fla", "transformers"):
        parser.error(f"--part is an option of --by fla and transformers, got --by {args.by}: leave out --part")
    if args.decode and (args.profile or args.compile):
        parser.error("--profile and --compile are of training: leave out --decode")
    return args


def main():
    args = parsed()
    choice, in_torch = MODELS[args.model], args.by in ("fla", "transformers")
    if in_torch:
        import torch

        if args.part:
            triton_tuning.compile_a_part(*args.part)
        else:
            triton_tuning.short_tuning()
        torch.manual_seed(0)
    ways = (train_in_jax, train_in_torch, decode_in_jax, decode_in_torch)
    row = ways[2 * args.decode + in_torch](args)
    if row is None:
        return
    seconds, tokens = row.pop("seconds"), args.batch * (1 if args.decode else args.tokens)
    row |= dict(ms=1e3 * seconds, tokens_per_second=round(tokens / seconds))
    if not args.decode:
        row["mfu"] = 6 * row.pop("parameters") * tokens / seconds / PEAK_FLOPS
    name = choice.name if args.layers == choice.layers else f"{choice.name}, {args.layers} layers"
    mode = "decode" if args.decode else "training step"
    named = dict(model=name, problem=f"{args.batch} x {args.tokens}", mode=mode, implementation=args.by)
    print(json.dumps(named | {name: x and round(x, 3) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()

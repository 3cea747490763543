"""Train a model of 340M on one NVIDIA GPU, by glax, fla, jla or transformers: tokens per second, peak memory, device time.

python benchmarks/train.py                    # GLA: glax's layer in plain NNX, bfloat16, AdamW by optax
python benchmarks/train.py --model gated_deltanet  # Gated DeltaNet, by glax, models, fla or jla
python benchmarks/train.py --model mamba2 --by models  # Mamba2-370M, by models, fla or transformers
python benchmarks/train.py --by models        # the model of glax.models with its own loss
python benchmarks/train.py --by fla           # fla's model under autocast, PyTorch's fused AdamW
python benchmarks/train.py --model gated_deltanet --by jla  # the model of jax-linear-attention with its own loss
python benchmarks/train.py --model mamba2 --by transformers  # transformers' model with mamba-ssm's Triton kernels
python benchmarks/train.py --by fla --part 0/16    # compiles a sixteenth of the candidates of its kernels, and trains nothing
python benchmarks/train.py --profile          # the kernels that take longest, and the time of glax's own

GLA and Gated DeltaNet have width 1024, heads of K = 128 and V = 256, SwiGLU of 2816 and a vocabulary of 32000; GLA has 24 layers
of 4 heads, and Gated DeltaNet 21 layers of 6 heads, the proportions of fla's own config. Mamba2-370M has the published sizes: 48
layers of width 1024, 32 heads of 64 with 128 states, and a tied vocabulary of 50288. Batch 8 of 2048 tokens.
The last line is a result in the form of benchmarks/results/README.md.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import os
import re
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

WIDTH, KEY_WIDTH, VALUE_WIDTH, VOCABULARY, HIDDEN = 1024, 128, 256, 32000, 2816
STEPS = 10
PEAK_FLOPS = 989e12  # of an H100 SXM, bfloat16


@dataclasses.dataclass(frozen=True)
class Choice:
    """layers, heads: of the model. config: its further options in fla's config.

    layer: the name in glax.nn, or None where only --by models trains it.
    """

    name: str
    layers: int
    heads: int
    config: dict
    layer: str | None = None
    vocabulary: int = VOCABULARY


WITH_MLP = dict(intermediate_size=HIDDEN, tie_word_embeddings=False)
MODELS = {
    "gla": Choice("GLA-340M", 24, 4, WITH_MLP | dict(expand_k=0.5, expand_v=1.0), layer="GatedLinearAttention"),
    "gated_deltanet": Choice(
        "Gated DeltaNet-340M",
        21,
        6,
        WITH_MLP | dict(head_dim=KEY_WIDTH, expand_v=2.0),
        layer="GatedDeltaNet",
    ),
    "mamba2": Choice(
        "Mamba2-370M",
        48,
        32,
        dict(head_dim=64, state_size=128, expand=2, n_groups=1, norm_eps=1e-5, tie_word_embeddings=True),
        vocabulary=50288,
    ),
}


def config_of(args) -> dict:
    """The options of fla's config."""
    choice = MODELS[args.model]
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=args.layers, num_heads=choice.heads)
    return dict(model_type=args.model, vocab_size=choice.vocabulary, **sizes, **choice.config)


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


def published_model(args):
    """The same model as `glax.models` builds it from a config of fla."""
    import jax.numpy as jnp
    from flax import nnx

    import glax.models

    return glax.models.from_config(config_of(args), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def by_glax(args) -> dict | None:
    """Train a model of glax."""
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

    return train(args, params, loss)


def jla_config(args):
    """Return jla's config with the sizes of `config_of`.

    The other settings are those of jla's own benchmark of Gated DeltaNet at 16,384 tokens per step on one GPU: nothing
    recomputed, layers unrolled unless --scan, and norms, SwiGLU and gates that store their inputs alone.
    """
    from jla.models import AttentionConfig, LinearAttentionConfig, ModelConfig

    sizes = config_of(args)
    heads, width, layers = sizes["num_heads"], sizes["head_dim"], sizes["num_hidden_layers"]
    value_width = int(width * sizes["expand_v"])
    return ModelConfig(
        vocab_size=sizes["vocab_size"],
        d_model=sizes["hidden_size"],
        n_layers=layers,
        d_ff=sizes["intermediate_size"],
        tie_embeddings=sizes["tie_word_embeddings"],
        layer_types=(args.model,) * layers,
        linear_attention=LinearAttentionConfig(heads, heads, head_k_dim=width, head_v_dim=value_width),
        attention=AttentionConfig(heads, heads, width),  # of no layer here, but a required field
        remat="none",
        lean_vjp=True,
        scan_layers=args.scan,
    )


def by_jla(args) -> dict | None:
    """Train jla's model with the kernels that it chooses.

    Its benchmarks set these XLA flags, and this loss, which forms the gradient of the head in the forward pass.
    """
    import equinox
    import jax
    from jla.config import RuntimeConfig
    from jla.launch_env import launch
    from jla.models import build_model
    from jla.training.step import LossConfig, lm_loss

    launch(RuntimeConfig(xla_tuning_level=1))
    config, sum_of_losses = jla_config(args), lm_loss(LossConfig(impl="auto", grad_in_forward=True))

    def build():
        return equinox.partition(build_model(config, key=jax.random.key(0)), equinox.is_inexact_array)

    params, rest = equinox.filter_eval_shape(build) if args.compile else build()

    def loss(params, tokens):
        batch = dict(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        value, measured = sum_of_losses(equinox.combine(params, rest), batch, None)  # no dropout, so no key
        return value / measured["tokens"]

    return train(args, params, loss)


def train(args, params, loss) -> dict | None:
    """Time training steps by AdamW. With --compile, compile one and return None.

    params: a tree of arrays, or of their shapes with --compile. loss: (params, tokens [batch, tokens + 1]) -> mean cross-entropy.
    """
    import jax
    import optax

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

    _, first = steps(1)
    steps(3)
    value, seconds = steps(STEPS)
    if args.profile:
        print_profile(lambda: steps(1), compiled.as_text() or "")
    peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    count = sum(x.size for x in jax.tree.leaves(params))
    return dict(first_s=compilation + first, loss=value, seconds=seconds / STEPS, gib=peak / 2**30, parameters=count)


def print_profile(run, program: str, most: int = 24):
    """Print the kernels that take longest, in ms of device time, and the operations of the model that take longest.

    program: the text of the compiled program, which names the operation behind each instruction.
    """
    from device_profile import device_events

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


def fla_model(args, **more):
    """fla's model, on the GPU, with further options of its config."""
    from fla import models

    classes = dict(
        gla=(models.GLAConfig, models.GLAForCausalLM),
        gated_deltanet=(models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM),
        mamba2=(models.Mamba2Config, models.Mamba2ForCausalLM),
    )
    config_class, model_class = classes[args.model]
    options = {name: x for name, x in config_of(args).items() if name != "model_type"}
    return model_class(config_class(**options, **more)).cuda()


def transformers_model(args):
    """transformers' Mamba-2, whose layers run mamba-ssm's fused training path."""
    from peers_mamba import stand_in_for_causal_conv1d

    print(f"causal convolutions by {stand_in_for_causal_conv1d()}", flush=True)
    from transformers import Mamba2Config, Mamba2ForCausalLM

    options = {name: x for name, x in config_of(args).items() if name != "model_type"}
    return Mamba2ForCausalLM(Mamba2Config(layer_norm_epsilon=options.pop("norm_eps"), **options)).cuda()


def by_torch(args) -> dict | None:
    import torch
    from peers_fla import compile_a_part, short_tuning

    if args.part:
        compile_a_part(*args.part)
    else:
        short_tuning()
    torch.manual_seed(0)
    if args.by == "transformers":
        model = transformers_model(args).train()
    else:
        model = fla_model(args, use_cache=False, fuse_cross_entropy=True)
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
    _, first = steps(1)
    steps(3)
    torch.cuda.reset_peak_memory_stats()
    value, seconds = steps(STEPS)
    count = sum(p.numel() for p in model.parameters())
    peak = torch.cuda.max_memory_allocated()
    return dict(first_s=first, loss=value, seconds=seconds / STEPS, gib=peak / 2**30, parameters=count)


def a_part(text: str) -> tuple[int, ...]:
    """Return (i, n) from "i/n"."""
    return tuple(map(int, text.split("/")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="gla")
    parser.add_argument("--by", choices=("glax", "models", "fla", "jla", "transformers"), default="glax")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="of the model, for a shorter look")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", action="store_true", help="a step of JAX into its cache, and train nothing")
    parser.add_argument(
        "--scan", action="store_true", help="with --by jla: its layers in one loop, which compiles sooner"
    )
    parser.add_argument("--part", type=a_part, help="i/n; with --by fla or transformers")
    args = parser.parse_args()
    choice = MODELS[args.model]
    args.layers = args.layers or choice.layers
    if args.by == "glax" and choice.layer is None:
        parser.error(f"--by glax does not train {choice.name}: choose --by models")
    if args.by == "transformers" and args.model != "mamba2":
        parser.error(f"--by transformers trains Mamba2-370M alone, not {choice.name}: choose --by fla")
    if args.by == "jla" and args.model != "gated_deltanet":
        parser.error(f"--by jla trains Gated DeltaNet-340M alone, not {choice.name}: choose --by models")
    if args.scan and args.by != "jla":
        parser.error(f"--scan is an option of --by jla, got --by {args.by}: leave out --scan")
    ways = dict(glax=by_glax, models=by_glax, jla=by_jla, fla=by_torch, transformers=by_torch)
    row = ways[args.by](args)
    if row is None:
        return
    seconds, tokens = row.pop("seconds"), args.batch * args.tokens
    row |= dict(ms=1e3 * seconds, tokens_per_second=round(tokens / seconds))
    row["mfu"] = 6 * row.pop("parameters") * tokens / seconds / PEAK_FLOPS
    name = choice.name if args.layers == choice.layers else f"{choice.name}, {args.layers} layers"
    named = dict(model=name, problem=f"{args.batch} x {args.tokens}", mode="training", implementation=args.by)
    print(json.dumps(named | {name: round(x, 3) for name, x in row.items()}), flush=True)


if __name__ == "__main__":
    main()

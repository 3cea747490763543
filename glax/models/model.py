"""Define what all models have in common: embedding, blocks, norm, head, and three ways to read tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.bind import check_integers, check_memory_of_leaves, known_values
from glax._src.core.recurrence import to_int32
from glax._src.core.segments import differs_from_padding
from glax.models.config import ModelConfig, Options, padding
from glax.models.names import Names, parameters
from glax.models.shardings import states_on_mesh
from glax.nn.automatic import automatic, first_array, like, replicated, rows_of
from glax.nn.layer import Layer, from_pool, into_pool, parallel_rows, token_rows, with_signature
from glax.nn.losses import checked_targets, next_token_loss
from glax.nn.parts import EMBED, VOCABULARY, annotated, kernel_of, linear, soft_cap
from glax.nn.passes import Rows

# The policies of jax.checkpoint by name: what the backward pass reads instead of recomputing it.
REMAT: dict[str, Callable | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "dots_no_batch": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Hold the dtype of activations (`dtype`), the dtype of parameters (`param_dtype`), and the random keys of the parameters'
    first values (`rngs`)."""

    dtype: jnp.dtype
    param_dtype: jnp.dtype
    rngs: nnx.Rngs

    @property
    def options(self) -> dict:
        """Return the arguments of the layers of `glax.nn`."""
        return dict(dtype=self.dtype, param_dtype=self.param_dtype, rngs=self.rngs)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Hold the folder that a model was loaded from. All Origins are equal, so that equal models in two folders share their
    programs."""

    folder: str | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Describe layers that repeat. period: the number of blocks that repeat. repeats: how many times they occur in all."""

    period: int
    repeats: int


def layers_of_blocks(patterns: Sequence[Pattern]) -> list[range]:
    """Return, for each block of a model of patterns, the numbers of the layers whose parameters the block holds."""
    found, first = [], 0
    for pattern in patterns:
        end = first + pattern.period * pattern.repeats
        found += [range(first + i, end, pattern.period) for i in range(pattern.period)]
        first = end
    return found


Mixing = Any  # a module with `mix` and `empty_state`; see CausalLM


@with_signature
class CausalLM(nnx.Module):
    """Map tokens to logits of the next token by an embedding, blocks, a norm and a head. `from_config` and `from_pretrained` make
    models; model(tokens [B, T], segment_ids=None, pad_id=None) returns logits [B, T, vocabulary], as `__call__` says.

    A function that makes models of a type passes these arguments: config, blocks, norm, names, and the others by keyword.

    config:    the `ModelConfig` of the checkpoint. names: a `glax.models.names.Names`, of parameters and names in a checkpoint.
    blocks:    modules with `mix(x, state, rows) -> (x, state)` and `empty_state(batch, max_length)`. x are the activations of
               tokens, [..., width]. state is a dict of arrays. rows is a `glax.nn.passes.Rows`, which knows the sequences that
               these tokens belong to.
    norm:      a function of the activations after the last block, [..., width].
    vocabulary, width: the number of tokens, and the number of channels of x.
    tied:      whether the head is the embedding's transpose; `head` is then None.
    precision: a `glax.models.model.Precision`: the dtypes of activations and parameters, and the rngs of their first values.
    deviation: the standard deviation of the first values of embedding and head, which are normal.
    padding:   a token whose embedding gets no gradient as an input, as in the models' own code, or None.
    logit_cap: c of logits c tanh(z / c), or None.

    `folder` is the folder that the model was loaded from, or None. A subclass may override five methods. embed(tokens) returns
    the embedding's activations, and begin(tokens, rows) what the first block reads. arguments(layer) returns a tuple of what
    `mix` of block number `layer`, from 0, takes behind x, state and rows. through(x, states, rows) returns the activations after
    all blocks, and the new states, a list with one for each block. before_head(x) returns what the head multiplies, from the
    activations after the norm.

    Methods raise TypeError or ValueError for tokens of another shape or dtype, and for known tokens that the vocabulary does
    not have.

    >>> logits = model(jnp.array([[1, 2, 3]]))
    >>> logits.shape == (1, 3, model.vocabulary)
    True
    """

    # The sharding of rows [B, T, width] between blocks; None leaves it to the compiler.
    activations: NamedSharding | None
    # The patterns that `glax.models.layer_scan` has stacked the blocks by; None for one block for each layer.
    patterns: tuple[Pattern, ...] | None

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[Mixing],
        norm: Callable[[Array], Array],
        names: Names,
        *,
        vocabulary: int,
        width: int,
        tied: bool,
        precision: Precision,
        deviation: float = 0.02,
        padding: int | None = None,
        logit_cap: float | None = None,
    ):
        self.config, self.names, self.vocabulary, self.width = config, names, vocabulary, width
        self.dtype, self.remat, self.origin, self.padding = precision.dtype, None, Origin(), padding
        self.logit_cap = logit_cap
        self.activations = self.patterns = None
        init = nnx.initializers.normal(deviation)
        self.embedding = nnx.Embed(
            vocabulary,
            width,
            embedding_init=init,
            embedding_metadata=annotated(VOCABULARY, EMBED),
            **precision.options,
        )
        self.blocks, self.norm = nnx.List(blocks), norm
        self.head = (
            None if tied else linear(width, vocabulary, (EMBED, VOCABULARY), kernel_init=init, **precision.options)
        )

    @property
    def folder(self) -> str | None:
        """Return the folder that the model was loaded from, or None."""
        return self.origin.folder

    @folder.setter
    def folder(self, folder: str | None):
        self.origin = Origin(folder)

    # ---- the three ways to read --------------------------------------------------------------------------------------

    @automatic(rows_of("tokens"))
    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None, pad_id: int | None = None
    ) -> Float[Array, "B T vocabulary"]:
        """Return logits [B, T, vocabulary], in the dtype of activations, of the token that follows each token.

        Every sequence is read from its beginning, in one parallel pass.

        tokens: [B, T] integers from 0 to vocabulary - 1.
        segment_ids: the segments of packed sequences. A token continues the sequence of the token before it if both have the
        same id. pad_id: the id of padding, whose logits have no meaning. Without pad_id, padding is a segment like any other.

        Raises TypeError or ValueError, which names the argument.
        """
        return self.logits(self.hidden(tokens, segment_ids, pad_id))

    @automatic(rows_of("tokens"), like("pools"))
    def prefill(
        self,
        tokens: Int[Array, "T"],
        pools: list[dict],
        slots: Int[Array, "N"],
        cu_seqlens: Int[Array, "N+1"],
        fresh: Bool[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "T vocabulary"], list[dict]]:
        """Read packed prompts from the states in pools, and return (the logits, the pools with the new states).

        Logits are [T, vocabulary]. pools: as `initial_states` returns them. Sequence n has the tokens from cu_seqlens[n] up to,
        and without, cu_seqlens[n + 1]. It continues from row slots[n], or starts from zeros if fresh[n]. Slot -1 is no sequence:
        its logits have no meaning, and no pool changes. No two sequences may name the same slot. Tokens behind the last of
        cu_seqlens are padding, and their logits have no meaning. fresh: None if no sequence starts from zeros. Logits are in the
        model's dtype. Tokens for which caches of keys have no row have logits of NaN.

        Raises TypeError or ValueError, which names the argument, for one of another shape or dtype, for tokens that the
        vocabulary does not have, and for slots and cu_seqlens that are wrong, as far as their values are known, which they are
        not in jit.
        """
        x, pools = self.prefill_hidden(tokens, pools, slots, cu_seqlens, fresh)
        return self.logits(x), pools

    @automatic(rows_of("tokens"), like("pools"))
    def step(
        self, tokens: Int[Array, "B"], pools: list[dict], slots: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B vocabulary"], list[dict]]:
        """Read one token of each sequence, and return (the logits of the next [B, vocabulary], the pools with the new states).

        pools: as `initial_states` returns them. Sequence b lives in row slots[b], or without slots in row b. Slot -1 is no
        sequence: its logits have no meaning, and no pool changes. Raises TypeError or ValueError, which names the argument.
        """
        tokens = self.checked(tokens, "[B]")
        rows = token_rows(slots, tokens.shape[0], pools, "pools")
        x, pools = self.through(self.begin(tokens, rows), pools, rows)
        return self.logits(self.norm(x)), pools

    @automatic(replicated)
    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        pad_id: int | None = None,
        z_loss: float = 0.0,
    ) -> Float[Array, ""]:
        """Return the mean cross-entropy of the next tokens, in nats. No array [B, T, vocabulary] in float32 is formed.

        targets: the token that follows each token; a number below 0 for a token that does not count. If None, the target is
        the next token of the same segment, and padding does not count. z_loss: the weight of the mean of (log sum exp logits)^2,
        which is added. tokens, segment_ids, pad_id: as in a call of the model. The loss is a float32 scalar. Raises
        TypeError or ValueError, which names the argument.
        """
        tokens = self.checked(tokens, "[B, T]")
        targets = None if targets is None else checked_targets(targets, tokens.shape, self.vocabulary)
        x = self.hidden(tokens, segment_ids, pad_id)
        if targets is None:
            following = jnp.where(tokens < 0, self.vocabulary, tokens)[
                :, 1:
            ]  # no token at all, and not one without a target
            targets = jnp.concatenate([following, jnp.full_like(tokens[:, :1], -1)], 1)
            if segment_ids is not None:
                ids = jnp.asarray(segment_ids)
                same, is_token = ids[:, 1:] == ids[:, :-1], differs_from_padding(ids, pad_id)
                same = same if is_token is None else same & is_token[:, 1:]
                targets = targets.at[:, :-1].set(jnp.where(same, targets[:, :-1], -1))
        return next_token_loss(
            self.before_head(x).astype(self.dtype),
            self.head_kernel,
            targets,
            self.logit_cap,
            z_loss,
            self.activations,
        )

    # ---- their parts -------------------------------------------------------------------------------------------------

    def checked(self, tokens, form: str) -> Int[Array, "*rows"]:
        """Return tokens as int32. form: the axes, such as "[B, T]". Raises TypeError or ValueError for other axes or no
        integers, and for known tokens that the vocabulary does not have; ValueError if the embedding has no values, as after
        `from_pretrained` with `only`."""
        if isinstance(self.embedding.embedding.get_value(), jax.ShapeDtypeStruct):
            require_whole(self)
        return checked_tokens("tokens", tokens, form, self.vocabulary)

    @automatic(rows_of("tokens"))
    def hidden(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None, pad_id: int | None = None
    ) -> Array:
        """Return the rows that the head reads, [B, T, width]: the activations after the last norm, which `logits` takes.
        Arguments and errors are as in a call of the model."""
        tokens = self.checked(tokens, "[B, T]")
        rows = parallel_rows(tokens.shape, None, segment_ids, pad_id)
        if self.remat is not None or self.patterns is not None:
            rows.settle()
        x, _ = self.through(self.begin(tokens, rows), [{}] * len(self.blocks), rows)
        return self.norm(x)

    @automatic(rows_of("tokens"), like("states"))
    def extend_hidden(self, tokens: Int[Array, "B T"], states: list[dict]) -> tuple[Array, list[dict]]:
        """Continue B sequences by T tokens. Return the rows that the head reads, [B, T, width], and the new states.

        states: as `initial_states(B, ...)` or an earlier call returns them, with one row for each sequence.
        """
        tokens = self.checked(tokens, "[B, T]")
        check_memory_of_leaves("states", states)
        rows = parallel_rows(tokens.shape, None)
        x, states = self.through(self.begin(tokens, rows), states, rows)
        return self.norm(x), states

    @automatic(rows_of("tokens"), like("pools"))
    def prefill_hidden(self, tokens, pools, slots, cu_seqlens, fresh=None) -> tuple[Array, list[dict]]:
        """Read packed prompts as `prefill` does, but return the rows that the head reads, [T, width], in place of logits; and
        the pools."""
        tokens = self.checked(tokens, "[T]")
        rows = parallel_rows(tokens.shape, cu_seqlens)
        states, slots = from_pool(pools, slots, rows.num_sequences, fresh)
        x, states = self.through(self.begin(tokens, rows), states, rows)
        return self.norm(x), into_pool(pools, slots, states)

    def begin(self, tokens: Int[Array, "*rows"], rows: Rows) -> Any:
        """Return what `through` reads: the embedding's rows of the tokens [*rows, width], with zeros for tokens of padding. A
        model whose blocks read more of the tokens overrides this, and returns a tree of arrays."""
        x = rows.with_zeros_in_padding(self.embed(tokens))
        return self.by_width(x) if x.ndim == 3 else x  # rows [T] and [B] have no axes that a mesh of training shards

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
        """Return the embedding's rows of `tokens`, in the dtype of activations."""
        # Rows are cast, not the table: else its gradient would sum the rows of a frequent token in `dtype`.
        x = embedded(self.embedding.embedding[...], tokens).astype(self.dtype)
        if self.padding is None:
            return x
        return jnp.where((tokens == self.padding)[..., None], jax.lax.stop_gradient(x), x)

    def by_width(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        """Return embedded rows x. In training on a mesh, the axis "fsdp" shards their width here, and not the batch.

        The axis "fsdp" also shards the width of the embedding's table, so each device looks up some columns of all rows. The
        blocks read whole rows: one all-to-all exchanges these columns for them. Without this step the compiler may gather the
        rows of all devices.
        """
        if self.activations is None or self.activations.mesh.shape.get("fsdp", 1) == 1:
            return x
        rows, sequence, _ = self.activations.spec
        others = tuple(name for name in rows if name != "fsdp")
        by_width = NamedSharding(self.activations.mesh, PartitionSpec(others, sequence, "fsdp"))
        return jax.lax.with_sharding_constraint(x, by_width)

    def through(self, x: Any, states: list[dict], rows: Rows) -> tuple[Any, list[dict]]:
        """Return x after all blocks, and the new states, one dict for each block.

        x: what the first block reads, as `begin` returns it; a model whose blocks pass on more may give a tree of arrays. states:
        one dict for each block. A model of `patterns`, whose blocks are stacked for training, reads no states and returns [].
        rows: the `glax.nn.passes.Rows` of x.
        """
        if self.patterns is not None:
            return self.through_patterns(x, self.patterns, rows), []
        after = []
        for layer, (block, state) in enumerate(zip(self.blocks, states, strict=True)):
            x, state = self.rematerialised(block.mix, rows)(x, state, *self.arguments(layer))
            after.append(state)
        return x, after

    def through_patterns(self, x: Any, patterns: Sequence[Pattern], rows: Rows) -> Any:
        """Return x after all layers of a model whose blocks are stacked by patterns. Every layer begins from a state of zeros.

        patterns: the `Pattern`s, in the order of the layers. One `jax.lax.scan` runs over the repeats of each.
        x: what the first block reads, [*rows, width], or a tree of arrays where a block passes on more than its activations, as
        RWKV-7's also pass on the values of the first layer. rows: the `glax.nn.passes.Rows` of x.
        """
        place, layers = 0, layers_of_blocks(patterns)
        for pattern in patterns:
            inside = slice(place, place + pattern.period)
            place += pattern.period
            blocks = nnx.List(self.blocks[inside])
            arguments = [
                [self.arguments(layer) for layer in of_repeat] for of_repeat in zip(*layers[inside], strict=True)
            ]
            if pattern.repeats == 1:
                x = self.through_blocks(x, blocks, arguments[0], rows)
                continue
            graph, stacks = nnx.split(blocks)

            def repeat(x, parts, graph=graph):
                state, arguments = parts
                return self.through_blocks(x, nnx.merge(graph, state), arguments, rows), None

            parts = stacks, jax.tree.map(lambda *each: jnp.stack(each), *arguments)
            # Blocks may widen x to the dtype of their residuals.
            after, _ = jax.eval_shape(repeat, x, jax.tree.map(lambda x: x[0], parts))
            x, _ = jax.lax.scan(repeat, jax.tree.map(lambda x, y: x.astype(y.dtype), x, after), parts)
        return x

    def through_blocks(self, x: Any, blocks: Sequence[Mixing], arguments: Sequence[tuple], rows: Rows) -> Any:
        """Return x after these blocks, each of which begins from a state of zeros. arguments: for each block, what `arguments`
        returns."""
        for block, more in zip(blocks, arguments, strict=True):
            x, _ = self.rematerialised(block.mix, rows)(x, {}, *more)
        return x

    def cannot_scan(self) -> str | None:
        """Return why the layers cannot run in a scan, or None. A model overrides this if a layer reads the output of other layers
        than the one before it."""
        return None

    def block_of(self, layer: int) -> Mixing:
        """Return the block that holds the parameters of a layer, by its number from 0. In a model of `patterns` it also holds
        those of the layers that are stacked with this one."""
        if self.patterns is None:
            return self.blocks[layer]
        layers = layers_of_blocks(self.patterns)
        return next(block for block, own in zip(self.blocks, layers, strict=True) if layer in own)

    def arguments(self, layer: int) -> tuple:
        """Return the positional arguments of `mix` after x, state and rows, for the layer with this number, from 0: none here. A
        model whose layers share parameters overrides this."""
        return ()

    def rematerialised(self, mix: Callable, rows: Rows) -> Callable:
        """Return the function (x, state, ...) -> mix(x, state, rows, ...), whose backward pass recomputes what `set_remat` does
        not store. mix: the method of a block or of a layer. rows: a `glax.nn.passes.Rows`. In training on a mesh, x and the
        output are sharded as the attribute `activations`, a NamedSharding, says."""

        def of_state(x, state, *rest):
            if self.activations is None:
                return mix(x, state, rows, *rest)
            # Else the compiler may shard the width as the parameters are, and gather the rows instead of the parameters.
            x = jax.lax.with_sharding_constraint(x, self.activations)
            y, state = mix(x, state, rows, *rest)
            return jax.lax.with_sharding_constraint(y, self.activations), state

        return of_state if self.remat is None else jax.checkpoint(of_state, policy=REMAT[self.remat])

    def before_head(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Return what the kernel of the head multiplies, from x after the last norm: x itself. A model that scales its logits
        overrides this."""
        return x

    @property
    def head_kernel(self) -> Float[Array, "width vocabulary"]:
        """Return the kernel of the head, in the dtype of activations: the embedding's transpose if the head is tied."""
        kernel = self.embedding.embedding[...].T if self.head is None else kernel_of(self.head)
        return kernel.astype(self.dtype)

    @automatic(rows_of("x"))
    def logits(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows vocabulary"]:
        """Return the logits of x, rows after the last norm, as `hidden` returns them."""
        return soft_cap(self.before_head(x).astype(self.dtype) @ self.head_kernel, self.logit_cap)

    def derived_tensors(self) -> dict[str, Any]:
        """Return the derived tensors, {name in the checkpoint: array}: those that a checkpoint of this type holds although the
        model's config determines them; {} here. `save_pretrained` writes them. The model computes its own and uses none."""
        return {}

    def check_derived_tensors(self, tensors: Mapping[str, np.ndarray]):
        """Raise ValueError if a derived tensor is not what the model's config determines, but for rounding. Nothing is checked
        here, where there are none. `from_pretrained` calls it.

        tensors: {name: array} of the checkpoint's tensors that `derived_tensors` names, and of no others.
        """

    def initial_states(self, batch: int, max_length: int | None = None) -> list[dict]:
        """Return the empty states of `batch` sequences, or pools of as many slots: one dict per block, each array with one row
        per sequence.

        max_length: the tokens of a sequence, prompt and continuation together. Only blocks of softmax attention need it, and
        raise ValueError if it is None. Where the parameters lie on explicit axes of a mesh, the states lie there too, with their
        heads sharded as the layers are.
        """
        return states_on_mesh(self.empty_states(batch, max_length), first_array(self))

    def empty_states(self, batch: int, max_length: int | None = None) -> list[dict]:
        """Return the empty states of `batch` sequences on the default device: one dict for each block. max_length: as in
        `initial_states`."""
        return [block.empty_state(batch, max_length) for block in self.blocks]

    def grown_states(self, pools: list[dict], max_length: int) -> list[dict]:
        """Return a copy of `pools` with room for max_length tokens. Caches of keys and values get rows; other states stay as
        they are.

        A server grows its pools when a sequence needs it, and each size is compiled once. Raises ValueError if `pools` have
        more rows than max_length.
        """
        batch = jax.tree.leaves(pools)[0].shape[0]

        def grown(pool, wanted):
            more = [(0, after - before) for before, after in zip(pool.shape, wanted.shape, strict=True)]
            if any(after < 0 for _, after in more):
                raise ValueError(f"max_length must be at least {pool.shape[1]}, as pools have rows, got {max_length}")
            return jnp.pad(pool, more) if any(after for _, after in more) else pool

        return jax.tree.map(grown, pools, jax.eval_shape(lambda: self.empty_states(batch, max_length)))

    def set_remat(self, name: str | None):
        """Choose what the forward stores for the backward pass, which recomputes the rest. Raises ValueError for an unknown name.

        name: "full" stores the inputs of blocks alone; "dots" also all results of matrix products; "dots_no_batch" also those of
        matrix products without batch axes; None, as in a new model, stores all that the backward pass reads.
        """
        if name is not None and name not in REMAT:
            raise ValueError(f"remat must be None or one of {', '.join(map(repr, REMAT))}, got {name!r}")
        self.remat = name


class Block(nnx.Module):
    """Compute x + m mixer(norm(x)), then x + m mlp(norm(x)). The mixer is a `glax.nn` layer with a state, and the MLP has none.

    multiplier: m; 1 if None.
    """

    def __init__(self, attn_norm: Any, attn: Mixing, mlp_norm: Any, mlp: Any, multiplier: float | None = None):
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
        self.multiplier = multiplier

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.attn.empty_state(batch, max_length)

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows, *rest) -> tuple[Array, dict]:
        """Return the block's output and the new state. rest: further arguments of the mixer."""
        y, state = self.attn.mix(self.attn_norm(x), state, rows, *rest)
        x = x + self.scaled(y)
        return x + self.scaled(self.mlp(self.mlp_norm(x))), state

    def scaled(self, y: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        return y if self.multiplier is None else y * self.multiplier


class MixerBlock(nnx.Module):
    """Compute x + mixer(norm(x)). The mixer is a `glax.nn` layer with a state, or a module without one.

    dtype: the dtype in which norm and mixer read x. residual: the dtype of x between blocks. Both are x's dtype if None.
    """

    def __init__(self, norm: Any, mixer: Any, dtype: jnp.dtype | None = None, residual: jnp.dtype | None = None):
        self.norm, self.mixer, self.dtype, self.residual = norm, mixer, dtype, residual

    def empty_state(self, batch: int, max_length: int | None) -> dict:
        return self.mixer.empty_state(batch, max_length) if isinstance(self.mixer, Layer) else {}

    def mix(self, x: Float[Array, "*rows width"], state: dict, rows: Rows) -> tuple[Array, dict]:
        h = self.norm(x if self.dtype is None else x.astype(self.dtype))
        y, after = self.mixer.mix(h, state, rows) if isinstance(self.mixer, Layer) else (self.mixer(h), {})
        x = x if self.residual is None else x.astype(self.residual)
        return x + (y if self.dtype is None else y.astype(x.dtype)), dict(after)


def outer_options(
    options: Options,
    precision: Precision,
    vocabulary: int,
    *,
    tied: bool = False,
    pad: int | None = None,
    has_padding: bool = True,
    deviation: float = 0.02,
) -> tuple[dict, Callable]:
    """Return (the arguments of CausalLM that every type has, the function that initialises projections).

    vocabulary, tied, pad, deviation: vocab_size, tie_word_embeddings, pad_token_id and initializer_range for a config that
    lacks them. has_padding: whether the models' own code gives the embedding of pad_token_id no gradient.
    """
    deviation = options.number("initializer_range", deviation, least=0)
    outer = dict(
        vocabulary=options.integer("vocab_size", vocabulary),
        tied=options.flag("tie_word_embeddings", tied),
        deviation=deviation,
        padding=padding(options, pad) if has_padding else None,
        precision=precision,
    )
    return outer, nnx.initializers.normal(deviation)


def require_whole(model: CausalLM):
    """Raise ValueError, which names the first ones, if parameters of the model are shapes without values."""
    absent = [path for path, x in parameters(model) if isinstance(x.get_value(), jax.ShapeDtypeStruct)]
    if absent:
        raise ValueError(
            f"model must hold all its parameters, got none for {', '.join(absent[:3])} and {max(len(absent) - 3, 0)} more: load "
            "it without `only`"
        )


def checked_tokens(name: str, tokens, form: str, vocabulary: int) -> Int[Array, "*rows"]:
    """Return tokens as int32. Raises TypeError or ValueError unless they are integers of the shape `form` and, where known,
    below `vocabulary`."""
    check_tokens(name, tokens, form, vocabulary)
    return to_int32(tokens)


def check_tokens(name: str, tokens, form: str, vocabulary: int):
    """Raise TypeError or ValueError unless tokens are integers of the shape `form`, such as "[B, T]", and where their values are
    known from 0 to vocabulary - 1."""
    check_integers(name, tokens)
    if tokens.ndim != len(form.split(",")):
        raise ValueError(f"{name} must be {form}, got shape {tokens.shape}")
    known = known_values(tokens)
    if known is not None and (wrong := known[(known < 0) | (known >= vocabulary)]).size:
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, got {wrong[0]}")


def embedded(table: Float[Array, "vocabulary width"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
    """Return the rows of `table` for the tokens. The row of a token below 0 or not in the vocabulary is NaN."""
    return jnp.take(table, jnp.where(tokens < 0, table.shape[0], tokens), axis=0, mode="fill")

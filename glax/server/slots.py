"""Hold what devices know of running requests, one slot for each, and the programs that read and write tokens there.

    empty    makes the arrays of empty slots
    admit    clears a slot, and sets how the request in it draws tokens
    load     brings a stored prefix into a slot
    read     reads pieces of prompts, packed one behind another
    write    reads the last token of each running request
    draw     draws the next tokens behind either: a program for each of `Draws`
    save     stores the states of a slot, behind a block of tokens
    resize   moves requests to pools of another number of slots, or with room for other lengths

For each size of the pools there is one program of each, but one of `read` for each of `sizes`, one of `draw` for each of `Draws`,
and one of `resize` for each size before. All but `empty` and `resize` update in place what they are given first, or the pools.
Models that differ in their arrays alone share their programs.
"""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from glax._src.core.compiling import start_compiling
from glax._src.core.explicit_axes import spec_of, with_automatic_axes
from glax._src.serving.state_pool import in_bounds, take
from glax.models.generation import ROOM
from glax.models.model import CausalLM
from glax.models.sampling import Draws, SequenceOptions, chosen_by_options
from glax.models.shardings import states_on_mesh
from glax.models.structure import Structure
from glax.nn.automatic import first_array
from glax.server.request import GREEDY, MOST_LOGPROBS, Request
from glax.serving import PrefixStore

FEWEST_PIECES = 8
BLOCK = 128  # the tokens of a stored block of a prefix, by default
FEW = 256  # up to so many tokens are read by a smaller program


# ---- programs ------------------------------------------------------------------------------------------------------------


def on_axes_of(arrays, f, *operands, spec_of_found: P | None = None):
    """Return f(arrays, *operands), where f runs with automatic mesh axes. The result is a tree like `arrays`, and sharded as
    they are.

    With spec_of_found, f returns a pair: such a tree, and an array or tree that has this PartitionSpec.
    """
    specs = jax.tree.map(spec_of, arrays)
    return with_automatic_axes(f, specs if spec_of_found is None else (specs, spec_of_found), arrays, *operands)


def spec_of_logits(model: CausalLM) -> P:
    """Return the PartitionSpec of logits [C, V]: V is sharded as the vocabulary of the model's head is.

    For logits that are whole on every device, XLA would gather the head.
    """
    spec = spec_of(model.head_kernel)  # whatever the head is: tied, with LoRA, or of its own
    return P(None, spec[1] if len(spec) > 1 else None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty(structure: Structure, capacity: int, room: int, parameters) -> dict:
    """Return the arrays of `capacity` empty slots on the default device, each with room for `room` tokens.

    pools: the model's states. token: the last token of each request, which the model has not read. options: `SequenceOptions`.
    wants_logprobs: whether a request does. in_prompt: which tokens the prompts hold. counts: how often the answers hold each.
    """
    model = structure.model(parameters)

    def zeros(dtype, *shape):
        return jnp.zeros((capacity, *shape), dtype)

    options = SequenceOptions(
        key_data=zeros(jnp.uint32, *jax.random.key_data(jax.random.key(0)).shape),
        number=zeros(jnp.int32),
        temperature=zeros(jnp.float32),
        top_k=zeros(jnp.int32),
        **{name: zeros(jnp.float32) for name in ("top_p", "repetition", "presence", "frequency")},
    )
    return dict(
        pools=model.empty_states(capacity, room),
        token=zeros(jnp.int32),
        options=options._asdict(),  # `states_on_mesh` takes trees of dicts
        wants_logprobs=zeros(bool),
        in_prompt=zeros(bool, model.vocabulary),
        counts=zeros(jnp.int32, model.vocabulary),
    )


@functools.partial(jax.jit, donate_argnums=0)
def admit(arrays: dict, slot: Int[Array, ""], seed: Int[Array, ""], own: dict) -> dict:
    """Return arrays with the entries `own` of a request set in a slot, and zeros in the slot's other arrays.

    own: the request's result of `Slots.entries`, without the axis of slots. seed: the seed of the request's draws.
    """

    def run(arrays, slot, seed, own):
        key_data = jax.random.key_data(jax.random.key(seed))
        own = own | dict(options=own["options"] | dict(key_data=key_data))
        own = own | jax.tree.map(
            lambda x: jnp.zeros(x.shape[1:], x.dtype), {n: x for n, x in arrays.items() if n not in own}
        )
        return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), arrays, own)

    return on_axes_of(arrays, run, slot, seed, own)


@functools.partial(jax.jit, donate_argnums=0)
def load(arrays: dict, store: PrefixStore, slot: Int[Array, ""], blocks: Int[Array, "J"]) -> dict:
    """Return arrays with a stored prefix in a slot.

    blocks: the slots of the store that hold the prefix's blocks, in order, followed by -1. Where the slots of the pools do not
    grow with length, J is 1, and blocks has the last of them alone.
    """

    def run(arrays, store, slot, blocks):
        return arrays | dict(pools=store.load(arrays["pools"], slot[None], blocks[None]))

    return on_axes_of(arrays, run, store, slot, blocks)


@functools.partial(jax.jit, donate_argnums=0)
def save(store: PrefixStore, pools, slot: Int[Array, ""], block: Int[Array, ""], end: Int[Array, ""]) -> PrefixStore:
    """Return the store with the states of a slot, which has read `end` tokens, written to its slot `block`."""

    def run(store, pools, slot, block, end):
        return store.save(pools, slot[None], block[None], end[None])

    return on_axes_of(store, run, pools, slot, block, end)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def read(structure: Structure, parameters, pools, tokens, slots: Int[Array, "N"], cu_seqlens):
    """Read packed pieces of prompts into slots. Return (pools, logits [C, V] behind the piece in each slot, zeros for a slot
    without one).

    tokens: [T], the pieces one behind another. slots: [N], the slot of each piece, -1 for none. cu_seqlens: [N + 1], their
    boundaries in `tokens`.
    """

    spec = spec_of_logits(structure.model(parameters))

    def run(pools, parameters, tokens, slots, cu_seqlens):
        model, capacity = structure.model(parameters), jax.tree.leaves(pools)[0].shape[0]
        x, pools = model.prefill_hidden(tokens, pools, slots, cu_seqlens)
        logits = model.logits(x[jnp.maximum(cu_seqlens[1:] - 1, 0)])
        at, _ = in_bounds(slots, capacity)
        return pools, jnp.zeros((capacity, model.vocabulary), logits.dtype).at[at].set(logits, mode="drop")

    return on_axes_of(pools, run, parameters, tokens, slots, cu_seqlens, spec_of_found=spec)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def write(structure: Structure, parameters, pools, token: Int[Array, "C"], active: Bool[Array, "C"]):
    """Read the last token of each active slot. Return (pools, logits [C, V])."""
    spec = spec_of_logits(structure.model(parameters))

    def run(pools, parameters, token, active):
        slots = jnp.where(active, jnp.arange(len(active), dtype=jnp.int32), -1)
        logits, pools = structure.model(parameters).step(token, pools, slots)
        return pools, logits

    return on_axes_of(pools, run, parameters, token, active, spec_of_found=spec)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def draw(draws: Draws, arrays: dict, logits: Float[Array, "C V"], active: Bool[Array, "C"]):
    """Draw the next token of active slots. Return (arrays, dict of arrays [C]). arrays: all but the pools.

    token: the next token. is_sound: whether all logits are finite. If draws is ANY, the dict also has the results of
    `with_logprobs`, which are zeros if no active slot wants them.
    """

    def run(arrays, logits, active):
        options, logits = SequenceOptions(**arrays["options"]), logits.astype(jnp.float32)
        token = chosen_by_options(logits, options, arrays["in_prompt"], arrays["counts"], draws)
        token = jnp.where(active, token, arrays["token"])
        found = dict(token=token, is_sound=jnp.isfinite(logits).all(1))
        if draws is Draws.ANY:
            found |= with_logprobs((arrays["wants_logprobs"] & active).any(), logits, token)
        counts = arrays["counts"].at[jnp.arange(len(token)), token].add(active.astype(jnp.int32))
        options = arrays["options"] | dict(number=options.number + active)
        return arrays | dict(token=token, counts=counts, options=options), found

    return on_axes_of(arrays, run, logits, active, spec_of_found=P())


def with_logprobs(is_wanted: Bool[Array, ""], logits: Float[Array, "C V"], token: Int[Array, "C"]) -> dict:
    """Return logprobs of the model's distribution by name. All are zeros if not `is_wanted`.

    logprob: [C], of each token in `token`. likeliest, logprobs: [C, n], the likeliest tokens and their logprobs, the likeliest
    first, where n is MOST_LOGPROBS, or V if that is less.
    """
    count = min(MOST_LOGPROBS, logits.shape[1])

    def wanted(logits, token):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0], *lax.top_k(logprobs, count)

    def unwanted(logits, token):
        nothing = jnp.zeros((len(token), count))
        return nothing[:, 0], nothing, nothing.astype(jnp.int32)

    logprob, logprobs, likeliest = lax.cond(is_wanted, wanted, unwanted, logits, token)
    return dict(logprob=logprob, logprobs=logprobs, likeliest=likeliest)


@functools.partial(jax.jit, static_argnums=(0, 1))
def resize(structure: Structure, room: int, parameters, arrays: dict, sources: Int[Array, "C"]) -> dict:
    """Return arrays with room for `room` tokens. Slot n comes from slot sources[n], or is empty for -1."""
    capacity = sources.shape[0]

    def run(arrays, parameters, sources):
        model, (at, _) = structure.model(parameters), in_bounds(sources, arrays["token"].shape[0])
        wanted = jax.eval_shape(lambda: model.empty_states(capacity, room))

        def fitted(pool, like):
            fitting = (slice(min(n, m)) for n, m in zip(pool.shape[1:], like.shape[1:], strict=True))
            pool = take(pool[(slice(None), *fitting)], at)
            return jnp.pad(pool, [(0, m - n) for n, m in zip(pool.shape, like.shape, strict=True)])

        others = {name: jax.tree.map(lambda x: take(x, at), x) for name, x in arrays.items() if name != "pools"}
        return others | dict(pools=jax.tree.map(fitted, arrays["pools"], wanted))

    return on_axes_of(arrays, run, parameters, sources)


def without_pools(arrays: dict) -> dict:
    return {name: x for name, x in arrays.items() if name != "pools"}


def sizes(most: int) -> tuple[int, ...]:
    """Return the sizes, in tokens, of the programs that read up to `most` tokens of prompts: `most`, and a small one if it is
    large.

    A program takes as long for few tokens as for its size. Where prefixes are stored, one prompt alone has at most a block of
    tokens in a round.
    """
    return (FEW, most) if most >= 4 * FEW else (most,)


def draws_of(entries: dict) -> Draws:
    """Return the least `Draws` that a request needs. entries: the request's `Slots.entries`."""
    options, is_drawn = entries["options"], entries["options"]["temperature"] > 0
    if entries["wants_logprobs"] or (is_drawn and (options["top_k"] > 0 or options["top_p"] < 1)):
        return Draws.ANY
    return Draws.UNLIMITED if is_drawn else Draws.LIKELIEST


def integer(x: int) -> np.signedinteger:
    """Return x as int64 if JAX has 64-bit dtypes enabled, else the lower 32 bits of x as int32, which is what JAX would
    read."""
    return np.int64(x).astype(jax.dtypes.canonicalize_dtype(np.int64))


def nbytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ---- slots ---------------------------------------------------------------------------------------------------------------


class Slots:
    """Hold the arrays of all slots, as the function `empty` makes them, and call the programs. Arguments are integers,
    sequences and arrays of NumPy. Results of programs stay on the devices.

    most_slots: the slots that pools have, unless state_bytes leaves fewer. max_length: the most tokens of a request.
    state_bytes: the most bytes of the pools, None for no limit: the longer the requests, the fewer slots. room: the tokens of a
    request for which a slot of the pools has room. grows: whether a slot has more bytes with more room. block: the tokens of a
    stored block of a prefix. Where prefixes are stored, a round reads at most so many of one prompt.
    """

    def __init__(self, model: CausalLM, most_slots: int, max_length: int, state_bytes: int | None, block: int = BLOCK):
        self.model, self.most_slots, self.max_length, self.state_bytes = model, most_slots, max_length, state_bytes
        self.block = block
        self.structure, self.parameters = Structure.of(model)
        placed = getattr(first_array(model), "sharding", None)
        self.num_devices = 1 if placed is None else len(placed.device_set)
        one, two = (nbytes(jax.eval_shape(lambda n=n: model.empty_states(1, n))) for n in (1, 2))
        self.token_bytes = two - one
        self.fixed_bytes = one - self.token_bytes
        self.grows = self.token_bytes > 0
        self.room = self.room_for(1)
        self.arrays: dict[str, Any] = {}  # empty before `make` and after `drop`
        self.draws_in: dict[int, Draws] = {}  # by slot, what its request asks for
        if not self.capacity_with(self.room):
            raise ValueError(
                f"state_bytes must be at least {self.slot_bytes(self.room)}, the bytes of one request's states, got "
                f"{state_bytes}"
            )

    def room_for(self, length: int) -> int:
        """Return the room of pools for requests of `length` tokens: ROOM times a power of two, and at most max_length. It is
        max_length where a slot does not grow."""
        room = ROOM if self.grows else self.max_length
        while room < length:
            room *= 2
        return min(room, self.max_length)

    def slot_bytes(self, room: int) -> int:
        """Return the bytes of the states in one slot."""
        return self.fixed_bytes + self.token_bytes * room

    def capacity_with(self, room: int) -> int:
        """Return the number of slots of pools with this room."""
        fitting = self.most_slots if self.state_bytes is None else self.state_bytes // self.slot_bytes(room)
        return min(self.most_slots, fitting)

    @property
    def capacity(self) -> int:
        """Return the number of slots of the pools."""
        return self.capacity_with(self.room)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pools."""
        return self.capacity * self.slot_bytes(self.room) if self.arrays else 0

    def make(self):
        """Make the arrays of empty slots, unless they exist."""
        if not self.arrays:
            arrays = empty(self.structure, self.capacity, self.room, self.parameters)
            self.arrays = states_on_mesh(arrays, first_array(self.model))

    def compile(self, size: int, store: PrefixStore | None = None):
        """Compile the programs for the present pools, side by side in threads: those that admit requests, read up to `size`
        tokens of prompts, write tokens, and save prefixes in a store and load them.

        The model's parameters may be shapes without values. store: None if prefixes are not stored.
        """
        arrays = self.arrays or self.shapes(self.room)
        for compiling in start_compiling(self.lowered(self.room, size, arrays, store)):
            compiling.result()

    def call_idle(self, size: int):
        """Call the programs that read up to `size` tokens, write, and draw the likeliest tokens, with no active slot."""
        for each in sizes(size):
            self.read_in(each, ())
        self.write(())

    def prepare(self, room: int, size: int, store: PrefixStore | None, before: Sequence[Future] = ()) -> Future | None:
        """Begin to compile, in a thread, the programs of pools with this room, and the one that moves requests there from the
        present pools. Return a future, which has the error of a program that could not be compiled.

        Return None for a model on several devices: its programs depend on where the arrays lie, which shapes do not say.
        before: the futures of earlier calls for the same room. Programs that these have compiled are not compiled again.
        """
        if self.num_devices > 1:
            return None
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue], as in `Scheduler`
        # The rounds donate the arrays meanwhile.
        source, store = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.arrays, store))

        def compile_all():
            wait(before)
            with jax.default_matmul_precision(precision):
                for compiling in start_compiling(self.lowered(room, size, self.shapes(room), store, source)):
                    compiling.result()

        thread = ThreadPoolExecutor(1, "glax_compiles")
        compiling = thread.submit(compile_all)
        thread.shutdown(wait=False)
        return compiling

    def shapes(self, room: int) -> dict:
        """Return the shapes of the arrays of empty slots with this room."""
        capacity = self.capacity_with(room)
        return jax.eval_shape(lambda parameters: empty(self.structure, capacity, room, parameters), self.parameters)

    def lowered(
        self, room: int, size: int, arrays: dict, store: PrefixStore | None, source: dict | None = None
    ) -> Iterator[jax.stages.Lowered]:
        """Yield the lowered programs of pools with this room, large ones first.

        size: the most tokens of prompts that a read has. arrays: the arrays of the slots, or their shapes. source: the shapes
        of the arrays from which requests are moved there, or None.
        """
        parameters, zero, capacity = self.parameters, np.int32(0), self.capacity_with(room)
        active, pools = np.zeros(capacity, bool), arrays["pools"]
        for each in reversed(sizes(size)):
            yield read.lower(self.structure, parameters, pools, *self.packed(each, (), room))
        writing = write.lower(self.structure, parameters, pools, arrays["token"], active)
        yield writing
        for draws in reversed(Draws):
            yield draw.lower(draws, without_pools(arrays), writing.out_info[1], active)
        yield admit.lower(arrays, zero, integer(0), self.entries(Request([0], 1), np.zeros(1, np.int32)))
        if store is not None:
            yield load.lower(arrays, store, zero, self.padded((), room, store))
            yield save.lower(store, arrays["pools"], zero, zero, zero)
        if source is not None:
            yield resize.lower(self.structure, room, parameters, source, np.zeros(capacity, np.int32))

    def entries(self, request: Request, prompt: Int[np.ndarray, "T"]) -> dict:
        """Return the entries that `admit` sets in a request's slot, other than the key of its draws, which `admit` makes of a
        seed.

        prompt: the tokens of the request's prompt.
        """
        in_prompt = np.zeros(self.model.vocabulary, bool)
        in_prompt[prompt] = True
        options = dict(
            number=np.int32(0),
            temperature=np.float32(request.temperature if request.temperature >= GREEDY else 0),
            top_k=np.int32(min(request.top_k, self.model.vocabulary)),
            top_p=np.float32(request.top_p),
            repetition=np.float32(request.repetition_penalty),
            presence=np.float32(request.presence_penalty),
            frequency=np.float32(request.frequency_penalty),
        )
        return dict(options=options, wants_logprobs=np.bool_(request.logprobs is not None), in_prompt=in_prompt)

    def admit(self, slot: int, seed: int, own: dict):
        """Clear a slot, and set how its new request draws tokens. seed: the seed of the draws. own: the request's result of
        `entries`."""
        self.draws_in[slot] = draws_of(own)
        self.arrays = admit(self.arrays, np.int32(slot), integer(seed), own)

    def load(self, store: PrefixStore, slot: int, blocks: Sequence[int]):
        """Bring a stored prefix into a slot. blocks: the slots of the store that hold its blocks, in order."""
        self.arrays = load(self.arrays, store, np.int32(slot), self.padded(blocks, self.room, store))

    def padded(self, blocks: Sequence[int], room: int, store: PrefixStore) -> np.ndarray:
        """Return the argument `blocks` of the program `load`, for a prefix in these slots of the store and pools with this
        room."""
        if not self.grows:  # the last state is all
            blocks = blocks[-1:]
        padded = np.full(room // store.every if self.grows else 1, -1, np.int32)
        padded[: len(blocks)] = blocks
        return padded

    def save(self, store: PrefixStore, slot: int, block: int, end: int) -> PrefixStore:
        """Return the store with the states of a slot, which has read `end` tokens, in its slot `block`."""
        return save(store, self.arrays["pools"], np.int32(slot), np.int32(block), np.int32(end))

    def read(self, size: int, pieces: Sequence[tuple[int, np.ndarray, bool]]) -> dict:
        """Read pieces of prompts by the smallest program that takes them. Return the results of `Slots.draw`.

        pieces: (slot, tokens, whether the prompt ends), which together have at most `size` tokens.
        """
        count = sum(len(piece) for _, piece, _ in pieces)
        fitting = (n for n in sizes(size) if count <= n and len(pieces) <= self.most_pieces(n, self.room))
        return self.read_in(next(fitting), pieces)

    def read_in(self, size: int, pieces: Sequence[tuple[int, np.ndarray, bool]]) -> dict:
        """Read pieces of prompts by the program for `size` tokens, and draw the next token in slots whose prompt ends, as
        `read` does."""
        packed, ends = self.packed(size, pieces, self.room), [slot for slot, _, is_end in pieces if is_end]
        self.arrays["pools"], logits = read(self.structure, self.parameters, self.arrays["pools"], *packed)
        return self.draw(logits, ends)

    def most_pieces(self, size: int, room: int) -> int:
        """Return the largest number of pieces of prompts that a read of `size` tokens takes: one for each block of tokens.

        It is at least FEWEST_PIECES, and at most the number of slots of pools with this room. room: the tokens of a request for
        which a slot has room.
        """
        return min(max(FEWEST_PIECES, size // self.block), self.capacity_with(room))

    def packed(self, size: int, pieces: Sequence[tuple[int, np.ndarray, bool]], room: int) -> tuple[np.ndarray, ...]:
        """Return (the tokens, the slots, the boundaries) as the program `read` takes them, for pieces of prompts in pools with
        this room."""
        tokens, slots = np.zeros(size, np.int32), np.full(self.most_pieces(size, room), -1, np.int32)
        cuts = np.zeros(len(slots) + 1, np.int32)
        for n, (slot, piece, _) in enumerate(pieces):
            slots[n] = slot
            cuts[n + 1 :] = cuts[n] + len(piece)
            tokens[cuts[n] : cuts[n + 1]] = piece
        return tokens, slots, cuts

    def write(self, slots: Sequence[int]) -> dict:
        """Read the last token of each request in `slots`, and draw the next. Return the results of `Slots.draw`."""
        pools, token = self.arrays["pools"], self.arrays["token"]
        self.arrays["pools"], logits = write(self.structure, self.parameters, pools, token, self.active(slots))
        return self.draw(logits, slots)

    def draw(self, logits: Array, slots: Sequence[int]) -> dict:
        """Draw the next token in `slots`, from logits that may hold those of other slots too. Return the arrays [C] of the
        program `draw`, by name."""
        draws = max((self.draws_in[slot] for slot in slots), default=Draws.LIKELIEST)
        others, found = draw(draws, without_pools(self.arrays), logits, self.active(slots))
        self.arrays |= others
        return found

    def active(self, slots: Sequence[int]) -> Bool[np.ndarray, "C"]:
        """Return a mask [C] of these slots."""
        active = np.zeros(self.capacity, bool)
        active[list(slots)] = True
        return active

    def resize(self, room: int, slots: Sequence[int]):
        """Move the requests in `slots` to the first slots, in order, of pools with another room."""
        sources = np.full(self.capacity_with(room), -1, np.int32)
        sources[: len(slots)] = slots
        self.draws_in = {new: self.draws_in[slot] for new, slot in enumerate(slots)}
        self.arrays = resize(self.structure, room, self.parameters, self.arrays, sources)
        self.room = room

    def drop(self):
        """Drop the arrays, with the states of all requests."""
        self.arrays, self.room = {}, self.room_for(1)

    def store_bytes(self, every: int) -> int:
        """Return the bytes of one slot of a store of prefixes. every: the tokens of a block."""
        return nbytes(self.store_shapes(1, every))

    def store_shapes(self, blocks: int, every: int) -> PrefixStore:
        """Return a store of prefixes with shapes in place of arrays. blocks: its slots. every: the tokens of a block."""
        return jax.eval_shape(lambda: PrefixStore(self.model.empty_states, blocks, every, self.max_length))

    def store(self, blocks: int, every: int) -> PrefixStore:
        """Return an empty store of prefixes of the model, on the model's devices. blocks: its slots. every: the tokens of a
        block."""
        store = PrefixStore(self.model.empty_states, blocks, every, self.max_length)
        placed = states_on_mesh(store.structure.unflatten(store.leaves), first_array(self.model))
        return store.with_leaves(jax.tree.leaves(placed))

"""Define `PrefixCache`, which finds the state behind the longest stored prefix of a request, and `PrefixStore`, which holds the
states of whole models behind prefixes, with pages of their keys and values."""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from glax._src.core.bind import check_array, check_integers, checked_size, known_values
from glax._src.core.recurrence import to_int32
from glax._src.serving.state_pool import check_slot_values, in_bounds, put, take


@dataclasses.dataclass(eq=False)
class Block:
    """Represent a block of tokens that follows its parent's: the slot of the state after it, and the blocks that follow it.

    tokens: the block's own, int64 as bytes. followers: {the tokens of a block that follows: the block}. references: the number
    of prefixes in use that end here. last_use: the time of the last use, a count of uses in the cache. is_queued: whether the
    block is in the heap of blocks that may be dropped. The root has slot -1. A block that was dropped has no parent.
    """

    slot: int
    parent: "Block | None"
    tokens: bytes = b""
    followers: dict[bytes, "Block"] = dataclasses.field(default_factory=dict)
    references: int = 0
    last_use: int = 0
    is_queued: bool = False


@dataclasses.dataclass(eq=False)
class Prefix:
    """Hold the stored blocks with which a request begins: their number of tokens, and the slot of the state after each.

    `PrefixCache.match` returns it, and `insert` extends it. length: the tokens of the blocks. slots: one for each block; the
    last is the one to read, `slot`, which is -1 without blocks. block: the last block in the tree, which users leave alone.
    The blocks stay stored until the prefix is released.

    >>> prefix = glax.serving.PrefixCache(every=64, slots=range(4)).match([1, 2, 3])
    >>> prefix.length, prefix.slots, prefix.slot
    (0, [], -1)
    """

    length: int
    slots: list[int]
    block: Block | None

    @property
    def slot(self) -> int:
        """Return the slot of the state after the prefix, -1 if nothing of the request is stored."""
        return self.slots[-1] if self.slots else -1


class PrefixCache:
    """Find the states behind stored prefixes of requests: a tree of blocks of tokens, with a slot for the state after each.

    The cache holds numbers of slots and no states. The caller stores the states: in a state pool, where `prefill_into` writes
    them with states_every and state_slots, or in a `PrefixStore`. Tokens are compared one by one, so that no request can reach
    the state after other tokens.

    A request takes four calls: `match` before its prompt is read; `reserve` for the slots of its further blocks; `insert`
    after the call that writes these states; and `release` at its end. The blocks of a prefix stay stored until it is released.
    Of all other blocks, `reserve` drops the least recently used that no stored block follows.

    A state that was matched is read and never written (copy on write): pass its slot as slots, and the request's own as
    write_slots.

    every: the tokens of a block, as states_every.
    slots: the numbers that the cache may hand out. No request may own them.
    slot_bytes: the bytes of one slot in all layers. budget: the most bytes of stored and reserved slots, which needs slot_bytes;
        no limit but the number of slots if None.

    len(cache) is the number of slots that are stored or reserved. Raises TypeError or ValueError, which names the argument.

    >>> cache = glax.serving.PrefixCache(every=64, slots=range(8, 16))
    >>> prompt = list(range(150))
    >>> prefix, slots = cache.match(prompt), cache.reserve(2)
    >>> cache.insert(prefix, prompt[:128], slots)
    >>> cache.match(prompt).length
    128
    """

    def __init__(self, every: int, slots: Iterable[int], *, slot_bytes: int = 0, budget: int | None = None):
        self.every = checked_size("every", every, 1)
        self.free = [checked_size("slots", slot, 0) for slot in slots][::-1]
        if len(set(self.free)) < len(self.free):
            raise ValueError(f"slots must not repeat, got {self.free[::-1]}")
        self.slot_bytes = checked_size("slot_bytes", slot_bytes, 0)
        if budget is not None:
            if not slot_bytes:
                raise ValueError("budget needs slot_bytes, the bytes of one slot, got 0")
            most = checked_size("budget", budget, 0) // slot_bytes
            self.free = self.free[max(len(self.free) - most, 0) :]
        self.capacity = len(self.free)
        self.root = Block(-1, None)
        self.clock, self.reserved = itertools.count(1), set[int]()
        self.droppable: list[tuple[int, Block]] = []  # a heap by last use, with each block once

    def __len__(self) -> int:
        """Return the number of slots that are stored or reserved."""
        return self.capacity - len(self.free)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slots that are stored or reserved."""
        return len(self) * self.slot_bytes

    def match(self, tokens: Sequence[int] | np.ndarray) -> Prefix:
        """Return the longest stored prefix of the tokens that leaves at least one of them to read.

        Its blocks stay stored until `release`. Raises TypeError for tokens that are no sequence of integers, and ValueError for
        those below 0.
        """
        block, slots = self.root, []
        for key in self.blocks(tokens, len(tokens) - 1):
            if (follower := block.followers.get(key)) is None:
                break
            block = follower
            slots.append(block.slot)
        self.add_reference(block)
        return Prefix(len(slots) * self.every, slots, block)

    def reserve(self, count: int) -> list[int]:
        """Return `count` slots: one for each block of a request that is to be read next, to hold the state after that block.

        If too few slots are free, the least recently used blocks that no prefix holds are dropped. If there are still too few,
        the last entries are -1. Reserved slots belong to the caller until `insert` or `give_back`.
        Raises TypeError or ValueError unless count is an integer of at least 0.
        """
        found = []
        for _ in range(checked_size("count", count, 0)):
            if not self.free:
                self.drop_one()
            found.append(self.free.pop() if self.free else -1)
        self.reserved.update(slot for slot in found if slot >= 0)
        return found

    def insert(self, prefix: Prefix, tokens: Sequence[int] | np.ndarray, slots: Sequence[int]):
        """Store blocks that follow a prefix, and extend the prefix by them. Their states are in `slots`, or about to be written.

        tokens: those after the prefix, a whole block for each slot. slots: from `reserve`; blocks from the first -1 on are not
        stored. Where another request has stored the same block since, the cache takes the slot back. Raises ValueError for other
        numbers of tokens, for slots that are not reserved, and for a prefix that was released.
        """
        block = self.block_of(prefix)
        keys = list(self.blocks(tokens, len(tokens)))
        if len(keys) != len(slots) or len(tokens) % self.every:
            raise ValueError(
                f"tokens must be {len(slots)} blocks of {self.every}, one for each slot, got {len(tokens)}"
            )
        self.check_reserved(slots)
        for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if slot < 0:
                self.give_back(slots[i:])
                break
            if (follower := block.followers.get(key)) is None:
                follower = block.followers[key] = Block(slot, block, key)
                self.reserved.remove(slot)
            else:
                self.give_back([slot])
            block = follower
            prefix.slots.append(block.slot)
        self.add_reference(block)
        self.remove_reference(self.block_of(prefix))
        prefix.block, prefix.length = block, len(prefix.slots) * self.every

    def give_back(self, slots: Sequence[int]):
        """Give reserved slots back that no state was written to, such as those of a call that failed. -1 is no slot.

        Raises ValueError for slots that are not reserved.
        """
        self.check_reserved(slots)
        for slot in slots:
            if slot >= 0:
                self.reserved.remove(slot)
                self.free.append(slot)

    def release(self, prefix: Prefix):
        """End the use of a prefix. `reserve` may drop its blocks from then on, unless another prefix holds them.

        Raises ValueError if it was released before.
        """
        self.remove_reference(self.block_of(prefix))
        prefix.block = None

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def check_reserved(self, slots: Sequence[int]):
        """Raise ValueError unless the slots are reserved and none repeats. Slots of -1 pass."""
        taken = [slot for slot in slots if slot >= 0]
        if wrong := [slot for i, slot in enumerate(taken) if slot not in self.reserved or slot in taken[:i]]:
            raise ValueError(f"slots must be reserved and stand once, got {wrong[0]}: pass those that reserve returned")

    def blocks(self, tokens: Sequence[int] | np.ndarray, most: int) -> Iterable[bytes]:
        """Yield the whole blocks of `every` tokens among the first `most` tokens, each as the bytes of its tokens in int64.

        Raises TypeError or ValueError for tokens that are no sequence of integers of at least 0.
        """
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"tokens must be a sequence of integers, got {array.dtype} of shape {array.shape}")
        array = array.astype(np.int64)
        if (array < 0).any():
            raise ValueError(f"tokens must be from 0 on, got {array.min()}")
        return (array[end - self.every : end].tobytes() for end in range(self.every, most + 1, self.every))

    def block_of(self, prefix: Prefix) -> Block:
        """Return the last block of a prefix. Raises ValueError if the prefix was released."""
        if prefix.block is None:
            raise ValueError("prefix must be in use, got one that was released")
        return prefix.block

    def add_reference(self, block: Block):
        """Add 1 to the references of the last block of a prefix, and `touch` the block."""
        block.references += 1
        self.touch(block)

    def touch(self, block: Block | None):
        """Set the last use of the block and of all blocks before it to now. Nothing happens for None."""
        while block is not None:
            block.last_use = next(self.clock)
            block = block.parent

    def remove_reference(self, block: Block):
        """Subtract 1 from the references of `block`, the last block of a prefix whose use ends. References of the blocks before
        it do not change.

        A block without references and without blocks behind it joins the queue of those that are dropped when room is needed.
        """
        block.references -= 1
        self.queue_if_droppable(block)

    def queue_if_droppable(self, block: Block):
        """Queue a block that may be dropped: it has a slot, no references and no followers."""
        if not block.is_queued and block.parent is not None and not block.references and not block.followers:
            block.is_queued = True
            heapq.heappush(self.droppable, (block.last_use, block))

    def drop_one(self):
        """Drop the least recently used block without references and without blocks behind it, and free its slot.

        Nothing happens if there is none.
        """
        while self.droppable:
            last_use, block = heapq.heappop(self.droppable)
            block.is_queued = False
            parent = block.parent
            if last_use != block.last_use or parent is None or block.references or block.followers:
                self.queue_if_droppable(block)  # it was used since: its place in the heap is another
                continue
            block.parent = None
            del parent.followers[block.tokens]
            self.free.append(block.slot)
            self.queue_if_droppable(parent)
            return


@jax.tree_util.register_pytree_with_keys_class
class PrefixStore:
    """Hold what models have read of stored prefixes. One slot, for one block of tokens, has

        the states after the block, and one page: the keys and values of its own tokens

    A `PrefixCache` with as many slots finds the slots of a request. Arrays whose second axis grows with max_length, as the keys
    and values of softmax attention do, are stored in pages; of all other arrays, a slot has one row. The store is a tree of
    arrays that passes through jit, and one that is donated is updated in place. No method changes the store that it is called on.

    "Pools" are the model's states of several requests, with one row for each.

    initial_states: (batch, max_length) -> the pools, such as `CausalLM.initial_states`.
    slots: the number of blocks that the store has room for.
    every: the tokens of a block, as in `PrefixCache`.
    max_length: the most tokens of a request in the pools.

    Raises TypeError or ValueError for sizes below 1, and ValueError for arrays that grow along another axis than the second.

    >>> store = glax.serving.PrefixStore(model.initial_states, slots=4, every=64, max_length=512)
    >>> pools = store.load(model.initial_states(2, 512), jnp.array([1]), jnp.array([[-1, -1]]))
    >>> store = store.save(pools, jnp.array([1]), jnp.array([3]), jnp.array([64]))
    """

    def __init__(self, initial_states: Callable[[int, int], Any], slots: int, every: int, max_length: int):
        slots, self.every = checked_size("slots", slots, 1), checked_size("every", every, 1)
        one, longer = (jax.eval_shape(lambda n=n: initial_states(1, n)) for n in (max_length, max_length + every))
        self.leaves, paged = [], []
        for x, y in zip(*map(jax.tree.leaves, (one, longer)), strict=True):
            paged.append(x.shape != y.shape)
            if paged[-1] and (x.shape[1] != max_length or x.shape[:1] + x.shape[2:] != y.shape[:1] + y.shape[2:]):
                raise ValueError(
                    f"initial_states must return arrays whose second axis alone grows with max_length={max_length}, got "
                    f"shape {x.shape}"
                )
            shape = (every, *x.shape[2:]) if paged[-1] else x.shape[1:]
            self.leaves.append(jnp.zeros((slots, *shape), x.dtype))
        self.paged, self.structure = tuple(paged), jax.tree.structure(one)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot, as `PrefixCache` takes them."""
        return sum(x.nbytes // x.shape[0] for x in self.leaves)

    def save(self, pools, rows: Int[Array, "N"], slots: Int[Array, "N"], ends: Int[Array, "N"]) -> "PrefixStore":
        """Return the store with slot slots[n] written: the states in row rows[n] of the pools, which has read ends[n] tokens,
        and the keys and values of the last `every` of these tokens.

        pools: a tree as the store's argument `initial_states` returns it. rows, slots, ends: [N] integers.
        -1 in rows or slots stores nothing. An end is a multiple of `every`, and at most the tokens that the pools have room for.
        Raises ValueError for other known ends, for known rows and slots out of range, and for known slots that repeat. Traced
        values that are out of range store nothing; traced slots that repeat are undefined.
        """
        check_requests(rows=(rows, "N"), slots=(slots, "N"), ends=(ends, "N"))
        leaves, batch, longest = self.checked(pools)
        check_slot_values(rows, batch, "pools", "rows", may_repeat=True)
        check_slot_values(slots, self.capacity, "the store")
        self.check_ends(rows, slots, ends, longest)
        ends = to_int32(ends)
        (rows, has_row), (slots, has_slot) = in_bounds(rows, batch), in_bounds(slots, self.capacity)
        is_stored = has_row & has_slot & (ends >= self.every) & (ends % self.every == 0)
        if longest is not None:
            is_stored &= ends <= longest
        targets = jnp.where(is_stored, slots, self.capacity)
        found = []
        for x, pool, paged in zip(self.leaves, leaves, self.paged, strict=True):
            if paged:
                at = jnp.arange(self.every, dtype=jnp.int32) + (ends - self.every)[:, None]
                new = pool.at[rows[:, None], at].get(mode="fill", fill_value=0)
            else:
                new = take(pool, rows)
            found.append(put(x, targets, new))
        return self.with_leaves(found)

    def load(self, pools, rows: Int[Array, "N"], slots: Int[Array, "N J"]):
        """Return the pools with the prefixes of N requests in `rows`, as if the requests had read these tokens.

        pools: a tree as the store's argument `initial_states` returns it. rows: [N] integers, the row of each request; -1 for
        none. slots: [N, J] integers, the slots of each request's blocks in order, as in `Prefix`, followed by -1. A request
        without a slot, or with row -1, changes nothing.

        Raises ValueError for known rows and slots out of range, for known rows that repeat, for a known -1 before a slot, and
        for pools without room for the tokens of the longest prefix, which is J blocks if slots are traced. A traced slot out of
        range ends the prefix, as -1 does.
        """
        check_requests(rows=(rows, "N"), slots=(slots, "N J"))
        leaves, batch, longest = self.checked(pools)
        check_slot_values(rows, batch, "pools", "rows")
        check_slot_values(slots, self.capacity, "the store", may_repeat=True)
        blocks, known = slots.shape[1], known_values(slots)
        if known is not None:
            if (wrong := np.argwhere((known[:, :-1] < 0) & (known[:, 1:] >= 0))).size:
                n, j = wrong[0]
                raise ValueError(f"slots must have -1 behind a request's blocks alone, got -1 before {known[n, j + 1]}")
            blocks = int((known >= 0).sum(1).max(initial=0))
        if longest is not None and blocks * self.every > longest:
            raise ValueError(
                f"pools must have {blocks * self.every} rows of keys and values, {blocks} blocks of {self.every} tokens as "
                f"slots say, got {longest}: pass larger pools, or fewer slots"
            )
        slots, is_used = in_bounds(slots, self.capacity)
        counts = jnp.cumprod(is_used, 1, dtype=jnp.int32).sum(1)
        N, J = slots.shape
        last = jnp.where(jnp.arange(J, dtype=jnp.int32) == counts[:, None] - 1, slots, 0).sum(1)
        targets, _ = in_bounds(jnp.where(counts > 0, to_int32(rows), -1), batch)
        found = []
        for x, pool, paged in zip(self.leaves, leaves, self.paged, strict=True):
            if not paged:
                found.append(put(pool, targets, take(x, last)))
                continue
            tokens = take(x, slots).reshape(N, J * self.every, *x.shape[2:])
            at = jnp.broadcast_to(jnp.arange(J * self.every, dtype=jnp.int32), tokens.shape[:2])
            at = jnp.where(at < counts[:, None] * self.every, at, pool.shape[1])
            found.append(pool.at[targets[:, None], at].set(tokens, mode="drop"))
        return self.structure.unflatten(found)

    @property
    def capacity(self) -> int:
        """Return the number of slots."""
        return self.leaves[0].shape[0]

    def checked(self, pools) -> tuple[list[Array], int, int | None]:
        """Return (the leaves of the pools, their number of rows, the tokens that a row has room for, None without limit).

        Raises ValueError or TypeError unless the store's leaves fit them.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(pools)
        if structure != self.structure:
            raise ValueError(f"pools must be a tree as initial_states returns it, {self.structure}, got {structure}")
        batch = np.shape(leaves[0][1])[0] if np.ndim(leaves[0][1]) else 0
        longest = None
        for (path, pool), x, paged in zip(leaves, self.leaves, self.paged, strict=True):
            name, shape = f"pools{jax.tree_util.keystr(path)}", np.shape(pool)
            check_array(name, pool)
            if len(shape) != x.ndim or (shape[0], *shape[1 + paged :]) != (batch, *x.shape[1 + paged :]):
                wanted = ", ".join(map(str, (batch, *["tokens"] * paged, *x.shape[1 + paged :])))
                raise ValueError(f"{name} must be [{wanted}] as initial_states returns it, got shape {shape}")
            if pool.dtype != x.dtype:
                raise TypeError(f"{name} must be {x.dtype} as initial_states returns it, got {pool.dtype}")
            if paged:
                longest = shape[1] if longest is None else min(longest, shape[1])
        return [jnp.asarray(pool) for _, pool in leaves], batch, longest

    def check_ends(self, rows, slots, ends, longest: int | None):
        """Raise ValueError unless the ends of `save` are multiples of `every`, from `every` to `longest`.

        rows, slots, ends: [N] integers. Ends of requests with -1 in rows or slots pass, and so do all where one of the three is
        traced. longest: the tokens that a row of the pools has room for; None without limit.
        """
        rows, slots, ends = (known_values(x) for x in (rows, slots, ends))
        if rows is None or slots is None or ends is None:
            return
        is_wrong = (ends < self.every) | (ends % self.every != 0)
        if longest is not None:
            is_wrong |= ends > longest
        if (wrong := ends[(rows >= 0) & (slots >= 0) & is_wrong]).size:
            most = "" if longest is None else f" to {longest}, the rows of keys and values"
            raise ValueError(f"ends must be multiples of every={self.every}, from {self.every}{most}, got {wrong[0]}")

    def with_leaves(self, leaves) -> "PrefixStore":
        """Return the store with other arrays as its leaves, in the same order and shapes."""
        return self.tree_unflatten((self.every, self.paged, self.structure), leaves)

    def tree_flatten_with_keys(self):
        leaves = tuple((jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.leaves))
        return leaves, (self.every, self.paged, self.structure)

    @classmethod
    def tree_unflatten(cls, known, leaves) -> "PrefixStore":
        store = object.__new__(cls)
        store.every, store.paged, store.structure = known
        store.leaves = list(leaves)
        return store


def check_requests(**arrays: tuple[Any, str]):
    """Raise TypeError or ValueError unless each array holds integers, and has one entry for each request along its first axis.

    arrays: by name, (the array, its axes as a text such as "N J").
    """
    for name, (x, axes) in arrays.items():
        check_integers(name, x)
        if x.ndim != len(axes.split()):
            raise ValueError(f"{name} must be [{', '.join(axes.split())}], got shape {x.shape}")
    if len({x.shape[0] for x, _ in arrays.values()}) > 1:
        shapes = {name: x.shape for name, (x, _) in arrays.items()}
        raise ValueError(f"{', '.join(arrays)} must have one entry for each request, got shapes {shapes}")

"""Serve many requests by one model: continuous batching, in rounds that each read prompts and write one token of every answer."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import jax
import numpy as np

from glax._src.core.backend import Backend
from glax.models.generation import end_tokens
from glax.models.model import CausalLM, require_whole
from glax.server.request import Event, Finished, QueueFull, Request, Stopped, Token, is_integer
from glax.server.slots import BLOCK, Slots
from glax.serving import Prefix, PrefixCache, PrefixStore

logger = logging.getLogger("glax")
PREFIX_BLOCKS, PREFIX_BYTES = 256, 1 << 30  # the default limits of stored prefixes; on CPUs a quarter of the bytes


@dataclasses.dataclass(eq=False)
class Ticket:
    """Hold a request from its submission to its end, and cancel it. `Scheduler.submit` returns it. Users read its fields, and
    must not set them.

    request: what was asked. prompt: the request's, in int32. receive: its consumer. ends: the tokens that end its answer.
    deadline: the time at which it ends, by time.monotonic(). seed: of its draws. slot: its slot, -1 while it waits.
    length: how many tokens of the prompt and of the answer programs have been called to read.
    cached_tokens: how many of them a stored prefix had. written: the tokens of its answer. prefix: the stored blocks with which
    it begins. saved: how many of its first tokens have states that were copied into blocks; `prefix` holds a block
    a little later, once its program has ended.
    is_cancelled: whether `cancel` was called. has_ended: whether its last event was given.

    >>> scheduler, events = glax.server.Scheduler(model, capacity=2, max_length=64), []
    >>> scheduler.submit(glax.server.Request([1, 2, 3], max_tokens=5), events.append).cancel()
    >>> scheduler.round(), events
    (False, [Finished(reason='cancelled', message='', cached_tokens=0)])
    """

    request: Request
    receive: Callable[[Event], None]
    prompt: np.ndarray
    ends: frozenset[int]
    deadline: float
    seed: int
    slot: int = -1
    length: int = 0
    cached_tokens: int = 0
    written: list[int] = dataclasses.field(default_factory=list)
    prefix: Prefix | None = None
    saved: int = 0
    is_cancelled: bool = False
    has_ended: bool = False

    def cancel(self):
        """End the request in the next round, with "cancelled". Any thread may call it, at any time."""
        self.is_cancelled = True

    @property
    def most_length(self) -> int:
        """Return the largest value of `length`: the tokens of the prompt and of the whole answer, without its last token, which
        is not read."""
        return len(self.prompt) + self.request.max_tokens - 1

    @property
    def next_length(self) -> int:
        """Return the largest value that `length` may have after the next round."""
        return min(max(len(self.prompt), self.length) + 1, self.most_length)

    @property
    def is_reading(self) -> bool:
        return self.length < len(self.prompt)

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens from `begin` to `end` of the prompt followed by the answer."""
        before = len(self.prompt)
        answer = np.array(self.written[max(begin - before, 0) : max(end - before, 0)], np.int32)
        return np.concatenate([self.prompt[begin:end], answer])


@dataclasses.dataclass(frozen=True)
class Called:
    """Hold a request that a called program reads: its slot and length at the call, and the reserved block into which its states
    are saved, -1 for none."""

    ticket: Ticket
    slot: int
    length: int
    block: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """Hold what a scheduler does and has done. `Scheduler.counts` returns it.

    running, waiting, free_slots: the requests that run, those that wait, and how many more may run, now.
    rounds: the rounds since the scheduler was made. The tokens and `finished` are counted since then, too.
    read_tokens, cached_tokens: the tokens of prompts that were read, and those that were not because a stored prefix has them.
    written_tokens: the tokens of answers.
    finished: {the reason of `Finished`: how many requests ended with it}.
    state_bytes, prefix_bytes: the bytes of states, and of stored prefixes, now.

    >>> counts = glax.server.Scheduler(model, capacity=2, max_length=64).counts()
    >>> counts.running, counts.waiting, counts.free_slots
    (0, 0, 2)
    """

    running: int
    waiting: int
    free_slots: int
    rounds: int
    read_tokens: int
    written_tokens: int
    cached_tokens: int
    finished: dict[str, int]
    state_bytes: int
    prefix_bytes: int


class Scheduler:
    """Serve requests by one model. A request's answer does not depend on the other requests.

    capacity:     the most requests that run at a time; each has a slot.
    rows:         the most tokens of prompts that a round reads; 128 on a CPU and 2,048 elsewhere if None. A longer prompt is read
                  in several rounds.
    max_length:   the most tokens of a prompt and its answer together.
    queue:        the most requests that wait.
    state_bytes:  the most bytes of the states of running requests; no limit if None. Where a model has caches of keys and values,
                  all slots have the same room, which grows with the longest of the running requests. With more room in each,
                  state_bytes has place for fewer slots. A waiting request starts only if its slot and those of the running
                  requests fit in state_bytes when each has room for the prompt and max_tokens of the longest of them. When
                  slots grow, the old states and the new ones exist together until the copy ends. state_bytes counts one of
                  them, so memory needs up to twice as much.
    prefix_bytes: the most bytes of stored prefixes; 0 for none, else at least those of one block. If None, those of 256 blocks,
                  or of as many as 1 GiB holds, 256 MiB on a CPU; and none if no prompt has a whole block.
    block:        the tokens of a stored block. Where prefixes are stored, a prompt is read in pieces that end where blocks end.
    ends:         the tokens that end an answer; those of the checkpoint if None.

    A round reads pieces of prompts, and writes one token of every answer whose prompt is read. `start` runs rounds in a thread.
    `submit` adds a request. `stop` ends the thread, and cancels all requests that run or wait. `answers` runs rounds in the
    caller's thread. Rounds run with the default precision of matrix products that JAX has where the scheduler is made.

    Raises ValueError, which names the argument; also if state_bytes or prefix_bytes is too small for one request or one block.

    >>> scheduler = glax.server.Scheduler(model, capacity=2, max_length=64)
    >>> scheduler.answers([glax.server.Request([1, 2, 3], max_tokens=5)])[0].shape
    (5,)
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        capacity: int = 8,
        rows: int | None = None,
        max_length: int = 4096,
        queue: int = 64,
        state_bytes: int | None = None,
        prefix_bytes: int | None = 0,
        block: int = BLOCK,
        ends: Iterable[int] | None = None,
    ):
        rows = default_rows() if rows is None else rows
        sizes = dict(capacity=capacity, rows=rows, max_length=max_length, queue=queue, block=block)
        sizes |= {} if state_bytes is None else dict(state_bytes=state_bytes)
        for name, value in sizes.items():
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if prefix_bytes is not None and (not is_integer(prefix_bytes) or prefix_bytes < 0):
            raise ValueError(f"prefix_bytes must be None or an integer of at least 0, got {prefix_bytes!r}")
        self.model, self.rows, self.max_length, self.queue = model, rows, max_length, queue
        self.block = block
        self.ends = frozenset(end_tokens(model) if ends is None else ends)
        require_whole(model)
        self.slots = Slots(model, capacity, max_length, state_bytes, block)
        # A thread has JAX's options of its own. JAX defines the attribute when it starts.
        self.precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        self.waiting: collections.deque[Ticket] = collections.deque()
        self.num_submitted = self.num_seen = 0  # requests, ever, and when the present round began
        self.running: list[Ticket] = []  # in the order of their admission
        self.totals: collections.Counter[str] = collections.Counter()
        self.finished: collections.Counter[str] = collections.Counter()
        self.num_blocks = blocks_within(prefix_bytes, self.slots, block)
        self.prefixes: PrefixCache | None = None
        self.store: PrefixStore | None = None
        self.make()
        self.is_warm = False  # whether programs are compiled before they are called
        # Of moves from pools to others, by the rooms of both: what ends when the programs of the others are compiled.
        self.prepared: dict[tuple[int, int], concurrent.futures.Future] = {}
        # Of each program whose results are not all handed out: the requests that have not been given theirs, and its arrays.
        self.called: collections.deque[tuple[collections.deque[Called], dict[str, jax.Array]]] = collections.deque()
        # Holds `waiting`, `num_submitted` and `is_stopped`; never held during a round.
        self.changed = threading.Condition()
        self.turn = threading.RLock()  # held for a whole round
        self.is_stopped, self.thread = False, None

    def make(self):
        """Make empty pools, an empty store of prefixes and its tree, where they do not exist: in a new scheduler, and after
        `recover`."""
        self.slots.make()
        if self.num_blocks and self.store is None:
            self.store = self.slots.store(self.num_blocks, self.block)
            slot_bytes = self.slots.store_bytes(self.block)
            self.prefixes = PrefixCache(self.block, range(self.num_blocks), slot_bytes=slot_bytes)

    def warm_up(self):
        """Compile the programs of the present pools before requests come, and call those that read and write, with no request.

        From then on programs of other pools are compiled in threads, and requests that need them wait, while others run on. If
        these programs cannot be compiled, the waiting requests end with "error", and a later one compiles them anew.
        """
        with self.turn, jax.default_matmul_precision(self.precision):
            self.is_warm = True
            self.make()
            self.slots.compile(self.rows, self.store)
            self.slots.call_idle(self.rows)

    # ---- for clients -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, receive: Callable[[Event], None]) -> Ticket:
        """Add a request to those that wait, and return its `Ticket`, which can cancel it.

        receive: is called with each event, a `Token` for each token of the answer and a `Finished` at the end, from the thread of
        the rounds. It must not block; if it raises an exception, the request is cancelled.

        Raises ValueError for a request that cannot be served, QueueFull if too many wait, and Stopped after `stop`.
        """
        return self.submit_together([(request, receive)])[0]

    def submit_together(self, requests: Iterable[tuple[Request, Callable[[Event], None]]]) -> list[Ticket]:
        """Add several requests, or none if one of them cannot be added. requests: pairs (request, receive). Raises the errors
        of `submit`."""
        tickets = [self.ticket(request, receive) for request, receive in requests]
        with self.changed:
            if self.is_stopped:
                raise Stopped("the scheduler is stopped")
            if len(self.waiting) + len(tickets) > self.queue:
                raise QueueFull(
                    f"{len(self.waiting)} requests wait, and no more may than {self.queue}: try again later"
                )
            self.waiting.extend(tickets)
            self.num_submitted += len(tickets)
            self.changed.notify_all()
        return tickets

    def ticket(self, request: Request, receive: Callable[[Event], None]) -> Ticket:
        """Return the ticket of a request, after a check. Raises ValueError for a request that cannot be served."""
        self.check(request)
        ends = self.ends if request.ends is None else frozenset(request.ends)
        deadline = float("inf") if request.deadline is None else time.monotonic() + request.deadline
        seed = secrets.randbits(63) if request.seed is None else int(request.seed)
        return Ticket(request, receive, np.asarray(request.prompt, np.int32), ends, deadline, seed)

    def check(self, request: Request):
        """Raise ValueError, which names the field, for a request that cannot be served."""
        request.check_tokens(self.model.vocabulary)
        count, more = len(request.prompt), request.max_tokens
        if count + more > self.max_length:
            raise ValueError(
                f"prompt and max_tokens must be at most max_length={self.max_length} tokens together, got {count} and {more}"
            )
        if not self.slots.capacity_with(self.slots.room_for(count + more - 1)):
            raise ValueError(
                f"prompt and max_tokens must fit into state_bytes={self.slots.state_bytes}, got {count} and {more} tokens"
            )

    def answers(self, requests: Iterable[Request]) -> list[np.ndarray]:
        """Return the tokens of each request's answer, int32 [tokens]. Rounds run in the calling thread until all answers are
        whole.

        Raises ValueError if one of them cannot be served, and RuntimeError if one ends otherwise than by "stop" or "length".
        """
        requests = list(requests)
        for request in requests:
            self.check(request)
        events = [[] for _ in requests]
        remaining = collections.deque(zip(requests, events, strict=True))
        with self.turn:
            while remaining:
                while remaining and len(self.waiting) < self.queue:
                    request, received = remaining.popleft()
                    self.submit(request, received.append)
                while self.round():
                    pass
        for received in events:
            if (end := received[-1]).reason not in ("stop", "length"):
                raise RuntimeError(f"a request ended with {end.reason!r}: {end.message}")
        return [np.array([event.token for event in received[:-1]], np.int32) for received in events]

    def counts(self) -> Counts:
        """Return what the scheduler does and has done, as `Counts`. It waits for no round."""
        running, prefixes = len(self.running), self.prefixes
        return Counts(
            running=running,
            waiting=len(self.waiting),
            free_slots=max(self.slots.capacity - running, 0),  # a round may be between pools of two sizes
            rounds=self.totals["rounds"],
            read_tokens=self.totals["read_tokens"],
            written_tokens=self.totals["written_tokens"],
            cached_tokens=self.totals["cached_tokens"],
            finished=dict(self.finished),
            state_bytes=self.slots.nbytes,
            prefix_bytes=0 if prefixes is None else prefixes.nbytes,
        )

    def start(self):
        """Run rounds in a thread of their own, which sleeps while there are no requests, until `stop`.

        Raises RuntimeError if `start` was called before.
        """
        if self.thread is not None:
            raise RuntimeError("start must be called once, and the scheduler has a thread")
        self.thread = threading.Thread(target=self.run, name="glax scheduler", daemon=True)
        self.thread.start()

    def stop(self):
        """End every request with "cancelled" after the present round, and take no more: `submit` then raises Stopped.

        It returns when the thread of the rounds has ended.
        """
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()
        if self.thread is None:
            self.end_all()
        elif self.thread is not threading.current_thread():
            self.thread.join()

    def run(self):
        """Run rounds until `stop`. It is the function of the thread."""
        try:
            while not self.is_stopped:
                if not self.round():
                    with self.changed:
                        self.changed.wait_for(lambda: self.is_stopped or self.waiting)
            with self.turn:
                self.settle()
        finally:  # after an exception, too, which Python reports: no client waits for a thread that has ended
            with self.changed:
                self.is_stopped = True
            self.end_all()

    # ---- one round -------------------------------------------------------------------------------------------------------

    def round(self) -> bool:
        """Read pieces of prompts, and write one token of every answer whose prompt is read. Then give consumers the tokens of
        the round before, while the device computes this one.

        Return True, or False if there is nothing to do. An exception of a program is logged, and this method does not raise it.
        The requests that run then end with "error", or the first that waits if none runs, and all states and stored prefixes
        are dropped.
        """
        with self.turn, jax.default_matmul_precision(self.precision):
            self.end_due()
            if not self.running and not self.waiting:
                self.settle()
                return False
            self.totals["rounds"] += 1
            self.num_seen = self.num_submitted
            try:
                self.make()
                self.admit()
                self.grow()
                before = len(self.called)
                self.read_prompts()
                self.write_tokens()
                self.hand_out(len(self.called) - before)
            except Exception as error:  # whatever a compiler or a device raises ends these requests, not the scheduler
                logger.exception("a round failed, and its requests end")
                self.recover(f"{type(error).__name__}: {error}")
            return True

    def all_waiting(self) -> list[Ticket]:
        """Return the requests that wait, in order."""
        with self.changed:
            return [*self.waiting]

    def end_due(self):
        """End requests that were cancelled or are past their deadlines."""
        now = time.monotonic()
        if any(now >= x.deadline for x in self.running):
            self.settle()  # an answer may be whole
        for ticket in (*self.running, *self.all_waiting()):
            if ticket.is_cancelled:
                self.end(ticket, "cancelled")
            elif now >= ticket.deadline:
                self.end(ticket, "timeout", f"its deadline of {ticket.request.deadline} s has passed")

    def admit(self):
        """Give slots to waiting requests, in order, while the memory has room for all running requests at their greatest
        lengths."""
        while self.waiting:
            ticket = self.waiting[0]
            if not ticket.request.max_tokens:
                self.end(ticket, "length")
                continue
            together = [*self.running, ticket]
            if len(together) > self.slots.capacity_with(self.slots.room_for(max(x.most_length for x in together))):
                return
            needed = max(x.next_length for x in together)
            # All slots are taken, and the memory has room for more: the pools are made for longer requests than these.
            is_full = len(self.running) == self.slots.capacity
            if self.running and (is_full or ticket.next_length > self.slots.room):
                if not self.prepare(needed).done():
                    return  # the others run on meanwhile
                if self.end_failed(needed, together):
                    continue
            try:
                own = self.slots.entries(ticket.request, ticket.prompt)
            except Exception as error:  # whatever it is, it comes from this request, and the running ones go on
                logger.exception("a request has no arrays, and ends alone")
                self.end(ticket, "error", f"{type(error).__name__}: {error}")
                continue
            if is_full:
                self.resize(needed)
            with self.changed:
                self.waiting.popleft()
            ticket.slot = min(set(range(self.slots.capacity)) - {x.slot for x in self.running})
            self.running.append(ticket)
            self.slots.admit(ticket.slot, ticket.seed, own)

    def grow(self):
        """Give the pools the room that this round needs, and begin to compile the programs for the room that a later round will
        need.

        An answer without room in the pools waits while these programs are compiled, and others run on.
        """
        while (needed := max((x.next_length for x in self.running), default=0)) > self.slots.room:
            if self.prepare(needed).done():
                if not self.end_failed(needed, self.running):
                    self.resize(needed)
            elif self.fitting():
                break
            elif self.called:
                self.hand_out(0)  # no consumer waits for the compiler
            elif not self.wait_for(needed):
                break
        if needed <= self.slots.room and any(x.most_length > self.slots.room for x in self.running):
            self.prepare(self.slots.room + 1)

    def prepare(self, needed: int) -> concurrent.futures.Future:
        """Begin to compile the programs of pools with the least room for `needed` tokens, and the program that moves requests
        to these pools, unless that was begun before.

        Return a future, which ends when they are compiled.
        """
        move = self.slots.room, self.slots.room_for(needed)
        if move not in self.prepared:
            before = [compiling for (_, room), compiling in self.prepared.items() if room == move[1]]
            begun = self.slots.prepare(move[1], self.rows, self.store, before) if self.is_warm else None
            self.prepared[move] = begun or ended()
        return self.prepared[move]

    def wait_for(self, needed: int) -> bool:
        """Wait for the compilation that `prepare(needed)` has begun, and return True; return False as soon as another request
        comes or has to end."""
        compiling = self.prepare(needed)
        while not compiling.done():
            has_come = self.num_submitted > self.num_seen
            if self.is_stopped or has_come or any(map(is_due, (*self.running, *self.all_waiting()))):
                return False
            concurrent.futures.wait([compiling], 0.02)  # `Ticket.cancel` wakes nobody
        return True

    def end_failed(self, needed: int, tickets: list[Ticket]) -> bool:
        """Return whether the programs of pools with room for `needed` tokens could not be compiled. If so, end the requests in
        `tickets` that need them; a later request compiles them anew.

        These are the requests for which the present pools lack room, or the last one if the pools lack only slots.
        """
        if (error := self.prepare(needed).exception()) is None:
            return False
        held, room = self.slots.room, self.slots.room_for(needed)
        logger.error("programs could not be compiled, and the requests that need them end", exc_info=error)
        del self.prepared[held, room]
        need = [x for x in tickets if self.slots.room_for(x.next_length) == room > held] or tickets[-1:]
        self.hand_out(0)  # one of them may be whole
        for ticket in need:
            self.end(ticket, "error", f"{type(error).__name__}: {error}")
        return True

    def resize(self, needed: int):
        """Move the running requests to pools with the least room for `needed` tokens."""
        self.slots.resize(self.slots.room_for(needed), [x.slot for x in self.running])
        for slot, ticket in enumerate(self.running):
            ticket.slot = slot

    def fitting(self) -> list[Ticket]:
        """Return the running requests for which the pools have room."""
        return [x for x in self.running if x.next_length <= self.slots.room]

    def read_prompts(self):
        """Read pieces of prompts, as many tokens as one packed call takes, and draw the first token of each answer whose prompt
        ends."""
        end_of = dict(self.pieces())
        if not end_of:
            return
        pieces = [(x.slot, x.prompt[x.length : end], end == len(x.prompt)) for x, end in end_of.items()]
        found = self.slots.read(self.rows, pieces)
        self.totals["read_tokens"] += sum(len(piece) for _, piece, _ in pieces)
        for ticket, end in end_of.items():
            ticket.length = end
        self.queue_results(end_of, found)

    def pieces(self) -> Iterator[tuple[Ticket, int]]:
        """Yield (a request whose prompt the round reads, the index of the prompt's token before which its piece ends).

        If another request reads the next block of a prompt in this round, or has read the block in the round before, the prompt
        waits until the block is stored.
        """
        room, count, most_pieces = self.rows, 0, self.slots.most_pieces(self.rows, self.slots.room)
        calls = [call for calls, _ in self.called for call in calls]
        saved = [(x.ticket.prompt, x.length) for x in calls if x.block >= 0]
        blocks = {prompt[:length].tobytes() for prompt, length in saved if length <= len(prompt)}
        for ticket in self.fitting():
            if not ticket.is_reading:
                continue
            if not room or count == most_pieces:
                return
            end = len(ticket.prompt)
            if self.prefixes is not None:
                self.go_on_from_prefix(ticket)
                block_end = (ticket.length // self.block + 1) * self.block
                if block_end < end:
                    block = ticket.prompt[:block_end].tobytes()
                    if block in blocks:
                        continue
                    blocks.add(block)
                end = min(end, block_end)
            end = min(end, ticket.length + room)
            room, count = room - (end - ticket.length), count + 1
            yield ticket, end

    def write_tokens(self):
        """Write one more token of each answer whose prompt is read."""
        ready = [x for x in self.fitting() if not x.is_reading and x.length < x.most_length]
        if ready:
            found = self.slots.write([x.slot for x in ready])
            for ticket in ready:
                ticket.length += 1
            self.queue_results(ready, found)

    def queue_results(self, tickets: Collection[Ticket], found: dict):
        """Queue the results `found` of a program in `called`, from which `hand_out` takes them. Save the states behind whole
        blocks of tokens that the program has read, and queue the blocks with the results.

        tickets: the requests whose tokens the program has read. found: the result of `glax.server.slots.draw`, arrays by name.
        """
        if all(x.request.logprobs is None for x in tickets):
            found = {name: found[name] for name in ("token", "is_sound")}
        for x in found.values():
            x.copy_to_host_async()
        calls = collections.deque(Called(x, x.slot, x.length, self.save_block(x)) for x in tickets)
        self.called.append((calls, found))

    def hand_out(self, remaining: int):
        """Take the results of all programs but the last `remaining`, and give their tokens to consumers. Results that are left
        after an exception are taken at the next call."""
        while len(self.called) > remaining:
            calls, found = self.called[0]
            values = jax.device_get(found) if calls else {}
            while calls:  # a consumer that stops the scheduler empties it
                self.take(calls.popleft(), values)
            self.called.popleft()

    def settle(self):
        """Wait for all called programs, and give their tokens to consumers. If a program failed, end the requests that run."""
        try:
            self.hand_out(0)
        except Exception as error:  # as in `round`
            logger.exception("a program failed, and its requests end")
            self.recover(f"{type(error).__name__}: {error}")

    def take(self, call: Called, values: dict[str, np.ndarray]):
        """Give the next token to the consumer of a request whose prompt is read, and end the request if it is done. values: the
        results of the program by name."""
        ticket = call.ticket
        is_sound = values["is_sound"][call.slot]
        self.store_block(call, is_sound)
        if ticket.has_ended:  # in the round between, or because another's consumer has stopped the scheduler
            return
        if not is_sound:
            self.end(ticket, "error", "the model's logits are not finite")
            return
        if call.length < len(ticket.prompt):
            return
        token = int(values["token"][call.slot])
        ticket.written.append(token)
        self.totals["written_tokens"] += 1
        self.tell(ticket, event_of(token, values, call.slot, ticket.request.logprobs))
        if token in ticket.ends:
            self.end(ticket, "stop")
        elif len(ticket.written) == ticket.request.max_tokens:
            self.end(ticket, "length")

    def forget(self):
        """Drop the results of programs that are not taken yet, and give back the blocks reserved for them. All their requests
        have ended."""
        for calls, _ in self.called:
            while calls:
                self.store_block(calls.popleft(), False)

    # ---- prefixes --------------------------------------------------------------------------------------------------------

    def go_on_from_prefix(self, ticket: Ticket):
        """Take a hold of the longest stored prefix of the prompt, unless the request holds one as long.

        If the prefix is longer than what has been read, load its states into the slot.
        """
        if self.prefixes is None or self.store is None or ticket.length % self.block:
            return
        found = self.prefixes.match(ticket.prompt)
        if ticket.prefix is not None and found.length <= ticket.prefix.length:
            self.prefixes.release(found)
            return
        self.release(ticket)
        ticket.prefix, ticket.saved = found, found.length
        if found.length > ticket.length:
            self.slots.load(self.store, ticket.slot, found.slots)
            self.totals["cached_tokens"] += found.length - ticket.length
            ticket.cached_tokens += found.length - ticket.length
            ticket.length = found.length

    def save_block(self, ticket: Ticket) -> int:
        """Save the states of a request that has read a whole block, if those of the blocks before are saved and the store has
        room. Return the block's slot in the store, which is reserved, or -1."""
        is_next = ticket.prefix is not None and ticket.length - self.block == ticket.saved
        if self.prefixes is None or self.store is None or not is_next:
            return -1
        (block,) = self.prefixes.reserve(1)
        if block >= 0:
            self.store, ticket.saved = self.slots.save(self.store, ticket.slot, block, ticket.length), ticket.length
        return block

    def store_block(self, call: Called, is_sound: bool):
        """Make a saved block available to requests; if not `is_sound`, give its slot in the store back."""
        ticket, begin = call.ticket, call.length - self.block
        if self.prefixes is None or call.block < 0:
            return
        if is_sound and ticket.prefix is not None and ticket.prefix.length == begin:
            self.prefixes.insert(
                ticket.prefix, ticket.tokens(begin, call.length), [call.block]
            )  # and extend ticket.prefix
        else:
            self.prefixes.give_back([call.block])

    def release(self, ticket: Ticket):
        """End a request's use of its stored prefix, if it has one."""
        if self.prefixes is not None and ticket.prefix is not None:
            self.prefixes.release(ticket.prefix)
        ticket.prefix = None

    # ---- ends ------------------------------------------------------------------------------------------------------------

    def end(self, ticket: Ticket, reason: str, message: str = ""):
        """Remove a request from those that run or wait, and give its consumer the event `Finished` with `reason` and
        `message`."""
        if ticket.has_ended:  # its consumer has stopped the scheduler
            return
        self.release(ticket)
        if ticket.slot >= 0:
            self.running.remove(ticket)
        else:
            with self.changed:
                self.waiting.remove(ticket)
        ticket.has_ended = True
        self.finished[reason] += 1
        self.tell(ticket, Finished(reason, message, ticket.cached_tokens))

    def tell(self, ticket: Ticket, event: Event):
        """Give an event to a request's consumer. If the consumer raises an exception, the request is cancelled."""
        try:
            ticket.receive(event)
        except Exception:  # the consumer is its caller's code, which may raise anything; the other requests go on
            logger.exception("the consumer of a request failed, and the request is cancelled")
            ticket.is_cancelled = True

    def end_all(self):
        """End every request with "cancelled", and drop the results that are left."""
        with self.turn:
            for ticket in (*self.running, *self.all_waiting()):
                self.end(ticket, "cancelled", "the server stops")
            self.forget()

    def recover(self, message: str):
        """End the requests of a failed round with "error" and `message`, and drop all states, because the program may have
        taken arrays that were donated. The next round makes new ones."""
        with contextlib.suppress(Exception):  # what programs found before the one that failed
            self.hand_out(0)
        for ticket in self.running[:] or self.all_waiting()[:1]:
            self.end(ticket, "error", message)
        self.called.clear()
        self.slots.drop()
        self.prefixes = self.store = None


def default_rows() -> int:
    """Return the tokens of prompts that a round reads by default: enough for matrix products to reach their full rate on this
    backend."""
    return 128 if Backend.here() is Backend.CPU else 2048


def blocks_within(prefix_bytes: int | None, slots: Slots, block: int) -> int:
    """Return the number of blocks of prefixes that a scheduler with this prefix_bytes stores. Raises ValueError if it is above
    0 and less than one block."""
    if prefix_bytes == 0 or (prefix_bytes is None and slots.max_length <= block):
        return 0
    own = slots.store_bytes(block)
    if prefix_bytes is None:
        return min(PREFIX_BLOCKS, (PREFIX_BYTES // 4 if Backend.here() is Backend.CPU else PREFIX_BYTES) // own)
    if own > prefix_bytes:
        raise ValueError(f"prefix_bytes must be 0, or at least {own}, the bytes of one block, got {prefix_bytes}")
    return prefix_bytes // own


def is_due(ticket: Ticket) -> bool:
    """Return whether a request was cancelled, or is past its deadline."""
    return ticket.is_cancelled or time.monotonic() >= ticket.deadline


def ended() -> concurrent.futures.Future:
    """Return a future that is done."""
    future = concurrent.futures.Future()
    future.set_result(None)
    return future


def event_of(token: int, values: dict[str, np.ndarray], slot: int, count: int | None) -> Token:
    """Return the event `Token` of the request in a slot. values: the results of the program. count: how many likeliest tokens
    it has; None for no logprobs."""
    if count is None:
        return Token(token)
    likeliest, logprobs = (values[name][slot, :count].tolist() for name in ("likeliest", "logprobs"))
    return Token(token, float(values["logprob"][slot]), tuple(zip(likeliest, logprobs, strict=True)))

"""The scheduler of `glax.server`: every answer is as its request would have it alone, whatever comes and goes beside it."""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import pathlib
import re
import socket
import threading
from concurrent.futures import Future, wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import glax.models
from glax.cli import serve
from glax.models.sampling import Draws
from glax.server.request import Finished, QueueFull, Request, Stopped, Token
from glax.server.scheduler import Scheduler
from glax.server.slots import Slots, draw, nbytes, read, write
from tests.compiling import Compiled

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
LONGEST = 12  # the most tokens of an answer


@functools.cache
def model_of(name: str = "gla") -> glax.models.CausalLM:
    return glax.models.from_pretrained(FIXTURES / name)


def alone(model: glax.models.CausalLM, request: Request, **options) -> list[int]:
    """The answer by `generate`, up to its end token. All greedy calls share programs."""
    tokens = np.asarray(glax.models.generate(model, [list(request.prompt)], LONGEST, **options))[0]
    tokens = tokens[: request.max_tokens].tolist()
    ends = [i for i, token in enumerate(tokens) if token in (request.ends or ())]
    return tokens[: ends[0] + 1] if ends else tokens


class Consumer:
    """Collects the events of one request."""

    def __init__(self, scheduler: Scheduler, request: Request):
        self.request, self.events = request, []
        self.ticket = scheduler.submit(request, self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Token)]

    @property
    def end(self) -> Finished | None:
        assert not any(isinstance(event, Finished) for event in self.events[:-1])
        return self.events[-1] if self.events and isinstance(self.events[-1], Finished) else None


def run(scheduler: Scheduler):
    while scheduler.round():
        pass


def assert_free(scheduler: Scheduler):
    """All slots are free, and no request holds a reference to a stored block."""
    counts = scheduler.counts()
    assert (counts.running, counts.waiting) == (0, 0) and counts.free_slots == scheduler.slots.capacity
    if scheduler.prefixes is not None:
        blocks = [scheduler.prefixes.root]
        while blocks:
            block = blocks.pop()
            assert block.references == 0
            blocks += block.followers.values()
        assert not scheduler.prefixes.reserved


def random_requests(rng, model, count: int, shared: int = 20) -> list[Request]:
    """Requests of which most begin with a part of the same tokens."""
    base = rng.integers(0, model.vocabulary, shared).tolist()
    return [
        Request(
            base[: rng.integers(0, shared + 1)] + rng.integers(0, model.vocabulary, rng.integers(1, 20)).tolist(),
            int(rng.integers(0, LONGEST + 1)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["gla", "bamba", "qwen3_next"])
@pytest.mark.parametrize("blocks", [0, 9])
def test_answers_are_those_of_each_request_alone_whatever_comes_and_goes(name, blocks):
    """Random arrivals and cancels. The bytes suffice for a few stored blocks alone, so that blocks are dropped."""
    model, rng = model_of(name), np.random.default_rng(1)
    prefix_bytes = blocks * Slots(model, 1, 64, None).store_bytes(8)
    scheduler = Scheduler(model, capacity=3, rows=16, max_length=64, block=8, prefix_bytes=prefix_bytes, ends=())
    remaining, consumers, cancelled = random_requests(rng, model, 14), [], set()
    while remaining or scheduler.running or scheduler.waiting:
        while remaining and rng.random() < 0.3:
            consumers.append(Consumer(scheduler, remaining.pop()))
        if consumers and rng.random() < 0.3:
            one = consumers[rng.integers(len(consumers))]
            if one.end is None:
                one.ticket.cancel()
                cancelled.add(one)
        scheduler.round()
    assert cancelled and len(consumers) == 14
    for one in consumers:
        want = alone(model, one.request)
        if one in cancelled and one.end.reason == "cancelled":
            assert one.tokens == want[: len(one.tokens)]
        else:
            assert one.end.reason == "length" and one.tokens == want
    assert_free(scheduler)
    counts = scheduler.counts()
    assert bool(prefix_bytes) == bool(counts.cached_tokens) and counts.prefix_bytes <= prefix_bytes
    assert counts.written_tokens == sum(len(one.tokens) for one in consumers)
    assert sum(counts.finished.values()) == 14


DRAWN = [
    dict(temperature=0.8),
    dict(temperature=1.3, top_k=5),
    dict(temperature=1.0, top_p=0.7),
    dict(temperature=2.0, top_k=9, top_p=0.9, repetition_penalty=1.5),
    dict(repetition_penalty=1.3),
    dict(),
]


@functools.cache
def drawn_requests() -> list[tuple[Request, list[int]]]:
    """Requests with options of all kinds, each with its answer by `generate`."""
    model, rng, found = model_of(), np.random.default_rng(2), []
    base = rng.integers(0, model.vocabulary, 12).tolist()
    for seed, options in enumerate(DRAWN):
        request = Request(base[: 3 * seed] + rng.integers(0, model.vocabulary, 7).tolist(), 9, seed=seed, **options)
        found.append((request, alone(model, request, key=jax.random.key(seed)[None], **options)))
    return found


@given(
    st.lists(
        st.one_of(st.integers(0, len(DRAWN) - 1), st.tuples(st.just("cancel"), st.integers(0, 20)), st.just("round")),
        max_size=40,
    )
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_draws_depend_on_no_neighbour_and_no_slot(actions):
    scheduler, consumers = small_scheduler(prefix_bytes=6000), []
    for action in actions:
        if isinstance(action, int):
            consumers.append((action, Consumer(scheduler, drawn_requests()[action][0])))
        elif isinstance(action, tuple):
            for _, one in consumers[action[1] : action[1] + 1]:
                one.ticket.cancel()
        else:
            scheduler.round()
    run(scheduler)
    for number, one in consumers:
        want = drawn_requests()[number][1]
        assert one.tokens == (want if one.end.reason == "length" else want[: len(one.tokens)])
        assert one.end.reason == "length" or one.ticket.is_cancelled
    assert_free(scheduler)


def small_scheduler(name: str = "gla", **options) -> Scheduler:
    """A scheduler whose sizes all tests share, so that its programs are compiled once for each model."""
    return Scheduler(model_of(name), **dict(capacity=3, rows=16, max_length=64, block=8, ends=()) | options)


def test_one_program_writes_whatever_requests_ask_for():
    scheduler = small_scheduler()
    before = write._cache_size()
    scheduler.answers([request for request, _ in drawn_requests()])
    scheduler.answers([Request([1, 2], 3, logprobs=4, frequency_penalty=1.0)])
    assert write._cache_size() <= before + 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(top_k=5, top_p=0.5, repetition_penalty=1.5), [Draws.LIKELIEST]),
        (dict(temperature=1.0), [Draws.UNLIMITED, Draws.LIKELIEST]),  # the other request is longer
        (dict(temperature=1.0, top_k=5), [Draws.ANY, Draws.LIKELIEST]),
        (dict(temperature=1.0, top_p=0.5), [Draws.ANY, Draws.LIKELIEST]),
        (dict(logprobs=0), [Draws.ANY, Draws.LIKELIEST]),
    ],
    ids=str,
)
def test_a_program_does_no_more_than_the_requests_that_run_ask_for(monkeypatch, options, wanted):
    scheduler, found = small_scheduler(), []
    monkeypatch.setattr("glax.server.slots.draw", lambda draws, *rest: (found.append(draws), draw(draws, *rest))[1])
    scheduler.answers([Request([1, 2, 3], 4, **options), Request([4, 5], 12)])
    assert list(dict.fromkeys(found)) == wanted


def test_a_request_without_a_seed_is_drawn_anew():
    answers = small_scheduler().answers([Request([1, 2, 3], 12, temperature=3.0)] * 4)
    assert len({tuple(answer) for answer in answers}) > 1


@pytest.mark.parametrize("temperature", [1e-37, 1e-45])
def test_a_temperature_next_to_0_takes_the_likeliest_token(temperature):
    """Logits divided by it may be infinite, and infinite logits are all equally likely."""
    model = glax.models.from_pretrained(FIXTURES / "gla")
    model.head.kernel[...] *= 1000
    scheduler = Scheduler(model, capacity=3, rows=16, max_length=64, block=8, ends=())
    (found,) = scheduler.answers([Request([1, 2, 3], LONGEST, temperature=temperature, seed=1)])
    assert found.tolist() == alone(model, Request([1, 2, 3], LONGEST))


def test_penalties_of_answers_are_those_of_a_loop_over_tokens():
    """A token loop in NumPy, over the logits of the whole sequence."""
    model, presence, frequency = model_of(), 0.7, 0.4
    request = Request([1, 2, 3, 4], LONGEST, presence_penalty=presence, frequency_penalty=frequency)
    logits_of, want = nnx.jit(lambda model, tokens: model(tokens)), []
    for _ in range(LONGEST):
        tokens = np.zeros((1, 16), np.int32)
        tokens[0, : 4 + len(want)] = [*request.prompt, *want]
        logits = np.asarray(logits_of(model, tokens)[0, 3 + len(want)], np.float64)
        counts = np.bincount(want, minlength=model.vocabulary)
        want.append(int((logits - presence * (counts > 0) - frequency * counts).argmax()))
    (got,) = small_scheduler().answers([request])
    assert got.tolist() == want and want != alone(model, Request(request.prompt, LONGEST))


def test_logprobs_are_the_models_own():
    """Not those behind temperature and penalties, and whatever neighbours ask for."""
    model, scheduler = model_of(), small_scheduler()
    options = dict(temperature=1.5, repetition_penalty=1.2)
    plain = Consumer(scheduler, Request([3, 1, 2], 5))
    one = Consumer(scheduler, Request([1, 2, 3, 4], 7, logprobs=3, seed=5, **options))
    none = Consumer(scheduler, Request([1, 2, 3, 4], 7, logprobs=0, seed=5, **options))
    run(scheduler)
    tokens, logprobs = glax.models.generate(
        model, [[1, 2, 3, 4]], 7, key=jax.random.key(5)[None], log_probs=True, **options
    )
    assert one.tokens == none.tokens == np.asarray(tokens)[0].tolist()
    np.testing.assert_allclose([x.logprob for x in one.events[:-1]], np.asarray(logprobs)[0], rtol=1e-5)
    assert all(x.logprob is None and not x.likeliest for x in plain.events[:-1])
    assert all(x.logprob is not None and not x.likeliest for x in none.events[:-1])
    whole = np.asarray(jax.nn.log_softmax(model(jnp.array([[1, 2, 3, 4, *one.tokens]]))))[0, 3:]
    for x, row in zip(one.events[:-1], whole, strict=False):
        order = np.argsort(-row, kind="stable")[:3]
        assert [token for token, _ in x.likeliest] == order.tolist()
        np.testing.assert_allclose([p for _, p in x.likeliest], row[order], rtol=1e-4)


def test_end_tokens_end_answers():
    model = model_of()
    want = alone(model, Request([5, 6, 7], LONGEST))
    assert len({*want[:3]}) == 3
    scheduler = small_scheduler(ends=[want[2]])
    consumers = [
        Consumer(scheduler, Request([5, 6, 7], LONGEST)),
        Consumer(scheduler, Request([5, 6, 7], LONGEST, ends=frozenset())),
        Consumer(scheduler, Request([5, 6, 7], LONGEST, ends=frozenset(want[1:2]))),
    ]
    run(scheduler)
    assert [one.tokens for one in consumers] == [want[:3], want, want[:2]]
    assert [one.end.reason for one in consumers] == ["stop", "length", "stop"]
    assert scheduler.counts().finished == dict(stop=2, length=1)


@pytest.mark.parametrize(("name", "first"), [("gla", 0), ("gla", 1), ("bamba", 0), ("bamba", 2), ("qwen3_next", 1)])
def test_a_request_whose_state_is_nan_ends_alone_and_leaves_nothing(name, first):
    """In its slot, before or behind its first token, the next request is right, and no stored prefix holds NaN."""
    model = model_of(name)
    scheduler, rng = small_scheduler(name, prefix_bytes=10**6), np.random.default_rng(3)
    prompts = rng.integers(0, model.vocabulary, (3, 20)).tolist()
    consumers = [Consumer(scheduler, Request(prompt, LONGEST)) for prompt in prompts]
    for _ in range(first + 1):
        scheduler.round()
    slot = consumers[1].ticket.slot

    def poisoned(x):
        return x.at[slot].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    scheduler.slots.arrays["pools"] = jax.tree.map(poisoned, scheduler.slots.arrays["pools"])
    later = [Consumer(scheduler, Request(prompt, LONGEST)) for prompt in prompts]
    run(scheduler)
    end = consumers[1].end
    assert (end.reason, end.message) == ("error", "the model's logits are not finite")
    for one in (consumers[0], consumers[2], *later):
        assert one.end.reason == "length" and one.tokens == alone(model, one.request)
    assert later[0].end.cached_tokens == 16
    assert_free(scheduler)


@pytest.mark.parametrize("program", ["write", "read", "save", "load", "admit"])
def test_an_exception_of_a_round_ends_its_requests_alone(program, monkeypatch):
    """The arrays that were donated are gone, as after a failed program."""
    model, scheduler = model_of(), small_scheduler(prefix_bytes=10**6)
    prompt, whole = [1, 2, 3, 4] * 4, getattr(scheduler.slots, program)
    scheduler.answers([Request(prompt[:9], 1)])
    running = [Consumer(scheduler, Request(prompt, LONGEST)) for _ in range(2)]

    def failing(*arguments):
        for x in jax.tree.leaves((scheduler.slots.arrays, scheduler.store)):
            x.delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(scheduler.slots, program, failing)
    while not any(one.end for one in running):
        scheduler.round()
    monkeypatch.setattr(scheduler.slots, program, whole)
    later = Consumer(scheduler, Request(prompt, LONGEST))
    run(scheduler)
    ended = [one for one in running if one.end.reason == "error"]
    assert ended and all(one.end.message == "RuntimeError: out of memory" for one in ended)
    for one in {later, *running} - {*ended}:
        assert one.end.reason == "length" and one.tokens == alone(model, one.request)
    assert_free(scheduler)


def test_a_request_whose_arrays_cannot_be_made_ends_alone(monkeypatch):
    scheduler = small_scheduler()
    running = Consumer(scheduler, Request([1, 2, 3], LONGEST))
    scheduler.round()
    bad = Consumer(scheduler, Request([4], LONGEST))
    bad.ticket.prompt = np.array([99], np.int32)  # as if it had passed the checks
    later = Consumer(scheduler, Request([5], LONGEST))
    run(scheduler)
    assert bad.end.reason == "error" and "IndexError" in bad.end.message and not bad.tokens
    assert all(one.tokens == alone(model_of(), one.request) for one in (running, later))
    assert_free(scheduler)


def test_a_consumer_may_stop_the_scheduler():
    scheduler = small_scheduler()
    events = []
    scheduler.submit(Request([1, 2, 3], LONGEST), lambda event: (events.append(event), scheduler.stop()))
    other = Consumer(scheduler, Request([1, 2], LONGEST))
    run(scheduler)
    assert [type(event) for event in events] == [Token, Finished] and other.end.reason == "cancelled"
    assert scheduler.counts().finished == dict(cancelled=2)
    assert_free(scheduler)


def test_answers_refuses_before_anything_runs():
    scheduler = small_scheduler()
    with pytest.raises(ValueError, match="prompt must hold tokens from 0 to 31, got 32"):
        scheduler.answers(iter([Request([1], 2), Request([32], 2)]))
    assert_free(scheduler)
    with pytest.raises(RuntimeError, match="a request ended with 'timeout': its deadline of 1e-09 s has passed"):
        scheduler.answers([Request([1], 2, deadline=1e-9)])


def test_failing_pools_end_one_request_after_another(monkeypatch):
    scheduler = small_scheduler()
    waiting = [Consumer(scheduler, Request([1, 2], 3)) for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.slots, "make", lambda: 1 / 0)
        scheduler.round()
        scheduler.round()
    run(scheduler)
    assert [one.end.reason for one in waiting] == ["error", "error", "length", "length"]


def test_a_consumer_that_fails_is_cancelled_alone():
    scheduler = small_scheduler()
    other = Consumer(scheduler, Request([1, 2, 3], LONGEST))
    scheduler.submit(Request([1, 2, 3], LONGEST), lambda event: 1 / 0)
    run(scheduler)
    assert other.tokens == alone(model_of(), other.request)
    assert scheduler.counts().finished == dict(length=1, cancelled=1)
    assert_free(scheduler)


def test_deadlines_end_requests_that_wait_and_that_run(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("glax.server.scheduler.time.monotonic", lambda: clock[0])
    scheduler = small_scheduler(capacity=1)
    one, two, three = (Consumer(scheduler, Request([1, 2, 3], LONGEST, deadline=x)) for x in (5.0, 4.0, None))
    scheduler.round()
    clock[0] = 4.0
    scheduler.round()
    assert one.end is None and two.end.reason == "timeout" and not two.tokens
    clock[0] = 5.5
    run(scheduler)
    assert one.end == Finished("timeout", "its deadline of 5.0 s has passed") and len(one.tokens) == 3
    assert three.end.reason == "length"
    assert_free(scheduler)


def test_a_full_queue_refuses():
    scheduler = small_scheduler(queue=2)
    for _ in range(2):
        Consumer(scheduler, Request([1], 1))
    with pytest.raises(QueueFull, match="2 requests wait, and no more may"):
        Consumer(scheduler, Request([1], 1))
    scheduler.round()
    Consumer(scheduler, Request([1], 1))
    scheduler.stop()
    assert_free(scheduler)
    with pytest.raises(Stopped, match="the scheduler is stopped"):
        Consumer(scheduler, Request([1], 1))


def test_a_thread_serves_clients_of_other_threads_and_stops():
    """Requests, cancels and counts from several threads."""
    scheduler, requests = small_scheduler(prefix_bytes=6000), drawn_requests()
    scheduler.start()
    with pytest.raises(RuntimeError, match="start must be called once"):
        scheduler.start()

    def client(number: int):
        for i in range(6):
            request, want = requests[(number + i) % len(requests)]
            events, ended = [], threading.Event()

            def receive(event, events=events, ended=ended):
                events.append(event)
                if isinstance(event, Finished):
                    ended.set()

            ticket = scheduler.submit(request, receive)
            if (number + i) % 3 == 0:
                ticket.cancel()
            scheduler.counts()
            assert ended.wait(120)
            tokens = [event.token for event in events[:-1]]
            assert tokens == want[: len(tokens)] and (events[-1].reason != "length" or tokens == want)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(client, range(4)))
    assert_free(scheduler)
    last = Consumer(scheduler, Request([1, 2], 60))
    scheduler.stop()
    assert last.end is not None and not scheduler.thread.is_alive()
    assert sum(scheduler.counts().finished.values()) == 25


def test_a_thread_that_fails_is_reported_once_and_ends_all_requests(monkeypatch, caplog):
    scheduler, reports = small_scheduler(), []
    monkeypatch.setattr(threading, "excepthook", reports.append)
    monkeypatch.setattr(scheduler, "end_due", lambda: 1 / 0)
    waiting = [Consumer(scheduler, Request([1, 2], 3)) for _ in range(2)]
    scheduler.start()
    scheduler.thread.join(60)
    assert [report.exc_type for report in reports] == [ZeroDivisionError] and not caplog.records
    assert [one.end for one in waiting] == [Finished("cancelled", "the server stops")] * 2
    with pytest.raises(Stopped):
        Consumer(scheduler, Request([1], 1))


# ---- memory --------------------------------------------------------------------------------------------------------------


def test_memory_is_given_by_need_and_to_all_that_wait(monkeypatch):
    """Caches grow with the longest request, which leaves fewer slots; all answers are right, and no pool exceeds the limit."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    model, rng = model_of("bamba"), np.random.default_rng(4)
    limit = 2 * Slots(model, 1, 64, None).slot_bytes(32)
    scheduler = Scheduler(model, capacity=4, rows=16, max_length=64, state_bytes=limit, ends=())
    assert scheduler.slots.room == 8 and scheduler.slots.capacity == 3
    sizes = [(3, 4), (2, 2), (5, 3), (20, 12), (4, 4), (2, 6), (3, 3), (3, 5), (2, 4), (4, 3), (5, 4), (22, 9), (12, 3)]
    consumers = [
        Consumer(scheduler, Request(rng.integers(0, model.vocabulary, n).tolist(), count)) for n, count in sizes
    ]
    rooms = []
    while scheduler.round():
        rooms += [scheduler.slots.room] * (scheduler.slots.room not in rooms[-1:])
        held = sum(x.nbytes for x in jax.tree.leaves(scheduler.slots.arrays["pools"]))
        assert held == scheduler.counts().state_bytes <= limit
        assert len({x.slot for x in scheduler.running}) == len(scheduler.running) <= scheduler.slots.capacity
    assert rooms == [8, 32, 8, 32]
    assert all(one.tokens == alone(model, one.request) for one in consumers)
    assert_free(scheduler)
    longest = Request([1] * 40, 25)
    with pytest.raises(ValueError, match="at most max_length=64 tokens together, got 40 and 25"):
        scheduler.submit(longest, print)
    small = Scheduler(model, capacity=4, rows=16, max_length=64, state_bytes=limit // 2, ends=())
    with pytest.raises(ValueError, match=f"must fit into state_bytes={limit // 2}, got 40 and 2 tokens"):
        small.submit(Request([1] * 40, 2), print)
    with pytest.raises(ValueError, match=r"state_bytes must be at least \d+, the bytes of one request's states, got 7"):
        Scheduler(model, state_bytes=7)


def test_others_run_on_while_programs_of_more_room_are_compiled(monkeypatch):
    """A waiting request and an answer that need them wait, unless nothing else runs."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    scheduler, compiling = small_scheduler("bamba"), {}
    monkeypatch.setattr(scheduler.slots, "prepare", lambda room, *rest: compiling.setdefault(room, Future()))
    scheduler.warm_up()
    alone_at_first = Consumer(scheduler, Request([*range(20)], 4, deadline=0.1))
    while not alone_at_first.end:
        scheduler.round()
    assert set(compiling) == {32}  # and none for pools that it would not fit
    growing = Consumer(scheduler, Request([3, 4, 5, 6], 9))
    short = Consumer(scheduler, Request([1], 7))
    long, behind = Consumer(scheduler, Request([*range(20)], 4)), Consumer(scheduler, Request([2], 3))
    while not short.end:
        scheduler.round()
    assert growing.ticket.length == scheduler.slots.room == 8 and growing.end is None and set(compiling) == {16, 32}
    assert scheduler.running == [growing.ticket] and not long.events and not behind.events
    compiling[16].set_result(None)
    while not growing.end:
        scheduler.round()
    assert scheduler.slots.room == 16 and long.ticket.slot < 0
    threading.Timer(0.1, compiling[32].set_result, [None]).start()
    scheduler.round()  # nothing else runs, so it waits for the compiler
    assert scheduler.slots.room == 32 and compiling[32].done()
    run(scheduler)
    for one in (growing, short, long, behind):
        assert one.end.reason == "length" and one.tokens == alone(model_of("bamba"), one.request)
    assert_free(scheduler)


@pytest.mark.parametrize("prefix_bytes", [0, 10**6])
def test_no_round_compiles_what_was_prepared(prefix_bytes, monkeypatch):
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    jax.clear_caches()
    scheduler = small_scheduler("bamba", prefix_bytes=prefix_bytes)
    scheduler.warm_up()
    one = Consumer(scheduler, Request([1, 2, 3], LONGEST))
    scheduler.round()
    assert wait(scheduler.prepared.values(), 120).done and set(scheduler.prepared) == {(8, 16)}
    with Compiled() as compiled:
        run(scheduler)
    assert compiled.count == 0 and scheduler.slots.room == 16
    assert one.tokens == alone(model_of("bamba"), one.request)


def test_only_the_move_from_other_pools_is_compiled_again(monkeypatch):
    """It is compiled in a thread, as all programs of these pools were before it."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    jax.clear_caches()
    model = model_of("bamba")
    scheduler = small_scheduler("bamba", capacity=4, state_bytes=2 * Slots(model, 1, 64, None).slot_bytes(32))
    scheduler.warm_up()
    growing = Consumer(scheduler, Request([1, 2, 3], LONGEST))
    run(scheduler)
    long = Consumer(scheduler, Request([*range(20)], LONGEST))
    run(scheduler)
    assert set(scheduler.prepared) == {(8, 16), (16, 32)}
    scheduler.slots.drop()  # as after a round that failed
    again = Consumer(scheduler, Request([*range(20)], 4))
    with Compiled() as compiled:
        scheduler.round()
    assert compiled.count == 1 and wait(scheduler.prepared.values(), 0).done == {*scheduler.prepared.values()}
    run(scheduler)
    assert scheduler.slots.room == 32 and scheduler.slots.capacity == 2
    short = [Consumer(scheduler, Request([n, 1, 2], 5)) for n in range(3)]
    run(scheduler)
    assert set(scheduler.prepared) == {(8, 16), (16, 32), (8, 32), (32, 8)}
    for one in (growing, long, again, *short):
        assert one.end.reason == "length" and one.tokens == alone(model, one.request)
    assert_free(scheduler)


def test_requests_whose_programs_cannot_be_compiled_end_alone(monkeypatch):
    """The others run on, and a later one compiles them anew."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    scheduler, model, message = small_scheduler("bamba"), model_of("bamba"), "RuntimeError: the compiler fails"
    compiled, failing = scheduler.slots.shapes, {16, 32}

    def shapes(room):
        if room in failing:
            raise RuntimeError("the compiler fails")
        return compiled(room)

    monkeypatch.setattr(scheduler.slots, "shapes", shapes)
    scheduler.warm_up()
    other = Consumer(scheduler, Request([1, 2], 7))
    growing = Consumer(scheduler, Request([3, 4, 5, 6], 9))
    long = Consumer(scheduler, Request([*range(20)], 4))
    run(scheduler)
    assert other.end.reason == "length" and other.tokens == alone(model, other.request)
    assert long.end == growing.end == Finished("error", message) and not long.tokens
    assert growing.tokens == alone(model, growing.request)[: len(growing.tokens)] and len(growing.tokens) == 5
    assert_free(scheduler)
    alone_and_long = Consumer(scheduler, Request([*range(20)], 4))  # nothing else runs
    run(scheduler)
    assert alone_and_long.end == Finished("error", message)
    failing.clear()
    later = [Consumer(scheduler, one.request) for one in (growing, long)]
    run(scheduler)
    assert all(one.end.reason == "length" and one.tokens == alone(model, one.request) for one in later)
    assert_free(scheduler)


def test_a_request_that_needs_more_slots_ends_alone_if_these_cannot_be_compiled(monkeypatch):
    """The pools have room for a longer request than any that runs, and so too few slots."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    model = model_of("bamba")
    scheduler = small_scheduler("bamba", capacity=4, state_bytes=2 * Slots(model, 1, 64, None).slot_bytes(32))
    scheduler.warm_up()
    long = Consumer(scheduler, Request([*range(20)], 4))
    run(scheduler)
    assert scheduler.slots.room == 32 and scheduler.slots.capacity == 2
    monkeypatch.setattr("glax.server.slots.start_compiling", lambda lowered: 1 / 0)
    short = [Consumer(scheduler, Request([n, 1, 2], 5)) for n in range(3)]
    while not short[2].end:
        scheduler.round()
        if scheduler.prepared.get((32, 8)):
            wait([scheduler.prepared[32, 8]])
    assert short[2].end == Finished("error", "ZeroDivisionError: division by zero") and not short[0].end
    run(scheduler)
    for one in (long, *short[:2]):
        assert one.end.reason == "length" and one.tokens == alone(model, one.request)
    assert_free(scheduler)


def test_a_request_that_comes_just_before_a_round_waits_for_the_compiler_is_seen(monkeypatch):
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    scheduler, compiling, short = small_scheduler("bamba"), Future(), []
    monkeypatch.setattr(scheduler.slots, "prepare", lambda *arguments: compiling)
    scheduler.warm_up()
    long = Consumer(scheduler, Request([*range(20)], 4))
    with monkeypatch.context() as patch:
        admit = scheduler.admit
        patch.setattr(scheduler, "admit", lambda: (admit(), short.append(Consumer(scheduler, Request([1], 4)))))
        giving_up = threading.Timer(60, compiling.set_result, [None])
        giving_up.start()
        scheduler.round()
    while not short[0].end:
        scheduler.round()
    assert not compiling.done() and not long.events
    giving_up.cancel()
    compiling.set_result(None)
    run(scheduler)
    for one in (long, *short):
        assert one.end.reason == "length" and one.tokens == alone(model_of("bamba"), one.request)
    assert_free(scheduler)


def test_an_answer_whose_end_is_found_late_is_whole_though_its_programs_cannot_be_compiled(monkeypatch):
    """And nobody ends in its place."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    scheduler, model = small_scheduler("bamba"), model_of("bamba")
    failing = Future()
    failing.set_exception(RuntimeError("the compiler fails"))
    monkeypatch.setattr(scheduler.slots, "prepare", lambda *arguments: failing)
    scheduler.warm_up()
    prompt, other = [3, 4, 5, 6], Consumer(scheduler, Request([1], 8))
    want = alone(model, Request(prompt, 5))
    assert want[4] not in want[:4]
    one = Consumer(scheduler, Request(prompt, 9, ends=frozenset(want[4:])))
    run(scheduler)
    assert one.tokens == want and one.end.reason == "stop"
    assert other.tokens == alone(model, other.request) and other.end.reason == "length"
    assert_free(scheduler)


def test_who_waits_for_the_compiler_alone_may_leave_and_does_not_hold_up_others(monkeypatch):
    """Nor does it hold up `Scheduler.stop`."""
    monkeypatch.setattr("glax.server.slots.ROOM", 8)
    scheduler, compiling = small_scheduler("bamba"), {}
    monkeypatch.setattr(scheduler.slots, "prepare", lambda room, *rest: compiling.setdefault(room, Future()))
    scheduler.warm_up()
    ended, received = {name: threading.Event() for name in ["cancelled", "late", "short", "waiting"]}, {}

    def submit(name: str, request: Request):
        received[name] = []
        return scheduler.submit(request, functools.partial(receive, name))

    def receive(name: str, event):
        received[name].append(event)
        if isinstance(event, Finished):
            ended[name].set()

    scheduler.start()
    try:
        ticket = submit("cancelled", Request([*range(20)], 4))
        submit("late", Request([3, 4, 5, 6], 9, deadline=1.0))
        assert ended["late"].wait(60) and received["late"][-1].reason == "timeout"
        submit("waiting", Request([*range(12)], 4))
        assert not ended["cancelled"].is_set()
        ticket.cancel()
        assert ended["cancelled"].wait(60) and received["cancelled"] == [Finished("cancelled")]
        submit("short", short := Request([1], 4))
        assert ended["short"].wait(60) and received["short"][-1].reason == "length"
        assert [event.token for event in received["short"][:-1]] == alone(model_of("bamba"), short)
        stopping = threading.Thread(target=scheduler.stop)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive() and received["waiting"] == [Finished("cancelled", "the server stops")]
        assert set(compiling) >= {16, 32} and not any(future.done() for future in compiling.values())
    finally:
        for future in compiling.values():
            future.set_result(None)
        scheduler.stop()
    assert_free(scheduler)


def test_programs_update_rows_in_place():
    """All arrays are donated. The program that reads copies no states; the one that writes computes with those of all slots."""
    held = Slots(model_of("bamba"), 512, 64, None)
    held.make()
    nothing, active = (np.zeros(16, np.int32), np.full(8, -1, np.int32), np.zeros(9, np.int32)), np.zeros(512, bool)
    pools, token = held.arrays["pools"], held.arrays["token"]
    others = {name: x for name, x in held.arrays.items() if name != "pools"}
    writing = write.lower(held.structure, held.parameters, pools, token, active)
    for lowered, updated in (
        *((draw.lower(draws, others, writing.out_info[1], active), nbytes(others)) for draws in Draws),
        (writing, held.nbytes),
        (read.lower(held.structure, held.parameters, pools, *nothing), held.nbytes),
    ):
        memory = lowered.compile().memory_analysis()
        if memory is None:
            pytest.skip("this backend does not report its memory")
        assert memory.alias_size_in_bytes >= updated
    assert memory.temp_size_in_bytes < held.nbytes / 3  # of the last, which reads


def test_equal_prompts_that_arrive_together_are_read_once():
    scheduler, prompt = small_scheduler("bamba", prefix_bytes=10**6), [1, 2, 3, 4] * 5
    consumers = [Consumer(scheduler, Request(prompt, 5)) for _ in range(3)]
    run(scheduler)
    assert [one.end.cached_tokens for one in consumers] == [0, 16, 16]
    assert scheduler.counts().read_tokens == 20 + 4 + 4
    assert all(one.tokens == alone(model_of("bamba"), one.request) for one in consumers)
    one = consumers[0]
    following = Consumer(scheduler, Request([*prompt, *one.tokens, 7], 5))  # as the next turn of a chat
    run(scheduler)
    assert following.end.cached_tokens == 24 and following.tokens == alone(model_of("bamba"), following.request)
    assert_free(scheduler)


def test_a_request_beyond_the_cache_is_refused_and_one_that_fills_it_is_right():
    model = model_of("gla_hybrid")
    scheduler = Scheduler(model, capacity=2, rows=8, max_length=16, ends=())
    assert scheduler.slots.grows and not small_scheduler().slots.grows
    one = Consumer(scheduler, Request(list(range(1, 13)), 4))
    with pytest.raises(
        ValueError, match="prompt and max_tokens must be at most max_length=16 tokens together, got 12 and 5"
    ):
        Consumer(scheduler, Request(list(range(1, 13)), 5))
    run(scheduler)
    assert one.tokens == alone(model, one.request) and len(one.tokens) == 4


def test_a_program_is_called_before_the_results_of_the_one_before_are_handed_out(monkeypatch):
    scheduler, order = small_scheduler(), []
    for name in ("read", "write"):
        call = getattr(scheduler.slots, name)
        monkeypatch.setattr(scheduler.slots, name, lambda *x, name=name, call=call: (order.append(name), call(*x))[1])
    events = []
    scheduler.submit(Request([1, 2, 3], 4), lambda event: (events.append(event), order.append(len(events))))
    run(scheduler)
    assert order == ["read", "write", "write", 1, 2, "write", 3, 4, 5]
    assert [type(event) for event in events] == [Token] * 4 + [Finished]
    assert scheduler.counts().rounds == 4


@pytest.mark.parametrize("count", [1, 2])
def test_short_answers_are_those_of_generate(count):
    """The only program of an answer of one token is the one that reads its prompt."""
    scheduler = small_scheduler()
    consumers = [Consumer(scheduler, Request([i, 2, 3], count, logprobs=0)) for i in range(5)]
    run(scheduler)
    assert all(one.tokens == alone(model_of(), one.request) and one.end.reason == "length" for one in consumers)
    assert scheduler.counts().written_tokens == 5 * count
    assert_free(scheduler)


def test_an_end_token_found_late_drops_the_step_behind_it():
    """The step that was called meanwhile reads the end token, which completes a block: no prefix holds it, nobody receives its
    token, and the next request in the slot is right."""
    model, prompt, free = model_of(), [5, 6, 7, 1, 2], frozenset()
    want = alone(model, Request(prompt, LONGEST))[:3]
    assert len(set(want)) == 3 and len(prompt) + len(want) == 8
    scheduler = small_scheduler(capacity=1, prefix_bytes=10**6, block=8)
    one = Consumer(scheduler, Request(prompt, LONGEST, ends=frozenset(want[2:]), logprobs=1))
    other = Consumer(scheduler, Request([3, 1], LONGEST, ends=free))
    written, write = [], scheduler.slots.write
    scheduler.slots.write = lambda slots: (written.append(one.ticket.length), write(slots))[1]
    while not one.end:
        scheduler.round()
    assert written == [5, 6, 7] and one.ticket.length == 8
    run(scheduler)
    assert one.tokens == want and one.end.reason == "stop"
    assert all(event.logprob is not None and len(event.likeliest) == 1 for event in one.events[:-1])
    assert other.tokens == alone(model, other.request) and other.end.reason == "length"
    assert scheduler.counts().written_tokens == len(want) + LONGEST
    following = Consumer(scheduler, Request([*prompt, *want, 4], LONGEST, ends=free))
    run(scheduler)
    assert following.end.cached_tokens == 0 and following.tokens == alone(model, following.request)
    assert_free(scheduler)


def test_a_slot_is_given_on_in_the_round_that_cancels_its_request():
    """The step of the cancelled request may still run; its token is nobody's."""
    scheduler = small_scheduler(capacity=1)
    one = Consumer(scheduler, Request([1, 2, 3], LONGEST))
    scheduler.round()
    scheduler.round()
    other = Consumer(scheduler, Request([4, 5], LONGEST))
    one.ticket.cancel()
    scheduler.round()
    assert one.end.reason == "cancelled" and scheduler.running == [other.ticket] and other.ticket.slot == 0
    run(scheduler)
    assert one.tokens == alone(model_of(), one.request)[: len(one.tokens)]
    assert other.tokens == alone(model_of(), other.request)
    assert_free(scheduler)


def test_programs_are_compiled_ahead():
    """One makes the arrays, one admits, one reads, one writes and three draw; no request compiles one."""
    jax.clear_caches()
    loaded, request = model_of(), Request([1, 2, 3] * 10, LONGEST)
    with Compiled() as compiled:
        scheduler = small_scheduler(rows=24)
        scheduler.warm_up()
    assert compiled.count == 7
    with Compiled() as compiled:
        found = scheduler.answers([request])[0].tolist()
        for options in (dict(temperature=1.0), dict(temperature=1.0, top_p=0.5), dict(logprobs=3)):
            scheduler.answers([dataclasses.replace(request, **options)])
    assert compiled.count == 0
    assert found == alone(loaded, request)


def test_what_serve_compiles_while_it_reads_is_what_its_scheduler_calls(tmp_path):
    jax.clear_caches()
    sizes = dict(
        model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16
    )
    model = glax.models.from_config(sizes, rngs=nnx.Rngs(0))
    glax.models.save_pretrained(model, tmp_path)
    own = dict(capacity=3, max_length=256, state_bytes=None, rows=24, queue=4, prefix_bytes=None)
    rest = dict(folder=tmp_path, dtype=None, tensor=1, tokenizer=None, timeout=1.0)
    loaded, _ = serve.loaded(argparse.Namespace(**own, **rest))
    scheduler = Scheduler(loaded, **own)  # compiles what makes the arrays
    with Compiled() as compiled:
        scheduler.warm_up()
    assert compiled.count == 0 and scheduler.store is not None
    request = Request([1, 2, 3] * 10, 8)
    assert scheduler.answers([request])[0].tolist() == alone(model, request)


def test_serve_keeps_what_stays_to_the_end_from_collections(monkeypatch):
    """When it answers, collections look at none of what loading has made."""
    frozen, scheduler = [], small_scheduler()
    listener = argparse.Namespace(signal=0, run=lambda sockets: frozen.append(gc.get_freeze_count()))
    app = argparse.Namespace(scheduler=scheduler, hosts=frozenset(), served=argparse.Namespace(name="one"))
    monkeypatch.setattr(serve, "prepared", lambda *arguments: (app, listener))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            assert serve.serve(None, listening, None) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000 and not scheduler.thread.is_alive()


@pytest.mark.parametrize("later", ["failure", "deadline"])
def test_an_answer_that_a_program_has_completed_is_handed_out(later, monkeypatch):
    """Whatever happens before the round that would hand it out."""
    scheduler, clock = small_scheduler(), [0.0]
    monkeypatch.setattr("glax.server.scheduler.time.monotonic", lambda: clock[0])
    whole = Consumer(scheduler, Request([1, 2, 3], 1, deadline=5.0))
    scheduler.round()
    assert not whole.events
    other = Consumer(scheduler, Request([4, 5], 3))
    if later == "failure":
        monkeypatch.setattr(scheduler.slots, "read", lambda *arguments: 1 / 0)
    else:
        clock[0] = 6.0
    run(scheduler)
    assert whole.end.reason == "length" and whole.tokens == alone(model_of(), whole.request)
    assert other.end.reason == ("error" if later == "failure" else "length")
    assert_free(scheduler)


def test_an_interrupted_round_loses_no_token(monkeypatch):
    """Neither while results are awaited, nor between two requests of one program."""
    scheduler, received = small_scheduler(), []

    def interrupted(event):
        received.append(event)
        if len(received) in (2, 3):
            raise KeyboardInterrupt

    scheduler.submit(Request([1, 2, 3], LONGEST), interrupted)
    other = Consumer(scheduler, Request([4, 5], LONGEST))
    scheduler.round()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jax, "device_get", lambda tree: (_ for _ in ()).throw(KeyboardInterrupt()))
        scheduler.round()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(scheduler)
    run(scheduler)
    tokens = [event.token for event in received if isinstance(event, Token)]
    assert tokens == alone(model_of(), Request([1, 2, 3], LONGEST)) and other.tokens == alone(model_of(), other.request)
    assert_free(scheduler)


def test_requests_share_rounds():
    """More requests than slots, of many lengths, some of which come later."""
    scheduler, lengths, consumers, largest = small_scheduler(), [12, 9, 1, 12, 5, 7, 11, 2, 12], [], 0
    for i, length in enumerate(lengths):
        consumers.append(Consumer(scheduler, Request([i, 1, 2] * (1 + 6 * (i % 3)), length)))
        if i % 4 == 3:
            scheduler.round()
    while scheduler.round():
        largest = max(largest, len(scheduler.running))
    assert largest == 3 and scheduler.counts().rounds < sum(lengths) / 2
    assert all(one.tokens == alone(model_of(), one.request) for one in consumers)
    assert len({tuple(one.tokens) for one in consumers}) == len(consumers)


# ---- arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["capacity", "rows", "max_length", "queue", "block", "state_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_scheduler_of_no_size_is_refused(size, value):
    with pytest.raises(ValueError, match=f"{size} must be an integer of at least 1, got {value}"):
        Scheduler(model_of(), **{size: value})


def test_prefix_bytes_are_checked():
    with pytest.raises(ValueError, match=r"prefix_bytes must be None or an integer of at least 0, got -1"):
        small_scheduler(prefix_bytes=-1)
    with pytest.raises(ValueError, match=r"prefix_bytes must be 0, or at least \d+, the bytes of one block, got 7"):
        small_scheduler(prefix_bytes=7)


def test_prefixes_are_stored_in_as_many_blocks_as_fit_unless_told(monkeypatch):
    monkeypatch.setattr("glax.server.scheduler.PREFIX_BLOCKS", 3)
    scheduler = small_scheduler(prefix_bytes=None)
    assert scheduler.num_blocks == 3
    scheduler.answers([Request([1, 2, 3, 4] * 5, 4)] * 2)
    assert scheduler.counts().cached_tokens == 16
    block_bytes = scheduler.slots.store_bytes(8)
    for most, count in ((8 * block_bytes, 2), (4 * block_bytes, 1), (4 * block_bytes - 1, 0)):  # a quarter on a CPU
        monkeypatch.setattr("glax.server.scheduler.PREFIX_BYTES", most)
        fewer = small_scheduler(prefix_bytes=None)
        assert fewer.num_blocks == count and (fewer.store is None) == (count == 0)
    monkeypatch.undo()
    assert small_scheduler(prefix_bytes=None, max_length=8).store is None  # no prompt has a whole block


def test_a_round_reads_as_many_pieces_as_its_rows_hold():
    scheduler = small_scheduler(capacity=14, rows=80)  # blocks of 8 tokens
    requests = [Request([n, 2, 3, 4, 5], 3) for n in range(1, 15)]
    consumers = [Consumer(scheduler, request) for request in requests]
    scheduler.round()
    assert scheduler.counts().read_tokens == 10 * 5
    run(scheduler)
    assert all(one.tokens == alone(model_of(), one.request) for one in consumers)


def test_few_tokens_are_read_by_a_program_for_few(monkeypatch):
    """And many by the other, whatever comes between them; both are compiled before requests come."""
    monkeypatch.setattr("glax.server.slots.FEW", 8)
    scheduler, sizes = small_scheduler(capacity=5, rows=40), []
    scheduler.warm_up()
    read_in = scheduler.slots.read_in
    monkeypatch.setattr(scheduler.slots, "read_in", lambda size, pieces: (sizes.append(size), read_in(size, pieces))[1])
    few, many = [Request([1, 2, 3], 4)], [Request([n, 2, 3, 4, 5], 3) for n in range(1, 6)]
    with Compiled() as compiled:
        found = [scheduler.answers(requests) for requests in (few, many, few)]
    assert sizes == [8, 40, 8]
    assert compiled.count == 0
    for requests, answers in zip((few, many, few), found, strict=True):
        assert [x.tolist() for x in answers] == [alone(model_of(), request) for request in requests]


def test_a_read_gathers_no_more_states_than_there_are_slots():
    model = model_of("llama")
    one = Slots(model, 1, 64, None)
    held = Slots(model, 20, 64, 3 * one.slot_bytes(64), block=8)
    assert held.capacity_with(64) == 3 and len(held.packed(80, (), 64)[1]) == 3
    assert len(Slots(model, 20, 64, None, block=8).packed(80, (), 64)[1]) == 10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(prompt=None), "prompt must be a sequence of at least one token, got None"),
        (dict(prompt="the"), "prompt must be a sequence of at least one token, got 'the'"),
        (dict(prompt=b""), "prompt must be a sequence of at least one token, got b''"),
        (dict(prompt=[1, 2**31]), "prompt must hold tokens from 0 to 31, got 2147483648"),
        (dict(prompt=[1, 32]), "prompt must hold tokens from 0 to 31, got 32"),
        (dict(prompt=[-1]), "prompt must hold tokens, integers of at least 0, got -1"),
        (dict(prompt=[1.0]), "prompt must hold tokens, integers of at least 0, got 1.0"),
        (dict(prompt=[1, None]), "prompt must hold tokens, integers of at least 0, got None"),
        (dict(prompt=[True]), "prompt must hold tokens, integers of at least 0, got True"),
        (dict(max_tokens=-1), "max_tokens must be an integer of at least 0, got -1"),
        (dict(max_tokens=None), "max_tokens must be an integer of at least 0, got None"),
        (dict(temperature=-0.5), "temperature must be a number of at least 0, got -0.5"),
        (dict(temperature=float("nan")), "temperature must be a number of at least 0, got nan"),
        (dict(top_k=-1), "top_k must be an integer of at least 0, got -1"),
        (dict(top_p=0.0), "top_p must be a number above 0 and at most 1, got 0.0"),
        (dict(seed=2**63), f"seed must be an integer from {-(2**63)} to {2**63 - 1}, got {2**63}"),
        (dict(repetition_penalty=0), "repetition_penalty must be a number above 0, got 0"),
        (dict(presence_penalty=float("inf")), "presence_penalty must be a number that is finite, got inf"),
        (dict(frequency_penalty="1"), "frequency_penalty must be a number that is finite, got '1'"),
        (dict(logprobs=21), "logprobs must be an integer from 0 to 20, got 21"),
        (dict(ends=frozenset([32])), "ends must hold tokens from 0 to 31, got 32"),
        (dict(deadline=0.0), "deadline must be a number of seconds above 0, got 0.0"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_alone(options, text):
    scheduler = small_scheduler()
    assert scheduler.model.vocabulary == 32
    good = Consumer(scheduler, Request([1, 2, 3], 2))
    with pytest.raises(ValueError, match=re.escape(text)):
        Consumer(scheduler, Request(**dict(prompt=[1, 2], max_tokens=1) | options))
    run(scheduler)
    assert good.tokens == alone(model_of(), good.request)


def test_no_tokens_are_an_answer_of_none():
    scheduler = small_scheduler()
    one = Consumer(scheduler, Request(np.array([1, 2], np.uint8), 0))
    run(scheduler)
    assert one.events == [Finished("length")]


def test_a_request_holds_its_prompt_whatever_sequence_it_came_in():
    prompts = ([3, 1, 2], (3, 1, 2), bytes([3, 1, 2]), np.array([3, 1, 2], np.uint8), [np.int64(3), 1, np.uint8(2)])
    for prompt in prompts:
        np.testing.assert_array_equal(glax.server.Request(prompt, 1).prompt, [3, 1, 2])
    request = glax.server.Request([1], 1)
    np.testing.assert_array_equal(dataclasses.replace(request, prompt=[2]).prompt, [2])
    for wrong, shown in (
        (np.array([1.0]), "1.0"),
        ([1, np.float32(2)], "2.0"),
        (np.array([True]), "True"),
        ([2**63], 2**63),
    ):
        with pytest.raises(ValueError, match=f"prompt must hold tokens.*{shown}"):
            glax.server.Request(wrong, 1)

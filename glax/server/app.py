"""Answer HTTP calls by a scheduler: OpenAI's completions, chat completions and models, health and metrics."""

import asyncio
import collections
import functools
import hashlib
import hmac
import json
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from glax.server.answers import Sample, Writer
from glax.server.metrics import TEXT, Metrics, scheduler_lines
from glax.server.protocol import Call, Refusal, Served, read_call, shown
from glax.server.request import Event, QueueFull, Stopped, Token
from glax.server.scheduler import Scheduler

BODY_SECONDS = 30  # in which a body must arrive
SPARE = 4  # times the limit of a body is read before a call is refused
RETRY_SECONDS = 1  # of Retry-After
MOST_EVENTS = 256  # of a call that are turned into pieces before other calls have their turn
# Statuses of answers that did not come about, by the reason of the scheduler.
FAILURES = {"error": 500, "timeout": 504, "cancelled": 503}


class Server:
    """Hold the state that the endpoints share.

    body_bytes: the most bytes of a body. key: the bearer token that clients must send, or None. hosts: the names by which
    browsers may call the server, or None for any.
    """

    def __init__(
        self,
        served: Served,
        scheduler: Scheduler,
        *,
        body_bytes: int = 4 << 20,
        key: str | None = None,
        hosts: frozenset[str] | None = None,
    ):
        self.served, self.scheduler, self.body_bytes, self.hosts = served, scheduler, body_bytes, hosts
        self.key = None if key is None else digest(key.encode("utf-8", "surrogateescape"))
        self.metrics, self.created = Metrics(), int(time.time())
        self.handovers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Handover] = weakref.WeakKeyDictionary()
        self.is_stopping, self.num_open = False, 0  # num_open: runs whose answers have not ended
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", functools.partial(self.answer, is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(self.answer, is_chat=True), methods=["POST"]),
        ]
        self.routes = Starlette(routes=routes, exception_handlers={HTTPException: http_error, Exception: failed})

    async def __call__(self, scope, receive, send):
        """Check who calls, and then answer the call: the ASGI application."""

        async def counted(message):
            if message["type"] == "http.response.start":
                self.metrics.responses[message["status"]] += 1
            await send(message)

        if scope["type"] != "http":
            return
        try:
            self.check_caller(Request(scope))
        except Refusal as refusal:
            await refused(refusal)(scope, receive, counted)
            return
        await self.routes(scope, receive, counted)

    def check_caller(self, request: Request):
        """Raise Refusal for a caller without the key, or for a page of another site in a browser."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self.hosts is not None and address_of(f"//{host}")[0] not in self.hosts:
            raise Refusal(f"the host must be one of {', '.join(sorted(self.hosts))}, got {shown(host)}", status=403)
        if origin is not None and address_of(origin)[1] != host:
            raise Refusal(f"pages of {shown(origin)} may not call this server", status=403)
        if self.key is None or request.scope["path"] == "/health":  # request.url holds what the client says of its host
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest(given.encode("latin-1").strip()), self.key):
            raise Refusal("the key must be sent as Authorization: Bearer KEY", status=401, code="invalid_api_key")

    async def health(self, request: Request) -> Response:
        is_stopping = self.is_stopping or self.scheduler.is_stopped
        return as_json(dict(status="stopping" if is_stopping else "ok"), 503 if is_stopping else 200)

    async def show_metrics(self, request: Request) -> Response:
        lines = [*scheduler_lines(self.scheduler.counts()), *self.metrics.lines()]
        return Response("\n".join(lines) + "\n", headers={"content-type": TEXT})

    async def models(self, request: Request) -> Response:
        return as_json(dict(object="list", data=[self.described()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.served.name:
            return refused(Refusal(f"there is no model {shown(name)}", "model", status=404, code="model_not_found"))
        return as_json(self.described())

    def described(self) -> dict[str, Any]:
        return dict(
            id=self.served.name,
            object="model",
            created=self.created,
            owned_by="glax",
            max_model_len=self.served.max_length,
        )

    async def answer(self, request: Request, *, is_chat: bool) -> ASGIApp:
        """Answer a call, as one object or as a stream. Its requests are cancelled when its client leaves."""
        began = time.perf_counter()
        try:
            if self.is_stopping:
                raise Refusal("the server is stopping", status=503)
            raw = await self.read(request)
            call = await asyncio.to_thread(read_call, self.served, raw, is_chat=is_chat)
            run = Run(self, call, began)
        except Refusal as refusal:
            return refused(refusal)
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        return RunResponse(run)

    async def read(self, request: Request) -> bytes:
        """Return the body. Raises Refusal if it is too long or too slow.

        Some bytes beyond the limit are read and left, because a client that still writes does not see a refusal.
        """
        too_long = Refusal(f"the body must have at most {self.body_bytes} bytes", status=413)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 20 or int(length) > SPARE * self.body_bytes):
            raise too_long
        parts, count = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    count += len(part)
                    if count > SPARE * self.body_bytes:
                        raise too_long
                    if count <= self.body_bytes:
                        parts.append(part)
        except TimeoutError:
            raise Refusal(f"the body must arrive within {BODY_SECONDS} seconds", status=408) from None
        if count > self.body_bytes:
            raise too_long
        return b"".join(parts)

    async def drain(self, grace: float):
        """Refuse new calls, wait `grace` seconds for those that are open, and cancel the rest."""
        self.is_stopping = True
        end = time.monotonic() + grace
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.scheduler.stop)
        while self.num_open and time.monotonic() < end + 2:
            await asyncio.sleep(0.01)


class Handover:
    """Pass events from the scheduler's thread to the queues of the event loop.

    To wake the loop is a system call, at which the scheduler's thread gives up Python's lock and then waits for it. So a loop
    that was woken is not woken again before it has taken the events: about once a round if it lags. Each loop has one Handover.

    arrived: pairs of a queue of the loop and an item to be put there. is_woken: whether the loop was woken and has not taken
    them yet.
    """

    def __init__(self):
        self.arrived: collections.deque[tuple[asyncio.Queue, Any]] = collections.deque()
        self.is_woken = False

    def put(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, item: Any):
        """Put an item into a queue of the loop. Any thread may call it. loop: the same in every call."""
        self.arrived.append((queue, item))
        if not self.is_woken:
            self.is_woken = True
            loop.call_soon_threadsafe(self.take)

    def take(self):
        """Put all items that have arrived into their queues. The event loop calls it."""
        self.is_woken = False  # first: what comes from here on wakes the loop, or is taken below
        while self.arrived:
            queue, item = self.arrived.popleft()
            queue.put_nowait(item)


class Run:
    """Run the requests of a call. Raises Refusal if the scheduler does not take all of them.

    began: the time.perf_counter() at which the call came. samples: one for each request. events: a queue of (the request's
    index, an event), which the scheduler fills.
    """

    def __init__(self, server: Server, call: Call, began: float):
        self.server, self.call, self.began = server, call, began
        self.writer = Writer(server.served, call)
        self.samples = [Sample(server.served, call, i) for i in range(len(call.requests))]
        self.loop, self.events = asyncio.get_running_loop(), asyncio.Queue()
        self.handover = server.handovers.setdefault(self.loop, Handover())
        try:
            self.tickets = server.scheduler.submit_together(
                (request, functools.partial(self.receive, i)) for i, request in enumerate(call.requests)
            )
        except (ValueError, QueueFull, Stopped) as error:
            if isinstance(error, ValueError):
                raise Refusal(str(error)) from None
            raise Refusal(str(error), status=429 if isinstance(error, QueueFull) else 503) from None
        server.num_open += 1

    def receive(self, index: int, event: Event):
        """Pass an event of request `index` to the event loop. The scheduler's thread calls it."""
        self.handover.put(self.loop, self.events, (index, event))

    def close(self):
        """Cancel the requests that still run, and count the call as ended."""
        for ticket in self.tickets:
            ticket.cancel()
        self.server.num_open -= 1
        self.server.metrics.request.observe(time.perf_counter() - self.began)

    async def pieces(self) -> AsyncIterator[tuple[int, str, list, bool]]:
        """Yield (the number of a choice, the text that it adds, its entries for logprobs, whether the answer ends with it).

        It ends when the scheduler has ended all requests. Tokens of a request that have come while the loop did other work are
        one piece: a loop that lags sends less often.
        """
        is_first = True
        while not all(sample.is_over for sample in self.samples):
            arrived = [await self.events.get()]
            while not self.events.empty() and len(arrived) < MOST_EVENTS:
                arrived.append(self.events.get_nowait())
            if is_first and any(isinstance(event, Token) for _, event in arrived):
                self.server.metrics.first_token.observe(time.perf_counter() - self.began)
                is_first = False
            for index in dict.fromkeys(index for index, _ in arrived):
                had_ended = bool(self.samples[index].reason)
                text, entries = self.push(index, (event for other, event in arrived if other == index))
                if text or entries or bool(self.samples[index].reason) != had_ended:
                    yield index, text, entries, bool(self.samples[index].reason)
            if not self.events.empty():  # as behind a client that reads slowly
                await asyncio.sleep(0)

    def push(self, index: int, events: Iterable[Event]) -> tuple[str, list]:
        """Return (the text that events of a request add, the entries of its tokens). If a stop text ends the answer, the
        request is cancelled."""
        sample, texts, entries = self.samples[index], [], []
        had_ended = bool(sample.reason)
        for event in events:
            text, found = sample.push(event)
            texts.append(text)
            entries += found
        if not had_ended and sample.reason == "stop" and not sample.is_over:
            self.tickets[index].cancel()
        return "".join(texts), entries

    def failure(self) -> Refusal | None:
        """Return the Refusal that says why an answer failed; None if none did."""
        for sample in self.samples:
            if sample.reason in FAILURES:
                message = sample.message or f"the request ended early: {sample.reason}"
                return Refusal(message, status=FAILURES[sample.reason], code=sample.reason)
        return None

    async def whole(self) -> Response:
        """Return the answer as one response, after all requests have ended; a refusal if one of them failed."""
        texts, entries = [[] for _ in self.samples], [[] for _ in self.samples]
        async for index, text, found, _ in self.pieces():
            texts[index].append(text)
            entries[index] += found
        if (failure := self.failure()) is not None:
            return refused(failure)
        return as_json(self.writer.whole(self.samples, ["".join(parts) for parts in texts], entries))

    async def chunks(self) -> AsyncIterator[dict]:
        """Yield the objects of a streamed answer."""
        if self.call.is_chat:
            for index in range(len(self.samples)):
                yield self.writer.first(index)
        async for index, text, entries, has_ended in self.pieces():
            if (failure := self.failure()) is not None:
                if text or entries:  # that have come together with the end
                    yield self.writer.piece(index, text, entries)
                yield failure.content()
                return
            yield self.writer.piece(index, text, entries, self.samples[index].reason if has_ended else None)
        if self.call.include_usage:
            yield self.writer.last(self.samples)

    async def stream(self, send):
        """Send an answer as server-sent events. send: the ASGI function."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        failed = False
        async for content in self.chunks():
            failed = "error" in content
            await send(body(b"data: " + encoded(content) + b"\n\n", more=True))
        await send(body(b"" if failed else b"data: [DONE]\n\n", more=False))


class RunResponse:
    """Send the answer of a run, and cancel the run when its client leaves."""

    def __init__(self, run: Run):
        self.run = run

    async def __call__(self, scope, receive, send):
        try:
            await unless_gone(receive, self.work(scope, receive, send))
        finally:
            self.run.close()

    async def work(self, scope, receive, send):
        """Send the answer, as a stream or as one object."""
        if self.run.call.stream:
            await self.run.stream(send)
        else:
            response = await self.run.whole()
            await response(scope, receive, send)


async def unless_gone(receive: Callable[[], Awaitable[dict]], work: Awaitable[None]):
    """Await `work`, and cancel it once the client has left. receive: the ASGI function, which then returns "http.disconnect".

    Raises what `work` raises, but for OSError.
    """

    async def leaves():
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(leaves())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    for error in found:
        if isinstance(error, Exception) and not isinstance(error, OSError):  # of a client that has left
            raise error


def body(content: bytes, *, more: bool) -> dict[str, Any]:
    """Return the ASGI message of a part of a body. more: whether another part follows."""
    return {"type": "http.response.body", "body": content, "more_body": more}


def encoded(content: Any) -> bytes:
    """Return content as JSON in ASCII, which can express every text, also text that UTF-8 cannot hold."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def as_json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(content), status, headers, "application/json")


def refused(refusal: Refusal) -> Response:
    """Return the response that says a refusal, with the headers that its status needs."""
    headers = {}
    if refusal.status in (429, 503):
        headers["retry-after"] = str(RETRY_SECONDS)
    if refusal.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.code in FAILURES and refusal.status != 503:
        headers["x-should-retry"] = "false"  # to clients of OpenAI's: the same would happen again
    return as_json(refusal.content(), refusal.status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']:.200}: {error.detail}"
    response = refused(Refusal(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def failed(request: Request, error: Exception) -> Response:
    """Return the answer, of status 500, to a call in which the server raised an error. The traceback goes to the log."""
    return refused(Refusal("an error of the server ended the call: its log says which", status=500))


def address_of(url: str) -> tuple[str | None, str]:
    """Return (the name of the host, the address with the port) of a URL; (None, "") if the URL has other parts."""
    try:
        parts = urlsplit(url)
        is_alone = url.endswith(f"//{parts.netloc}")
        return (parts.hostname, parts.netloc) if is_alone else (None, "")
    except ValueError:
        return None, ""


def digest(text: bytes) -> bytes:
    """Return a digest, so that a comparison tells nothing about lengths."""
    return hashlib.sha256(text).digest()

"""Listen for connections: limits of time on slow clients, and an orderly end."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20  # for the head of a request, from the connection or its first byte
STALL_SECONDS = 60  # in which a client must read something of a full buffer
IDLE_SECONDS = 20  # between two requests of a connection
HEAD_BYTES = 1 << 16


class Protocol(H11Protocol):
    """Close connections whose client sends the head of a request, or reads an answer, too slowly."""

    head_timer: asyncio.TimerHandle | None = None
    stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self.head_timer = self.loop.call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc):
        for timer in (self.head_timer, self.stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data):
        super().data_received(data)
        awaits_head = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]  # a part of a head has come
        if awaits_head and self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not awaits_head and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def pause_writing(self):
        super().pause_writing()
        self.stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self):
        if self.stall_timer is not None:
            self.stall_timer.cancel()
        super().resume_writing()


class Listener(uvicorn.Server):
    """Run an application until a signal comes. Then `drain` ends its work, and the connections are closed.

    signal: the one that came, or 0. A second one does not wait. In a thread that is not the main one, no signals come.
    """

    def __init__(self, app, drain: Callable[[], Awaitable[None]], connections: int):
        config = uvicorn.Config(
            app,
            http=Protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=connections,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        super().__init__(config)
        self.drain, self.signal = drain, 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in numbers:
            loop.add_signal_handler(number, self.begin_end, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def begin_end(self, number: int):
        """Begin to drain at the first signal. At the second, end without waiting. number: the number of the signal."""
        if self.signal:
            self.should_exit = self.force_exit = True
            return
        self.signal = number
        # The loop holds no task: one that nothing holds may be collected.
        self.draining = asyncio.get_running_loop().create_task(self.end())

    async def end(self):
        try:
            await self.drain()
        finally:
            self.should_exit = True

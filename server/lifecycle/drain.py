"""How a server leaves, once it was told to: not ready at once, serving for a while yet, then refusing, until all that
it took on is answered or it is told again.

Knows the router and the HTTP server's connections, no settings and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn

from inferd.server.dispatch.router import Router

logger = logging.getLogger("inferd")

_ABORT_GRACE_S = 5.0
"""For the engine to end what was aborted."""


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """Times from the first signal on."""

    delay_s: float
    """How long SIGTERM leaves requests being taken, so that whoever sends them has time to see /ready. A person's
    Ctrl-C leaves none."""
    timeout_s: float
    """How long what was taken may go on."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with connections that can be told to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; the application ends in order also where connections were broken off."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def say_close(self) -> None:
        """From now on every answer ends its connection: the next request is to find another server.

        By the headers that uvicorn gives every answer: no layer that each piece of a stream would pass through.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def give_time(self, seconds: float) -> None:
        """What is still being written, once this is to exit, may take so long, and never less than configured."""
        least_s = self.config.timeout_graceful_shutdown or 0
        self.config.timeout_graceful_shutdown = max(least_s, math.ceil(seconds))

    def break_off(self) -> None:
        """Wait for no connection any more."""
        self.force_exit = True
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    def close_idle(self) -> None:
        """End connections on which nothing is asked, and the others behind their answers."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()


class Drain:
    """Of one server. `begun` is set by the first signal, or by who finds that nothing can be served any more."""

    def __init__(self, router: Router, options: DrainOptions, on_stuck: Callable[[], None]) -> None:
        """`on_stuck`: called where the engine does not end what was aborted."""
        self._router, self._options, self._on_stuck = router, options, on_stuck
        self.begun = asyncio.Event()
        self._is_over = asyncio.Event()
        """No more waiting for senders."""
        self._num_signals = 0
        self._delay_s = min(options.delay_s, options.timeout_s)
        self._deadline_s = 0.0
        self._http: HttpServer | None = None
        """Once the router has nothing left: what is still being written."""

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: signal.Signals) -> None:
        """The first time: leave; again: give up what is unfinished, which ends with an error."""
        self._num_signals += 1
        num_active, timeout_s = self._router.num_active, self._options.timeout_s
        if self._http is not None:
            logger.warning("%s: breaking off what is still being written", number.name)
            self._http.break_off()
            return
        if self._num_signals > 1:
            self._deadline_s = time.monotonic()
            logger.warning("%s again: giving up %d unfinished answers", number.name, num_active)
            self._router.drain()
            self._router.abort_all()
            self._is_over.set()
            return
        if number is signal.SIGTERM and self._delay_s and self._router.is_ready:
            logger.info("%s: not ready from now on; requests are taken for %g s", number.name, self._delay_s)
        else:
            self._is_over.set()
        if num_active:
            logger.info("%s: finishing %d answers (up to %g s; again to give up)", number.name, num_active, timeout_s)
        elif self._is_over.is_set():
            logger.info("%s: stopping", number.name)
        self._deadline_s = time.monotonic() + timeout_s
        self._router.leave()
        self.begun.set()

    def give_up(self) -> None:
        """Nothing can be served any more."""
        self._is_over.set()
        self.begun.set()

    async def run(self, http: HttpServer) -> None:
        """Return when nothing is left to be answered; what is still being written has the rest of the time."""
        await self._answered(http)
        http.give_time(self._deadline_s - time.monotonic())
        self._http = http

    async def _answered(self, http: HttpServer) -> None:
        await self.begun.wait()
        http.say_close()
        await _within(self._delay_s, self._is_over.wait())
        self._router.drain()
        http.close_idle()
        if await _within(self._deadline_s - time.monotonic(), self._router.drained()):
            return
        logger.warning("aborting %d requests that did not finish in time", self._router.num_active)
        self._router.abort_all()
        if not await _within(_ABORT_GRACE_S, self._router.drained()):
            self._on_stuck()


async def _within(seconds: float, event: Awaitable[object]) -> bool:
    """Whether it came in time."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event
    except TimeoutError:
        return False
    return True

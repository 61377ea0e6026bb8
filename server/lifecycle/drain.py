"""Graceful shutdown. After the first signal, /ready answers 503 at once while the server still accepts requests.

Then it refuses new requests, and ends when all accepted ones are answered, or at a second signal. This file knows the
router and the HTTP server's connections, no settings and no engine.
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
"""Seconds that the engine has to end aborted requests."""


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """Times that begin at the first signal."""

    delay_s: float
    """Seconds in which requests are still accepted after SIGTERM, so that load balancers have time to see /ready.
    There is no delay after a person's Ctrl-C."""
    timeout_s: float
    """Seconds that accepted requests have to finish."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, but with methods that end connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's, but the application shuts down in order even if connections were aborted."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def say_close(self) -> None:
        """Close each connection after its answer, so that the client's next request goes to another server.

        uvicorn's default headers do it. A middleware would run for each piece of a stream.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def give_time(self, seconds: float) -> None:
        """At exit, wait this long for answers that are still being written, but at least as long as configured."""
        least_s = self.config.timeout_graceful_shutdown or 0
        self.config.timeout_graceful_shutdown = max(least_s, math.ceil(seconds))

    def break_off(self) -> None:
        """Abort all connections."""
        self.force_exit = True
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    def close_idle(self) -> None:
        """Close idle connections now, and the others after their answers."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()


class Drain:
    """The shutdown of one server. `begun` is set by the first signal, or by `give_up`."""

    def __init__(self, router: Router, options: DrainOptions, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called if the engine does not end aborted requests."""
        self._router, self._options, self._on_stuck = router, options, on_stuck
        self.begun = asyncio.Event()
        self._is_over = asyncio.Event()
        """Set when no more requests are accepted."""
        self._num_signals = 0
        self._delay_s = min(options.delay_s, options.timeout_s)
        self._deadline_s = 0.0
        self._http: HttpServer | None = None
        """Set once the router has no requests left, while answers may still be written."""

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: signal.Signals) -> None:
        """The first signal begins the shutdown. The second one ends unfinished answers with an error."""
        self._num_signals += 1
        num_active, timeout_s = self._router.num_active, self._options.timeout_s
        if self._http is not None:
            logger.warning("%s: aborting the connections that still receive an answer", number.name)
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
            logger.info("%s: /ready answers 503; new requests are accepted for %g s", number.name, self._delay_s)
        else:
            self._is_over.set()
        if num_active:
            advice = "send the signal again to give them up"
            logger.info("%s: finishing %d answers in at most %g s; %s", number.name, num_active, timeout_s, advice)
        elif self._is_over.is_set():
            logger.info("%s: stopping", number.name)
        self._deadline_s = time.monotonic() + timeout_s
        self._router.leave()
        self.begun.set()

    def give_up(self) -> None:
        """Begin the shutdown because there is no engine."""
        self._is_over.set()
        self.begun.set()

    async def run(self, http: HttpServer) -> None:
        """Return when every request is answered. The HTTP server has the rest of the time to write the answers."""
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
    """Wait for the event. Returns whether it came in time."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event
    except TimeoutError:
        return False
    return True

"""Graceful shutdown. After the first signal, /ready answers 503 at once while the server still accepts requests.

Then it refuses new requests, and ends when all accepted ones are answered, or at a second signal. This file knows the
routers and the HTTP server's connections, no settings and no engine.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from inferd.engine.api.process.logs import counted
from inferd.server.dispatch.router import Router
from inferd.server.transport.uvicorn_server import HttpServer

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


class Drain:
    """The shutdown of one server. `begun` is set by the first signal, or by `give_up`."""

    def __init__(self, routers: Sequence[Router], options: DrainOptions, on_stuck: Callable[[], None]) -> None:
        """`on_stuck` is called if the engine does not end aborted requests."""
        self._routers, self._options, self._on_stuck = tuple(routers), options, on_stuck
        self.begun = asyncio.Event()
        self._is_over = asyncio.Event()
        """Set when no more requests are accepted."""
        self._num_signals = 0
        self._delay_s = min(options.delay_s, options.timeout_s)
        self._deadline_s = 0.0
        self._http: HttpServer | None = None
        """Set once the routers have no requests left, while answers may still be written."""

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: signal.Signals) -> None:
        """The first signal begins the shutdown. The second one ends unfinished answers with an error."""
        self._num_signals += 1
        num_active, timeout_s = self._num_active, self._options.timeout_s
        if self._http is not None:
            logger.warning("%s: aborting the connections that still receive an answer", number.name)
            self._http.break_off()
            return
        if self._num_signals > 1:
            self._deadline_s = time.monotonic()
            logger.warning("%s again: giving up %s", number.name, counted(num_active, "unfinished answer"))
            self._drain_all()
            self._abort_all()
            self._is_over.set()
            return
        if number is signal.SIGTERM and self._delay_s and any(router.lifecycle.is_ready for router in self._routers):
            logger.info("%s: /ready answers 503; new requests are accepted for %g s", number.name, self._delay_s)
        else:
            self._is_over.set()
        if num_active:
            advice = "send the signal again to give them up"
            answers = counted(num_active, "answer")
            logger.info("%s: finishing %s in at most %g s; %s", number.name, answers, timeout_s, advice)
        elif self._is_over.is_set():
            logger.info("%s: stopping", number.name)
        self._deadline_s = time.monotonic() + timeout_s
        for router in self._routers:
            router.lifecycle.leave()
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
        self._drain_all()
        http.close_idle()
        if await _within(self._deadline_s - time.monotonic(), self._drained()):
            return
        logger.warning("aborting %s that did not finish in time", counted(self._num_active, "request"))
        self._abort_all()
        if not await _within(_ABORT_GRACE_S, self._drained()):
            self._on_stuck()

    @property
    def _num_active(self) -> int:
        return sum(router.streams.num_active for router in self._routers)

    def _drain_all(self) -> None:
        for router in self._routers:
            router.lifecycle.drain()
            router.sleeping.end()

    def _abort_all(self) -> None:
        for router in self._routers:
            router.streams.abort_all()

    async def _drained(self) -> None:
        for router in self._routers:
            await router.streams.drained()


async def _within(seconds: float, event: Awaitable[object]) -> bool:
    """Wait for the event. Returns whether it came in time."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event
    except TimeoutError:
        return False
    return True

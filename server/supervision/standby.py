"""Keeps a standby beside the serving engine: a process that has loaded its libraries and waits to be promoted.

The standby starts once an engine serves. If it dies, hangs or is soon promoted, another starts after a growing delay;
it never ends the server. Knows no requests and no router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.wire.messages import STANDBY, Phase
from inferd.server.supervision.engine_handle import EngineHandle

logger = logging.getLogger("inferd")

_FIRST_DELAY_S, _MAX_DELAY_S = 0.25, 30.0
_MAX_DOUBLINGS = 10
"""Enough to reach the longest delay, and few enough for a float."""
_SOON_S = 60.0
"""A start within so many seconds of the last one waits twice as long as that one did."""


class Standby:
    """At most one standby."""

    def __init__(self, begin: Callable[[int], EngineHandle], on_change: Callable[[bool], None]) -> None:
        """`begin` starts the standby of an epoch, and may raise `StartError`.

        `on_change` is called with whether a standby waits to be promoted.
        """
        self._begin, self._on_change = begin, on_change
        self._keeper: asyncio.Task[None] | None = None
        self._handle: EngineHandle | None = None
        self._is_warm = False
        self._started_s = -_SOON_S
        self._num_soon = 0

    def keep(self, epoch: int) -> None:
        """From now on, until `take`, keep a standby of that epoch running."""
        assert self._keeper is None, "a standby is kept already"
        self._keeper = asyncio.create_task(self._keep(epoch))

    async def take(self) -> EngineHandle | None:
        """Stop keeping a standby; returns the current one if it can be promoted, and otherwise kills it."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        handle, is_warm = self._handle, self._is_warm and self._can_run()
        self._handle = None
        self._set_warm(False)
        if handle is not None and not is_warm:
            await handle.end()
            return None
        return handle

    async def _keep(self, epoch: int) -> None:
        while True:
            delay_s = self._next_delay_s(time.monotonic())
            await asyncio.sleep(delay_s)
            self._started_s = time.monotonic()
            try:
                reason = await self._run_one(epoch)
            except StartError as error:
                reason = f"it could not start: {error}"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                logger.exception("a standby failed")
            logger.warning("the standby ended (%s): another will be started", reason)

    async def _run_one(self, epoch: int) -> str:
        """Run one standby to its end; returns how it ended. If this is cancelled, the standby goes on."""
        handle = self._handle = self._begin(epoch)
        said = asyncio.create_task(self._wait_ready(handle))
        try:
            ended = await handle.ended(said, may_wait=True)
            if said.done() and said.result() is None:
                self._set_warm(True)
                return ended or await handle.ended(may_wait=True)
            return (said.result() if said.done() else None) or ended
        finally:
            said.cancel()
            await asyncio.gather(said, return_exceptions=True)
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self._handle = None
                self._set_warm(False)
                await handle.end()

    async def _wait_ready(self, handle: EngineHandle) -> str | None:
        """None once the standby says that it can be promoted; else what is wrong with it."""
        try:
            while isinstance(message := await handle.client.receive(), Phase):
                if message.name == STANDBY:
                    return None
        except EngineDeadError as error:
            return str(error)
        return f"it said {type(message).__name__}"

    def _can_run(self) -> bool:
        """Whether it lives, and no signal has stopped it."""
        process = None if self._handle is None else self._handle.process
        return process is not None and process.is_running and not process.processor_time.is_stopped()

    def _next_delay_s(self, now: float) -> float:
        """Seconds to wait before a start."""
        self._num_soon = self._num_soon + 1 if now - self._started_s < _SOON_S else 0
        return min(_FIRST_DELAY_S * 2.0 ** min(self._num_soon, _MAX_DOUBLINGS), _MAX_DELAY_S)

    def _set_warm(self, is_warm: bool) -> None:
        self._is_warm = is_warm
        self._on_change(is_warm)

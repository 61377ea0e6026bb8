"""One engine process and the server's end of its wire: created together and discarded together.

A standby is kept beside the serving engine: a process that has loaded its libraries and waits to be promoted. It starts
once an engine serves. If it dies, hangs or is soon promoted, another starts after a growing delay; it never ends the
server. Knows no requests and no router.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Self

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import CapacityError, EngineDeadError, StartError
from inferd.engine.api.process.engine_forks import EarlyProcess
from inferd.engine.api.process.engine_process import EngineProcess, describe_exit
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import STANDBY, Phase
from inferd.server.supervision.watchdog import TICK_S, Watchdog

NO_MEMORY = (
    "found too little memory to import its libraries: free memory, or raise the limit on its address space (ulimit -v)"
)


class EngineHandle:
    """Handle of one engine process. A standby only has its libraries loaded until it is promoted."""

    def __init__(self, process: EngineProcess, client: EngineClient) -> None:
        self.process, self.client = process, client
        self.is_external_kill = True
        """Whether no request need have caused its end: it did not exit by itself, and no step ran too long."""
        self.lacked_memory = False
        """Whether it ended because the system gave it no more memory before it could say so."""

    @classmethod
    def begin(
        cls,
        config: EngineConfig,
        epoch: int,
        log_style: LogStyle,
        *,
        is_standby: bool = False,
        early: EarlyProcess | None = None,
    ) -> Self:
        """Start the process, or take over `early`. Raises `StartError`, and leaves nothing behind, if the system
        refuses."""
        process = EngineProcess(config, epoch=epoch, log_style=log_style, is_standby=is_standby, early=early)
        try:
            client = EngineClient(process.run_dir, epoch, on_first_frame=process.connected)
        except BaseException:
            process.discard()
            raise
        handle = cls(process, client)
        try:
            process.spawn()
        except BaseException:
            handle.discard()
            raise
        return handle

    async def ended(self, sooner: asyncio.Task[Any] | None = None, *, may_wait: bool = False) -> str:
        """Wait until the process dies or hangs, or until `sooner` is done. Returns in words what happened; an empty
        string if it lives. `may_wait`: whether a standby has not been promoted yet."""
        if sooner is not None:
            sooner.add_done_callback(lambda _: self.process.wake())
        own = ProcessorTime(os.getpid(), has_family=False)
        watchdog = Watchdog(time.monotonic(), self.process.processor_time, own, may_wait=may_wait)
        while (code := await self.process.news(TICK_S)) is None:
            if sooner is not None and sooner.done():
                return ""
            reason = watchdog.look(self.process.pulse(), time.monotonic(), self.client.frame_counts)
            if reason is not None:
                self.is_external_kill = not watchdog.is_step_endless
                return f"the engine process {reason}"
        self.is_external_kill = code == -signal.SIGKILL  # a process does not send this to itself
        self.lacked_memory = code == CapacityError.exit_code
        return f"the engine process {NO_MEMORY if self.lacked_memory else describe_exit(code)}"

    async def kill(self) -> None:
        """End the process, even if it is stopped or hangs. Its shared memory can still be read."""
        self.process.kill()
        while await self.process.news(TICK_S) is None:
            pass

    async def end(self) -> None:
        """End the process, wait until its memory is free, and discard what belongs to it."""
        try:
            self.process.kill()
            await self.process.wait()
        except asyncio.CancelledError:
            await self.process.wait()  # `discard` would block the event loop for as long
            raise
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove its files, shared memory and sockets. Blocks until the process is gone."""
        self.process.discard()
        self.client.close()


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

"""One engine process and the server's end of its wire: created together and discarded together.

Knows no requests and no router.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, Self

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import CapacityError
from inferd.engine.api.process.engine_process import EarlyProcess, EngineProcess, describe_exit
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.wire.client import EngineClient
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

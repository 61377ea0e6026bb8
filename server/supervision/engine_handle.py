"""One engine process and the server's end of its wire: made together, and gone together.

Knows no requests: the router is told by whoever keeps a life.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Self

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.supervisor import Supervisor, describe_exit
from inferd.engine.api.wire.client import EngineClient
from inferd.server.supervision.watchdog import TICK_S, Watchdog


class EngineHandle:
    """From its first moment to its last. A standby's begins with reading libraries, and goes on once it is promoted."""

    def __init__(self, supervisor: Supervisor, client: EngineClient) -> None:
        self.supervisor, self.client = supervisor, client
        self.is_external_kill = True
        """No request need have to do with its end: neither did it end itself, nor is a step without end."""

    @classmethod
    def begin(cls, config: EngineConfig, epoch: int, log_style: LogStyle, *, is_standby: bool = False) -> Self:
        """Start the process. Raises `StartError` where the system does not let it, of which nothing is left."""
        supervisor = Supervisor(config, epoch=epoch, log_style=log_style, is_standby=is_standby)
        try:
            client = EngineClient(supervisor.run_dir, epoch, on_first_frame=supervisor.seal)
        except BaseException:
            supervisor.discard()
            raise
        handle = cls(supervisor, client)
        try:
            supervisor.spawn()
        except BaseException:
            handle.discard()
            raise
        return handle

    async def ended(self) -> str:
        """Return once the process is gone or hangs, and in words how it came to that."""
        wait = asyncio.create_task(self.supervisor.wait())
        hang = asyncio.create_task(self._hang())
        try:
            await asyncio.wait((wait, hang), return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                self.is_external_kill = wait.result() == -signal.SIGKILL  # which nobody sends itself
            return f"the engine process {describe_exit(wait.result()) if wait.done() else hang.result()}"
        finally:
            wait.cancel()
            hang.cancel()
            await asyncio.gather(wait, hang, return_exceptions=True)

    async def _hang(self) -> str:
        watchdog = Watchdog(time.monotonic())
        while True:
            await asyncio.sleep(TICK_S)
            reason = watchdog.look(self.supervisor.pulse(), time.monotonic(), self.client.traffic)
            if reason is not None:
                self.is_external_kill = not watchdog.is_step_endless
                return reason

    async def kill(self) -> None:
        """End the process, also one that is stopped or hangs; what it shared can still be read."""
        self.supervisor.kill()
        await self.supervisor.wait()

    def discard(self) -> None:
        """Take away what is left of it."""
        self.supervisor.discard()
        self.client.close()

"""The supervisor: starts an engine, notices when it dies or hangs, starts the next, and has every request continue
there.

The only module that knows both the engine processes and the router. It raises if no further start can help.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.process.logs import LogStyle
from inferd.server.dispatch.router import Router
from inferd.server.supervision.engine_handle import EngineHandle
from inferd.server.supervision.restart_policy import RestartPolicy
from inferd.server.supervision.standby import Standby

logger = logging.getLogger("inferd")

_LAST_WORDS_S = 0.2
"""A child that refuses to start says why before it exits: this message is preferred to its exit code."""


class EngineSupervisor:
    """Keeps one engine running for one server. `run` ends only by an error or cancelled."""

    def __init__(
        self, router: Router, config: EngineConfig, log_style: LogStyle, on_standby: Callable[[bool], None]
    ) -> None:
        """`on_standby` is called with whether a standby waits to be promoted."""
        self._router, self._config, self._log_style = router, config, log_style
        self._restart_policy = RestartPolicy()
        self._standby = Standby(lambda epoch: self._begin(epoch, is_standby=True), on_standby)
        self._epoch = 0
        router.on_up, router.on_recovered = self._keep_standby, self._log_recovered

    async def run(self) -> NoReturn:
        """Raises `StartError` if the first engine cannot start, and `EngineDeadError` if engines keep dying."""
        try:
            while True:
                reason = await self._run_one()
                self._epoch += 1
                if not self._router.became_ready.is_set():
                    raise EngineDeadError(reason)
                delay_s = self._restart_policy.died(time.monotonic(), self._router.num_delivered)
                if delay_s is None:
                    raise EngineDeadError(f"{reason}; so did those before it, and none delivered a token")
                waiting = f"{self._router.num_active} requests wait"
                logger.error("%s: starting another%s; %s", reason, f" in {delay_s:.2g} s" if delay_s else "", waiting)
                await asyncio.sleep(delay_s)
        finally:
            await self._drop_standby()

    async def _run_one(self) -> str:
        """Run one engine, from its start or promotion to its end; returns how it ended."""
        try:
            handle = await self._next()
        except StartError as error:
            if not self._router.became_ready.is_set():
                raise
            return f"the engine could not start: {error}"
        try:
            reason = await self._end_of(handle)
            await handle.kill()
            self._router.lose(handle.supervisor.in_flight(), is_external_kill=handle.is_external_kill)
            return reason
        except asyncio.CancelledError:
            await handle.supervisor.stop()
            raise
        finally:
            handle.discard()

    async def _next(self) -> EngineHandle:
        """The standby if it can be promoted, else a newly started process. Raises `StartError`."""
        handle = await self._standby.take()
        if handle is None:
            handle = self._begin(self._epoch, is_standby=False)
            self._router.attach(handle.client)
        else:
            logger.info("the standby is promoted")
            self._router.attach(handle.client)
            handle.supervisor.promote()
        return handle

    def _begin(self, epoch: int, *, is_standby: bool) -> EngineHandle:
        return EngineHandle.begin(self._config, epoch, self._log_style, is_standby=is_standby)

    def _keep_standby(self) -> None:
        """Called once an engine serves: until then it needs the cores itself."""
        if self._config.standby:
            self._standby.keep(self._epoch + 1)

    async def _drop_standby(self) -> None:
        handle = await self._standby.take()
        if handle is not None:
            await handle.supervisor.stop()
            handle.discard()

    async def _end_of(self, handle: EngineHandle) -> str:
        """How the engine ended, or why it must. Raises `StartError` if the first one says that it cannot start."""
        receive, ended = asyncio.create_task(self._receive()), asyncio.create_task(handle.ended())
        try:
            await asyncio.wait((receive, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and handle.supervisor.has_exited and not self._router.is_up:
                await asyncio.wait((receive,), timeout=_LAST_WORDS_S)
            return receive.result() if receive.done() else ended.result()
        finally:
            receive.cancel()
            ended.cancel()
            await asyncio.gather(receive, ended, return_exceptions=True)

    async def _receive(self) -> str:
        """Why the engine's messages end. Raises `StartError` if the first one says that it cannot start."""
        try:
            await self._router.run()
        except StartError as error:
            if not self._router.became_ready.is_set():
                raise
            return f"the engine could not start: {error}"
        except EngineDeadError as error:
            return str(error)

    def _log_recovered(self, num_replayed: int, outage_s: float) -> None:
        logger.warning("RECOVERED in %.2f s: %d requests go on", outage_s, num_replayed)

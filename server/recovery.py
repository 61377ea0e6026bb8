"""Engine after engine: starts one, sees it die or hang, starts the next, and has every request go on there.

The only room that knows both the supervisor and the router. Raises where no other start can help.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from inferd.engine.api.client import EngineClient
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.supervisor import Supervisor, describe_exit
from inferd.server.deaths import Deaths
from inferd.server.router import Router
from inferd.server.watchdog import TICK_S, Watchdog

logger = logging.getLogger("inferd")

_LAST_WORDS_S = 0.2
"""A child that refuses to start says why before it exits: that message wins over its exit code."""


class Recovery:
    """The engines of one server. `run` ends only by an error, or cancelled."""

    def __init__(self, router: Router, config: EngineConfig, log_level: str) -> None:
        self._router, self._config, self._log_level = router, config, log_level
        self._deaths = Deaths()
        router.on_recovered = self._log_recovered

    async def run(self) -> NoReturn:
        """Raises `StartError` where the first engine cannot start, and `EngineDeadError` where engines die at once."""
        generation = 0
        while True:
            reason = await self._live(generation)
            generation += 1
            if not self._router.became_ready.is_set():
                raise EngineDeadError(reason)
            delay_s = self._deaths.died(time.monotonic(), self._router.num_delivered)
            if delay_s is None:
                raise EngineDeadError(f"{reason}; so did those before it, and none delivered a token")
            waiting = f"{self._router.num_active} requests wait"
            logger.error("%s: starting another%s; %s", reason, f" in {delay_s:.2g} s" if delay_s else "", waiting)
            await asyncio.sleep(delay_s)

    async def _live(self, generation: int) -> str:
        """One engine, from its start to its end; returns how it ended. Nothing is left of it."""
        supervisor = Supervisor(self._config, generation=generation, log_level=self._log_level)
        client = EngineClient(supervisor.run_dir, generation, on_first_frame=supervisor.seal)
        try:
            self._router.attach(client)
            supervisor.spawn()
            reason = await self._end_of(supervisor)
            supervisor.kill()
            await supervisor.wait()
            self._router.lose(supervisor.in_flight())
            return reason
        except asyncio.CancelledError:
            await supervisor.stop()
            raise
        finally:
            supervisor.discard()
            client.close()

    async def _end_of(self, supervisor: Supervisor) -> str:
        """How the engine ended, or why it has to. Raises `StartError` where the first one says that it cannot start."""
        receive = asyncio.create_task(self._receive())
        wait = asyncio.create_task(supervisor.wait())
        watch = asyncio.create_task(_hang_of(supervisor))
        tasks = (receive, watch, wait)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if wait.done() and wait.result() >= 0 and not self._router.is_up:
                await asyncio.wait((receive,), timeout=_LAST_WORDS_S)
            if receive.done():
                return receive.result()
            return f"the engine process {describe_exit(wait.result()) if wait.done() else watch.result()}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> str:
        """Why the engine's messages end. Raises `StartError` where the first one says that it cannot start."""
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


async def _hang_of(supervisor: Supervisor) -> str:
    """Return once the engine hangs, and why it counts as hung."""
    watchdog = Watchdog(time.monotonic())
    while True:
        await asyncio.sleep(TICK_S)
        reason = watchdog.look(supervisor.pulse(), time.monotonic())
        if reason is not None:
            return reason

"""The server's handle of a simulated process, in place of `inferd.engine.api.process.engine_process.EngineProcess`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from inferd.engine.api.process.flight_recorder import FlightReader, flight_bytes
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES, HeartbeatReader, Pulse
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.processor_time import ProcessorUse
from tests.sim.process import KILLED, SimulatedProcess
from tests.sim.watcher import Watcher


class AlwaysRuns:
    """The server's own process as the kernel would see it."""

    def is_stopped(self) -> bool:
        return False

    def use(self) -> ProcessorUse:
        return ProcessorUse()

    def forget(self) -> None:
        """There is nothing to forget."""


class SimulatedHandle:
    """One process, from spawn to exit code. `run` is called for each of its events."""

    def __init__(
        self,
        run: Watcher,
        config: SimpleNamespace,
        *,
        epoch: int,
        log_style: LogStyle,
        is_standby: bool = False,
        early: None = None,
    ) -> None:
        self._run, self.epoch, self._is_standby = run, epoch, is_standby
        self.replica: int = config.replica
        self.run_dir = Path(f"/simulated/{run.name}{len(run.lives)}")
        self.process: SimulatedProcess | None = None
        self.is_discarded = False
        sizes = (HEARTBEAT_BYTES, flight_bytes(run.scenario.core.limits.max_num_seqs))
        self._shared = tuple(map(run.network.allocate, sizes))
        self._pulse, self._flight = HeartbeatReader(self._shared[0]), FlightReader(self._shared[1])
        run.lives.append(self)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else 1 + self._run.lives.index(self)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    @property
    def has_exited(self) -> bool:
        """Whether it exited by itself, with a code of its own."""
        code = self._started().exit_code
        return self._started().is_known_dead and code is not None and code >= 0

    def spawn(self) -> None:
        self.process = SimulatedProcess(
            self._run, self.run_dir, self._shared, self.epoch, replica=self.replica, is_standby=self._is_standby
        )

    def promote(self) -> None:
        self._started().promoted.set()

    @property
    def processor_time(self) -> SimulatedProcess:
        return self._started()

    def pulse(self) -> Pulse | None:
        assert not self.is_discarded, "the heartbeat of what was discarded is read"
        return self._pulse.read()

    def in_flight(self) -> dict[int, int]:
        assert not self.is_discarded, "the flight record of what was discarded is read"
        return self._flight.in_flight()

    def connected(self) -> None:
        """The simulation has no names to remove, and notices each death early."""

    def kill(self) -> None:
        if self.process is not None:
            self.process.end(KILLED)

    async def news(self, within_s: float) -> int | None:
        process = self._started()
        if not process.is_known_dead:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await process.news.wait()
            process.news.clear()
        return process.exit_code if process.is_known_dead else None

    def wake(self) -> None:
        self._started().news.set()

    async def wait(self) -> int:
        process = self._started()
        await process.exited.wait()
        assert process.exit_code is not None
        return process.exit_code

    async def stop(self, grace_s: float = 5.0) -> int:
        self._started().harms.append("stopped")
        self.kill()
        return await self.wait()

    def discard(self) -> None:
        if self.process is not None and self.process.exit_code is None:
            self.process.harms.append("discarded")
        is_gone = self.process is None or self.process.exited.is_set()
        assert is_gone, "the event loop waits until memory is free"
        self.kill()
        self.is_discarded = True

    def _started(self) -> SimulatedProcess:
        assert self.process is not None, "the engine was never started"
        return self.process

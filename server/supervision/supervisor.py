"""The supervisor starts an engine, notices when it dies or hangs, and starts the next one. Requests continue there.

It knows both the engine processes and the router, as `server/lifecycle/engines` does, which runs the supervisors. The
restart policy says how soon to start the next engine, and when to stop trying.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import NoReturn

import msgspec

from inferd.engine.api.config import EngineConfig, keeps_pool, lendable_threads
from inferd.engine.api.errors import CapacityError, ChangedError, EngineDeadError, LaunchError, StartError
from inferd.engine.api.machine.cpu import num_cpus
from inferd.engine.api.process.engine_forks import EarlyProcess, EngineForks
from inferd.engine.api.process.logs import LogStyle, counted
from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.api.wire.messages import UseThreads
from inferd.server.dispatch.router import Router
from inferd.server.supervision.engine_handle import EngineHandle, Standby

logger = logging.getLogger("inferd")

_LAST_WORDS_S = 0.2
"""A child that refuses to start says why before it exits: this message is preferred to its exit code."""

WINDOW_S = 60.0
"""Seconds of serving. Starts do not count: those of a large model take minutes, so that deaths would never add up."""
MAX_DEATHS = 5
"""Most deaths within `WINDOW_S` with no token delivered between them; one more ends the server."""

RETRY_S = 60.0
"""Seconds between the tries to start a replica whose engines kept dying while others serve."""
_BESIDE_OTHERS_S = 1.0
"""Least seconds before a start while other replicas serve: they take over the streams, and need the cores for that."""
_MOST_BESIDE_OTHERS_S = 10.0
"""Most seconds more that such a start waits until each of these streams has had a token there."""
_LOOK_S = 0.05
_NAMED = 8
"""Requests that the log names when an engine dies."""
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0


class RestartPolicy:
    """Counts recent deaths of one replica's engines. Knows no processes and no clock."""

    def __init__(self) -> None:
        self._without_delivery: deque[float] = deque()
        """Times of deaths since the last token was delivered."""
        self._recent: deque[float] = deque()
        self._num_delivered = 0

    @property
    def num_without_delivery(self) -> int:
        """Recent deaths since the last token was delivered."""
        return len(self._without_delivery)

    def died(self, served_s: float, num_delivered: int) -> float | None:
        """Seconds to wait before the next start; None if there should be none.

        `served_s`: seconds that all engines have served so far. `num_delivered`: tokens and ends that they delivered to
        streams.
        """
        if num_delivered > self._num_delivered:
            self._num_delivered = num_delivered
            self._without_delivery.clear()
        for times in (self._without_delivery, self._recent):
            times.append(served_s)
            while served_s - times[0] > WINDOW_S:
                times.popleft()
        if len(self._without_delivery) > MAX_DEATHS:
            return None
        # No wait after the first death. Then the wait doubles if nothing was delivered, and else grows a little.
        doubling_s = _FIRST_DELAY_S * (2.0 ** (len(self._without_delivery) - 1) - 1)
        return min(max(doubling_s, _FIRST_DELAY_S * (len(self._recent) - 1) / 10), _MAX_DELAY_S)


class EngineSupervisor:
    """Keeps one engine running for one server. `run` ends only by an error or cancelled."""

    def __init__(
        self,
        router: Router,
        config: EngineConfig,
        log_style: LogStyle,
        on_standby: Callable[[bool], None],
        forks: EngineForks | None = None,
        index: int = 0,
        label: str = "",
        for_clients: Callable[[str], str] = str,
        pools: MutableMapping[int, MemoryFile] | None = None,
    ) -> None:
        """`on_standby` is called with whether a standby waits to be promoted. `forks` gives engine processes that have
        their libraries imported. `index`: the router's replica that the engines serve. `label` begins its log lines.
        `for_clients` leaves of a reason what clients may read. `pools`: replica -> memory of its KV pool, which the
        owner may keep for later supervisors."""
        self._router, self._config, self._log_style = router, config, log_style
        self._replicas, self._replica, self._lifecycle = router.replicas, router.replicas[index], router.lifecycle
        self._label, self._for_clients = label, for_clients
        self._name = label + (f"replica {index}: " if len(router.replicas) > 1 else "")
        self._restart_policy = RestartPolicy()
        self._served_s, self._serves_since_s = 0.0, math.inf
        self._standby = Standby(lambda epoch: self._begin(epoch, is_standby=True), on_standby)
        self._epoch, self._forks = 0, forks
        self._pools = {} if pools is None else pools
        """Has memory of this replica if its KV pool outlives each engine."""
        if keeps_pool(config) and index not in self._pools:
            self._pools[index] = MemoryFile(POOL_MEMORY)
        self._moved: frozenset[str] = frozenset()
        """Requests that the last engine computed when it ended."""
        self._refusal: ChangedError | LaunchError | None = None
        """Why no other engine should be tried: it would compute other answers, or the GPU cannot launch
        its kernels."""
        self._shares_numerics = False
        """Whether the last engine was to have the numerics of the model's first one."""
        self._replica.on_up, router.hooks.on_recovered = self._began_to_serve, self._log_recovered

    async def run(self) -> NoReturn:
        """Raises `StartError` if the first engine cannot start, or if a later one would compute other answers or has
        kernels that the GPU cannot launch. Raises `EngineDeadError` if it dies while the server starts, or if engines
        keep dying. While another replica serves, it is tried again instead."""
        try:
            while True:
                self._refusal = None
                reason = await self._run_one()
                self._epoch += 1
                has_changed = isinstance(self._refusal, ChangedError)
                if has_changed and self._replicas.numerics is not None and not self._shares_numerics:
                    logger.warning("%s%s; another engine starts, which must compute the same", self._name, reason)
                    continue
                if self._lifecycle.is_first_start:
                    raise self._refusal or EngineDeadError(reason)
                await self._wait_before_start(self._delay_s(reason))
        finally:
            await self._drop_standby()
            self._pools = {}  # others refer to this supervisor for longer

    def _delay_s(self, reason: str) -> float:
        """Seconds to wait after an engine that ended. Raises the refusal or `EngineDeadError` if no other should
        start."""
        if self._refusal is not None:
            return self._give_up(self._refusal)
        self._served_s += max(time.monotonic() - self._serves_since_s, 0.0)
        delay_s = self._restart_policy.died(self._served_s, self._replica.num_delivered)
        if self._restart_policy.num_without_delivery > 1 and self._replica.index in self._pools:
            # Its content may end the engines, or it takes the memory that they lack.
            self._pools[self._replica.index] = MemoryFile(POOL_MEMORY)
        if delay_s is None or self._replica.failure:
            reason = f"{reason}; those before it ended too, and none delivered a token"
            return self._give_up(EngineDeadError(reason))
        return delay_s

    async def _wait_before_start(self, delay_s: float) -> None:
        least = ""
        if self._replicas.is_up:
            delay_s, least = max(delay_s, _BESIDE_OTHERS_S), "at least " if self._moved else ""
        logger.warning("%sstarting another engine%s", self._name, f" in {least}{delay_s:.2g} s" if delay_s else "")
        await asyncio.sleep(delay_s)
        latest_s = time.monotonic() + _MOST_BESIDE_OTHERS_S
        while any(self._moved & other.waiting.keys() for other in self._replicas if other.is_up):
            if time.monotonic() >= latest_s:
                break
            await asyncio.sleep(_LOOK_S)

    def _share_cores(self, *, is_lent: bool) -> None:
        """Let the other replicas compute on this one's cores, or no more. None gets more threads than there are cores,
        unless it has more of its own."""
        self._replica.lends_cores = is_lent
        num_threads, replicas = lendable_threads(self._config), self._replicas
        if num_threads and len(replicas) > 1:
            num_using = sum(not replica.lends_cores for replica in replicas)
            most = max(num_threads, num_cpus())
            for replica in replicas:
                if replica.is_up:
                    replica.try_send(UseThreads(min(num_threads * len(replicas) // num_using, most)))

    def _give_up(self, error: ChangedError | LaunchError | EngineDeadError) -> float:
        """Seconds to wait before the next try, if another replica serves meanwhile. Raises the error if none does."""
        self._replica.failure = self._for_clients(str(error))
        others_serve = any(other.is_up or not other.failure for other in self._replicas)
        if not others_serve or not self._lifecycle.loaded.is_set():
            raise error
        self._restart_policy = RestartPolicy()
        return RETRY_S

    async def _run_one(self) -> str:
        """Run one engine, from its start or promotion to its end; returns how it ended."""
        self._shares_numerics, self._serves_since_s = self._replicas.numerics is not None, math.inf
        try:
            handle = await self._next()
        except StartError as error:
            if not self._lifecycle.loaded.is_set():
                raise
            return self._log_death(f"the engine could not start: {error}")
        receive = asyncio.create_task(self._receive())
        try:
            try:
                reason = await self._end_of(handle, receive)
                if handle.lacked_memory and self._lifecycle.is_first_start:
                    raise CapacityError(reason)
                await self._move_streams(handle, reason)
                return reason
            finally:
                await asyncio.gather(receive, return_exceptions=True)
        except asyncio.CancelledError:
            await handle.process.stop()
            raise
        finally:
            await handle.end()

    async def _move_streams(self, handle: EngineHandle, reason: str) -> None:
        """Send the streams of an engine that ended to another replica, or have them wait for the next engine."""
        await handle.kill()
        in_flight, index = handle.process.in_flight(), self._replica.index
        self._moved = frozenset(self._replica.streams)
        computed = self._router.recovery.lose(in_flight, is_external_kill=handle.is_external_kill, index=index)
        self._log_death(reason)
        self._share_cores(is_lent=self._replicas.is_up)
        await self._router.recovery.send_waiting(index)
        if computed:
            more = f" and {len(computed) - _NAMED} more" if len(computed) > _NAMED else ""
            logger.warning("the engine that died was computing %s%s", ", ".join(computed[:_NAMED]), more)

    async def _next(self) -> EngineHandle:
        """The standby if it can be promoted, else a newly started process. Raises `StartError`."""
        handle = await self._standby.take()
        # An engine that starts beside serving ones imports its libraries at low priority, as a standby does.
        is_standby = handle is not None or self._replicas.is_up
        if handle is None:
            early = await self._forks.next() if self._forks is not None else None
            with contextlib.closing(early) if early is not None else contextlib.nullcontext():
                handle = self._begin(self._epoch, is_standby=is_standby, early=early)
        else:
            logger.info("%sthe standby is promoted", self._name)
        self._share_cores(is_lent=False)
        self._router.attach(handle.client, self._replica.index)
        if is_standby:
            handle.process.promote()
        return handle

    def _begin(self, epoch: int, *, is_standby: bool, early: EarlyProcess | None = None) -> EngineHandle:
        config, numerics = self._config, self._replicas.numerics
        if self._replica.index in self._pools:
            config = msgspec.structs.replace(config, pool_memory=self._pools[self._replica.index].path)
        if numerics is not None:
            config = msgspec.structs.replace(config, numerics=numerics)
        return EngineHandle.begin(config, epoch, self._log_style, is_standby=is_standby, early=early)

    def _began_to_serve(self) -> None:
        self._serves_since_s = time.monotonic()
        if self._epoch and len(self._replicas) > 1:
            logger.info("%sthe next engine takes requests", self._name)
            self._share_cores(is_lent=False)  # it does not know of cores that others lend
        # Until now the engine needed the cores itself.
        if self._config.standby:
            self._standby.keep(self._epoch + 1)

    async def _drop_standby(self) -> None:
        handle = await self._standby.take()
        if handle is not None:
            await handle.process.stop()
            handle.discard()

    async def _end_of(self, handle: EngineHandle, receive: asyncio.Task[str]) -> str:
        """How the engine ended, or why it must. Raises `StartError` if the first one says that it cannot start.

        From then on nothing is received: `receive` is cancelled. It is not awaited, because the streams wait.
        """
        try:
            ended = await handle.ended(receive)
            if handle.process.has_exited and not self._replica.is_up:
                await asyncio.wait((receive,), timeout=_LAST_WORDS_S)
        finally:
            receive.cancel()
        return receive.result() if receive.done() else ended

    async def _receive(self) -> str:
        """Why the engine's messages end. Raises `StartError` if the first one says that it cannot start."""
        try:
            await self._router.run(self._replica.index)
        except (ChangedError, LaunchError) as error:
            self._refusal = error
            return f"the engine could not start: {error}"
        except StartError as error:
            if not self._lifecycle.loaded.is_set():
                raise
            return f"the engine could not start: {error}"
        except EngineDeadError as error:
            return str(error)

    def _log_death(self, reason: str) -> str:
        """If the server goes on, it says so before the streams do."""
        if self._lifecycle.is_first_start:
            return reason
        requests = counted(self._router.streams.num_unsent, "request")
        fate = (
            f"moving {requests} to another replica" if self._replicas.is_up else f"holding {requests} for the next one"
        )
        logger.error("%s%s; %s", self._name, reason, fate)
        return reason

    def _log_recovered(self, num_replayed: int, outage_s: float) -> None:
        logger.warning("%sRECOVERED in %.2f s: resumed %s", self._label, outage_s, counted(num_replayed, "request"))

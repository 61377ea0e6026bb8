"""The server's side under simulation: the real router and the real recovery, on a loop with virtual time.

The engines die, hang and send damaged frames. Callers read their streams to the end, and the streams are compared with
the oracle.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest

from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.process import flight_recorder as flight_module
from inferd.engine.api.process import heartbeat as heartbeat_module
from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.wire import client as client_module
from inferd.engine.api.wire.client import from_engine_endpoint, to_engine_endpoint
from inferd.engine.api.wire.messages import Submit, SubmitChoices, ToEngine
from inferd.engine.core import rechecks as rechecks_module
from inferd.engine.process import main as parts_module
from inferd.server.dispatch import recovery as recovery_module
from inferd.server.dispatch import router as router_module
from inferd.server.dispatch.admission import QueueBounds
from inferd.server.dispatch.recovery import Quarantine
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.supervision import engine_handle as life_module
from inferd.server.supervision import supervisor as supervisor_module
from inferd.server.supervision.supervisor import EngineSupervisor
from tests.sim.callers import Callers
from tests.sim.cells import SimulationError
from tests.sim.engine_process import AlwaysRuns, SimulatedHandle
from tests.sim.faults import Caller, Fault, FrontScenario, make_front_scenario, make_left_scenario
from tests.sim.history import CheckedMetrics, History
from tests.sim.left_memory import LeftMemory
from tests.sim.loop import Clocks, VirtualLoop
from tests.sim.network import Network
from tests.sim.process import NUM_THREADS, SimulatedProcess
from tests.sim.tier import SimulatedTier

_LIMIT_S = 7200.0
"""Virtual seconds after which a run counts as endless."""
_STALLED_S = 5.0
"""R10: seconds within which some request gets a delta, if a healthy engine takes requests."""
_LOOK_S = 0.5
_TOLD_S = 1.0
"""Most seconds until engines that compute without a fault take a message."""
_CLOSE_S = 60.0


def run_front_seed(seed: int) -> None:
    """Run the front scenario of `seed`. Raises `AssertionError` for any difference."""
    run_front(make_front_scenario(seed))


def run_left_seed(seed: int) -> None:
    """As `run_front_seed`, with engines that find what the ones before left."""
    run_front(make_left_scenario(seed))


def run_front(scenario: FrontScenario) -> FrontRun:
    """Run a scenario, which may be changed, as `run_front_seed` does. Returns the run at its end."""
    seed = scenario.seed
    loop = VirtualLoop(Random(f"order {seed}"), _LIMIT_S)
    with _simulated(seed, loop) as (network, clocks):
        run = FrontRun(scenario, loop, network, clocks)
        try:
            loop.run_until_complete(run.main())
        finally:
            _close(loop)
    if run.error is not None:
        raise run.error
    return run


@contextmanager
def _simulated(seed: int, loop: VirtualLoop) -> Iterator[tuple[Network, Clocks]]:
    """Replace sockets, shared memory and clocks with simulated ones."""
    network, clocks = Network(Random(f"network {seed}")), Clocks(loop)
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "zmq", network.as_zmq())
        patch.setattr(flight_module, "open_map", network.open_map)
        patch.setattr(heartbeat_module, "open_map", network.open_map)
        patch.setattr(recovery_module, "_REPLAYED_AT_ONCE", 1)
        patch.setattr(rechecks_module, "_PART_OF_POOL", 2)
        patch.setattr(parts_module, "MAX_SCORED", 7)
        patch.setattr(supervisor_module, "num_cpus", lambda: 64)
        slow = _slow(Random(f"turns {seed}"))
        for module in (router_module, recovery_module):
            patch.setattr(module, "asyncio", slow)
        # The configuration of a simulated engine names its run.
        patch.setattr(life_module, "ProcessorTime", lambda pid, **how: AlwaysRuns())
        patch.setattr(life_module, "EngineProcess", lambda config, **rest: SimulatedHandle(config.run, config, **rest))
        for name, module in list(sys.modules.items()):
            if name.startswith(("inferd.server.", "inferd.engine.api.")) and getattr(module, "time", None) is time:
                patch.setattr(module, "time", clocks)
        try:
            yield network, clocks
        finally:
            logging.disable(logging.NOTSET)


def _slow(rng: Random) -> SimpleNamespace:
    """The module `asyncio` of router and recovery, with turns of the loop that may take a while, as if it were busy."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds + rng.choice((0.0, 0.0, 0.01)))

    return SimpleNamespace(sleep=sleep)


def _close(loop: VirtualLoop) -> None:
    """End all tasks that an error left behind, so that they report nothing later."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_S))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
    loop.close()


class FrontRun:
    """One run of a scenario. Observes every process and every request."""

    name = ""
    """Begins the names of its files."""

    def __init__(self, scenario: FrontScenario, loop: VirtualLoop, network: Network, clocks: Clocks) -> None:
        self.scenario, self.network, self.clocks = scenario, network, clocks
        self.rng = Random(f"run {scenario.seed}")
        self.lives: list[SimulatedHandle] = []
        rng = Random(f"left {scenario.seed}")
        is_lost = scenario.has_tier and rng.random() < 0.5
        self.memories = [LeftMemory(rng, is_lost=is_lost) for _ in range(scenario.num_replicas)]
        self.tiers = [SimulatedTier(rng, memory) if scenario.has_tier else None for memory in self.memories]
        self.error: BaseException | None = None
        self.num_failures = 0
        """Times that the model could not be loaded while the server goes on with others."""
        self.history = History(loop)
        self.num_replaying = 0
        """Replicas that are being sent the requests of an engine that died, and are not read from meanwhile."""
        self._loop = loop
        self._callers = {caller.job.request_id: caller for caller in scenario.callers}

    async def main(self) -> None:
        """The whole run: an engine, the callers, the end."""
        scenario = self.scenario
        self.metrics = CheckedMetrics(self._loop.time)
        options = RouterOptions(
            QueueBounds(scenario.max_waiting),
            outage_grace_s=scenario.outage_grace_s,
            num_replicas=scenario.num_replicas,
        )
        self.router = Router(None, self.metrics, options, Quarantine(self._loop.time))
        self._note_replays()
        recovery = asyncio.create_task(self._recover())
        started = asyncio.create_task(self.router.lifecycle.loaded.wait())
        await asyncio.wait((recovery, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not self.router.lifecycle.loaded.is_set():
            self.history.check_failed_start(recovery)
            return
        await self._serve(recovery)
        await self._end(recovery)

    def _note_replays(self) -> None:
        replay = self.router.recovery.replay

        async def noted() -> int:
            self.num_replaying += 1
            try:
                return await replay()
            finally:
                self.num_replaying -= 1

        self.router.recovery.replay = noted  # type: ignore[method-assign]

    async def _recover(self) -> None:
        """Keep an engine running in every replica, as the server does."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in range(self.scenario.num_replicas):
                    config = self.config_of(replica)
                    supervisor = EngineSupervisor(self.router, config, LogStyle(), lambda is_warm: None, index=replica)
                    group.create_task(supervisor.run())
        except* Exception as errors:
            raise errors.exceptions[0] from None

    def config_of(self, replica: int) -> SimpleNamespace:
        """The configuration of a replica's engines."""
        limits = self.scenario.core.limits
        return SimpleNamespace(
            run=self,
            max_num_seqs=limits.max_num_seqs,
            standby=self.scenario.has_standby,
            replica=replica,
            device="cpu",
            cpus=(),
            tensor_parallel_size=1,
            num_threads=NUM_THREADS,
            modelled=None,
            prefix_caching=False,  # the run keeps what engines leave, and not the server
        )

    def faults_of(self, replica: int, epoch: int) -> tuple[Fault, ...]:
        """The faults of the engine that is about to start."""
        lives = self.scenario.other_lives if replica else self.scenario.lives
        return lives.get(epoch, ())

    async def _serve(self, recovery: asyncio.Task[None]) -> None:
        callers = Callers(self)
        watching = [asyncio.create_task(each) for each in (self._disturb(), self._watch())]
        asking = asyncio.gather(*(callers.ask(caller) for caller in self.scenario.callers if not caller.choice_of))
        try:
            await self._until_done(asking, recovery, watching)
        finally:
            for task in (asking, *watching):
                task.cancel()
            await asyncio.gather(asking, *watching, return_exceptions=True)
        callers.check_end()

    async def _until_done(
        self, asking: asyncio.Future[list[None]], recovery: asyncio.Task[None], watching: list[asyncio.Task[None]]
    ) -> None:
        """Return when all callers are done. Raises the first error, from any task."""
        tasks: set[asyncio.Future[object]] = {asking, recovery, *watching}  # type: ignore[arg-type]
        while not asking.done():
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            for task in watching:
                if task.done():
                    task.result()
            if recovery in tasks and recovery.done():
                self._give_up(recovery)
            tasks = {task for task in tasks if not task.done()}
        asking.result()

    def _give_up(self, recovery: asyncio.Task[None]) -> None:
        """Give up as the server does if no engine can be started."""
        error = recovery.exception()
        if not isinstance(error, EngineDeadError):
            raise error or SimulationError("recovery has ended")
        self.history.check_given_up(self.scenario.num_replicas)
        self.router.loading.stop()

    async def _end(self, recovery: asyncio.Task[None]) -> None:
        """Drain. Prove that the last engine is empty, and that nothing is left of any engine."""
        self.router.lifecycle.drain()
        await self.router.streams.drained()
        await asyncio.sleep(1.0)
        if self.error is not None:
            raise self.error
        for replica in self.router.replicas:
            process = self._serving(replica.index)
            if replica.is_up and process is not None and process.engine is not None and not process.harms:
                process.engine.check_idle()
        if not recovery.done():
            for replica in self.router.replicas:
                self.history.check_not_given_up(replica.index, replica.num_delivered)
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)
        assert all(life.is_discarded for life in self.lives), "something is left of an engine"
        running = [life.epoch for life in self.lives if life.process is not None and life.process.exit_code is None]
        assert not running, f"engines {running} outlived their server"
        await self._check_tasks()

    async def _check_tasks(self) -> None:
        await asyncio.sleep(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks outlived the server: {left}"

    # -- what goes on beside the callers -----------------------------------------------------------------------------

    async def _disturb(self) -> None:
        """Jump the wall clock, drop the prefix cache, abort all requests."""
        scenario, start_s = self.scenario, self._loop.time()
        events = [(at_s, "wall", by_s) for at_s, by_s in scenario.wall_jumps_s]
        events += [(at_s, "reset", 0.0) for at_s in scenario.resets_s]
        events += [(scenario.aborts_all_s, "abort", 0.0)] if scenario.aborts_all_s is not None else []
        for at_s, what, by_s in sorted(events):
            await asyncio.sleep(max(0.0, start_s + at_s - self._loop.time()))
            if what == "wall":
                self.clocks.wall_offset_s += by_s
            elif what == "reset":
                self.router.reset_prefix_cache()
            else:
                for request_id in self.router.streams.by_id:
                    self.history.aborted(request_id, self.process_of(request_id))
                self.router.streams.abort_all()
        await asyncio.Event().wait()

    async def _watch(self) -> None:
        """R10: no request waits for long while no fault is active."""
        last, since_s = -1, self._loop.time()
        all_up_s = since_s
        while True:
            await asyncio.sleep(_LOOK_S)
            now, router = self._loop.time(), self.router
            if not self.is_calm(now) or not all(replica.is_up for replica in router.replicas):
                all_up_s = now
            assert now - all_up_s <= _TOLD_S or not self._num_lent(), "cores that were lent were not given back"
            if (
                not router.replicas.is_up
                or not router.streams.num_active
                or router.replicas.num_delivered != last
                or not self.is_calm(now)
            ):
                last, since_s = router.replicas.num_delivered, now
            waited_s = now - since_s
            assert waited_s <= _STALLED_S, f"{router.streams.num_active} streams were given nothing for {waited_s:g} s"

    def _num_lent(self) -> int:
        """Number of threads that engines compute on beside their own."""
        engines = (self._serving(replica.index) for replica in self.router.replicas)
        return sum(engine.num_threads - NUM_THREADS for engine in engines if engine is not None)

    def is_calm(self, now: float) -> bool:
        """Whether no engine has a fault at the moment."""
        processes = [life.process for life in self.lives if life.process is not None]
        return all(each.exit_code is not None or (not each.harms and each.calm_s <= now) for each in processes)

    # -- what processes tell -----------------------------------------------------------------------------------------

    def caller_of(self, request_id: str) -> Caller:
        return self._callers[request_id]

    def process_of(self, request_id: str) -> SimulatedProcess | None:
        """The engine that the router sent the request to; None if it waits for one."""
        holding = (replica.index for replica in self.router.replicas if request_id in replica.streams)
        index = next(holding, None)
        return None if index is None else self._serving(index)

    def _serving(self, replica: int) -> SimulatedProcess | None:
        """The newest engine of a replica that was started or promoted."""
        processes = [life.process for life in self.lives if life.replica == replica and life.process is not None]
        return next((process for process in reversed(processes) if process.promoted.is_set()), None)

    def old_frames(self, process: SimulatedProcess, way: str) -> Sequence[bytes]:
        before = [
            life.run_dir for life in self.lives if life.replica == process.replica and life.epoch == process.epoch - 1
        ]
        if not before:
            return ()
        endpoint = to_engine_endpoint if way == "in" else from_engine_endpoint
        return self.network.pipe(endpoint(before[-1])).sent

    def taken(self, process: SimulatedProcess, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.history.sent(message.request_id, process)
        elif isinstance(message, SubmitChoices):
            for request_id in (message.first.request_id, *(request_id for request_id, _ in message.others)):
                self.history.sent(request_id, process)

    def ended(self, process: SimulatedProcess, in_flight: set[int]) -> None:
        names = {name for name in self._callers if tag_of(name) in in_flight}
        try:
            self.history.died(process, names, self.router.replicas[process.replica].num_delivered)
        except AssertionError as error:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        self.error = self.error or error
        self.router.loading.stop()

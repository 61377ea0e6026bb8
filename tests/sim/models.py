"""Two models of one server under simulation: the real `Engines` of each, unloaded, loaded and put to sleep while
requests come.

Each model is a run of the front simulation, with its own router, callers and checks, on one loop and one network. Some
engines refuse to start. The rules of the other model then hold as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from inferd.engine.api.errors import EngineDeadError, RequestError, StartError
from inferd.server.dispatch.admission import QueueBounds
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.recovery import Quarantine
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.dispatch.sleeping import Level, Mode
from inferd.server.lifecycle import engines as engines_module
from inferd.server.lifecycle.engines import Engines
from tests.sim.callers import Callers
from tests.sim.faults import Fault, FrontScenario, make_front_scenario
from tests.sim.front import _LIMIT_S, FrontRun, _close, _simulated
from tests.sim.history import CheckedMetrics
from tests.sim.loop import Clocks, VirtualLoop
from tests.sim.network import Network

_LOADED_S = 10.0
"""Most seconds from a request to an unloaded model until its engine takes requests, or is known to be unable to."""
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class ModelScenario:
    """One model, and what operators do with it."""

    front: FrontScenario
    unloads_s: tuple[float, ...]
    loads_s: tuple[float, ...]
    idle_s: float | None
    failing: frozenset[int]
    """Loads, from 0, whose engine refuses to start."""
    sleeps: tuple[Sleep, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """One sleep, from which an operator wakes the model."""

    at_s: float
    for_s: float
    level: Level
    mode: Mode


def make_model_scenario(seed: int) -> ModelScenario:
    rng = Random(f"model {seed}")
    front = make_front_scenario(seed)
    gaps = [rng.choice((0, 0, 0, 2_000)) * rng.random() for _ in front.callers]
    callers, late = [], 0
    for gap, caller in zip(gaps, front.callers, strict=True):
        # Choices come with their request.
        late += 0 if caller.choice_of else int(gap)
        job = replace(caller.job, arrival_tick=caller.job.arrival_tick + late)
        callers.append(replace(caller, job=job, kills_at=None))
    front = replace(front, callers=tuple(callers), lives={}, other_lives={}, aborts_all_s=None, max_waiting=2048)
    times = [rng.random() * 20 for _ in range(8)]
    return ModelScenario(
        front,
        unloads_s=tuple(sorted(times[: rng.choice((0, 2, 4))])),
        loads_s=tuple(sorted(times[4 : 4 + rng.choice((0, 1, 3))])),
        idle_s=rng.choice((None, 0.1, 1.0, 3.0)),
        failing=frozenset(load for load in range(6) if rng.random() < 0.2),
        sleeps=tuple(_sleep_of(rng) for _ in range(rng.choice((0, 0, 1, 3)))),
    )


def _sleep_of(rng: Random) -> Sleep:
    level: Level = rng.choice((0, 1, 2))
    # The callers know no abort that they did not ask for.
    mode: Mode = rng.choice(("wait", "keep")) if level else "wait"
    return Sleep(rng.random() * 20, rng.choice((0.0, 0.5, 2.0)) * rng.random(), level, mode)


def run_models_seed(seed: int) -> None:
    """Run two models side by side. Raises `AssertionError` for any difference."""
    loop = VirtualLoop(Random(f"order {seed}"), _LIMIT_S)
    with _simulated(seed, loop) as (network, clocks), _simulated_engines():
        runs = [
            ModelRun(make_model_scenario(2 * seed + i), f"{name}-", loop, network, clocks)
            for i, name in enumerate("ab")
        ]

        async def main() -> None:
            await asyncio.gather(*(run.main() for run in runs))
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks outlived the server: {left}"

        try:
            loop.run_until_complete(main())
        finally:
            _close(loop)
    for run in runs:
        if run.error is not None:
            raise run.error


@contextlib.contextmanager
def _simulated_engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines_module, "replicas_of", lambda config: config.replicas)
        yield


def _raise_if_strange(task: asyncio.Future[object]) -> None:
    """Raise the error that ended a task of the server, unless it is one of the server's own errors."""
    with contextlib.suppress(RequestError, StartError, EngineDeadError):
        try:
            task.result()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


class ModelRun(FrontRun):
    """One of the models."""

    def __init__(self, scenario: ModelScenario, name: str, loop: VirtualLoop, network: Network, clocks: Clocks) -> None:
        super().__init__(scenario.front, loop, network, clocks)
        self.name, self._asked = name, scenario
        self._load = self.num_sleeps = 0

    async def main(self) -> None:
        scenario = self.scenario
        self.metrics = CheckedMetrics(self._loop.time)
        options = RouterOptions(QueueBounds(scenario.max_waiting), num_replicas=scenario.num_replicas)
        self.router = Router(None, self.metrics, options, Quarantine(self._loop.time))
        self.engines = Engines(
            self._report(),
            self.router,
            self.metrics,
            self._failed,
            open_anew=_unchanged,  # type: ignore[arg-type]
        )
        running = [asyncio.create_task(self.engines.run())]
        await self.router.lifecycle.settled.wait()
        if self._asked.idle_s is not None:
            running.append(asyncio.create_task(self.engines.unload_when_idle(self._asked.idle_s)))
        await self._ask_and_disturb(running)
        self.router.lifecycle.drain()
        await self.router.streams.drained()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert not self._running(), "an engine outlived its server"
        assert all(life.is_discarded for life in self.lives), "something is left of an engine"
        assert self.metrics.num_restarts == 0, "an engine was replaced, and none died"

    async def _ask_and_disturb(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Until all callers are done. Raises the first error of any task."""
        callers = Callers(self)
        watching = [asyncio.create_task(each) for each in (self._operate(), self._watch())]
        asking = asyncio.gather(*(callers.ask(caller) for caller in self.scenario.callers if not caller.choice_of))
        done, _ = await asyncio.wait((asking, *watching, *running), return_when=asyncio.FIRST_COMPLETED)
        try:
            ended = () if asking in done else done.intersection(running)
            for task in ended:
                _raise_if_strange(task)
            assert not ended, f"a task of the server has ended: {ended}"
            for task in done:
                task.result()
        finally:
            for task in (asking, *watching):
                task.cancel()
            await asyncio.gather(asking, *watching, return_exceptions=True)
        callers.check_end()

    async def _operate(self) -> None:
        """Unload, load, and put to sleep at the scenario's times."""
        start_s = self._loop.time()
        events: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (at_s, self._unload) for at_s in self._asked.unloads_s
        ]
        events += [(at_s, self._load_again) for at_s in self._asked.loads_s]
        events += [(sleep.at_s, partial(self._sleep, sleep)) for sleep in self._asked.sleeps]
        for at_s, act in sorted(events, key=lambda event: event[0]):
            await asyncio.sleep(max(0.0, start_s + at_s - self._loop.time()))
            await act()
        await asyncio.Event().wait()

    async def _unload(self) -> None:
        router, num_active, refusal = self.router, self.router.streams.num_active, ""
        is_away = router.lifecycle.state in (State.UNLOADED, State.FAILED)
        is_busy = num_active > 0 or not (router.lifecycle.loaded.is_set() or is_away)
        try:
            await router.loading.unload()
        except RequestError as error:
            refusal = error.code
        assert refusal == ("model_is_busy" if is_busy else ""), f"{num_active} requests, and the answer {refusal!r}"
        if refusal:
            return
        state = router.lifecycle.state
        assert state in (State.UNLOADED, State.LOADING, State.FAILED) or router.replicas.is_up
        assert state is State.LOADING or router.replicas.is_up or not self._running(), (
            "an engine outlived its unloading"
        )

    async def _sleep(self, sleep: Sleep) -> None:
        """Put the model to sleep, and wake it some time later."""
        router = self.router
        lifecycle, is_loading, has_failed = router.lifecycle, router.loading.is_loading, bool(router.lifecycle.failure)
        refusal = ""
        try:
            await router.sleeping.sleep(sleep.level, sleep.mode)
        except RequestError as error:
            refusal = error.code
        expected = "model_not_loaded" if has_failed else "model_is_busy" if is_loading else ""
        assert refusal == expected, f"asked to sleep, and the answer {refusal!r}"
        if refusal:
            return
        self.num_sleeps += 1
        assert lifecycle.is_asleep and not lifecycle.is_ready
        has_engines = bool(self._running())
        assert sleep.level == 0 or not has_engines, "an engine goes on while its model is asleep"
        await asyncio.sleep(sleep.for_s)
        assert lifecycle.is_asleep and bool(self._running()) is has_engines, "nobody has woken it"
        await self._load_again()

    async def _load_again(self) -> None:
        num_failures, refusal = self.num_failures, ""
        try:
            await self.router.loading.load()
        except RequestError as error:
            refusal = error.code
        assert refusal == ("model_not_loaded" if self.num_failures > num_failures else ""), f"the answer {refusal!r}"

    async def _watch(self) -> None:
        """A model that is wanted is soon loaded, by one engine for each replica."""
        waiting_s = self._loop.time()
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.error is not None:
                raise self.error
            router = self.router
            if router.lifecycle.loaded.is_set() or router.lifecycle.is_asleep or not router.streams.num_active:
                waiting_s = self._loop.time()
            assert self._loop.time() - waiting_s < _LOADED_S, f"{router.streams.num_active} requests wait for an engine"
            most = self.scenario.num_replicas * (1 + self.scenario.has_standby)
            assert len(self._running()) <= most, f"engines {self._running()} run"

    def _running(self) -> list[str]:
        return [str(life.run_dir) for life in self.lives if life.process is not None and life.process.exit_code is None]

    def _failed(self, engines: Engines, error: StartError | EngineDeadError) -> None:
        """As the server does if it has another model."""
        assert engines is self.engines
        assert isinstance(error, StartError), f"no engine refused to start, and the model has failed: {error}"
        assert self._load - 1 in self._asked.failing, "a load failed that should not"
        self.num_failures += 1
        self.router.loading.fail_model(str(error))

    def faults_of(self, replica: int, epoch: int) -> tuple[Fault, ...]:
        """A load begins with its first process."""
        if replica == 0 and epoch == 0:
            self._load += 1
        fails = self._load - 1 in self._asked.failing and replica == 0
        return (Fault("refuses", "start", 0),) if fails else ()

    def _report(self) -> SimpleNamespace:
        settings = SimpleNamespace(served_names=(self.name,), log_level="info", log_format="text", kv_events=None)
        replicas = tuple(map(self.config_of, range(self.scenario.num_replicas)))
        config = SimpleNamespace(model_path="/simulated", draft=None, replicas=replicas, all_files=())
        return SimpleNamespace(settings=settings, config=config, adapters={})


async def _unchanged(report: Any) -> Any:
    """A simulated model has no files."""
    return report

"""The engines of one model: keeps one running in each replica of the model's router, and says why none runs.

Knows no other model and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NoReturn, TypeVar

from inferd.engine.api.adapter import hold_adapter
from inferd.engine.api.config import EngineConfig, replicas_of
from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process.engine_forks import EngineForks
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.memory_file import MemoryFile
from inferd.engine.api.wire.endpoint import is_bound
from inferd.engine.api.wire.kv_publisher import KVPublisher, PublisherOptions
from inferd.engine.api.wire.messages import Phase
from inferd.server.config.settings import Settings
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.admission import QueueBounds
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.lifecycle.models import opened_anew
from inferd.server.lifecycle.ready_card import StartupReport, without_paths
from inferd.server.lifecycle.weights_digest import WeightsDigest
from inferd.server.observability.metrics import Metrics
from inferd.server.supervision.supervisor import EngineSupervisor

logger = logging.getLogger("inferd")
_LEAST_SLEEP_S = 0.01
_Error = TypeVar("_Error", bound=Exception)


async def _opened_on_a_thread(report: StartupReport) -> StartupReport:
    return await asyncio.to_thread(opened_anew, report)


class Engines:
    """The engines of one model, its router and its metrics."""

    def __init__(
        self,
        report: StartupReport,
        router: Router,
        metrics: Metrics,
        on_failed: Callable[[Engines, StartError | EngineDeadError], None],
        forks: EngineForks | None = None,
        *,
        is_alone: bool = True,
        open_anew: Callable[[StartupReport], Awaitable[StartupReport]] = _opened_on_a_thread,
    ) -> None:
        """`on_failed` is called with why none can start. `forks` gives engine processes. `is_alone`: whether the
        server has no other model, so that log lines need no name. `open_anew` gives a model that never served the
        weights that its files have now."""
        settings = report.settings
        self.report, self.name = report, settings.served_names[0]
        self.router, self.metrics, self.weights = router, metrics, WeightsDigest()
        self.router.hooks.on_phase, self.router.hooks.on_unload = self._log_phase, self._stop
        self._wanted = asyncio.Event()
        self.router.hooks.on_wanted = self._wanted.set
        self._on_failed = on_failed
        self._forks, self.label = forks, "" if is_alone else f"{self.name}: "
        self._is_tried_again, self._open_anew = False, open_anew
        self._until_end = contextlib.AsyncExitStack()
        """Contexts that `run` ends."""
        self._warm: frozenset[int] = frozenset()
        """Replicas with a standby that waits to be promoted."""
        self._pools: dict[int, MemoryFile] = {}
        """Replica -> memory of its KV pool, kept over a sleep. Other supervisors get another dictionary."""

    async def run(self) -> NoReturn:
        """Keep an engine running in each replica. If they are stopped, or none can start, wait until they are wanted.

        If this is cancelled, the last engines end.
        """
        async with self._until_end:
            while True:
                self._serving = asyncio.create_task(self._serve())
                try:
                    await asyncio.wait((self._serving,))
                finally:
                    await self._end_serving()
                if not self._serving.cancelled():
                    self._wanted.clear()
                    self._pools = {}
                    self._on_failed(self, self._serving.result())
                await self._wanted.wait()
                logger.info("%sloading the model", self.label)

    async def hash_weights(self) -> None:
        """Hash the weights once an engine has loaded them."""
        await self.router.lifecycle.loaded.wait()
        await self.weights.run(self.report.config.files)

    async def unload_when_idle(self, idle_s: float) -> None:
        """Stop the engines each time no request has run or waited for so many seconds."""
        while True:
            # Not less, because a clock may not advance by the rounding error of a difference.
            await asyncio.sleep(max(idle_s - self.router.loading.idle_s, _LEAST_SLEEP_S))
            # A model that was just loaded, or has requests, has been idle for less.
            if self.router.loading.idle_s >= idle_s:
                await self.router.loading.unload()
                logger.info("%sunloaded after %g s without a request; the next one loads it", self.label, idle_s)

    async def _serve(self) -> StartError | EngineDeadError:
        """Keep an engine running in each replica until none can start; returns why."""
        error: StartError | EngineDeadError | None = None
        if self._is_tried_again and not self.router.lifecycle.has_served:
            try:
                self.report = await self._open_anew(self.report)
            except StartError as refusal:
                return refusal
        self._is_tried_again = True
        try:
            if self.report.settings.kv_events is not None and self.router.hooks.on_kv_events is None:
                await self._until_end.enter_async_context(self._kv_events(self.report.settings.kv_events))
            async with asyncio.TaskGroup() as group:
                for index, config in enumerate(replicas_of(self.report.config)):
                    group.create_task(self._supervisor(index, config).run())
        except* StartError as start_errors:
            error = _first(start_errors)
        except* EngineDeadError as deaths:
            error = error or _first(deaths)
        assert error is not None, "a supervisor ended without an error"
        return error

    async def _stop(self, keeps_pools: bool) -> None:
        """End the engines. The next ones find the KV pools if `keeps_pools`, and otherwise their memory is given up."""
        if not keeps_pools:
            self._pools = {}
        await self._end_serving()

    async def _end_serving(self) -> None:
        """End the engines. A request from now on starts others."""
        serving = self._serving
        if not serving.done():
            self._wanted.clear()
            # A second cancellation would interrupt what ends the engines.
            if not serving.cancelling():
                serving.cancel()
            await asyncio.wait((serving,))

    @contextlib.asynccontextmanager
    async def _kv_events(self, endpoint: str) -> AsyncIterator[None]:
        """Publish what the engines report of their caches. Raises `ConfigError`.

        The publisher stays while the model is unloaded, because subscribers count its batches.
        """
        settings = self.report.settings
        options = PublisherOptions(
            endpoint, settings.kv_events_replay, settings.kv_events_topic, settings.kv_events_buffer
        )
        publisher = KVPublisher(options, settings.replicas)
        serving = asyncio.create_task(publisher.serve())
        self.router.hooks.on_kv_events = publisher.publish
        shown = self.label, "at" if is_bound(endpoint) else "to a subscriber that is bound at", endpoint
        logger.info("%sKV events %s %s: who can reach it can read the token ids of prompts", *shown)
        try:
            yield
        finally:
            self.router.hooks.on_kv_events = None
            serving.cancel()
            await asyncio.wait((serving,))
            await publisher.close()

    def show_phase(self, phase: Phase) -> None:
        """A phase of the start has ended that needs no engine."""
        self.metrics.phase(phase)
        self._log_phase(0, phase)

    def _supervisor(self, index: int, config: EngineConfig) -> EngineSupervisor:
        """The supervisor of one replica."""
        settings = self.report.settings
        style = LogStyle(settings.log_level, settings.log_format)
        on_standby = partial(self._standby_changed, index)
        for_clients = partial(without_paths, self.report)
        return EngineSupervisor(
            self.router, config, style, on_standby, self._forks, index, self.label, for_clients, self._pools
        )

    def _standby_changed(self, index: int, is_warm: bool) -> None:
        self._warm = self._warm | {index} if is_warm else self._warm - {index}
        self.metrics.standby.set(len(self._warm))

    def _log_phase(self, index: int, phase: Phase) -> None:
        """The replicas' phases are alike: only the first one's are shown."""
        level = logging.DEBUG if index or self.router.lifecycle.loaded.is_set() else logging.INFO
        logger.log(level, "%s%-10s %6.2f s  %s", self.label, phase.name, phase.duration_s, phase.detail)


def engines_of(
    report: StartupReport,
    on_failed: Callable[[Engines, StartError | EngineDeadError], None],
    forks: EngineForks | None,
    *,
    is_alone: bool,
) -> Engines:
    """The engines of one model with a router of their own. The parameters are those of `Engines`."""
    settings = report.settings
    metrics = Metrics(model_name=settings.served_names[0], compat=settings.metrics_compat)
    router = Router(None, metrics, router_options(settings), adapters=_adapters(report))
    return Engines(report, router, metrics, on_failed, forks, is_alone=is_alone)


def router_options(settings: Settings) -> RouterOptions:
    queue = QueueBounds(settings.max_waiting, settings.max_wait)
    return RouterOptions(queue=queue, e2e_target_s=settings.e2e_target, num_replicas=settings.replicas)


def _adapters(report: StartupReport) -> AdapterPlaces:
    """Places for adapters, with those that are served from the start."""
    config, facts = report.config, report.facts
    if not isinstance(facts, ModelFacts):
        return AdapterPlaces()
    arch = facts.arch
    adapters = AdapterPlaces(config.max_loras, lambda path: hold_adapter(path, arch, config.max_lora_rank))
    for name, files in report.adapters.items():
        adapters.add(name, files, is_from_start=True)
    return adapters


def _first(errors: ExceptionGroup[_Error]) -> _Error:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found

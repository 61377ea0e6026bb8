"""The engines of one model: keeps one running in each replica of the model's router, and says why none runs.

Knows no other model and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TypeVar

from inferd.engine.api.adapter import read_adapter
from inferd.engine.api.config import EngineConfig, replicas_of
from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.supervisor import EarlyProcess
from inferd.engine.api.wire.messages import Phase
from inferd.server.config.settings import Settings
from inferd.server.dispatch.adapters import Adapters
from inferd.server.dispatch.admission import QueueBounds
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.lifecycle.ready_card import StartupReport
from inferd.server.observability.metrics import Metrics
from inferd.server.supervision.supervisor import EngineSupervisor

logger = logging.getLogger("inferd")
_Error = TypeVar("_Error", bound=Exception)


class Engines:
    """The engines of one model, its router and its metrics."""

    def __init__(self, report: StartupReport, early: EarlyProcess | None = None, *, is_alone: bool = True) -> None:
        """`early` becomes the first engine. `is_alone`: whether the server has no other model, so that log lines need
        no name."""
        settings = report.settings
        self.report, self.name = report, settings.served_names[0]
        self.metrics = Metrics(model_name=self.name, compat=settings.metrics_compat)
        self.router = Router(None, self.metrics, router_options(settings), adapters=_adapters(report))
        self.router.on_phase = self._log_phase
        self._early, self.label = early, "" if is_alone else f"{self.name}: "
        self._warm: frozenset[int] = frozenset()
        """Replicas with a standby that waits to be promoted."""

    async def run(self) -> StartError | EngineDeadError:
        """Keep an engine running until none can start; returns why. If this is cancelled, the last one ends."""
        error: StartError | EngineDeadError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for index, config in enumerate(replicas_of(self.report.config)):
                    group.create_task(self._supervisor(index, config).run())
        except* StartError as start_errors:
            error = _first(start_errors)
        except* EngineDeadError as deaths:
            error = error or _first(deaths)
        assert error is not None, "a supervisor ended without an error"
        return error

    def show_phase(self, phase: Phase) -> None:
        """A phase of the start has ended that needs no engine."""
        self.metrics.phase(phase)
        self._log_phase(0, phase)

    def _supervisor(self, index: int, config: EngineConfig) -> EngineSupervisor:
        """The supervisor of one replica. The process that was started early is the first one's."""
        settings, early = self.report.settings, None if index else self._early
        style = LogStyle(settings.log_level, settings.log_format)
        on_standby = partial(self._standby_changed, index)
        return EngineSupervisor(self.router, config, style, on_standby, early, index, self.label)

    def _standby_changed(self, index: int, is_warm: bool) -> None:
        self._warm = self._warm | {index} if is_warm else self._warm - {index}
        self.metrics.standby.set(len(self._warm))

    def _log_phase(self, index: int, phase: Phase) -> None:
        """The replicas' phases are alike: only the first one's are shown."""
        level = logging.DEBUG if index or self.router.became_ready.is_set() else logging.INFO
        logger.log(level, "%s%-10s %6.2f s  %s", self.label, phase.name, phase.duration_s, phase.detail)


def router_options(settings: Settings) -> RouterOptions:
    queue = QueueBounds(settings.max_waiting, settings.max_wait)
    return RouterOptions(queue=queue, e2e_target_s=settings.e2e_target, num_replicas=settings.replicas)


def _adapters(report: StartupReport) -> Adapters:
    """Places for adapters, with those that are served from the start."""
    config, arch = report.config, report.facts.arch
    adapters = Adapters(config.max_loras, lambda path: read_adapter(path, arch, config.max_lora_rank))
    for name, files in report.adapters.items():
        adapters.add(name, files)
    return adapters


def _first(errors: ExceptionGroup[_Error]) -> _Error:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found

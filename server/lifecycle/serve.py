"""Runs the daemon from its settings to its exit code: start, READY card, signals, shutdown.

The order is fixed. It checks the models' files, binds the port, lets engine processes load the models, answers `/live`
while they load, and prints READY. Only this file knows both the engines and the HTTP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import uvloop

from inferd.engine.api.errors import ChangedError, ConfigError, EngineDeadError, StartError
from inferd.engine.api.process import garbage
from inferd.engine.api.process.engine_forks import EngineForks
from inferd.engine.api.process.logs import counted
from inferd.engine.api.wire.messages import Phase
from inferd.server.config.settings import Settings, is_loopback
from inferd.server.endpoints.app import Backend, create_app
from inferd.server.lifecycle.drain import Drain, DrainOptions
from inferd.server.lifecycle.engines import Engines, engines_of
from inferd.server.lifecycle.models import read_models
from inferd.server.lifecycle.ready_card import StartupReport, describe_start, deviation, ready_card, without_paths
from inferd.server.transport.limits import ConnectionLimits, fit_open_files
from inferd.server.transport.uvicorn_server import HttpServer, http_config


class Systemd:
    """systemd, as the manager of this process: the protocol of sd_notify(3), for units of Type=notify.

    The server tells it that it is ready, stops, and is alive. Every message is one datagram to the socket that
    NOTIFY_SOCKET names. Without that variable nothing is sent. A message that cannot be sent is logged, and the server
    goes on: systemd's own time limits then decide.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name  # "@" begins an abstract address
        pid = environment.get("WATCHDOG_PID", str(os.getpid()))
        limit_us = environment.get("WATCHDOG_USEC", "0") if pid == str(os.getpid()) else "0"
        self._watchdog_s = int(limit_us) / 1e6 if limit_us.isdecimal() else 0.0
        """Seconds without WATCHDOG=1 after which systemd ends the service; 0 if it does not watch this process."""

    def tell(self, state: str) -> None:
        """Send one message, such as READY=1, without waiting."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("systemd was not told %s: %s (NOTIFY_SOCKET)", state, error.strerror or error)

    async def keep_alive(self) -> None:
        """Tell systemd twice in its limit that the event loop runs. Returns at once if systemd does not watch."""
        while self._address and self._watchdog_s:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)


logger = logging.getLogger("inferd")
_Error = TypeVar("_Error", bound=Exception)

EXIT_ENGINE_DIED = 70
"""EX_SOFTWARE, on which restart policies act."""

_SHUTDOWN_DELAY_S = 5.0
"""Delay if other machines reach the server. A load balancer polls /ready every few seconds, and may poll twice."""
_BACKLOG = 2048
_PROC = Path("/proc/self/stat")
_STAT_STARTTIME = 19
"""Index of field 22 of that file, counted after the name in parentheses."""


def serve(settings: Settings, forks: EngineForks | None = None) -> int:
    """Serve until a signal ends the server. Returns the exit code. Raises `StartError` if the server cannot start.

    `forks` gives engine processes that have their libraries imported.
    """
    started_s, entered_s = _process_started_s(), time.monotonic()
    if sys.platform == "linux" and not _PROC.exists():
        logger.warning(
            "/proc is not mounted: half of this machine's memory counts as free, and kernels for any processor are "
            "used; mount it, or give --kv-memory"
        )
    limits = fit_open_files(ConnectionLimits(max_connections=settings.max_connections))
    reports = read_models(settings)
    limits = fit_open_files(limits, sum(report.num_held_files for report in reports))
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings.host, settings.port))
        admin = None
        if settings.admin_port is not None:
            admin = sockets.enter_context(bind(settings.admin_host, settings.admin_port, "--admin-port"))
        phases = (
            Phase("imports", entered_s - started_s, f"inferd {version('inferd')}, Python {platform.python_version()}"),
            *(Phase("checkpoint", time.monotonic() - entered_s, describe_start(report)) for report in reports),
        )
        try:
            return uvloop.run(_Service(settings, reports, limits, listener, admin, started_s, forks).run(phases))
        finally:
            # The loop has put Python's handler back, whose exception would come up while the interpreter ends.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _process_started_s() -> float:
    """When this process began, on the monotonic clock. Without Linux's /proc, it is the time of this call."""
    now = time.monotonic()
    try:
        ticks = int(_PROC.read_text().rpartition(")")[2].split()[_STAT_STARTTIME])
    except OSError:
        return now
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket, made before any weight is read. Raises `ConfigError` if the port is not available."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another with {flag}, or {flag} 0 for any free one"
        ) from error
    return listener


class _Service:
    """One run of the daemon."""

    def __init__(
        self,
        settings: Settings,
        reports: Sequence[StartupReport],
        limits: ConnectionLimits,
        listener: socket.socket,
        admin: socket.socket | None,
        started_s: float,
        forks: EngineForks | None,
    ) -> None:
        """`settings`: of the whole server. `admin`: the socket that serves admin routes in place of `listener`, or
        None."""
        self._settings, self._limits, self._listener, self._admin, self._started_s = (
            settings,
            limits,
            listener,
            admin,
            started_s,
        )
        is_alone = len(reports) == 1
        self._models = tuple(engines_of(report, self._model_failed, forks, is_alone=is_alone) for report in reports)
        self._systemd = Systemd(os.environ)
        self._is_stopping = False
        """Whether the server ends the engines, so that their end is no failure."""
        self._died: str | None = None
        self._start_error: StartError | None = None

    async def run(self, phases: tuple[Phase, ...]) -> int:
        """Serve until a signal or the engines' end. `phases` are the phases of the start so far."""
        settings = self._settings
        routers = [model.router for model in self._models]
        self._drain = Drain(routers, _drain_options(settings), self._engine_is_stuck)
        self._drain.handle_signals()
        imports, *checkpoints = phases
        self._models[0].show_phase(imports)
        for model, phase in zip(self._models, checkpoints, strict=True):
            model.show_phase(phase)
        async with asyncio.TaskGroup() as group:
            engines = [group.create_task(task) for model in self._models for task in _running(model)]
            server = self._make_http()
            http = group.create_task(server.serve(sockets=[self._listener, *([self._admin] if self._admin else [])]))
            others = [group.create_task(task) for task in (self._announce(), self._systemd.keep_alive())]
            await self._drain.begun.wait()
            self._systemd.tell("STOPPING=1")
            await self._drain.run(server)
            server.should_exit = True
            await http
            self._is_stopping = True
            for task in (*engines, *others):
                task.cancel()
        if self._start_error is not None:
            raise self._start_error
        finished = [sum(numbers) for numbers in zip(*(each.metrics.num_finished for each in self._models), strict=True)]
        logger.info("stopped; answers since the start: %d finished, %d unfinished", *finished)
        return EXIT_ENGINE_DIED if self._died else 0

    def _make_http(self) -> HttpServer:
        port = self._admin.getsockname()[1] if self._admin else None
        backends = [
            Backend(
                model.report.model,
                model.router,
                model.metrics,
                model.report.settings,
                model.report.config,
                model.weights.known,
            )
            for model in self._models
        ]
        app = create_app(*backends, admin_port=port)
        return HttpServer(http_config(app, self._models[0].metrics, self._limits, self._settings.root_path))

    def _model_failed(self, model: Engines, error: StartError | EngineDeadError) -> None:
        """No engine of a model can start. The server goes on while it has another model. It also goes on to say that a
        file or the kernels are no longer those that it served with, because another start would hide that."""
        reason = without_paths(model.report, str(error))
        if model.router.lifecycle.has_served and isinstance(error, ChangedError):
            logger.error("%sno longer served: %s", model.label, error)
            model.router.loading.fail_model(reason)
            return
        if any(other is not model and not other.router.lifecycle.failure for other in self._models):
            way_out = f"POST /v1/models/{model.name}/load tries it again"
            logger.error("%sno longer served: %s; %s", model.label, error, way_out)
            model.router.loading.fail_model(reason)
            return
        if isinstance(error, StartError):
            self._start_error = error if len(self._models) == 1 else type(error)(f"{model.label}{error}")
        self._engine_died(f"{model.label}{error}")

    def _engine_died(self, reason: str) -> None:
        if self._died is not None or self._is_stopping:
            return
        self._died = reason
        if self._start_error is None:
            num_active = sum(model.router.streams.num_active for model in self._models)
            logger.error("%s: the server ends %s and exits", reason, counted(num_active, "unfinished answer"))
        for model in self._models:
            model.router.loading.stop()
        self._drain.give_up()

    def _engine_is_stuck(self) -> None:
        self._engine_died("the engine process does not answer")

    async def _announce(self) -> None:
        while not all(model.router.lifecycle.settled.is_set() for model in self._models):
            for model in self._models:
                await model.router.lifecycle.settled.wait()
        # One that was ready may be unloaded by now, because it was idle while the others started.
        served = [model for model in self._models if not model.router.lifecycle.failure]
        if not served or self._died is not None:
            return
        self._systemd.tell("READY=1")
        garbage.freeze_objects()
        for model in served:
            warning = deviation(model.router.replicas.ready)
            if warning is not None:
                logger.warning("%s%s", model.label, warning)
        total_s = time.monotonic() - self._started_s
        if self._admin is not None:
            host, port = self._admin.getsockname()[:2]
            logger.info("admin routes are served only at %s port %d", host, port)
        outcomes = [(each.report, each.router.lifecycle.failure or each.router.replicas.ready) for each in self._models]
        card = ready_card(outcomes, self._listener, total_s)
        if self._settings.log_format == "json":
            logger.info(card.strip().splitlines()[0])
        else:
            print(card, flush=True)


def _running(model: Engines) -> Iterator[Coroutine[None, None, None]]:
    """The tasks that run a model's engines."""
    yield model.run()
    yield model.hash_weights()
    idle_s = model.report.settings.idle_unload
    if idle_s is not None:
        yield model.unload_when_idle(idle_s)


def _drain_options(settings: Settings) -> DrainOptions:
    delay_s = settings.shutdown_delay_s
    if delay_s is None:
        # No load balancer on another machine sends requests to a loopback address.
        delay_s = 0.0 if is_loopback(settings.host) else _SHUTDOWN_DELAY_S
    return DrainOptions(delay_s, settings.shutdown_timeout_s)

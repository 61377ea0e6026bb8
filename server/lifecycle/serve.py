"""Runs the daemon from its settings to its exit code: start, READY card, signals, shutdown.

The order is fixed. It checks the model's files, binds the port, lets the engine process load the model, answers `/live`
while that loads, and prints READY. Only this file knows both the engine's supervisor and the HTTP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import uvloop

from inferd.engine.api.adapter import MAX_RANK, check_adapters, read_adapter, space_for
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, replicas_of, resolve
from inferd.engine.api.draft import read_draft, source_of
from inferd.engine.api.errors import ConfigError, EngineDeadError, StartError
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process import garbage
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.supervisor import EarlyProcess
from inferd.engine.api.wire.messages import Phase
from inferd.server.api.app import AppOptions, create_app
from inferd.server.auth.keys_file import read_keys
from inferd.server.config.settings import Settings, is_loopback
from inferd.server.dispatch.adapters import Adapters
from inferd.server.dispatch.admission import QueueBounds
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.lifecycle.drain import Drain, DrainOptions
from inferd.server.lifecycle.ready_card import StartupReport, describe_start, deviation, ready_card
from inferd.server.lifecycle.systemd import Systemd
from inferd.server.observability.metrics import Metrics
from inferd.server.supervision.supervisor import EngineSupervisor
from inferd.server.text.model import ServedModel
from inferd.server.tools.answer_rules import LACKS_TOOLS
from inferd.server.transport.limits import ConnectionLimits, fit_open_files
from inferd.server.transport.uvicorn_server import HttpServer, http_config

logger = logging.getLogger("inferd")
_Error = TypeVar("_Error", bound=Exception)

EXIT_ENGINE_DIED = 70
"""EX_SOFTWARE, on which restart policies act."""

_SHUTDOWN_DELAY_S = 5.0
"""Delay if other machines reach the server. A load balancer polls /ready every few seconds, and may poll twice."""
_BACKLOG = 2048
_STAT_STARTTIME = 19
"""Index of field 22 of /proc/PID/stat, counted after the name in parentheses."""


def serve(settings: Settings, early: EarlyProcess | None = None) -> int:
    """Serve until a signal ends the server. Returns the exit code. Raises `StartError` if the server cannot start.

    `early` becomes the engine process.
    """
    started_s, entered_s = _process_started_s(), time.monotonic()
    limits = fit_open_files(ConnectionLimits(max_connections=settings.max_connections))
    report = read_model(settings)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings.host, settings.port))
        admin = None
        if settings.admin_port is not None:
            admin = sockets.enter_context(bind(settings.admin_host, settings.admin_port, "--admin-port"))
        phases = (
            Phase("imports", entered_s - started_s, f"inferd {version('inferd')}, Python {platform.python_version()}"),
            Phase("checkpoint", time.monotonic() - entered_s, describe_start(report)),
        )
        return uvloop.run(_Service(report, limits, listener, admin, started_s, early).run(phases))


def _router_options(settings: Settings) -> RouterOptions:
    queue = QueueBounds(settings.max_waiting, settings.max_wait)
    return RouterOptions(queue=queue, e2e_target_s=settings.e2e_target, num_replicas=settings.replicas)


def _adapters(report: StartupReport) -> Adapters:
    """Places for adapters, with those that are served from the start."""
    config, arch = report.config, report.facts.arch
    adapters = Adapters(config.max_loras, lambda path: read_adapter(path, arch, config.max_lora_rank))
    for name, files in report.adapters.items():
        adapters.add(name, files)
    return adapters


def _process_started_s() -> float:
    """When this process began, on the monotonic clock. Without Linux's /proc, it is the time of this call."""
    now = time.monotonic()
    if sys.platform != "linux":
        return now
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_STAT_STARTTIME])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s


def read_model(settings: Settings) -> StartupReport:
    """Find the checkpoint, check that its headers are consistent, and decide every automatic setting."""
    if settings.keys_file is not None:
        read_keys(Path(settings.keys_file))
    machine = Machine.detect()
    keeps_blocks = settings.quantization == "auto"
    checkpoint = Checkpoint.read(locate(settings.model, settings.revision), keeps_blocks=keeps_blocks)
    facts = ModelFacts.of(checkpoint, settings.model_impl)
    draft = read_draft(settings.speculative, checkpoint.path, keeps_blocks=keeps_blocks)
    if settings.lora or settings.max_loras:
        check_adapters(facts.arch, settings.tensor_parallel_size)
    most = settings.max_lora_rank or MAX_RANK
    adapters = {name: read_adapter(path, facts.arch, most) for name, path in settings.loras.items()}
    max_loras, max_lora_rank = space_for(settings.max_loras, settings.max_lora_rank, tuple(adapters.values()))
    asked = EngineConfig(
        model_path=str(checkpoint.path),
        dtype=settings.dtype,
        quantization="none" if settings.quantization == "auto" else settings.quantization,
        keeps_blocks=keeps_blocks,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        deterministic=settings.deterministic,
        attention_libs=settings.attention_libs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.prefix_caching,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        num_replicas=settings.replicas,
        standby=settings.standby,
        speculative=source_of(settings.speculative),
        draft=None if draft is None else draft[0],
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
    )
    config, memory, decisions = resolve(asked, facts, machine, None if draft is None else draft[1])
    for decision in decisions:
        is_cut = decision.field == "max_model_len" and config.max_model_len != facts.arch.max_positions
        is_changed = decision.field == "deterministic" and decision.asked is not None
        level = logging.WARNING if is_cut else logging.INFO if is_changed else logging.DEBUG
        given = "auto" if decision.asked is None else decision.asked
        logger.log(level, "%s: %s -> %s (%s)", decision.field, given, decision.became, decision.why)
    if not facts.arch.is_native:
        logger.warning(
            "%s is compatible, not native: transformers' own code computes it with inferd's attention and linear "
            "layers, more slowly than a native family",
            facts.arch.architecture,
        )
    if facts.has_kv_scales:
        logger.info(
            "inferd does not use the checkpoint's scales for 8-bit K and V: with --kv-cache-dtype fp8 or int8, "
            "every 32 elements of a head have their own scale"
        )
    assert config.max_model_len is not None
    model = ServedModel.load(
        checkpoint.path,
        settings.served_names,
        max_model_len=config.max_model_len,
        vocab_size=facts.arch.vocab_size,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )
    if model.template is not None and model.template.lacks_tools:
        logger.info("%s, and reads calls as %s", LACKS_TOOLS, model.format.tool_name)
    return StartupReport(settings, facts, model, config, memory, adapters)


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
        report: StartupReport,
        limits: ConnectionLimits,
        listener: socket.socket,
        admin: socket.socket | None,
        started_s: float,
        early: EarlyProcess | None,
    ) -> None:
        """`admin`: the socket that serves admin routes in place of `listener`, or None."""
        self._report, self._limits, self._listener, self._admin, self._started_s = (
            report,
            limits,
            listener,
            admin,
            started_s,
        )
        self._settings, self._early = report.settings, early
        self._systemd = Systemd(os.environ)
        self._is_stopping = False
        """Whether the server ends the engine, so that its end is no failure."""
        self._warm: frozenset[int] = frozenset()
        """Replicas with a standby that waits to be promoted."""
        self._died: str | None = None
        self._start_error: StartError | None = None

    async def run(self, phases: tuple[Phase, ...]) -> int:
        """Serve until a signal or the engine's end. `phases` are the phases of the start so far."""
        settings = self._settings
        self._metrics = Metrics(model_name=settings.served_names[0], compat=settings.metrics_compat)
        self._router = Router(None, self._metrics, _router_options(settings), adapters=_adapters(self._report))
        self._router.on_phase = self._log_phase
        self._drain = Drain(self._router, _drain_options(settings), self._engine_is_stuck)
        self._drain.handle_signals()
        for phase in phases:
            self._metrics.phase(phase)
            self._log_phase(0, phase)
        async with asyncio.TaskGroup() as group:
            engines = group.create_task(self._run_engines())
            server = self._make_http()
            http = group.create_task(server.serve(sockets=[self._listener, *([self._admin] if self._admin else [])]))
            others = [group.create_task(task) for task in (self._announce(), self._systemd.keep_alive())]
            await self._drain.begun.wait()
            self._systemd.tell("STOPPING=1")
            await self._drain.run(server)
            server.should_exit = True
            await http
            self._is_stopping = True
            for task in (engines, *others):
                task.cancel()
        if self._start_error is not None:
            raise self._start_error
        logger.info("stopped; answers since the start: %d finished, %d unfinished", *self._metrics.num_finished)
        return EXIT_ENGINE_DIED if self._died else 0

    def _make_http(self) -> HttpServer:
        options = replace(
            AppOptions.from_settings(self._settings, self._report.config),
            admin_port=self._admin.getsockname()[1] if self._admin else None,
        )
        app = create_app(self._report.model, self._router, self._metrics, options)
        return HttpServer(http_config(app, self._metrics, self._limits, self._settings.root_path))

    async def _run_engines(self) -> None:
        """Keep an engine running until none can start, or until this task is cancelled, which ends the last one."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, config in enumerate(replicas_of(self._report.config)):
                    group.create_task(self._supervisor(index, config).run())
        except* StartError as errors:
            self._start_error = _first(errors)
            self._engine_died(str(self._start_error))
        except* EngineDeadError as errors:
            self._engine_died(str(_first(errors)))

    def _supervisor(self, index: int, config: EngineConfig) -> EngineSupervisor:
        """The supervisor of one replica. The process that was started early is the first one's."""
        style = LogStyle(self._settings.log_level, self._settings.log_format)
        early = None if index else self._early
        on_standby = partial(self._standby_changed, index)
        return EngineSupervisor(self._router, config, style, on_standby, early, index)

    def _standby_changed(self, index: int, is_warm: bool) -> None:
        self._warm = self._warm | {index} if is_warm else self._warm - {index}
        self._metrics.standby.set(len(self._warm))

    def _engine_died(self, reason: str) -> None:
        if self._died is not None or self._is_stopping:
            return
        self._died = reason
        if self._start_error is None:
            logger.error("%s: the server ends %d unfinished answers and exits", reason, self._router.num_active)
        self._router.fail_all(reason)
        self._drain.give_up()

    def _engine_is_stuck(self) -> None:
        self._engine_died("the engine process does not answer")

    async def _announce(self) -> None:
        await self._router.became_ready.wait()
        self._systemd.tell("READY=1")
        garbage.freeze_objects()
        warning = deviation(self._router.ready)
        if warning is not None:
            logger.warning(warning)
        total_s = time.monotonic() - self._started_s
        if self._admin is not None:
            host, port = self._admin.getsockname()[:2]
            logger.info("admin routes are served only at %s port %d", host, port)
        card = ready_card(self._report, self._router.ready, self._listener, total_s)
        if self._settings.log_format == "json":
            logger.info(card.strip().splitlines()[0])
        else:
            print(card, flush=True)

    def _log_phase(self, index: int, phase: Phase) -> None:
        """The replicas' phases are alike: only the first one's are shown."""
        level = logging.DEBUG if index or self._router.became_ready.is_set() else logging.INFO
        logger.log(level, "%-10s %6.2f s  %s", phase.name, phase.duration_s, phase.detail)


def _first(errors: ExceptionGroup[_Error]) -> _Error:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found


def _drain_options(settings: Settings) -> DrainOptions:
    delay_s = settings.shutdown_delay_s
    if delay_s is None:
        # No load balancer on another machine sends requests to a loopback address.
        delay_s = 0.0 if is_loopback(settings.host) else _SHUTDOWN_DELAY_S
    return DrainOptions(delay_s, settings.shutdown_timeout_s)

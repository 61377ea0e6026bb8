"""From settings to a serving process and back: start-up phases, the READY card, signals, drain, exit code.

The order is fixed: refuse what can be refused from files alone, bind the port, start the engine process, answer `/live`
while it loads, say READY. The only room that knows both the engine's supervisor and the HTTP server.
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
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import uvicorn
import uvloop

from inferd.engine.api.checkpoint import Checkpoint, locate
from inferd.engine.api.config import EngineConfig, resolve
from inferd.engine.api.errors import ConfigError, EngineDeadError, StartError
from inferd.engine.api.machine import Machine
from inferd.engine.api.messages import Phase
from inferd.engine.api.model import ModelFacts
from inferd.server.announce import Plan, describe_plan, deviation, ready_card
from inferd.server.app import AppOptions, create_app
from inferd.server.metrics import Metrics
from inferd.server.recovery import Recovery
from inferd.server.router import Router, RouterOptions
from inferd.server.settings import Settings
from inferd.server.text.model import ServedModel

logger = logging.getLogger("inferd")

EXIT_ENGINE_DIED = 70
"""EX_SOFTWARE: restart policies act on it."""

_CLOSE_GRACE_S = 5
_BACKLOG = 2048
_STAT_STARTTIME = 19
"""Field 22 of /proc/PID/stat, counted after the name in parentheses."""


def serve(settings: Settings) -> int:
    """Serve until a signal says stop. Returns the exit code; raises `StartError` where it cannot start."""
    started_s, entered_s = _process_started_s(), time.monotonic()
    plan = make_plan(settings)
    with bind(settings.host, settings.port) as listener:
        phases = (
            Phase("imports", entered_s - started_s, f"inferd {version('inferd')}, Python {platform.python_version()}"),
            Phase("checkpoint", time.monotonic() - entered_s, describe_plan(plan)),
        )
        return uvloop.run(_Service(plan, listener, started_s).run(phases))


def _process_started_s() -> float:
    """When this process began, on the monotonic clock, as far as the system tells."""
    now = time.monotonic()
    if sys.platform != "linux":
        return now
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_STAT_STARTTIME])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s


def make_plan(settings: Settings) -> Plan:
    """Find the checkpoint, prove it consistent by its headers, and settle every automatic setting."""
    checkpoint = Checkpoint.read(locate(settings.model, settings.revision))
    facts = ModelFacts.of(checkpoint)
    asked = EngineConfig(
        model_path=str(checkpoint.path),
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        deterministic=settings.deterministic,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.prefix_caching,
        num_threads=settings.num_threads,
    )
    config, memory, decisions = resolve(asked, facts, Machine.detect())
    for decision in decisions:
        is_cut = decision.field == "max_model_len" and config.max_model_len != facts.arch.max_positions
        is_changed = decision.field == "deterministic" and decision.asked is not None
        level = logging.WARNING if is_cut else logging.INFO if is_changed else logging.DEBUG
        given = "auto" if decision.asked is None else decision.asked
        logger.log(level, "%s: %s -> %s (%s)", decision.field, given, decision.became, decision.why)
    if facts.has_kv_scales:
        logger.info(
            "the checkpoint's scales for K and V in 8 bits are not used: with --kv-cache-dtype fp8 each head of each "
            "token has a scale of its own"
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
    return Plan(settings, facts, model, config, memory)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before any weight is read. Raises `ConfigError` where the port is not to be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port, or --port 0 for any free one"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: drain is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run of the daemon."""

    def __init__(self, plan: Plan, listener: socket.socket, started_s: float) -> None:
        self._plan, self._listener, self._started_s = plan, listener, started_s
        self._settings = plan.settings
        self._stop = asyncio.Event()
        self._is_stopping = False
        """The engine was told to end: its end is no death."""
        self._num_signals = 0
        self._died: str | None = None
        self._start_error: StartError | None = None

    async def run(self, phases: tuple[Phase, ...]) -> int:
        """Until a signal or the engine's end. `phases` are those that came before this."""
        settings = self._settings
        self._handle_signals()
        self._metrics = Metrics(model_name=settings.served_names[0], compat=settings.metrics_compat)
        self._router = Router(None, self._metrics, RouterOptions(e2e_target_s=settings.e2e_target))
        self._router.on_phase = self._log_phase
        for phase in phases:
            self._metrics.phase(phase)
            self._log_phase(phase)
        async with asyncio.TaskGroup() as group:
            engines = group.create_task(self._run_engines())
            server = self._make_http()
            http = group.create_task(server.serve(sockets=[self._listener]))
            ready = group.create_task(self._announce())
            await self._stop.wait()
            await self._drain()
            server.should_exit = True
            await http
            self._is_stopping = True
            for task in (engines, ready):
                task.cancel()
        if self._start_error is not None:
            raise self._start_error
        return EXIT_ENGINE_DIED if self._died else 0

    def _make_http(self) -> uvicorn.Server:
        options = AppOptions.from_settings(self._settings, self._plan.config)
        app = create_app(self._plan.model, self._router, self._metrics, options)
        return _Server(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=self._settings.root_path,
                # Streams have ended by then: what is left is a client that does not read, or a body that never comes.
                timeout_graceful_shutdown=_CLOSE_GRACE_S,
            )
        )

    async def _run_engines(self) -> None:
        """Until no engine can be had, or cancelled, which ends the last one."""
        try:
            await Recovery(self._router, self._plan.config, self._settings.log_level).run()
        except StartError as error:
            self._start_error = error
            self._engine_died(str(error))
        except EngineDeadError as error:
            self._engine_died(str(error))

    def _engine_died(self, reason: str) -> None:
        if self._died is not None or self._is_stopping:
            return
        self._died = reason
        if self._start_error is None:
            logger.error("%s: ending %d streams and exiting", reason, self._router.num_active)
        self._router.fail_all(reason)
        self._stop.set()

    async def _announce(self) -> None:
        await self._router.became_ready.wait()
        warning = deviation(self._router.ready)
        if warning is not None:
            logger.warning(warning)
        total_s = time.monotonic() - self._started_s
        card = ready_card(self._plan, self._router.ready, self._listener, total_s)
        if self._settings.log_format == "json":
            logger.info(card.strip().splitlines()[0])
        else:
            print(card, flush=True)

    def _log_phase(self, phase: Phase) -> None:
        level = logging.DEBUG if self._router.became_ready.is_set() else logging.INFO
        logger.log(level, "%-10s %6.2f s  %s", phase.name, phase.duration_s, phase.detail)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        self._num_signals += 1
        num_active = self._router.num_active
        if self._num_signals > 1:
            logger.warning("%s again: giving up %d unfinished answers", number.name, num_active)
            self._router.abort_all()
        elif num_active:
            bound_s = self._settings.shutdown_timeout_s
            logger.info("%s: finishing %d answers (up to %g s; again to give up)", number.name, num_active, bound_s)
        else:
            logger.info("%s: stopping", number.name)
        self._stop.set()

    async def _drain(self) -> None:
        self._router.drain()
        try:
            await asyncio.wait_for(self._router.drained(), self._settings.shutdown_timeout_s)
        except TimeoutError:
            logger.warning("aborting %d requests that did not finish in time", self._router.num_active)
            self._router.abort_all()
            try:
                await asyncio.wait_for(self._router.drained(), _CLOSE_GRACE_S)
            except TimeoutError:
                self._engine_died("the engine process does not answer")

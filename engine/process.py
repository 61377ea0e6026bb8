"""The engine process: frames in, `EngineCore.step`, frames out, and a heartbeat beside it.

Started by the supervisor, which writes one line of JSON to standard input and keeps it open: the end of that input
means the server is gone or wants this process gone, and then it exits at once. It holds nothing that cannot be rebuilt.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from inferd.engine.api.client import HIGH_WATER_MARK, from_engine_endpoint, to_engine_endpoint
from inferd.engine.api.config import precision_of
from inferd.engine.api.errors import StartError
from inferd.engine.api.heartbeat import EnginePhase, Heartbeat
from inferd.engine.api.messages import (
    Abort,
    Failed,
    FromEngine,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from inferd.engine.api.supervisor import Launch
from inferd.engine.api.work import WorkModel
from inferd.engine.cache.table import KVCache
from inferd.engine.core import EngineCore
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 1000
_COMPILING_POLL_MS = 1
"""Grammars are compiled on a thread that cannot wake the loop."""


class EngineLink:
    """The engine's end of the wire."""

    def __init__(self, run_dir: Path, generation: int) -> None:
        self._generation = generation
        self._num_sent = self._num_received = 0
        context = zmq.Context()
        self._in, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self._in, self._out):
            socket.set_hwm(HIGH_WATER_MARK)
        self._in.connect(to_engine_endpoint(run_dir))
        self._out.connect(from_engine_endpoint(run_dir))

    def send(self, message: FromEngine) -> None:
        self._out.send(encode(message, self._generation, self._num_sent))
        self._num_sent += 1

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """Every message that has come; waits for the first one up to `timeout_ms`."""
        messages: list[ToEngine] = []
        while self._in.poll(0 if messages else timeout_ms):
            messages.append(decode_to_engine(self._in.recv(), self._generation, self._num_received))
            self._num_received += 1
        return messages

    def close(self) -> None:
        """Send what is queued, then let go."""
        self._in.close(linger=0)
        self._out.close(linger=1000)


def main() -> int:
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    _die_with_the_server(Path(launch.run_dir))
    logging.basicConfig(
        level=launch.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s engine %(message)s"
    )
    run_dir = Path(launch.run_dir)
    link = EngineLink(run_dir, launch.generation)
    with Heartbeat(run_dir / "heartbeat") as heartbeat:
        try:
            core, ready = build(launch, link)
        except StartError as error:
            link.send(Failed(type(error).__name__, str(error)))
            link.close()
            return error.exit_code
        link.send(ready)
        heartbeat.phase = EnginePhase.SERVING
        serve(core, link, heartbeat)


def build(launch: Launch, link: EngineLink) -> tuple[EngineCore, Ready]:
    """Load the worker, reporting each phase, and put the core in front of it."""
    config = launch.config
    thread = WorkerThread()
    worker, ready = thread.submit(load_worker, config, launch.spawned_s, link.send).result()
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
    )
    cache = KVCache(
        ready.num_blocks,
        ready.block_size,
        worker.cache_windows,
        step_tokens=config.max_num_batched_tokens,
        shares_prefixes=config.prefix_caching,
    )
    core = EngineCore(
        Scheduler(limits, cache),
        ThreadExecutor(worker, thread),
        vocab_size=ready.vocab_size,
        clock=time.monotonic,
        work=WorkModel.of(worker.arch, precision_of(config), ready.max_model_len),
        grammars=GrammarThread(Path(config.model_path), ready.vocab_size),
    )
    return core, ready


def serve(core: EngineCore, link: EngineLink, heartbeat: Heartbeat) -> NoReturn:
    """Step for ever; the process ends with its standard input."""
    while True:
        waiting_ms = _COMPILING_POLL_MS if core.is_compiling else _IDLE_POLL_MS
        messages = link.receive(0 if core.has_work else waiting_ms)
        for message in messages:
            _take(core, message)
        if not messages and not core.has_work and not core.is_compiling:
            # Proving a large pool takes a fifth of a second: only when nobody has asked for anything in a while.
            core.check()
        # Refusals and aborts do not wait for a step, which may be long.
        _send(link, core.flush())
        heartbeat.has_work = core.has_work
        if not core.has_work:
            continue
        heartbeat.step_started_s = time.monotonic()
        _send(link, core.step(heartbeat.step_started_s))
        heartbeat.step_started_s = 0.0
        heartbeat.num_steps += 1


def _send(link: EngineLink, output: StepOutput | None) -> None:
    if output is not None:
        link.send(output)


def _take(core: EngineCore, message: ToEngine) -> None:
    match message:
        case Submit():
            core.submit(message, time.monotonic())
        case Abort():
            core.abort(message.request_ids)
        case ResetPrefixCache():
            core.reset_prefix_cache()


def _die_with_the_server(run_dir: Path) -> None:
    """Exit at the end of standard input, which comes however the server ends, and leave no sockets behind.

    A terminal's Ctrl-C is the server's to handle: it lets running requests finish.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        # Not through sys.stdin, whose lock this thread would hold while the interpreter ends.
        while os.read(0, 4096):
            pass
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="inferd-death-pipe", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())

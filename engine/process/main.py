"""The engine process: frames in, `EngineCore.step`, frames out, and a heartbeat.

Called by `boot`, which ends this process together with its server. It holds nothing that cannot be rebuilt.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec
import zmq
from msgspec import structs

from inferd.engine.api.config import EngineConfig, precision_of
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.cost.step_cost import PlanWork, WorkModel
from inferd.engine.api.errors import CapacityError, StartError, shortage
from inferd.engine.api.pinned_files import check_pinned, read_pinned
from inferd.engine.api.process import garbage
from inferd.engine.api.process.death_notice import hold_lock
from inferd.engine.api.process.engine_process import EngineLaunch
from inferd.engine.api.process.flight_recorder import FlightRecord
from inferd.engine.api.process.heartbeat import LOCK_OFFSET, EnginePhase, Heartbeat
from inferd.engine.api.process.logs import configure
from inferd.engine.api.wire.client import HIGH_WATER_MARK, TO_ENGINE, from_engine_endpoint, to_engine_endpoint
from inferd.engine.api.wire.messages import (
    Abort,
    CacheEvents,
    Delta,
    Failed,
    FromEngine,
    LoadAdapter,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    SubmitChoices,
    ToEngine,
    UseThreads,
    decode_to_engine,
    encode,
)
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.kv_events import KVEventLog
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.process.priority import yield_to_others
from inferd.engine.process.standby import stand_by
from inferd.engine.process.step_watch import StepWatch
from inferd.engine.process.tiers import tier_of
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.guesses import Guesses
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.followers import Followers
from inferd.engine.worker.load import load_any

if TYPE_CHECKING:
    from inferd.engine.worker.adapter_loader import AdapterLoader
    from inferd.engine.worker.runner import Runner

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 1000
_COMPILING_POLL_MS = 1
"""Grammars are compiled, and adapters are read, on threads that cannot wake the loop."""
_PREPARES_AFTER = 5
"""Idle polls after which the engine prepares what later requests need. A person who just saw it start may be about to
send the first one, which should not wait for that."""
_RECHECKS_AFTER = 2
"""Idle polls after which the engine computes again what it loaded."""
_MOST_RECEIVED_BYTES = 2**20
"""Most bytes received at once: some 500,000 ids, which take 60 ms to check and to queue. After a restart all prompts
come at once, and an engine that took them for seconds would count as hung."""
_EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1
_SEALED_POLL_S = 0.005


class EngineLink:
    """The engine's end of the wire."""

    def __init__(self, run_dir: Path, epoch: int, heartbeat: Heartbeat) -> None:
        """`heartbeat` counts the frames of both directions, so that the loss of a last frame is noticed as well."""
        self._epoch, self._heartbeat = epoch, heartbeat
        self._num_sent = self._num_received = 0
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._in, self._out):
            socket.set_hwm(HIGH_WATER_MARK)
        self._in.connect(to_engine_endpoint(run_dir))
        self._out.connect(from_engine_endpoint(run_dir))

    def send(self, message: FromEngine) -> None:
        self._out.send(encode(message, self._epoch, self._num_sent))
        self._num_sent += 1
        self._heartbeat.num_frames_sent = self._num_sent

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """The messages that have come, up to a bound. Waits for the first one up to `timeout_ms`."""
        messages: list[ToEngine] = []
        num_bytes = 0
        while num_bytes < _MOST_RECEIVED_BYTES and self._in.poll(0 if messages else timeout_ms):
            frame = self._in.recv()
            num_bytes += len(frame)
            messages.append(decode_to_engine(frame, self._epoch, self._num_received))
            self._num_received += 1
            self._heartbeat.num_frames_received = self._num_received
        return messages

    def close(self) -> None:
        """Close, and wait until what is queued is sent: a process that ends at once would take it with it."""
        self._in.close(linger=0)
        self._out.close(linger=1000)
        self._context.term()


def main(
    line: bytes,
    promoted: threading.Event,
    ranks: Followers | None = None,
    before_end: list[Callable[[], None]] | None = None,
) -> int:
    """`line`: `EngineLaunch` as JSON; a standby waits for `promoted`. `ranks`: the engine's other ranks, if they were
    started already. What is added to `before_end` is called when the server wants the engine to end. Returns only if
    the engine cannot start."""
    launch = msgspec.json.decode(line, type=EngineLaunch)
    configure(launch.log_style)
    if launch.config.cpus:
        os.sched_setaffinity(0, launch.config.cpus)
    if launch.config.nice and not yield_to_others(launch.config.nice):
        logger.warning("the kernel took no nice value for this session: the model runs at the priority of the others")
    run_dir = Path(launch.run_dir)
    flight = FlightRecord(launch.flight_fd)
    hold_lock(launch.heartbeat_fd, LOCK_OFFSET)
    heartbeat = Heartbeat.of(launch.heartbeat_fd)
    os.close(launch.flight_fd)
    os.close(launch.heartbeat_fd)
    # The sockets are connected before the first message, because the run directory is removed after it.
    link = EngineLink(run_dir, launch.epoch, heartbeat)
    started_s = launch.spawned_s
    if launch.is_standby:
        if ranks is not None:
            ranks.wait_imported()
        started_s = stand_by(launch, link.send, _bind_to_server, lambda: _wait(promoted, heartbeat))
    try:
        core, executor, ready, adapters, events = build(launch, started_s, link, heartbeat, flight, ranks, before_end)
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        logger.debug("the engine cannot start", exc_info=error)
        link.send(Failed(type(refusal).__name__, str(refusal)))
        link.close()
        return refusal.exit_code
    garbage.freeze_objects()
    _bind_to_server(launch)
    link.send(ready)
    heartbeat.phase = EnginePhase.SERVING
    try:
        serve(core, executor, link, heartbeat, adapters, events)
    except Exception:
        logger.exception("the engine failed")
        # At once: threads of the worker may never end.
        os._exit(_EXIT_FAILED)


def _wait(promoted: threading.Event, heartbeat: Heartbeat) -> None:
    heartbeat.phase = EnginePhase.STANDBY
    promoted.wait()
    heartbeat.phase = EnginePhase.LOADING


def _refusal(error: Exception) -> StartError | None:
    """The error as the server's user reads it; None if it is a fault of ours."""
    if isinstance(error, StartError):
        return error
    reason = shortage(error)
    return None if reason is None else CapacityError(f"the engine cannot start: {reason}")


def build(
    launch: EngineLaunch,
    started_s: float,
    link: EngineLink,
    heartbeat: Heartbeat,
    flight: FlightRecord,
    ranks: Followers | None = None,
    before_end: list[Callable[[], None]] | None = None,
) -> tuple[EngineCore, ThreadExecutor, Ready, AdapterLoader | None, KVEventLog | None]:
    """Load the worker, report each phase, and build the core and its executor on it. Further results load adapters, if
    there is memory for any, and log KV events, if they are published. Raises `StartError`.

    `started_s`: time at which the first phase began (monotonic).
    """
    config = launch.config
    read_pinned(config.all_files)
    thread = WorkerThread()
    worker, ready = thread.submit(load_any, config, started_s, link.send, launch.log_style, ranks).result()
    check_pinned(config.all_files)  # one may have been written to while it was read
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        max_draws=config.most_draws,
        keeps_prompts_whole=config.is_encoder,
        drafts_follow=config.draft is not None and config.draft.is_head,
    )
    guesses = None if config.speculative == "none" else Guesses(looks_at_answers=config.speculative != "ngram")
    cache = KVCache(
        config.num_blocks if config.is_encoder else ready.num_blocks,
        ready.block_size,
        worker.cache_windows,
        step_tokens=config.max_num_batched_tokens,
        shares_prefixes=config.prefix_caching,
        checkpoints=checkpoint_rules(config),
        ledger=worker.ledger,
        has_memory=not config.is_encoder,
    )
    work = WorkModel.of(worker.arch, precision_of(config), ready.max_model_len)
    of_draft, draft_work = config.of_draft, None
    if of_draft is not None:
        assert worker.draft_arch is not None
        draft_work = WorkModel.of(worker.draft_arch, precision_of(of_draft), ready.max_model_len)
        if config.draft is not None and config.draft.is_mtp:
            draft_work = replace(draft_work, head_bytes=work.head_bytes)  # it is the served model's
    executor = ThreadExecutor(worker, thread)
    tier = None if config.is_encoder else tier_of(config, ready, cast("Runner", worker), cache)
    if tier is not None and before_end is not None:
        before_end.append(tier.wait_written)
    core = EngineCore(
        Scheduler(limits, cache, _seed_of(work, draft_work, ready.peaks), guesses),
        executor,
        vocab_size=ready.vocab_size,
        clock=time.monotonic,
        work=PlanWork(work, draft_work or WorkModel(), limits.drafts_follow),
        grammars=_grammars_of(config, ready),
        recorder=StepWatch(flight, heartbeat, ready.peaks),
        guesses=guesses,
        tier=tier,
        has_same_bits=config.deterministic or config.device == "cpu",
        refuses=ready.refuses,
    )
    adapters = None
    if worker.adapters is not None:
        # It needs torch, which a worker without weights does not import.
        from inferd.engine.worker.adapter_loader import AdapterLoader  # noqa: PLC0415

        adapters = AdapterLoader(worker.adapters, worker.arch, thread)
    events = None
    if config.kv_events != "none":
        of_tier = tier if config.kv_events_tiers else None
        events = KVEventLog(cache, has_private=config.kv_events == "all", tier=of_tier)
    return core, executor, ready, adapters, events


def _seed_of(work: WorkModel, draft_work: WorkModel | None, peaks: Peaks) -> PriorCosts:
    """The expected costs of steps at the roofline."""
    decode, chunked = (Coefficients(*costs) for costs in work.seconds(peaks))
    if draft_work is None:
        return PriorCosts(decode, chunked)
    of_draft, of_prompt = (Coefficients(*costs) for costs in draft_work.seconds(peaks))
    # Most of the tokens that a draft model computes are those of prompts.
    return PriorCosts(decode, chunked, replace(decode, pass_s=of_draft.step_s, draft_s=of_prompt.token_s))


def _grammars_of(config: EngineConfig, ready: Ready) -> GrammarThread | None:
    if not ready.generates:
        return None
    return GrammarThread(Path(config.model_path), ready.vocab_size, config.vocabulary, config.documents)


def checkpoint_rules(config: EngineConfig) -> StateCheckpointRules | None:
    """Bounds of the checkpoints of recurrent states; None if there are none."""
    return StateCheckpointRules(config.num_checkpoints, config.checkpoint_interval) if config.num_checkpoints else None


def serve(
    core: EngineCore,
    executor: ThreadExecutor,
    link: EngineLink,
    heartbeat: Heartbeat,
    adapters: AdapterLoader | None = None,
    events: KVEventLog | None = None,
) -> NoReturn:
    """Step for ever; the process ends with its standard input."""
    num_idle, is_rechecking = 0, False
    while True:
        heartbeat.num_beats += 1
        if events is not None:
            for encoded in events.take():
                link.send(CacheEvents(encoded))
        is_loading = adapters is not None and adapters.is_busy
        is_awaiting = core.is_awaiting or is_loading
        is_busy = core.has_work or is_rechecking
        messages = link.receive(0 if is_busy else _COMPILING_POLL_MS if is_awaiting else _IDLE_POLL_MS)
        for message in messages:
            heartbeat.num_beats += 1  # to check the blocks that an earlier engine left of a long prompt takes a while
            _dispatch(core, executor, message, adapters)
            if events is not None and isinstance(message, LoadAdapter):
                events.name_adapter(message.adapter, message.name)
        if adapters is not None and is_loading:
            for loaded in adapters.ended():
                if not loaded.error:
                    core.add_adapter(loaded.adapter)
                link.send(loaded)
        num_idle = num_idle + 1 if not messages and not core.has_work and not is_awaiting else 0
        heartbeat.step_started_s = time.monotonic() if num_idle > _RECHECKS_AFTER else 0.0
        is_rechecking = num_idle > _RECHECKS_AFTER and core.recheck()
        heartbeat.step_started_s = 0.0
        if num_idle and not is_rechecking:
            # To check a large pool takes a fifth of a second, so this runs only when the engine has been idle for a
            # while.
            core.check()
        if num_idle == _PREPARES_AFTER:
            core.prepare()
        # Refusals and aborts must not wait for a step, which may be long.
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
        for part in parts_of(output):
            link.send(part)


def _dispatch(core: EngineCore, executor: ThreadExecutor, message: ToEngine, adapters: AdapterLoader | None) -> None:
    match message:
        case Submit():
            core.submit(message, time.monotonic())
        case SubmitChoices():
            core.submit_choices(message, time.monotonic())
        case Abort():
            core.abort(message.request_ids)
        case ResetPrefixCache():
            core.reset_prefix_cache(with_running=message.with_running, with_tiers=message.with_tiers)
        case LoadAdapter():
            assert adapters is not None, "the server loads an adapter, but there is no memory for any"
            core.drop_adapter(message.adapter)
            adapters.load(message)
        case UseThreads():
            executor.use_threads(message.num_threads)


def _bind_to_server(launch: EngineLaunch) -> None:
    """Have the kernel end this process with the server, even if it is stopped or a library holds the interpreter.

    That must not happen before the supervisor has removed the contents of the run directory, at this process's first
    frame: a killed process cleans nothing up. So this waits, even while the server is suspended: nothing would read the
    news that this process is ready.
    """
    if sys.platform != "linux":
        return
    while (Path(launch.run_dir) / TO_ENGINE).exists():
        time.sleep(_SEALED_POLL_S)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launch.server_pid:
        os._exit(0)


MAX_SCORED = 2**15
"""Most log probabilities of prompts in one message, which are decoded in 7 ms. A step of 50,000 tokens with 20
alternatives each takes 300 to 380 ms (one core of an AMD EPYC Zen 4, 2026-11-21)."""


def parts_of(output: StepOutput) -> Iterator[StepOutput]:
    """`output` as messages with at most `MAX_SCORED` log probabilities of prompts each.

    These come first, as if each came from a chunk of its own. The last message has the rest of the step.
    """
    num_scored = sum(len(delta.prompt_logprobs) * _entries_of(delta) for delta in output.deltas)
    if num_scored <= MAX_SCORED:
        yield output
        return
    for delta in output.deltas:
        scored, size = delta.prompt_logprobs, max(1, MAX_SCORED // _entries_of(delta))
        for start in range(0, len(scored), size):
            early = Delta(
                request_id=delta.request_id,
                prompt_logprobs=scored[start : start + size],
                num_cached_tokens=delta.num_cached_tokens,
                scheduled_s=delta.scheduled_s,
            )
            yield StepOutput(deltas=(early,), stats=output.stats)
    rest = tuple(structs.replace(delta, prompt_logprobs=()) for delta in output.deltas)
    yield structs.replace(output, deltas=rest)


def _entries_of(delta: Delta) -> int:
    """Number of log probabilities of each scored token of a prompt: its own and its alternatives'."""
    return 1 + len(delta.prompt_logprobs[0].top) if delta.prompt_logprobs else 1

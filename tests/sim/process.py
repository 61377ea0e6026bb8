"""An engine process in virtual time, with its faults: the real core behind the real codec, its heartbeat and its flight
record.

The loop is that of `engine/process`, with an `await` wherever a real process would take time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from math import inf
from pathlib import Path

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.process.flight_recorder import FlightRecord
from inferd.engine.api.process.heartbeat import EnginePhase, Heartbeat
from inferd.engine.api.process.processor_time import LEAST_SHARE, ProcessorUse
from inferd.engine.api.wire.client import from_engine_endpoint, to_engine_endpoint
from inferd.engine.api.wire.messages import (
    STANDBY,
    Abort,
    Failed,
    FromEngine,
    Phase,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    SubmitChoices,
    ToEngine,
    UseThreads,
    WireError,
    decode_to_engine,
    encode,
)
from inferd.engine.process.main import parts_of
from inferd.engine.process.step_watch import StepWatch
from inferd.engine.sched.plan import StepPlan
from tests.sim.engine import SimulatedEngine, make_engine
from tests.sim.faults import TICK_S
from tests.sim.frame_faults import spoil_frame
from tests.sim.invariants import Invariants
from tests.sim.oracle import VOCAB_SIZE
from tests.sim.watcher import Recorder, Watcher

_PEAKS = Peaks(read_bytes_per_s=1e10, flops_per_s=1e12)
NUM_THREADS = 3
"""Number of threads of an engine that has no cores of others."""
KILLED, ABORTED = -9, -6


class Killed(Exception):
    """The process ended in the middle of a step."""

    def __init__(self, code: int = KILLED) -> None:
        self.code = code


class SimulatedProcess:
    """One process, from its spawn to its end."""

    def __init__(
        self, run: Watcher, run_dir: Path, shared: tuple[int, ...], epoch: int, *, replica: int, is_standby: bool
    ) -> None:
        """`shared`: memory of its heartbeat and of its flight record."""
        self.epoch, self.replica = epoch, replica
        self.run_dir = run_dir
        self.harms: list[str] = []
        """Faults that were applied to it and may end it."""
        self.was_killed = False
        """Whether it was killed from outside, and not by the server."""
        self.calm_s = 0.0
        """Time until which it may be slow, because of a fault that must not end it."""
        self.ready_s = inf
        """When it began to serve."""
        self.num_threads = NUM_THREADS
        """Number of threads that it computes on."""
        self.engine: SimulatedEngine | None = None
        self.exit_code: int | None = None
        self.is_known_dead = False
        self.news, self.exited = asyncio.Event(), asyncio.Event()
        """The server looks, and the process is gone."""
        self.promoted = asyncio.Event()
        if not is_standby:
            self.promoted.set()
        self._run, self._is_standby = run, is_standby
        self._loop = asyncio.get_running_loop()
        self._faults = list(run.faults_of(replica, epoch))
        self._frozen_until = self._starved_until = 0.0
        self._looked_s = self._loop.time()
        self._num_sent = self._num_received = self._num_steps = 0
        self._request_of: dict[int, str] = {}
        """Slot -> request in it."""
        self._dies_at_launch: type[Exception] | None = None
        self._deadly_code = KILLED
        self._heartbeat = Heartbeat.of(shared[0])
        self._recorder = Recorder(StepWatch(FlightRecord(shared[1]), self._heartbeat, _PEAKS))
        self._in = run.network.pipe(to_engine_endpoint(run_dir))
        self._out = run.network.pipe(from_engine_endpoint(run_dir))
        self._task = self._loop.create_task(self._live())

    # -- its life and its end ----------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._start()
            await self._serve()
        except (WireError, MemoryError):
            self.end(1)
        except Killed as death:
            self.was_killed = death.code == KILLED
            self.end(death.code)
        except Exception as error:
            self._run.failed(error)

    def end(self, code: int) -> None:
        """End the process, whatever it was doing. The server learns of it a moment later."""
        if self.exit_code is not None:
            return
        self.exit_code = code
        if self._task is not asyncio.current_task():
            self._task.cancel()
        self._run.ended(self, set().union(*self._recorder.in_flight.values()))
        notice_s, free_s = (self._run.rng.choice((0.0, 0.0005, 0.02)) for _ in range(2))
        self._loop.call_later(notice_s, self._tell)
        self._loop.call_later(notice_s + free_s, self.exited.set)

    def _tell(self) -> None:
        self.is_known_dead = True
        self.news.set()

    # -- what the kernel says of it, as `ProcessorTime` ---------------------------------------------------------------

    def is_stopped(self) -> bool:
        return self._frozen_until > self._loop.time()

    def use(self) -> ProcessorUse:
        """It runs all the time, or waits for a processor all the time."""
        now, looked_s = self._loop.time(), self._looked_s
        self._looked_s = now
        starved_s = max(min(self._starved_until, now) - looked_s, 0.0)
        return ProcessorUse(max(1.0 - starved_s / (now - looked_s), LEAST_SHARE) if starved_s else 1.0)

    def forget(self) -> None:
        self._looked_s = self._loop.time()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._thaw()

    async def _thaw(self) -> None:
        while self._frozen_until > self._loop.time():
            if self._frozen_until == inf:
                await asyncio.Event().wait()
            await asyncio.sleep(self._frozen_until - self._loop.time())

    # -- as engine/process does it -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        rng, scenario = self._run.rng, self._run.scenario
        self._plant_frame_faults()
        await self._sleep(rng.choice((0.02, 0.3)))
        if self._is_standby:
            self._send(Phase("libraries", 0.1, "read"))
            await self._sleep(rng.choice((0.0, 0.005)))
            self._send(Phase(STANDBY, 0.1, "waits to be promoted"))
            self._heartbeat.phase = EnginePhase.STANDBY
            await self.promoted.wait()
            self._heartbeat.phase = EnginePhase.LOADING
        self._send(Phase("loading", 0.1, ""))
        await self._begin_badly()
        await self._sleep(rng.choice((0.02, 0.3, 2.0)))
        recorder = self._recorder
        self.engine = make_engine(
            scenario.core,
            depth=1,
            clock=self._loop.time,
            tick=lambda: int(self._loop.time() / TICK_S),
            watch=self._launched,
            recorder=recorder,
            memory=self._run.memories[self.replica],
            tier=self._run.tiers[self.replica],
        )
        limits = scenario.core.limits
        self._invariants = Invariants(self.engine, limits, depth=1)
        self.ready_s = self._loop.time()
        self._send(_ready(limits.num_blocks, limits.block_size, limits.max_model_len))
        self._heartbeat.phase = EnginePhase.SERVING

    async def _serve(self) -> None:
        assert self.engine is not None
        core, heartbeat, is_rechecking = self.engine.core, self._heartbeat, False
        while True:
            heartbeat.num_beats += 1
            is_busy = core.has_work or is_rechecking
            messages = await self._receive(0.0 if is_busy else 0.001 if core.is_awaiting else 1.0)
            for message in messages:
                self._take(message)
            if not messages and not core.has_work and not core.is_awaiting:
                core.check()
            # The product waits for some idle seconds first.
            is_rechecking = core.recheck()
            if is_rechecking:
                await self._sleep(0.0005)
            self._send_output(core.flush())
            heartbeat.has_work = core.has_work
            if core.has_work:
                await self._step()

    async def _step(self) -> None:
        assert self.engine is not None
        core, heartbeat = self.engine.core, self._heartbeat
        fault = self._fault_of_step()
        self.engine.poison_free()
        running = self._invariants.ranks()
        heartbeat.step_started_s = self._loop.time()
        output = core.step(heartbeat.step_started_s)
        self._invariants.check_step(running, set(core._live))
        self.engine.poison_free()
        await self._sleep(0.0005)
        await self._apply_fault(fault)
        if self._recorder.is_deadly:
            raise Killed(self._deadly_code)
        await self._sleep(output.step_duration_s if output is not None else 0.0)
        self._recorder.settle()
        self._send_output(output)
        heartbeat.step_started_s = 0.0
        heartbeat.num_steps += 1
        if fault in ("kill after", "kill and lose"):
            self.harms.append(fault)
            if fault == "kill and lose":
                self._out.lose_all()
            raise Killed

    def _take(self, message: ToEngine) -> None:
        assert self.engine is not None
        core = self.engine.core
        self._run.taken(self, message)
        match message:
            case Submit():
                core.submit(message, self._loop.time())
            case SubmitChoices():
                core.submit_choices(message, self._loop.time())
            case Abort():
                core.abort(message.request_ids)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case UseThreads():
                self.num_threads = message.num_threads

    # -- its end of the wire -----------------------------------------------------------------------------------------

    def _send(self, message: FromEngine) -> None:
        self._out.send(encode(message, self.epoch, self._num_sent))
        self._num_sent += 1
        self._heartbeat.num_frames_sent = self._num_sent

    def _send_output(self, output: StepOutput | None) -> None:
        if output is not None:
            for part in parts_of(output):
                self._send(part)

    async def _receive(self, timeout_s: float) -> Sequence[ToEngine]:
        messages: list[ToEngine] = []
        frame = self._in.take()
        if frame is None and timeout_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._in.wait()
            await self._thaw()
            frame = self._in.take()
        while frame is not None:
            messages.append(decode_to_engine(frame, self.epoch, self._num_received))
            self._num_received += 1
            self._heartbeat.num_frames_received = self._num_received
            frame = self._in.take()
        return messages

    # -- what befalls it ---------------------------------------------------------------------------------------------

    def _launched(self, plan: StepPlan) -> None:
        """Called when a step is launched; a fault that kills the process in this step does it here."""
        assert self.engine is not None
        is_recheck = not self.engine.scheduler._launched
        if not is_recheck:
            self._invariants.check_launch(plan)
        if self._recorder.is_deadly:
            return
        if self._dies_at_launch is not None:
            self.harms.append("dies at launch")
            raise self._dies_at_launch
        for admission in plan.admissions:
            self._request_of[admission.slot] = admission.request_id
        for row in plan.rows if not is_recheck else ():
            caller = self._run.caller_of(self._request_of[row.slot])
            if caller.kills_at is not None and row.start <= caller.kills_at < row.start + row.num_tokens:
                self.harms.append(f"poison {caller.job.request_id}")
                # It fails by an assertion or a wrong address, or takes so much memory that the system kills it.
                self._deadly_code = ABORTED if caller.kills_at % 2 else KILLED
                if not self._run.scenario.core.is_lazy:
                    raise Killed(self._deadly_code)
                self._recorder.deadly.add(plan.step_id)

    def _fault_of_step(self) -> str:
        number, self._num_steps = self._num_steps, self._num_steps + 1
        what = next((fault.what for fault in self._faults if fault.where == "step" and fault.at == number), "")
        if what in ("kill", "memory"):
            self._dies_at_launch = Killed if what == "kill" else MemoryError
        return what

    async def _apply_fault(self, what: str) -> None:
        """Apply a fault in the middle of a step."""
        if what in ("hang", "stop", "kill before"):
            self.harms.append(what)
        now = self._loop.time()
        match what:
            case "hang":
                await asyncio.Event().wait()
            case "kill before":
                raise Killed
            case "stop":
                self._frozen_until = inf
            case "pause":
                self._frozen_until = now + self._run.rng.choice((0.4, 4.0))
                self.calm_s = max(self.calm_s, self._frozen_until)
            case "starve":
                starved_s = self._run.rng.choice((8.0, 300.0))
                self._starved_until = now + starved_s
                self.calm_s = max(self.calm_s, self._starved_until)
                await asyncio.sleep(starved_s)
            case "slow":
                self.calm_s = max(self.calm_s, now + 8.0)
                await asyncio.sleep(8.0)
        await self._thaw()

    async def _begin_badly(self) -> None:
        for fault in self._faults:
            if fault.where != "start":
                continue
            self.harms.append(fault.what)
            if fault.what == "silent":
                self._frozen_until = inf
                await self._thaw()
            if fault.what == "refuses":
                self._send(Failed("ModelError", "the weights are gone"))
                raise MemoryError
            raise Killed

    def _plant_frame_faults(self) -> None:
        pipes = {"in": self._in, "out": self._out}
        for fault in self._faults:
            if fault.where not in pipes:
                continue
            if fault.what == "delay":
                self.calm_s = inf
            old = self._run.old_frames(self, fault.where)
            spoil_frame(pipes[fault.where], fault, old, self._run.rng, self.harms)


def _ready(num_blocks: int, block_size: int, max_model_len: int) -> Ready:
    return Ready(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        weights_bytes=1,
        kv_bytes=1,
        planned_weights_bytes=1,
        planned_kv_bytes=1,
        device="none",
        dtype="none",
        peaks=_PEAKS,
    )

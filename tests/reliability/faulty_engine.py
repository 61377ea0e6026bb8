"""An engine process that breaks on purpose: the real one, or that of a free model, with faults in its worker and wire.

`faulty_server.py` has the server start it. A fault is written WHAT@WHERE, or WHAT@WHERE@epoch=N if only the server's
N-th engine (from 0) has it.

WHERE is step=K (the K-th step of this process, from 1), draft=K (the K-th that verifies drafts) or token=T (every step
with a row that computes token id T) for:
  kill    SIGKILL, as an operator or the system sends it.
  abort   The process aborts, as after a failed assertion.
  hang    The step never ends, and the process lives.
  spin    The step never ends: an endless loop in Python.
  loop    The same in C, which holds the interpreter's lock.
  lock    The step waits for ever for a lock, and holds the interpreter's lock.
  slow    The step takes eight seconds.
  stop    SIGSTOP: the whole process stands still.
  nan     The KV of one token becomes NaN.
  memory  An allocation fails.
WHERE is frame=K (the K-th frame to the server, from 0) for:
  lose, repeat, cut (to its first half), flip (one bit), mute (this frame and all later ones are lost).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import free_engine
from inferd.engine.api.process.engine_process import EngineLaunch
from inferd.engine.process import boot
from inferd.engine.sched import drafting
from inferd.engine.sched.plan import Row, StepPlan
from inferd.engine.worker.executor import Handle

if TYPE_CHECKING:
    import zmq

_FORM = re.compile(
    r"(?:(kill|abort|hang|spin|loop|lock|slow|stop|nan|memory)@(step|draft|token)|(lose|repeat|cut|flip|mute)@(frame))=(\d+)"
    r"(?:@epoch=(\d+))?"
)
_SLOW_S = 8.0
"""Duration of a slow step. It is longer than the silence after which the server counts a process as stopped."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    what: str
    where: str
    at: int
    epoch: int | None
    """Number of the engine that has it; None: every engine has it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError`."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"a fault must be like kill@step=40 or nan@token=7@epoch=0, but got {text!r}")
        of_step, step_place, of_frame, frame_place, at, epoch = found.groups()
        return cls(of_step or of_frame, step_place or frame_place, int(at), None if epoch is None else int(epoch))


class FaultySocket:
    """The socket to the server, and the frames that it damages."""

    def __init__(self, socket: zmq.Socket[bytes], faults: Sequence[Fault]) -> None:
        self._socket = socket
        self._damage = {fault.at: fault.what for fault in faults if fault.where == "frame"}
        self._num_frames = 0
        self._is_mute = False

    def send(self, frame: bytes) -> None:
        what = self._damage.get(self._num_frames, "")
        self._num_frames += 1
        self._is_mute = self._is_mute or what == "mute"
        for sent in () if self._is_mute else damaged(frame, what):
            self._socket.send(sent)

    def close(self, linger: int) -> None:
        self._socket.close(linger)


def damaged(frame: bytes, what: str) -> tuple[bytes, ...]:
    """The frames that go out instead of `frame`."""
    cut, flipped = frame[: len(frame) // 2], frame[:-1] + bytes([frame[-1] ^ 1])
    return {"": (frame,), "lose": (), "repeat": (frame, frame), "cut": (cut,), "flip": (flipped,)}[what]


class FaultyWorker:
    """A worker, and the faults of its steps."""

    def __init__(self, worker: Any, faults: Sequence[Fault]) -> None:
        self.arch, self.cache_windows = worker.arch, worker.cache_windows
        self.adapters, self.ledger = worker.adapters, worker.ledger
        self.copied = getattr(worker, "copied", None)  # a free model has no memory to copy
        self._worker = worker
        self._faults = [fault for fault in faults if fault.where != "frame"]
        self._num_steps = self._num_with_drafts = 0

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Handle:
        self._num_steps += 1
        self._num_with_drafts += plan.has_drafts
        hit = [(fault, row) for fault in self._faults if (row := self._row_of(fault, plan)) is not None]
        for fault, _ in hit:
            _break(fault.what)
        handle: Handle = self._worker.launch(plan, awaits_masks=awaits_masks)
        for fault, row in hit:
            if fault.what == "nan":
                self._poison(row)
        return handle

    def _row_of(self, fault: Fault, plan: StepPlan) -> Row | None:
        """The row that the fault hits in this step."""
        if fault.where == "step":
            return plan.rows[0] if self._num_steps == fault.at else None
        if fault.where == "draft":
            is_hit = plan.has_drafts and self._num_with_drafts == fault.at
            return next(row for row in plan.rows if row.draft_ids) if is_hit else None
        return next((row for row in plan.rows if fault.at in self._ids(row, plan)), None)

    def _ids(self, row: Row, plan: StepPlan) -> Sequence[int]:
        """Token ids that a row computes. The slot does not hold those of a request which starts with this step."""
        end = row.start + row.num_tokens
        for admission in plan.admissions:
            if admission.slot == row.slot:
                return admission.token_ids[row.start : end]
        ids: list[int] = self._worker.model.slots.token_ids[row.slot, row.start : end].tolist()
        return ids

    def _poison(self, row: Row) -> None:
        """Overwrite the KV of the row's first position, which its next step reads."""
        import torch  # noqa: PLC0415

        kv, slots = self._worker.model.kv, self._worker.model.slots
        block_id = int(slots.block_tables[0, row.slot, row.start // slots.block_size])
        with torch.inference_mode():
            kv.data[:, block_id, :, :, row.start % slots.block_size] = float("nan")


def _break(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "abort":
        os.abort()
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        threading.Event().wait()
    elif what == "spin":
        while True:
            pass
    elif what == "loop":
        re.match("(a+)+b", "a" * 99)
    elif what == "lock":
        held = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(held)
    elif what == "slow":
        time.sleep(_SLOW_S)
    elif what == "memory":
        # Here, because a free model's engine never loads torch.
        import torch  # noqa: PLC0415

        raise torch.OutOfMemoryError("told to fail")


def plant(faults: Sequence[Fault]) -> None:
    """Put the faults into the engine's module, from which `boot` takes its `main`."""
    # Here, because a free model takes its place in this module's imports.
    from inferd.engine.process import main as engine  # noqa: PLC0415

    run, load_any, link_to_server = engine.main, engine.load_any, engine.EngineLink

    def main(line: bytes, promoted: threading.Event, **rest: Any) -> int:
        epoch = msgspec.json.decode(line, type=EngineLaunch).epoch
        own = [fault for fault in faults if fault.epoch in (None, epoch)]

        def load(*arguments: Any) -> tuple[Any, Any]:
            worker, ready = load_any(*arguments)
            return FaultyWorker(worker, own), ready

        def link(*arguments: Any) -> Any:
            made = link_to_server(*arguments)
            made._out = FaultySocket(made._out, own)
            return made

        vars(engine).update(load_any=load, EngineLink=link)
        return run(line, promoted, **rest)

    vars(engine).update(main=main)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", type=Fault.parse, action="append", required=True)
    parser.add_argument("--step-ms", type=float, help="milliseconds of a free model's step (default: the real model)")
    asked = parser.parse_args()
    if asked.step_ms is not None:
        free_engine.replace_worker(partial(free_engine.load_free, step_s=asked.step_ms / 1e3))
        # Steps that only sleep say nothing of what drafts gain.
        drafting._GUESS_S, drafting._REST_STEPS, drafting._TRIAL_STEPS = 0.0, 0, 0
    plant(asked.fault)
    return boot.main()


if __name__ == "__main__":
    sys.exit(main())

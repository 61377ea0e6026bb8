"""Faults on purpose, for tests of recovery: a worker that dies, hangs or computes nonsense where it was told to.

A fault is written `WHAT@WHERE` or `WHAT@WHERE@life=N`. Of steps WHAT is kill (as somebody else would), abort (as a
failed assertion does), hang (the step never ends, the process lives), slow (it takes eight seconds), stop (the process
stands still), nan (the KV of one token) or memory (an allocation fails), and WHERE is step=K, the K-th of this process
from 1, or token=T, every step with a row that computes token id T. Of frames to the server WHAT is lose, repeat, cut,
flip (one bit) or mute (this one and all behind it are lost), and WHERE is frame=K, from 0. Knows no environment
variable.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from inferd.engine.sched.plan import Row, StepPlan
from inferd.engine.worker.executor import Handle
from inferd.engine.worker.runner import Runner

_FORM = re.compile(
    r"(?:(kill|abort|hang|slow|stop|nan|memory)@(step|token)|(lose|repeat|cut|flip|mute)@(frame))=(\d+)(?:@life=(\d+))?"
)
_SLOW_S = 8.0
"""More than the silence by which a stopped process is told from a busy one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    what: str
    where: str
    at: int
    life: int | None
    """The engine's generation that it happens in; None: in every one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError`."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"a fault must be like kill@step=40 or nan@token=7@life=0, but got {text!r}")
        of_step, step_place, of_frame, frame_place, at, life = found.groups()
        return cls(of_step or of_frame, step_place or frame_place, int(at), None if life is None else int(life))


def damaged(frame: bytes, what: str) -> tuple[bytes, ...]:
    """What is sent in place of a frame."""
    cut, flipped = frame[: len(frame) // 2], frame[:-1] + bytes([frame[-1] ^ 1])
    return {"lose": (), "repeat": (frame, frame), "cut": (cut,), "flip": (flipped,)}[what]


class FaultyWorker:
    """A runner, and what goes wrong with it."""

    def __init__(self, runner: Runner, faults: Sequence[Fault]) -> None:
        self._runner, self._faults = runner, faults
        self._num_steps = 0

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Handle:
        self._num_steps += 1
        hit = [(fault, row) for fault in self._faults if (row := self._row_of(fault, plan)) is not None]
        for fault, _ in hit:
            _break(fault.what)
        handle = self._runner.launch(plan, awaits_masks=awaits_masks)
        for fault, row in hit:
            if fault.what == "nan":
                self._poison(row)
        return handle

    def _row_of(self, fault: Fault, plan: StepPlan) -> Row | None:
        """Whom the fault is for in this step."""
        if fault.where == "step":
            return plan.rows[0] if self._num_steps == fault.at else None
        if fault.where == "frame":
            return None
        return next((row for row in plan.rows if fault.at in self._ids(row, plan)), None)

    def _ids(self, row: Row, plan: StepPlan) -> Sequence[int]:
        """What a row computes. A request that starts with this step is not in its slot yet."""
        end = row.start + row.num_tokens
        for admission in plan.admissions:
            if admission.slot == row.slot:
                return admission.token_ids[row.start : end]
        ids: list[int] = self._runner.slots.token_ids[row.slot, row.start : end].tolist()
        return ids

    @torch.inference_mode()
    def _poison(self, row: Row) -> None:
        """What this row has just written for its first position is no number: its next step reads it."""
        kv = self._runner.kv
        block_id = int(self._runner.slots.block_tables[0, row.slot, row.start // kv.block_size])
        kv.data[:, block_id, :, :, row.start % kv.block_size] = float("nan")


def _break(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "abort":
        os.abort()
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        threading.Event().wait()
    elif what == "slow":
        time.sleep(_SLOW_S)
    elif what == "memory":
        raise torch.OutOfMemoryError("told to fail")

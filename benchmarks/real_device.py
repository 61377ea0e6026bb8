"""The engine's own worker with the real clock, as a machine to run loads on: torch on this processor.

It is built as in the engine process, but in this process and without the wire. It knows no scheduler and no load.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, precision_of
from inferd.engine.api.cost.step_cost import WorkModel
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process import garbage
from inferd.engine.api.resolve import resolve
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts
from inferd.engine.worker.executor import ThreadExecutor, Worker, WorkerThread
from inferd.engine.worker.load import load_worker


@dataclass(frozen=True, slots=True)
class RealClock:
    """Seconds since `began_s` of the monotonic clock."""

    began_s: float

    def __call__(self) -> float:
        return time.monotonic() - self.began_s

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self()))


@dataclass(frozen=True, slots=True)
class RealMachine:
    """One loaded model. Runs come one after another, because there is one processor."""

    seed: PriorCosts
    num_blocks: int
    worker: Worker
    thread: WorkerThread
    num_at_once: int = 1

    @classmethod
    def load(cls, path: Path, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> Self:
        """Load the checkpoint at `path`, in bfloat16 if the processor computes it. Raises `ModelError` or
        `CapacityError`."""
        asked = AskedConfig(
            model_path=str(path), device="cpu", max_num_seqs=max_num_seqs, block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens, prefix_caching=False,
        )  # fmt: skip
        config, _, _ = resolve(asked, ModelFacts.of(Checkpoint.read(path)), Machine.detect())
        thread = WorkerThread()
        worker, ready = thread.submit(load_worker, config, time.monotonic(), lambda phase: None).result()
        assert not any(window is not None for window in worker.cache_windows), "runs count with a cache of no windows"
        work = WorkModel.of(worker.arch, precision_of(config), ready.max_model_len)
        decode, chunked = work.seconds(ready.peaks)
        garbage.freeze_objects()
        return cls(PriorCosts(Coefficients(*decode), Coefficients(*chunked)), ready.num_blocks, worker, thread)

    def begin(self, seed: int) -> tuple[ThreadExecutor, RealClock]:
        del seed
        return ThreadExecutor(self.worker, self.thread), RealClock(time.monotonic())

    def close(self) -> None:
        self.thread.close()

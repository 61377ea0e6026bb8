"""How the core runs a plan without knowing what runs it: `launch` returns at once, `wait` gives the step's results.

Launched plans run one after another, in launch order. `ThreadExecutor` runs a worker on a thread of its own, so that
the core plans step N+1 while step N computes (torch releases the interpreter lock inside its ops). Imports no torch.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from inferd.engine.sched.plan import StepPlan, StepResult


class Handle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step's results are on the host. Raises what the worker raised."""
        ...


class Executor(Protocol):
    """Runs plans in launch order."""

    def launch(self, plan: StepPlan) -> Handle:
        """Start `plan` behind those already launched; never blocks on their results."""
        ...

    def close(self) -> None:
        """Finish what was launched and release the worker."""
        ...


class Worker(Protocol):
    """Computes one plan; holds the model, the KV tensors and the slots."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class _FutureHandle:
    __slots__ = ("_future",)

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


class ThreadExecutor:
    """One worker, one thread, plans in order."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferd-worker")

    def launch(self, plan: StepPlan) -> _FutureHandle:
        return _FutureHandle(self._thread.submit(self._worker.execute, plan))

    def close(self) -> None:
        self._thread.shutdown(wait=True)

"""The interface through which the core runs step plans: `launch` returns at once, `wait` gives the step's results.

Launched plans run one after another, in launch order. A plan with rows under a grammar is launched in two halves,
because their masks are known only when the step before has been applied: `launch` computes logits, `Handle.sample`
draws. `ThreadExecutor` runs the worker on a thread of its own: the core plans step N+1 while step N computes, because
torch releases the interpreter lock inside its ops. A GPU finds N+1 in its queue when N is done. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from inferd.engine.sched.plan import StepPlan, StepResult, TokenMasks

P = ParamSpec("P")
Result = TypeVar("Result")


class Handle(Protocol):
    """A launched step."""

    def sample(self, masks: TokenMasks) -> None:
        """Draw, if the launch awaits masks: once, before `wait` and before the next plan is launched."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's results are on the host. Raises what the worker raised."""
        ...


class Executor(Protocol):
    """Runs plans in launch order."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Handle:
        """Start `plan` after the plans already launched; never blocks on their results.

        `awaits_masks`: nothing is drawn before the handle's `sample`.
        """
        ...

    def close(self) -> None:
        """Finish what was launched and release the worker."""
        ...


class Worker(Protocol):
    """Computes step plans. Holds the model, the KV tensors and the slots."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Handle:
        """Start the plan on the device. When this returns, a CPU is done, and a GPU has the plan in its queue."""
        ...

    def use_threads(self, num_threads: int) -> None:
        """Compute on so many threads of the processor from now on, with the same results."""
        ...


class _FutureHandle:
    __slots__ = ("_future", "_thread")

    def __init__(self, future: Future[Handle], thread: WorkerThread) -> None:
        self._future, self._thread = future, thread

    def sample(self, masks: TokenMasks) -> None:
        launched = self._future

        def draw() -> Handle:
            handle = launched.result()
            handle.sample(masks)
            return handle

        self._future = self._thread.submit(draw)

    def wait(self) -> StepResult:
        return self._future.result().wait()


class WorkerThread:
    """The one thread on which a worker is built and runs.

    Numeric libraries keep a team of threads for each thread that calls them. A worker that is built on one thread and
    runs on another leaves a second team behind. With more threads than cores, the teams wait for work in a slower way.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferd-worker")

    def submit(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Run `function` on the thread, after all that was submitted before."""
        return self._pool.submit(function, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class ThreadExecutor:
    """Runs plans in order, on one worker in one thread."""

    def __init__(self, worker: Worker, thread: WorkerThread) -> None:
        self._worker, self._thread = worker, thread

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> _FutureHandle:
        launched = self._thread.submit(self._worker.launch, plan, awaits_masks=awaits_masks)
        return _FutureHandle(launched, self._thread)

    def use_threads(self, num_threads: int) -> None:
        """Have the worker compute the plans that are launched from now on with so many threads."""
        self._thread.submit(self._worker.use_threads, num_threads)

    def close(self) -> None:
        self._thread.close()

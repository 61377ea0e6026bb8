"""The interface of a run to its simulated processes, and the real watch over their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Protocol

from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.process.flight_recorder import Rows
from inferd.engine.api.wire.messages import ToEngine
from inferd.engine.process.step_watch import StepWatch
from tests.sim.faults import Caller, Fault, FrontScenario
from tests.sim.left_memory import LeftMemory
from tests.sim.network import Network
from tests.sim.tier import SimulatedTier

if TYPE_CHECKING:
    from tests.sim.engine_process import SimulatedHandle
    from tests.sim.process import SimulatedProcess


class Watcher(Protocol):
    """The run, which observes its processes."""

    scenario: FrontScenario
    network: Network
    rng: Random
    lives: list[SimulatedHandle]
    name: str
    memories: list[LeftMemory]
    """The memory that outlives the engines of each replica."""
    tiers: list[SimulatedTier | None]
    """The tier below it."""

    def faults_of(self, replica: int, epoch: int) -> tuple[Fault, ...]:
        """Faults of the engine that is about to start."""
        ...

    def caller_of(self, request_id: str) -> Caller:
        """The caller of a request."""
        ...

    def old_frames(self, process: SimulatedProcess, way: str) -> Sequence[bytes]:
        """Frames of the engine before it: "in" to it, or "out" of it."""
        ...

    def taken(self, process: SimulatedProcess, message: ToEngine) -> None:
        """A process opened a message."""
        ...

    def ended(self, process: SimulatedProcess, in_flight: set[int]) -> None:
        """A process ended. `in_flight`: tags of the requests in steps that were launched and had not ended."""
        ...

    def failed(self, error: BaseException) -> None:
        """A process ended by an error without a planted fault."""
        ...


@dataclass(slots=True)
class Recorder:
    """The real watch over steps. It learns of a step's end only after the step's time has passed."""

    watch: StepWatch
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    """Launched steps that have not ended -> tags of their requests: the expected flight record."""
    deadly: set[int] = field(default_factory=set)
    """Steps that kill the process while they are computed."""
    _ended: list[int] = field(default_factory=list)

    @property
    def is_deadly(self) -> bool:
        """Whether the process dies in the step whose results it waits for. What it plans with those results, before
        its loop gives the time to die, is never launched."""
        return not self.deadly.isdisjoint(self._ended)

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        if self.is_deadly:
            return
        # The core waited for these steps before it planned this one.
        self.settle()
        self.in_flight[step_id] = {tag for tag, _ in rows}
        self.watch.launched(step_id, rows, work)

    def ended(self, step_id: int) -> None:
        self._ended.append(step_id)

    def settle(self) -> None:
        for step_id in self._ended:
            self.watch.ended(step_id)
            del self.in_flight[step_id]
        self._ended.clear()

"""What a simulated process knows of the run that it belongs to, and the real watch over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Protocol

from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.process.flight_recorder import Rows
from inferd.engine.api.wire.messages import ToEngine
from inferd.engine.process.step_watch import StepWatch
from tests.sim.faults import Caller, FrontScenario
from tests.sim.network import Network

if TYPE_CHECKING:
    from tests.sim.process import SimulatedProcess
    from tests.sim.supervisor import SimulatedSupervisor


class Watcher(Protocol):
    """Who sees what becomes of processes: the run."""

    scenario: FrontScenario
    network: Network
    rng: Random
    lives: list[SimulatedSupervisor]

    def caller_of(self, request_id: str) -> Caller:
        """Who asked for it."""
        ...

    def old_frames(self, epoch: int, way: str) -> Sequence[bytes]:
        """Frames of the engine before that one, "in" to it or "out" of it."""
        ...

    def taken(self, process: SimulatedProcess, message: ToEngine) -> None:
        """A process opened a message."""
        ...

    def ended(self, process: SimulatedProcess, flying: set[int]) -> None:
        """A process is gone, with requests of these tags in the steps that were launched and had not ended."""
        ...

    def failed(self, error: BaseException) -> None:
        """A process ended by an error that nobody caused."""
        ...


@dataclass(slots=True)
class Recorder:
    """The real watch over steps, which is told of a step's end once the time has passed that it takes."""

    watch: StepWatch
    flying: dict[int, set[int]] = field(default_factory=dict)
    """Steps that were launched and have not ended -> tags of their requests: what the flight record has to say."""
    deadly: set[int] = field(default_factory=set)
    """Steps that end the process as they are computed."""
    _ended: list[int] = field(default_factory=list)

    @property
    def is_deadly(self) -> bool:
        """Whether the process dies in the step whose results it waits for."""
        return not self.deadly.isdisjoint(self._ended)

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        self.flying[step_id] = {tag for tag, _ in rows}
        self.watch.launched(step_id, rows, work)

    def ended(self, step_id: int) -> None:
        self._ended.append(step_id)

    def settle(self) -> None:
        for step_id in self._ended:
            self.watch.ended(step_id)
            del self.flying[step_id]
        self._ended.clear()

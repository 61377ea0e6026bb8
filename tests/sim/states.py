"""The recurrent states of the simulated device. A state is a number that depends on each token and their order.

A checkpoint that was never written, was freed, or is NaN is None, and a row that continues such a state fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferd.engine.sched.plan import StepPlan
from tests.sim.cells import SimulationError
from tests.sim.oracle import next_state

State = int | None


def states_in(state: State, ids: Sequence[int], start: int, end: int, name: str) -> dict[int, int]:
    """The state behind each token of a row, by the number of tokens; `state` is the one that its slot holds."""
    if start == 0:
        state = 0
    if state is None:
        raise SimulationError(f"{name}: position {start} continues a state that nothing has written")
    states: dict[int, int] = {}
    for position in range(start, end):
        state = states[position + 1] = next_state(state, ids[position])
    return states


class States:
    """All checkpoints of one device."""

    def __init__(self, num_checkpoints: int) -> None:
        self.content: list[State] = [None] * num_checkpoints
        self.free: frozenset[int] = frozenset()
        """Checkpoints that hold nothing for steps launched from now on."""
        self._freed: dict[int, frozenset[int]] = {}
        """`free` when a step was launched."""

    def left(self) -> States:
        """These checkpoints, as another engine finds them."""
        others = States(0)
        others.content = self.content
        return others

    def put(self, checkpoint_id: int, state: State) -> None:
        """Write a checkpoint beside the steps: it is no longer one that was free when they were launched."""
        self.content[checkpoint_id] = state
        self._freed = {step_id: free - {checkpoint_id} for step_id, free in self._freed.items()}

    def launched(self, plan: StepPlan) -> None:
        self._freed[plan.step_id] = self.free
        admitted, rows = {admission.slot for admission in plan.admissions}, {row.slot for row in plan.rows}
        if not {copy.slot for copy in plan.state_loads} <= admitted:
            raise SimulationError("a state is loaded into a slot that runs already")
        if not {copy.slot for copy in plan.state_saves} <= rows:
            raise SimulationError("a state is saved of a slot without a row")
        goals = [copy.checkpoint_id for copy in plan.state_saves]
        if len(set(goals)) != len(goals):
            raise SimulationError("two states are saved to one checkpoint")

    def begin(self, plan: StepPlan) -> Mapping[int, State]:
        """The states that a step loads, by slot. Poisons what was free when it was launched."""
        for checkpoint_id in self._freed.pop(plan.step_id):
            self.content[checkpoint_id] = None
        return {copy.slot: self.content[copy.checkpoint_id] for copy in plan.state_loads}

    def accepted(self, states: Mapping[int, int], first: int, accepted: int, end: int) -> State:
        """The working state after a row up to `end`, whose drafts begin at `first`. `accepted`: end of those that were
        accepted."""
        assert first <= accepted <= end
        return states[accepted]

    def end(self, plan: StepPlan, states: Mapping[int, State]) -> None:
        """Save states by slot: those behind a step's rows, and of a row with drafts the one before them."""
        for copy in plan.state_saves:
            self.content[copy.checkpoint_id] = states[copy.slot]

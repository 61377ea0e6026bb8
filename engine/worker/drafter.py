"""A draft model or a draft head as a part of steps: it makes the drafts of the rows that ask for them, before the
layers of the served model run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from inferd.engine.arch.description import Arch
from inferd.engine.sched.plan import Row
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.step import Step, StepPart


class Drafter(StepPart):
    """Drafts for the requests in `slots`, which have the block tables of one cache group."""

    def __init__(self, arch: Arch, slots: Slots) -> None:
        self.arch, self._slots, self._device = arch, slots, slots.device

    def before_layers(self, step: Step) -> None:
        rows = [row for row in step.plan.rows if row.num_to_draft]
        if rows:
            self.draft(rows)
            places = [(row.slot, row.start + 1 + number) for row in rows for number in range(row.num_to_draft)]
            step.drafts = self._slots.gather_ids(*self._slots.on_device(places))

    @abstractmethod
    def draft(self, rows: Sequence[Row]) -> None:
        """Make the drafts of rows that ask for some, and write them to their slots."""

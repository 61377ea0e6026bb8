"""Builds a step plan row by row, with the block table entries that each row needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferd.engine.sched.entry import Entry
from inferd.engine.sched.latency.budget import StepBudget
from inferd.engine.sched.plan import Admission, Row, StateCopy, StepPlan, TableUpdate


@dataclass(slots=True)
class PlanBuilder:
    """A step plan that is being built."""

    budget: StepBudget
    admissions: list[Admission] = field(default_factory=list)
    updates: list[TableUpdate] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """Entry of each row."""
    state_loads: list[StateCopy] = field(default_factory=list)
    state_saves: list[StateCopy] = field(default_factory=list)

    def add(self, entry: Entry, num_tokens: int) -> None:
        request, slot = entry.request, entry.slot
        self._send_blocks(entry)
        start = request.scheduled
        self.budget.spend(start, num_tokens)
        if start < request.num_prompt <= start + num_tokens:
            target_s = request.scheduling.ttft_target_s
            if target_s is not None:
                self.budget.end_by(request.scheduling.arrival_s + target_s)
        self.rows.append(Row(slot, start, num_tokens, request.launch(num_tokens)))
        self.entries.append(entry)
        if entry.table.has_states:
            checkpoint_id = entry.table.leave_checkpoint(start + num_tokens, num_tokens)
            if checkpoint_id is not None:
                self.state_saves.append(StateCopy(slot, checkpoint_id))

    def add_drafts(self, index: int, draft_ids: tuple[int, ...] | None, num_drafts: int) -> None:
        """Let row number `index` verify drafts: these, or if None, those that the draft model makes. Its block table
        has the places."""
        entry, row = self.entries[index], self.rows[index]
        self._send_blocks(entry)
        self.budget.spend_drafts(num_drafts)
        entry.request.launch_drafts(num_drafts)
        row = row._replace(num_tokens=row.num_tokens + num_drafts)
        if draft_ids is None:
            row = row._replace(num_to_draft=num_drafts, draft_start=entry.draft_start)
        else:
            row = row._replace(draft_ids=draft_ids)
        self.rows[index] = row

    def _send_blocks(self, entry: Entry) -> None:
        if entry.table.has_unsent:
            for appended in entry.table.take_appended():
                self.updates.append(TableUpdate(entry.slot, *appended))

    def finish(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id,
            tuple(self.admissions),
            tuple(self.updates),
            tuple(self.rows),
            tuple(self.state_loads),
            tuple(self.state_saves),
        )

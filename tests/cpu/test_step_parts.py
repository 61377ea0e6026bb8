"""A feature takes part in steps by the hooks of a `StepPart` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from inferd.engine.sched.plan import NO_MASKS, Row, RowResult, StepPlan
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.step import Report, Step, StepPart
from tests.cpu.test_no_waiting import ASKED, plans, runner


class Watching(StepPart):
    """Notes when it is called, and what it finds then."""

    def __init__(self, watched: Runner) -> None:
        self.model, self.events = watched.model, list[str]()
        watched._parts += (self,)

    def before_layers(self, step: Step) -> None:
        assert all(self.model.slots.num_prompt(one.slot) == one.num_prompt for one in step.plan.admissions)
        assert step.logits is None
        self.events.append("before")

    def read_hidden(self, step: Step, hidden: Tensor, first_tokens: Sequence[int]) -> None:
        assert hidden.shape == (step.plan.num_tokens, self.model.decoder.arch.hidden_size)
        assert list(first_tokens) == [0, *accumulate(row.num_tokens for row in step.plan.rows)]
        sums = hidden.sum(dim=1)
        step.reports.append(Report([sums[first_tokens[0] : first_tokens[1]], sums[-1:]], self.add))
        self.events.append("hidden")

    def add(self, tensors: Iterator[Tensor], results: list[RowResult]) -> None:
        first, last = next(tensors), next(tensors)
        results[0] = results[0]._replace(embedding=first.numpy().tobytes())
        results[-1] = results[-1]._replace(embedding=last.numpy().tobytes())

    def after_layers(self, step: Step) -> None:
        assert step.logits is not None
        self.events.append("layers")

    def after_draw(self, step: Step, accepted: Callable[[], Sequence[int]]) -> None:
        ids, counts = self.model.slots.token_ids, accepted()
        # A slot holds what was drawn, behind the accepted drafts at least.
        self.given = {
            row.slot: ids[row.slot, row.start + row.num_tokens - row.num_drafts :][: 1 + count].tolist()
            for row, count in zip(step.plan.rows, counts, strict=True)
            if row.samples
        }
        self.events.append("draw")


@pytest.mark.parametrize("name", ASKED)
def test_a_part_is_called_at_each_stage_of_a_step(name: str) -> None:
    """After the draw it finds the tokens that the step gives the host."""
    watched = runner(CpuDevice(1))
    part = Watching(watched)
    for plan in plans(ASKED[name]):
        part.events.clear()
        result = watched.execute(plan)
        has_hidden = any(row.num_tokens != row.num_draws for row in plan.rows)
        assert [event for event in part.events if event != "hidden"] == ["before", "layers", "draw"]
        assert part.events[1] == "hidden" or not has_hidden
        assert part.given == {
            row.slot: list(own.token_ids) for row, own in zip(plan.rows, result.rows, strict=True) if row.samples
        }


def test_a_part_learns_of_a_draw_when_masks_have_come() -> None:
    watched = runner(CpuDevice(1))
    part, (first, *_) = Watching(watched), plans(ASKED["greedy"])
    step = watched.launch(first, awaits_masks=True)
    assert part.events == ["before", "hidden", "layers"] and step.logits is not None
    step.sample(NO_MASKS)
    assert part.events[-1] == "draw"
    assert step.logits is None, "logits are freed before the results have arrived"
    with pytest.raises(AssertionError, match="draws once"):
        step.sample(NO_MASKS)


@pytest.mark.parametrize("name", ["greedy", "ruled"])
def test_a_report_reaches_its_rows_and_no_others(name: str) -> None:
    """Beside reports of prompt logprobs, whose tensors come before."""
    plan = plans(ASKED[name])[0]
    plain, watched = runner(CpuDevice(1)).execute(plan), runner(CpuDevice(1))
    Watching(watched)
    found = watched.execute(plan)
    assert [len(own.embedding) for own in found.rows] == [4 * plan.rows[0].num_tokens, 4]
    assert tuple(own._replace(embedding=b"") for own in found.rows) == plain.rows
    assert bool(plain.rows[0].prompt_logprobs) == (name == "ruled")


def test_a_step_without_draws_accepts_nothing() -> None:
    watched, counts = runner(CpuDevice(1)), list[Sequence[int]]()

    class Counting(StepPart):
        def after_draw(self, step: Step, accepted: Callable[[], Sequence[int]]) -> None:
            counts.append(accepted())

    watched._parts += (Counting(),)
    first = plans(ASKED["greedy"])[0]
    result = watched.execute(StepPlan(0, first.admissions, first.table_updates, (Row(1, 0, 8, False),)))
    assert result.rows == (RowResult(),) and [list(own) for own in counts] == [[]]
    assert torch.count_nonzero(watched.model.slots.token_ids[1, 20:]) == 0

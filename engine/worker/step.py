"""One step while it runs, and the protocol by which features take part in it.

The runner computes the layers. All else that a step does is done by its parts, one class a feature: slots, recurrent
states, adapters, drafts, pooling. One of them, `Drawing`, also draws the tokens. The runner calls its `draw` by name,
once the masks of grammars are there, and gives what it drew to all parts. Imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from inferd.engine.models.loader import Progress
from inferd.engine.sched.plan import RowResult, StepPlan


class Report(NamedTuple):
    """Results of some rows, on their way to the host."""

    tensors: Sequence[Tensor]
    """On the device."""
    add: Callable[[Iterator[Tensor], list[RowResult]], None]
    """Takes the next tensors, copies of these, and adds what they say to the results of the step's rows."""


@dataclass(slots=True)
class Step:
    """A plan, and what computing it leaves on the device."""

    plan: StepPlan
    drafts: Tensor | None = None
    """[N] int64: drafts that the worker made, of the rows that ask for them, in their order."""
    logits: Tensor | None = None
    """[S, V] fp32 of the S tokens that the step draws; None if it draws none, and after the draw."""
    outcomes: Tensor | None = None
    """[S] outcomes if the step was recorded with its draws, which hold for plain rows only; else None."""
    read: Tensor | None = None
    """[T, states * hidden]: hidden states that a draft head reads, in the order of the step's tokens."""
    reports: list[Report] = field(default_factory=list)
    """Those of the parts."""
    expert_peaks: tuple[tuple[int, float], ...] = ()
    """`StepResult.expert_peaks`."""


class StepPart:
    """A feature's share of each step. The runner calls each method of all parts, in one order, and a part does what it
    needs. It must not wait for a GPU."""

    def record_steps(self, progress: Progress) -> None:
        """Record steps of its own, on a device that records before it serves."""

    def before_layers(self, step: Step) -> None:
        """Take in the plan's requests, and prepare what the layers read."""

    def read_hidden(self, step: Step, hidden: Tensor, first_tokens: Sequence[int]) -> None:
        """Read the final hidden states [T, hidden], of which row i's begin at `first_tokens[i]`. Not called for a step
        that was recorded with its head: each of its rows draws behind all its tokens."""

    def after_layers(self, step: Step) -> None:
        """Nothing is drawn yet."""

    def after_draw(self, step: Step, accepted: Callable[[], Sequence[int]]) -> None:
        """The drawn ids are in their slots. `accepted` waits for them, and gives the number of accepted drafts of each
        row."""

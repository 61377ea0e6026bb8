"""Decides how many guessed tokens each row of a step verifies: as many as make the step give more tokens a second.

A row with k drafts computes 1 + k tokens and gives one token and all drafts accepted before the first rejected one. A
draft that is right with probability c gives c tokens and costs the step the time of one more token. The step-time model
says how much that is. Knows no proposers and no blocks beyond the tables of its entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from inferd.engine.sched.entry import Entry, State
from inferd.engine.sched.latency.step_time import Coefficients, StepLoad, StepTimeModel
from inferd.engine.sched.plan_builder import PlanBuilder
from inferd.engine.speculation.ports import MOST_DRAFTS, Guess, Guesser

_LEAST_GAIN = 1.03
"""A step with drafts is planned when all results are known, and so does not overlap with the work of the host. It must
promise this many times the tokens a second of one without. The number is chosen, not measured."""


class _Candidate(NamedTuple):
    """A row that may verify drafts."""

    row: int
    """Index of the row in the step."""
    context: int
    """Tokens before its first draft."""
    ids: Sequence[int]
    odds: Sequence[float]
    has_target: bool
    """Whether its tokens are due at some pace."""


class Drafting:
    """Adds drafts to planned steps."""

    def __init__(self, guesser: Guesser, model: StepTimeModel, most_draws: int) -> None:
        """`most_draws`: tokens that a step may draw in all."""
        self._guesser, self._model, self._most_draws = guesser, model, most_draws

    def add(self, builder: PlanBuilder) -> None:
        """Add drafts to the rows of a step that is planned otherwise, but not to one whose request was preempted since:
        its blocks are for another."""
        most = min(builder.budget.num_tokens, self._most_draws - sum([row.samples for row in builder.rows]))
        load = StepLoad.of(builder.rows)
        if most <= 0 or not self._could_pay(load, most):
            return
        candidates = [
            _Candidate(index, row.start + 1, *self._guess(entry, 0), entry.request.scheduling.tpot_target_s is not None)
            for index, (row, entry) in enumerate(zip(builder.rows, builder.entries, strict=True))
            if row.num_tokens == 1 and entry.request.most_drafts > 0 and entry.state is State.RUNNING
        ]
        counts = self._counts(candidates, load, most, builder.budget.seconds_left)
        for candidate, count in zip(candidates, counts, strict=True):
            entry = builder.entries[candidate.row]
            num_drafts = _with_places(entry, candidate.context, count)
            if num_drafts:
                builder.add_drafts(candidate.row, tuple(candidate.ids[:num_drafts]))

    def is_worth_a_wait(self, running: Iterable[Entry], load: StepLoad) -> bool:
        """Whether the next step should be planned when the results of the launched one, of `load`, are known, because
        drafts need them."""
        if not self._could_pay(load, self._most_draws):
            return False
        candidates = []
        for entry in running:
            request = entry.request
            if request.most_drafts < 2:
                continue
            ids, odds = self._guess(entry, 1)
            if len(ids) > 1:
                # The first guessed token is the one that the launched step draws.
                has_target = request.scheduling.tpot_target_s is not None
                candidates.append(_Candidate(0, request.total, ids[1:], (odds[0] * odds[1], *odds[2:]), has_target))
        return any(self._counts(candidates, load, self._most_draws, inf))

    def _could_pay(self, load: StepLoad, most: int) -> bool:
        """Whether `most` drafts would pay if all were right. If not, nothing needs to be guessed."""
        costs, base_s = self._costs(load), self._model.predict(load)
        return (load.num_tokens + most) * base_s > _LEAST_GAIN * load.num_tokens * (base_s + most * costs.token_s)

    def _costs(self, load: StepLoad) -> Coefficients:
        return self._model.chunked if load.pairs else self._model.decode

    def _guess(self, entry: Entry, num_more: int) -> Guess:
        """The guess for an entry, at most as long as its row may verify; `num_more`: with as many ids before."""
        most = min(MOST_DRAFTS, entry.request.most_drafts - num_more) + num_more
        guess = self._guesser.guess(entry.request)
        return Guess(guess.ids[:most], guess.odds[:most])

    def _counts(self, candidates: Sequence[_Candidate], load: StepLoad, most: int, seconds_left: float) -> list[int]:
        """Number of drafts of each candidate, at most `most` in all, that take at most `seconds_left`.

        Takes the likeliest drafts first, and those of requests with a target before all others, as long as each gives
        more tokens a second than the step did without it.
        """
        counts = [0] * len(candidates)
        costs, base_s = self._costs(load), self._model.predict(load)
        # Without drafts a step gives its tokens: those of prompts, and one drawn for each decode.
        seconds, given, spent_s = base_s, float(load.num_tokens), 0.0
        for chance, place, context in _likeliest_first(candidates):
            cost_s = costs.token_s + costs.context_s * context
            if sum(counts) == most or spent_s + cost_s > seconds_left:
                break
            if chance * seconds <= cost_s * given:
                continue
            counts[place] += 1
            given, seconds, spent_s = given + chance, seconds + cost_s, spent_s + cost_s
        is_better = given * base_s > _LEAST_GAIN * load.num_tokens * seconds
        return counts if is_better else [0] * len(candidates)


def _likeliest_first(candidates: Sequence[_Candidate]) -> list[tuple[float, int, int]]:
    """(probability, index of the candidate, context) of all drafts, in the order in which to take them. A draft comes
    behind those before it in its row, which are at least as likely."""
    drafts = []
    for place, candidate in enumerate(candidates):
        chance = 1.0
        for number, odds in enumerate(candidate.odds):
            chance *= odds
            drafts.append((not candidate.has_target, -chance, place, candidate.context + number))
    drafts.sort()
    return [(-negative, place, context) for _, negative, place, context in drafts]


def _with_places(entry: Entry, first: int, num_drafts: int) -> int:
    """`num_drafts`, or half as many and so on, until there are blocks for them. Nobody is preempted for drafts."""
    table = entry.table
    while num_drafts and first + num_drafts > table.capacity and not table.extend(first + num_drafts):
        num_drafts //= 2
    return num_drafts

"""Decides how many drafts each row of a step verifies: as many as make the step give more tokens a second.

A row with k drafts computes 1 + k tokens and gives one token and all drafts accepted before the first rejected one. A
draft that is right with probability c gives c tokens and costs the step the time of one more token. A draft of the
draft model also costs a token of that model, and its share of a pass: one draft of each row. The step-time model says
how much all of these are. A row verifies either guesses or drafts of the draft model, whichever promise more.

Knows no proposers and no blocks beyond the tables of its entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from inferd.engine.api.speculation import reason_against
from inferd.engine.request import Request
from inferd.engine.sched.draft_odds import DraftGains, DraftOdds, PlaceCounts
from inferd.engine.sched.entry import Entry, State
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.latency.step_time import StepLoad, StepTimeModel
from inferd.engine.sched.plan import Row
from inferd.engine.sched.step_planner import PlanBuilder
from inferd.engine.speculation.ports import MOST_DRAFTS, NO_GUESS, Guess, Guesser

_LEAST_GAIN = 1.03
"""A step with drafts must promise this many times the tokens a second of one without."""
_GUESS_S, _MOST_SHARE = 1e-4, 0.01
"""Seconds in which the host guesses for a request, and the share of the steps' time that guesses may take while none is
worth a wait. Measured beside steps that compute on the same 2 cores (AMD EPYC Zen 4, 2026-11-26)."""
_REST_STEPS, _MOST_REST_STEPS = 8, 16
"""Steps for which nothing is guessed after a wait for a step that then had no drafts, as without time or blocks; and
the most of them in a row."""
_NUM_WAITS, _FORGETTING = 15, 0.999
"""Number of newest waits whose median counts, and what remains of it after each step without drafts: only steps with
drafts measure it, so what was measured while the machine was busy must not stop drafts for ever."""
_TRIAL_STEPS, _TRIAL_DRAFTS, _TRIAL_BEHIND = 64, 3, 512
"""Steps without drafts of the draft model after which a row verifies a few of them all the same: their odds and costs
are known only from such steps, and change. A row for which it would compute more tokens than the last is not tried."""
_USUAL_LENGTH, _SHORTEST, _NEWEST_WEIGHT = 64, 8, 0.1
"""Tokens of an answer before any has ended, the fewest that are expected of one, and the newest answer's weight."""


class _Candidate(NamedTuple):
    """A row that may verify drafts."""

    row: int
    """Index of the row in the step."""
    context: int
    """Tokens before its first draft."""
    ids: Sequence[int] | None
    """None: the draft model makes them."""
    odds: Sequence[float]
    has_target: bool
    """Whether its tokens are due at some pace."""
    num_behind: int = 0
    """Tokens that the draft model has to compute before the one behind which it draws the first draft."""
    num_left: int = 1
    """Tokens that its request is expected to get yet."""


class _Costs(NamedTuple):
    """Costs of a step in seconds, without drafts and for each of them."""

    base_s: float
    num_given: int
    """Tokens that the step gives without drafts: those of prompts, and one drawn for each decode."""
    token_s: float
    context_s: float
    pass_s: float
    """A row's share of a pass of the draft model."""
    draft_s: float
    most_behind: float
    """Tokens of prompts that the draft model may compute in a step: they take it no longer than the served model's
    longest chunk."""

    @property
    def rate(self) -> float:
        """Tokens a second without drafts."""
        return self.num_given / self.base_s if self.base_s else 0.0

    @property
    def least_chance(self) -> float:
        """Probability below which no draft of the draft model is worth its time."""
        return self.rate * (self.token_s + self.pass_s + self.draft_s)

    def of(self, candidate: _Candidate, context: int, *, is_first: bool) -> tuple[float, float]:
        """(seconds that a draft adds, those that count against what it gives). Computing what comes before the first
        draft serves all drafts of the request, so it counts in part."""
        cost_s = self.token_s + self.context_s * context
        if candidate.ids is None:
            cost_s += self.pass_s + self.draft_s
        behind_s = self.draft_s * candidate.num_behind if is_first else 0.0
        return cost_s + behind_s, cost_s + behind_s / candidate.num_left


class Drafting:
    """Adds drafts to planned steps."""

    def __init__(
        self,
        guesser: Guesser,
        model: StepTimeModel,
        most_draws: int,
        most_tokens: int,
        *,
        drafts_follow: bool = False,
    ) -> None:
        """`most_draws`: tokens that a step may draw in all. `most_tokens`: those that it may compute. `drafts_follow`:
        whether what makes drafts has computed all that the served model has."""
        self._guesser, self._model, self._most_draws, self._most_tokens = guesser, model, most_draws, most_tokens
        self._drafts_follow = drafts_follow
        self._odds = DraftOdds() if model.has_draft_model else None
        self._waits = deque((0.0, 0.0), maxlen=_NUM_WAITS)  # so that one long first wait is not the median
        self._host_s = 0.0
        """Seconds that the device usually waits before a step with drafts."""
        self._gains = DraftGains(_TRIAL_STEPS)
        self._usual_length = float(_USUAL_LENGTH)
        self._guess_s, self._rest_steps = _GUESS_S, _REST_STEPS
        self._num_to_rest = 0
        """Steps for which nothing is guessed, because it was not worth a wait a moment ago."""
        self._has_waited = False
        """Whether the next step is planned late because it was to have drafts."""
        self._num_untried = 0
        """Steps since the draft model made drafts."""

    def ignore_gains(self) -> None:
        """For tests: let steps have drafts that promise to pay, whether or not such steps have paid, without rests."""
        self._gains = DraftGains(0)
        self._guess_s, self._rest_steps = 0.0, 0

    def applied(self, rows: Sequence[Row], num_given: int, timing: Timing) -> None:
        """Learn from a step with drafts what it gave, and how long the device waited for it. Such a step is planned
        when all results are known, and so does not overlap with the work of the host."""
        self._waits.append(timing.idle_s)
        self._host_s = median(self._waits)
        seconds = timing.own_s + min(timing.idle_s, 2 * self._host_s)
        if rows and seconds > 0.0 and all(row.num_tokens == 1 + row.num_drafts for row in rows):
            without_s = self._model.predict(StepLoad(len(rows), sum([row.start for row in rows]), 0))
            # A time near 0, as a late host measures it, would count as a gain for dozens of steps.
            gain = min(num_given * without_s / (len(rows) * seconds), 1.0 + MOST_DRAFTS)
            self._gains.measured(len(rows), gain)

    def ended(self, request: Request) -> None:
        """Learn how long answers are."""
        if request.num_output:
            self._usual_length += _NEWEST_WEIGHT * (request.num_output - self._usual_length)

    def add(self, builder: PlanBuilder, *, may_take_blocks: bool = True) -> None:
        """Add drafts to the rows of a step that is planned otherwise.

        `may_take_blocks`: whether no request waits for memory. If one does, drafts go into blocks that their requests
        have already.
        """
        self._num_untried += 1
        is_trial = self._is_trial
        num_added = self._add(builder, may_take_blocks=may_take_blocks)
        if self._has_waited and not num_added:
            self._num_to_rest = self._rest_steps
        if is_trial and self._has_waited:
            # A trial ends, even if nothing could be tried: while it lasts, guesses give way to it.
            self._num_untried = 0
        self._has_waited = False

    def _add(self, builder: PlanBuilder, *, may_take_blocks: bool) -> int:
        """The number of drafts that were added. None are added to a row of a prompt's last token, before which the
        engine may have been idle, or of a request that was preempted since: its blocks are for another."""
        self._host_s *= _FORGETTING
        self._gains.planned(len(builder.rows))
        if not self._gains.allows(len(builder.rows)):
            return 0
        most = min(builder.budget.num_tokens, self._most_draws - sum([row.samples for row in builder.rows]))
        load = StepLoad.of(builder.rows)
        if most <= 0 or not self._could_pay(load, most):
            return 0
        rows = [
            (index, row.start + 1, entry)
            for index, (row, entry) in enumerate(zip(builder.rows, builder.entries, strict=True))
            if row.num_tokens == 1
            and row.start >= entry.request.num_prompt
            and entry.request.most_drafts > 0
            and entry.state is State.RUNNING
        ]
        costs = self._costs(load, len(rows))
        candidates = [self._candidate(index, context, entry, costs, 0) for index, context, entry in rows]
        counts = self._counts(candidates, costs, load, most, builder.budget.seconds_left)
        num_added = 0
        for candidate, count in zip(candidates, counts, strict=True):
            entry = builder.entries[candidate.row]
            num_drafts = _with_places(entry, candidate.context, count, may_take_blocks)
            if num_drafts:
                if self._drafts_follow:
                    entry.draft_start = candidate.context - 1
                ids = candidate.ids
                builder.add_drafts(candidate.row, None if ids is None else tuple(ids[:num_drafts]), num_drafts)
                self._num_untried = 0 if ids is None else self._num_untried
                num_added += num_drafts
        return num_added

    def is_worth_a_wait(self, running: Iterable[Entry], load: StepLoad) -> bool:
        """Whether the next step should be planned when the results of the launched one, of `load`, are known, because
        drafts need them."""
        if self._num_to_rest > 0:
            self._num_to_rest -= 1
            return False
        entries = list(running)
        most = min(self._most_draws, self._most_tokens) - len(entries)
        if most <= 0 or not self._gains.allows(len(entries)) or not self._could_pay(load, most):
            return False
        entries = [entry for entry in entries if entry.request.most_drafts >= 2]
        if not entries:
            return False
        costs = self._costs(load, len(entries))
        candidates = [self._candidate(0, entry.request.total, entry, costs, 1) for entry in entries]
        self._has_waited = any(self._counts(candidates, costs, load, most, inf))
        if not self._has_waited:
            num_steps = len(entries) * self._guess_s / (_MOST_SHARE * costs.base_s or inf)
            self._num_to_rest = min(int(num_steps), _MOST_REST_STEPS)
        return self._has_waited

    def _could_pay(self, load: StepLoad, most: int) -> bool:
        """Whether `most` drafts would pay if all were right and cost no pass of a draft model. If not, nothing needs to
        be guessed."""
        if self._is_trial and self._odds is not None:
            return True
        costs = self._costs(load, 1)
        seconds = costs.base_s + most * costs.token_s + self._host_s
        return (costs.num_given + most) * costs.base_s > _LEAST_GAIN * costs.num_given * seconds

    def _costs(self, load: StepLoad, num_rows: int) -> _Costs:
        """Costs of a step of `load`, of whose rows so many may verify drafts."""
        own, drafted = self._model.chunked if load.pairs else self._model.decode, self._model.drafted
        base_s, pass_s = self._model.predict(load), drafted.pass_s / max(num_rows, 1)
        most_behind = self._model.chunked.token_s * self._most_tokens / (drafted.draft_s or inf)
        return _Costs(base_s, load.num_tokens, own.token_s, own.context_s, pass_s, drafted.draft_s, most_behind)

    def _candidate(self, row: int, context: int, entry: Entry, costs: _Costs, num_drawn: int) -> _Candidate:
        """The guess for an entry, or the drafts of the draft model, whichever promise more. `num_drawn`: tokens that a
        launched step is about to draw; a guess begins with them."""
        most = min(MOST_DRAFTS, entry.request.most_drafts - num_drawn, entry.table.most_drafts(context))
        has_target = entry.request.scheduling.tpot_target_s is not None
        guess = _behind(self._guesser.guess(entry.request), num_drawn)
        guessed = _Candidate(row, context, guess.ids[:most], guess.odds[:most], has_target)
        num_behind = 0 if self._drafts_follow else max(context - 1 - entry.draft_start, 0)
        if self._odds is None or entry.request.params.grammar or reason_against(entry.request.params):
            return guessed
        if num_behind > costs.most_behind:
            return guessed
        if entry.draft_counts is None:
            entry.draft_counts = PlaceCounts()
        drafted = _Candidate(
            row,
            context,
            None,
            self._odds.of(entry.draft_counts, most, 0.0 if self._is_trial else costs.least_chance),
            has_target,
            num_behind,
            self._num_expected(entry.request),
        )
        is_tried = self._is_trial and num_behind <= _TRIAL_BEHIND
        return drafted if is_tried or _promise(drafted, costs) > _promise(guessed, costs) else guessed

    def _num_expected(self, request: Request) -> int:
        """Tokens that a request is expected to get yet: as many as is usual, or if it has had those, as many again."""
        length = max(self._usual_length, _SHORTEST)
        while length <= request.num_output:
            length *= 2
        return max(1, min(request.most_drafts, int(length) - request.num_output))

    @property
    def _is_trial(self) -> bool:
        return self._num_untried >= _TRIAL_STEPS

    def _counts(
        self, candidates: Sequence[_Candidate], costs: _Costs, load: StepLoad, most: int, seconds_left: float
    ) -> list[int]:
        """Number of drafts of each candidate, at most `most` in all, that take at most `seconds_left`.

        Takes the likeliest drafts first, and those of requests with a target before all others, as long as each gives
        more tokens a second than the step did without it.
        """
        counts, num_behind = [0] * len(candidates), 0
        seconds, given, spent_s = costs.base_s, float(costs.num_given), 0.0
        for chance, place, context in _likeliest_first(candidates):
            is_first = not counts[place]
            cost_s, counted_s = costs.of(candidates[place], context, is_first=is_first)
            behind = candidates[place].num_behind if is_first else 0
            if sum(counts) == most:
                break
            if spent_s + cost_s > seconds_left or chance * seconds <= counted_s * given:
                continue
            if num_behind + behind > costs.most_behind:
                continue
            counts[place] += 1
            num_behind += behind
            given, seconds, spent_s = given + chance, seconds + counted_s, spent_s + cost_s
        to_draft = [count for candidate, count in zip(candidates, counts, strict=True) if candidate.ids is None]
        if any(to_draft):
            num_tokens = load.num_tokens + sum(counts)
            seconds = self._model.predict(
                load._replace(num_tokens=num_tokens, passes=max(to_draft), draft_tokens=sum(to_draft))
            )
        if given * costs.base_s > _LEAST_GAIN * costs.num_given * (seconds + self._host_s):
            return counts
        return self._tried(candidates, costs, most, seconds_left)

    def _tried(self, candidates: Sequence[_Candidate], costs: _Costs, most: int, seconds_left: float) -> list[int]:
        """No drafts, or in a trial a few of the first row that may have some of the draft model."""
        counts = [0] * len(candidates)
        if self._is_trial:
            for place, candidate in enumerate(candidates):
                is_ready = candidate.ids is None and candidate.num_behind <= _TRIAL_BEHIND
                count = min(_TRIAL_DRAFTS, most, len(candidate.odds)) if is_ready else 0
                spent_s = sum(costs.of(candidate, candidate.context + i, is_first=not i)[0] for i in range(count))
                if count and spent_s <= seconds_left:
                    counts[place] = count
                    break
        return counts


def _behind(guess: Guess, num_drawn: int) -> Guess:
    """The rest of a guess behind its first `num_drawn` ids, which a launched step is about to draw."""
    if not num_drawn:
        return guess
    ids, odds = guess
    if len(ids) <= num_drawn:
        return NO_GUESS
    return Guess(ids[1:], (odds[0] * odds[1], *odds[2:]))


def _promise(candidate: _Candidate, costs: _Costs) -> float:
    """Tokens that the best number of drafts gives beyond those that the step gives in the same time without."""
    best = total = 0.0
    chance, rate = 1.0, costs.rate
    for number, odds in enumerate(candidate.odds):
        chance *= odds
        _, counted_s = costs.of(candidate, candidate.context + number, is_first=not number)
        gain = chance - counted_s * rate
        if number and gain <= 0.0:
            break
        total += gain
        best = max(best, total)
    return best


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


def _with_places(entry: Entry, first: int, num_drafts: int, may_take_blocks: bool) -> int:
    """`num_drafts`, or half as many and so on, until there are blocks for them. Nobody is preempted for drafts."""
    table = entry.table
    while num_drafts and first + num_drafts > table.capacity:
        if may_take_blocks and table.extend(first + num_drafts):
            break
        num_drafts //= 2
    return num_drafts

"""When rows get drafts of the draft model, how many, and what the scheduler learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from inferd.engine.api.cost.step_cost import PlanWork, StepWork
from inferd.engine.cache.table import KVCache
from inferd.engine.sched.draft_odds import DraftOdds, PlaceCounts
from inferd.engine.sched.drafting import _TRIAL_DRAFTS, _TRIAL_STEPS
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts, StepLoad, StepTimeModel
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import Row, RowResult, StepPlan, StepResult
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import MOST_DRAFTS, Guess
from tests.unit.test_drafting import Given, finish, planned, start, sure

DECODE = Coefficients(10e-3, 0.1e-3, 0.0)


def drafted(pass_s: float, draft_s: float = 1e-5) -> Coefficients:
    return Coefficients(DECODE.step_s, DECODE.token_s, 0.0, 0.0, pass_s, draft_s)


def make(
    given: Given, costs: Coefficients, *, num_blocks: int = 64, max_draws: int = 32, drafts_follow: bool = False
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, max_draws=max_draws, drafts_follow=drafts_follow
    )
    return Scheduler(config, KVCache(num_blocks, 4), PriorCosts(DECODE, DECODE, costs), given)


def last_row(scheduler: Scheduler) -> Row:
    return planned(scheduler).rows[-1]


def apply(scheduler: Scheduler, row: Row, num_accepted: int) -> None:
    """The newest plan's row drew so many of its drafts, which are all 9, and then 7."""
    plan, _ = scheduler._launched[-1]
    assert plan.rows == (row,)
    ids = (9,) * num_accepted + (7,)
    scheduler.apply(StepResult(plan.step_id, (RowResult(ids),), 0.01))
    scheduler.check()


def test_rows_say_from_where_on_the_draft_model_has_to_compute() -> None:
    scheduler = make(Given(), drafted(0.5e-3))
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    row = last_row(scheduler)
    assert (row.start, row.draft_ids, row.draft_start) == (5, (), 0), "it has computed nothing of the prompt"
    assert row.num_drafts == row.num_to_draft > 2 and row.num_tokens == row.num_draws == 1 + row.num_to_draft
    apply(scheduler, row, 2)
    second = last_row(scheduler)
    assert (second.start, second.draft_start) == (8, 8), "an accepted draft was computed, a rejected one was too"
    apply(scheduler, second, second.num_to_draft)
    third = last_row(scheduler)
    assert third.start == 9 + second.num_to_draft and third.draft_start == third.start - 1, (
        "the last draft was never computed"
    )
    stats = scheduler.stats
    assert (stats.num_draft_rows, stats.num_drafts) == (2, row.num_drafts + second.num_drafts)


@pytest.mark.parametrize(("pass_s", "is_worth"), [(1e-4, True), (2e-3, True), (9e-3, False)])
def test_drafts_that_take_too_long_are_not_made(pass_s: float, is_worth: bool) -> None:
    """A step takes 10.1 ms, so a pass of 9 ms for a token of seven in ten cases loses time."""
    scheduler = make(Given(), drafted(pass_s))
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    assert (last_row(scheduler).num_to_draft > 0) == is_worth


@pytest.mark.parametrize("drafts_follow", [False, True])
def test_a_draft_head_lacks_nothing_of_a_prompt(drafts_follow: bool) -> None:
    """A draft model would first compute five positions, 4 ms each, for the three tokens that are left."""
    scheduler = make(Given(), drafted(1e-4, 4e-3), drafts_follow=drafts_follow)
    start(scheduler, "a", max_tokens=4)
    finish(scheduler, planned(scheduler))
    assert (last_row(scheduler).num_to_draft > 0) == drafts_follow


def test_rows_share_a_pass() -> None:
    """Six rows give six times as much for the same pass. Were it charged to each, it would not be worth its time."""
    counts = []
    for num_rows in (1, 6):
        scheduler = make(Given(), drafted(5e-3))
        for number in range(num_rows):
            start(scheduler, f"r{number}")
        finish(scheduler, planned(scheduler))
        if num_rows > 1:
            # The last token of the prompt, whose other tokens all share.
            finish(scheduler, planned(scheduler))
        counts.append(sum(row.num_to_draft for row in planned(scheduler).rows))
    assert counts[0] > 0 and counts[1] >= 6


def test_a_row_has_whichever_promise_more() -> None:
    given = Given()
    scheduler = make(given, drafted(1e-3))
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    for guess, is_guessed in ((sure(1, 2, 3, 4, 5, odds=0.99), True), (sure(1, odds=0.3), False)):
        given.guesses["a"] = guess
        row = last_row(scheduler)
        assert bool(row.draft_ids) == is_guessed and bool(row.num_to_draft) != is_guessed
        apply(scheduler, row, 0)


@pytest.mark.parametrize("asked", ["a grammar", "one token"])
def test_requests_without_drafts(asked: str) -> None:
    scheduler = make(Given(), drafted(1e-4))
    request = start(scheduler, "a", max_tokens=1 if asked == "one token" else 20)
    if asked == "a grammar":
        object.__setattr__(request, "params", _with_grammar(request.params))
    plan = planned(scheduler)
    assert not plan.has_drafts
    if asked == "a grammar":
        finish(scheduler, plan)
        assert not planned(scheduler).has_drafts


def _with_grammar(params: object) -> object:
    return msgspec.structs.replace(params, grammar="root ::= .")  # type: ignore[type-var]


def test_a_step_waits_for_results_if_it_will_have_drafts() -> None:
    for pass_s, waits in ((1e-4, True), (9e-3, False)):
        scheduler = make(Given(), drafted(pass_s))
        start(scheduler, "a")
        planned(scheduler)
        assert scheduler.awaits_results == waits


def test_drafts_that_are_never_right_end_and_are_tried_again() -> None:
    scheduler = make(Given(), drafted(1e-3), num_blocks=64)
    num_steps, with_drafts = 0, list[int]()
    for name in "abcdefgh":
        request = start(scheduler, name, max_tokens=50)
        finish(scheduler, planned(scheduler))
        while not request.is_complete:
            row = last_row(scheduler)
            if row.num_to_draft:
                with_drafts.append(num_steps)
            apply(scheduler, row, 0)
            num_steps += 1
        scheduler.finish(request)
    late = [number for number in with_drafts if number > 100]
    assert with_drafts[:3] == [0, 1, 2] and 2 <= len(late) <= 6, with_drafts
    assert all(second - first > _TRIAL_STEPS - 8 for first, second in pairwise(late)), "a prompt is a step too"


def test_drafts_that_do_not_pay_are_tried_while_steps_overlap() -> None:
    """As the core does, a step is planned while the one before runs, unless the scheduler waits for its results."""
    scheduler = make(Given(), drafted(20e-3))
    num_steps, tried = 0, list[int]()
    for name in "abcd":
        request = start(scheduler, name, max_tokens=50)
        while not request.is_complete:
            while scheduler._launched and scheduler.awaits_results:
                finish(scheduler, scheduler._launched[0][0])
            plan = None if request.is_complete else scheduler.schedule(0.0)
            if plan is not None:
                num_steps += 1
                tried += [num_steps] * plan.has_drafts
            if len(scheduler._launched) > 1 or plan is None:
                finish(scheduler, scheduler._launched[0][0])
        scheduler.finish(request)
    assert len(tried) == 3 and all(second - first > _TRIAL_STEPS - 1 for first, second in pairwise(tried)), tried
    assert scheduler.stats.num_drafts <= 3 * _TRIAL_DRAFTS


def test_a_timed_step_has_no_drafts_that_would_make_it_late() -> None:
    """12.3 ms are planned for a step of 10.1 ms: two or fewer passes of 0.8 ms, and a token of 0.1 ms for each."""
    scheduler = make(Given(), drafted(0.8e-3))
    start(scheduler, "a", tpot_target_s=0.013)
    scheduler.apply(StepResult(planned(scheduler).step_id, (RowResult((7,)),), 0.01), Timing(0.0, 0.0))
    assert 0 < last_row(scheduler).num_to_draft <= 2


@pytest.mark.parametrize(("idle_s", "is_worth"), [(0.0, True), (5e-3, True), (50e-3, False)])
def test_the_time_of_the_host_before_a_step_with_drafts_counts(idle_s: float, is_worth: bool) -> None:
    """Without drafts a step is planned while the one before runs."""
    scheduler = make(Given(), drafted(1e-4))
    request = start(scheduler, "a", max_tokens=50)
    finish(scheduler, planned(scheduler))
    for _ in range(20):
        row = last_row(scheduler)
        plan, _ = scheduler._launched[-1]
        ids = (9,) * min(1, row.num_to_draft) + (7,)
        scheduler.apply(StepResult(plan.step_id, (RowResult(ids),), 0.01), Timing(0.0, 0.0, idle_s))
    assert not request.is_complete
    assert (last_row(scheduler).num_to_draft > 0) == is_worth


def test_a_trial_that_cannot_run_leaves_guesses_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.sched.drafting._TRIAL_BEHIND", 3)
    given = Given()
    scheduler = make(given, drafted(20e-3), num_blocks=256)
    with_guesses = list[bool]()
    for name in "abcd":
        given.guesses = {name: sure(9, 9)}
        request = start(scheduler, name, max_tokens=50)
        finish(scheduler, planned(scheduler))
        while not request.is_complete:
            row = last_row(scheduler)
            with_guesses.append(bool(row.draft_ids) or request.most_drafts == 0)
            apply(scheduler, row, 0)
        scheduler.finish(request)
    assert len(with_guesses) > 2 * _TRIAL_STEPS and all(with_guesses[: 2 * _TRIAL_STEPS])


def test_the_draft_model_computes_no_longer_than_a_chunk_takes() -> None:
    """A chunk of 64 tokens takes 6.4 ms, in which the draft model computes 6 tokens of a prompt."""
    counts = []
    for num_prompt in (6, 7):
        scheduler = make(Given(), drafted(1e-4, draft_s=DECODE.token_s * 64 / 6.5))
        start(scheduler, "a", num_prompt=num_prompt)
        finish(scheduler, planned(scheduler))
        counts.append(last_row(scheduler).num_to_draft)
    assert counts[0] > 0 == counts[1]


def test_requests_that_were_given_nothing_say_nothing_of_the_length_of_answers() -> None:
    scheduler = make(Given(), drafted(1e-4))
    drafting = scheduler._drafting
    assert drafting is not None
    before = drafting._usual_length
    scheduler.finish(start(scheduler, "a"))
    assert drafting._usual_length == before
    request = start(scheduler, "b")
    finish(scheduler, planned(scheduler))
    scheduler.finish(request)
    assert drafting._usual_length < before


def test_odds_follow_what_was_accepted_at_each_place() -> None:
    odds, own = DraftOdds(), PlaceCounts()
    before = odds.of(own, 5)
    assert len(before) == 5 and len(set(before)) == 1
    for _ in range(200):
        own.newest = 4, 2
        after = odds.of(own, 5)
    assert after[0] > 0.95 and after[1] > 0.95 and after[2] < 0.05
    another = odds.of(PlaceCounts(), MOST_DRAFTS)
    assert another[0] > 0.9 and another[2] < 0.1, "other requests begin with what all have shown"
    assert own.newest is None


def test_drafts_at_the_end_of_a_request_are_not_counted() -> None:
    """The row that ends a request says nothing of the drafts behind the end."""
    scheduler = make(Given(), drafted(1e-4))
    assert scheduler._drafting is not None and scheduler._drafting._odds is not None
    odds, expected = scheduler._drafting._odds, list(DraftOdds().of(PlaceCounts(), 5))
    for name, goes_on in (("a", False), ("b", True)):
        request = start(scheduler, name)
        finish(scheduler, planned(scheduler))
        apply(scheduler, last_row(scheduler), 0)
        if goes_on:
            planned(scheduler)
        else:
            scheduler.finish(request)
        assert (odds.of(PlaceCounts(), 5) == expected) != goes_on


def test_steps_with_drafts_have_costs_of_their_own() -> None:
    truth = Coefficients(10e-3, 0.1e-3, 0.0, 0.0, 2e-3, 5e-5)
    model = StepTimeModel(PriorCosts(DECODE, DECODE, drafted(0.5e-3)))
    for step in range(300):
        passes, num_rows = 1 + step % 7, 1 + step % 3
        load = StepLoad(num_rows * (1 + passes), 0, 0, passes, num_rows * passes)
        model.observe(load, truth.predict(load))
    assert model.drafted.pass_s == pytest.approx(2e-3, rel=0.05)
    assert model.decode == DECODE, "steps without drafts were not measured"
    assert model.predict(StepLoad(1, 0, 0)) == DECODE.predict(StepLoad(1, 0, 0))


def test_without_a_draft_model_nothing_is_drafted() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, max_draws=32)
    scheduler = Scheduler(config, KVCache(64, 4), PriorCosts(DECODE, DECODE), Given({"a": Guess((), ())}))
    start(scheduler, "a")
    plans: list[StepPlan] = []
    for _ in range(_TRIAL_STEPS // 2):
        plans.append(planned(scheduler))
        finish(scheduler, plans[-1])
    assert not any(plan.has_drafts for plan in plans)


@dataclass
class Counted:
    """A work model that notes what it is asked."""

    asked: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    def step(self, starts: Sequence[int], counts: Sequence[int], num_logits: int, _states: int = 0) -> StepWork:
        self.asked.append((list(starts), list(counts), num_logits))
        return StepWork("decode", 100 * sum(counts), 10)


def test_the_work_of_the_draft_model_includes_what_it_computes_before_it_drafts() -> None:
    """The watchdog takes the work for the measure of how long a step may last."""

    served, draft = Counted(), Counted()
    rows = (Row(0, 50, 3, True, num_to_draft=2, draft_start=10), Row(1, 7, 1, True))
    work = PlanWork(served, draft).of(rows)  # type: ignore[arg-type]
    assert served.asked == [([50, 51, 52, 7], [1, 1, 1, 1], 4)]
    assert draft.asked == [([50], [1], 1), ([51], [1], 1), ([10], [40], 0)]
    assert (work.flops, work.num_bytes) == (400 + 200 + 4000, 40)

"""How many drafts a step verifies: as many as give more tokens a second, within its places, its time and its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.latency.budget import StepBudget
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts, StepLoad
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import Row, RowResult, StepPlan, StepResult
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.step_planner import PlanBuilder
from inferd.engine.speculation.ports import NO_GUESS, Guess

MEMORY_BOUND = Coefficients(10e-3, 0.5e-3, 0.0)
COMPUTE_BOUND = Coefficients(0.1e-3, 5e-3, 0.0)


@dataclass
class Given:
    """Guesses by request id."""

    guesses: dict[str, Guess] = field(default_factory=dict)

    def guess(self, request: Request) -> Guess:
        return self.guesses.get(request.request_id, NO_GUESS)


def sure(*ids: int, odds: float = 0.95) -> Guess:
    return Guess(ids, (odds,) * len(ids))


def make(given: Given, costs: Coefficients = MEMORY_BOUND, *, num_blocks: int = 64, **limits: int) -> Scheduler:
    chunked = Coefficients(costs.step_s, costs.token_s, costs.context_s, 0.0)
    config = SchedulerConfig(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "max_draws": 32, **limits}
    )
    return Scheduler(config, KVCache(num_blocks, 4), PriorCosts(costs, chunked), given)


def start(scheduler: Scheduler, name: str, num_prompt: int = 5, max_tokens: int = 40, **scheduling: object) -> Request:
    """A request that has drawn its first token."""
    request = Request.create(
        name,
        tuple(range(num_prompt)),
        SamplingParams(max_tokens=max_tokens, seed=0),
        SchedulingParams(**scheduling),  # type: ignore[arg-type]
        max_model_len=64,
    )
    scheduler.add(request)
    return request


def finish(scheduler: Scheduler, plan: StepPlan, drawn: dict[int, Sequence[int]] | None = None) -> None:
    """Apply a step whose rows drew these ids, by index; else 7 for a row without drafts, and none of the drafts."""
    rows = tuple(
        RowResult(tuple((drawn or {}).get(index, (7,)))) if row.samples else RowResult()
        for index, row in enumerate(plan.rows)
    )
    scheduler.apply(StepResult(plan.step_id, rows, 0.01))
    scheduler.check()


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.check()
    return plan


def test_accepted_drafts_are_given_and_rejected_ones_computed_again() -> None:
    given = Given()
    scheduler = make(given)
    request = start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    given.guesses["a"] = sure(11, 12, 13)
    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.num_tokens, row.draft_ids, row.num_draws) == (5, 4, (11, 12, 13), 4)
    assert scheduler.awaits_results and scheduler.schedule(0.0) is None, "it is not known where its next row begins"
    assert row.accepted((11, 12, 99, 14)) == 3 and row.accepted((9, 12, 13, 14)) == 1
    assert row.accepted((11, 12, 13, 14)) == 4
    finish(scheduler, plan, {0: (11, 12, 99)})
    assert request.ids[-4:] == [7, 11, 12, 99] and request.computed == request.scheduled == 8
    assert request.total == len(request.ids) == 9
    given.guesses.clear()
    assert planned(scheduler).rows[0].start == 8
    stats = scheduler.stats
    assert (stats.num_draft_rows, stats.num_drafts, stats.accepted_drafts[:3]) == (1, 3, [1, 1, 0])


def test_no_draft_reaches_beyond_the_length() -> None:
    given = Given({"a": sure(*range(10, 26))})
    scheduler = make(given)
    request = start(scheduler, "a", max_tokens=4)
    (first,) = planned(scheduler).rows
    assert not first.draft_ids, "a row of several tokens of a prompt verifies nothing"
    scheduler.apply(StepResult(0, (RowResult((7,)),), 0.01))
    plan = planned(scheduler)
    assert plan.rows[0].num_draws == 3, "four tokens less the one that was drawn"
    finish(scheduler, plan, {0: (10, 11, 12)})
    assert request.is_complete and len(request.ids) == request.max_total


@pytest.mark.parametrize(
    ("costs", "odds", "num_drafts"),
    [
        (MEMORY_BOUND, 0.95, 15),
        (MEMORY_BOUND, 0.5, 3),  # 0.125 gives more a second than the step with those before it, 0.0625 less
        (MEMORY_BOUND, 0.02, 0),
        (COMPUTE_BOUND, 0.95, 0),
    ],
)
def test_drafts_are_those_that_pay(costs: Coefficients, odds: float, num_drafts: int) -> None:
    given = Given()
    scheduler = make(given, costs)
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    given.guesses["a"] = Guess(tuple(range(10, 26)), (odds,) * 16)
    assert len(planned(scheduler).rows[0].draft_ids) == num_drafts


def test_the_likeliest_drafts_are_taken_and_those_with_a_target_before() -> None:
    given = Given()
    scheduler = make(given, max_draws=8)
    for name, target_s in (("a", None), ("b", None), ("c", 60.0)):
        start(scheduler, name, tpot_target_s=target_s)
    # The second step has the last token of the prompt that all share.
    finish(scheduler, planned(scheduler))
    finish(scheduler, planned(scheduler))
    given.guesses = {"a": sure(*range(10, 20), odds=0.6), "b": sure(*range(10, 20)), "c": sure(10, 11, odds=0.3)}
    plan = planned(scheduler)
    num_drafts = {
        entry.request.request_id: len(row.draft_ids)
        for row, entry in zip(plan.rows, scheduler._launched[-1][1], strict=True)
    }
    assert sum(num_drafts.values()) == 5, "eight draws in all"
    assert num_drafts["c"] >= 1 and num_drafts["b"] > num_drafts["a"]


def test_a_step_waits_for_results_if_drafts_are_likely_behind_them() -> None:
    given = Given()
    scheduler = make(given)
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    planned(scheduler)
    assert not scheduler.awaits_results
    given.guesses["a"] = sure(7)
    assert not scheduler.awaits_results, "the step in flight draws that token"
    given.guesses["a"] = sure(7, 8, 9)
    assert scheduler.awaits_results
    (row,) = planned(scheduler).rows
    assert not row.draft_ids, "not all ids before are known"


def test_nobody_is_preempted_for_drafts() -> None:
    given = Given()
    scheduler = make(given, num_blocks=6)
    for name in ("a", "b"):
        start(scheduler, name, num_prompt=7, max_tokens=18)
    finish(scheduler, planned(scheduler))
    given.guesses = {"a": sure(*range(10, 26)), "b": sure(*range(10, 26))}
    plan = planned(scheduler)
    assert scheduler.num_running == 2 and scheduler.num_preemptions == 0
    # Two of the six blocks are free: a half of the drafts of one row fits them.
    assert [len(row.draft_ids) for row in plan.rows] == [7, 0]
    finish(scheduler, plan, {0: (99,), 1: (98,)})


@pytest.mark.parametrize("waits", [True, False])
def test_drafts_take_no_block_for_which_a_request_waits(waits: bool) -> None:
    given = Given()
    scheduler = make(given)
    start(scheduler, "a", num_prompt=5)
    other = start(scheduler, "b", num_prompt=2)
    finish(scheduler, planned(scheduler))
    given.guesses["a"] = sure(*range(10, 26))
    scheduler._slots.claimant = scheduler._entries[other] if waits else None
    num_free = scheduler.cache.pool.num_free
    row = planned(scheduler).rows[0]
    assert row.draft_ids, "its last block has room"
    assert (scheduler.cache.pool.num_free == num_free) == waits


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_was_preempted_in_the_same_step_verifies_nothing(is_preempted: bool) -> None:
    """Its row was planned before another request needed its blocks."""
    given = Given()
    scheduler = make(given)
    request = start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    given.guesses["a"] = sure(11, 12, 13)
    builder, entry = PlanBuilder(StepBudget(64)), scheduler._entries[request]
    scheduler._planner._continue(entry, 1, builder)
    if is_preempted:
        scheduler._slots.preempt(entry)
    assert scheduler._drafting is not None
    scheduler._drafting.add(builder)
    assert builder.rows[0].draft_ids == (() if is_preempted else (11, 12, 13))


def test_a_timed_step_has_no_drafts_that_would_make_it_late() -> None:
    given = Given()
    scheduler = make(given)
    start(scheduler, "a", tpot_target_s=0.013)
    scheduler.apply(StepResult(planned(scheduler).step_id, (RowResult((7,)),), 0.01), Timing(0.0, 0.0))
    given.guesses["a"] = sure(*range(10, 26))
    num_drafts = len(planned(scheduler).rows[0].draft_ids)
    assert 0 < num_drafts <= 5, "a step takes 10.5 ms and 0.5 for each draft"


@pytest.mark.parametrize(("num_slow", "num_without"), [(7, 0), (8, 1)])
def test_slow_waits_stop_drafts_for_a_while_and_not_for_ever(num_slow: int, num_without: int) -> None:
    """Half of the newest waits have to be slow. Without drafts nothing is measured, so what was measured fades."""
    given = Given({"a": sure(*range(10, 26))})
    scheduler = make(given)
    request = start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    drafting = scheduler._drafting
    assert drafting is not None
    for number in range(15):
        drafting.applied((), 0, Timing(0.0, 0.0, 1e-3 if number < 15 - num_slow else 1.0))
    num_steps = 0
    while not (plan := planned(scheduler)).has_drafts:
        num_steps += 1
        finish(scheduler, plan)
        if request.is_complete:
            scheduler.finish(request)
            request = start(scheduler, "a")
            finish(scheduler, planned(scheduler))
        assert num_steps < 5_000
    assert (num_steps > 100) == bool(num_without)


def test_one_long_first_wait_stops_no_drafts() -> None:
    scheduler = make(Given({"a": sure(*range(10, 26))}))
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    assert scheduler._drafting is not None
    scheduler._drafting.applied((), 0, Timing(0.0, 0.0, 5.0))
    assert planned(scheduler).has_drafts


@pytest.mark.parametrize(("num_requests", "num_asked"), [(1, 12), (8, 2)])
def test_requests_that_repeat_nothing_are_seldom_guessed_for(num_requests: int, num_asked: int) -> None:
    """While no guess was worth a wait, a step costs at most four of them on average."""
    given = Given()
    scheduler = make(given, num_blocks=128)
    for number in range(num_requests):
        start(scheduler, str(number))
    finish(scheduler, planned(scheduler))
    asked: list[Request] = []
    for _ in range(12):
        plan = planned(scheduler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(given, "guess", lambda request: asked.append(request) or NO_GUESS)
            assert not scheduler.awaits_results
        finish(scheduler, plan)
    assert len(asked) == num_asked * num_requests


@pytest.mark.parametrize(("own_s", "pays"), [(14e-3, True), (60e-3, False)])
def test_drafts_end_where_they_do_not_pay(own_s: float, pays: bool) -> None:
    """Costs and odds promise a gain. If steps with drafts do not keep it, there is a trial now and then."""
    given = Given()
    scheduler = make(given)
    with_drafts = list[bool]()
    for number in range(24):
        name = str(number)
        request = start(scheduler, name)
        given.guesses = {name: sure(10, 11, 12, odds=0.9)}
        while not request.is_complete:
            plan = planned(scheduler)
            drafted = plan.rows[0].draft_ids[:2]
            with_drafts.append(plan.has_drafts)
            timing = Timing(0.0, own_s if plan.has_drafts else MEMORY_BOUND.predict(StepLoad.of(plan.rows)))
            scheduler.apply(StepResult(plan.step_id, (RowResult((*drafted, 7)),), 0.01), timing)
        scheduler.finish(request)
    late = with_drafts[len(with_drafts) // 2 :]
    assert sum(late) > 0.5 * len(late) if pays else 0 < sum(late) < 0.05 * len(late)


def test_a_step_of_next_to_no_time_proves_little() -> None:
    scheduler = make(Given())
    drafting = scheduler._drafting
    assert drafting is not None
    row = Row(0, 20, 3, True, draft_ids=(10, 11))
    drafting.applied((row,), 3, Timing(0.0, 1e-6))
    for _ in range(20):
        drafting.applied((row,), 1, Timing(0.0, 2 * MEMORY_BOUND.predict(StepLoad(1, 20, 0))))
    assert not drafting._gains.allows(1), "each of these steps gave half of what one without drafts gives"


@pytest.mark.parametrize("limit", ["max_draws", "max_num_batched_tokens"])
def test_a_step_without_room_for_drafts_is_not_waited_for(limit: str) -> None:
    given = Given()
    for room, waits in ((4, False), (5, True)):
        scheduler = make(given, **{limit: room})
        for name in "abcd":
            start(scheduler, name, num_prompt=1)
            given.guesses[name] = sure(*range(10, 20))
        planned(scheduler)
        assert scheduler.awaits_results == waits


def test_after_a_wait_for_nothing_there_is_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is no block for a draft is known only when the step is planned."""
    monkeypatch.setattr(
        "inferd.engine.sched.drafting._with_places", lambda entry, first, num_drafts, may_take_blocks: 0
    )
    given = Given({"a": sure(*range(10, 26))})
    scheduler = make(given)
    start(scheduler, "a")
    finish(scheduler, planned(scheduler))
    waits = list[bool]()
    for _ in range(8):
        plan = planned(scheduler)
        assert not plan.has_drafts
        waits.append(scheduler.awaits_results)
        finish(scheduler, plan)
    assert 1 <= sum(waits) <= len(waits) // 2, waits


def test_the_last_token_of_a_prompt_has_no_drafts() -> None:
    """The engine may have been idle before it, and that time is not the host's."""
    given = Given({"a": sure(*range(10, 26))})
    scheduler = make(given)
    start(scheduler, "a", num_prompt=1)
    plan = planned(scheduler)
    assert plan.rows[0].samples and not plan.has_drafts
    finish(scheduler, plan)
    assert planned(scheduler).has_drafts

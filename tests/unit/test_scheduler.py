"""The scheduler, plan by plan: which requests get which tokens, which wait, and which are preempted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import LONGEST_HOLD_S
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.latency.step_time import UNKNOWN, PriorCosts
from inferd.engine.sched.limits import Refusal, SchedulerConfig
from inferd.engine.sched.plan import Row, RowResult, RowStatus, StepPlan, StepResult
from inferd.engine.sched.scheduler import AppliedRow, Scheduler

TOKEN = 7


@dataclass(slots=True)
class Engine:
    """A scheduler and its caller: submits by name, plans, and applies `TOKEN` for each row that samples."""

    scheduler: Scheduler
    requests: dict[str, Request]
    plans: list[StepPlan]

    def add(
        self, name: str, prompt: tuple[int, ...], max_tokens: int = 4, arrival_s: float = 0.0, **kwargs: Any
    ) -> Request:
        logprobs, emitted_ids = kwargs.pop("prompt_logprobs", None), kwargs.pop("emitted_ids", ())
        params = SamplingParams(max_tokens=max_tokens, seed=0, prompt_logprobs=logprobs)
        request = Request.create(
            name,
            prompt,
            params,
            SchedulingParams(arrival_s=arrival_s, **kwargs),
            max_model_len=self.scheduler.config.max_model_len,
            emitted_ids=emitted_ids,
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def plan(self, now: float = 0.0) -> list[tuple[str, int, int, bool]]:
        """(name, start, tokens, samples) of each row of the next plan, in order."""
        plan = self.scheduler.schedule(now)
        self.scheduler.check()
        if plan is None:
            return []
        self.plans.append(plan)
        return [(self.name_of(row), row.start, row.num_tokens, row.samples) for row in plan.rows]

    def name_of(self, row: Row) -> str:
        """Name of the row's request."""
        entries = [*self.scheduler._running, *self.scheduler._slots.draining]
        names: list[str] = [entry.request.request_id for entry in entries if entry.slot == row.slot]
        return names[0]

    def apply(
        self, status: RowStatus = RowStatus.OK, ended_s: float | None = None, own_s: float = 0.01
    ) -> list[AppliedRow]:
        """Apply the oldest plan, and finish the requests that their length ends. `ended_s`: when it ended. `own_s`: the
        seconds that it took."""
        plan = self.plans.pop(0)
        rows = tuple(RowResult((TOKEN,) if row.samples and status is RowStatus.OK else (), status) for row in plan.rows)
        timing = None if ended_s is None else Timing(ended_s, own_s)
        applied = self.scheduler.apply(StepResult(plan.step_id, rows, 0.0), timing)
        for row in applied:
            if row.request.is_complete:
                self.scheduler.finish(row.request)
        if status is RowStatus.OK:
            self.scheduler.check()
        return applied

    def step(self, now: float = 0.0, own_s: float = 0.01) -> list[tuple[str, int, int, bool]]:
        rows = self.plan(now)
        if rows:
            self.apply(ended_s=now, own_s=own_s)
        return rows


def make(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    seqs: int = 8,
    tokens: int = 64,
    model_len: int = 256,
    watermark: float = 0.0,
    shares_prefixes: bool = True,
    windows: tuple[int | None, ...] = (None,),
    seed: PriorCosts = UNKNOWN,
) -> Engine:
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=model_len,
        watermark=watermark,
    )
    cache = KVCache(num_blocks, block_size, windows, step_tokens=tokens, shares_prefixes=shares_prefixes)
    return Engine(Scheduler(config, cache, seed), {}, [])


def names(rows: list[tuple[str, int, int, bool]]) -> list[str]:
    return [row[0] for row in rows]


def unlike(number: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no prefix with one of another number."""
    return tuple(number * 1000 + i for i in range(length))


# -- batching ----------------------------------------------------------------------------------------------------------


def test_prompts_are_chunked_behind_decodes_within_the_budget() -> None:
    engine = make(tokens=8)
    engine.add("a", unlike(1, 3))
    engine.add("b", unlike(2, 20))
    engine.add("c", unlike(3, 9))
    assert engine.step() == [("a", 0, 3, True), ("b", 0, 5, False)]
    assert engine.step() == [("a", 3, 1, True), ("b", 5, 7, False)]
    assert engine.step() == [("a", 4, 1, True), ("b", 12, 7, False)]
    assert engine.step() == [("a", 5, 1, True), ("b", 19, 1, True), ("c", 0, 6, False)]
    assert engine.requests["a"].ids[3:] == [TOKEN] * 4


def test_overlap_plans_a_decode_behind_a_token_nobody_has_seen() -> None:
    engine = make()
    engine.add("a", unlike(1, 4), max_tokens=3)
    assert engine.plan() == [("a", 0, 4, True)]
    assert engine.plan() == [("a", 4, 1, True)]
    assert engine.plan() == [("a", 5, 1, True)]
    assert engine.plan() == []
    for _ in range(3):
        engine.apply()
    assert not engine.scheduler.has_work
    assert engine.requests["a"].ids[4:] == [TOKEN] * 3


def test_no_more_than_max_num_seqs_hold_a_slot() -> None:
    engine = make(seqs=2)
    for i in range(3):
        engine.add(f"r{i}", unlike(i, 2), max_tokens=1 + i)
    assert [row[0] for row in engine.step()] == ["r0", "r1"]
    assert [row[0] for row in engine.step()] == ["r1", "r2"]


def test_the_slot_and_the_blocks_of_an_ended_request_return_after_its_last_launched_row() -> None:
    engine = make(num_blocks=2, seqs=1)
    first = engine.add("a", unlike(1, 4))
    engine.add("b", unlike(2, 4), max_tokens=1)
    engine.plan()
    engine.plan()
    engine.scheduler.finish(first)
    assert engine.apply() == []
    assert (engine.plan(), engine.scheduler.free_slots, engine.scheduler.cache.pool.num_free) == ([], (), 0)
    assert engine.apply() == []
    assert engine.scheduler.free_slots == (0,)
    assert engine.plan() == [("b", 0, 4, True)]


def test_admissions_and_tables_travel_with_the_plan() -> None:
    engine = make(block_size=2)
    request = engine.add("a", (1, 2, 3), emitted_ids=(9,), max_tokens=5)
    engine.plan()
    (admission,), (update,) = engine.plans[0].admissions, engine.plans[0].table_updates
    assert (admission.request_id, admission.token_ids, admission.num_prompt) == ("a", (1, 2, 3, 9), 3)
    assert admission.params is request.params
    assert (update.slot, update.group, update.first, len(update.block_ids)) == (admission.slot, 0, 0, 2)
    engine.apply()
    engine.plan()
    assert engine.plans[0].admissions == ()
    assert [(u.first, len(u.block_ids)) for u in engine.plans[0].table_updates] == [(2, 1)]


# -- replays -----------------------------------------------------------------------------------------------------------


def test_replayed_requests_wait_until_the_last_goes_on() -> None:
    engine = make(tokens=8)
    engine.add("new", unlike(1, 2), max_tokens=20)
    engine.step(1.0)
    for i, length in enumerate((3, 3, 8)):
        engine.add(f"moved{i}", unlike(i + 2, length), emitted_ids=(9, 9), max_tokens=20)
    assert names(engine.step(1.0)) == ["new", "moved0", "moved1"]
    assert names(engine.step(1.0)) == ["new", "moved1", "moved2"], "the first waits"
    assert names(engine.step(1.0)) == ["new", "moved2"], "two wait"
    assert names(engine.step(1.0)) == ["new", "moved0", "moved1", "moved2"]


def test_replayed_requests_wait_no_longer_than_the_bound() -> None:
    engine = make(tokens=8)
    engine.add("moved", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    engine.add("long", unlike(2, 100), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    assert names(engine.step(1.0 + 0.9 * LONGEST_HOLD_S)) == ["long"]
    assert names(engine.step(1.0 + 1.1 * LONGEST_HOLD_S)) == ["moved", "long"]
    engine.add("later", unlike(3, 2), max_tokens=20)
    assert names(engine.step(1.0 + 1.2 * LONGEST_HOLD_S)) == ["moved", "long"], "it draws at each step from then on"


@pytest.mark.parametrize("cause", ["the prompt that goes on", "the launched step", "a prompt that starts"])
def test_replayed_requests_do_not_wait_for_a_long_step(cause: str) -> None:
    """A stream that is left out of a step waits until it ends. A step of 8 tokens takes longer than it may wait."""
    token_s = LONGEST_HOLD_S / 7
    engine = make(tokens=8, seed=PriorCosts(UNKNOWN.decode, replace(UNKNOWN.chunked, token_s=token_s)))
    engine.add("moved", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0, own_s=4 * token_s)
    engine.add("long", unlike(2, 8 if cause == "a prompt that starts" else 16), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0, own_s=8 * token_s)
    if cause == "a prompt that starts":
        engine.add("new", unlike(3, 8))
    if cause == "the launched step":
        engine.plan(1.0)
    assert names(engine.plan(1.0))[:2] == ["moved", "long"]


def test_a_replayed_request_with_a_tpot_target_does_not_wait() -> None:
    engine = make(tokens=40)
    engine.add("timed", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20, tpot_target_s=10.0)
    engine.step(1.0)
    engine.add("moved", unlike(2, 100), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    assert names(engine.step(1.0)) == ["timed", "moved"]


def test_a_replayed_request_goes_on_if_what_it_waits_for_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty plan would stop the engine until the next message comes."""
    engine = make(tokens=8)
    engine.add("moved", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    engine.add("stuck", unlike(2, 100), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    monkeypatch.setattr(BlockTable, "chunk", lambda self, start, num_tokens: num_tokens if num_tokens == 1 else 0)
    assert names(engine.step(1.0)) == ["moved"]


def test_nothing_starts_before_a_claimant_in_place_of_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tokens=8)
    engine.add("moved", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20, tenant="a")
    engine.step(1.0)
    stuck = engine.add("stuck", unlike(2, 100), emitted_ids=(9, 9), max_tokens=20, tenant="a")
    engine.step(1.0)
    engine.scheduler._slots.claimant = engine.scheduler._entries[stuck]
    engine.add("later", (1,), tenant="b")
    monkeypatch.setattr(BlockTable, "chunk", lambda self, start, num_tokens: num_tokens if num_tokens == 1 else 0)
    assert names(engine.step(1.0)) == ["moved"]


def test_new_prompts_hold_no_replayed_request() -> None:
    engine = make(tokens=8)
    engine.add("moved", unlike(1, 2), emitted_ids=(9, 9), max_tokens=20)
    engine.step(1.0)
    engine.add("new", unlike(2, 100), max_tokens=20)
    engine.step(1.0)
    assert names(engine.step(1.0)) == ["moved", "new"]


# -- priority ----------------------------------------------------------------------------------------------------------


def test_admission_by_priority_with_ageing() -> None:
    engine = make(seqs=1)
    engine.add("late and urgent", unlike(1, 2), max_tokens=1, arrival_s=9.0, priority=0)
    engine.add("first, one level worse", unlike(2, 2), max_tokens=1, arrival_s=0.0, priority=1)
    engine.add("much later and urgent", unlike(3, 2), max_tokens=1, arrival_s=11.0, priority=0)
    order = [engine.step()[0][0] for _ in range(3)]
    assert order == ["late and urgent", "first, one level worse", "much later and urgent"]


def test_the_last_in_rank_gives_way_and_resumes_with_its_tokens() -> None:
    engine = make(num_blocks=4, block_size=2, tokens=64)
    engine.add("good", unlike(1, 3), max_tokens=4, arrival_s=0.0)
    engine.add("bad", unlike(2, 3), max_tokens=4, arrival_s=1.0, priority=1)
    assert [row[0] for row in engine.step()] == ["good", "bad"]
    assert [row[0] for row in engine.step()] == ["good", "bad"]
    assert engine.step() == [("good", 4, 1, True)]
    assert engine.scheduler.num_preemptions == 1
    assert engine.requests["bad"].ids[3:] == [TOKEN] * 2
    assert engine.step() == [("good", 5, 1, True)]
    # The deeper of its two full blocks was evicted. Finding its own block is no hit that is reported to the caller.
    assert engine.step() == [("bad", 2, 3, True)]
    assert engine.requests["bad"].num_cached_tokens == 0
    assert engine.scheduler.stats.prefix_hit_tokens == 0


def test_a_victim_with_a_row_in_flight_keeps_its_blocks_and_its_token() -> None:
    engine = make(num_blocks=4, block_size=2)
    engine.add("good", unlike(1, 4), max_tokens=3)
    engine.add("bad", unlike(2, 4), max_tokens=3)
    assert engine.plan() == [("good", 0, 4, True), ("bad", 0, 4, True)]
    assert engine.plan() == []
    assert engine.scheduler.cache.pool.num_free == 0
    engine.apply()
    assert engine.scheduler.cache.pool.num_free == 2
    assert engine.requests["bad"].ids[4:] == [TOKEN]
    assert engine.plan() == [("good", 4, 1, True)]
    engine.apply()


def test_the_first_in_order_is_never_a_victim() -> None:
    engine = make(num_blocks=3, block_size=1, seqs=3)
    for i in range(3):
        engine.add(f"r{i}", unlike(i, 1), max_tokens=3, arrival_s=float(i))
    finished: list[str] = []
    for _ in range(60):
        if not engine.scheduler.has_work:
            break
        engine.step()
        finished += [n for n, r in engine.requests.items() if r.is_complete and n not in finished]
    assert finished == ["r0", "r1", "r2"]
    assert engine.scheduler.num_preemptions >= 1


def test_an_admission_leaves_the_reserve_to_those_that_run() -> None:
    engine = make(num_blocks=10, block_size=2, watermark=0.2)
    engine.add("a", unlike(1, 8), max_tokens=2)
    engine.add("b", unlike(2, 10), max_tokens=1)
    assert [row[0] for row in engine.step()] == ["a"]
    assert [row[0] for row in engine.step()] == ["a"]
    assert [row[0] for row in engine.step()] == ["b"]


# -- prefix sharing ----------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_blocks_that_another_is_computing() -> None:
    engine = make(tokens=8, block_size=4)
    shared = unlike(1, 16)
    engine.add("leader", (*shared, 1, 2))
    engine.add("waiter", (*shared, 3, 4))
    engine.add("stranger", unlike(5, 2), max_tokens=1)
    assert engine.plan() == [("leader", 0, 8, False)]
    assert engine.plan() == [("leader", 8, 8, False)]
    engine.apply()
    assert engine.plan() == [("leader", 16, 2, True), ("stranger", 0, 2, True)]
    engine.apply()
    assert engine.plan() == [("leader", 18, 1, True), ("waiter", 16, 2, True)]
    assert engine.requests["waiter"].num_cached_tokens == 16
    assert engine.scheduler.stats.prefix_hit_tokens == 16
    assert engine.scheduler.stats.prefix_query_tokens == 18 + 18 + 2


def test_without_sharing_nothing_is_found_kept_or_awaited() -> None:
    engine = make(shares_prefixes=False)
    prompt = unlike(1, 12)
    engine.add("a", prompt)
    engine.add("b", prompt)
    assert engine.step() == [("a", 0, 12, True), ("b", 0, 12, True)]
    while engine.step():
        pass
    assert engine.scheduler.cache.pool.num_cached == 0
    engine.add("c", prompt)
    assert engine.step() == [("c", 0, 12, True)]
    assert engine.scheduler.stats.prefix_query_tokens == 0


def test_only_as_long_as_the_prefix_is_shared() -> None:
    """The waiter needs one block of the leader's four: it does not wait for the rest."""
    engine = make(tokens=4, block_size=4)
    engine.add("leader", unlike(1, 16))
    engine.add("waiter", (*unlike(1, 4), 3, 4))
    assert engine.plan() == [("leader", 0, 4, False)]
    assert engine.scheduler.num_waiting == 1
    engine.apply()
    assert [entry.state.name for entry in engine.scheduler._waiting.entries()] == ["WAITING"]


@pytest.mark.parametrize("how", ["finish", "preempt"])
def test_without_its_leader_a_waiter_goes_alone(how: str) -> None:
    engine = make(tokens=8)
    shared = unlike(1, 16)
    leader = engine.add("leader", shared)
    engine.add("waiter", (*shared, 3))
    engine.plan()
    if how == "finish":
        engine.scheduler.finish(leader)
    else:
        engine.scheduler._slots.preempt(next(iter(engine.scheduler._running)))
    assert engine.plan()[0] == ("waiter", 0, 8, False)


def test_nobody_waits_for_a_leader_across_salts_behind_its_rank_or_under_prompt_logprobs() -> None:
    shared = unlike(1, 8)
    for kwargs in ({"cache_salt": "other"}, {"arrival_s": -1.0}, {"prompt_logprobs": 0}):
        engine = make()
        engine.add("leader", shared)
        engine.plan()
        engine.add("other", shared, **kwargs)
        assert engine.plan()[-1] == ("other", 0, 8, True), kwargs


def test_an_aborted_waiter_is_gone() -> None:
    engine = make()
    engine.add("leader", unlike(1, 8))
    waiter = engine.add("waiter", unlike(1, 8))
    engine.plan()
    engine.scheduler.finish(waiter)
    engine.apply()
    assert (engine.scheduler.num_waiting, engine.plan()) == (0, [("leader", 8, 1, True)])


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_waiter_finds_the_prefix_though_its_leader_went_on_and_gave_the_window_back() -> None:
    engine = make(tokens=8, block_size=4, windows=(None, 4))
    shared = unlike(1, 16)
    engine.add("leader", (*shared, *unlike(2, 24)))
    engine.add("waiter", (*shared, 3, 4))
    assert engine.step() == [("leader", 0, 8, False)]
    engine.plan()
    engine.plan()
    engine.apply()
    engine.apply()
    assert engine.plan()[1:] == []
    while (rows := engine.step())[-1][0] != "waiter":
        pass
    assert rows[-1] == ("waiter", 16, 2, True)


def test_a_waiter_computes_a_prefix_whose_window_was_evicted() -> None:
    engine = make(tokens=8, block_size=4, windows=(None, 4))
    shared = unlike(1, 16)
    engine.add("leader", (*shared, 1, 2), max_tokens=20)
    engine.add("waiter", (*shared, 3, 4))
    engine.step()
    engine.step()
    cache = engine.scheduler.cache
    (leader,) = engine.scheduler._running
    for block_id in set(leader.table._tail.block_ids[1:]):  # type: ignore[union-attr]
        cache.forget(block_id)
    while (rows := engine.step())[-1][0] != "waiter":
        pass
    assert rows[-1][1] == 12
    assert engine.requests["waiter"].num_cached_tokens == 12


def test_a_row_waits_for_its_own_launched_step_before_anyone_gives_way() -> None:
    """Four positions a step in a window of 4: blocks freed by the launched step are used by the next one."""
    engine = make(num_blocks=4, block_size=4, tokens=5, windows=(4,))
    engine.add("other", unlike(2, 2), max_tokens=20, arrival_s=1.0)
    engine.step()
    engine.add("long", unlike(1, 40), max_tokens=1)
    starts: list[int] = []
    while engine.scheduler.has_work:
        rows = engine.plan()
        starts += [start for name, start, _, _ in rows if name == "long"]
        if len(engine.plans) == 2 or not rows:
            engine.apply()
    assert starts == sorted(set(starts))
    assert engine.scheduler.num_preemptions == 0
    assert [request.is_complete for request in engine.requests.values()] == [True, True]


def test_what_can_never_fit_all_groups_is_refused_with_what_would() -> None:
    engine = make(num_blocks=12, block_size=4, tokens=4, windows=(None, 4, 4))
    # A window of 4 and a step of 4 reach 7 positions: 3 blocks in each of two groups leave 6 blocks to the full one.
    with pytest.raises(Refusal) as refused:
        engine.add("a", unlike(1, 25), 1)
    assert (refused.value.param, refused.value.limit) == ("prompt", 24)
    request = engine.add("b", unlike(1, 24), 1)
    while engine.scheduler.has_work:
        assert engine.step()
    assert request.num_output == 1


def test_steps_carry_no_more_than_the_cache_counts_with() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=9, max_model_len=9)
    Scheduler(config, KVCache(9, 4, step_tokens=8))
    with pytest.raises(AssertionError, match="steps carry more"):
        Scheduler(config, KVCache(9, 4, (8,), step_tokens=8))


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_numerical_error_takes_the_blocks_out_of_the_index() -> None:
    engine = make(tokens=8, block_size=4)
    request = engine.add("a", unlike(1, 10))
    engine.step()
    assert len(engine.scheduler.cache.index) == 2
    engine.plan()
    (applied,) = engine.apply(RowStatus.NUMERICAL_ERROR)
    assert applied.result.status is RowStatus.NUMERICAL_ERROR
    engine.scheduler.finish(request, forget_blocks=True)
    engine.scheduler.check()
    assert len(engine.scheduler.cache.index) == 0
    assert engine.scheduler.cache.pool.num_empty == 64


def test_results_out_of_order_are_noticed() -> None:
    engine = make()
    engine.add("a", unlike(1, 4))
    engine.plan()
    engine.plan()
    with pytest.raises(AssertionError, match="step 1 applied, 0 is next"):
        engine.scheduler.apply(StepResult(1, (RowResult((TOKEN,)),), 0.0))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "limit"),
    [(21, 0, "prompt", 20), (20, 1, "prompt", 19), (15, 6, "max_tokens", 5), (19, 2, "max_tokens", 1)],
)
def test_what_can_never_fit_the_model_is_refused_with_what_would(
    num_prompt: int, max_tokens: int, param: str, limit: int
) -> None:
    engine = make(model_len=20)
    with pytest.raises(Refusal) as refused:
        engine.add("a", unlike(1, num_prompt), max_tokens)
    assert (refused.value.code, refused.value.param, refused.value.limit) == ("context_length_exceeded", param, limit)
    assert str(limit) in refused.value.message
    fits = (limit, max_tokens) if param == "prompt" else (num_prompt, limit)
    engine.add("b", unlike(1, fits[0]), fits[1])


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "limit"),
    [(13, 0, "prompt", 12), (13, 1, "prompt", 12), (10, 4, "max_tokens", 3), (12, 2, "max_tokens", 1)],
)
def test_what_can_never_fit_the_pool_is_refused_with_what_would(
    num_prompt: int, max_tokens: int, param: str, limit: int
) -> None:
    """12 positions: the last token is sampled and never computed, so prompt and output may make 13."""
    engine = make(num_blocks=3, block_size=4)
    with pytest.raises(Refusal) as refused:
        engine.add("a", unlike(1, num_prompt), max_tokens)
    assert (refused.value.param, refused.value.limit) == (param, limit)
    fits = (limit, max_tokens) if param == "prompt" else (num_prompt, limit)
    request = engine.add("b", unlike(1, fits[0]), fits[1])
    while engine.scheduler.has_work:
        assert engine.step()
    assert request.num_output == fits[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": -1},
        {"ageing_s": 0.0},
        {"ageing_s": float("inf")},
        {"watermark": 1.0},
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(wrong: dict[str, Any]) -> None:
    good = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    SchedulerConfig(**good)
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{**good, **wrong})

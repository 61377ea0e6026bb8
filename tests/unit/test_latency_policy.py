"""Scheduling by latency targets: prompts do not delay decodes, waiting prompts are not starved, and late requests are
refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, order_key_of
from inferd.engine.sched.latency.budget import GRAIN, StepBudget, TimedBudget
from inferd.engine.sched.latency.policy import STARVED_STEPS, Timing
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts, StepLoad
from inferd.engine.sched.limits import ATTENTION_SPLIT, Refusal, SchedulerConfig
from inferd.engine.sched.plan import RowResult, StepResult
from inferd.engine.sched.scheduler import Scheduler

COSTS = PriorCosts(Coefficients(5e-3, 1e-5, 1e-9), Coefficients(5e-3, 2e-5, 1e-9, 1e-11))
"""A decode step takes 5 ms, and a chunk of 4,096 tokens 82 ms."""


@dataclass(slots=True)
class World:
    """A scheduler and a simulated machine that takes exactly the times of `COSTS`, one step at a time."""

    scheduler: Scheduler
    now: float = 0.0
    tokens: dict[str, list[float]] = field(default_factory=dict)
    """Time of each token of a request."""
    chunks: list[int] = field(default_factory=list)
    """Number of prompt tokens in each step."""

    def add(self, name: str, num_prompt: int, max_tokens: int = 50, emitted: int = 0, **asked: Any) -> Request:
        request = Request.create(
            name, tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens, seed=0), max_model_len=1 << 16,
            scheduling=SchedulingParams(**{"arrival_s": self.now, **asked}), emitted_ids=(7,) * emitted,
        )  # fmt: skip
        self.scheduler.add(request, self.now)
        self.tokens[name] = []
        return request

    def step(self) -> bool:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if plan is None:
            return False
        load = StepLoad.of(plan.rows)
        own_s = (COSTS.chunked if load.pairs else COSTS.decode).predict(load)
        self.now += own_s
        self.chunks.append(sum(row.num_tokens for row in plan.rows if row.num_tokens > 1))
        rows = tuple(RowResult((7,) if row.samples else ()) for row in plan.rows)
        for applied in self.scheduler.apply(StepResult(plan.step_id, rows, own_s), Timing(self.now, own_s)):
            self.tokens[applied.request.request_id] += [self.now] * applied.row.samples
            if applied.request.is_complete:
                self.scheduler.finish(applied.request)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def tpot_s(self, name: str) -> float:
        times = self.tokens[name]
        return (times[-1] - times[0]) / (len(times) - 1)


def world(
    step_tokens: int = 4096, max_num_seqs: int = 64, num_blocks: int = 4096, *, shares_prefixes: bool = False
) -> World:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=step_tokens, max_model_len=1 << 16)
    return World(Scheduler(config, KVCache(num_blocks, 16, shares_prefixes=shares_prefixes), COSTS))


@pytest.mark.parametrize("target_s", [0.01, 0.02, 0.05])
def test_prompts_beside_a_decode_keep_it_within_its_target(target_s: float) -> None:
    """Four prompts of 8,000 tokens come while it decodes. Without a target they delay it for twice that time."""
    kept, without = world(), world()
    for engine, asked in ((kept, target_s), (without, None)):
        engine.add("decodes", 10, tpot_target_s=asked)
        engine.step()
        for i in range(4):
            engine.add(f"prompt {i}", 8000, max_tokens=1)
        engine.run()
    assert kept.tpot_s("decodes") <= target_s
    assert without.tpot_s("decodes") > 0.015
    gaps = [b - a for a, b in zip(kept.tokens["decodes"], kept.tokens["decodes"][1:], strict=False)]
    assert max(gaps) <= 2 * target_s, "time in hand is not spent at once"
    assert sum(kept.chunks) == sum(without.chunks) == 10 + 4 * 8000


def test_a_first_token_is_in_time_where_nobody_has_a_target_for_the_others() -> None:
    """Two prompts fit one step of 87 ms, but the first one's token could be there in 9."""
    ended_s = []
    for asked in ({}, {"ttft_target_s": 0.05}):
        engine = world()
        engine.add("short", 200, max_tokens=1, **asked)
        engine.add("long", 3800, max_tokens=1)
        engine.run()
        ended_s.append(engine.tokens["short"][0])
        assert sum(engine.chunks) == 4000
    assert ended_s[0] > 0.08 and 0.04 < ended_s[1] <= 0.05


@pytest.mark.parametrize("asked", [{}, {"ttft_target_s": 0.02}, {"ttft_target_s": 0.001}], ids=["any", "20 ms", "late"])
def test_a_step_ends_by_when_a_first_token_in_it_is_due(asked: dict[str, float]) -> None:
    """A prompt of 200 tokens takes 9 ms beside a decode that allows steps of 47. A request that is late in any case
    delays no other."""
    engine = world()
    engine.add("decodes", 10, tpot_target_s=0.05)
    engine.step()
    started_s = engine.now
    engine.add("short", 200, max_tokens=1, **asked)
    engine.add("long", 4000, max_tokens=1)
    engine.step()
    ended_s = engine.tokens["short"][0] - started_s
    if asked == {"ttft_target_s": 0.02}:
        assert 0.015 < ended_s <= 0.02, "as much of the other one as there is time for"
    else:
        assert 0.04 < ended_s <= 0.05


def test_chunks_end_at_multiples_of_the_split_or_of_a_grain() -> None:
    engine = world()
    engine.add("decodes", 10, max_tokens=200, tpot_target_s=0.02)
    engine.step()
    engine.add("prompt", 5001, max_tokens=1)
    engine.run()
    cut = [size for size in engine.chunks[1:] if size]
    assert len(cut) > 3
    assert all(size % GRAIN == 0 for size in cut[:-1])


def test_a_target_that_cannot_be_met_starves_no_prompt() -> None:
    """A step takes at least 5 ms, and the target is 1 ms."""
    engine = world()
    engine.add("decodes", 10, max_tokens=400, tpot_target_s=0.001)
    engine.step()
    engine.add("prompt", 1024, max_tokens=1)
    engine.run()
    assert len(engine.tokens["prompt"]) == 1
    first = [i for i, size in enumerate(engine.chunks[1:]) if size]
    assert engine.chunks[1:][first[0]] == ATTENTION_SPLIT
    assert first == [STARVED_STEPS + i * (STARVED_STEPS + 1) for i in range(4)]


def test_who_was_fast_has_time_in_hand_and_who_was_slow_has_less() -> None:
    policy = (engine := world()).scheduler.latency
    request = engine.add("decodes", 10, tpot_target_s=0.02)
    engine.step()
    (entry,) = engine.scheduler._running
    sizes = []
    for late_s in (-1.0, -0.01, 0.0, 0.01, 1.0):
        due_s = engine.tokens["decodes"][0] + 0.02
        budget = policy.for_step([entry], due_s - 0.02 + late_s)
        assert isinstance(budget, TimedBudget)
        sizes.append(budget.left_s)
    assert sizes == sorted(sizes, reverse=True)
    base_s = COSTS.chunked.predict(StepLoad(1, request.scheduled, 0))
    assert sizes == pytest.approx([0.95 * at - base_s for at in (0.04, 0.03, 0.02, 0.01, 0.01)], abs=2e-4)


def test_without_targets_nothing_is_timed() -> None:
    engine = world()
    engine.add("decodes", 10)
    engine.step()
    budget = engine.scheduler.latency.for_step(list(engine.scheduler._running), 0.0)
    assert type(budget) is StepBudget
    assert budget.num_tokens == 4096


def test_targets_are_forgotten_with_who_had_them() -> None:
    engine = world()
    one, two = engine.add("a", 10, tpot_target_s=0.02), engine.add("b", 10, tpot_target_s=0.02)
    engine.step()
    engine.scheduler.finish(one)
    assert engine.scheduler.latency.num_timed == 1
    engine.scheduler.finish(two)
    assert engine.scheduler.latency.num_timed == 0


# -- the queue ---------------------------------------------------------------------------------------------------------


def ranked(*asked: dict[str, Any]) -> list[int]:
    """Requests in their order by rank, for these targets."""
    cache = KVCache(1, 1)
    entries = []
    for i, one in enumerate(asked):
        params = SamplingParams(max_tokens=1, seed=0)
        scheduling = SchedulingParams(**{"arrival_s": 100.0, **one})
        request = Request.create(str(i), (1,), params, scheduling, max_model_len=9)
        entries.append(Entry(request, cache.open(request), order_key_of(scheduling, i, 10.0)))
    return [int(entry.request.request_id) for entry in sorted(entries, key=lambda entry: entry.order_key)]


def test_who_is_due_first_goes_first() -> None:
    assert ranked({"ttft_target_s": 1.0}, {"ttft_target_s": 0.3}, {}, {"ttft_target_s": 0.8}) == [1, 3, 0, 2]


def test_priorities_stay_first_and_the_time_is_counted_from_arrival() -> None:
    assert ranked({"ttft_target_s": 0.1}, {"priority": -1}, {"priority": -1, "ttft_target_s": 5.0}) == [2, 1, 0]
    assert ranked({"ttft_target_s": 0.1, "arrival_s": 101.0}, {"ttft_target_s": 1.0}) == [1, 0]
    assert ranked({"ttft_target_s": 0.1, "arrival_s": 111.0}, {}) == [1, 0], "no target is as good as 10 s"


def test_who_is_due_first_is_computed_first() -> None:
    engine = world(step_tokens=512)
    engine.add("patient", 2000, max_tokens=1, ttft_target_s=5.0)
    engine.add("urgent", 2000, max_tokens=1, ttft_target_s=0.5)
    engine.run()
    assert engine.tokens["urgent"] < engine.tokens["patient"]


# -- admission ---------------------------------------------------------------------------------------------------------


def test_one_that_would_be_late_is_refused_with_when_to_come_back() -> None:
    """20 prompts of 4,000 tokens are about 2 s of work."""
    engine = world()
    for i in range(20):
        engine.add(f"before {i}", 4000, max_tokens=1)
    engine.step()
    with pytest.raises(Refusal, match=r"prompt tokens are ahead") as refused:
        engine.add("late", 1000, ttft_target_s=0.5)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.retry_after_s is not None
    expected_s = 0.5 + refused.value.retry_after_s
    engine.add("in time", 1000, max_tokens=1, ttft_target_s=expected_s + 0.1)
    assert engine.scheduler.stats.num_shed == 1
    started_s = engine.now
    engine.add("last", 1000, max_tokens=1)
    engine.run()
    assert engine.tokens["last"][0] - started_s == pytest.approx(expected_s, rel=0.15), "as was predicted"
    assert engine.tokens["in time"][0] - started_s <= expected_s + 0.1
    assert engine.scheduler.num_tokens_waiting == 0


def test_one_that_could_never_be_in_time_is_taken_where_nobody_is_ahead() -> None:
    engine = world()
    engine.add("long", 60_000, max_tokens=1, ttft_target_s=0.1)
    engine.run()
    assert len(engine.tokens["long"]) == 1


def test_one_that_is_late_before_its_first_step_is_served_where_it_is_alone() -> None:
    """The target is shorter than the way to the engine."""
    engine = world()
    engine.add("hasty", 10, max_tokens=1, ttft_target_s=0.001)
    engine.now += 0.01
    assert list(engine.scheduler.shed(engine.now)) == []
    engine.run()
    assert len(engine.tokens["hasty"]) == 1
    engine.add("runs", 10, max_tokens=100)
    engine.step()
    hasty = engine.add("hasty too", 10, max_tokens=1, ttft_target_s=0.05)
    engine.now += 0.1
    assert [request for request, _ in engine.scheduler.shed(engine.now)] == [hasty], "others are in its way"


def test_no_target_and_a_replay_are_never_refused() -> None:
    engine = world()
    for i in range(20):
        engine.add(f"before {i}", 4000, max_tokens=1)
    engine.add("whenever", 1000, max_tokens=1)
    engine.add("replayed", 1000, ttft_target_s=0.01, emitted=3)
    assert engine.scheduler.stats.num_shed == 0


def test_a_better_priority_does_not_wait_for_worse_ones() -> None:
    engine = world()
    for i in range(20):
        engine.add(f"before {i}", 4000, max_tokens=1, priority=1)
    engine.add("first", 1000, max_tokens=1, ttft_target_s=0.5)
    with pytest.raises(Refusal):
        engine.add("behind", 1000, max_tokens=1, ttft_target_s=0.5, priority=1)


def test_choices_of_one_request_are_not_ahead_of_each_other() -> None:
    """Each computes the one token after the last full block. All need the full blocks, which the first computes."""
    engine = world(shares_prefixes=True)
    engine.add("decodes", 10)
    engine.step()
    target_s = 1.1 * engine.scheduler._forecast.pace().seconds(4001, 2000)
    choices = [engine.add(f"choice {i}", 4001, max_tokens=1, ttft_target_s=target_s) for i in range(8)]
    assert engine.scheduler.num_tokens_waiting == 4001 + 7
    with pytest.raises(Refusal):
        engine.add("another", 8 * 4001, max_tokens=1, ttft_target_s=target_s)
    engine.run()
    assert all(engine.tokens[choice.request_id][0] <= choice.scheduling.arrival_s + target_s for choice in choices)


def test_choices_that_could_never_be_in_time_are_taken_as_one_is() -> None:
    engine = world(shares_prefixes=True)
    for i in range(3):
        engine.add(f"long {i}", 60_000, max_tokens=1, ttft_target_s=0.1)
    engine.run()
    assert all(len(engine.tokens[f"long {i}"]) == 1 for i in range(3))


def test_the_choices_left_go_on_as_before_where_the_first_is_gone() -> None:
    engine = world(shares_prefixes=True)
    engine.add("before", 4000)
    first, second = (engine.add(f"choice {i}", 4001, max_tokens=1, ttft_target_s=1.0) for i in range(2))
    engine.scheduler.finish(first)
    third = engine.add("choice 2", 4001, max_tokens=1, ttft_target_s=1.0)
    assert engine.scheduler._entries[third].num_to_compute == 1
    engine.scheduler.finish(second)
    engine.scheduler.finish(third)
    engine.add("choice 3", 4001, max_tokens=1, ttft_target_s=1.0)
    assert engine.scheduler.num_tokens_waiting == 4000 + 4001


def test_ends_of_others_are_waited_for_where_slots_are_taken() -> None:
    """One slot, and an answer each 0.5 s: the third in the queue needs 1.5 s."""
    engine = world(max_num_seqs=1)
    for i in range(6):
        engine.add(f"long {i}", 10, max_tokens=100)
    while engine.scheduler.num_waiting > 2:
        engine.step()
    with pytest.raises(Refusal) as refused:
        engine.add("late", 10, ttft_target_s=0.2)
    assert refused.value.retry_after_s == pytest.approx(1.3, abs=0.1)
    engine.add("in time", 10, ttft_target_s=1.9)


def test_time_in_which_nobody_waits_is_no_pace_of_ends() -> None:
    """Before and after an hour of silence there are two requests at a time; or the second one gives up first."""
    for gives_up in (False, True):
        engine = world(max_num_seqs=1)
        for start_s in (0.0, 3600.0):
            engine.now = start_s
            first = engine.add(f"first {start_s}", 10, max_tokens=100)
            engine.step()
            second = engine.add(f"second {start_s}", 10, max_tokens=100)
            if gives_up and not start_s:
                engine.scheduler.finish(first)
                engine.scheduler.finish(second)
            engine.run()
        engine.add("runs", 10, max_tokens=100)
        engine.step()
        engine.add("next", 10, ttft_target_s=1.0)


def test_who_waits_in_vain_is_told_before_work_is_wasted() -> None:
    """The machine stands still for a second. A request with a target of 0.3 s is refused, and a replay is not."""
    engine = world(max_num_seqs=2)
    engine.add("runs", 10, max_tokens=1000)
    engine.step()
    engine.add("begun", 10, max_tokens=500)
    engine.step()
    engine.scheduler._forecast.completion_rate = type(engine.scheduler._forecast.completion_rate)()
    waits = engine.add("waits", 10, ttft_target_s=0.3)
    engine.add("replayed", 10, ttft_target_s=0.5, emitted=2)
    assert list(engine.scheduler.shed(engine.now)) == []
    engine.now += 1.0
    told = list(engine.scheduler.shed(engine.now))
    assert [request for request, _ in told] == [waits]
    assert told[0][1].retry_after_s == 0.3
    assert engine.scheduler.num_waiting == 1

"""Tests the scheduler of an encoder: a step takes whole prompts, and every prompt gets its step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, StepResult
from inferd.engine.sched.scheduler import Scheduler

LONGEST, STEP_TOKENS, NUM_SLOTS = 40, 16, 4
PARAMS = SamplingParams(max_tokens=0, seed=0, pooling=Pooling("mean"))


def scheduler(*, keeps_prompts_whole: bool = True) -> Scheduler:
    limits = SchedulerConfig(
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=LONGEST,
        keeps_prompts_whole=keeps_prompts_whole,
    )
    return Scheduler(limits, KVCache(2 * NUM_SLOTS * LONGEST // 8, 8, (None,), shares_prefixes=False))


def asks(number: int, num_tokens: int, tenant: str) -> Request:
    scheduling = SchedulingParams(arrival_s=1.0, tenant=tenant)
    return Request.create(str(number), (1,) * num_tokens, PARAMS, scheduling, max_model_len=LONGEST)


def steps_of(
    lengths: list[tuple[int, str]], *, keeps_prompts_whole: bool = True, depth: int = 1
) -> list[list[tuple[int, int]]]:
    """(first token, number of tokens) of each row of each step, until all prompts have ended. `depth`: number of steps
    that are planned before the first is applied."""
    own, steps, launched = scheduler(keeps_prompts_whole=keeps_prompts_whole), list[list[tuple[int, int]]](), []
    for number, (length, tenant) in enumerate(lengths):
        own.add(asks(number, length, tenant), 1.0)
    while own.has_work:
        plan = own.schedule(1.0) if len(launched) < depth else None
        if plan is not None:
            launched.append(plan)
            steps.append([(row.start, row.num_tokens) for row in plan.rows])
            continue
        assert launched, "there is work, and no step"
        oldest = launched.pop(0)
        for applied in own.apply(StepResult(oldest.step_id, (RowResult(),) * len(oldest.rows), 0.0)):
            own.finish(applied.request)
        own.check()
    return steps


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, LONGEST), st.sampled_from("ab")), min_size=1, max_size=12),
    depth=st.integers(1, 2),
)
def test_each_prompt_is_computed_whole_and_once(lengths: list[tuple[int, str]], depth: int) -> None:
    steps = steps_of(lengths, depth=depth)
    rows = [row for step in steps for row in step]
    assert sorted(rows) == sorted((0, length) for length, _ in lengths)
    for step in steps:
        assert len(step) == 1 or sum(num_tokens for _, num_tokens in step) <= STEP_TOKENS


def test_short_prompts_share_a_step_and_a_long_one_has_its_own() -> None:
    assert steps_of([(5, ""), (6, ""), (5, ""), (30, ""), (1, "")]) == [[(0, 5), (0, 6), (0, 5)], [(0, 30)], [(0, 1)]]


def test_other_models_cut_prompts() -> None:
    assert steps_of([(30, "")], keeps_prompts_whole=False) == [[(0, STEP_TOKENS)]]

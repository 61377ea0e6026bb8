"""Checkpoints of recurrent states: which hits they allow, at which positions they are left, and which are evicted."""

from __future__ import annotations

from collections import deque

import pytest

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, StepPlan, StepResult
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import Guess, Guesser

BLOCK = 4
NEVER = 1000 * BLOCK


class Engine:
    """A scheduler over a cache with checkpoints, whose model draws token 0."""

    def __init__(
        self,
        num_checkpoints: int = 50,
        interval: int = NEVER,
        budget: int = 64,
        depth: int = 0,
        guesser: Guesser | None = None,
    ) -> None:
        rules = StateCheckpointRules(num_checkpoints, interval)
        self.cache = KVCache(400, BLOCK, checkpoints=rules)
        limits = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=budget, max_model_len=2000, max_draws=64)
        self.scheduler = Scheduler(limits, self.cache, guesser=guesser)
        if self.scheduler._drafting is not None:
            self.scheduler._drafting.ignore_gains()
        self.plans: list[StepPlan] = []
        self.launched: deque[StepPlan] = deque()
        self.depth = depth
        """Number of steps that are launched before the one before them is applied."""

    def add(self, *prompts: tuple[int, ...], max_tokens: int = 1) -> list[Request]:
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        requests = [Request.create(f"r{i}", ids, params, max_model_len=2000) for i, ids in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request, 0.0)
        return requests

    def launch(self) -> bool:
        plan = self.scheduler.schedule(0.0)
        if plan is not None:
            self.plans.append(plan)
            self.launched.append(plan)
        return plan is not None

    def apply(self) -> None:
        plan = self.launched.popleft()
        results = tuple(RowResult((0,) * row.accepted((0,) * row.num_draws)) for row in plan.rows)
        for applied in self.scheduler.apply(StepResult(plan.step_id, results, 0.0)):
            if applied.request.is_complete:
                self.scheduler.finish(applied.request)
        self.scheduler.check()

    def run(self, *prompts: tuple[int, ...], max_tokens: int = 1) -> list[int]:
        """Serve these requests together, with those that wait; returns the tokens that each of these hit."""
        requests = self.add(*prompts, max_tokens=max_tokens)
        while self.scheduler.has_work:
            while len(self.launched) <= self.depth and self.launch():
                pass
            self.apply()
        return [request.num_cached_tokens or 0 for request in requests]

    @property
    def saved_at(self) -> list[int]:
        """Positions at which states were saved, in order. Of rows with drafts those before them."""
        ends = [{row.slot: row.start + row.num_tokens - row.num_drafts for row in plan.rows} for plan in self.plans]
        return [at[copy.slot] for plan, at in zip(self.plans, ends, strict=True) for copy in plan.state_saves]


class Zeros:
    """Guesses that the model draws token 0, and in part another."""

    def __init__(self, num_right: int) -> None:
        self._num_right = num_right

    def guess(self, request: Request) -> Guess:
        return Guess((0,) * self._num_right + (1,) * (15 - self._num_right), (0.99,) * 15)


def ids(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_the_end_of_a_prompt_leaves_one_and_the_same_prompt_hits_it() -> None:
    engine = Engine()
    prompt = ids(0, 18)
    assert engine.run(prompt) == [0]
    assert engine.saved_at == [16]
    assert engine.run(prompt, (*prompt, 99, 98), (*prompt[:15], 7)) == [16, 16, 0]
    assert [len(plan.state_loads) for plan in engine.plans].count(2) == 1


@pytest.mark.parametrize("length", [16, 17])
def test_one_token_is_left_to_compute(length: int) -> None:
    engine = Engine()
    assert [engine.run(ids(0, length)), engine.run(ids(0, length))] == [[0], [(length - 1) // BLOCK * BLOCK]]


@pytest.mark.parametrize(("budget", "chunk"), [(64, 0), (16, 32)])
def test_a_branch_leaves_one_for_all_that_follow(budget: int, chunk: int) -> None:
    """The second finds what the last chunk before the branch has left, if the prompt took several."""
    engine = Engine(budget=budget)
    stem = ids(0, 40)
    hits = [engine.run((*stem, *ids(1000 * i, 10)))[0] for i in range(1, 17)]
    assert hits == [0, chunk, *[40] * 14]


def test_requests_that_wait_for_each_other_share_all() -> None:
    """The first, which computes the prefix for all others, learns of the branch before it is there."""
    engine = Engine(budget=16)
    stem = ids(0, 40)
    assert engine.run(*((*stem, *ids(1000 * i, 10)) for i in range(1, 17))) == [0, *[40] * 15]


@pytest.mark.parametrize(
    ("num_shared", "num_applied", "num_hit"), [(40, 0, 40), (32, 0, 32), (24, 0, 16), (24, 1, 16), (12, 0, 0)]
)
def test_one_that_is_asked_for_late_is_kept(num_shared: int, num_applied: int, num_hit: int) -> None:
    """When the other request comes, chunks up to 32 are launched. A request that shares 24 hits 16."""
    engine = Engine(num_checkpoints=3, budget=16, depth=1)
    engine.run(ids(500, 9))
    engine.add((*ids(0, num_shared), *ids(1000, 70 - num_shared)))
    engine.launch()
    engine.launch()
    for _ in range(num_applied):
        engine.apply()
    assert engine.run((*ids(0, num_shared), *ids(2000, 9))) == [num_hit]


def test_those_that_come_late_leave_one_for_each_other() -> None:
    """The shared tokens end one block behind the state that they find. All wait for one of them, not for each."""
    engine = Engine(budget=16, depth=1)
    engine.add((*ids(0, 20), *ids(1000, 50)))
    engine.launch()
    engine.launch()
    assert engine.run(*((*ids(0, 20), *ids(2000 + 100 * i, 9)) for i in range(4))) == [16, 20, 20, 20]


def test_chunks_evict_their_own_first() -> None:
    engine = Engine(num_checkpoints=4, budget=16, depth=1)
    others = [ids(100 * i, 9) for i in range(1, 7)]
    for other in others:
        engine.run(other)
    engine.run(ids(2000, 70))
    assert engine.saved_at[-5:] == [16, 32, 48, 64, 68]
    engine.run(ids(3000, 9))
    assert [engine.run(other) for other in others[-2:]] == [[8], [8]]


def test_every_interval_leaves_one_also_in_an_answer() -> None:
    engine = Engine(interval=3 * BLOCK)
    engine.run(ids(0, 17), max_tokens=22)
    assert engine.saved_at == [12, 16, 24, 32, 36]
    assert engine.run((*ids(0, 17), *[0] * 19, 5)) == [36]
    assert engine.run((*ids(0, 17), *[0] * 11, 5)) == [24]


def test_the_end_of_an_answer_is_found_and_evicts_its_own_first() -> None:
    engine = Engine(num_checkpoints=3)
    other, prompt = ids(500, 9), ids(0, 17)
    engine.run(other)
    engine.run(prompt, max_tokens=30)
    assert engine.saved_at[-4:] == [16, 24, 32, 40]
    assert engine.run(other) == [8], "the answer evicted what others use"
    assert engine.run((*prompt, *[0] * 29, 7)) == [40]


def test_the_end_of_a_prompt_is_no_older_for_its_answer() -> None:
    engine = Engine(num_checkpoints=3)
    prompt = ids(0, 17)
    engine.run(ids(500, 9))
    engine.run(prompt, max_tokens=30)
    engine.run(ids(700, 9))
    assert engine.run(prompt) == [16]


def test_a_chunk_ends_at_each() -> None:
    engine = Engine(interval=3 * BLOCK)
    engine.run(ids(0, 31))
    assert [plan.rows[0].num_tokens for plan in engine.plans] == [12, 12, 4, 3]
    engine = Engine(budget=10)
    engine.run(ids(0, 31))
    assert [plan.rows[0].num_tokens for plan in engine.plans] == [8, 8, 8, 4, 3]


def test_the_one_used_least_recently_is_evicted() -> None:
    engine = Engine(num_checkpoints=2)
    first, second, third = ids(0, 9), ids(100, 9), ids(200, 9)
    engine.run(first)
    engine.run(second)
    engine.run(first)
    engine.run(third)
    assert [engine.run(prompt)[0] for prompt in (first, third, second)] == [8, 8, 0]


def test_a_load_cannot_take_the_one_that_a_launched_step_reads() -> None:
    """A thread beside the steps would write to it before the step has read it."""
    engine = Engine(num_checkpoints=2)
    prompt = ids(0, 3 * BLOCK + 1)
    engine.run(prompt)
    engine.add((*prompt[:-1], 7), max_tokens=3)
    engine.launch()
    ((_, read_id),) = engine.plans[-1].state_loads
    taken, after = engine.cache.take_checkpoint(), engine.cache.take_checkpoint()
    assert taken not in (None, read_id) and after is None
    engine.cache.reset()
    assert engine.cache.take_checkpoint() is None
    assert taken is not None and engine.cache.states is not None
    engine.cache.states.pool.release(taken)
    engine.apply()
    assert {engine.cache.take_checkpoint(), engine.cache.take_checkpoint()} == {taken, read_id}


def test_a_reset_drops_all() -> None:
    engine = Engine()
    engine.run(ids(0, 9))
    engine.cache.reset()
    assert engine.cache.states is not None and engine.cache.states.pool.num_cached == 0
    assert engine.run(ids(0, 9)) == [0]


def test_without_prefixes_there_are_none() -> None:
    cache = KVCache(8, BLOCK, shares_prefixes=False, checkpoints=StateCheckpointRules(4, NEVER))
    assert cache.states is None


@pytest.mark.parametrize("num_right", [0, 2, 15])
@pytest.mark.parametrize("interval", [NEVER, 3 * BLOCK])
def test_drafts_pass_no_checkpoint(interval: int, num_right: int) -> None:
    """A row of drafts ends before the next one, so that the first token of a later row reaches it."""
    plain, drafted = Engine(interval=interval), Engine(interval=interval, guesser=Zeros(num_right))
    for engine in (plain, drafted):
        assert engine.run(ids(0, 18), max_tokens=60) == [0]
        assert engine.run((*ids(0, 18), *(0,) * 59, 7)) == [72]
    assert drafted.saved_at == plain.saved_at
    accepted = drafted.scheduler.stats.accepted_drafts
    assert max([place for place, count in enumerate(accepted, start=1) if count], default=0) == min(num_right, 7)
    assert drafted.scheduler.stats.num_drafts

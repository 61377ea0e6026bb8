"""Fair sharing between tenants: counters, turns and lifts; and a flood on a machine that is costed, not there."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fairness import SHARED, flooded, percentile, share_errors
from inferd.engine.api.messages import Submit
from inferd.engine.api.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched.fair import OUTPUT_COST, REMEMBERED_S, Shares
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, StepPlan, StepResult
from inferd.engine.sched.scheduler import Scheduler


class World:
    """A scheduler whose plans are applied at once."""

    def __init__(self, *, seqs: int = 8, tokens: int = 16, blocks: int = 256) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=4096, watermark=0.0)
        self.scheduler = Scheduler(config, KVCache(blocks, 4, step_tokens=tokens, shares_prefixes=False))
        self.now = 0.0

    def add(self, name: str, num_prompt: int, max_tokens: int = 1, tenant: str | None = None, **asked: Any) -> Request:
        """`name`: of which the first letter is the tenant."""
        self.now += 1e-3
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        request = Request.create(
            name, (1,) * num_prompt, params, max_model_len=4096, arrival_s=self.now,
            tenant=name[0] if tenant is None else tenant, **asked,
        )  # fmt: skip
        self.scheduler.add(request, self.now)
        return request

    def step(self) -> dict[str, int]:
        """Tokens of each row of the next plan, by request, in order."""
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if plan is None:
            return {}
        entries = self.scheduler._launched[-1][1]
        given = {entry.request.request_id: row.num_tokens for entry, row in zip(entries, plan.rows, strict=True)}
        self.apply(plan)
        return given

    def apply(self, plan: StepPlan) -> None:
        rows = tuple(RowResult((7,) if row.samples else ()) for row in plan.rows)
        for applied in self.scheduler.apply(StepResult(plan.step_id, rows, 0.0)):
            if applied.request.is_complete:
                self.scheduler.finish(applied.request)
        self.scheduler.check()

    @property
    def shares(self) -> Shares:
        return self.scheduler._shares

    def served(self, tenant: str) -> float:
        return self.shares._accounts[tenant].served


# -- turns -------------------------------------------------------------------------------------------------------------


def test_one_that_comes_later_does_not_wait_for_all_of_the_first() -> None:
    world = World(tokens=16)
    for i in range(6):
        world.add(f"a{i}", 16)
    world.step()
    world.add("b0", 16)
    world.add("b1", 16)
    order = [next(iter(world.step())) for _ in range(4)]
    assert order.index("b0") <= 1
    assert order.index("b1") <= 3
    assert order[0][0] != order[1][0], "they take turns"


def test_shares_go_by_weight() -> None:
    world = World(tokens=16)
    for i in range(40):
        world.add(f"a{i}", 16)
        world.add(f"b{i}", 16, weight=3.0)
    order = [next(iter(world.step()))[0] for _ in range(41)]
    assert order[1:].count("b") == 3 * order[1:].count("a")


def test_answers_count_twice_and_what_is_computed_again_does_not() -> None:
    world = World(tokens=64)
    world.add("a0", 10, max_tokens=5)
    world.add("b0", 10, max_tokens=1)
    while world.step():
        pass
    assert world.served("a") == 10 + 5 * OUTPUT_COST
    assert world.served("b") == 10 + 1 * OUTPUT_COST
    # 4 blocks of 4: both answers grow into the last ones, and one has to give way.
    tight = World(tokens=64, blocks=6, seqs=2)
    tight.add("a0", 8, max_tokens=9)
    tight.add("b0", 8, max_tokens=9)
    while tight.step():
        pass
    assert tight.scheduler.stats.num_preemptions > 0
    assert {tight.served(tenant) for tenant in "ab"} == {8 + 9 * OUTPUT_COST}


def test_nobody_saves_turns_up_by_being_away() -> None:
    """The third comes when the others have had 96 tokens each, and gets as many from then on as they do."""
    world = World(tokens=16, seqs=2)
    for i in range(60):
        world.add(f"a{i}", 16)
        world.add(f"b{i}", 16)
    for _ in range(12):
        world.step()
    for i in range(20):
        world.add(f"c{i}", 16)
    order = "".join(next(iter(world.step()))[0] for _ in range(30))
    assert [order.count(tenant) for tenant in "abc"] == [10, 10, 10]


def test_who_was_ahead_when_it_left_is_ahead_when_it_comes_back() -> None:
    world = World(tokens=64)
    world.add("a0", 8)
    world.add("b0", 60)
    while world.step():
        pass
    assert world.served("b") > world.served("a")
    for i in range(4):
        world.add(f"a{i + 1}", 60, max_tokens=1)
    world.add("b1", 60)
    assert next(iter(world.step())) == "a1"


def test_with_one_tenant_nothing_is_counted_and_order_is_by_rank() -> None:
    world = World(tokens=16)
    for i, priority in enumerate((2, 0, 1)):
        world.add(f"a{i}", 16, priority=priority)
    assert [next(iter(world.step())) for _ in range(3)] == ["a1", "a2", "a0"]
    assert world.shares.is_one
    assert world.served("a") == 0.0


def test_within_a_tenant_rank_decides_and_a_priority_jumps_no_other_tenant() -> None:
    world = World(tokens=16)
    world.add("b0", 16)
    world.add("b1", 16)
    for i in range(4):
        world.add(f"a{i}", 16, priority=-i)
    order = [next(iter(world.step())) for _ in range(6)]
    assert [name for name in order if name[0] == "a"] == ["a3", "a2", "a1", "a0"]
    assert {name[0] for name in order[:2]} == {name[0] for name in order[2:4]} == {"a", "b"}


def test_the_last_slot_is_left_to_who_has_none() -> None:
    world = World(tokens=64, seqs=4)
    world.add("b0", 4)
    world.step()
    for i in range(6):
        world.add(f"a{i}", 4, max_tokens=50)
    assert len(world.step()) == 3
    assert len(world.step()) == 3
    world.add("b1", 4, max_tokens=50)
    assert len(world.step()) == 4, "all slots are taken where everybody has one"
    world.now += REMEMBERED_S
    alone = World(tokens=64, seqs=4)
    for i in range(6):
        alone.add(f"a{i}", 4, max_tokens=50)
    assert len(alone.step()) == 4


def test_the_last_slot_is_not_kept_for_who_is_long_gone() -> None:
    world = World(tokens=64, seqs=4)
    world.add("b0", 4)
    world.step()
    for i in range(6):
        world.add(f"a{i}", 4, max_tokens=50)
    assert len(world.step()) == 3
    world.now += REMEMBERED_S
    assert len(world.step()) == 4, "nobody has to come for that"


def test_who_was_given_most_gives_way() -> None:
    """By rank alone the last to come would give way: the tenant that is owed."""
    world = World(tokens=64, blocks=14, seqs=3)
    world.add("a0", 16, max_tokens=40)
    world.add("a1", 12, max_tokens=40)
    for _ in range(8):
        world.step()
    world.add("b0", 4, max_tokens=12)
    computed = dict.fromkeys(("a0", "a1", "b0"), 0)
    while rows := world.step():
        for name, num_tokens in rows.items():
            computed[name] += num_tokens
    assert world.scheduler.stats.num_preemptions > 0
    assert computed["b0"] == 4 + 11, "some of it was computed twice"


def test_a_begun_prompt_of_who_asks_for_little_is_finished() -> None:
    world = World(tokens=16)
    for i in range(9):
        world.add(f"a{i}", 16)
    world.step()
    world.add("b0", 48)
    order = "".join(next(iter(world.step()))[0] for _ in range(7))
    assert "bbb" in order[:4]
    world.add("b1", 16)
    assert next(iter(world.step()))[0] == "a" or order.endswith("aaa"), "and is paid for before the next"


def test_tenants_that_are_gone_are_forgotten() -> None:
    world = World(tokens=16)
    for i in range(50):
        world.add("x", 4, tenant=f"tenant {i}")
        while world.step():
            pass
    assert len(world.shares._accounts) == 50
    world.now += 2 * REMEMBERED_S
    world.add("x", 4, tenant="one")
    assert len(world.shares._accounts) < 50
    assert all(account.num_live or account.served > 0 for account in world.shares._accounts.values())


def test_anothers_queue_is_not_ahead_of_a_tenant_with_a_target() -> None:
    """500 prompts of 64 wait; a request of another tenant is not refused for them, one of the same tenant is."""
    world = World(tokens=64, blocks=4096)
    for i in range(500):
        world.add(f"a{i}", 64)
    for name, expected in (("b", False), ("a", True)):
        outlook = world.scheduler._outlook(world.add(f"{name}-probe", 64), 64)
        assert (outlook.num_ahead > 10_000) is expected, outlook


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    core = EngineCore(World().scheduler, None, vocab_size=8)  # type: ignore[arg-type]
    core.submit(
        Submit(request_id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1, seed=0), weight=weight), 0.0
    )
    output = core.flush()
    assert output is not None
    assert output.deltas[0].failure is not None
    assert output.deltas[0].failure.param == "weight"


# -- R15: a flood ------------------------------------------------------------------------------------------------------


def test_r15_a_flood_delays_others_by_less_than_twice(request: pytest.FixtureRequest) -> None:
    """Three tenants of little, alone and beside one that asks for a hundred times as much as each of them."""
    alone, beside = flooded(SHARED, 240.0 if request.config.getoption("--long") else 20.0, 1)
    assert len(beside) >= 0.97 * len(alone) > 30
    first, second = percentile(alone, 0.99), percentile(beside, 0.99)
    print(f"R15: p99 TTFT {first:.3f} s alone, {second:.3f} s beside a flood: {second / first:.2f}x")
    assert second <= 2 * first


def test_r15_shares_of_tokens_are_even_whatever_is_asked_for() -> None:
    errors = share_errors(SHARED, 8.0, 1)
    print(f"R15: errors of shares {', '.join(f'{error:.1%}' for error in errors.values())}")
    assert max(errors.values()) <= 0.1


def test_r15_would_see_a_queue_by_order_of_arrival_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "is_one", True)
    alone, beside = flooded(SHARED, 12.0, 1)
    assert len(beside) < 0.9 * len(alone) or percentile(beside, 0.99) > 4 * percentile(alone, 0.99)

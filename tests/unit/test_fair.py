"""Fair sharing between tenants: counters, turns and lifts; and a flood on a simulated machine."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec import structs

from benchmarks.fairness import SHARED, flooded, percentile, share_errors
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched.fairness import fair as fair_module
from inferd.engine.sched.fairness.fair import OUTPUT_COST, REMEMBERED_S, Shares, TenantShare
from inferd.engine.sched.fairness.heap import Key
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
        """Add a request. The first letter of `name` is its tenant."""
        self.now += 1e-3
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        tenant = name[0] if tenant is None else tenant
        scheduling = SchedulingParams(arrival_s=self.now, tenant=tenant, **asked)
        request = Request.create(name, (1,) * num_prompt, params, scheduling, max_model_len=4096)
        self.scheduler.add(request, self.now)
        return request

    def step(self) -> dict[str, int]:
        """Number of tokens of each row of the next plan, by request, in order."""
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
        return self.shares._tenants[tenant].served


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
    # 4 blocks of 4: both answers need the last block, so one is preempted.
    tight = World(tokens=64, blocks=6, seqs=2)
    tight.add("a0", 8, max_tokens=9)
    tight.add("b0", 8, max_tokens=9)
    while tight.step():
        pass
    assert tight.scheduler.num_preemptions > 0
    assert {tight.served(tenant) for tenant in "ab"} == {8 + 9 * OUTPUT_COST}


def test_nobody_saves_turns_up_by_being_away() -> None:
    """The third tenant comes when the others have had 96 tokens each. From then on it gets as many as they do."""
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
    assert world.shares.has_one_tenant
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


def crowded() -> World:
    """Four slots, six requests for them, and a tenant that was served and has gone."""
    world = World(tokens=64, seqs=4)
    world.add("b0", 4)
    world.step()
    for i in range(6):
        world.add(f"a{i}", 4, max_tokens=50)
    return world


def test_the_last_slot_is_left_to_who_has_none() -> None:
    world = crowded()
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
    world = crowded()
    assert len(world.step()) == 3
    world.now += REMEMBERED_S
    assert len(world.step()) == 4, "nobody has to come for that"


def test_who_was_given_most_gives_way() -> None:
    """By rank alone the request that came last would be preempted, but its tenant has had too few tokens."""
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
    assert world.scheduler.num_preemptions > 0
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
    assert len(world.shares._tenants) == 50
    world.now += 2 * REMEMBERED_S
    world.add("x", 4, tenant="one")
    assert len(world.shares._tenants) < 50
    assert all(account.num_live or account.served > 0 for account in world.shares._tenants.values())


def test_anothers_queue_is_not_ahead_of_a_tenant_with_a_target() -> None:
    """500 prompts of 64 tokens wait. A request of another tenant is not refused for them, one of the same tenant is."""
    world = World(tokens=64, blocks=4096)
    for i in range(500):
        world.add(f"a{i}", 64)
    for name, expected in (("b", False), ("a", True)):
        estimate = world.scheduler._forecast.ttft_estimate(world.add(f"{name}-probe", 64), 64)
        assert (estimate.num_ahead > 10_000) is expected, estimate


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    core = EngineCore(World().scheduler, None, vocab_size=8)  # type: ignore[arg-type]
    params, scheduling = SamplingParams(max_tokens=1, seed=0), SchedulingParams(weight=weight)
    core.submit(Submit(request_id="r", prompt_ids=(1,), params=params, scheduling=scheduling), 0.0)
    output = core.flush()
    assert output is not None
    assert output.deltas[0].failure is not None
    assert output.deltas[0].failure.param == "weight"


# -- many tenants ------------------------------------------------------------------------------------------------------


class Model:
    """Repeats the calls to `Shares`, and finds the tenants whose turn it is by looking at all."""

    def __init__(self) -> None:
        self.shares = Shares()
        self.waits: set[str] = set()
        self.now = 0.0

    def change(self, rng: Random, tenant: str) -> None:
        """Change a tenant in one of the ways that can happen to it."""
        self.now += rng.choice((0.01, 1.0, 20.0))
        self.shares.now_s = self.now
        account = self.shares._tenants.get(tenant)
        if account is None or rng.random() < 0.3:
            self.shares.arrive(tenant, 1.0, self.now)
        elif tenant in self.waits and rng.random() < 0.4:
            self.waits.remove(tenant)
            self.shares.stops_waiting(tenant)
        elif account.num_live and tenant not in self.waits and rng.random() < 0.5:
            self.waits.add(tenant)
            self.shares.starts_waiting(tenant)
        elif account.num_running and rng.random() < 0.5:
            self.shares.add_running(tenant, -1)
        elif account.num_running < account.num_live and rng.random() < 0.7:
            self.shares.add_running(tenant, 1)
            account.served += rng.randint(0, 3)
        elif account.num_live > account.num_running and tenant not in self.waits:
            self.shares.leave(tenant)

    def turn(self, num_free: int) -> set[str]:
        """Tenants whose turn it may be: equal ones that asked at the same time are alike."""
        accounts = self.shares._tenants
        without = [one for one in accounts.values() if not one.num_running]
        is_kept = any(one.num_live or self.now - one.seen_s < REMEMBERED_S for one in without)
        may = {name for name in self.waits if num_free > (num_free == 1 and is_kept and accounts[name].has_slot)}
        keys = {name: (accounts[name].served, accounts[name].has_slot, accounts[name].seen_s) for name in may}
        return {name for name, key in keys.items() if key == min(keys.values())}


def test_whose_turn_it_is_equals_looking_at_everybody() -> None:
    rng, model = Random(3), Model()
    kept = 0
    for _ in range(4000):
        model.change(rng, f"t{rng.randrange(12)}")
        assert model.shares.waiting() == model.waits
        for num_free in (0, 1, 2):
            turn, expected = model.shares.turn({}, num_free), model.turn(num_free)
            assert (turn in expected) if expected else turn is None
        kept += model.shares.turn({}, 1) != model.shares.turn({}, 2)
    assert kept > 100, "the last slot is hardly ever kept"


def test_a_turn_does_not_look_at_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 tenants wait. The number of tenants that a step reads depends on the requests that start."""
    num_read, order = 0, fair_module._order

    def counted(account: TenantShare) -> Key:
        nonlocal num_read
        num_read += 1
        return order(account)

    monkeypatch.setattr(fair_module, "_order", counted)
    world = World(tokens=64, seqs=64)
    for i in range(2000):
        world.add("x", 4, max_tokens=9, tenant=f"tenant {i}")
    num_read = 0
    plan = world.scheduler.schedule(world.now)
    assert plan is not None
    assert len(plan.rows) == 16
    assert 16 <= num_read <= 4 * 16


def test_a_tenants_later_requests_are_shed_as_well() -> None:
    """A request with a target waits behind one without. It is refused as soon as it can no longer be in time."""
    world = World(tokens=16, seqs=1)
    world.add("a0", 4, max_tokens=400)
    world.step()
    world.add("a1", 4)
    timed = world.add("a2", 4, ttft_target_s=0.5)
    assert list(world.scheduler.shed(world.now)) == []
    world.now += 1.0
    assert [request for request, _ in world.scheduler.shed(world.now)] == [timed]
    world.scheduler.check()


# -- R15: a flood ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [64, 256])
def test_r15_a_flood_delays_others_by_less_than_twice(num_slots: int, request: pytest.FixtureRequest) -> None:
    """Three tenants with few requests, alone and beside one that asks for a hundred times as much as each of them."""
    setting = replace(SHARED, max_num_seqs=num_slots)
    alone, beside = flooded(setting, 240.0 if request.config.getoption("--long") else 20.0, 1)
    assert len(beside) >= 0.97 * len(alone) > 30
    first, second = percentile(alone, 0.99), percentile(beside, 0.99)
    print(f"R15: p99 TTFT {first:.3f} s alone, {second:.3f} s beside a flood: {second / first:.2f}x")
    assert second <= 2 * first


def test_r15_shares_of_tokens_are_even_whatever_is_asked_for() -> None:
    errors = share_errors(SHARED, 8.0, 1)
    print(f"R15: errors of shares {', '.join(f'{error:.1%}' for error in errors.values())}")
    assert max(errors.values()) <= 0.1


def test_r15_would_see_a_queue_by_order_of_arrival_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    create = Request.create

    def one_for_all(name: str, ids: Any, params: Any, scheduling: SchedulingParams, **asked: Any) -> Request:
        return create(name, ids, params, structs.replace(scheduling, tenant=""), **asked)

    monkeypatch.setattr(Request, "create", one_for_all)
    alone, beside = flooded(SHARED, 12.0, 1)
    assert len(beside) < 0.9 * len(alone) or percentile(beside, 0.99) > 4 * percentile(alone, 0.99)

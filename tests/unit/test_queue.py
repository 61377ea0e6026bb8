"""The waiting queue: order, removal from anywhere, and no memory kept for removed requests."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, order_key_of
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue, WaitingQueue

_CACHE = KVCache(1, 1)


def make(sequence: int, arrival_s: float = 0.0, priority: int = 0, ageing_s: float = 10.0, tenant: str = "") -> Entry:
    params = SamplingParams(max_tokens=1, seed=0)
    scheduling = SchedulingParams(arrival_s=arrival_s, priority=priority, tenant=tenant)
    request = Request.create(str(sequence), (1,), params, scheduling, max_model_len=9)
    return Entry(request, _CACHE.open(request), order_key_of(scheduling, sequence, ageing_s))


def drain(queue: WaitingQueue) -> list[str]:
    names: list[str] = []
    while (entry := queue.first()) is not None:
        queue.remove(entry)
        names.append(entry.request.request_id)
    return names


def test_priority_then_arrival_then_submission() -> None:
    queue = WaitingQueue()
    for entry in (make(0, 5.0), make(1, 3.0, priority=1), make(2, 4.0), make(3, 4.0), make(4, 9.0, priority=-1)):
        queue.push(entry)
    assert drain(queue) == ["4", "2", "3", "0", "1"]


def test_a_level_of_priority_is_worth_ageing_s_of_waiting() -> None:
    """Three levels worse and 30 s earlier is a tie, which the earlier arrival wins; a moment less and it loses."""
    for head_start_s, first in ((30.0, "0"), (29.9, "1")):
        queue = WaitingQueue()
        queue.push(make(0, 100.0 - head_start_s, priority=3))
        queue.push(make(1, 100.0, priority=0))
        assert queue.first().request.request_id == first  # type: ignore[union-attr]


def test_any_mix_of_pushes_and_removals_equals_sorting() -> None:
    rng = Random(0)
    queue, model = WaitingQueue(), set[Entry]()
    for sequence in range(2000):
        entry = make(sequence, rng.random(), rng.randint(0, 2), ageing_s=0.3)
        entry.num_to_compute = rng.randint(0, 9)
        queue.push(entry)
        model.add(entry)
        while len(model) > 40 or (model and rng.random() < 0.3):
            gone = rng.choice(sorted(model, key=lambda entry: entry.order_key))
            queue.remove(gone)
            model.remove(gone)
        assert len(queue) == len(model)
        for priority in (-1, 0, 1, 2):
            until = [entry.num_to_compute for entry in model if entry.request.scheduling.priority <= priority]
            assert queue.num_tokens_until(priority) == sum(until)
        assert queue.num_tokens == sum(until), "and all of them"
        assert queue.first() is min(model, key=lambda entry: entry.order_key, default=None)
        assert len(queue._entries._heap) <= 2 * max(32, len(model)) + 1, "stale items pile up"
    assert drain(queue) == [entry.request.request_id for entry in sorted(model, key=lambda entry: entry.order_key)]


def test_an_entry_may_leave_and_come_back() -> None:
    queue = WaitingQueue()
    first, second = make(0), make(1)
    for entry in (first, second):
        queue.push(entry)
    queue.remove(second)
    queue.push(second)
    queue.remove(second)
    assert drain(queue) == ["0"]
    queue.push(first)
    with pytest.raises(AssertionError, match="queued twice"):
        queue.push(first)


def test_a_queue_by_tenant_is_one_queue_each() -> None:
    """Compares any mix of pushes and removals with a plain set: the next request, the overdue ones, and how much
    waits."""
    rng = Random(1)
    shares = Shares()
    queue, model = FairQueue(shares), set[Entry]()
    for sequence in range(1000):
        tenant = rng.choice("abc")
        shares.arrive(tenant, 1.0, float(sequence))
        entry = make(sequence, rng.random(), tenant=tenant)
        entry.num_to_compute = rng.randint(0, 9)
        entry.start_by_s = rng.choice((inf, float(rng.randint(0, 9))))
        queue.push(entry)
        model.add(entry)
        while len(model) > 9 or (model and rng.random() < 0.5):
            gone = rng.choice(sorted(model, key=lambda entry: entry.order_key))
            queue.remove(gone)
            model.remove(gone)
        queue.check()
        assert (len(queue), queue.num_tokens) == (len(model), sum(entry.num_to_compute for entry in model))
        assert {name: set(own.entries()) for name, own in queue.by_tenant.items()} == {
            name: {entry for entry in model if entry.request.scheduling.tenant == name}
            for name in {entry.request.scheduling.tenant for entry in model}
        }
        turn = shares.least()
        own = [entry for entry in model if entry.request.scheduling.tenant == turn]
        assert queue.first() is min(own, key=lambda entry: entry.order_key, default=None)
        for now in (0.0, 4.0, 9.5):
            overdue = queue.overdue(now)
            late = [entry.start_by_s for entry in model if entry.start_by_s < now]
            assert (overdue.start_by_s if overdue else None) == min(late, default=None)

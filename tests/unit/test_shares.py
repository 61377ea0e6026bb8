"""Virtual counters computed by hand: the cost of a row, the work ahead of a request, and which tenants are
remembered."""

from __future__ import annotations

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, order_key_of
from inferd.engine.sched.fairness.fair import REMEMBERED_S, Shares
from inferd.engine.sched.plan import Row

_CACHE = KVCache(1, 1)


def entry_of(prompt: int, tenant: str) -> Entry:
    params = SamplingParams(max_tokens=9, seed=0)
    scheduling = SchedulingParams(tenant=tenant)
    request = Request.create("r", (1,) * prompt, params, scheduling, max_model_len=64)
    return Entry(request, _CACHE.open(request), order_key_of(scheduling, 0, 10.0))


def served(shares: Shares, tenant: str) -> float:
    return shares._tenants[tenant].served


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_a_token_of_a_prompt_costs_one_and_one_of_an_answer_two_and_neither_twice(weight: float) -> None:
    shares, entry = Shares(), entry_of(5, "t")
    shares.arrive("t", weight, 0.0)
    for row, cost in (
        (Row(0, 0, 2, False), 2.0),
        (Row(0, 2, 1, False), 1.0),
        (Row(0, 3, 2, True), 2.0 + 2.0),  # the rest of the prompt and the first token
        (Row(0, 5, 1, True), 2.0),
        (Row(0, 0, 4, False), 0.0),  # preempted, and computed again
        (Row(0, 4, 2, False), 0.0),
        (Row(0, 6, 1, True), 2.0),
    ):
        before = served(shares, "t")
        shares.charge(entry, row)
        assert (served(shares, "t") - before) * weight == cost, row


@pytest.mark.parametrize(("was_charged", "cost"), [(True, 2.0 * 4), (False, 2.0 * 3)])
def test_accepted_drafts_are_charged_when_they_are_applied_and_rejected_ones_never(
    was_charged: bool, cost: float
) -> None:
    """A row that was planned while its tenant was alone was not charged. Then only what it gave beyond its first token
    is, and nothing of its prompt."""
    shares, entry = Shares(), entry_of(5, "t")
    shares.arrive("t", 1.0, 0.0)
    entry.request.ids.append(7)
    row = Row(0, 5, 6, True, (8, 9, 10, 11, 12))
    if was_charged:
        shares.charge(entry, row)
    entry.request.ids += [8, 9, 10, 3]
    for _ in range(2):
        shares.charge_accepted(entry, row)
        assert served(shares, "t") == cost


def test_a_prefix_hit_costs_nothing() -> None:
    shares, entry = Shares(), entry_of(10, "t")
    shares.arrive("t", 1.0, 0.0)
    shares.charge(entry, Row(0, 8, 1, False))
    assert served(shares, "t") == 1.0


def test_what_comes_before_a_request_is_what_others_are_owed_and_their_share_of_its_own() -> None:
    shares = Shares()
    for tenant, weight, was_given in (("a", 2.0, 30.0), ("b", 1.0, 10.0), ("c", 3.0, 50.0)):
        shares.arrive(tenant, weight, 0.0)
        shares._tenants[tenant].served = was_given
    # Tenant a has 8 tokens, 4 after its weight. Tenant b may have 20 more, and c none.
    assert shares.ahead("a", 8.0, {"b": 1000.0}) == 24.0
    assert shares.ahead("a", 8.0, {"b": 7.0}) == 7.0, "and never more than it asks for"
    assert shares.ahead("a", 8.0, {"b": 1000.0, "c": 1000.0}) == 24.0 + 12.0
    assert shares.ahead("a", 8.0, {"b": 1000.0, "c": 1000.0}, in_tokens=False) == 4.0 + 12.0
    assert shares.ahead("a", 8.0, {}) == 0.0


def test_who_was_given_no_more_than_others_is_forgotten_after_a_while() -> None:
    shares = Shares()
    for tenant in ("even", "ahead", "here"):
        shares.arrive(tenant, 1.0, 0.0)
    shares._tenants["ahead"].served = 5.0
    for tenant in ("even", "ahead"):
        shares.leave(tenant)
    shares.arrive("new", 1.0, REMEMBERED_S - 1.0)
    assert set(shares._tenants) == {"even", "ahead", "here", "new"}
    shares.arrive("new", 1.0, REMEMBERED_S)
    assert set(shares._tenants) == {"ahead", "here", "new"}

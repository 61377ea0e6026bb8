"""The queue in which tenants take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.api.round_robin import RoundRobin

TENANTS = st.sampled_from("abc")


@given(st.lists(TENANTS | st.none(), max_size=30), TENANTS)
def test_no_item_waits_for_more_than_told(steps: list[str | None], tenant: str) -> None:
    """`steps`: the tenant of an item that is added, or None if one is taken."""
    queue: RoundRobin[tuple[str, int]] = RoundRobin()
    for i, owner in enumerate(steps):
        if owner is not None:
            queue.add(owner, (owner, i))
        elif queue:
            queue.take()
    told, last = queue.num_before(tenant), (tenant, len(steps))
    queue.add(tenant, last)
    taken = []
    while queue:
        taken.append(queue.take())
    assert taken.index(last) <= told <= taken.index(last) + 2, "each other tenant may have had its turn already"
    for owner in "abc":
        own = [number for each, number in taken if each == owner]
        assert own == sorted(own)


def test_a_tenant_with_many_items_delays_another_by_one() -> None:
    queue: RoundRobin[str] = RoundRobin()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.add(item[0], item)
    assert queue.num_before("b") == 5 and queue.num_before("d") == 3
    assert [queue.take() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert not queue

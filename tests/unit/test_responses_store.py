"""Stored responses: bounds in bytes and time, fairness among keys, and any number of threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.server.endpoints.responses.store import ResponseStore, Stored


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(response_id: str, size: int = 0, *item_ids: str) -> Stored:
    return Stored(response_id, b"r" * size, b"[]", item_ids)


SIZE = stored("x").num_bytes


def test_what_was_put_is_found_by_its_key_alone() -> None:
    store = ResponseStore(100 * SIZE, 60)
    one = stored("resp_1", 5, "msg_1")
    assert store.put("a", one)
    assert (store.get("a", "resp_1"), store.with_item("a", "msg_1")) == (one, one)
    assert (store.get("b", "resp_1"), store.with_item("b", "msg_1")) == (None, None)
    assert not store.delete("b", "resp_1")
    assert store.delete("a", "resp_1")
    assert (store.get("a", "resp_1"), store.with_item("a", "msg_1")) == (None, None)
    assert not store.delete("a", "resp_1")


def test_time_runs_from_the_last_put() -> None:
    clock = Clock()
    store = ResponseStore(100 * SIZE, 60, clock)
    store.put("a", stored("1"))
    clock.now_s = 30
    store.put("a", stored("2"))
    store.put("a", stored("1", 3))
    clock.now_s = 89.9
    assert (store.get("a", "1"), store.get("a", "2")) == (stored("1", 3), stored("2"))
    clock.now_s = 90
    assert (store.get("a", "1"), store.get("a", "2")) == (None, None)
    assert not store.delete("a", "1")


def test_room_is_made_by_the_key_that_fills_most_of_it_and_what_it_used_longest_ago() -> None:
    store = ResponseStore(4 * SIZE + 3, 60)
    store.put("small", stored("s"))
    for name in ("1", "2", "3"):
        store.put("large", stored(name))
    assert store.get("large", "1") is not None
    store.put("small", stored("t"))
    assert [store.get("large", name) is not None for name in ("1", "2", "3")] == [True, False, True]
    assert store.get("small", "s") is not None


def test_more_than_there_is_room_for_is_not_kept_and_costs_nobody() -> None:
    store = ResponseStore(2 * SIZE, 60)
    store.put("a", stored("1"))
    assert not store.put("b", stored("2", 2 * SIZE))
    assert store.get("a", "1") is not None
    assert not ResponseStore(0, 60).put("a", stored("1"))
    assert not store.put("a", stored("1", 2 * SIZE)), "what it replaced is gone: it was another answer"
    assert store.get("a", "1") is None


def test_an_item_is_found_in_the_newest_response_that_has_it() -> None:
    store = ResponseStore(100 * SIZE, 60)
    store.put("a", stored("1", 0, "m"))
    store.put("a", stored("2", 0, "m"))
    assert store.with_item("a", "m") == stored("2", 0, "m")
    store.delete("a", "1")
    assert store.with_item("a", "m") == stored("2", 0, "m")
    store.put("a", stored("3", 0, "m", "n"))
    store.delete("a", "3")
    assert store.with_item("a", "m") == stored("2", 0, "m"), "the response before it still has the item"
    assert store.with_item("a", "n") is None


Action = tuple[str, str, str, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "wait"]), st.sampled_from("ab"), st.sampled_from("1234"),
              st.integers(0, 2 * SIZE)),
    max_size=60,
)  # fmt: skip


@settings(deadline=None)
@given(ACTIONS)
def test_bounds_and_books_hold_whatever_happens(actions: list[Action]) -> None:
    clock, max_bytes = Clock(), 4 * SIZE
    store = ResponseStore(max_bytes, 60, clock)
    newest: dict[tuple[str, str], tuple[Stored, float]] = {}
    for action, tenant, name, number in actions:
        if action == "put":
            one = stored(name, number, f"item_{name}", "shared")
            assert store.put(tenant, one) == (one.num_bytes <= max_bytes)
            newest[tenant, name] = one, clock.now_s
        elif action == "get":
            found = store.get(tenant, name)
            expected, put_s = newest.get((tenant, name), (None, 0.0))
            assert found in (None, expected)
            assert found is None or clock.now_s < put_s + 60
        elif action == "delete":
            store.delete(tenant, name)
            assert store.get(tenant, name) is None
        else:
            clock.now_s += number / SIZE * 30
        kept = [one for tenant in store._tenants.values() for one in tenant.entries.values()]
        assert sum(one.num_bytes for one in kept) == store._num_bytes <= max_bytes
        assert len(store._ends_s) == len(kept)
        for one_tenant in store._tenants.values():
            assert one_tenant.num_bytes == sum(one.num_bytes for one in one_tenant.entries.values())
            listed = sorted((item, name) for item, names in one_tenant.by_item.items() for name in names)
            assert listed == sorted((item, one.id) for one in one_tenant.entries.values() for item in one.item_ids)


def test_threads_do_not_upset_the_books() -> None:
    store = ResponseStore(20 * SIZE, 60)

    def work(seed: int) -> None:
        draws = random.Random(seed)
        for _ in range(2_000):
            tenant, name = draws.choice("abc"), draws.choice("12345678")
            draws.choice(
                [
                    lambda tenant=tenant, name=name: store.put(tenant, stored(name, draws.randrange(SIZE), "i" + name)),
                    lambda tenant=tenant, name=name: store.get(tenant, name),
                    lambda tenant=tenant, name=name: store.with_item(tenant, "i" + name),
                    lambda tenant=tenant, name=name: store.delete(tenant, name),
                ]
            )()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    kept = [one for tenant in store._tenants.values() for one in tenant.entries.values()]
    assert sum(one.num_bytes for one in kept) == store._num_bytes <= 20 * SIZE
    assert len(store._ends_s) == len(kept)

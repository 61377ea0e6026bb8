"""The heap: any mix of operations equals sorting, and removed items leave nothing behind."""

from __future__ import annotations

from random import Random

import pytest

from inferd.engine.sched.fairness.heap import LazyHeap


def test_any_mix_of_pushes_removals_and_growth_equals_sorting() -> None:
    rng, keys, heap = Random(0), dict[int, float](), LazyHeap[int](lambda item: (keys[item],))
    for item in range(3000):
        keys[item] = rng.randint(0, 50)
        heap.push(item)
        for grown in rng.sample(sorted(heap), min(len(heap), 3)):
            keys[grown] += rng.choice((0, 1, 20))
        while len(heap) > 40 or (len(heap) and rng.random() < 0.3):
            heap.remove(rng.choice(sorted(heap)))
        first = heap.first()
        assert (first is None) == (len(heap) == 0)
        if first is not None:
            assert first in heap
            assert keys[first] == min(keys[item] for item in heap)
        assert len(heap._heap) <= 2 * max(32, len(heap)) + 1, "stale items pile up"


def test_of_equal_keys_the_first_to_come_is_first_also_once_they_have_grown() -> None:
    keys = {"a": 0.0, "b": 0.0, "c": 0.0}
    heap = LazyHeap[str](lambda item: (keys[item],))
    for item in keys:
        heap.push(item)
    assert heap.first() == "a"
    keys["a"] = 1.0
    assert heap.first() == "b"
    keys["b"] = keys["c"] = 1.0
    assert heap.first() == "a"


def test_a_key_that_shrinks_is_seen() -> None:
    keys = {"a": 1.0}
    heap = LazyHeap[str](lambda item: (keys[item],))
    heap.push("a")
    keys["a"] = 0.5
    with pytest.raises(AssertionError, match="shrank"):
        heap.first()


def test_first_looks_at_few_of_many() -> None:
    """64 of 4,096 items grow between two looks: only those are read again."""
    keys, num_read = [float(item) for item in range(4096)], 0

    def key(item: int) -> tuple[float, ...]:
        nonlocal num_read
        num_read += 1
        return (keys[item],)

    heap = LazyHeap[int](key)
    for item in range(4096):
        heap.push(item)
    for _ in range(10):
        for item in range(64):
            keys[item] += 10_000.0
        num_read = 0
        assert heap.first() == 64
        assert num_read <= 65

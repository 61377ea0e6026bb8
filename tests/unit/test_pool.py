"""The block pool: references, free lists, the order of eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inferd.engine.cache.pool import BlockPool


def cached(pool: BlockPool) -> int:
    """Take a block, fill it and release it: its content stays."""
    (block_id,) = pool.take(1)
    pool.mark_content(block_id)
    pool.release(block_id)
    return block_id


def test_counts() -> None:
    pool = BlockPool(4)
    held = pool.take(2)
    block_id = cached(pool)
    assert (pool.num_held, pool.num_cached, pool.num_empty, pool.num_free) == (2, 1, 1, 2)
    pool.check()
    pool.hold(block_id)
    assert (pool.num_held, pool.num_cached, pool.num_empty) == (3, 0, 1)
    for held_id in (*held, block_id):
        pool.release(held_id)
    assert (pool.num_held, pool.num_cached, pool.num_empty) == (0, 1, 3)
    pool.check()


def test_a_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.take(1)
    pool.mark_content(block_id)
    pool.hold(block_id)
    assert pool.num_shared == 1
    pool.release(block_id)
    assert (pool.num_refs(block_id), pool.num_free, pool.num_shared) == (1, 0, 0)
    pool.release(block_id)
    assert (pool.num_refs(block_id), pool.num_free, pool.is_held(block_id)) == (0, 1, False)


def test_the_oldest_release_is_evicted_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(3)
    for block_id in (first, second, third):
        pool.mark_content(block_id)
    for block_id in (second, third, first):
        pool.release(block_id)
    assert pool.cached_blocks() == (second, third, first)
    pool.hold(second)
    pool.release(second)
    assert pool.oldest_cached() == third


def test_cleared_content_makes_a_cached_block_empty_and_leaves_a_held_one_held() -> None:
    pool = BlockPool(2)
    block_id = cached(pool)
    pool.clear_content(block_id)
    assert (pool.num_cached, pool.num_empty, pool.num_cleared(block_id)) == (0, 2, 1)
    (held,) = pool.take(1)
    pool.mark_content(held)
    pool.clear_content(held)
    pool.release(held)
    assert sum(map(pool.num_cleared, range(2))) == 2
    assert (pool.num_cached, pool.num_empty) == (0, 2)
    pool.check()


def test_what_nobody_holds_cannot_be_released_or_indexed_or_shared() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="released and not held"):
        pool.release(0)
    with pytest.raises(AssertionError, match="indexed and not held"):
        pool.mark_content(0)
    with pytest.raises(AssertionError, match="holds no prefix"):
        pool.hold(0)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 empty"):
        pool.take(2)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_a_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=str(num_blocks)):
        BlockPool(num_blocks)


def _free_twice(pool: BlockPool) -> None:
    pool._empty.append(pool._empty[0])


def _on_both_lists(pool: BlockPool) -> None:
    pool._cached[pool._empty[0]] = None


def _on_no_list(pool: BlockPool) -> None:
    pool._empty.pop()


def _free_and_held(pool: BlockPool) -> None:
    pool._num_refs[pool._empty[0]] = 1


def _on_the_wrong_list(pool: BlockPool) -> None:
    pool._has_content[pool._empty[0]] = 1


def _shared_and_not_counted(pool: BlockPool) -> None:
    pool._num_refs[pool.take(1)[0]] = 2


@pytest.mark.parametrize(
    "spoil",
    [_free_twice, _on_both_lists, _on_no_list, _free_and_held, _on_the_wrong_list, _shared_and_not_counted],
)
def test_check_finds_each_disagreement(spoil: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(3)
    pool.check()
    spoil(pool)
    with pytest.raises(AssertionError):
        pool.check()

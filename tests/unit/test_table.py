"""Block tables on one cache: hits, growth, when blocks are indexed, and the order of eviction."""

from __future__ import annotations

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.group import Appended
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.request import Request


def open_table(cache: KVCache, ids: tuple[int, ...], salt: str = "", prompt_logprobs: int | None = None) -> BlockTable:
    params = SamplingParams(max_tokens=8, seed=0, prompt_logprobs=prompt_logprobs)
    request = Request.create("r", ids, params, SchedulingParams(cache_salt=salt), max_model_len=1000)
    return cache.open(request)


def admit(table: BlockTable, num_tokens: int) -> int:
    """Admit with all prefix hits; returns the number of tokens hit."""
    match = table.match()
    assert table.admit(match, num_tokens)
    return match.num_tokens


def leave(cache: KVCache, ids: tuple[int, ...], salt: str = "") -> tuple[int, ...]:
    """A request computes `ids` and ends; returns the blocks it had."""
    table = open_table(cache, ids, salt)
    admit(table, len(ids))
    table.commit(len(ids))
    (block_ids,) = table.block_ids
    table.release()
    cache.close(table)
    cache.check()
    return block_ids


def test_a_hit_shares_full_blocks_and_leaves_a_token_to_compute() -> None:
    cache = KVCache(8, 2)
    first = leave(cache, (1, 2, 3, 4, 5))
    for ids, hit in (
        ((1, 2, 3, 4, 5), 4),
        ((1, 2, 3, 4), 2),
        ((1, 2, 3), 2),
        ((1, 2), 0),
        ((1, 9, 3, 4), 0),
        ((1,), 0),
    ):
        table = open_table(cache, ids)
        assert admit(table, len(ids)) == hit, ids
        assert table.block_ids[0][: hit // 2] == first[: hit // 2]
        table.release()
        cache.check()


def test_no_hit_under_another_salt_or_prompt_logprobs() -> None:
    cache = KVCache(16, 2)
    leave(cache, (1, 2, 3, 4, 5), salt="a")
    assert admit(open_table(cache, (1, 2, 3, 4, 5), salt="b"), 5) == 0
    assert admit(open_table(cache, (1, 2, 3, 4, 5), salt="a", prompt_logprobs=0), 5) == 0
    assert admit(open_table(cache, (1, 2, 3, 4, 5), salt="a"), 5) == 4


def test_only_applied_full_blocks_are_indexed() -> None:
    cache = KVCache(8, 4)
    table = open_table(cache, tuple(range(10)))
    admit(table, 10)
    for num_computed, num_indexed in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2)):
        table.commit(num_computed)
        assert len(cache.index) == num_indexed, num_computed
    cache.check()


def test_the_same_content_keeps_one_indexed_copy() -> None:
    cache = KVCache(8, 2)
    ids = (1, 2, 3, 4, 5)
    first, second = open_table(cache, ids), open_table(cache, ids)
    for table in (first, second):
        admit(table, 5)
    for table in (first, second):
        table.commit(5)
    assert len(cache.index) == 2
    second.release()
    assert (cache.pool.num_cached, cache.pool.num_empty) == (0, 5)
    first.release()
    assert (cache.pool.num_cached, cache.pool.num_empty) == (2, 6)
    cache.check()


def test_growth_and_what_the_worker_is_told() -> None:
    cache = KVCache(4, 2)
    table = open_table(cache, (1, 2, 3))
    admit(table, 3)
    assert table.take_appended() == [Appended(0, 0, table.block_ids[0])]
    assert table.take_appended() == []
    assert table.extend(4)
    assert table.take_appended() == []
    assert table.extend(5)
    assert table.take_appended() == [Appended(0, 2, table.block_ids[0][2:])]
    assert table.capacity == 6


def test_without_room_nothing_is_done() -> None:
    cache = KVCache(3, 2)
    leave(cache, (1, 2, 3))
    holder = open_table(cache, (9, 9))
    admit(holder, 2)
    table = open_table(cache, (1, 2, 3, 4, 5))
    match = table.match()
    assert (match.num_tokens, table.num_free_needed(match, 6), table.num_free_needed(match, 7)) == (2, 3, 4)
    assert not table.admit(match, 5)
    assert (table.capacity, cache.pool.num_free, cache.pool.num_cached) == (0, 2, 1)
    assert not holder.extend(8)
    assert holder.capacity == 2
    cache.check()


def test_a_hit_on_a_held_block_takes_no_free_one() -> None:
    cache = KVCache(3, 2)
    first = open_table(cache, (1, 2, 3))
    admit(first, 3)
    first.commit(3)
    second = open_table(cache, (1, 2, 4))
    match = second.match()
    assert second.num_free_needed(match, 3) == 1
    assert second.admit(match, 3)
    shared = first.block_ids[0][0]
    assert second.block_ids[0][0] == shared
    assert (cache.pool.num_refs(shared), cache.pool.num_free) == (2, 0)
    cache.check()


def test_a_chain_is_evicted_from_its_end_and_the_oldest_chain_first() -> None:
    cache = KVCache(5, 1)
    old, young = leave(cache, (1, 2, 3)), leave(cache, (7, 8))
    assert cache.pool.cached_blocks() == (*reversed(old), *reversed(young))
    table = open_table(cache, (5, 5, 5, 5))
    admit(table, 2)
    assert open_table(cache, (1, 2, 3, 0)).match().num_tokens == 1
    assert table.extend(4)
    assert open_table(cache, (1, 2, 3, 0)).match().num_tokens == 0
    assert open_table(cache, (7, 8, 0)).match().num_tokens == 1
    cache.check()


def test_use_makes_a_chain_young() -> None:
    cache = KVCache(4, 1)
    first, second = leave(cache, (1, 2)), leave(cache, (7, 8))
    assert leave(cache, (1, 2)) == first
    assert cache.pool.cached_blocks() == (second[1], second[0], first[1], first[0])


def test_evicting_a_parent_forgets_a_child_that_somebody_holds() -> None:
    """Two requests compute the same first block; the second also indexes its next one, behind the first one's copy."""
    cache = KVCache(4, 1)
    first, second = open_table(cache, (1, 5)), open_table(cache, (1, 2, 3))
    admit(first, 1)
    admit(second, 2)
    first.commit(1)
    second.commit(2)
    assert len(cache.index) == 2
    first.release()
    other = open_table(cache, (6, 6, 6))
    admit(other, 2)
    assert len(cache.index) == 0
    cache.check()
    second.commit(2)
    second.release()
    assert cache.pool.num_cached == 0
    cache.check()


def test_forget_takes_every_block_of_the_table_out_of_the_index() -> None:
    cache = KVCache(8, 1)
    leave(cache, (1, 2))
    table = open_table(cache, (1, 2, 3, 4))
    assert admit(table, 4) == 2
    table.commit(3)
    table.forget()
    assert len(cache.index) == 0
    table.commit(4)
    assert len(cache.index) == 0
    table.release()
    assert cache.pool.num_empty == 8
    cache.check()


def test_a_released_table_starts_anew() -> None:
    cache = KVCache(4, 2)
    table = open_table(cache, (1, 2, 3))
    admit(table, 3)
    table.take_appended()
    table.commit(3)
    table.release()
    cache.check()
    assert admit(table, 3) == 2
    assert table.take_appended() == [Appended(0, 0, table.block_ids[0])]
    cache.check()


def test_reset_drops_what_nobody_holds() -> None:
    cache = KVCache(8, 2)
    leave(cache, (7, 7))
    table = open_table(cache, (1, 2, 3))
    admit(table, 3)
    table.commit(3)
    cache.reset()
    assert (cache.pool.num_cached, len(cache.index)) == (0, 1)
    cache.check()


def test_check_finds_a_reference_that_no_table_owns_and_content_that_nothing_reaches() -> None:
    cache = KVCache(2, 1)
    cache.pool.take(1)
    with pytest.raises(AssertionError, match="a reference without an owner"):
        cache.check()
    cache = KVCache(2, 1)
    (block_id,) = leave(cache, (1,))
    cache.index.drop(block_id)
    with pytest.raises(AssertionError, match="index and pool"):
        cache.check()


def test_a_block_size_is_positive() -> None:
    with pytest.raises(ValueError, match="not 0"):
        KVCache(1, 0)

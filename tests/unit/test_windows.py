"""Block tables of groups with a window: when blocks are freed, how many are reserved, and what a hit needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.cache.group import Appended
from inferd.engine.cache.prefix import GONE, Node
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.request import Request
from tests.unit.test_table import admit, open_table


@dataclass
class Running:
    """A request on a table, computed in steps of the test's choice."""

    request: Request
    table: BlockTable

    @classmethod
    def start(cls, cache: KVCache, ids: tuple[int, ...]) -> Running:
        table = open_table(cache, ids)
        match = table.match()
        assert table.admit(match, len(ids))
        table._request.admit(match.num_tokens, 0.0)
        return cls(table._request, table)

    def compute(self, num_tokens: int) -> Running:
        """Launch and apply so many of the known tokens."""
        start = self.request.scheduled
        assert self.table.extend(start + num_tokens)
        sampled = (0,) * self.request.launch(num_tokens)
        self.request.in_flight -= 1
        self.request.apply(start, num_tokens, sampled)
        self.table.commit(self.request.computed)
        self.table._cache.check()
        return self

    def end(self) -> None:
        self.table.release()
        self.table._cache.close(self.table)
        self.table._cache.check()

    def held(self, group: int) -> list[int]:
        """Entries of a group that have a block."""
        return [i for i, block_id in enumerate(self.table.block_ids[group]) if block_id != GONE]


def windowed(num_blocks: int, *windows: int | None, step_tokens: int = 2) -> KVCache:
    return KVCache(num_blocks, 2, windows, step_tokens=step_tokens)


IDS = tuple(range(100, 121))


def test_a_window_is_given_back_behind_the_last_query_and_full_attention_is_not() -> None:
    cache = windowed(40, None, 4)
    running = Running.start(cache, IDS)
    assert (running.held(0), running.held(1)) == (list(range(11)), [0, 1, 2])
    for computed, first in ((1, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (9, 3), (20, 8)):
        while running.request.computed < computed:
            running.compute(1)
        # The query at `computed` sees 3 positions before it.
        assert running.held(1)[0] == first == max(0, computed - 3) // 2, computed
        assert running.held(0) == list(range(11))


def test_a_long_prompt_takes_a_window_and_a_step_at_a_time() -> None:
    cache = windowed(4, 4, step_tokens=3)
    running = Running.start(cache, IDS)
    assert cache.max_tokens > len(IDS)
    for _ in range(7):
        running.compute(3)
        assert len(running.held(0)) <= 4
    assert running.request.computed == len(IDS)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 30), st.data())
def test_what_a_request_is_admitted_with_lasts_to_its_end(
    window: int, step_tokens: int, num_tokens: int, data: st.DataObject
) -> None:
    """A suspect computes alone in the blocks that were free when it started, however its chunks fall."""
    ids = tuple(range(100, 100 + num_tokens))
    table = open_table(windowed(99, window, step_tokens=step_tokens), ids)
    needed = table.num_free_needed(table.match(), num_tokens)
    running = Running.start(windowed(needed, window, step_tokens=step_tokens), ids)
    while num_left := num_tokens - running.request.computed:
        running.compute(data.draw(st.integers(1, min(step_tokens, num_left))))


def test_the_worker_is_told_of_each_group_and_not_of_what_is_dead() -> None:
    cache = windowed(40, None, 4)
    Running.start(cache, IDS).compute(20).end()
    running = Running.start(cache, IDS)
    full, window = running.table.block_ids
    assert running.request.computed == 20
    assert running.table.take_appended() == [Appended(0, 0, full), Appended(1, 8, window[8:])]
    assert window[:8] == (GONE,) * 8


def test_room_is_counted_in_every_group() -> None:
    cache = windowed(40, None, 4, 4)
    table = open_table(cache, IDS)
    match = table.match()
    # 11 blocks for 21 positions; a window of 4 and a step of 2 reach 5 positions: 3 blocks.
    assert table.num_free_needed(match, len(IDS)) == 11 + 3 + 3
    assert windowed(16, None, 4, 4).max_tokens == 2 * (16 - 3 - 3)
    small = windowed(16, None, 4, 4)
    assert not open_table(small, IDS).admit(match, len(IDS))
    assert small.pool.num_free == 16


def test_a_hit_ends_where_every_window_holds_what_the_next_query_sees() -> None:
    """One window block of a chain of 10 is evicted: hits whose window contains it end before it."""
    for gone in range(10):
        cache = windowed(40, None, 4)
        running = Running.start(cache, IDS).compute(20)
        nodes = chain(cache)
        running.end()
        cache.forget(nodes[gone].block_ids[1])
        cache.check()
        # The next query behind a hit of 10 blocks sees 3 positions before it: of blocks 8 and 9.
        assert open_table(cache, IDS).match().num_tokens == (20 if gone < 8 else 2 * gone), gone
    for gone in range(10):
        cache = windowed(40, None, 4)
        running = Running.start(cache, IDS).compute(20)
        nodes = chain(cache)
        running.end()
        cache.forget(nodes[gone].block_ids[0])
        assert open_table(cache, IDS).match().num_tokens == 2 * gone, gone


def chain(cache: KVCache) -> list[Node]:
    """The nodes of `IDS`, from the first."""
    table, nodes = open_table(cache, IDS), []
    parent: Node | str = ""
    for i in range(10):
        node = cache.index.find(parent, table.key(i), IDS[2 * i : 2 * i + 2])
        assert node is not None
        nodes.append(node)
        parent = node
    cache.close(table)
    return nodes


def test_without_full_attention_a_deep_hit_needs_its_last_window_alone() -> None:
    cache = windowed(40, 4)
    Running.start(cache, IDS).compute(20).end()
    for node in chain(cache)[:8]:
        cache.forget(node.block_ids[0])
        cache.check()
    running = Running.start(cache, IDS)
    assert (running.request.computed, running.held(0)) == (20, [8, 9, 10])
    running.end()
    cache.reset()
    assert len(cache.index) == 0


def test_who_computes_an_evicted_window_block_again_gives_it_back_to_the_chain() -> None:
    cache = windowed(60, None, 4)
    Running.start(cache, IDS).compute(20).end()
    for node in chain(cache)[6:]:
        cache.forget(node.block_ids[1])
    running = Running.start(cache, IDS)
    assert running.request.computed == 12
    running.compute(8).end()
    assert open_table(cache, IDS).match().num_tokens == 20
    assert len(cache.index) == 10


def test_tombstones_are_as_many_as_blocks_at_most() -> None:
    """The sequence is 25 times as long as the pool. Its index stays within the pool, and its end can be hit."""
    cache = windowed(8, 4)
    ids = tuple(range(400))
    running = Running.start(cache, ids)
    for _ in range(199):
        running.compute(2)
        assert len(cache.index) <= 2 * cache.pool.num_blocks
    running.end()
    assert len(cache.index) <= 2 * cache.pool.num_blocks


def test_forget_reaches_what_was_given_back_behind_the_window() -> None:
    cache = windowed(40, None, 4)
    running = Running.start(cache, IDS).compute(20)
    running.table.forget()
    assert len(cache.index) == 0
    cache.check()
    running.end()
    assert cache.pool.num_empty == 40


def test_blocks_that_die_with_the_launched_row_are_waited_for() -> None:
    cache = windowed(4, 4)
    running = Running.start(cache, IDS).compute(2)
    holder = open_table(cache, (1, 2))
    admit(holder, 2)
    running.request.launch(4)
    assert not running.table.extend(8)
    assert running.table.can_extend_after(6, 8)
    assert not running.table.can_extend_after(4, 8)


def test_groups_and_windows_are_positive() -> None:
    for windows in ((), (0,), (None, -1)):
        with pytest.raises(ValueError, match="at least one"):
            KVCache(1, 1, windows)

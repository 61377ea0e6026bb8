"""The next engine finds blocks and checkpoints of the one before by key, checks them, and evicts them in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.ledger import Entry
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.request import Request

BLOCK = 2


class Written:
    """A ledger in a dict. Places in `damaged` are not sound."""

    def __init__(self) -> None:
        self.by_place: dict[int, Entry] = {}
        self.damaged: set[int] = set()
        self.checked: list[int] = []

    def entries(self) -> Iterator[Entry]:
        return iter(list(self.by_place.values()))

    def is_sound(self, entry: Entry) -> bool:
        self.checked.append(entry.place)
        return entry.place not in self.damaged

    def write(self, entry: Entry) -> None:
        self.by_place[entry.place] = entry

    def touch(self, place: int, use: int) -> None:
        self.by_place[place] = self.by_place[place]._replace(use=use)

    def erase(self, place: int) -> None:
        self.by_place.pop(place, None)


def request(ids: tuple[int, ...], salt: str = "") -> Request:
    scheduling = SchedulingParams(cache_salt=salt)
    return Request.create("r", ids, SamplingParams(max_tokens=9, seed=0), scheduling, max_model_len=100)


def computed(cache: KVCache, ids: tuple[int, ...], salt: str = "") -> BlockTable:
    """The table of a request whose prompt is computed."""
    asked = request(ids, salt)
    table = cache.open(asked)
    assert table.admit(table.match(), len(ids))
    asked.computed = asked.scheduled = len(ids)
    table.commit(len(ids))
    cache.check()
    return table


def num_hit(cache: KVCache, ids: tuple[int, ...], salt: str = "") -> int:
    """Tokens that a prompt hits, with one more token behind it."""
    table = cache.open(request((*ids, 99), salt))
    match = table.match()
    cache.check()
    cache.close(table)
    return match.num_tokens


def after(ledger: Written, num_blocks: int = 8, **options: object) -> KVCache:
    """The cache of the next engine."""
    cache = KVCache(num_blocks, BLOCK, ledger=ledger, **options)  # type: ignore[arg-type]
    cache.check()
    return cache


def test_the_next_engine_finds_what_was_computed_and_computes_on() -> None:
    ledger = Written()
    computed(KVCache(8, BLOCK, ledger=ledger), (1, 2, 3, 4, 5))
    assert len(ledger.by_place) == 2, "a block that is not full was written down"
    cache = after(ledger)
    assert (cache.pool.num_cached, cache.pool.num_empty) == (2, 6)
    assert num_hit(cache, (1, 2, 3, 4, 5)) == 4
    assert num_hit(cache, (1, 2, 4, 4)) == 2
    table = computed(cache, (1, 2, 3, 4, 5, 6, 7))
    assert table.block_ids[0][:2] == (0, 1), "its blocks hold what was left"
    assert num_hit(after(ledger), (1, 2, 3, 4, 5, 6, 7)) == 6, "and it leaves what it added"


def test_content_is_checked_once_and_only_if_it_is_asked_for() -> None:
    ledger = Written()
    cache = KVCache(8, BLOCK, ledger=ledger)
    computed(cache, (1, 2, 3, 4))
    computed(cache, (5, 6))
    cache = after(ledger)
    assert ledger.checked == []
    assert num_hit(cache, (1, 2, 3, 4)) == num_hit(cache, (1, 2, 3, 4)) == 4
    assert ledger.checked == [0, 1]


def test_damaged_content_is_dropped_and_counted() -> None:
    ledger = Written()
    computed(KVCache(8, BLOCK, ledger=ledger), (1, 2, 3, 4, 5, 6))
    ledger.damaged = {1}
    cache = after(ledger)
    assert num_hit(cache, (1, 2, 3, 4, 5, 6)) == 2
    assert cache.left is not None
    assert (cache.left.num_taken, cache.left.num_damaged) == (1, 1)
    assert sorted(ledger.by_place) == [0, 2], "it stays written down"


@pytest.mark.parametrize("salt", ["", "b"])
def test_another_salt_hits_nothing(salt: str) -> None:
    ledger = Written()
    computed(KVCache(8, BLOCK, ledger=ledger), (1, 2, 3, 4), "a")
    cache = after(ledger)
    assert num_hit(cache, (1, 2, 3, 4), salt) == 0
    assert num_hit(cache, (1, 2, 3, 4), "a") == 4


def test_a_block_that_is_needed_is_taken_from_the_end_of_the_oldest_chain() -> None:
    ledger = Written()
    cache = KVCache(4, BLOCK, ledger=ledger)
    computed(cache, (1, 2, 3, 4)).release()
    computed(cache, (5, 6)).release()
    cache = after(ledger, 4)
    computed(cache, (7, 8, 9, 10))
    assert sorted(ledger.by_place.values()) and num_hit(cache, (1, 2, 3, 4)) == 2
    assert num_hit(cache, (5, 6)) == 2
    cache.reset()
    assert len(ledger.by_place) == 2, "only what a request holds stays"


def test_a_later_use_makes_a_chain_younger() -> None:
    ledger = Written()
    cache = KVCache(4, BLOCK, ledger=ledger)
    computed(cache, (1, 2, 0)).release()
    computed(cache, (5, 6, 0)).release()
    computed(cache, (1, 2, 7)).release()
    cache = after(ledger, 4)
    computed(cache, (11, 12, 13, 14, 15, 16))
    assert num_hit(cache, (1, 2)) == 2
    assert num_hit(cache, (5, 6)) == 0


def test_a_window_is_left_as_far_as_the_next_query_sees() -> None:
    ledger = Written()
    options = {"windows": (None, 3), "step_tokens": 8}
    computed(KVCache(16, BLOCK, ledger=ledger, **options), tuple(range(8)))  # type: ignore[arg-type]
    for place in [place for place, entry in ledger.by_place.items() if entry.group == 1 and entry.depth < 2]:
        ledger.erase(place)
    cache = after(ledger, 16, **options)
    assert num_hit(cache, tuple(range(8))) == 8
    ledger.damaged = {place for place, entry in ledger.by_place.items() if entry.group == 0 and entry.depth == 1}
    assert num_hit(after(ledger, 16, **options), tuple(range(8))) == 0, "a window alone is no prefix of two blocks"


def test_a_checkpoint_is_left_with_its_block() -> None:
    ledger = Written()
    rules = StateCheckpointRules(4, BLOCK)
    cache = KVCache(8, BLOCK, ledger=ledger, checkpoints=rules)
    asked = request((1, 2, 3, 4, 5))
    table = cache.open(asked)
    assert table.admit(table.match(), 5)
    for end in (2, 4):
        assert table.leave_checkpoint(end, 2) is not None
        asked.computed = asked.scheduled = end
        table.commit(end)
    cache.check()
    assert sorted(ledger.by_place) == [0, 1, 8, 9]
    cache = after(ledger, checkpoints=rules)
    assert cache.states is not None
    assert cache.states.pool.num_cached == 2
    assert num_hit(cache, (1, 2, 3, 4)) == 4
    ledger.damaged = {9}
    assert num_hit(after(ledger, checkpoints=rules), (1, 2, 3, 4)) == 2
    cache = after(ledger, checkpoints=rules)
    cache.reset()
    assert cache.states is not None
    assert (cache.states.pool.num_empty, ledger.by_place) == (4, {})


def test_places_that_this_cache_does_not_have_are_ignored() -> None:
    ledger = Written()
    computed(KVCache(8, BLOCK, ledger=ledger), (1, 2, 3, 4, 5, 6))
    assert num_hit(after(ledger, 2), (1, 2, 3, 4, 5, 6)) == 4


def test_nothing_is_written_down_without_a_prefix_cache() -> None:
    ledger = Written()
    computed(KVCache(8, BLOCK, shares_prefixes=False, ledger=ledger), (1, 2, 3, 4))
    assert ledger.by_place == {}

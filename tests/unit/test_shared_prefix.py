"""Which prompt leads and which wait when several would compute the same blocks."""

from __future__ import annotations

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry
from inferd.engine.sched.shared_prefix import PrefixSharing

_CACHE = KVCache(1, 1)


def make(rank: int) -> Entry:
    request = Request.create(str(rank), (1,), SamplingParams(max_tokens=1, seed=0), max_model_len=9)
    return Entry(request, _CACHE.open(request), (float(rank), 0.0, rank))


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_prompt_waits_for_the_last_block_shared_with_one_leader() -> None:
    sharing, first, second, entry = PrefixSharing(), make(0), make(1), make(2)
    sharing.lead(first, iter(keys("abc")), 0, 4)
    sharing.lead(second, iter(keys("abxy")), 0, 4)
    assert list(second.leading) == keys("xy")
    for names, awaited in (("abz", b"b"), ("abcd", b"c"), ("abx", b"b"), ("xyz", b"y"), ("za", None), ("", None)):
        assert sharing.key_to_await(entry, iter(keys(names))) == awaited, names
    sharing.check()


def test_no_prompt_waits_for_one_that_ranks_behind() -> None:
    sharing, leader = PrefixSharing(), make(5)
    sharing.lead(leader, iter(keys("ab")), 0, 4)
    assert sharing.key_to_await(make(4), iter(keys("ab"))) is None
    assert sharing.key_to_await(make(6), iter(keys("ab"))) == b"b"


def test_waiters_are_freed_by_progress_by_the_leaders_end_or_leave_themselves() -> None:
    sharing, leader, early, late, gone = PrefixSharing(), make(0), make(1), make(2), make(3)
    sharing.lead(leader, iter(keys("abc")), 8, 4)
    for entry, key in ((early, b"a"), (late, b"c"), (gone, b"c")):
        sharing.wait(entry, key)
    assert sharing.num_waiting == 3
    sharing.stop_waiting(gone)
    assert sharing.advance(leader, 11) == []
    assert sharing.advance(leader, 15) == [early]
    sharing.check()
    assert sharing.leave(leader) == [late]
    assert (sharing.num_waiting, sharing.key_to_await(make(9), iter(keys("c")))) == (0, None)
    sharing.check()

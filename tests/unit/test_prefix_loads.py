"""Requests whose prefix lies below the pool: found, loaded or computed, aborted, and behind one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from inferd.engine.cache.below import PIECE_BLOCKS, Found, Piece, TierUse, offer_to
from inferd.engine.cache.table import KVCache
from inferd.engine.core.prefix_loads import PrefixLoads
from inferd.engine.request import Request
from tests.unit.test_left_content import Written, computed, num_hit, request

BLOCK = 2
IDS = tuple(range(2 * PIECE_BLOCKS * BLOCK + 1))
"""A prompt with two whole pieces."""


@dataclass
class Search:
    found: list[Found]
    is_done: bool = False

    def take(self) -> Sequence[Found]:
        return self.found


@dataclass
class Load:
    places: Sequence[Sequence[int]]
    news: list[bool] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def has_ended(self) -> bool:
        return bool(self.news)

    def take_ended(self) -> Sequence[bool]:
        taken, self.news = self.news, []
        return taken

    def stop(self) -> None:
        self.is_stopped = True


@dataclass
class Compared:
    salt: str
    piece: Piece
    places: Sequence[int]
    is_done: bool = False
    result: bool | None = True

    def take(self) -> bool | None:
        return self.result


@dataclass
class Below:
    """A tier that has every piece of its chains which was offered, and does what the test says."""

    pieces: set[tuple[str, Piece]] = field(default_factory=set)
    searches: list[Search] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    load_s: float = 0.0
    use: TierUse = field(default_factory=TierUse)
    news: deque[tuple[Piece | None, bool]] | None = None

    def seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> Search:
        found: list[Found] = []
        for pieces in wanted:
            piece = next((piece for piece in pieces if (salt, piece) in self.pieces), None)
            if piece is None:
                break
            found.append(Found(piece, (100,) * piece.num_blocks + (0,)))
        self.searches.append(Search(found))
        return self.searches[-1]

    def load(self, salt: str, found: Sequence[Found], places: Sequence[Sequence[int]]) -> Load:
        self.loads.append(Load(places))
        return self.loads[-1]

    def offer(self, salt: str, piece: Piece, places: Sequence[int]) -> None:
        self.pieces.add((salt, piece))

    def clear(self) -> None:
        self.pieces.clear()

    def forget(self, salt: str, keys: Sequence[bytes]) -> None:
        """Nothing is forgotten here."""

    def compare(self, salt: str, piece: Piece, places: Sequence[int]) -> Compared:
        self.compared.append(Compared(salt, piece, places))
        return self.compared[-1]

    def distrust(self) -> None:
        """Nothing is wrong here."""

    def seconds_to_load(self, salt: str, found: Sequence[Found]) -> float:
        return self.load_s


class World:
    """A cache whose tier has `IDS`, and what waits there."""

    def __init__(self, num_blocks: int = 40) -> None:
        self.now, self.below, self.ledger = 0.0, Below(), Written()
        before = KVCache(40, BLOCK)
        self.cache = KVCache(num_blocks, BLOCK, ledger=self.ledger)
        self.loads = PrefixLoads(self.cache, self.below, lambda num_tokens: 1.0, lambda: self.now)
        offer_to(self.below, before)
        computed(before, IDS)

    def ask(self, ids: tuple[int, ...] = IDS, salt: str = "") -> Request:
        asked = request(ids, salt)
        self.waits = self.loads.open(asked)
        return asked

    def ended(self) -> list[Request]:
        ended = list(self.loads.ended())
        self.cache.check()
        return ended

    def found(self, number: int = -1) -> None:
        self.below.searches[number].is_done = True


def test_a_prefix_is_loaded_piece_by_piece_and_hit() -> None:
    world = World()
    asked = world.ask()
    assert world.waits and not world.loads.has_news and world.ended() == []
    world.found()
    assert world.loads.has_news and world.ended() == []
    (load,) = world.below.loads
    assert [len(places) for places in load.places] == [PIECE_BLOCKS + 1] * 2
    load.news = [True]
    assert world.ended() == []
    assert num_hit(world.cache, IDS) == PIECE_BLOCKS * BLOCK
    load.news = [True]
    assert world.ended() == [asked]
    assert not world.loads.is_busy and world.cache.pool.num_held == 0
    assert num_hit(world.cache, IDS) == 2 * PIECE_BLOCKS * BLOCK
    assert len(world.ledger.by_place) == 2 * PIECE_BLOCKS, "the next engine would not find it"
    assert world.loads.counts.num_loaded_tokens == 2 * PIECE_BLOCKS * BLOCK


def test_the_time_that_requests_waited_is_counted_beside_what_computing_would_have_taken() -> None:
    """A load spares nothing if its request was aborted, or computes by now."""
    world = World()
    world.now = 7.0
    asked = world.ask()
    world.now = 7.25
    world.found()
    world.ended()
    world.below.loads[0].news = [True]
    world.ended()
    world.now = 7.75
    world.below.loads[0].news = [True]
    assert world.ended() == [asked]
    counts = world.loads.counts
    assert (counts.wait_s, counts.compute_s) == (0.75, 2.0), "a second for each piece"
    for is_aborted in (True, False):
        world = World()
        asked = world.ask()
        world.found()
        world.ended()
        if is_aborted:
            world.loads.abort(asked)
        world.now = 3.0
        assert world.ended() == ([] if is_aborted else [asked])
        world.below.loads[0].news = [True, True]
        assert world.ended() == []
        assert (world.loads.counts.wait_s, world.loads.counts.compute_s) == (0.0 if is_aborted else 3.0, 0.0)


def test_a_request_tells_what_the_pool_had_from_what_was_loaded_for_it() -> None:
    """The pool has three blocks of the first piece, and for a second request also what was loaded for the first."""
    world = World()
    known = 3 * BLOCK
    computed(world.cache, (*IDS[:known], 77)).release()
    assert num_hit(world.cache, IDS) == known
    first, second = world.ask(), world.ask()
    world.found(0)
    world.found(1)
    world.ended()
    world.below.loads[0].news = [True, False]
    assert world.ended() == [first]
    end = PIECE_BLOCKS * BLOCK
    assert world.loads.counts.num_loaded_tokens == end - known
    world.found()
    world.ended()
    world.below.loads[1].news = [True]
    assert world.ended() == [second]
    told = []
    for asked in (first, second):
        assert asked.num_loaded_tokens == 0
        table = world.cache.open(asked)
        asked.admit(table.match().num_tokens, now=1.0)
        world.cache.close(table)
        told.append((asked.num_cached_tokens, asked.num_loaded_tokens))
    assert told == [(2 * end, end - known), (2 * end, end)]


def test_only_what_is_still_there_counts_as_loaded() -> None:
    asked = request(IDS)
    asked.loaded = range(8, 24)
    asked.admit(16, now=1.0)
    assert (asked.num_cached_tokens, asked.num_loaded_tokens) == (16, 8)
    asked.rewind()
    asked.admit(32, now=2.0)
    assert asked.num_loaded_tokens == 8, "the first admission counts"
    early = request(IDS)
    early.loaded = range(8, 24)
    early.admit(4, now=1.0)
    assert early.num_loaded_tokens == 0


def test_nothing_waits_if_the_pool_has_it_or_the_prompt_is_short() -> None:
    world = World()
    computed(world.cache, IDS).release()
    world.ask()
    assert not world.waits
    world.ask((1,))
    assert not world.waits and world.below.searches == []


def test_another_salt_finds_nothing() -> None:
    world = World()
    asked = world.ask(salt="b")
    world.found()
    assert world.ended() == [asked] and world.below.loads == []


def test_it_is_computed_if_that_is_faster_or_there_is_no_room() -> None:
    world = World()
    world.below.load_s = 2.0
    asked = world.ask()
    world.found()
    assert world.ended() == [asked] and world.loads.counts.num_slow == 1
    world = World(num_blocks=PIECE_BLOCKS - 1)
    asked = world.ask()
    world.found()
    assert world.ended() == [asked] and world.below.loads == []


def test_as_much_is_loaded_as_there_is_room_for() -> None:
    world = World(num_blocks=2 * PIECE_BLOCKS - 1)
    world.ask()
    world.found()
    world.ended()
    assert len(world.below.loads[0].places) == 1


def test_a_piece_that_fails_ends_the_prefix_there() -> None:
    world = World()
    asked = world.ask()
    world.found()
    world.ended()
    world.below.loads[0].news = [False, True]
    assert world.ended() == [asked]
    assert num_hit(world.cache, IDS) == 0 and world.ledger.by_place == {}
    assert world.loads.counts.num_failed == 1
    assert world.cache.pool.num_empty == world.cache.pool.num_blocks


def test_places_of_an_aborted_request_return_when_its_load_has_ended() -> None:
    world = World()
    asked = world.ask()
    world.found()
    world.ended()
    assert world.loads.abort(asked) and world.below.loads[0].is_stopped
    assert not world.loads.abort(asked), "it is gone already"
    assert len(world.loads) == 0 and world.ended() == []
    assert world.cache.pool.num_held == 2 * PIECE_BLOCKS, "a thread still writes there"
    world.cache.reset()
    world.below.loads[0].news = [True, False]
    assert world.ended() == [] and world.cache.pool.num_held == 0


def test_a_request_that_is_aborted_while_it_is_searched_is_forgotten() -> None:
    world = World()
    asked = world.ask()
    assert world.loads.abort(asked) and world.loads.has_news
    assert world.ended() == [] and not world.loads.is_busy
    assert not world.loads.abort(request(IDS))


def test_a_second_request_waits_for_what_the_first_loads() -> None:
    world = World()
    first, second = world.ask(), world.ask()
    world.found(0)
    world.found(1)
    assert world.ended() == [] and len(world.below.loads) == 1
    assert not world.loads.has_news, "the loop would turn for nothing"
    world.below.loads[0].news = [True, True]
    assert world.ended() == [first, second], "the pool has all of it now"
    assert len(world.below.searches) == 2


def test_a_second_request_looks_again_if_the_first_load_failed() -> None:
    world = World()
    first, second = world.ask(), world.ask()
    world.found(0)
    world.found(1)
    world.ended()
    world.below.loads[0].news = [False, False]
    assert world.ended() == [first]
    world.found(2)
    assert world.ended() == [] and len(world.below.loads) == 2
    world.below.loads[1].news = [True, True]
    assert world.ended() == [second]


def test_nobody_waits_for_ever() -> None:
    """A search, and a load, of a file system that answers no more: the request computes, and the places stay lent."""
    world = World()
    asked = world.ask()
    world.now = 1.9
    assert not world.loads.has_news
    world.now = 2.1
    assert world.loads.has_news and world.ended() == [asked]
    assert not world.loads.is_busy
    world.ask()
    assert not world.waits, "the next one would wait in vain, too"
    world.found(0)
    asked = world.ask()
    world.found()
    world.ended()
    world.now += 2.1
    assert world.loads.has_news and world.ended() == [asked]
    assert world.loads.is_busy and not world.loads.has_news
    assert not world.loads.abort(asked), "the scheduler has it"
    world.ask()
    assert not world.waits
    assert world.cache.pool.num_held == 2 * PIECE_BLOCKS
    world.below.loads[0].news = [False, False]
    assert world.ended() == [] and world.cache.pool.num_held == 0


def test_a_target_bounds_the_search() -> None:
    world = World()
    asked = request(IDS)
    asked.scheduling = structs.replace(asked.scheduling, ttft_target_s=0.4)
    assert world.loads.open(asked)
    world.now = 0.11
    assert world.ended() == [asked]


def test_a_tier_that_was_slow_is_tried_again_now_and_then() -> None:
    world = World()
    world.below.load_s = 2.0
    for _ in range(15):
        world.ask()
        world.found()
        world.ended()
    assert world.below.loads == [] and world.loads.counts.num_slow == 15
    world.ask()
    world.found()
    world.ended()
    assert len(world.below.loads) == 1


def test_what_the_pool_has_of_a_prefix_stays_while_more_is_loaded() -> None:
    """Without it nothing could be hit behind it."""
    world = World(num_blocks=4 * PIECE_BLOCKS)
    first = IDS[: PIECE_BLOCKS * BLOCK]
    computed(world.cache, (*first, 77)).release()
    for number in range(3 * PIECE_BLOCKS - 2):
        computed(world.cache, (100 + number, 100 + number, 7)).release()
    assert num_hit(world.cache, first) == PIECE_BLOCKS * BLOCK
    asked = world.ask()
    world.found()
    world.ended()
    assert num_hit(world.cache, first) == PIECE_BLOCKS * BLOCK
    world.below.loads[0].news = [True]
    assert world.ended() == [asked]
    assert num_hit(world.cache, IDS) == 2 * PIECE_BLOCKS * BLOCK and world.cache.pool.num_held == 0


def test_what_is_hit_counts_as_used_below_and_is_offered_again() -> None:
    world = World()
    computed(world.cache, IDS).release()
    offered: list[int] = []
    world.cache.offer, world.cache.offer_every = lambda node, depth: offered.append(depth), PIECE_BLOCKS
    hit = world.cache.open(request((*IDS, 1, 2)))
    assert hit.admit(hit.match(), len(IDS) + 2)
    assert offered == [PIECE_BLOCKS - 1, 2 * PIECE_BLOCKS - 1]
    hit.release()


def test_a_hit_without_a_block_of_a_window_is_not_offered() -> None:
    cache = KVCache(80, BLOCK, (None, 4), step_tokens=64)
    computed(cache, IDS).release()
    cache.forget(next(node.block_ids[1] for node in cache.index.chains()))
    offered: list[int] = []
    cache.offer, cache.offer_every = lambda node, depth: offered.append(depth), PIECE_BLOCKS
    hit = cache.open(request((*IDS, 1, 2)))
    assert hit.admit(hit.match(), len(IDS) + 2)
    assert offered == [2 * PIECE_BLOCKS - 1], "the tier may have the first piece whole"
    hit.release()

"""The tier in host memory: copied from a device's pool behind the steps, and back into other places, also in front of a
directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.cache.below import PIECE_BLOCKS, Found, Piece
from inferd.engine.cache.prefix import GONE
from inferd.engine.process import kv_host as module
from inferd.engine.process.host_store import HostStore
from inferd.engine.process.kv_host import HostTier
from inferd.engine.process.kv_tier import DirectoryTier
from inferd.engine.process.place_memory import rows_of
from tests.cpu.test_device_memory import BLOCKS, Late, Pools
from tests.cpu.test_kv_tier import MODEL, piece, wait

CHUNK = 2**16
WHOLE = (0, 1, 2, 3, BLOCKS)
"""Four blocks of the one group of a hybrid model, and a checkpoint."""
ELSEWHERE = (4, 2, 1, 0, BLOCKS + 1)


class World:
    """A tier on a device of its own, whose copies are made late."""

    def __init__(self, folder: Path | None = None, num_chunks: int = 16, layout: str = "hybrid") -> None:
        self.streams: list[Late] = []
        self.pools = Pools(layout, torch.bfloat16, self.opened)
        self.erased: Counter[int] = Counter()
        memory, num_groups = self.pools.device, self.pools.num_groups
        self.store = HostStore(num_chunks * CHUNK, memory.block_bytes, memory.allocate, CHUNK)
        self.directory = None
        if folder is not None:
            opened = partial(KVDirectory, folder, 2**30)
            self.directory = DirectoryTier(opened, memory, self.num_erased, num_groups, MODEL)
        self.tier = HostTier(self.store, memory, self.num_erased, num_groups, self.directory)

    def opened(self, device: torch.device) -> Late:
        self.streams.append(Late(device))
        self.streams[-1].before_copies = self.before_copies
        return self.streams[-1]

    def before_copies(self) -> None:
        """Nothing; a test may replace it."""

    def num_erased(self, places: Iterable[int]) -> int:
        return sum(self.erased[place] for place in places)

    def bytes_at(self, places: Sequence[int]) -> list[bytes]:
        rows = rows_of(places, self.pools.num_groups)
        return [b"" if row is None else self.pools.bytes_of(row) for row in rows]

    def offer(self, piece: Piece, places: Sequence[int] = WHOLE, salt: str = "") -> None:
        """Offer a piece, and wait until the threads have seen it."""
        self.tier.offer(salt, piece, places)
        wait(lambda: self.tier.num_waiting == 0)
        if self.directory is not None:
            directory = self.directory
            wait(lambda: directory.num_waiting == 0)

    def found(self, *pieces: Piece, salt: str = "") -> list[Found]:
        search = self.tier.seek(salt, [[each] for each in pieces])
        wait(lambda: search.is_done)
        return list(search.take())

    def loaded(self, found: Sequence[Found], places: Sequence[Sequence[int]], salt: str = "") -> list[bool]:
        load, ended = self.tier.load(salt, found, places), list[bool]()
        while len(ended) < len(found):
            wait(lambda: load.has_ended)
            ended += load.take_ended()
        assert not load.has_ended
        return ended


def whole(name: str) -> Piece:
    return piece(name, PIECE_BLOCKS)


def test_a_piece_returns_into_other_places() -> None:
    world = World()
    expected = world.bytes_at(WHOLE)
    world.offer(piece("a", 4, has_state=True))
    world.pools.fill(2)
    (found,) = world.found(piece("a", 4, has_state=True))
    assert found.sizes == tuple(map(len, expected)) and world.bytes_at(ELSEWHERE) != expected
    assert world.tier.seconds_to_load("", [found]) < 1
    assert world.loaded([found], [ELSEWHERE]) == [True]
    assert world.bytes_at(ELSEWHERE) == expected
    use = world.tier.use
    assert use.num_read_bytes == use.num_host_read_bytes == use.num_written_bytes == sum(found.sizes)
    assert use.num_host_bytes == world.store.num_bytes >= sum(found.sizes)


def test_a_windowed_piece_has_rows_without_content() -> None:
    world = World(layout="windowed")
    assert world.pools.num_groups == 4
    places, elsewhere = (0, 1, GONE, 3, GONE), (4, 2, GONE, 0, GONE)
    expected = world.bytes_at(places)
    world.offer(piece("a", 1), places)
    world.pools.fill(2)
    (found,) = world.found(piece("a", 1))
    assert found.sizes[0] == 2 * found.sizes[1] and [size > 0 for size in found.sizes] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert world.loaded([found], [elsewhere]) == [True]
    assert world.bytes_at(elsewhere) == expected


def test_nothing_is_kept_if_a_place_got_other_content_during_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def overwrite() -> None:
        world.erased[2] += 1
        world.pools.fill(3)

    monkeypatch.setattr(world, "before_copies", overwrite)
    world.offer(piece("a", 4))
    assert world.found(piece("a", 4)) == [] and world.tier.use.num_unwritten == 0
    assert world.store.num_bytes == 0


def test_nothing_is_copied_of_a_place_that_was_erased_before() -> None:
    world = World()
    places = (*WHOLE[:4], GONE)
    num_erased = world.num_erased

    def erased_later(given: Iterable[int]) -> int:
        found = num_erased(given)
        world.erased[2] += 1
        return found

    world.tier._num_erased = erased_later
    world.offer(piece("a", 4), places)
    assert world.found(piece("a", 4)) == [] and not world.streams


def test_a_flipped_bit_is_damaged_counted_and_not_loaded() -> None:
    world = World()
    world.offer(piece("a", 4))
    (found,) = world.found(piece("a", 4))
    with world.store.reading("", piece("a", 4)) as buffers:
        buffers[1][0][7] ^= 4
    before = world.bytes_at(ELSEWHERE)
    assert world.loaded([found], [ELSEWHERE]) == [False]
    assert world.tier.use.num_damaged == 1 and world.bytes_at(ELSEWHERE) == before
    assert world.found(piece("a", 4)) == []


def test_a_piece_that_was_evicted_by_now_is_not_loaded() -> None:
    world = World()
    world.offer(piece("a", 4))
    found = world.found(piece("a", 4))
    world.store.drop("", [piece("a", 4).key])
    assert world.loaded(found, [ELSEWHERE]) == [False] and world.tier.use.num_damaged == 0


def test_a_load_that_was_stopped_still_ends() -> None:
    world = World()
    world.offer(piece("a", 4))
    (found,) = world.found(piece("a", 4))
    world.tier._reading.submit(time.sleep, 0.05)
    load, ended = world.tier.load("", [found] * 3, [ELSEWHERE] * 3), list[bool]()
    load.stop()
    wait(lambda: (ended.extend(load.take_ended()), len(ended) == 3)[1])
    assert ended == [False] * 3


def test_what_is_used_least_recently_is_evicted_and_what_is_offered_again_counts_as_used() -> None:
    world = World(num_chunks=2)
    names = [f"{number}" for number in range(40)]
    for name in names:
        world.offer(piece("first", 4))
        world.offer(piece(name, 4))
    assert world.found(piece("first", 4)) and world.found(piece("39", 4)) and not world.found(piece("0", 4))
    assert world.store.num_bytes <= 2 * CHUNK


def test_a_chain_that_cannot_be_trusted_is_forgotten_also_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.offer(piece("a", 4), salt="tenant")
    world.offer(piece("b", 4), salt="tenant")
    world.tier.forget("tenant", [piece("a").key])
    assert world.found(piece("a", 4), salt="tenant") == [] and len(world.found(piece("b", 4), salt="tenant")) == 1
    keep = world.store.keep

    def forgotten_meanwhile(kept: module.HostStore) -> None:
        world.tier.forget("tenant", [piece("c").key])
        keep(kept)

    monkeypatch.setattr(world.store, "keep", forgotten_meanwhile)
    world.offer(piece("c", 4), salt="tenant")
    assert world.found(piece("c", 4), salt="tenant") == []
    monkeypatch.undo()
    world.offer(piece("c", 4), salt="tenant")
    assert len(world.found(piece("c", 4), salt="tenant")) == 1, "it may be computed anew"


def test_what_waits_to_be_copied_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED", 4)
    world, copy = World(), HostTier._copy
    may_go = False

    def slow(tier: HostTier, offered: module._Offered) -> None:
        wait(lambda: may_go)
        copy(tier, offered)

    monkeypatch.setattr(HostTier, "_copy", slow)
    for number in range(50):
        world.tier.offer("", piece(f"{number}", 4), WHOLE)
    may_go = True
    wait(lambda: world.tier.num_waiting == 0)
    assert world.tier.use.num_unwritten >= 50 - 6


def test_a_failing_copy_is_told_and_loses_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()

    def fail() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(world, "before_copies", fail)
    world.offer(piece("a", 4))
    assert "could not be copied to host memory" in caplog.text
    assert world.found(piece("a", 4)) == [] and len(world.store._free) * world.store._page_bytes > CHUNK // 2


# -- comparing ---------------------------------------------------------------------------------------------------------


def compared(world: World, piece: Piece, places: Sequence[int]) -> bool | None:
    comparison = world.tier.compare("", piece, places)
    wait(lambda: comparison.is_done)
    return comparison.take()


def written_wrong(world: World, piece: Piece) -> None:
    """Turn a bit of a piece in host memory, and write down the checksum of that."""
    kept = world.store._find("", (piece.key, piece.has_state))
    assert kept is not None
    kept.pages[0][3] ^= 1
    kept.checksum = kept.digest()


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_piece_that_was_written_wrong_ends_the_trust_in_all(tmp_path: Path, *, has_directory: bool) -> None:
    world = World(tmp_path / "kv" if has_directory else None)
    for name in "abc":
        world.offer(piece(name, 4))
    assert compared(world, piece("a", 4), WHOLE) is True
    assert compared(world, piece("a", 4), (*WHOLE[:4], GONE)) is True, "a row without bytes is not compared"
    assert compared(world, piece("x", 4), WHOLE) is None
    written_wrong(world, piece("a", 4))
    assert compared(world, piece("a", 4), WHOLE) is False
    assert not [name for name in "abc" if world.store.sizes("", piece(name, 4))]
    wait(lambda: not list(tmp_path.glob("kv/*/*/*.kv")))
    assert world.tier.use.num_distrusted == (6 if has_directory else 3) and world.tier.use.num_damaged == 0
    world.offer(piece("a", 4))
    assert compared(world, piece("a", 4), WHOLE) is True


def test_a_wrong_piece_of_the_directory_ends_the_trust_in_host_memory_too(tmp_path: Path) -> None:
    """Pieces that this engine computed behind it may follow from it."""
    writer, world = World(tmp_path / "kv"), World(tmp_path / "kv")
    writer.pools.fill(8)
    writer.offer(piece("a", 4))
    world.offer(piece("b", 4))
    assert compared(world, piece("a", 4), WHOLE) is False
    assert world.found(piece("b", 4)) == [] and world.tier.use.num_distrusted == 3


def test_what_was_offered_before_a_wrong_piece_was_found_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.offer(piece("a", 4))
    written_wrong(world, piece("a", 4))
    monkeypatch.setattr(world, "before_copies", lambda: monkeypatch.undo() or compared(world, piece("a", 4), WHOLE))
    for stream in world.streams:
        stream.before_copies = world.before_copies
    world.offer(piece("b", 4))
    assert world.store.num_bytes == 0


# -- in front of a directory -------------------------------------------------------------------------------------------


def test_what_host_memory_lacks_is_read_from_the_directory(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    expected = world.bytes_at(WHOLE)
    world.offer(piece("a", 4))
    read = world.tier.use.num_read_bytes
    world.store.drop("", [piece("a", 4).key])
    world.pools.fill(2)
    (found,) = world.found(piece("a", 4))
    assert world.tier.seconds_to_load("", [found]) < 1
    assert world.loaded([found], [ELSEWHERE]) == [True] and world.bytes_at(ELSEWHERE) == expected
    assert world.tier.use.num_read_bytes == read + sum(found.sizes)
    assert world.store.sizes("", piece("a", 4)) is None, "it goes to the pool alone"


def test_pieces_of_both_follow_one_another_in_order(tmp_path: Path) -> None:
    world = World(tmp_path / "kv", num_chunks=64)
    pieces = [whole(f"{number}") for number in range(5)]
    places = [*(number % BLOCKS for number in range(PIECE_BLOCKS)), GONE]
    for each in pieces:
        world.offer(each, places)
    for each in (pieces[1], pieces[2], pieces[4]):
        world.store.drop("", [each.key])
    found = world.found(*pieces)
    assert [each.piece for each in found] == pieces
    path = next((tmp_path / "kv").glob(f"*/*/{pieces[2].key.hex()}.kv"))
    path.write_bytes(path.read_bytes()[:-1])
    assert world.loaded(found, [places] * 5) == [True, True, False, True, True]
    assert world.tier.use.num_damaged == 1
    assert [each.piece for each in world.found(*pieces)] == pieces[:2], "a gap ends the search"


def test_a_search_ends_at_a_short_piece_and_at_a_gap(tmp_path: Path) -> None:
    world = World(tmp_path / "kv", num_chunks=64)
    places = [*(number % BLOCKS for number in range(PIECE_BLOCKS)), GONE]
    world.offer(whole("0"), places)
    world.offer(piece("short", 4), (*WHOLE[:4], GONE))
    world.offer(whole("2"), places)
    search = world.tier.seek("", [[whole("0")], [whole("1"), piece("short", 4)], [whole("2")]])
    wait(lambda: search.is_done)
    assert [each.piece for each in search.take()] == [whole("0"), piece("short", 4)]
    assert [each.piece for each in world.found(whole("0"), whole("1"), whole("2"))] == [whole("0")]


def test_if_all_is_in_host_memory_nobody_waits_for_the_directory(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a", 4))
    assert world.directory is not None
    world.directory._searching.submit(time.sleep, 0.5)
    assert world.tier.seek("", [[piece("a", 4)]]).is_done
    assert not world.tier.seek("", [[piece("b", 4)]]).is_done


def test_what_is_forgotten_leaves_the_directory_too(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a", 4))
    world.tier.forget("", [piece("a", 4).key])
    directory = world.directory
    assert directory is not None
    wait(lambda: directory.num_waiting == 0 and not world.found(piece("a", 4)))


# -- a directory alone -------------------------------------------------------------------------------------------------


def directory_of(world: World, folder: Path) -> DirectoryTier:
    opened: Callable[[], KVDirectory] = partial(KVDirectory, folder, 2**30)
    return DirectoryTier(opened, world.pools.device, world.num_erased, world.pools.num_groups, MODEL)


def test_a_device_that_copies_late_gives_a_directory_the_same_bytes(tmp_path: Path) -> None:
    world = World()
    tier, expected = directory_of(world, tmp_path / "kv"), world.bytes_at(WHOLE)
    tier.offer("", piece("a", 4, has_state=True), WHOLE)
    wait(lambda: tier.num_waiting == 0)
    world.pools.fill(2)
    search = tier.seek("", [[piece("a", 4, has_state=True)]])
    wait(lambda: search.is_done)
    (found,) = search.take()
    load = tier.load("", [found], [ELSEWHERE])
    wait(lambda: load.has_ended)
    assert load.take_ended() == [True] and world.bytes_at(ELSEWHERE) == expected


def test_a_directory_keeps_a_copy_although_its_place_is_used_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But nothing if it was used again during the copy. A damaged file writes nothing into the pool."""
    world = World()
    tier = directory_of(world, tmp_path / "kv")
    monkeypatch.setattr("inferd.engine.api.kv_store.segment._MOST_BYTES", 1000)
    copied = world.pools.device.fetch

    def overwritten_behind(*given: object) -> bool:
        is_copy = copied(*given)  # type: ignore[arg-type]
        world.pools.fill(9)
        return is_copy

    expected = world.bytes_at(WHOLE)
    monkeypatch.setattr(world.pools.device, "fetch", overwritten_behind)
    tier.offer("", piece("a", 4), WHOLE)
    wait(lambda: tier.num_waiting == 0)
    world.erased[1] += 1
    (path,) = (tmp_path / "kv").glob("*/*/*.kv")
    search = tier.seek("", [[piece("a", 4)]])
    wait(lambda: search.is_done)
    found = search.take()
    load = tier.load("", found, [ELSEWHERE])
    wait(lambda: load.has_ended)
    assert load.take_ended() == [True] and world.bytes_at(ELSEWHERE) == expected
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    world.pools.fill(4)
    before = world.bytes_at(ELSEWHERE)
    load = tier.load("", found, [ELSEWHERE])
    wait(lambda: load.has_ended)
    assert load.take_ended() == [False] and world.bytes_at(ELSEWHERE) == before
    monkeypatch.setattr(world.pools.device, "fetch", copied)
    monkeypatch.setattr(world, "before_copies", lambda: world.erased.update((0,)))
    for stream in world.streams:
        stream.before_copies = world.before_copies
    tier.offer("", piece("b", 4), WHOLE)
    wait(lambda: tier.num_waiting == 0)
    assert not list((tmp_path / "kv").glob("*/*/*.kv")) and tier.use.num_unwritten == 0

"""The tier in a directory: written behind the steps from a pool's memory, and read into another."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.cache.below import PIECE_BLOCKS, Found, Piece
from inferd.engine.cache.prefix import GONE
from inferd.engine.process import kv_tier as module
from inferd.engine.process.kv_tier import DirectoryTier
from tests.cpu.test_pool_memory import BLOCKS, Engine

MODEL = b"m" * 32
WHOLE = (0, 1, 2, 3, 6)
"""Two blocks of two groups each, and a checkpoint."""


class World:
    """A tier on a pool of its own."""

    def __init__(self, folder: Path, fingerprint: bytes = MODEL, quota_bytes: int = 2**30) -> None:
        self.file = MemoryFile(POOL_MEMORY)
        self.engine = Engine(self.file)
        opened = partial(KVDirectory, folder, quota_bytes)
        self.erased: Counter[int] = Counter()
        self.tier = DirectoryTier(opened, self.engine.memory, self.num_erased, 2, fingerprint)

    def num_erased(self, places: Iterable[int]) -> int:
        return sum(self.erased[place] for place in places)

    def fill(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for tensor in (self.engine.kv, self.engine.states):
            tensor.copy_(torch.randn(tensor.shape, generator=random))

    def offer(self, piece: Piece, places: Sequence[int], salt: str = "") -> None:
        """Offer a piece, and wait until the writing thread has seen it."""
        self.tier.offer(salt, piece, places)
        wait(lambda: self.tier.num_waiting == 0)

    def found(self, piece: Piece, salt: str = "") -> list[Found]:
        search = self.tier.seek(salt, [[piece]])
        wait(lambda: search.is_done)
        return list(search.take())

    def loaded(self, piece: Piece, places: Sequence[int], salt: str = "") -> list[bool]:
        load = self.tier.load(salt, self.found(piece, salt), [places])
        wait(lambda: load.has_ended)
        return list(load.take_ended())


def wait(is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def piece(name: str, num_blocks: int = 2, **options: bool) -> Piece:
    return Piece(name.encode().ljust(32), 0, num_blocks, **options)


def test_another_engine_reads_the_same_bytes_into_other_places(tmp_path: Path) -> None:
    first = World(tmp_path / "kv")
    first.fill(1)
    first.offer(piece("a", has_state=True), WHOLE)
    second = World(tmp_path / "kv")
    second.fill(2)
    (found,) = second.found(piece("a", has_state=True))
    block_bytes = [first.engine.kv[:planes, 0].nbytes for planes in (3, 2)]
    assert found.sizes == (*block_bytes, *block_bytes, first.engine.states[:, 0].nbytes)
    assert second.loaded(piece("a", has_state=True), (4, 5, 1, 0, 7)) == [True]
    for place, goal, planes in ((0, 4, 3), (1, 5, 2), (2, 1, 3), (3, 0, 2)):
        assert torch.equal(first.engine.kv[:planes, place], second.engine.kv[:planes, goal])
    assert torch.equal(first.engine.states[:, 3], second.engine.states[:, 4])
    assert second.tier.use.num_read_bytes == sum(found.sizes)
    assert second.tier.seconds_to_load("", [found]) < 1


def test_the_size_of_the_directory_counts_what_others_wrote_and_what_was_evicted(tmp_path: Path) -> None:
    def num_bytes() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*/*.kv"))

    first = World(tmp_path / "kv")
    assert first.tier.use.num_held_bytes == 0, "nothing is opened yet"
    first.offer(piece("a"), WHOLE)
    of_one = first.tier.use.num_held_bytes
    assert of_one == num_bytes() > 0
    second = World(tmp_path / "kv", quota_bytes=int(of_one * 2.5))
    assert second.found(piece("b")) == [] and second.tier.use.num_held_bytes == of_one
    for name in "bcd":
        second.offer(piece(name), WHOLE)
    assert second.tier.use.num_held_bytes == num_bytes() == 2 * of_one


def test_a_row_without_content_has_no_bytes(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), (0, GONE, 2, 3, GONE))
    (found,) = world.found(piece("a"))
    assert [size > 0 for size in found.sizes] == [True, False, True, True, False]


@pytest.mark.parametrize("other", ["model", "salt", "state", "key"])
def test_another_identity_finds_nothing(tmp_path: Path, other: str) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE, "tenant")
    asker = World(tmp_path / "kv", b"n" * 32) if other == "model" else world
    asked = piece("b" if other == "key" else "a", has_state=other == "state")
    assert asker.found(asked, "" if other == "salt" else "tenant") == []
    assert len(world.found(piece("a"), "tenant")) == 1


def test_nothing_is_kept_of_a_piece_whose_place_was_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "kv")
    world.tier.offer("", piece("z"), WHOLE)
    slow = time.sleep

    def overwrite(seconds: float) -> None:
        world.erased[2] += 1
        slow(seconds)

    wait(lambda: world.tier.num_waiting == 0)
    monkeypatch.setattr(module.time, "sleep", overwrite)
    world.offer(piece("a"), WHOLE)
    monkeypatch.undo()
    assert world.found(piece("a")) == [] and world.tier.use.num_unwritten == 0
    world.offer(piece("b"), (0, 1, 3, 4, GONE))
    assert len(world.found(piece("b"))) == 1


def test_a_damaged_piece_is_not_loaded_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE)
    (path,) = (tmp_path / "kv").glob("*/*/*.kv")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert world.loaded(piece("a"), (0, 1, 2, 3, 6)) == [False]
    assert world.tier.use.num_damaged == 1 and not path.exists()


def test_the_tier_says_which_pieces_are_there(tmp_path: Path) -> None:
    """A piece that was not written is neither there nor gone."""
    world, other = World(tmp_path / "kv"), World(tmp_path / "kv")
    world.tier.news, other.tier.news = deque(), deque()
    for each in (world, other):
        each.offer(piece("a"), WHOLE)
    assert list(world.tier.news) == list(other.tier.news) == [(piece("a"), True)]
    found = world.found(piece("a"))
    assert len(world.tier.news) == 1, "who asked knows what was found"
    (path,) = (tmp_path / "kv").glob("*/*/*.kv")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert world.loaded(piece("a"), WHOLE) == [False]
    assert world.tier.news.pop() == (piece("a"), False) and len(world.tier.news) == 1
    load = world.tier.load("", found, [WHOLE])
    wait(lambda: load.has_ended)
    assert world.tier.news.pop() == (piece("a"), False) and len(world.tier.news) == 1, "it is gone"
    assert world.found(piece("a")) == [] and world.tier.news.pop() == (piece("a"), False)
    small = World(tmp_path / "kv", quota_bytes=64)
    small.tier.news = deque()
    small.offer(piece("b"), WHOLE)
    assert list(small.tier.news) == []


def test_a_piece_that_is_gone_by_now_is_not_loaded(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE)
    found = world.found(piece("a"))
    for path in (tmp_path / "kv").glob("*/*/*.kv"):
        path.unlink()
    load = world.tier.load("", found, [WHOLE])
    wait(lambda: load.has_ended)
    assert load.take_ended() == [False]


def test_a_load_that_was_stopped_still_ends(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE)
    found = world.found(piece("a"))
    assert found
    world.tier._reading.submit(time.sleep, 0.05)
    load = world.tier.load("", found * 3, [WHOLE] * 3)
    load.stop()
    ended: list[bool] = []
    wait(lambda: (ended.extend(load.take_ended()), len(ended) == 3)[1])
    assert ended == [False] * 3


def test_a_search_ends_at_the_first_gap_and_at_a_short_piece(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    whole = [piece(f"whole {i}", PIECE_BLOCKS) for i in range(3)]
    places = [0, 1] * PIECE_BLOCKS + [GONE]
    for each in (whole[0], whole[2]):
        world.offer(each, places)
    world.offer(piece("short"), WHOLE)
    search = world.tier.seek("", [[whole[0]], [whole[1], piece("short")], [whole[2]]])
    wait(lambda: search.is_done)
    assert [found.piece for found in search.take()] == [whole[0], piece("short")]
    search = world.tier.seek("", [[whole[0]], [whole[1]], [whole[2]]])
    wait(lambda: search.is_done)
    assert [found.piece for found in search.take()] == [whole[0]]


def test_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "kv", quota_bytes=64)
    for name in "abc":
        world.offer(piece(name), WHOLE)
    assert world.tier.use.num_unwritten == 3
    assert caplog.text.count("KV directory") == 1


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED", 4)
    monkeypatch.setattr(module, "_WRITE_BYTES_PER_S", 1000.0)
    world = World(tmp_path / "kv")
    for number in range(50):
        world.tier.offer("", piece(f"{number}"), WHOLE)
    assert world.tier.use.num_unwritten >= 50 - 6
    for place in range(BLOCKS):
        world.erased[place] += 1


def test_an_engine_that_ends_waits_for_what_is_written_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "kv")
    monkeypatch.setattr(module, "_WRITE_BYTES_PER_S", 1e5)
    for number in range(3):
        world.tier.offer("", piece(f"{number}"), WHOLE)
    world.tier.wait_written(1e-9)
    assert world.tier.num_waiting, "nothing was written so soon"
    world.tier.wait_written(20)
    assert world.tier.num_waiting == 0 and all(world.found(piece(f"{number}")) for number in range(3))


def test_a_piece_is_offered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE)
    written = world.tier.use.num_written_bytes
    world.offer(piece("a"), WHOLE)
    other = World(tmp_path / "kv")
    other.offer(piece("a"), WHOLE)
    assert written > 0 and world.tier.use.num_written_bytes == written and other.tier.use.num_written_bytes == 0


def test_a_chain_that_cannot_be_trusted_is_removed_also_what_waits(tmp_path: Path) -> None:
    world = World(tmp_path / "kv")
    world.offer(piece("a"), WHOLE, "tenant")
    world.offer(piece("b"), WHOLE, "tenant")
    world.tier.offer("tenant", piece("a", has_state=True), WHOLE)
    world.tier.forget("tenant", [piece("a").key])
    wait(lambda: world.tier.num_waiting == 0 and not world.found(piece("a", has_state=True), "tenant"))
    assert world.found(piece("a"), "tenant") == [] and len(world.found(piece("b"), "tenant")) == 1
    world.offer(piece("a"), WHOLE, "tenant")
    assert len(world.found(piece("a"), "tenant")) == 1, "it may be computed anew"


def test_a_model_is_cleared_and_others_stay(tmp_path: Path) -> None:
    """Pieces that were offered before go too, and those of other servers. Later ones are written."""
    world, other, model = (World(tmp_path / "kv", name * 32) for name in (b"m", b"m", b"n"))
    world.tier.news = deque()
    other.offer(piece("a"), WHOLE, "tenant")
    model.offer(piece("a"), WHOLE)
    world.offer(piece("b", has_state=True), WHOLE)
    world.tier.offer("", piece("c"), WHOLE)
    world.tier.clear()
    wait(lambda: (None, False) in (world.tier.news or ()))
    assert [world.found(piece(name), salt) for name, salt in (("a", "tenant"), ("c", ""))] == [[], []]
    assert world.found(piece("b", has_state=True)) == [] and len(model.found(piece("a"))) == 1
    left = sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*/*.kv"))
    assert world.tier.use.num_held_bytes == left > 0
    world.offer(piece("c"), WHOLE)
    assert len(world.found(piece("c"))) == 1


def test_a_directory_that_cannot_be_opened_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    folder.write_text("a file")
    world = World(folder)
    world.offer(piece("a"), WHOLE)
    assert world.found(piece("a")) == [] and world.tier.use.num_unwritten == 1
    assert caplog.text.count("must be a directory") == 1
    folder.unlink()
    monkeypatch.setattr(module, "_TELL_AFTER_S", 0.0)
    world.offer(piece("a"), WHOLE)
    assert len(world.found(piece("a"))) == 1

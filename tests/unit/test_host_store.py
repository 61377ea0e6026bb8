"""The host memory of KV pieces: bounded, checked on every read, evicted by use, and shared fairly by tenants."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from random import Random

import pytest

from inferd.engine.api.kv_store.segment import Damaged, Missing, NotWritten
from inferd.engine.cache.below import Piece
from inferd.engine.process import host_store as module
from inferd.engine.process.host_store import HostStore, Kept

PAGE, CHUNK = 64, 1024
PAGES = CHUNK // PAGE


class Store(HostStore):
    """One of small chunks."""

    def __init__(self, num_chunks: int = 1, fails_after: int = 1000) -> None:
        self.chunks: list[memoryview] = []
        self._fails_after = fails_after
        super().__init__(num_chunks * CHUNK, PAGE, self.made, CHUNK)

    def made(self, num_bytes: int) -> memoryview:
        if len(self.chunks) == self._fails_after:
            raise RuntimeError("out of memory")
        assert num_bytes == CHUNK
        self.chunks.append(memoryview(bytearray(num_bytes)))
        return self.chunks[-1]

    def add(self, name: str, sizes: Sequence[int] = (PAGE,), salt: str = "", **options: bool) -> Kept:
        kept = self.reserve(salt, piece(name, **options), sizes)
        fill(kept, name)
        self.keep(kept)
        return kept

    def read(self, name: str, salt: str = "") -> bytes:
        with self.reading(salt, piece(name)) as buffers:
            return b"".join(bytes(part) for row in buffers for part in row)

    def has(self, *names: str, salt: str = "") -> list[bool]:
        return [self.sizes(salt, piece(name)) is not None for name in names]

    def check(self) -> None:
        """Every page is free or of one piece."""
        pages = [*self._free, *(page for of in self._by_tenant.values() for kept in of.values() for page in kept.pages)]
        addresses = {ctypes.addressof(ctypes.c_char.from_buffer(page)) for page in pages}
        assert len(addresses) == len(pages) == PAGES * len(self.chunks)
        assert self.num_bytes == PAGE * (len(pages) - len(self._free))
        assert self.num_bytes == sum(self._bytes_of.values())


def piece(name: str, **options: bool) -> Piece:
    return Piece(name.encode().ljust(32), 0, 1, **options)


def content(name: str, num_bytes: int) -> bytes:
    return Random(name).randbytes(num_bytes)


def fill(kept: Kept, name: str) -> None:
    left = content(name, sum(kept.sizes))
    for row in kept.buffers:
        for part in row:
            part[:] = left[: len(part)]
            left = left[len(part) :]
    assert not left


def test_a_piece_has_the_bytes_that_were_written() -> None:
    store, sizes = Store(), (3 * PAGE + 1, 0, PAGE, 5)
    store.add("a", sizes)
    assert store.sizes("", piece("a")) == sizes and store.read("a") == content("a", sum(sizes))
    assert store.num_bytes == 6 * PAGE, "rows take whole pages"
    store.check()


def test_memory_is_allocated_when_it_is_needed_and_no_more_than_asked() -> None:
    store = Store(3)
    assert store.chunks == []
    for number in range(100):
        store.add(f"{number}", (2 * PAGE,))
        store.check()
    assert len(store.chunks) == 3 and store.num_bytes == 3 * CHUNK
    assert store.has("99", "76", "75") == [True, True, False]


@pytest.mark.parametrize("other", ["salt", "state", "key"])
def test_another_identity_finds_nothing(other: str) -> None:
    store = Store()
    store.add("a", salt="tenant", has_state=False)
    asked = piece("b" if other == "key" else "a", has_state=other == "state")
    assert store.sizes("" if other == "salt" else "tenant", asked) is None
    assert store.has("a", salt="tenant") == [True]


def test_a_piece_is_found_once_it_is_complete() -> None:
    store = Store()
    kept = store.reserve("", piece("a"), (PAGE,))
    assert store.has("a") == [False]
    fill(kept, "a")
    store.keep(kept)
    assert store.has("a") == [True]
    given = store.reserve("", piece("b"), (PAGE,))
    store.give_back(given)
    store.check()


def test_the_second_of_two_equal_pieces_is_given_back() -> None:
    store = Store()
    store.add("a")
    store.add("a")
    store.check()
    assert store.num_bytes == PAGE


@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, 2 * PAGE - 1])
def test_any_flipped_bit_is_found_and_the_piece_is_dropped(at: int) -> None:
    store = Store()
    store.add("other")
    kept = store.add("a", (PAGE, PAGE))
    kept.pages[at // PAGE][at % PAGE] ^= 1 << at % 8
    with pytest.raises(Damaged, match="checksum"):
        store.read("a")
    assert store.has("a", "other") == [False, True]
    store.check()
    with pytest.raises(Missing):
        store.read("a")


def test_what_was_used_least_recently_is_evicted() -> None:
    store, names = Store(), [f"{number}" for number in range(PAGES)]
    for name in names:
        store.add(name)
    store.read("0")
    assert store.renew("", piece("1")) and not store.renew("", piece("x"))
    store.add("new", (2 * PAGE,))
    assert store.has("0", "1", "2", "3", "4", "new") == [True, True, False, False, True, True]
    store.check()


def test_the_tenant_with_the_most_bytes_loses_its_pieces_first() -> None:
    """One that floods the memory evicts nothing of others."""
    store = Store()
    for number in range(3):
        store.add(f"{number}", salt="quiet")
    for number in range(10 * PAGES):
        store.add(f"{number}", salt="loud")
        store.check()
    assert store.has("0", "1", "2", salt="quiet") == [True] * 3
    for number in range(PAGES):
        store.add(f"{number}", salt="second")
    of = {salt: sum(store.has(*map(str, range(10 * PAGES)), salt=salt)) for salt in ("quiet", "loud", "second")}
    assert of["quiet"] == 3 and abs(of["loud"] - of["second"]) <= 1


def test_a_piece_that_is_larger_than_the_memory_evicts_nothing() -> None:
    store = Store()
    store.add("a")
    with pytest.raises(NotWritten, match="takes 17 pages of 64 bytes"):
        store.reserve("", piece("b"), ((PAGES + 1) * PAGE,))
    assert store.has("a") == [True]


def test_if_the_system_has_no_more_memory_what_there_is_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(4, fails_after=2)
    for number in range(10 * PAGES):
        store.add(f"{number}")
    assert len(store.chunks) == 2 and store.num_bytes == 2 * CHUNK
    assert caplog.text.count("gets no more memory than 2048 bytes") == 1
    none = Store(4, fails_after=0)
    with pytest.raises(NotWritten):
        none.add("a")


def test_what_is_read_stays_as_it_is_until_then() -> None:
    """Evicted and dropped meanwhile: its pages are free only behind the reader."""
    store = Store()
    store.add("a", (4 * PAGE,))
    with store.reading("", piece("a")) as buffers:
        store.drop("", [piece("a").key])
        assert store.has("a") == [False]
        with pytest.raises(NotWritten):
            store.reserve("", piece("b"), (PAGES * PAGE,))
        store.add("c", ((PAGES - 4) * PAGE,))
        assert b"".join(bytes(part) for row in buffers for part in row) == content("a", 4 * PAGE)
    store.check()
    store.add("b", (PAGES * PAGE,))
    store.check()


def test_all_that_ends_at_a_key_is_dropped() -> None:
    store = Store()
    kept = store.add("a", salt="tenant", has_state=True)
    store.add("a", salt="tenant")
    store.add("a")
    store.drop("tenant", [piece("a").key, piece("b").key])
    assert store.has("a", salt="tenant") == [False] and store.has("a") == [True]
    store.take_back(kept)
    store.check()


def test_chunks_are_a_power_of_two_that_many_pages_fill() -> None:
    """torch rounds pinned memory up to a power of two."""
    for page in (100, 4096, 10 * 2**20):
        sizes: list[int] = []

        def made(num_bytes: int, sizes: list[int] = sizes) -> memoryview:
            sizes.append(num_bytes)
            return memoryview(bytearray(num_bytes))

        store = HostStore(3 * 2**27, page, made)
        store.give_back(store.reserve("", piece("a"), (page,)))
        assert sizes[0].bit_count() == 1 and sizes[0] % page < sizes[0] / module._LEAST_PAGES
        assert store._num_chunks_left == 3 * 2**27 // sizes[0] - 1


def test_a_writer_a_reader_and_one_that_drops_agree() -> None:
    store, errors = Store(2), list[BaseException]()
    names = [f"{number}" for number in range(40)]

    def work(seed: int, act: str) -> None:
        random = Random(seed)
        try:
            for _ in range(4000):
                name = random.choice(names)
                if act == "write":
                    store.add(name, (random.randrange(1, 5 * PAGE),))
                elif act == "drop":
                    store.drop("", [piece(name).key])
                    store.renew("", piece(name))
                else:
                    try:
                        with store.reading("", piece(name)) as buffers:
                            read = b"".join(bytes(part) for row in buffers for part in row)
                            assert read == content(name, len(read))
                    except Missing:
                        pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(("write", "read", "drop"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store.check()

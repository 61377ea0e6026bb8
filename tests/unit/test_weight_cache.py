"""Entries of packed weights: whole or not there, found damaged wherever a byte changes, and bounded."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api import weight_cache
from inferd.engine.api.files import cache_folder
from inferd.engine.api.weight_cache import Contents, Entry, Parameter, Piece, label_of, name_of

PIECES = (bytes(range(256)) * 5000, b"odd", b"", b"\x07" * 70)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def contents(pieces: Sequence[bytes] = PIECES, label: str = "a model") -> Contents:
    described = tuple(Piece("uint8", (len(piece),)) for piece in pieces)
    parameters = (Parameter("norm", 3), Parameter("matrix", None))
    return Contents(label=label, pieces=described, num_packed=3, parameters=parameters)


def write(name: str = "a", pieces: Sequence[bytes] = PIECES, label: str = "") -> Path:
    entry = Entry(name, 2)
    assert entry.open() is None
    assert entry.may_write
    entry.write(contents(pieces, label or name), [memoryview(piece) for piece in pieces])
    return cache_folder("weights") / f"{name}.weights"


def read(name: str = "a") -> list[bytes] | None:
    entry = Entry(name, 2)
    found = entry.open()
    entry.release()
    if found is None:
        return None
    sizes = (piece.shape[0] for piece in found.contents.pieces)
    assert all(offset % 64 == 0 for offset in found.offsets)
    return [bytes(found.pages[at : at + size]) for at, size in zip(found.offsets, sizes, strict=True)]


def test_what_was_written_is_read() -> None:
    path = write(label="a model")
    assert read() == list(PIECES)
    assert Entry("a", 1).open().contents == contents()  # type: ignore[union-attr]
    assert label_of(path) == "a model"
    assert [file.name for file in path.parent.iterdir()] == ["a.weights"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_changed_byte_is_found_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    path = write()
    whole = path.read_bytes()
    size = len(whole)
    for place in (0, 1, 999_999, 2**20, sum(map(len, PIECES)) - 1, size - 60, size - 50, size - 20, size - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert read() is None, place
        assert not path.exists(), "what is damaged goes"
        path.write_bytes(whole)
        assert read() == list(PIECES)
    assert "is damaged" in caplog.text


def test_a_file_of_another_version_is_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.setattr(weight_cache, "_Index", Piece)
    assert label_of(path) == ""
    assert read() is None


@pytest.mark.parametrize("size", [0, 10, 60, 2**20, -1, -30])
def test_a_file_that_was_cut_is_found(size: int) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:size])
    assert read() is None


def test_another_that_wants_the_same_waits_until_it_is_there() -> None:
    first, found = Entry("a", 1), list[Any]()
    assert first.open() is None
    other = threading.Thread(target=lambda: found.append(Entry("a", 1).open()))
    other.start()
    time.sleep(0.3)
    assert not found, "it waits"
    first.write(contents(), [memoryview(piece) for piece in PIECES])
    other.join(10)
    assert found[0].contents == contents()


def test_another_may_write_if_the_first_does_not() -> None:
    first, second = Entry("a", 1), Entry("a", 1)
    assert first.open() is None
    other = threading.Thread(target=second.open)
    other.start()
    time.sleep(0.3)
    assert not second.may_write
    first.release()
    other.join(10)
    assert second.may_write
    second.release()


def test_what_a_killed_writer_left_is_written_anew() -> None:
    child = os.fork()
    if not child:
        Entry("a", 1).open()
        (cache_folder("weights") / "a.part").write_bytes(b"half")
        os._exit(0)  # its lock ends with it
    os.waitpid(child, 0)
    assert write().exists()
    assert read() == list(PIECES)


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, written = Entry("a", 1), 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += 1
        if written > 1:
            raise OSError(28, "No space left on device")
        return len(data)

    assert entry.open() is None
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        entry.write(contents(), [memoryview(piece) for piece in PIECES])
    assert written == 2
    assert not list(cache_folder("weights").iterdir())


def test_an_entry_takes_at_most_half_of_the_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    free = sum(map(len, PIECES))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free})())
    entry = Entry("a", 1)
    assert entry.open() is None
    with pytest.raises(OSError, match="more than half of the"):
        entry.write(contents(), [memoryview(piece) for piece in PIECES])


def test_what_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "MAX_BYTES", 3 * sum(map(len, PIECES)))
    paths = [write(name) for name in ("a", "b")]
    for path, used_s in zip(paths, (1_000, 2_000), strict=True):
        os.utime(path, (used_s, used_s))
    assert read("a") is not None, "used now"
    write("c")
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["a.weights", "c.weights"]


def test_an_entry_replaces_those_of_other_code() -> None:
    old, other, new = (write(name, label=label) for name, label in (("a", "m"), ("b", "n"), ("c", "m")))
    assert [path.exists() for path in (old, other, new)] == [False, True, True]
    other.write_bytes(b"damaged")
    being_written = Entry("d", 1)
    assert being_written.open() is None
    write("e")
    assert sorted(path.name for path in new.parent.iterdir()) == ["c.weights", "d.part", "e.weights"]
    being_written.release()


def test_a_folder_that_others_may_write_to_is_not_used() -> None:
    write().parent.chmod(0o777)
    with pytest.raises(OSError, match="others may write to it"):
        Entry("a", 1).open()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = write()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        Entry("a", 1).open()


def test_the_name_follows_from_all_parts() -> None:
    assert len({name_of(parts) for parts in (("a", "b"), ("ab", ""), ("a", "c"), ("b", "a"), ("a",))}) == 5
    assert name_of(("a",)) == name_of(("a",))


def test_no_room_is_said_before_anything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise others would wait for an entry that never appears."""
    monkeypatch.setattr(weight_cache, "MAX_BYTES", 1000)
    with pytest.raises(OSError, match="free there"):
        Entry("a", 1).open(1001)
    entry = Entry("a", 1)
    assert entry.open(1000) is None
    assert entry.may_write
    entry.release()


def test_one_that_may_not_wait_packs_for_itself() -> None:
    first, second = Entry("a", 1), Entry("a", 1)
    assert first.open() is None
    assert second.open(may_wait=False) is None
    assert not second.may_write
    first.release()


def test_a_name_that_was_removed_meanwhile_is_not_renamed() -> None:
    """Another process would have written a file of the same name since."""
    entry = Entry("a", 1)
    assert entry.open() is None
    part = cache_folder("weights") / "a.part"
    part.unlink()
    part.write_bytes(b"of another")
    with pytest.raises(OSError, match="was removed"):
        entry.write(contents(), [memoryview(piece) for piece in PIECES])
    assert part.read_bytes() == b"of another" and not part.with_suffix(".weights").exists()


def test_a_size_that_leaves_no_place_for_the_index_is_damage() -> None:
    path = write()
    whole = bytearray(path.read_bytes())
    place = len(whole) - weight_cache._TAIL_BYTES
    whole[place : place + 8] = (len(whole) - 20).to_bytes(8, "little")
    path.write_bytes(whole)
    assert read() is None and not path.exists()


def test_an_unreadable_page_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = write(), os.preadv

    def unreadable(descriptor: int, buffers: Any, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", unreadable)
    assert read() is None and not path.exists()

"""A directory that cannot be used is refused in one line that says rule, value and way out, and is left as it was."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import StartError
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.listing import MARK
from inferd.engine.api.kv_store.opening import existing
from inferd.engine.api.kv_store.segment import NotWritten
from tests.unit.kv_samples import PLENTY, content_of, path_of, read, segment, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def a_file(root: Path) -> None:
    root.write_bytes(b"mine")


def a_fifo(root: Path) -> None:
    os.mkfifo(root)


def below_a_file(root: Path) -> None:
    root.parent.rmdir()
    root.parent.write_bytes(b"mine")


def a_link(root: Path) -> None:
    target = root.with_name("target")
    KVDirectory(target, PLENTY).close()
    root.symlink_to(target)


def a_link_to_nothing(root: Path) -> None:
    root.symlink_to("nowhere")


def with_other_files(root: Path) -> None:
    root.mkdir()
    (root / "letter.txt").write_bytes(b"mine")


def with_another_format(root: Path) -> None:
    KVDirectory(root, PLENTY).close()
    mark = json.loads((root / MARK).read_text())
    (root / MARK).write_text(json.dumps({**mark, "format": 7}))


def with_a_mark_of_something_else(root: Path) -> None:
    root.mkdir()
    (root / MARK).write_text('{"kind": "letters", "format": 1}')


def with_a_damaged_mark(root: Path) -> None:
    root.mkdir()
    (root / MARK).write_bytes(b'{"kind": "inferd\xff')


def with_an_empty_mark(root: Path) -> None:
    root.mkdir()
    (root / MARK).touch()


def with_a_fifo_as_mark(root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / MARK)


def with_a_folder_as_mark(root: Path) -> None:
    (root / MARK).mkdir(parents=True)


def with_a_link_as_mark(root: Path) -> None:
    root.mkdir()
    (root / MARK).symlink_to("letter.txt")


def writable_by_the_group(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)


def writable_by_others(root: Path) -> None:
    KVDirectory(root, PLENTY).close()
    root.chmod(0o702)


BAD: dict[Callable[[Path], None], str] = {
    a_file: r"must be a directory, but PATH is a file: give an empty directory or a new one",
    a_fifo: r"must be a directory, but PATH is a file: give an empty directory or a new one",
    below_a_file: r"PATH cannot be used \(Not a directory\): give an empty directory or a new one",
    a_link: r"must not be a symbolic link, but PATH is one: give the directory that it leads to, .*/target",
    a_link_to_nothing: r"must not be a symbolic link, but PATH is one: give the directory that it leads to, .*/nowhere",
    with_other_files: r"must be empty or have the file inferd-kv.json, but PATH has other files \(1, among them "
    r"letter.txt\): give an empty directory or a new one, such as PATH/inferd-kv",
    with_another_format: r"must have format 1, but PATH has format 7 of another version of inferd: give an empty",
    with_a_mark_of_something_else: r"must be what inferd wrote, but it is of 'letters': give an empty directory",
    with_a_damaged_mark: r"PATH/inferd-kv.json must be what inferd wrote, but it is damaged \(.*\): give an empty",
    with_an_empty_mark: r"PATH/inferd-kv.json must be what inferd wrote, but it is damaged \(.*\): give an empty",
    with_a_fifo_as_mark: r"PATH/inferd-kv.json must be what inferd wrote, but it is damaged \(.*\): give an empty",
    with_a_folder_as_mark: r"PATH cannot be used \(Is a directory\): give an empty directory",
    with_a_link_as_mark: r"PATH cannot be used \(Too many levels of symbolic links\): give an empty directory",
    writable_by_the_group: r"only its owner may be able to write .*, but the mode of PATH is 0770: chmod 700 PATH",
    writable_by_others: r"only its owner may be able to write .*, but the mode of PATH is 0702: chmod 700 PATH",
}
"""A way to make a bad directory, and what the message says."""


def tree(folder: Path) -> list[tuple[str, int, bytes]]:
    """Everything below a folder."""
    paths = sorted(folder.rglob("*"))
    return [(str(path), path.lstat().st_mode, path.read_bytes() if path.is_file() else b"") for path in paths]


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_directory_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    root = tmp_path / "above" / "kv"
    root.parent.mkdir()
    make(root)
    before, num_open = tree(tmp_path), len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartError) as raised:
        KVDirectory(root, PLENTY)
    message = str(raised.value)
    assert re.search(BAD[make].replace("PATH", re.escape(str(root))), message), message
    assert "\n" not in message
    assert tree(tmp_path) == before
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_directory_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KVDirectory(root, PLENTY).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(
        StartError, match=rf"must belong to user 4242, .* but {root} belongs to user \d+: give an empty"
    ):
        KVDirectory(root, PLENTY)


FULL = "must have free space"
CLOSED = "must be able to read and write"


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, FULL), (errno.EDQUOT, FULL), (errno.EROFS, CLOSED), (errno.EACCES, CLOSED),
        (errno.EPERM, CLOSED), (errno.EIO, "cannot be used"),
    ],
)  # fmt: skip
def test_a_disk_that_takes_nothing_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str, is_new: bool
) -> None:
    if not is_new:
        KVDirectory(root, PLENTY).close()
    before, num_open = tree(root), len(os.listdir("/proc/self/fd"))
    for call in ("mkdir", "write", "open", "link", "fsync"):
        if call in ("mkdir", "link", "fsync") and not is_new:
            continue
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing(getattr(os, call), number))
            with pytest.raises(StartError, match=told) as raised:
                KVDirectory(root, PLENTY)
        assert str(root) in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(os.listdir("/proc/self/fd")) == num_open
        if is_new:
            assert not root.exists() or [path.name for path in root.iterdir()] in ([], [MARK])
            (root / MARK).unlink(missing_ok=True)
        else:
            assert tree(root) == before


def failing(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The system's call, but it fails if it would change something."""

    def fail(*given: Any, **named: Any) -> Any:
        if call.__name__ == "open" and not given[1] & os.O_CREAT:
            return call(*given, **named)
        raise OSError(number, os.strerror(number))

    return fail


def test_a_disk_that_takes_a_name_but_no_bytes_is_full(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KVDirectory(root, PLENTY).close()
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content) // 2)
    with pytest.raises(StartError, match="must have free space"):
        KVDirectory(root, PLENTY)


def test_a_missing_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "some" / "where" / "kv"
    KVDirectory(root, PLENTY).close()
    assert root.stat().st_mode & 0o777 == 0o700
    assert json.loads((root / MARK).read_text()) == {"kind": "inferd KV segments", "format": 1}
    assert [path.name for path in root.iterdir()] == [MARK]


def test_an_empty_directory_is_taken(root: Path) -> None:
    root.mkdir(mode=0o755)
    KVDirectory(root, PLENTY).close()
    assert [path.name for path in root.iterdir()] == [MARK]


def test_what_a_killed_start_left_does_not_matter(root: Path) -> None:
    root.mkdir()
    (root / f"{MARK}.0123456789abcdef.part").write_bytes(b"{")
    KVDirectory(root, PLENTY).close()
    assert (root / MARK).exists()


def test_servers_that_start_at_once_share_the_directory(root: Path) -> None:
    for number in range(20):
        folder = root / str(number)
        with ThreadPoolExecutor(4) as pool:
            opened = list(pool.map(lambda _, folder=folder: KVDirectory(folder, PLENTY), range(4)))
        write(opened[0], segment())
        assert [read(each, segment()) for each in opened] == [content_of(segment())] * 4
        for each in opened:
            each.close()


def test_another_server_may_mark_the_directory_while_this_one_looks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no mark, and then the files of the other server."""
    listdir = os.listdir

    def slow(descriptor: int) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        other = KVDirectory(root, PLENTY)
        write(other, segment())
        other.close()
        return listdir(descriptor)

    monkeypatch.setattr(os, "listdir", slow)
    directory = KVDirectory(root, PLENTY)
    assert read(directory, segment()) == content_of(segment())
    directory.close()


def test_the_open_directory_stays_if_its_path_leads_elsewhere(tmp_path: Path, root: Path) -> None:
    directory = KVDirectory(root, PLENTY)
    root.rename(tmp_path / "moved")
    target = tmp_path / "target"
    target.mkdir()
    root.symlink_to(target)
    write(directory, segment())
    assert path_of(tmp_path / "moved", segment()).exists()
    assert list(target.iterdir()) == []
    directory.close()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: None, "the directory of KV segments must exist, but PATH does not: give one that"),
        (
            lambda root: root.mkdir(),
            "must have the file inferd-kv.json, but PATH has none: give one that a server wrote",
        ),
        (with_another_format, "must have format 1, but PATH has format 7"),
        (a_link, "must not be a symbolic link"),
        (a_file, "must be a directory, but PATH is a file"),
    ],
)
def test_a_command_refuses_what_no_server_made(root: Path, make: Callable[[Path], None], told: str) -> None:
    make(root)
    with pytest.raises(StartError, match=told.replace("PATH", str(root))), existing(root):
        pass


def test_a_command_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a directory on a disk that is full or read-only, and one of another user."""
    KVDirectory(root, PLENTY).close()
    before = tree(root)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with existing(root) as descriptor:
        assert os.listdir(descriptor) == [MARK]
    assert tree(root) == before


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory, or a skipped test."""
    folder.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o {options} tmpfs {folder} 2>/dev/null"):
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        os.system(f"umount -l {folder}")


def test_a_full_disk_and_a_read_only_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k,mode=700"):
        directory = KVDirectory(disk / "kv", PLENTY)

        def fill() -> None:
            for number in range(100):
                write(directory, segment(number))

        with pytest.raises(NotWritten, match="No space left on device"):
            fill()
        assert list(disk.rglob("*.part")) == []
        assert read(directory, segment(0)) == content_of(segment(0))
        with pytest.raises(StartError, match="must have free space"):
            KVDirectory(disk / "kv", PLENTY)
        directory.close()
        assert not os.system(f"mount -o remount,ro {disk}")
        with pytest.raises(StartError, match="must be able to read and write"):
            KVDirectory(disk / "kv", PLENTY)
        with existing(disk / "kv") as descriptor:
            assert MARK in os.listdir(descriptor)

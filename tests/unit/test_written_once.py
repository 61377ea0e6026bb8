"""A file in memory that the first process that needs it writes, and that nobody changes afterwards."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferd.engine.api.process import written_once
from inferd.engine.api.process.written_once import WrittenOnce, content_of, is_written

CONTENT = bytes(range(256)) * 40

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such files")


def refuse() -> bytes:
    raise AssertionError("it was written already")


def test_of_all_that_need_it_one_makes_it() -> None:
    once, made, start = WrittenOnce(), [], threading.Barrier(8)

    def make() -> bytes:
        made.append(1)
        return CONTENT

    def read(_: int) -> bytes:
        start.wait()
        return bytes(content_of(once.path, make))

    assert not is_written(once.path)
    with ThreadPoolExecutor(8) as readers:
        assert set(readers.map(read, range(8))) == {CONTENT}
    assert made == [1] and is_written(once.path)
    assert content_of(once.path, refuse) == CONTENT


def test_nobody_changes_it_afterwards() -> None:
    once = WrittenOnce()
    view = content_of(once.path, lambda: CONTENT)
    assert view.readonly
    descriptor = os.open(once.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    del once
    assert view == CONTENT, "it stays while it is mapped"


def test_after_the_death_of_a_writer_another_one_writes_it() -> None:
    once = WrittenOnce()
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:

        def never() -> bytes:
            os.write(int(once.path.rpartition("/")[2]), b"half of it")
            os.write(started, b"x")
            signal.pause()
            return b""

        try:
            content_of(once.path, never)
        finally:
            os._exit(1)
    os.close(started)
    assert os.read(ready, 1) == b"x", "the writer died before it began"
    with ThreadPoolExecutor(1) as reader:
        content = reader.submit(content_of, once.path, lambda: CONTENT)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert content.result(timeout=60) == CONTENT
    os.close(ready)


def test_a_process_that_waited_long_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_once, "_MAX_WAIT_S", 0.0)
    once = WrittenOnce()
    contents = []

    def make() -> bytes:
        contents.append(content_of(once.path, lambda: b"own"))
        return CONTENT

    assert content_of(once.path, make) == CONTENT
    assert contents == [b"own"]


def test_an_error_of_the_maker_leaves_it_to_the_next() -> None:
    once = WrittenOnce()
    with pytest.raises(AssertionError):
        content_of(once.path, refuse)
    assert not is_written(once.path)
    assert content_of(once.path, lambda: CONTENT) == CONTENT


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_another_file_that_has_the_path_now_is_left_alone(kind: str, tmp_path: Path) -> None:
    once = WrittenOnce()
    path, descriptor = once.path, int(once.path.rpartition("/")[2])
    del once
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) if kind == "file" else os.memfd_create("other")
    if other != descriptor:
        os.dup2(other, descriptor)
    os.write(descriptor, b"theirs")
    assert not is_written(path)
    assert content_of(path, lambda: CONTENT) == CONTENT
    assert os.pread(descriptor, 100, 0) == b"theirs"
    for each in {other, descriptor}:
        os.close(each)


def test_without_such_files_each_process_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(written_once.os, "memfd_create", fail)
    once = WrittenOnce()
    assert once.path == "" and not is_written(once.path)
    assert content_of(once.path, lambda: CONTENT) == CONTENT
    assert content_of("/proc/1/fd/none", lambda: b"own") == b"own"

"""A process that is killed while it writes, evicts or opens leaves nothing that a reader could take for a segment.

A fork kills itself with SIGKILL before each call of the system that the work makes, and halfway through each write.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.kv_store import segment as files
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.listing import LEFT_AFTER_S
from tests.unit.kv_samples import (
    FILE_BYTES,
    content_of,
    ended,
    forked,
    is_there,
    listing_of,
    read,
    segment,
    verified,
    write,
)

QUOTA_BYTES = 4 * FILE_BYTES
CALLS = ("open", "mkdir", "stat", "utime", "pwritev", "write", "fsync", "close", "link", "unlink", "scandir", "listdir")


def killed_at(point: int, run: Callable[[], object]) -> bool:
    """Run something in a fork that kills itself before the call of this number. False if it makes fewer calls."""

    def doomed() -> None:
        num_made = 0

        def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def one(*given: Any, **named: Any) -> Any:
                nonlocal num_made
                if name in ("pwritev", "write"):
                    if num_made == point:
                        half = given[1][: len(given[1]) // 2] if name == "write" else _half(given[1])
                        call(given[0], half, *given[2:])
                        os.kill(os.getpid(), signal.SIGKILL)
                    num_made += 1
                if num_made == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                num_made += 1
                return call(*given, **named)

            return one

        for name in CALLS:
            setattr(os, name, wrapped(name, getattr(os, name)))
        for name in ("xxh3_128", "xxh3_128_digest"):
            setattr(files, name, wrapped(name, getattr(files, name)))
        run()

    code = ended(forked(doomed))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def _half(pieces: list[memoryview]) -> list[memoryview]:
    return [*pieces[: len(pieces) // 2], pieces[len(pieces) // 2][:1]]


def age_parts(root: Path) -> int:
    """Make all parts older than those of a process that still writes. Returns their number."""
    parts = list(root.rglob("*.part"))
    for part in parts:
        os.utime(part, (time.time() - LEFT_AFTER_S - 5,) * 2)
    return len(parts)


def test_a_killed_writer_leaves_nothing_torn(tmp_path: Path) -> None:
    """The write also evicts, because the quota is used up."""
    num_parts, num_written = 0, 0
    for point in count():
        root = tmp_path / str(point)
        directory, some = KVDirectory(root, QUOTA_BYTES), segment(9, tenant=1)
        for number in range(4):
            write(directory, segment(number))
        was_killed = killed_at(point, partial(write, directory, some))
        assert verified(root).damaged == {}
        assert listing_of(root).num_bytes <= QUOTA_BYTES
        if is_there(directory, some):
            num_written += 1
            assert read(directory, some) == content_of(some)
        directory.close()
        num_parts += age_parts(root)
        directory = KVDirectory(root, QUOTA_BYTES)
        assert list(root.rglob("*.part")) == []
        assert write(directory, segment(10)), "no lock is left"
        assert listing_of(root).num_bytes <= QUOTA_BYTES
        directory.close()
        if not was_killed:
            break
    assert num_written > 2, "some kills come after the segment is whole"
    assert num_parts > 10, "and some while it is written"


def test_a_killed_start_leaves_a_directory_that_opens(tmp_path: Path) -> None:
    num_parts = 0
    for point in count():
        root = tmp_path / str(point)
        was_killed = killed_at(point, partial(KVDirectory, root, QUOTA_BYTES))
        num_parts += age_parts(root)
        directory = KVDirectory(root, QUOTA_BYTES)
        assert [path.name for path in root.iterdir()] == ["inferd-kv.json"]
        assert write(directory, segment())
        directory.close()
        if not was_killed:
            break
    assert num_parts > 5


@pytest.mark.parametrize("num_bytes", [0, 1, 200, FILE_BYTES - 1])
def test_a_segment_that_lost_its_end_with_the_power_is_found(tmp_path: Path, num_bytes: int) -> None:
    """Its name was on the disk and its bytes were not: nothing forces them there."""
    directory = KVDirectory(tmp_path / "kv", QUOTA_BYTES)
    write(directory, segment())
    file = next((tmp_path / "kv").rglob("*.kv"))
    os.truncate(file, num_bytes)
    os.truncate(file, FILE_BYTES)
    assert list(verified(tmp_path / "kv").damaged) == [str(file.relative_to(tmp_path / "kv"))]
    directory.close()

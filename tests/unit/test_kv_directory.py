"""The directory of KV segments: quota, fairness among tenants, recency, writers, foreign files, and other servers."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import StartError
from inferd.engine.api.kv_store import upkeep
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.listing import LEFT_AFTER_S, Entry, to_evict
from inferd.engine.api.kv_store.opening import existing
from inferd.engine.api.kv_store.segment import KVStoreError, Missing, NotWritten, SegmentId
from tests.unit.kv_samples import (
    FILE_BYTES,
    PLENTY,
    WRITER,
    content_of,
    ended,
    forked,
    is_there,
    listing_of,
    path_of,
    read,
    segment,
    use_at,
    verified,
    write,
)

Open = Callable[[int], KVDirectory]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opened(root: Path) -> Iterator[Open]:
    """Opens the directory as another server would."""
    directories = list[KVDirectory]()

    def open_it(quota_bytes: int = PLENTY) -> KVDirectory:
        directories.append(KVDirectory(root, quota_bytes))
        return directories[-1]

    yield open_it
    for directory in directories:
        directory.close()


def test_what_is_there_is_found_without_reading(root: Path, opened: Open) -> None:
    directory, some = opened(PLENTY), [segment(number) for number in range(20)]
    for each in some[::3]:
        write(directory, each)
    assert [is_there(directory, each) for each in some] == [number % 3 == 0 for number in range(20)]
    assert not any(is_there(directory, segment(number, model=1)) for number in range(20))
    assert not any(is_there(directory, segment(number, tenant=1)) for number in range(20))


def test_another_server_sees_what_this_one_wrote(opened: Open) -> None:
    first, second = opened(PLENTY), opened(PLENTY)
    write(first, segment())
    assert is_there(second, segment())
    assert read(second, segment()) == content_of(segment())
    assert not write(second, segment())


def test_the_least_recent_goes_first(root: Path, opened: Open) -> None:
    directory = opened(10 * FILE_BYTES)
    for number in range(10):
        write(directory, segment(number))
        use_at(root, segment(number), 1000 + number)
    assert read(directory, segment(0)), "a hit renews it"
    assert not write(directory, segment(2)), "so does a write of what is there"
    write(directory, segment(10))
    found = [number for number in range(11) if is_there(directory, segment(number))]
    assert found == [0, 2, 5, 6, 7, 8, 9, 10], "an eighth of the quota is free again"


def test_the_tenant_with_the_most_bytes_gives_way(root: Path, opened: Open) -> None:
    """Also if its files are the most recent: so no tenant can push the others out."""
    directory = opened(12 * FILE_BYTES)
    for number in range(3):
        write(directory, segment(number, tenant=1))
        use_at(root, segment(number, tenant=1), 1000 + number)
    for number in range(100):
        write(directory, segment(number, tenant=2, model=number % 2))
    assert all(is_there(directory, segment(number, tenant=1)) for number in range(3))
    num_files = Counter(entry.segment.tenant for entry in listing_of(root).segments)
    assert num_files[segment(tenant=1).tenant] == 3
    assert 6 <= num_files[segment(tenant=2).tenant] <= 9
    for number in range(100):
        write(directory, segment(number, tenant=3))
    assert all(is_there(directory, segment(number, tenant=1)) for number in range(3))
    assert listing_of(root).num_bytes <= 12 * FILE_BYTES


def naive_victims(entries: list[Entry], num_bytes: int) -> list[Entry]:
    """The same by the words of the rule."""
    left, victims = list(entries), list[Entry]()
    while left and sum(each.num_bytes for each in victims) < num_bytes:
        sizes: dict[str, int] = {}
        for each in left:
            sizes[each.folder[-1]] = sizes.get(each.folder[-1], 0) + each.num_bytes
        largest = min(sizes, key=lambda tenant: (-sizes[tenant], tenant))
        victims.append(min((each for each in left if each.folder[-1] == largest), key=lambda each: each.used_ns))
        left.remove(victims[-1])
    return victims


@pytest.mark.parametrize("seed", range(20))
def test_evicted_files_are_those_of_the_rule(seed: int) -> None:
    draw = random.Random(seed)
    times = draw.sample(range(1000), 40)
    entries = [
        Entry((f"model {draw.randrange(2)}", f"tenant {draw.randrange(4)}"), str(at), draw.randrange(1, 100), at)
        for at in times
    ]
    for num_bytes in (-5, 0, 1, 500, 1000, 10**6):
        assert list(to_evict(entries, num_bytes)) == naive_victims(entries, num_bytes)


def test_files_of_all_servers_count(root: Path, opened: Open) -> None:
    """A server that wrote little sees what the other wrote, and all together stay near the quota."""
    quota_bytes = 64 * FILE_BYTES
    servers = [opened(quota_bytes) for _ in range(3)]
    draw = random.Random(1)
    for number in range(600):
        write(servers[draw.choice((0, 0, 0, 1, 2))], segment(number, tenant=number % 2))
        assert listing_of(root).num_bytes <= quota_bytes * (1 + 2 / 16)
    assert listing_of(root).num_bytes > quota_bytes // 2


def test_a_start_with_a_smaller_quota_evicts(root: Path, opened: Open) -> None:
    first = opened(PLENTY)
    for number in range(20):
        write(first, segment(number))
    assert first.used_bytes == 20 * FILE_BYTES
    second = opened(5 * FILE_BYTES)
    assert second.used_bytes == listing_of(root).num_bytes <= 5 * FILE_BYTES


@pytest.mark.parametrize("quota_bytes", [0, 1, FILE_BYTES - 1])
def test_a_segment_larger_than_the_quota_is_not_written(root: Path, opened: Open, quota_bytes: int) -> None:
    first = opened(PLENTY)
    write(first, segment(0))
    with pytest.raises(NotWritten, match=f"segment of {FILE_BYTES} bytes is larger than the quota of {quota_bytes}"):
        write(opened(quota_bytes), segment(1))


def test_a_quota_of_one_segment_holds_one(root: Path, opened: Open) -> None:
    directory = opened(FILE_BYTES)
    for number in range(5):
        assert write(directory, segment(number))
        assert [entry.segment for entry in listing_of(root).segments] == [segment(number)]


def test_only_one_server_evicts_at_a_time(root: Path, opened: Open) -> None:
    first, second = opened(4 * FILE_BYTES), opened(4 * FILE_BYTES)
    for number in range(4):
        write(first, segment(number))
    assert first._take_lock()
    assert not second._take_lock()
    with pytest.raises(NotWritten, match="others write or evict just now"):
        write(second, segment(9))
    assert len(listing_of(root).segments) == 4, "nothing was evicted"
    first.close()
    third = opened(4 * FILE_BYTES)
    assert write(third, segment(9))


def test_a_start_that_cannot_list_or_evict_is_refused(root: Path, opened: Open) -> None:
    write(opened(PLENTY), segment())
    num_open = len(os.listdir("/proc/self/fd"))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    for call in ("scandir", "unlink"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, call, fail)
            with pytest.raises(StartError, match=f"must be able to read and write {root}"):
                opened(0)
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_leftovers_go_by_age(root: Path, opened: Open) -> None:
    directory = opened(PLENTY)
    write(directory, segment())
    folder = path_of(root, segment()).parent
    young, old, complete = (folder / f"{segment(n).key.hex()}.kv.{n:016x}.part" for n in (1, 2, 3))
    mark = root / "inferd-kv.json.0123456789abcdef.part"
    for part in (young, old, mark):
        part.write_bytes(b"half")
    os.link(path_of(root, segment()), complete)
    for part in (old, mark):
        os.utime(part, (time.time() - LEFT_AFTER_S - 5,) * 2)
    os.utime(young, (time.time() - LEFT_AFTER_S + 60,) * 2)
    assert listing_of(root).num_bytes == FILE_BYTES + 12
    opened(PLENTY)
    assert [part.exists() for part in (young, old, complete, mark)] == [True, False, False, False]
    assert read(directory, segment()) == content_of(segment())


def test_a_writer_whose_part_was_removed_says_so(root: Path, opened: Open) -> None:
    directory = opened(PLENTY)

    def clear(num_bytes: int) -> bool:
        with existing(root) as descriptor:
            upkeep.clear(descriptor)
        return True

    with pytest.raises(NotWritten, match="No such file"):
        directory.write(segment(), [[memoryview(b"some")]], WRITER, clear)
    assert write(directory, segment())


def test_files_of_a_writer_are_dropped(root: Path, opened: Open) -> None:
    directory, other = opened(PLENTY), b"another engine.."
    for number in range(12):
        write(directory, segment(number, tenant=number % 3, model=number % 2), (WRITER, other)[number % 4 == 0])
    write(directory, segment(100))
    path_of(root, segment(100)).write_bytes(b"short")
    assert directory.drop_writers([other]) == 3
    assert directory.drop_writers([other]) == 0
    for number in range(12):
        some = segment(number, tenant=number % 3, model=number % 2)
        assert is_there(directory, some) == (number % 4 != 0)
    assert path_of(root, segment(100)).exists(), "nobody knows its writer, and its reader finds it"


def test_dropping_goes_on_after_a_failure_and_tells_it(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, unlink, calls = opened(PLENTY), os.unlink, list[str]()
    for number in range(5):
        write(directory, segment(number))

    def fail_once(name: str, **named: Any) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(name, **named)

    monkeypatch.setattr(os, "unlink", fail_once)
    with pytest.raises(PermissionError):
        directory.drop_writers([WRITER])
    assert sum(is_there(directory, segment(number)) for number in range(5)) == 1


def test_folders_may_vanish_while_they_are_listed(root: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, scandir, num_listed = opened(PLENTY), os.scandir, 0
    for number in range(6):
        write(directory, segment(number, model=number % 3))

    def removing(descriptor: int) -> Any:
        nonlocal num_listed
        num_listed += 1
        if num_listed == 2:
            monkeypatch.setattr(os, "scandir", scandir)
            for number in range(3):
                shutil.rmtree(root / segment(model=number).fingerprint.hex())
        return scandir(descriptor)

    monkeypatch.setattr(os, "scandir", removing)
    assert not listing_of(root).segments
    assert num_listed == 2


def test_a_file_may_vanish_while_those_of_a_writer_are_dropped(
    root: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, unlink = opened(PLENTY), os.unlink
    for number in range(5):
        write(directory, segment(number))

    def evicted(name: str, **named: Any) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(name, **named)
        unlink(name, **named)

    monkeypatch.setattr(os, "unlink", evicted)
    assert directory.drop_writers([WRITER]) == 4
    assert listing_of(root).segments == []


def test_a_segment_that_is_there_is_not_written_again(opened: Open) -> None:
    directory = opened(PLENTY)
    write(directory, segment())
    assert not directory.write(segment(), [[memoryview(content_of(segment()))]], WRITER, lambda _: False)


def test_a_file_that_is_evicted_while_it_is_read_is_read_whole(root: Path, opened: Open) -> None:
    directory, memory = opened(PLENTY), bytearray(len(content_of(segment())))
    write(directory, segment())

    def evict(num_bytes: int) -> bool:
        path_of(root, segment()).unlink(missing_ok=True)
        return True

    directory.read(segment(), [[memoryview(memory)[:1001]], [memoryview(memory)[1001:2002]],
                               [memoryview(memory)[2002:]]], evict)  # fmt: skip
    assert memory == content_of(segment())


def test_another_server_may_write_the_same_meanwhile(root: Path, opened: Open) -> None:
    first, second = opened(PLENTY), opened(PLENTY)
    content = content_of(segment())

    def pace(num_bytes: int) -> bool:
        write(second, segment())
        return True

    assert not first.write(segment(), [[memoryview(content)]], WRITER, pace)
    assert read(first, segment()) == content, "the first that is whole stays"
    assert listing_of(root).parts == []


FOREIGN = ("letter.txt", "{model}/letter.txt", "{tenant}/letter.txt", "{tenant}/{key}.kv.bak", "{tenant}/{KEY}.kv")


def with_foreign(root: Path) -> dict[str, bytes]:
    """Put files and links that are not ours everywhere. Returns their contents by path, also those that links lead
    to."""
    some = segment()
    key, model, tenant = some.key.hex(), some.fingerprint.hex(), f"{some.fingerprint.hex()}/{some.tenant.hex()}"
    outside = root.parent / "outside"
    (outside / segment().tenant.hex()).mkdir(parents=True)
    paths = [root / each.format(model=model, tenant=tenant, key=key, KEY=key.upper()) for each in FOREIGN]
    paths += [
        outside / "letter",
        outside / segment().tenant.hex() / f"{key}.kv",
        root / ("ab" * 32) / "x" / f"{key}.kv",
    ]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    (root / segment(model=7).fingerprint.hex()).symlink_to(outside)
    (root / model / segment(tenant=7).tenant.hex()).symlink_to(outside)
    (root / tenant / f"{'0' * 64}.kv").symlink_to(outside / "letter")
    (root / tenant / f"{'1' * 64}.kv.0123456789abcdef.part").symlink_to(outside / "letter")
    os.mkfifo(root / tenant / f"{'2' * 64}.kv")
    return {str(path): path.read_bytes() for path in paths}


def test_files_of_others_stay_and_are_told(root: Path, opened: Open) -> None:
    directory = opened(3 * FILE_BYTES)
    write(directory, segment())
    letters = with_foreign(root)
    for some in (segment(model=7), segment(tenant=7)):
        assert not is_there(directory, some)
        with pytest.raises(Missing):
            read(directory, some)
        with pytest.raises(NotWritten, match="Not a directory"):
            write(directory, some)
    for number in range(20):
        write(directory, segment(number))
    directory.drop_writers([WRITER])
    write(directory, segment())
    listing = listing_of(root)
    model, tenant = segment().fingerprint.hex(), f"{segment().fingerprint.hex()}/{segment().tenant.hex()}"
    expected = [each.format(model=model, tenant=tenant, key=segment().key.hex(), KEY=segment().key.hex().upper())
                for each in FOREIGN]  # fmt: skip
    expected += [segment(model=7).fingerprint.hex(), f"{model}/{segment(tenant=7).tenant.hex()}", f"{'ab' * 32}/x"]
    expected += [f"{tenant}/{'0' * 64}.kv", f"{tenant}/{'1' * 64}.kv.0123456789abcdef.part", f"{tenant}/{'2' * 64}.kv"]
    assert sorted(listing.foreign) == sorted(expected)
    assert (len(listing.segments), len(listing.parts)) == (1, 0)
    assert verified(root) == upkeep.Verdict(1, {})
    with existing(root) as descriptor:
        assert upkeep.clear(descriptor).foreign == listing.foreign
    assert listing_of(root).segments == []
    assert sorted(listing_of(root).foreign) == sorted(listing.foreign)
    assert {path: Path(path).read_bytes() for path in letters} == letters


def test_clearing_leaves_the_mark_alone(root: Path, opened: Open) -> None:
    """So a server that runs, or one that starts later, goes on to use the directory."""
    directory = opened(PLENTY)
    for number in range(6):
        write(directory, segment(number, tenant=number % 2, model=number % 3))
    directory.drop_writers([WRITER])
    for number in range(3):
        write(directory, segment(number))
    with existing(root) as descriptor:
        assert len(upkeep.clear(descriptor).segments) == 3
    assert [path.name for path in root.iterdir()] == ["inferd-kv.json"]
    assert write(directory, segment())
    assert read(opened(PLENTY), segment()) == content_of(segment())


def test_verifying_reads_everything_and_changes_nothing(root: Path, opened: Open) -> None:
    directory, sizes = opened(PLENTY), list[int]()
    for number in range(5):
        write(directory, segment(number))
    content = path_of(root, segment(1)).read_bytes()
    path_of(root, segment(1)).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    path_of(root, segment(2)).write_bytes(content)
    os.truncate(path_of(root, segment(3)), 7)
    listing = listing_of(root)
    path_of(root, segment(4)).unlink()
    with existing(root) as descriptor:
        verdict = upkeep.verify(descriptor, listing, sizes.append)
    names = {str(path_of(root, segment(number)).relative_to(root)): number for number in range(5)}
    told = {names[path]: reason for path, reason in verdict.damaged.items()}
    assert verdict.num_sound == 1
    assert sorted(told) == [1, 2, 3]
    assert told[1] == "the checksum of block 2 is wrong"
    assert told[2].startswith(f"it is the segment {segment(1).key.hex()} of tenant")
    assert told[3] == "it has 7 bytes, which is too short"
    assert sum(sizes) == 4 * FILE_BYTES + 7
    assert path_of(root, segment(1)).exists()


CALLS = ("open", "mkdir", "stat", "utime", "pwritev", "close", "link", "unlink", "scandir")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_call_of_the_system_that_fails_leaves_no_torn_file(root: Path, opened: Open, number: int) -> None:
    """Each call that a write makes fails once. Then the segment is whole or not there, and no part is left if it can be
    removed."""
    for failing in range(1000):
        directory, some = opened(3 * FILE_BYTES), segment(100 + failing, tenant=1)
        for each in range(3):
            write(directory, segment(each))
        with pytest.MonkeyPatch.context() as patched:
            made, error = fail_one(patched, number, failing), None
            try:
                write(directory, some)
            except KVStoreError as raised:
                error = raised
        assert error is None or type(error) is NotWritten
        assert is_there(directory, some) == (error is None) or made[-1] in ("unlink", "close")
        assert verified(root).damaged == {}
        assert listing_of(root).num_bytes <= 3 * FILE_BYTES
        assert made[-1] == "unlink" or listing_of(root).parts == []
        assert write(directory, segment(2000 + failing))
        with existing(root) as descriptor:
            upkeep.clear(descriptor)
        if len(made) <= failing:
            assert failing > 20
            return
    raise AssertionError("a write makes more than 1,000 calls")


def fail_one(patched: pytest.MonkeyPatch, number: int, failing: int) -> list[str]:
    """Let the call with this index fail. Returns the calls up to that one. A failing `close` closes nevertheless."""
    made = list[str]()

    def wrapped(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def one(*given: Any, **named: Any) -> Any:
            if len(made) > failing:
                return call(*given, **named)
            made.append(name)
            if len(made) <= failing:
                return call(*given, **named)
            if name == "close":
                call(*given)
            raise OSError(number, os.strerror(number))

        return one

    for name in CALLS:
        patched.setattr(os, name, wrapped(name))
    return made


def test_a_limit_on_the_size_of_files_leaves_nothing(root: Path, opened: Open) -> None:
    directory = opened(PLENTY)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 100,) * 2)
        with pytest.raises(NotWritten, match="File too large"):
            write(directory, segment())

    assert ended(forked(run)) == 0
    assert listing_of(root).parts == []
    assert not is_there(directory, segment())


def test_a_read_only_disk_still_gives_segments(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = opened(PLENTY)
    write(directory, segment())

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for call in ("utime", "unlink", "mkdir"):
        monkeypatch.setattr(os, call, fail)
    assert read(directory, segment()) == content_of(segment())


def some_work(root: Path, seed: int, num_steps: int, quota_bytes: int) -> None:
    """One server among others: it writes and reads segments that the others write and read too. What it reads is right
    or missing."""
    directory, draw = KVDirectory(root, quota_bytes), random.Random(seed)
    num_read = num_written = 0
    for _ in range(num_steps):
        some = segment(draw.randrange(60), tenant=draw.randrange(2))
        try:
            if draw.random() < 0.5:
                assert read(directory, some) == content_of(some)
                num_read += 1
            else:
                num_written += write(directory, some)
        except (Missing, NotWritten):
            pass
    assert num_written > num_steps // 20, num_written
    assert num_read > num_steps // 20, num_read
    directory.close()


def test_processes_share_the_directory(root: Path, opened: Open) -> None:
    quota_bytes = 40 * FILE_BYTES
    opened(quota_bytes)
    children = [forked(partial(some_work, root, seed, 400, quota_bytes)) for seed in range(3)]
    for _ in range(20):
        assert listing_of(root).num_bytes <= quota_bytes * (1 + 2 / 16) + 3 * FILE_BYTES
    assert [ended(child) for child in children] == [0, 0, 0]
    assert verified(root).damaged == {}
    assert listing_of(root).parts == []
    assert opened(quota_bytes).used_bytes <= quota_bytes


def test_threads_read_while_one_writes(root: Path, opened: Open) -> None:
    directory, failures, is_done = opened(30 * FILE_BYTES), list[str](), threading.Event()
    num_read = [0, 0, 0]

    def reads(thread: int) -> None:
        draw = random.Random(thread)
        while not is_done.is_set():
            some: SegmentId = segment(draw.randrange(40))
            try:
                if read(directory, some) != content_of(some):
                    failures.append("other bytes")
                num_read[thread] += 1
            except Missing:
                listing_of(root)
            except KVStoreError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=reads, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    draw = random.Random(9)
    while min(num_read) < 50 and not failures:
        write(directory, segment(draw.randrange(40)))
    is_done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert listing_of(root).num_bytes <= 30 * FILE_BYTES

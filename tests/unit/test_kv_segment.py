"""A segment comes back to the bit, or as an error that says why it does not: whatever stands in the place of its file.

The faults of `KINDS` are made by a seed: some hundreds in the usual run, 10,000 with --long.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from inferd.engine.api.kv_store import segment as files
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.segment import Damaged, KVStoreError, Missing, NotWritten, SegmentId, Stopped
from tests.unit.kv_samples import (
    FILE_BYTES,
    NUM_BYTES,
    PIECES,
    PLENTY,
    WRITER,
    blocks_of,
    content_of,
    is_there,
    path_of,
    read,
    segment,
    write,
)

NUM_FAULTS = 10_000
HEADER_BYTES = FILE_BYTES - NUM_BYTES


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments") / "kv"


@pytest.fixture(scope="module")
def directory(root: Path) -> Iterator[KVDirectory]:
    opened = KVDirectory(root, PLENTY)
    yield opened
    opened.close()


def flipped(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def flipped_in_header(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(HEADER_BYTES)] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(FILE_BYTES))


def cut_by_a_byte(file: Path, draw: random.Random) -> None:
    os.truncate(file, FILE_BYTES - 1)


def cut_in_header(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(HEADER_BYTES + 1))


def extended(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 5000)))


def emptied(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def zeroed(file: Path, draw: random.Random) -> None:
    """Part of the file was never on the disk when the power was lost."""
    content, start = file.read_bytes(), draw.randrange(FILE_BYTES - 20)
    end = draw.randrange(start + 20, FILE_BYTES + 1)
    file.write_bytes(content[:start] + bytes(end - start) + content[end:])


def noise(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(FILE_BYTES))


def exchanged_blocks(file: Path, draw: random.Random) -> None:
    content, size = file.read_bytes(), sum(PIECES[2])
    first, last = content[HEADER_BYTES : HEADER_BYTES + size], content[-size:]
    file.write_bytes(content[:HEADER_BYTES] + last + content[HEADER_BYTES + size : -size] + first)


def other_file(file: Path, draw: random.Random, other: SegmentId) -> None:
    """A sound file of another segment gets this name."""
    source = path_of(file.parents[2], other)
    assert source.exists()
    shutil.copy(source, file)


def of_another_key(file: Path, draw: random.Random) -> None:
    other_file(file, draw, segment(draw.randrange(3)))


def of_another_tenant(file: Path, draw: random.Random) -> None:
    key = bytes.fromhex(file.stem)
    other_file(file, draw, SegmentId(segment().fingerprint, segment(0, tenant=1).tenant, key))


def of_another_model(file: Path, draw: random.Random) -> None:
    key = bytes.fromhex(file.stem)
    other_file(file, draw, SegmentId(segment(model=1).fingerprint, segment().tenant, key))


def forged(file: Path, at: int, format_: str, value: int) -> None:
    """One number of the header is another, and the header's checksum is right."""
    content = bytearray(file.read_bytes())
    struct.pack_into(format_, content, at, value)
    end = HEADER_BYTES - 16
    content[end:HEADER_BYTES] = xxh3_128_digest(bytes(content[:end]))
    file.write_bytes(content)


def of_another_format(file: Path, draw: random.Random) -> None:
    forged(file, 8, "<I", draw.choice((0, 2, 3, 2**32 - 1)))


def of_other_blocks(file: Path, draw: random.Random) -> None:
    forged(file, 12, "<I", draw.choice((0, 1, 2, 4, 256, 257, 2**31, 2**32 - 1)))


def of_another_size(file: Path, draw: random.Random) -> None:
    forged(file, 112 + 24 * draw.randrange(3), "<Q", draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)))


def gone(file: Path, draw: random.Random) -> None:
    file.unlink()


def folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path, draw: random.Random) -> None:
    """One that never ends, if this user may make it."""
    file.unlink()
    try:
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        os.mkfifo(file)


def bound_socket(file: Path, draw: random.Random) -> None:
    file.unlink()
    here = os.open(".", os.O_PATH)
    os.chdir(file.parent)  # the path of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    finally:
        os.fchdir(here)
        os.close(here)


def link_to_itself(file: Path, draw: random.Random) -> None:
    """A symbolic link to the same sound bytes is not followed."""
    moved = file.parents[3] / f"moved-{file.name}"
    file.rename(moved)
    file.symlink_to(moved)


def dangling_link(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def link_to_a_fifo(file: Path, draw: random.Random) -> None:
    file.unlink()
    target = file.parents[3] / f"fifo-{file.name}"
    os.mkfifo(target)
    file.symlink_to(target)


KINDS: tuple[tuple[Callable[[Path, random.Random], None], type[KVStoreError]], ...] = (
    *((each, Damaged) for each in (
        flipped, flipped, flipped, flipped_in_header, cut, cut_by_a_byte, cut_in_header, extended, emptied, zeroed,
        noise, exchanged_blocks, of_another_key, of_another_tenant, of_another_model, of_another_format,
        of_other_blocks, of_another_size,
    )),
    *((each, Missing) for each in (
        gone, folder, fifo, device, bound_socket, link_to_itself, dangling_link, link_to_a_fifo,
    )),
)  # fmt: skip
"""A way to damage a file, and the error that a reader gets."""


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("seed", range(-(-NUM_FAULTS // len(KINDS))))
def test_no_fault_gives_wrong_bytes(root: Path, directory: KVDirectory, seed: int) -> None:
    for number in range(3):
        write(directory, segment(number))
    for index, (damage, expected) in enumerate(KINDS):
        draw, number = random.Random(seed * len(KINDS) + index), 10 + seed * len(KINDS) + index
        some = segment(number)
        for each in (some, segment(number, tenant=1), segment(number, model=1)):
            assert write(directory, each)
        file = path_of(root, some)
        damage(file, draw)
        mode = os.lstat(file).st_mode if os.path.lexists(file) else 0
        assert is_there(directory, some) == stat.S_ISREG(mode)
        with pytest.raises(KVStoreError) as raised:
            read(directory, some)
        assert raised.type is expected, (damage.__name__, raised.value)
        if expected is Damaged:
            assert not os.path.lexists(file), "what is damaged goes"
        elif damage is not gone:
            assert os.lstat(file).st_mode == mode, "what is not ours stays"
            with pytest.raises(NotWritten, match="something else"):
                write(directory, some)
            continue
        assert not is_there(directory, some)
        with pytest.raises(Missing, match="No such file"):
            read(directory, some)
        assert write(directory, some)
        assert read(directory, some) == content_of(some)


def test_a_segment_comes_back(root: Path, directory: KVDirectory) -> None:
    some = segment(3)
    assert not is_there(directory, some)
    assert write(directory, some)
    assert not write(directory, some), "it is there"
    assert read(directory, some) == content_of(some)
    file = path_of(root, some)
    assert file.stat().st_size == FILE_BYTES == files.file_bytes(blocks_of(bytes(NUM_BYTES)))
    modes = [path.stat().st_mode & 0o777 for path in (file, *file.parents[:3])]
    assert modes == [0o600, 0o700, 0o700, 0o700]
    assert [each.name for each in file.parent.iterdir() if each.name.startswith(file.name)] == [file.name]


SHAPES = {
    "many pieces": [[3] * 2500, [1] * 1024, [7] * 1025],
    "large pieces": [[9 * 2**20 + 5, 1], [4 * 2**20], [2**22 + 1, 2**22 - 1]],
    "most blocks": [[n] for n in range(files.MAX_BLOCKS)],
    "nothing": [[], [0], [0, 0]],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_any_pieces_come_back_in_any_other_pieces(directory: KVDirectory, shape: str) -> None:
    """Also if the system reads and writes less than it was asked to."""
    sizes = SHAPES[shape]
    some = segment(21000 + list(SHAPES).index(shape))
    content = content_of(some, sum(map(sum, sizes)))
    assert directory.write(some, blocks_of(content, sizes), WRITER)
    assert read(directory, some, sizes) == content
    merged = [[sum(block)] for block in sizes]
    assert read(directory, some, merged) == content


def test_numbers_of_any_type_are_bytes(directory: KVDirectory) -> None:
    some, numbers = segment(21100), memoryview(bytearray(range(64))).cast("f")
    assert directory.write(some, [[numbers]], WRITER)
    assert read(directory, some, [[64]]) == bytes(range(64))


def test_short_calls_of_the_system_are_continued(directory: KVDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    some, draw = segment(21101), random.Random(5)
    pwritev, preadv = os.pwritev, os.preadv

    def some_of(pieces: list[memoryview]) -> list[memoryview]:
        whole = draw.randrange(len(pieces))
        return [*pieces[:whole], pieces[whole][: draw.randrange(1, pieces[whole].nbytes + 1)]]

    monkeypatch.setattr(os, "pwritev", lambda file, pieces, at: pwritev(file, some_of(pieces), at))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: preadv(file, some_of(pieces), at))
    assert write(directory, some)
    assert read(directory, some) == content_of(some)


def test_other_blocks_than_it_has_cannot_be_read(root: Path, directory: KVDirectory) -> None:
    """The key says what the blocks are. A file with others is of no use, and would never go."""
    some = segment(21102)
    write(directory, some)
    with pytest.raises(Damaged, match=f"it has 3 blocks of {NUM_BYTES} bytes, and not 1 of 8"):
        read(directory, some, [[8]])
    assert not path_of(root, some).exists()


def test_a_file_that_is_cut_while_it_is_read_is_found(root: Path, directory: KVDirectory) -> None:
    some, memory = segment(21103), bytearray(NUM_BYTES)
    write(directory, some)

    def cut_now(num_bytes: int) -> bool:
        os.truncate(path_of(root, some), HEADER_BYTES + 5)
        return True

    with pytest.raises(Damaged, match="cut while it was read"):
        directory.read(some, blocks_of(memory), cut_now)


@pytest.mark.parametrize("call", ["open", "fstat", "pread", "preadv"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE, errno.EINTR])
def test_a_file_is_only_removed_if_the_disk_cannot_read_it(
    root: Path, directory: KVDirectory, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    some = segment(21104)
    write(directory, some)
    is_unreadable = number == errno.EIO and call in ("pread", "preadv")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(KVStoreError) as raised:
            read(directory, some)
    assert raised.type is (Damaged if is_unreadable else Missing)
    assert path_of(root, some).exists() != is_unreadable


def test_a_sound_file_that_replaced_a_damaged_one_stays(root: Path, directory: KVDirectory) -> None:
    some, memory = segment(21105), bytearray(NUM_BYTES)
    write(directory, some)
    sound, file = path_of(root, some).read_bytes(), path_of(root, some)
    flipped(file, random.Random(1))
    os.truncate(file, FILE_BYTES - 1)
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))

    def replace(num_bytes: int) -> bool:
        file.unlink(missing_ok=True)
        file.write_bytes(sound)
        return True

    with pytest.raises(Damaged):
        directory.read(some, blocks_of(memory), replace)
    assert read(directory, some) == content_of(some)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_caller_may_stop(root: Path, directory: KVDirectory, calls: int) -> None:
    """It is asked before each part, with its bytes. A stopped write leaves nothing, and a stopped read the file."""
    some, asked = segment(21106), list[int]()

    def pace(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return len(asked) <= calls

    with pytest.raises(Stopped):
        directory.write(some, blocks_of(content_of(some)), WRITER, pace)
    assert asked == [sum(block) for block in PIECES[: calls + 1]]
    assert not [each for each in path_of(root, some).parent.iterdir() if each.name.startswith(some.key.hex())]
    write(directory, some)
    asked.clear()
    with pytest.raises(Stopped):
        directory.read(some, blocks_of(bytearray(NUM_BYTES)), pace)
    assert asked == [sum(block) for block in PIECES[: calls + 1]]
    assert read(directory, some) == content_of(some)
    path_of(root, some).unlink()


def test_a_caller_is_asked_before_each_4_mib(directory: KVDirectory) -> None:
    some, asked = segment(21107), list[int]()

    def pace(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return True

    directory.write(some, [[memoryview(bytes(9 * 2**20))]], WRITER, pace)
    assert asked == [4 * 2**20, 4 * 2**20, 2**20, 0]


def test_a_caller_that_raises_leaves_nothing(root: Path, directory: KVDirectory) -> None:
    some = segment(21108)

    def pace(num_bytes: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        directory.write(some, blocks_of(content_of(some)), WRITER, pace)
    assert not [each for each in path_of(root, some).parent.iterdir() if each.name.startswith(some.key.hex())]

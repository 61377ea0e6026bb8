"""The memory in which a KV pool outlives its engine, and the ledger of what lies there."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import time
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.cache.ledger import Entry
from inferd.engine.worker import pool_memory as module
from inferd.engine.worker.pool_memory import PoolMemory

BLOCKS, CHECKPOINTS, SLOTS = 6, 2, 3
GROUP_PLANES = (3, 2)
_RECORD_BYTES = 64


class Engine:
    """The memory as one engine after another has it."""

    def __init__(self, file: MemoryFile, layout: bytes = b"layout", heads: int = 2, blocks: int = BLOCKS) -> None:
        opened = PoolMemory.open(file.path, blocks + CHECKPOINTS, layout)
        assert opened is not None
        self.memory = opened
        self.kv = opened.empty((3, blocks, 2, heads, 4, 8), torch.bfloat16)
        self.states = opened.empty((2, SLOTS + CHECKPOINTS, 5), torch.float32)
        opened.hold(self.kv, 0, blocks, GROUP_PLANES)
        opened.hold(self.states, blocks, blocks + CHECKPOINTS, first_item=SLOTS)
        opened.begin()

    def write(self, place: int, group: int, seed: int) -> Entry:
        """Compute a block or a checkpoint, and write it down."""
        random = torch.Generator().manual_seed(seed)
        goal = self.kv[:, place] if place < BLOCKS else self.states[:, SLOTS + place - BLOCKS]
        goal.copy_(torch.randn(goal.shape, generator=random))
        entry = Entry(place, group, bytes([seed]) * 32, seed, seed)
        self.memory.write(entry)
        return entry

    def sound(self) -> list[Entry]:
        return [entry for entry in self.memory.entries() if self.memory.is_sound(entry)]

    def end(self) -> None:
        """As the process's death does."""
        fcntl.flock(self.memory._descriptor, fcntl.LOCK_UN)


@pytest.fixture
def file() -> MemoryFile:
    return MemoryFile(POOL_MEMORY)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).reshape(-1)


def test_the_next_engine_has_the_same_bytes_and_entries(file: MemoryFile) -> None:
    first = Engine(file)
    assert first.sound() == []
    written = [first.write(place, group, seed=place + 1) for place, group in ((1, 0), (4, 1), (6, 2))]
    first.memory.touch(4, 77)
    kept = first.kv.clone(), first.states.clone()
    first.end()
    second = Engine(file)
    assert torch.equal(second.kv, kept[0])
    assert torch.equal(second.states, kept[1])
    expected = [entry._replace(use=77) if entry.place == 4 else entry for entry in written]
    assert second.sound() == expected
    second.memory.erase(1)
    second.write(2, 0, seed=9)
    second.end()
    assert [entry.place for entry in Engine(file).sound()] == [2, 4, 6], "those of both engines"


def test_what_was_left_is_mapped_before_it_is_read(file: MemoryFile) -> None:
    """Only places with entries: to map others would take memory for them."""
    first = Engine(file, blocks=600)
    first.kv[:, [1, 2, 300]] = 1.0
    first.end()
    assert _mapped_kib(first.kv) > 0, "the test cannot tell mapped pages from others"
    second = Engine(file, blocks=600)
    assert _mapped_kib(second.kv) == 0
    second.memory._map_pages([1, 2, 300])
    in_a_plane = _pages(second.kv, 1, 3) + _pages(second.kv, 300, 301)
    assert _mapped_kib(second.kv) == 3 * in_a_plane * mmap.PAGESIZE // 1024


def _pages(kv: Tensor, first: int, end: int) -> int:
    """Pages of these blocks in one plane."""
    size = kv[0, 0].nbytes
    return -(-end * size // mmap.PAGESIZE) - first * size // mmap.PAGESIZE


def _mapped_kib(tensor: Tensor) -> int:
    """KiB of a tensor's mapping that this process has mapped."""
    for mapping in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", mapping, re.MULTILINE | re.DOTALL)
        if found and int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16):
            return int(found[3])
    raise AssertionError("the tensor lies in no mapping")


def test_runs_of_places() -> None:
    assert list(module._runs([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)]
    assert list(module._runs([])) == []


@pytest.mark.parametrize("place", [0, 4, 6])
def test_every_byte_that_a_place_uses_is_checked(file: MemoryFile, place: int) -> None:
    engine, random = Engine(file), Random(place)
    group = 2 if place >= BLOCKS else int(place == 4)
    entry = engine.write(place, group, seed=3)
    parts = (
        [engine.kv[plane, place] for plane in range(GROUP_PLANES[group])]
        if place < BLOCKS
        else [engine.states[layer, SLOTS + place - BLOCKS] for layer in range(2)]
    )
    for part in parts:
        flat = as_bytes(part)
        for _ in range(20):
            at, bit = random.randrange(len(flat)), 1 << random.randrange(8)
            flat[at] ^= bit
            assert not engine.memory.is_sound(entry)
            flat[at] ^= bit
    assert engine.memory.is_sound(entry)
    if group == 1:
        engine.kv[2, place] += 1
        assert engine.memory.is_sound(entry), "its group does not use this plane"


def test_every_bit_of_a_record_counts(file: MemoryFile) -> None:
    """A torn record is none: it names no content, or content that is not there."""
    engine = Engine(file)
    engine.write(1, 0, seed=3)
    records, start = engine.memory._records, 1 * _RECORD_BYTES
    engine.end()
    again = Engine(file)
    (entry,) = again.sound()
    for bit in range(8 * _RECORD_BYTES):
        records[start + bit // 8] ^= 1 << bit % 8
        is_use = 16 <= bit // 8 < 24
        assert [found._replace(use=entry.use) for found in again.sound()] == ([entry] if is_use else []), bit
        records[start + bit // 8] ^= 1 << bit % 8


def test_content_in_another_place_is_not_sound(file: MemoryFile) -> None:
    engine = Engine(file)
    one, other = engine.write(1, 0, seed=3), engine.write(2, 0, seed=4)
    engine.kv[:, [1, 2]] = engine.kv[:, [2, 1]].clone()
    assert engine.sound() == []
    records = engine.memory._records
    first, second = (slice(place * _RECORD_BYTES, (place + 1) * _RECORD_BYTES) for place in (1, 2))
    records[first], records[second] = bytes(records[second]), bytes(records[first])
    assert not engine.memory.is_sound(one._replace(place=2))
    assert not engine.memory.is_sound(other._replace(place=1))


@pytest.mark.parametrize("other", [{"layout": b"another model"}, {"heads": 4}])
def test_another_layout_begins_anew_and_so_does_the_first_behind_it(file: MemoryFile, other: dict[str, object]) -> None:
    first = Engine(file)
    first.write(1, 0, seed=3)
    first.end()
    second = Engine(file, **other)  # type: ignore[arg-type]
    assert list(second.memory.entries()) == []
    second.end()
    assert list(Engine(file).memory.entries()) == [], "records from before are believed"


def test_an_engine_that_died_while_it_laid_the_memory_out_leaves_nothing(file: MemoryFile) -> None:
    first = Engine(file)
    first.write(1, 0, seed=3)
    module._HEADER.pack_into(first.memory._head, 0, bytes(32), 2, 2)
    first.end()
    assert list(Engine(file).memory.entries()) == []


def test_two_engines_never_have_it_at_once(
    file: MemoryFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    first = Engine(file)
    assert PoolMemory.open(file.path, BLOCKS, b"") is None
    assert "ends with this engine" in caplog.text
    first.end()
    assert PoolMemory.open(file.path, BLOCKS, b"") is not None


def test_without_a_server_there_is_none(file: MemoryFile) -> None:
    path = file.path
    file.__del__()
    assert PoolMemory.open(path, BLOCKS, b"") is None
    assert PoolMemory.open("", BLOCKS, b"") is None


def test_warm_up_leaves_a_block_as_it_was(file: MemoryFile) -> None:
    engine = Engine(file)
    entry = engine.write(0, 0, seed=3)
    with engine.memory.preserved(0):
        engine.kv[:, 0] = 7
        assert not engine.memory.is_sound(entry)
    assert engine.memory.is_sound(entry)


def _write_until_killed(file: MemoryFile, seed: int) -> None:
    engine, random, count = Engine(file), Random(seed), 0
    while True:
        place, count = random.randrange(BLOCKS), count + 1
        engine.memory.erase(place)
        engine.write(place, place % 2, seed=count % 256)


def test_an_engine_killed_at_any_moment_leaves_only_whole_blocks(file: MemoryFile) -> None:
    num_sound = 0
    for number in range(20):
        child = os.fork()
        if not child:
            try:
                _write_until_killed(file, number)
            finally:
                os._exit(1)
        time.sleep(0.02 + 0.003 * number)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        engine = Engine(file)
        for entry in engine.sound():
            num_sound += 1
            expected = torch.randn(engine.kv[:, 0].shape, generator=torch.Generator().manual_seed(entry.key[0]))
            planes = GROUP_PLANES[entry.group]
            assert torch.equal(engine.kv[:planes, entry.place], expected.bfloat16()[:planes])
        engine.end()
    assert num_sound > 60, "hardly anything was left"

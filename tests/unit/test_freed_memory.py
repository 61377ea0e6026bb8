"""Freed memory is given back to the system at the right times."""

from __future__ import annotations

import asyncio
import sys

import pytest

from inferd.server.transport.freed_memory import LEAST_GROWTH_BYTES, FreedMemory, _malloc_trim, _resident_bytes

MIB = 2**20


class Process:
    """A process with memory in use and memory that was freed."""

    def __init__(self) -> None:
        self.used, self.freed, self.num_trims = 100 * MIB, 0, 0

    def resident_bytes(self) -> int:
        return self.used + self.freed

    def trim(self) -> None:
        self.freed, self.num_trims = 0, self.num_trims + 1


def test_memory_is_given_back_when_it_was_freed_and_not_tried_for_while_it_is_used() -> None:
    process = Process()
    memory = FreedMemory(process.resident_bytes, process.trim)

    async def look() -> int:
        await memory.look()
        return process.num_trims

    async def run() -> None:
        process.freed = 234 * MIB
        assert await look() == 1, "what the start has freed"
        assert process.resident_bytes() == 100 * MIB
        assert await look() == 1
        process.used += LEAST_GROWTH_BYTES
        assert await look() == 2, "it may be freed"
        assert [await look(), await look()] == [2, 2], "and was in use"
        process.used, process.freed = 100 * MIB, LEAST_GROWTH_BYTES - 1
        assert await look() == 2, "too little to look for"
        process.freed += 2 * MIB
        assert await look() == 3
        assert process.resident_bytes() == 100 * MIB
        process.used += 40 * MIB
        assert await look() == 4
        process.used, process.freed = 100 * MIB, 20 * MIB
        assert await look() == 5, "a part went back by itself, and the rest only now"

    asyncio.run(run())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_system_gets_it() -> None:
    """Small pieces of which the last one stays: without `malloc_trim`, all pages below it would stay too."""
    trim = _malloc_trim()
    if trim is None:
        pytest.skip("this C library has no malloc_trim")
    pieces = [bytes(900) for _ in range(100_000)]
    del pieces[:-1]
    before = _resident_bytes()
    trim()
    assert before - _resident_bytes() > 40 * MIB

"""A gather gives every rank the columns of all, whatever their sizes, and however the ranks are late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event

import pytest
import torch
from torch import Tensor

from inferd.engine.arch.ranks import Rank
from inferd.kernels import native
from inferd.kernels.gather import BUFFER_BYTES, Exchange
from inferd.kernels.tape import Buffers, record
from tests.conftest import KERNEL_CACHE
from tests.cpu.ranks import exchanges


@pytest.fixture(autouse=True)
def _native_kernels() -> None:
    built = native.prepare(KERNEL_CACHE)
    if not native.has_compiler():
        pytest.skip(built.reason)


def on_all(ends: list[Exchange], whole: Tensor, wants: list[bool]) -> list[Tensor]:
    def run(index: int) -> Tensor:
        start, end = Rank(index, len(ends)).span(whole.shape[1])
        return ends[index].gather(whole[:, start:end], whole.shape[1], wants=wants[index])

    with ThreadPoolExecutor(len(ends)) as threads:
        return list(threads.map(run, range(len(ends))))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_rank_gets_all_columns(count: int) -> None:
    random = Random(count)
    with exchanges(count) as ends:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for size in (count * count, 64, 199, 4096):
                whole = torch.randint(-(2**14), 2**14, (random.choice([1, 3, 40]), size)).to(dtype)
                wants = [random.random() < 0.7 for _ in range(count)]
                for wanted, found in zip(wants, on_all(ends, whole, wants), strict=True):
                    assert not wanted or torch.equal(found, whole)


@pytest.mark.parametrize("shape", [(700, 1500), (2, BUFFER_BYTES)], ids=["many rows", "long rows"])
def test_parts_larger_than_a_buffer_pass_in_pieces(shape: tuple[int, int]) -> None:
    whole = torch.randn(shape)
    assert whole.nbytes // 2 > BUFFER_BYTES
    with exchanges(2) as ends:
        for found in on_all(ends, whole, [True, True]):
            assert torch.equal(found, whole)


def test_some_columns_of_rows_are_gathered_in_a_recorded_step() -> None:
    whole, (start, end) = torch.arange(24.0).view(4, 6), (2, 5)
    with exchanges(1) as (alone,):
        tape = record(lambda: alone.gather(whole[:, start:end], end - start), Buffers())
        whole += 1
        tape.replay()
    assert torch.equal(tape.output, whole[:, start:end])


def test_only_the_first_rank_is_heard() -> None:
    with exchanges(3) as ends, ThreadPoolExecutor(3) as threads:
        given = [torch.arange(5) + 100 * rank for rank in range(3)]
        for found in threads.map(lambda rank: ends[rank].broadcast(given[rank]), range(3)):
            assert torch.equal(found, given[0])


def test_a_rank_may_come_late_again_and_again() -> None:
    """One rank waits until it sleeps, and both reuse their buffers many times."""
    steps = [torch.full((4, 32), float(step)) for step in range(200)]
    started, found = Event(), []
    with exchanges(2) as ends, ThreadPoolExecutor(1) as threads:

        def first() -> None:
            for step in steps:
                started.set()
                found.append(ends[0].gather(step[:, :16], 32))

        running = threads.submit(first)
        started.wait()
        for number, step in enumerate(steps):
            if number < 3:
                torch.randn(400, 400) @ torch.randn(400, 4000)  # some milliseconds, in which the other falls asleep
            assert torch.equal(ends[1].gather(step[:, 16:], 32), step)
        running.result()
    assert all(map(torch.equal, found, steps))

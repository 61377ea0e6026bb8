"""A gather gives every rank the columns of all, whatever their sizes, and however the ranks are late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from random import Random
from threading import Event

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inferd.engine.api.memory.activations import GPU_EXCHANGE_BYTES
from inferd.engine.arch.sharding import Rank
from inferd.kernels.cpu import library, native
from inferd.kernels.cpu.tape import Buffers, record
from inferd.kernels.ops.gather import BUFFER_BYTES, Exchange, group
from inferd.kernels.ops.gather.group import ONE_SHOT_BYTES, Add, GroupExchange
from tests.conftest import KERNEL_CACHE
from tests.cpu.ranks import exchanges, group_exchanges


@pytest.fixture(autouse=True)
def _native_kernels() -> None:
    built = native.prepare(KERNEL_CACHE)
    if not library.has_compiler():
        pytest.skip(built.reason)


Through = Callable[[int], AbstractContextManager[list[Exchange]]]


def on_all(ends: list[Exchange], whole: Tensor, wants: list[bool]) -> list[Tensor]:
    def run(index: int) -> Tensor:
        start, end = Rank(index, len(ends)).span(whole.shape[1])
        return ends[index].gather(whole[:, start:end], whole.shape[1], wants=wants[index])

    with ThreadPoolExecutor(len(ends)) as threads:
        return list(threads.map(run, range(len(ends))))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("through", [exchanges, group_exchanges])
def test_every_rank_gets_all_columns(through: Through, count: int) -> None:
    random = Random(count)
    with through(count) as ends:
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


@pytest.mark.parametrize("through", [exchanges, group_exchanges])
def test_only_the_first_rank_is_heard(through: Through) -> None:
    with through(3) as ends, ThreadPoolExecutor(3) as threads:
        given = [torch.arange(5) + 100 * rank for rank in range(3)]
        for found in threads.map(lambda rank: ends[rank].broadcast(given[rank]), range(3)):
            assert torch.equal(found, given[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_sum(dtype: torch.dtype) -> None:
    given = [torch.full((5, 6), 2.0**rank, dtype=dtype) for rank in range(4)]
    with group_exchanges(4) as ends, ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda rank: ends[rank].add(given[rank].T), range(4)):
            assert torch.equal(found, torch.full((6, 5), 15.0, dtype=dtype))


def test_small_sums_are_added_in_one_shot() -> None:
    with group_exchanges(1) as (end,):
        assert isinstance(end, GroupExchange)
        one_shot = GroupExchange(end._group, lambda part: part + 1, max_few_bytes=64)
        assert torch.equal(one_shot.add(torch.ones(4, 4)), torch.full((4, 4), 2.0))
        assert torch.equal(one_shot.add(torch.ones(4, 5)), torch.ones(4, 5)), "by the group"


def test_all_ranks_add_up_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of them cannot do it in one shot, none does."""

    def one_shot(joined: ProcessGroup, *_: object) -> Add | None:
        return None if joined.rank() == 1 else lambda part: part

    monkeypatch.setattr(group, "_one_shot", one_shot)
    with group_exchanges(2) as ends, ThreadPoolExecutor(2) as threads:

        def add(end: Exchange) -> Tensor:
            assert isinstance(end, GroupExchange)
            return group._gpu_exchange(end._group, torch.float32, torch.device("cpu")).add(torch.ones(2))

        assert all(torch.equal(found, torch.full((2,), 2.0)) for found in threads.map(add, ends))


def test_torch_refuses_a_sum_in_one_shot_without_gpus() -> None:
    with group_exchanges(1) as (end,):
        assert isinstance(end, GroupExchange)
        assert group._one_shot(end._group, 16, torch.float32, torch.device("cpu")) is None


def test_a_sum_in_one_shot_is_at_most_as_large_as_planned() -> None:
    assert max(ONE_SHOT_BYTES.values()) == GPU_EXCHANGE_BYTES


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

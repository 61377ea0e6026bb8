"""Ranks as threads of this process, each with a decoder of its own. They exchange as processes do: through memory, or
through a process group of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from inferd.engine.api.process.shared_memory import create, fill
from inferd.engine.arch.sharding import Rank
from inferd.engine.layers.collectives import Ranks
from inferd.engine.worker.ranks import SharedRanks
from inferd.kernels.ops.gather import Exchange, MemoryExchange, exchange_bytes
from inferd.kernels.ops.gather.group import GroupExchange

Result = TypeVar("Result")


@contextmanager
def exchanges(count: int) -> Iterator[list[Exchange]]:
    """The ends of one memory."""
    descriptor = create()
    fill(descriptor, exchange_bytes(count))
    try:
        yield [MemoryExchange(descriptor, rank, count) for rank in range(count)]
    finally:
        os.close(descriptor)


@contextmanager
def group_exchanges(count: int) -> Iterator[list[Exchange]]:
    """The ends of one process group of gloo, on the loopback interface."""
    store = dist.HashStore()

    def join(rank: int) -> GroupExchange:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(interface="lo")]
        group = dist.ProcessGroup(store, rank, count)
        backend = ProcessGroupGloo(store, rank, count, options)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return GroupExchange(group)

    with ThreadPoolExecutor(count) as threads:
        yield list(threads.map(join, range(count)))


def on_ranks(
    count: int,
    run: Callable[[Ranks], Result],
    through: Callable[[int], contextlib.AbstractContextManager[list[Exchange]]] = exchanges,
    *,
    splits_inputs: bool = False,
) -> list[Result]:
    """The results of `run` on each rank."""

    def inferring(ranks: Ranks) -> Result:
        with torch.inference_mode():
            return run(ranks)

    with through(count) as ends, ThreadPoolExecutor(count) as threads:
        ranks = [SharedRanks(Rank(index, count, splits_inputs=splits_inputs), end) for index, end in enumerate(ends)]
        return list(threads.map(inferring, ranks))


@contextmanager
def alone_in_a_group() -> Iterator[None]:
    """For engines that join a process group, on the loopback interface. A process can be in one such group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield
    if dist.is_initialized():
        dist.destroy_process_group()

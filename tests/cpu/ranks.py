"""Ranks as threads of this process, each with a decoder of its own. They exchange through memory as processes do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from inferd.engine.api.process.shared_memory import create, fill
from inferd.engine.arch.ranks import Rank
from inferd.engine.layers.ranks import Ranks
from inferd.engine.worker.ranks import SharedRanks
from inferd.kernels.gather import Exchange, exchange_bytes

Result = TypeVar("Result")


@contextmanager
def exchanges(count: int) -> Iterator[list[Exchange]]:
    """The ends of one memory."""
    descriptor = create()
    fill(descriptor, exchange_bytes(count))
    try:
        yield [Exchange(descriptor, rank, count) for rank in range(count)]
    finally:
        os.close(descriptor)


def on_ranks(count: int, run: Callable[[Ranks], Result]) -> list[Result]:
    """The results of `run` on each rank."""

    def inferring(ranks: Ranks) -> Result:
        with torch.inference_mode():
            return run(ranks)

    with exchanges(count) as ends, ThreadPoolExecutor(count) as threads:
        ranks = [SharedRanks(Rank(index, count), end) for index, end in enumerate(ends)]
        return list(threads.map(inferring, ranks))

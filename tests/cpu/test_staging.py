"""Values arrive whole although the device copies late: as late as the events allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.engine.worker.cuda import Staging


class Queue:
    """A device that copies only when an event is awaited."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.num_done = 0
        self.waits = 0

    def send(self, goal: Tensor, part: Tensor) -> None:
        self.copies.append(lambda: goal.copy_(part))

    def run_to(self, end: int) -> None:
        for copy in self.copies[self.num_done : end]:
            copy()
        self.num_done = max(self.num_done, end)


class Event:
    def __init__(self, queue: Queue, *, is_broken: bool = False) -> None:
        self._queue, self._is_broken, self._end = queue, is_broken, 0

    def record(self) -> None:
        self._end = len(self._queue.copies)

    def synchronize(self) -> None:
        if not self._is_broken:
            self._queue.waits += self._queue.num_done < self._end
            self._queue.run_to(self._end)


def copied(values: Tensor, dtype: torch.dtype, *, is_broken: bool = False) -> tuple[Tensor, Queue]:
    queue = Queue()
    buffers = [(torch.empty(64, dtype=torch.uint8), Event(queue, is_broken=is_broken)) for _ in range(2)]
    staging, goal = Staging(buffers, queue.send), torch.zeros(values.shape, dtype=dtype)
    for _ in range(2):
        staging.copy(goal, values.clone())
    queue.run_to(len(queue.copies))
    return goal, queue


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (5, 13), (3, 4, 5), (0, 4)])
def test_every_value_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.rand(shape) * 100).to(dtype)
    goal, _ = copied(values, dtype)
    assert torch.equal(goal.view(torch.uint8), values.view(torch.uint8))


def test_values_are_converted_and_may_be_strided() -> None:
    values = torch.randn(9, 31).T
    goal, _ = copied(values, torch.bfloat16)
    assert torch.equal(goal, values.to(torch.bfloat16))


def test_a_buffer_is_filled_while_the_other_is_read() -> None:
    """100 numbers twice are 2 x 7 parts of 16: all but the first two wait for their buffer, for nothing later."""
    _, queue = copied(torch.randn(100), torch.float32)
    assert (len(queue.copies), queue.waits) == (14, 12)


def test_a_buffer_that_is_filled_too_early_is_seen() -> None:
    values = torch.randn(100)
    assert not torch.equal(copied(values, torch.float32, is_broken=True)[0], values)

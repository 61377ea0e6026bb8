"""Copies large host tensors to a GPU through two pinned buffers in turn: the host fills one while the GPU reads the
other. Without them the driver copies pageable memory in pieces on one thread, and the GPU waits for each.

Knows no weights and no stream: copies go to the current one, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 16 * 2**20
"""Bytes of one buffer: the GPU reads it in about 0.3 ms at 50 GB/s, many times longer than a launch takes."""


class Event(Protocol):
    """A point in the GPU's queue."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait for the point that was recorded last, if any."""


def send(goal: Tensor, part: Tensor) -> None:
    """Queue a copy from pinned memory."""
    goal.copy_(part, non_blocking=True)


class Staging:
    """Buffers of bytes in pinned memory, and for each the event behind the last copy that reads it."""

    def __init__(self, buffers: Sequence[tuple[Tensor, Event]], send: Callable[[Tensor, Tensor], None] = send) -> None:
        self._turns, self._send = cycle(buffers), send

    @classmethod
    def on_current_device(cls) -> Staging:
        """Two buffers, and copies to the current GPU."""
        return cls(
            [
                (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        )

    def copy(self, goal: Tensor, values: Tensor) -> None:
        """Copy `values` of the host to `goal`, which is contiguous, and convert them to its dtype on the host. `values`
        may change when this returns."""
        assert goal.shape == values.shape
        flat_goal, flat_values = goal.view(-1), values.reshape(-1)
        first = 0
        while first < len(flat_goal):
            buffer, is_read = next(self._turns)
            is_read.synchronize()
            part = buffer.view(goal.dtype)[: len(flat_goal) - first]
            part.copy_(flat_values[first : first + len(part)])
            self._send(flat_goal[first : first + len(part)], part)
            is_read.record()
            first += len(part)

"""Peaks as the worker measures them: the timed work, the counted work, and that no memory stays in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inferd.engine.api.memory.precision import Quantization
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.peaks import measure

MIB = 2**20


class Timed(CpuDevice):
    """A device with given times for work, which records the memory held meanwhile."""

    def __init__(self, times_s: list[float]) -> None:
        super().__init__(1)
        self.times_s, self.most_bytes, self.num_timed = times_s, 0, 0

    def time_s(self, run: Callable[[], object]) -> float:
        super().time_s(run)
        self.most_bytes = max(self.most_bytes, self.memory_in_use())
        self.num_timed += 1
        return self.times_s.pop(0)


def test_the_best_of_some_runs_is_a_peak() -> None:
    device = Timed([0.01, 0.004, 0.02, 0.008, 0.002, 0.03])
    peaks = measure(device, torch.float32, "none")
    assert peaks.read_bytes_per_s == 64 * MIB / 0.004, "the third run was past the time that reading may take"
    assert peaks.flops_per_s == 2 * 256 * 1024 * 1024 / 0.002


def test_a_slow_device_is_timed_once() -> None:
    device = Timed([5.0, 7.0])
    measure(device, torch.float32, "none")
    assert device.num_timed == 2


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8"), (torch.float32, "int4")],
)
def test_it_fits_the_memory_it_may_take_and_gives_it_back(dtype: torch.dtype, quantization: Quantization) -> None:
    measure(CpuDevice(1), dtype, quantization)
    device = Timed([0.004] * 12)
    before_bytes = device.memory_in_use()
    peaks = measure(device, dtype, quantization)
    assert min(peaks.read_bytes_per_s, peaks.flops_per_s) > 0
    # Since Linux 6.2 each processor counts pages for itself, and adds them to the total later.
    assert 63 * MIB <= device.most_bytes - before_bytes < 72 * MIB
    assert device.memory_in_use() - before_bytes < 2 * MIB

"""Measures the device's peaks at the start: how fast it reads memory, and how fast it multiplies matrices in the served
precision. Every step is compared with them.

The matrix product uses the layers' own kernel, with enough rows to be limited by arithmetic alone. With so many rows
the kernel is within a few percent of the vendor's library, or is that library. The best of several runs counts, because
other work on the machine can only slow a run down.

Measuring takes 64 MiB on a CPU and 512 MiB on a GPU, which are returned. It takes 0.05 to 0.14 s (2 cores of an AMD
EPYC Zen 4, alone and beside other work, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.memory.precision import Quantization
from inferd.engine.quant.recipe import Recipe, recipes
from inferd.engine.worker.device import Device
from inferd.kernels.cpu import pages
from inferd.kernels.ops.linear import ANY, Choices

_MAX_RUNS = 6
_MAX_S = 0.025
"""Most time for each of the two measurements, after its warm-up run. One product in plain PyTorch may take as long."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    read_bytes: int
    """Bytes to read: twice the cache of a CPU's chiplet, or ten times a GPU's cache. If a CPU's caches hold more, their
    bandwidth is measured instead. 64 MiB read 7% faster than 1 GiB on a machine with 32 MiB of cache (2 cores, AMD EPYC
    Zen 4, 2026-11-21)."""
    num_rows: int
    width: int
    """Number of inputs, and of outputs, of the layer."""


_SIZES = {"cpu": _Sizes(2**26, 256, 1024), "cuda": _Sizes(2**29, 4096, 8192)}


@torch.inference_mode()
def measure(device: Device, dtype: torch.dtype, quantization: Quantization, choices: Choices = ANY) -> Peaks:
    """Peaks of `device` for a model with activations in `dtype`, this quantization, and kernels from `choices`."""
    sizes = _SIZES[device.torch_device.type]
    peaks = Peaks(_read_bytes_per_s(device, sizes), _flops_per_s(device, sizes, dtype, recipes(choices)[quantization]))
    device.give_back_freed()
    return peaks


def _read_bytes_per_s(device: Device, sizes: _Sizes) -> float:
    numbers = torch.ones(sizes.read_bytes // 8, dtype=torch.int64, device=device.torch_device)
    return sizes.read_bytes / _best_s(device, numbers.sum)


def _flops_per_s(device: Device, sizes: _Sizes, dtype: torch.dtype, recipe: Recipe) -> float:
    """Speed of a product of random numbers: a GPU multiplies constant ones faster, because they take less power."""

    def normal(num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, sizes.width), dtype=dtype, device=device.torch_device).normal_()

    with pages.apart():
        layer = recipe.layers.bind(weight=normal(sizes.width), bias=None)
    x = normal(sizes.num_rows)
    return 2 * sizes.num_rows * sizes.width**2 / _best_s(device, lambda: layer(x))


def _best_s(device: Device, run: Callable[[], object]) -> float:
    run()
    times_s: list[float] = []
    while len(times_s) < _MAX_RUNS and sum(times_s) < _MAX_S:
        times_s.append(device.time_s(run))
    return min(times_s)

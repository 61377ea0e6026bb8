"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    assert seeds.dtype == positions.dtype == torch.int64, f"int64 is read, not {seeds.dtype} and {positions.dtype}"
    assert scores.shape[1] > 0, "a row needs a token"
    scores, seeds, positions = scores.contiguous(), seeds.contiguous(), positions.contiguous()
    ids = torch.empty_like(seeds)
    native.function("inferd_sample")(
        scores.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        ids.data_ptr(),
        scores.shape[0],
        scores.shape[1],
        torch.get_num_threads(),
    )
    return ids


def noise_and_bound(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The noise of 24-bit integers [N] int32, N a multiple of 16, and the bound that rules tokens out; fp32 [N]. For
    tests."""
    assert bits.dtype == torch.int32 and bits.is_contiguous() and len(bits) % 16 == 0
    noise, bound = torch.empty(2, len(bits)).unbind()
    native.function("inferd_sample_noise")(bits.data_ptr(), noise.data_ptr(), bound.data_ptr(), len(bits))
    return noise, bound

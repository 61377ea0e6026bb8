"""Packs matrices as the tensors of quantized checkpoints, by the definition of each format.

A `Numbers` gives the integers and scales: random ones, so that tests round nothing, or those nearest to given
weights. This file shares no code with the readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Generator, Tensor

Tensors = dict[str, Tensor]
Module = tuple[Tensors, Tensor]
"""(the stored tensors of a module by their suffixes, its weight in fp32)."""


class Numbers(Protocol):
    """The integers and scales of one matrix [out, in]."""

    def integers(
        self, out_size: int, in_size: int, bits: int, size: int, dtype: torch.dtype, is_symmetric: bool, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q unsigned [out, in], zero points, scales), the latter [out, groups]. `order`: inputs sorted by group."""
        ...

    def permutation(self, in_size: int, seed: int) -> Tensor:
        """An order of the inputs; 0 as the seed gives one of its own for each matrix."""
        ...

    def weight(self, out_size: int, in_size: int) -> Tensor:
        """Weights in fp32, for a format that has a scale and no more."""
        ...

    def nvfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(q in 0 .. 15 [out, in], scales e4m3 [out, in / 16], the divisor of all scales [])."""
        ...

    def mxfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor]:
        """(q in 0 .. 15 [out, in], exponents of the scales + 127 [out, in / 32])."""
        ...


Write = Callable[[Numbers, int, int], Module]
"""Makes a module [out, in]."""

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(values: Tensor, bits: int) -> Tensor:
    """[R, C] as [R, C * bits / 32] int32, the first value in the lowest bits."""
    per = 32 // bits
    shifted = values.to(torch.int32).view(len(values), -1, per) << (torch.arange(per, dtype=torch.int32) * bits)
    return shifted.sum(2, dtype=torch.int32)


def weight_of(q: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Tensor:
    size = q.shape[1] // scales.shape[1]
    groups = torch.arange(q.shape[1]) // size if g_idx is None else g_idx.long()
    return (q - zeros[:, groups]).float() * scales.float()[:, groups]


# -- numbers -----------------------------------------------------------------------------------------------------------


class RandomNumbers:
    """Random integers and scales. Rows and groups differ in size."""

    def __init__(self, generator: Generator) -> None:
        self._g = generator

    def integers(
        self, out_size: int, in_size: int, bits: int, size: int, dtype: torch.dtype, is_symmetric: bool, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, groups, middle = self._g, (out_size, in_size // size), 2 ** (bits - 1)
        q = (torch.randn((out_size, in_size), generator=g) * middle / 3 + middle).round().clamp(0, 2 * middle - 1)
        zeros = torch.full(groups, middle)
        if not is_symmetric:
            zeros = zeros + torch.randint(-middle // 4, middle // 4 + 1, groups, generator=g)
        scales = (torch.rand(groups, generator=g) + 0.3) * (torch.rand((out_size, 1), generator=g) + 0.3)
        return q.long(), zeros.long(), (scales * 3 * in_size**-0.5 / middle).to(dtype)

    def permutation(self, in_size: int, seed: int) -> Tensor:
        return torch.randperm(in_size, generator=Generator().manual_seed(seed) if seed else self._g)

    def weight(self, out_size: int, in_size: int) -> Tensor:
        rows = (torch.rand((out_size, 1), generator=self._g) * 4 + 0.3) / math.sqrt(in_size)
        return torch.randn((out_size, in_size), generator=self._g) * rows

    def nvfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randint(0, 16, (out_size, in_size), generator=self._g)
        scales = (torch.rand((out_size, in_size // 16), generator=self._g) * 100 + 20).to(torch.float8_e4m3fn)
        return q, scales, torch.tensor(100 * 3 * in_size**0.5)

    def mxfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor]:
        q = torch.randint(0, 16, (out_size, in_size), generator=self._g)
        return q, torch.randint(120, 124, (out_size, in_size // 32), generator=self._g)


class NearestNumbers:
    """Rounds a weight [out, in] to the nearest numbers. No inputs calibrate it, as those of most writers do."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.float()

    def integers(
        self, out_size: int, in_size: int, bits: int, size: int, dtype: torch.dtype, is_symmetric: bool, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A symmetric group takes the scale with the least error of some that put its largest weight near the end."""
        groups, top = self._weight[:, order].reshape(out_size, -1, size), 2**bits - 1
        zeros = torch.full(groups.shape[:2], 2 ** (bits - 1), dtype=torch.int16)
        if is_symmetric:
            extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
            tried = [extreme / (step / 2 - 2 ** (bits - 1)) for step in (-1, 0, 1, 2)]
            scales = torch.cat(tried, 2).to(dtype).float()
            scales = torch.where(scales == 0, 1, scales)
            errors = [
                (_rounded(groups, scales[:, :, index], zeros, top)[1] - groups).square().sum(2)
                for index in range(len(tried))
            ]
            scales = scales.gather(2, torch.stack(errors, 2).argmin(2, keepdim=True)).squeeze(2)
        else:
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            scales = ((high - low).clamp(min=1e-6) / top).to(dtype).float()
            zeros = (-low / scales).round().clamp(0, top).to(torch.int16)
        q = _rounded(groups, scales, zeros, top)[0].flatten(1).to(torch.int16)
        return q[:, order.argsort()], zeros, scales.to(dtype)

    def permutation(self, in_size: int, seed: int) -> Tensor:
        return torch.randperm(in_size, generator=Generator().manual_seed(seed or int(self._weight.shape[0])))

    def weight(self, out_size: int, in_size: int) -> Tensor:
        return self._weight

    def nvfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor, Tensor]:
        groups = self._weight.reshape(out_size, -1, 16)
        largest = groups.abs().amax(2)
        whole = 448 * 6 / largest.max()
        scales = (largest / 6 * whole).clamp(min=2**-9).to(torch.float8_e4m3fn)
        return _e2m1(groups / (scales.float() / whole).unsqueeze(2)).flatten(1), scales, whole

    def mxfp4(self, out_size: int, in_size: int) -> tuple[Tensor, Tensor]:
        groups = self._weight.reshape(out_size, -1, 32)
        exponents = (groups.abs().amax(2).clamp(min=2**-100).log2().floor() - 2).long() + 127
        return _e2m1(groups / torch.exp2(exponents.float() - 127).unsqueeze(2)).flatten(1), exponents


def _rounded(groups: Tensor, scales: Tensor, zeros: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(q, the weights that it stands for), of groups [out, groups, size]."""
    scale, zero = scales.unsqueeze(2), zeros.unsqueeze(2)
    q = ((groups / scale).round_() + zero).clamp_(0, top)
    return q, (q - zero) * scale


def _e2m1(x: Tensor) -> Tensor:
    """The nearest of the 16 numbers of E2M1."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return torch.bucketize(x.abs(), bounds) + 8 * (x < 0).long()


# -- formats -----------------------------------------------------------------------------------------------------------


def packed(bits: int, size: int | None, is_symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Write:
    def write(numbers: Numbers, out_size: int, in_size: int) -> Module:
        natural = torch.arange(in_size)
        q, zeros, scales = numbers.integers(out_size, in_size, bits, size or in_size, dtype, is_symmetric, natural)
        tensors = {
            "weight_packed": words(q, bits), "weight_scale": scales, "weight_shape": torch.tensor([out_size, in_size]),
        }  # fmt: skip
        if not is_symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, weight_of(q, zeros, scales)

    return write


def in_bytes(numbers: Numbers, out_size: int, in_size: int) -> Module:
    q, zeros, scales = numbers.integers(out_size, in_size, 8, in_size, torch.bfloat16, True, torch.arange(in_size))
    return {"weight": (q - 128).to(torch.int8), "weight_scale": scales}, weight_of(q, zeros, scales)


def gptq(bits: int, size: int, is_symmetric: bool, version: int = 1, order: int | None = None) -> Write:
    """`order`: seed of `Numbers.permutation`; None: the inputs have their own order."""

    def write(numbers: Numbers, out_size: int, in_size: int) -> Module:
        inputs = torch.arange(in_size) if order is None else numbers.permutation(in_size, order)
        q, zeros, scales = numbers.integers(out_size, in_size, bits, size, torch.float16, is_symmetric, inputs)
        g_idx = torch.empty(in_size, dtype=torch.long)
        g_idx[inputs] = torch.arange(in_size) // size
        tensors = {
            "qweight": words(q, bits).T,
            "qzeros": words(zeros.T - (2 - version), bits),
            "scales": scales.T,
            "g_idx": g_idx.to(torch.int32),
            "bias": torch.zeros(out_size, dtype=torch.float16),
        }  # fmt: skip
        return tensors, weight_of(q, zeros, scales, g_idx)

    return write


def awq(size: int) -> Write:
    def write(numbers: Numbers, out_size: int, in_size: int) -> Module:
        natural = torch.arange(in_size)
        q, zeros, scales = numbers.integers(out_size, in_size, 4, size, torch.float16, False, natural)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the output in each place of a word

        def in_order(values: Tensor) -> Tensor:
            return words(values.reshape(len(values), -1, 8)[:, :, order].flatten(1), 4)

        tensors = {"qweight": in_order(q.T), "qzeros": in_order(zeros.T), "scales": scales.T}
        return tensors, weight_of(q, zeros, scales)

    return write


def nvfp4(is_modelopt: bool) -> Write:
    def write(numbers: Numbers, out_size: int, in_size: int) -> Module:
        q, scales, whole = numbers.nvfp4(out_size, in_size)
        pairs = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
        weight = E2M1[q] * (scales.float() / whole).repeat_interleave(16, 1)
        if not is_modelopt:
            names = {"weight_packed": pairs, "weight_global_scale": whole.reshape(1)}
            return {**names, "weight_scale": scales, "input_global_scale": torch.ones(1)}, weight
        weight = E2M1[q] * (scales.float() * (1 / whole)).repeat_interleave(16, 1)
        return {"weight": pairs, "weight_scale": scales, "weight_scale_2": 1 / whole, "input_scale": whole}, weight

    return write


def mxfp4(numbers: Numbers, out_size: int, in_size: int) -> Module:
    q, exponents = numbers.mxfp4(out_size, in_size)
    pairs = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    weight = E2M1[q] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": pairs, "weight_scale": exponents.to(torch.uint8)}, weight


# -- FP8 ---------------------------------------------------------------------------------------------------------------

FP8_BLOCK = 128
_FP8_MOST = 448


def of_tensor(weight: Tensor) -> Tensor:
    return (weight.abs().amax() / _FP8_MOST).reshape(())


def of_rows(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / _FP8_MOST


def of_blocks(weight: Tensor) -> Tensor:
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK).abs().amax((1, 3)) / _FP8_MOST


def widened(scales: Tensor, shape: torch.Size) -> Tensor:
    """Stored scales, repeated to [out, in]: one of all weights, of each row [out, 1], or of each block."""
    if scales.dim() == 2 and scales.shape[0] != shape[0]:
        return scales.repeat_interleave(FP8_BLOCK, 0)[: shape[0]].repeat_interleave(FP8_BLOCK, 1)[:, : shape[1]]
    return scales.float().reshape(-1, 1).expand(shape)


def in_e4m3(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(q e4m3 [out, in], the weights that it stands for)."""
    wide = widened(scales, weight.shape).float()
    q = (weight / wide).clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)
    return q, q.float() * wide


def fp8(
    scales_of: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, suffix: str = "weight_scale"
) -> Write:
    """`scales_of`: weight [out, in] -> its scales in the stored shape. None is 0, because readers refuse that."""

    def write(numbers: Numbers, out_size: int, in_size: int) -> Module:
        weight = numbers.weight(out_size, in_size)
        scales = scales_of(weight).clamp(min=2**-60).to(dtype)
        q, plain = in_e4m3(weight, scales)
        return {"weight": q, suffix: scales}, plain

    return write

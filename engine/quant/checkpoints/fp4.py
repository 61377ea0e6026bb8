"""Reads numbers of 4 bits in e2m1: MXFP4 with a power of two for each 32 inputs, NVFP4 with two levels of scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.arch.formats import Fp4
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.integers import groups, nibbles, weights
from inferd.engine.quant.checkpoints.reader import DAMAGED, CheckpointError, Reader, Rows, Tensors, check_scales

_E8M0_NAN = 255
_E8M0_BIAS = 127


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    form = source.format
    assert isinstance(form, Fp4)
    name, scales = f"{source.module}.weight_scale", tensors["weight_scale"]
    if form.global_scale is None:
        if (scales.view(torch.uint8) == _E8M0_NAN).any():
            raise CheckpointError(f"{name} must hold powers of two, but holds NaN (0xFF in e8m0): {DAMAGED}")
        return
    check_scales(f"{source.module}.{form.global_scale}", tensors[form.global_scale])
    # A small group's scale may be rounded to 0 in e4m3, but not the largest group's.
    whole = _scales(form, tensors)
    if not (whole.isfinite() & (whole >= 0)).all() or not whole.any():
        raise CheckpointError(
            f"{name} must hold finite numbers of at least 0, and others than 0, but they and the matrix's scale give "
            f"{whole.min():.3g} to {whole.max():.3g}: {DAMAGED}"
        )


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form = source.format
    assert isinstance(form, Fp4)
    yield groups(source, "scales", _scales(form, tensors))

    def unpack(rows: slice) -> Tensor:
        return nibbles(tensors[form.weight][rows])

    yield from weights(source, unpack, None)


def _scales(form: Fp4, tensors: Tensors) -> Tensor:
    """In bf16, which holds every power of two of MXFP4, or in fp32 for NVFP4."""
    scales = tensors["weight_scale"]
    if form.global_scale is None:
        return powers_of_two(scales.view(torch.uint8))
    whole, own = tensors[form.global_scale].reshape(()), scales.to(torch.float32)
    return own / whole if form.is_divisor else own * whole


def powers_of_two(codes: Tensor) -> Tensor:
    """Numbers in e8m0, given as bytes, in bf16. The code of NaN becomes infinity."""
    return torch.exp2(codes.to(torch.float64) - _E8M0_BIAS).to(torch.bfloat16)


READER = Reader(_check, _read)

"""The embedding rows of a step's tokens, computed by torch or by a kernel that can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.registry import Implementation, Op, always


class Key(NamedTuple):
    device_type: str


def cpp(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    token_ids = token_ids.contiguous()
    out = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=dtype)
    native.function("inferd_embed")(
        token_ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        token_ids.shape[0],
        weight.shape[0],
        weight.stride(0) * weight.element_size(),
        weight.shape[1] * weight.element_size(),
        0 if dtype == weight.dtype else native.WEIGHT_CODES[weight.dtype],
    )
    return out


def reference(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.embedding(token_ids, weight).to(dtype)


EMBED: Op[Key, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = Op(
    "embed",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type)),
        Implementation("reference", reference, always),
    ],
)


def embed(token_ids: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """weight [V, hidden] of any dtype, token_ids [T] int64 below V -> [T, hidden] in `dtype`: the weight's (None), or
    float32 if the weight has 16 bits."""
    dtype = dtype or weight.dtype
    assert token_ids.dtype == torch.int64 and weight.stride(1) == 1
    assert dtype == weight.dtype or (dtype == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16))
    return EMBED.resolve(Key(weight.device.type))(token_ids, weight, dtype)

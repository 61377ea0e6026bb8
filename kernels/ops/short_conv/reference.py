"""The convolution in plain PyTorch: products in fp32, added from the oldest input to the newest.

Silu is composed of exp, whose bits do not depend on the number of elements (`kernels/ops/gated_mul/reference`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.states import StateRows


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: tuple[Tensor, Tensor] | None,
    state: Tensor,
    rows: StateRows,
    has_silu: bool,
) -> Tensor:
    x = x if gates is None else x * gates[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[0]
    for tokens, slot, begins, num_kept in rows.spans():
        history = torch.zeros_like(state[slot]) if begins else state[slot]
        inputs = torch.cat([history, x[tokens]])
        num_tokens = inputs.shape[0] - width + 1
        wide = inputs.to(torch.float32)
        total = wide[:num_tokens] * weight[0]
        for place in range(1, width):
            total = total + wide[place : place + num_tokens] * weight[place]
        total = total if bias is None else total + bias
        total = total / torch.neg(total).exp_().add_(1.0) if has_silu else total
        out[tokens] = (total if gates is None else total * gates[1][tokens].to(torch.float32)).to(x.dtype)
        state[slot] = inputs[num_kept : num_kept + width - 1]
    return out

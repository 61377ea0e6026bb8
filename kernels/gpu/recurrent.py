"""Shared parts of the Triton kernels that advance a state [K, V] of each head, token by token.

The columns of a state do not see each other. So a program takes some columns of one head of a row through all its
tokens. They stay in the registers of one warp, which adds up a column without waiting for other warps.
While a token is computed, the numbers of the next one are on their way. Every row runs the same loop, whatever its
length. So a token's bits do not depend on how its sequence was cut into steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.ops.states import StateRows

_COLUMNS, _NUM_WARPS = 8, 1
"""8 columns of 128 rows are 32 registers of each thread."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)). Small results are precise too: log(1 + u) = log(w) u / (w - 1), with w = 1 + u as it is rounded
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, 1.14.1)."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))


def run(kernel: Any, inputs: tuple[Tensor, ...], state: Tensor, rows: StateRows, out: Tensor, *numbers: int) -> Tensor:
    """`out`, written by `kernel(*inputs, state, query_start, positions, slots, out, *numbers)`."""
    _, num_heads, key_dim, value_dim = state.shape
    kernel[(triton.cdiv(value_dim, _COLUMNS), num_heads, rows.slots.shape[0])](
        *inputs,
        state,
        rows.query_start,
        rows.positions,
        rows.slots,
        out,
        *numbers,
        **_constants(key_dim, value_dim),
        **dependent_options(),
        num_warps=_NUM_WARPS,
    )
    return out


def _constants(key_dim: int, value_dim: int) -> dict[str, int]:
    block_key = triton.next_power_of_2(key_dim)
    return {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_KEY": block_key, "COLUMNS": _COLUMNS}


def form(
    kernel: Any,
    op: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    inputs: dict[str, str],
    out_dtype: torch.dtype,
    numbers: tuple[str, ...],
) -> Shipped:
    """The form of `run` for states of `sizes`. `inputs` and `numbers` name its arguments; the former have types."""
    return Shipped(
        op=op,
        config=f"{DTYPES[dtype]} {'x'.join(map(str, sizes))}",
        kernel=kernel,
        signature={
            **inputs,
            "state": "*fp32",
            "query_start": "*i32",
            **dict.fromkeys(("positions", "slots"), "*i64"),
            "out": f"*{DTYPES[out_dtype]}",
            **dict.fromkeys(numbers, "i32"),
        },
        constants={**_constants(*sizes), "IS_DEPENDENT": False},
        num_warps=_NUM_WARPS,
        multiples=tuple(name for name in numbers if name.endswith("stride")),
    )

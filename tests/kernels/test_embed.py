"""The lookup equals torch's own bit for bit, and an id that does not exist gives NaN."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.cpu import native
from inferd.kernels.ops.embed import cpp, embed
from tests.conftest import KERNEL_CACHE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_torch(dtype: torch.dtype, num_tokens: int) -> None:
    weight, token_ids = torch.randn(50, 19).to(dtype), torch.randint(0, 50, (num_tokens,))
    assert torch.equal(embed(token_ids, weight), weight[token_ids])
    assert torch.equal(embed(token_ids.expand(3, -1)[0], weight[:, 2:9]), weight[token_ids][:, 2:9])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_widened_exactly(dtype: torch.dtype) -> None:
    """Every finite number once."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = torch.where(numbers.isfinite(), numbers, 1.0).view(64, 1024)
    token_ids = torch.randperm(64)
    rows = embed(token_ids, weight[:, 3:], torch.float32)
    assert torch.equal(rows.view(torch.int32), weight[token_ids, 3:].float().view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_id_that_does_not_exist_is_no_number(dtype: torch.dtype) -> None:
    """C++ only: it does not check ids."""
    if native.prepare(KERNEL_CACHE).path is None:
        pytest.skip("there is no C++ compiler")
    weight = torch.randn(50, 19).to(dtype)
    for out_dtype in (dtype, torch.float32):
        rows = cpp(torch.tensor([3, 50, -1]), weight, out_dtype)
        assert rows.dtype == out_dtype and rows.isnan().all(dim=1).tolist() == [False, True, True]

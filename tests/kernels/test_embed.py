"""The lookup equals torch's own bit for bit, and an id that does not exist gives NaN."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels import native
from inferd.kernels.embed import cpu, embed
from tests.conftest import KERNEL_CACHE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_torch(dtype: torch.dtype, num_tokens: int) -> None:
    weight, token_ids = torch.randn(50, 19).to(dtype), torch.randint(0, 50, (num_tokens,))
    assert torch.equal(embed(token_ids, weight), weight[token_ids])
    assert torch.equal(embed(token_ids.expand(3, -1)[0], weight[:, 2:9]), weight[token_ids][:, 2:9])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_id_that_does_not_exist_is_no_number(dtype: torch.dtype) -> None:
    """C++ only: it does not check ids."""
    if native.prepare(KERNEL_CACHE).path is None:
        pytest.skip("there is no C++ compiler")
    rows = cpu.embed(torch.tensor([3, 50, -1]), torch.randn(50, 19).to(dtype))
    assert rows.isnan().all(dim=1).tolist() == [False, True, True]

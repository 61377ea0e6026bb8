"""Random inputs are the same in every run, nothing records gradients, and shapes this small run on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield

"""Random inputs are the same in every run. One thread: these shapes are too small to share out."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)

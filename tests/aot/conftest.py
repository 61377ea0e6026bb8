"""These tests compile kernels for GPUs, and depend on the kernels and the driver of GPU rows alone."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.recorded("kernels"))

"""The rates of products from registers: those that the processor has, and no others."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from inferd.kernels.cpu import library, native, product_rates
from tests.conftest import KERNEL_CACHE

OF_EVERY_LEVEL = {"float32", "8 bits", "4 bits"}
OF_LEVELS = {
    "amx": {"bfloat16", "bfloat16 in tiles", "8 bits in tiles"},
    "avx512_bf16": {"bfloat16"},
}


@pytest.fixture(autouse=True)
def _native_kernels() -> None:
    built = native.prepare(KERNEL_CACHE)
    if not library.has_compiler():
        pytest.skip(built.reason)


def test_rates_are_those_that_the_processor_has() -> None:
    rates = product_rates.measure(2)
    assert set(rates) == OF_EVERY_LEVEL | OF_LEVELS.get(native.level(), set())
    assert all(1e8 < rate < 1e15 for rate in rates.values())


def test_operations_are_counted_for_all_threads() -> None:
    def operations(kind: int, rounds: int, threads: int) -> float:
        place = ctypes.c_double()
        native.function("inferd_product_rates")(ctypes.addressof(place), kind, rounds, threads)
        return place.value

    assert operations(0, 7, 3) == 21 * operations(0, 1, 1) > 0
    assert operations(len(product_rates.KINDS), 7, 3) == 0


def test_built_kernels_are_loaded_and_none_are_built(tmp_path: Path) -> None:
    assert native.prepare(tmp_path / "none", may_build=False).reason == "none are built yet"
    assert not (tmp_path / "none").exists()
    assert native.prepare(KERNEL_CACHE, may_build=False).path is not None
    assert native.missing() is None

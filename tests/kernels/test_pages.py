"""Memory for packed weights: in huge pages, side by side, and freed with its tensors."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages
from inferd.kernels.ops.linear import cpu as dense
from inferd.kernels.ops.linear_int4 import linear_int4, quantize_int4
from inferd.kernels.ops.linear_int8 import linear_int8, quantize_int8
from tests.conftest import KERNEL_CACHE
from tests.kernels.conftest import forced

SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="the system does not show the pages of a process")


def places_of(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """(first byte, end) of each tensor, ascending."""
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)


def advised_bytes() -> tuple[int, int]:
    """(address space, resident memory) for which this process asked for huge pages."""
    found = re.findall(r"^Size: +(\d+) kB$.*?^Rss: +(\d+) kB$.*?^VmFlags:([^\n]*)$", SMAPS.read_text(), re.S | re.M)
    advised = [(int(size), int(rss)) for size, rss, flags in found if "hg" in flags.split()]
    return sum(size for size, _ in advised) * 1024, sum(rss for _, rss in advised) * 1024


def test_tensors_lie_on_cache_lines_side_by_side() -> None:
    sizes = [1, 63, 64, 65, 576 * 576, 3, 1536 * 576 // 2]
    kept = [pages.empty(size) for size in sizes]
    places = places_of(kept)
    assert all(first % 64 == 0 for first, _ in places)
    assert all(0 <= first - end < 64 for (_, end), (first, _) in pairwise(places))
    assert [tensor.shape for tensor in kept] == [(size,) for size in sizes]


def test_a_tensor_has_its_dtype_and_can_be_written() -> None:
    kept = pages.empty(100, torch.bfloat16)
    kept.fill_(1.5)
    other = pages.empty(100, torch.int32)
    other.fill_(-1)
    assert kept.dtype == torch.bfloat16 and (kept == 1.5).all() and (other == -1).all()


def test_a_chunk_begins_on_a_huge_page() -> None:
    large = pages.empty(300 * 2**20)
    small = pages.empty(2**20)
    assert large.data_ptr() % pages.PAGE_BYTES == 0
    assert 0 <= small.data_ptr() - (large.data_ptr() + large.nbytes) < 64 or small.data_ptr() % pages.PAGE_BYTES == 0


def test_threads_get_memory_of_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(pages.empty, [100_000] * 500))
    places = places_of(kept)
    assert all(end <= first for (_, end), (first, _) in pairwise(places))


@needs_smaps
def test_memory_is_freed_with_the_last_tensor_of_its_chunk() -> None:
    before, _ = advised_bytes()
    large = pages.empty(300 * 2**20)
    beside = pages.empty(2**18)
    mapped, _ = advised_bytes()
    del large
    kept, _ = advised_bytes()
    del beside
    after, _ = advised_bytes()
    assert mapped >= before + 300 * 2**20 and kept == mapped and after == before


@needs_smaps
def test_many_small_tensors_take_their_own_size() -> None:
    """A page for each would be six times as much."""
    _, before = advised_bytes()
    kept = [pages.empty(576 * 576).fill_(1) for _ in range(210)]
    _, after = advised_bytes()
    taken = sum(tensor.nbytes for tensor in kept)
    assert taken <= after - before <= taken + 2 * pages.PAGE_BYTES


@needs_smaps
def test_memory_apart_is_freed_while_other_weights_stay() -> None:
    kept = pages.empty(1000).fill_(1)
    mapped, _ = advised_bytes()
    with pages.apart():
        apart = pages.empty(8 * 2**20).fill_(2)
    assert advised_bytes()[0] > mapped
    after = pages.empty(1000).fill_(3)
    assert 0 < after.data_ptr() - kept.data_ptr() < 2000, "it lies in the chunk of the first"
    del apart
    assert advised_bytes()[0] == mapped


@pytest.mark.parametrize("lacks", ["advice", "name"])
def test_a_system_without_huge_pages_gives_plain_ones(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "advice":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 99)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    kept = pages.empty(300 * 2**20)[: 2**20].fill_(7)
    assert (kept == 7).all()


def bind_dense(weight: Tensor) -> object:
    return dense.bind(weight, None, weight.dtype, torch.float32)


def bind_int8(weight: Tensor) -> object:
    return linear_int8(*quantize_int8(weight), None, torch.float32)


def bind_int4(weight: Tensor) -> object:
    q, scales, minimums = quantize_int4(weight)
    return linear_int4(q, scales, None, torch.float32, minimums=minimums)


@pytest.fixture
def compiled() -> Iterator[str]:
    """Makes every op run its C++ kernel. Skips the test if there are no C++ kernels."""
    built = native.prepare(KERNEL_CACHE)
    if built.path is None:
        pytest.skip(built.reason)
    yield from forced("cpp", "cpp")


@needs_smaps
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("bind", "bits"), [(bind_dense, 32), (bind_int8, 8), (bind_int4, 4)])
def test_packed_weights_are_in_huge_pages(bind: Callable[[Tensor], object], bits: int) -> None:
    _, before = advised_bytes()
    kept = bind(torch.randn(2048, 2048))
    _, after = advised_bytes()
    packed = 2048 * 2048 * bits // 8
    assert kept is not None
    assert packed <= after - before <= packed * 1.2 + pages.PAGE_BYTES

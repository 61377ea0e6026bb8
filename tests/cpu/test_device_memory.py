"""Copies between a device's pool and host memory: the same bytes as those of a CPU's pool, all there when awaited."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.arch.registry import describe
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.device_memory import DeviceMemory, hold_places
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.engine.worker.states import StatePool
from tests.cpu import cases
from tests.cpu.checkpoints import Case
from tests.cpu.recorded_gpu.device import recorded_gpu
from tests.cpu.recorded_gpu.order import FaultError

BLOCKS, CHECKPOINTS, SLOTS, BLOCK = 5, 2, 3, 16
LAYOUTS = {
    "full": cases.CASES[0],
    "windowed": Case("gemma2", "gemma2", {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 20}),
    "hybrid": next(case for case in cases.HYBRIDS if case.name == "qwen 3.5"),
}


class Late:
    """A stream that copies nothing before somebody waits for it, as a GPU may."""

    def __init__(self, _: torch.device) -> None:
        self._queue: list[tuple[Tensor, Tensor]] = []
        self.before_copies: Callable[[], None] = lambda: None

    def copy(self, goals: list[Tensor], sources: list[Tensor]) -> None:
        assert all(len(goal) == len(source) for goal, source in zip(goals, sources, strict=True))
        assert all(tensor.is_contiguous() for tensor in (*goals, *sources))
        self._queue += zip(goals, sources, strict=True)

    @torch.inference_mode()
    def wait(self) -> None:
        self.before_copies()
        for goal, source in self._queue:
            goal.copy_(source)
        self._queue.clear()


class Pools:
    """The pools of a model in the memory of a CPU, and the same memory as that of a device."""

    def __init__(
        self, layout: str, dtype: torch.dtype, open_stream: Callable[[torch.device], Any] | None = Late
    ) -> None:
        case, self.file = LAYOUTS[layout], MemoryFile(POOL_MEMORY)
        self.arch = describe(case.config_json())
        memory = PoolMemory.open(self.file.path, BLOCKS + CHECKPOINTS, b"")
        assert memory is not None
        self.memory, device = memory, CpuDevice(1, memory)
        self.kv = KVPool.allocate(self.arch, BLOCKS, BLOCK, dtype, device)
        self.states = StatePool.allocate(self.arch, SLOTS, CHECKPOINTS, torch.bfloat16, device)
        self.device = DeviceMemory(torch.device("cpu"), open_stream)
        for each in (memory, self.device):
            hold_places(each, self.kv, self.states, BLOCKS, CHECKPOINTS, self.arch)
        self.num_groups = len(self.arch.cache_groups)
        """Those of the windowed layout have 2, 1, 2 and 2 planes."""
        self.fill(1)

    @property
    def tensors(self) -> list[Tensor]:
        states = () if self.states is None else (self.states.matrices, self.states.inputs)
        return [tensor.view(torch.uint8) for tensor in (self.kv.data, self.kv.scales, *states) if tensor is not None]

    def fill(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=random, dtype=torch.uint8))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every place in every group that it may have."""
        blocks = [(place, group) for place in range(BLOCKS) for group in range(self.num_groups)]
        return blocks + [(BLOCKS + each, self.num_groups) for each in range(CHECKPOINTS if self.states else 0)]

    def bytes_of(self, row: tuple[int, int]) -> bytes:
        return b"".join(self.memory.pieces(*row))


@pytest.fixture(params=[(layout, dtype) for layout in LAYOUTS for dtype in (torch.bfloat16, torch.int8)], ids=str)
def pools(request: pytest.FixtureRequest) -> Pools:
    return Pools(*request.param)


def test_rows_have_the_bytes_and_sizes_of_a_pool_in_host_memory(pools: Pools) -> None:
    assert pools.device.row_layout == pools.memory.row_layout
    rows = [None, *pools.rows, None]
    buffers = pools.device.buffers(rows)
    assert pools.device.fetch(rows, buffers), "it is a copy"
    found = [b"".join(parts) for parts in buffers]
    assert found == [b"", *map(pools.bytes_of, pools.rows), b""]
    for row in pools.rows:
        assert pools.device.row_bytes(*row) == pools.memory.row_bytes(*row) == len(pools.bytes_of(row))
    sizes = [pools.device.row_bytes(*row) for row in pools.rows if row[0] < BLOCKS]
    assert pools.device.block_bytes == max(sizes)
    pools.fill(2)
    assert [b"".join(parts) for parts in buffers] == found, "it changes with the pool"


def test_stored_rows_fill_their_places_and_no_others(pools: Pools) -> None:
    rows = pools.rows[:: 2 if pools.num_groups == 1 else 3]
    buffers = pools.device.buffers(rows)
    pools.device.fetch(rows, buffers)
    stored = [pools.bytes_of(row) for row in rows]
    pools.fill(2)
    others = [row for row in pools.rows if row[0] not in {place for place, _ in rows}]
    kept = [pools.bytes_of(row) for row in others]
    pools.device.store(rows, buffers)
    assert [pools.bytes_of(row) for row in rows] == stored and [pools.bytes_of(row) for row in others] == kept


def test_host_memory_in_pieces_of_any_size_has_the_same_bytes() -> None:
    """The pages of a store: borders lie anywhere in a plane."""
    pools, random = Pools("hybrid", torch.int8), Random(5)
    for row in pools.rows:
        whole, expected = memoryview(bytearray(pools.device.row_bytes(*row))), pools.bytes_of(row)
        cuts = sorted({0, len(whole), *(random.randrange(1, len(whole)) for _ in range(4))})
        parts = [whole[start:end] for start, end in pairwise(cuts)]
        pools.device.fetch([row], [parts])
        assert bytes(whole) == expected
        pools.fill(random.randrange(100))
        pools.device.store([row], [parts])
        assert pools.bytes_of(row) == expected


def test_threads_have_memory_of_their_own() -> None:
    pools, found = Pools("full", torch.bfloat16, None), list[bytes]()
    rows, others = pools.rows[:2], pools.rows[2:4]
    buffers = pools.device.buffers(rows)
    pools.device.fetch(rows, buffers)

    def fetch() -> None:
        own = pools.device.buffers(others)
        pools.device.fetch(others, own)
        found.extend(b"".join(parts) for parts in own)

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert found == [pools.bytes_of(row) for row in others]
    assert [b"".join(parts) for parts in buffers] == [pools.bytes_of(row) for row in rows]


# -- on a recorded GPU -------------------------------------------------------------------------------------------------


class Pinned(DeviceMemory):
    """Remembers its pinned memory: the recorder does not know tensors that are made of a buffer."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.chunks: list[Tensor] = []

    def allocate(self, num_bytes: int) -> memoryview:
        self.chunks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        return memoryview(self.chunks[-1].numpy().data)

    def frombuffer(self, view: memoryview, dtype: torch.dtype) -> Tensor:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        chunk = next(chunk for chunk in self.chunks if 0 <= address - chunk.data_ptr() < len(chunk))
        start = address - chunk.data_ptr()
        return chunk[start : start + len(view)]


@pytest.mark.parametrize("fault", ["", "the step is not awaited", "copies are not awaited"])
def test_copies_beside_steps_are_ordered_by_what_the_host_awaits(
    fault: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes the pool, a thread copies a block and puts it elsewhere, and another step reads that."""
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    is_found = pytest.raises(FaultError) if fault else nullcontext()
    with is_found, recorded_gpu(), ThreadPoolExecutor(1) as tier:
        memory = Pinned()
        monkeypatch.setattr(torch, "frombuffer", memory.frombuffer)
        if fault == "copies are not awaited":
            monkeypatch.setattr("inferd.engine.worker.device_memory._CudaCopies.wait", lambda _: None)
        pool = torch.zeros(3, 4, 8, 16, dtype=torch.bfloat16, device=torch.device("cuda", 0))
        memory.hold(pool, 0, 4, (3,))
        pool += 7  # a step
        if fault != "the step is not awaited":
            torch.cuda.current_stream().record_event().synchronize()  # type: ignore[no-untyped-call]

        def move() -> int:
            buffers = memory.buffers([(1, 0)])
            memory.fetch([(1, 0)], buffers)
            total = int(memory.chunks[0].sum())  # as a checksum does
            memory.store([(2, 0)], buffers)
            return total

        assert tier.submit(move).result() > 0
        assert torch.equal((pool[:, 2] * 2).cpu(), (pool[:, 1] * 2).cpu())

"""The state after a failed capture. torch's part of a GPU is simulated after its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.worker.cuda import CudaDevice
from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.device import DeviceProperties
from inferd.kernels.gpu import dependent_options
from inferd.kernels.registry import KernelError

HOPPER = DeviceProperties.of(90, 132)


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def wait_stream(self, other: Stream) -> None:
        assert self._gpu.capturing is None
        self._gpu.events.append(f"{self.name} waits for {other.name}")


class Gpu:
    """Simulates streams, captures and their memory pools. An invalidated capture cannot be ended: its stream stays the
    current one, and its pool stays taken."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.properties = DeviceProperties.of(80, 108)
        patch.setattr("inferd.kernels.gpu.properties_of", lambda *_: self.properties)
        self.current, self.side = Stream(self, "current"), Stream(self, "side")
        self.now = self.current
        self.capturing: int | None = None
        self.is_invalid = False
        self._num_pools, self._taken = 0, set[int]()
        for name, value in {
            "set_device": lambda _: None,
            "get_device_name": lambda _: "a GPU",
            "graph_pool_handle": self._pool,
            "Stream": lambda _: self.side,
            "current_stream": lambda: self.now,
            "set_stream": lambda stream: setattr(self, "now", stream),
            "stream": self._on,
            "CUDAGraph": lambda: self,
            "graph": self._capture,
        }.items():
            patch.setattr(torch.cuda, name, value)

    def _pool(self) -> int:
        self._num_pools += 1
        return self._num_pools

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def _capture(self, graph: Gpu, *, pool: int, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert graph is self and capture_error_mode == "thread_local"
        if pool in self._taken:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        before, self.now = self.now, stream
        self._taken.add(pool)
        self.capturing, self.is_invalid = pool, False
        try:
            yield
        finally:
            self.capturing = None
            if self.is_invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self._taken.remove(pool)
            self.now = before

    def replay(self) -> None:
        assert self.now is self.current and self.capturing is None
        self.events.append("replay")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_cublas_gives_back_its_workspaces_until_a_step_is_recorded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes on to use the workspace of its capture. torch without the function keeps all of them."""
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: gpu.events.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.events.append("empty"))
    device = CudaDevice()
    device.give_back_freed()
    assert gpu.events == ["clear", "empty"]
    device.record(lambda: torch.zeros(1))
    gpu.events.clear()
    device.give_back_freed()
    assert gpu.events == ["empty"]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    CudaDevice().give_back_freed()
    assert gpu.events == ["empty"] * 2


def test_a_failed_capture_keeps_the_workspaces(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets no recording of it, but an earlier one may be in use."""
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: gpu.events.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = CudaDevice()
    with pytest.raises(NotRecordableError):
        device.record(failing(gpu, RuntimeError("no"), 1))
    gpu.events.clear()
    device.give_back_freed()
    assert gpu.events == []


def failing(gpu: Gpu, error: Exception, at_run: int) -> Callable[[], Tensor]:
    runs: list[int] = []

    def run() -> Tensor:
        assert gpu.now is gpu.side
        runs.append(1)
        if len(runs) == at_run:
            gpu.is_invalid = not isinstance(error, torch.OutOfMemoryError)
            raise error
        return torch.zeros(1)

    return run


@pytest.mark.parametrize(("sm", "says"), [(86, 0), (103, 1)])
def test_a_gpu_that_no_table_knows_is_said_in_one_line(
    gpu: Gpu, sm: int, says: int, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.properties = DeviceProperties.of(sm, 148)
    assert CudaDevice().properties == gpu.properties
    assert len(caplog.messages) == says
    if says:
        assert caplog.messages[0] == (
            "a GPU has compute capability 10.3, for which no kernel was compiled and judged: it gets the safest forms"
        )


FAILURES: list[Any] = [
    pytest.param(RuntimeError("operation not permitted when stream is capturing"), 3, id="invalid"),
    pytest.param(torch.OutOfMemoryError("tried to allocate 2 GiB"), 3, id="no memory"),
    pytest.param(torch.OutOfMemoryError("tried to allocate 2 GiB"), 2, id="no memory before the capture"),
]


@pytest.mark.parametrize(("error", "at_run"), FAILURES)
def test_a_failed_capture_costs_itself_alone(gpu: Gpu, error: Exception, at_run: int) -> None:
    device = CudaDevice()
    with pytest.raises(NotRecordableError, match=f"the step cannot be captured: {error}"):
        device.record(failing(gpu, error, at_run))
    assert gpu.now is gpu.current
    assert gpu.events == ["side waits for current", "current waits for side"]
    assert float(device.record(lambda: torch.zeros(1)).output) == 0.0
    assert gpu.events[2:] == ["side waits for current", "current waits for side", "replay"]


def test_each_step_runs_before_its_capture(gpu: Gpu) -> None:
    """A kernel must not be loaded during a capture. The first capture of all has two such runs, each later one one."""
    device = CudaDevice()
    for expected in ([None, None, 1], [None, 1], [None, 1]):
        seen: list[int | None] = []

        def run(seen: list[int | None] = seen) -> Tensor:
            seen.append(gpu.capturing)
            return torch.zeros(1)

        device.record(run)
        assert seen == expected


def test_a_kernel_that_cannot_run_is_no_matter_of_the_capture(gpu: Gpu) -> None:
    """Steps that run call by call would not have it either."""
    with pytest.raises(KernelError, match="cuDNN has no plan"):
        CudaDevice().record(failing(gpu, KernelError("cuDNN has no plan"), 1))
    assert gpu.now is gpu.current


def test_kernels_start_early_within_captures_alone(gpu: Gpu) -> None:
    gpu.properties = HOPPER
    seen: list[bool] = []
    CudaDevice().record(lambda: (seen.append(dependent_options()["launch_pdl"]), torch.zeros(1))[1])
    assert seen == [True] * 3 and not dependent_options()["launch_pdl"]


def test_what_fails_with_early_kernels_is_captured_without_them(gpu: Gpu) -> None:
    gpu.properties, device_runs = HOPPER, list[bool]()

    def run() -> Tensor:
        device_runs.append(dependent_options()["launch_pdl"])
        if gpu.capturing is not None and device_runs[-1]:
            gpu.is_invalid = True
            raise RuntimeError("operation not supported when stream is capturing")
        return torch.zeros(1)

    device = CudaDevice()
    device.record(run)
    device.record(run)
    assert device_runs == [True] * 3 + [False] * 4
    assert not dependent_options()["launch_pdl"]


@pytest.mark.parametrize(
    ("error", "at_run", "num_runs"), [(RuntimeError("no"), 1, 2), (torch.OutOfMemoryError(""), 3, 3)]
)
def test_without_memory_nothing_is_tried_again(gpu: Gpu, error: Exception, at_run: int, num_runs: int) -> None:
    gpu.properties, runs = HOPPER, list[int]()

    def run() -> Tensor:
        runs.append(1)
        if len(runs) >= at_run:
            raise error
        return torch.zeros(1)

    with pytest.raises(NotRecordableError):
        CudaDevice().record(run)
    assert len(runs) == num_runs

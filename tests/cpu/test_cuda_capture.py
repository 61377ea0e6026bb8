"""The state of the device after a failed capture, on a recorded GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.worker.cuda import CudaDevice
from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.gpu import dependent_options
from inferd.kernels.registry import KernelError
from tests.cpu.recorded_gpu.device import RecordedGpu, recorded_gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[RecordedGpu]:
    with recorded_gpu(80) as gpu:
        yield gpu


def zero() -> Tensor:
    return torch.zeros(1, device=DEVICE)


def product() -> Tensor:
    return torch.ones(1, 1, device=DEVICE) @ torch.zeros(1, 1, device=DEVICE)


def test_cublas_gives_back_its_workspaces_until_a_step_is_recorded(
    gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph goes on to use the workspace of its capture. torch without the function keeps all of them."""
    device, cleared = CudaDevice(), list[int]()
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
    device.give_back_freed()
    assert cleared == [1]
    recording = device.record(product)
    device.give_back_freed()
    assert cleared == [1] and float(recording.output) == 0.0
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    CudaDevice().give_back_freed()


def test_a_failed_capture_keeps_the_workspaces(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets no recording of it, but an earlier one may be in use."""
    cleared = list[int]()
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(1), raising=False)
    device = CudaDevice()
    with pytest.raises(NotRecordableError):
        device.record(failing(gpu, RuntimeError("no"), 1))
    device.give_back_freed()
    assert cleared == []


def failing(gpu: RecordedGpu, error: Exception, at_run: int) -> Callable[[], Tensor]:
    """A step that fails in run `at_run`. The capture is the third. Only a lack of memory leaves it valid."""
    runs: list[int] = []

    def run() -> Tensor:
        assert gpu.current != 0
        runs.append(1)
        if len(runs) == at_run:
            if gpu.capture is not None:
                gpu.capture.is_invalid = not isinstance(error, torch.OutOfMemoryError)
            raise error
        return zero()

    return run


@pytest.mark.parametrize(("sm", "says"), [(86, 0), (103, 1)])
def test_a_gpu_that_no_table_knows_is_said_in_one_line(sm: int, says: int, caplog: pytest.LogCaptureFixture) -> None:
    with recorded_gpu(sm):
        assert CudaDevice().properties.sm == sm
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
def test_a_failed_capture_costs_itself_alone(gpu: RecordedGpu, error: Exception, at_run: int) -> None:
    device = CudaDevice()
    with pytest.raises(NotRecordableError, match=f"the step cannot be captured: {error}"):
        device.record(failing(gpu, error, at_run))
    assert gpu.current == 0 and gpu.capture is None
    assert float(device.record(zero).output) == 0.0


def test_each_step_runs_before_its_capture(gpu: RecordedGpu) -> None:
    """A kernel must not be loaded during a capture. The first capture of all has two such runs, each later one one."""
    device = CudaDevice()
    for expected in ([False, False, True], [False, True], [False, True]):
        seen: list[bool] = []

        def run(seen: list[bool] = seen) -> Tensor:
            seen.append(gpu.capture is not None)
            return zero()

        device.record(run)
        assert seen == expected


def test_a_kernel_that_cannot_run_is_no_matter_of_the_capture(gpu: RecordedGpu) -> None:
    """Steps that run call by call would not have it either."""
    with pytest.raises(KernelError, match="cuDNN has no plan"):
        CudaDevice().record(failing(gpu, KernelError("cuDNN has no plan"), 1))
    assert gpu.current == 0


def test_kernels_start_early_within_captures_alone() -> None:
    seen: list[bool] = []
    with recorded_gpu(90):
        CudaDevice().record(lambda: (seen.append(dependent_options()["launch_pdl"]), zero())[1])
    assert seen == [True] * 3 and not dependent_options()["launch_pdl"]


def test_what_fails_with_early_kernels_is_captured_without_them() -> None:
    device_runs = list[bool]()
    with recorded_gpu(90) as gpu:

        def run() -> Tensor:
            device_runs.append(dependent_options()["launch_pdl"])
            if gpu.capture is not None and device_runs[-1]:
                gpu.capture.is_invalid = True
                raise RuntimeError("operation not supported when stream is capturing")
            return zero()

        device = CudaDevice()
        for _ in range(2):
            assert float(device.record(run).output) == 0.0
    assert device_runs == [True] * 3 + [False] * 4
    assert not dependent_options()["launch_pdl"]


@pytest.mark.parametrize(
    ("error", "at_run", "num_runs"), [(RuntimeError("no"), 1, 2), (torch.OutOfMemoryError(""), 3, 3)]
)
def test_without_memory_nothing_is_tried_again(error: Exception, at_run: int, num_runs: int) -> None:
    runs: list[int] = []

    def run() -> Tensor:
        runs.append(1)
        if len(runs) >= at_run:
            raise error
        return zero()

    with recorded_gpu(90), pytest.raises(NotRecordableError):
        CudaDevice().record(run)
    assert len(runs) == num_runs

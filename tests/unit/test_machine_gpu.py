"""The driver's answers become a GPU or a reason why there is none. The driver is simulated."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from inferd.engine.api.machine import gpu as accelerator
from inferd.engine.api.machine.gpu import Accelerator, NoAcceleratorError


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs of different kinds, and a torch that is built for them."""
    played = SimpleNamespace(capability=(9, 0), is_shut_down=False, names=("gpu 0", "gpu 1"))

    def by_index(index: int) -> int:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: setattr(played, "is_shut_down", True))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", by_index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: {"GPU-b": 1}[uuid])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: played.names[handle])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda i: SimpleNamespace(total=100, free=90 - 20 * i))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda _: played.capability)
    monkeypatch.setattr(accelerator.metadata, "version", lambda _: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return played


@pytest.mark.parametrize(("visible", "name"), [(None, "gpu 0"), ("1,0", "gpu 1"), ("GPU-b", "gpu 1")])
def test_the_first_visible_gpu(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerator.detect() == Accelerator(name, (9, 0), 100, {"gpu 0": 90, "gpu 1": 70}[name])
    assert driver.is_shut_down


@pytest.mark.parametrize(
    ("visible", "first", "others"), [(None, 90, (70,)), ("1,0", 70, (90,)), ("1, 7, 0", 70, ()), ("0", 90, ())]
)
def test_the_gpus_of_one_kind_that_ranks_can_have(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str | None, first: int, others: tuple[int, ...]
) -> None:
    """As far as CUDA counts them: it stops at a number that there is not."""
    driver.names = ("H100", "H100")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerator.detect() == Accelerator("H100", (9, 0), 100, first, others)


@pytest.mark.parametrize(
    ("visible", "reason"), [("", "begins with ''"), ("none", "begins with 'none'"), ("7", "the NVIDIA driver says")]
)
def test_none_visible(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, visible: str, reason: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoAcceleratorError, match=reason):
        accelerator.detect()


def test_one_that_is_too_old(driver: SimpleNamespace) -> None:
    driver.capability = (7, 5)
    with pytest.raises(NoAcceleratorError, match=r"compute capability 7\.5, but at least 8\.0 is needed"):
        accelerator.detect()


@pytest.mark.parametrize(
    ("build", "reason"),
    [("cpu", "is built for the CPU only"), ("rocm6.4", "is built for AMD GPUs, and no kernel has run on one yet")],
)
def test_torch_for_other_processors(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, build: str, reason: str
) -> None:
    monkeypatch.setattr(accelerator.metadata, "version", lambda _: f"2.13.0+{build}")
    with pytest.raises(NoAcceleratorError, match=rf"^torch 2\.13\.0\+{build} {reason}"):
        accelerator.detect()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(accelerator.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with pytest.raises(NoAcceleratorError, match="the NVIDIA driver says: NVML Shared Library Not Found"):
        accelerator.detect()

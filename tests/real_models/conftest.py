"""The published models of `files`, and what transformers computed from the same files in float32 (`tests/real/record`).

A test of a model whose file is not there is skipped, and says so: `make real` fetches them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model
from inferd.engine.api.checkpoint import Checkpoint
from tests.real.conftest import Recording, kernels, without_gradients  # noqa: F401 (fixtures)
from tests.real_models.files import MODELS, RealModel, wanted

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session", params=MODELS, ids=lambda model: model.name)
def real(request: pytest.FixtureRequest) -> RealModel:
    model: RealModel = request.param
    if model not in wanted():
        pytest.skip(f"{model.title} is tested with LARGE=1")
    if not model.path.exists():
        pytest.skip(f"{model.path} is not there: make real fetches it")
    return model


@pytest.fixture(scope="session")
def recording(real: RealModel) -> Recording:
    file = FOLDER / f"{real.name}.json"
    if not file.exists():
        pytest.skip(f"{real.title} has no recording: tests/real/record.py makes one")
    return Recording.read(file)


@pytest.fixture(scope="session")
def material(real: RealModel, recording: Recording) -> Material:
    return Material.of(real.path, num_chats=len(recording.chats))


@pytest.fixture(scope="session")
def exact(real: RealModel) -> Model:
    """The model in float32, from weights that are dequantized."""
    with torch.inference_mode():
        return Model.load(Checkpoint.read(real.path), torch.float32)


@pytest.fixture(scope="session")
def served(real: RealModel) -> Model:
    """The model as the server computes it by default: from the file's blocks, with activations in 8 bits."""
    with torch.inference_mode():
        return Model.load(Checkpoint.read(real.path, keeps_blocks=True), torch.float32)

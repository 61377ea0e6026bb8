"""In float32 the real model predicts a text and answers 16 chats exactly as transformers does from the same file."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model
from inferd.engine.api.checkpoint import Checkpoint
from tests.conftest import ROOT
from tests.real.conftest import RECORDING, Recording

FOLDER = Path(__file__).parent
TOLERANCE = 1e-5
"""Relative, of the mean negative log probability."""


def nll(model: Model, ids: list[int]) -> float:
    (log_probs,) = [torch.cat(list(model.log_probs(model.hidden(ids)[:-1])))]
    return -float(log_probs.gather(1, torch.tensor(ids[1:])[:, None]).mean())


def test_text_and_chats_become_the_same_ids(gguf: Path, recording: Recording) -> None:
    material = Material.of(gguf, num_chats=len(recording.chats))
    assert [list(window) for window in material.windows] == [window.ids for window in recording.windows]
    assert [list(prompt) for prompt in material.prompts] == [chat.prompt for chat in recording.chats]


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("index", range(3))
def test_the_text_is_as_likely(exact: Model, recording: Recording, index: int) -> None:
    window = recording.windows[index]
    assert nll(exact, window.ids) == pytest.approx(window.nll, rel=TOLERANCE)


def test_another_rope_would_show(checkpoint: Checkpoint, recording: Recording) -> None:
    wrong = replace(checkpoint, config={**checkpoint.config, "rope_theta": 1.02e5})
    window = recording.windows[0]
    assert nll(Model.load(wrong, torch.float32), window.ids) != pytest.approx(window.nll, rel=TOLERANCE)


def test_greedy_answers_are_the_same(exact: Model, gguf: Path, recording: Recording) -> None:
    ends = Material.of(gguf, num_chats=0).end_ids
    answers = exact.greedy([chat.prompt for chat in recording.chats], ends)
    assert answers == [chat.answer for chat in recording.chats]
    assert len({tuple(answer) for answer in answers}) == 16 and max(map(len, answers)) == 64


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_recording_is_what_transformers_computes(gguf: Path, tmp_path: Path) -> None:
    """Transformers' reader needs two packages, which get an environment of their own."""
    place = ROOT / "build" / "oracle"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    folder = next((place / "lib").glob("python*")) / "site-packages"
    (folder / "main.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", FOLDER / "oracle.txt"]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip("gguf and accelerate cannot be installed")
    output = tmp_path / "recording.json"
    command = [python, FOLDER / "record.py", gguf, ROOT / "benchmarks" / "quality", output]
    subprocess.run(command, check=True)
    made, kept = (json.loads(file.read_text()) for file in (output, RECORDING))
    assert made["chats"] == kept["chats"]
    assert [window["ids"] for window in made["windows"]] == [window["ids"] for window in kept["windows"]]
    assert [w["nll"] for w in made["windows"]] == pytest.approx([w["nll"] for w in kept["windows"]], rel=TOLERANCE / 10)

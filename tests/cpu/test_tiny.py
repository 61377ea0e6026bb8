"""The embedded model as it is committed: small, able to read any text, and as good at its tasks as its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint

IS_RECORDED = False

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = AutoTokenizer.from_pretrained(EMBEDDED_PATH)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED_PATH.iterdir()) <= 12_000_000


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.long
def test_its_trainer_still_writes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Two steps of each stage, with a tokenizer of its own, write the same files as the embedded model has."""
    command = [sys.executable, "-m", "examples.tiny.train", "--out", tmp_path, "--max-steps", "2", "--no-compile"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in EMBEDDED_PATH.iterdir()}
    assert Checkpoint.read(tmp_path).tensors.keys() == Checkpoint.read(EMBEDDED_PATH).tensors.keys()


@pytest.mark.long
def test_its_held_out_tasks_reach_the_bar() -> None:
    """Runs the repository's script through transformers. Its exit code is 0 if 90% of 200 held-out prompts are
    exact."""
    command = [sys.executable, "-m", "examples.tiny.evaluate"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr

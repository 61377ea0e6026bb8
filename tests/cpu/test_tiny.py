"""The embedded model as it is committed: small, able to read any text, and as good at its tasks as its README says."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.tiny import MODEL_DIR

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_server_and_the_training_script_mean_the_same_folder() -> None:
    assert MODEL_DIR.resolve() == EMBEDDED_PATH


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 12_000_000


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_its_held_out_tasks_reach_the_bar() -> None:
    """The script in the repository, through transformers: exit code 0 is 90% of 200 prompts exact, all held out."""
    run = subprocess.run(
        [sys.executable, "-m", "inferd.engine.tiny.evaluate"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr

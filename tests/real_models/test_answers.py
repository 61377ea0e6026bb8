"""Published models predict a text and answer questions as transformers does from the same files, in float32. As they
are served, from their blocks, they are near that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.quality.material import Material
from benchmarks.quality.measure import Model
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from tests.real.conftest import Recording
from tests.real.record import NUM_SCORED
from tests.real.test_transformers import TOLERANCE, nll
from tests.real_models.files import RealModel

MOST_KL = {"gemma-3-270m-q4_k_m": 0.007, "qwen2.5-coder-0.5b": 0.0008, "qwen2.5-coder-1.5b": 0.0012}
"""Nats a token that computing from the blocks may cost on the first 512 tokens, which have no context. Measured:
0.0054 and 0.0006 (AMD EPYC, AVX2, 2026-11-29), and 0.0009 (AVX-512, 2026-11-30)."""


def test_text_and_questions_become_the_same_ids(material: Material, recording: Recording) -> None:
    windows = [window.ids for window in recording.windows]
    assert [list(window) for window in material.windows[: len(windows)]] == windows
    assert [list(prompt) for prompt in material.prompts] == [chat.prompt for chat in recording.chats]


def test_the_text_is_as_likely(exact: Model, recording: Recording) -> None:
    window = recording.windows[0]
    assert nll(exact, window.ids) == pytest.approx(window.nll, rel=TOLERANCE)


def test_another_norm_would_show(real: RealModel, recording: Recording) -> None:
    checkpoint = Checkpoint.read(real.path)
    eps = checkpoint.config["rms_norm_eps"]
    wrong = replace(checkpoint, config={**checkpoint.config, "rms_norm_eps": 3 * eps})
    window = recording.windows[0]
    assert nll(Model.load(wrong, torch.float32), window.ids) != pytest.approx(window.nll, rel=TOLERANCE)


def test_the_end_of_a_long_text_is_as_likely(exact: Model, recording: Recording) -> None:
    assert recording.long is not None
    found = end_nll(exact, recording.long.ids)
    print(f"{found:.6f}, transformers {recording.long.nll:.6f}")
    assert found == pytest.approx(recording.long.nll, rel=TOLERANCE)


def test_another_window_would_show(real: RealModel, recording: Recording) -> None:
    checkpoint = Checkpoint.read(real.path)
    if not any(ModelFacts.of(checkpoint).arch.windows):
        pytest.skip(f"{real.title} has no layers with windows")
    wrong = replace(checkpoint, config={**checkpoint.config, "sliding_window": checkpoint.config["sliding_window"] + 1})
    assert recording.long is not None
    ids = recording.long.ids
    assert end_nll(Model.load(wrong, torch.float32), ids) != pytest.approx(recording.long.nll, rel=TOLERANCE)


def end_nll(model: Model, ids: list[int]) -> float:
    """Mean negative log probability of the last tokens of a text."""
    hidden = model.hidden(ids)[-NUM_SCORED - 1 : -1]
    return -float(torch.cat(list(model.log_probs(hidden))).gather(1, torch.tensor(ids[-NUM_SCORED:])[:, None]).mean())


def test_greedy_answers_are_the_same(exact: Model, material: Material, recording: Recording) -> None:
    assert exact.greedy(material.prompts, material.end_ids) == [chat.answer for chat in recording.chats]


def test_what_is_served_is_near(real: RealModel, exact: Model, served: Model, recording: Recording) -> None:
    ids = recording.windows[0].ids
    found = divergence(exact, served, ids)
    print(f"{found:.5f} nats a token")
    assert found < MOST_KL[real.name]


def divergence(exact: Model, other: Model, ids: list[int]) -> float:
    """Mean KL divergence of the next-token distributions, in nats."""
    ours, theirs = (torch.cat(list(model.log_probs(model.hidden(ids)))) for model in (exact, other))
    return float((ours.exp() * (ours - theirs)).sum(1).mean())

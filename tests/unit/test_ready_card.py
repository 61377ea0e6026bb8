"""Output of a start: the plan in one line, the READY card, and a warning for a wrong plan."""

from __future__ import annotations

import logging
import re
import socket
from dataclasses import replace

import msgspec
import pytest

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.wire.messages import Ready
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.ready_card import StartupReport, describe_start, deviation, ready_card
from inferd.server.lifecycle.serve import read_model

MIB = 2**20
READY = Ready(
    num_blocks=8, block_size=16, max_model_len=64, vocab_size=32, weights_bytes=1000 * MIB, kv_bytes=MIB,
    planned_weights_bytes=1000 * MIB, planned_kv_bytes=MIB, device="cpu", dtype="bfloat16",
    peaks=Peaks(1e10, 1e12),
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> StartupReport:
    return read_model(Settings(kv_memory=64 * MIB, quantization="int8"))


def test_the_plan_is_said_before_anything_is_loaded(report: StartupReport) -> None:
    text = describe_start(report)
    assert text.startswith("LlamaForCausalLM, 3.5 M parameters, int8 weights, float32 on cpu; memory plan: ")
    assert "KV cache 64.0 MiB" in text
    assert re.search(r"memory plan: weights [\d.]+ MiB, .*, working memory [\d.]+ MiB$", text)


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "words"),
    [
        ("none", "bfloat16", ", bfloat16, context"),
        ("int4", "bfloat16", ", int4 weights, bfloat16, context"),
        ("int4", "fp8", ", int4 weights, bfloat16, fp8 KV, context"),
        ("none", "int8", ", bfloat16, int8 KV, context"),
    ],
)
def test_the_card_says_what_weights_and_kv_are_stored_in(
    report: StartupReport, quantization: str, kv_cache_dtype: str, words: str
) -> None:
    ready = msgspec.structs.replace(READY, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card(report, ready, listener, 1.0)
    assert words in card
    assert "context 64 tokens, KV cache 128 tokens, deterministic)" in card


def test_the_card_says_whether_results_are_deterministic(report: StartupReport) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card(report, msgspec.structs.replace(READY, deterministic=False), listener, 1.0)
    assert "KV cache 128 tokens, not deterministic)" in card


def test_the_card_says_what_guesses_tokens(report: StartupReport) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card(report, msgspec.structs.replace(READY, speculative="suffix"), listener, 1.0)
        assert "KV cache 128 tokens, deterministic, speculative: suffix)" in card
        assert "speculative" not in ready_card(report, READY, listener, 1.0)


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [(Settings(), False), (Settings(api_key=("k",)), True), (Settings(keys_file="keys.yaml"), True)],
)
def test_the_line_to_paste_has_a_key_where_one_is_asked_for(
    report: StartupReport, settings: Settings, is_asked: bool
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card(replace(report, settings=settings), READY, listener, 1.0)
    assert ("-H 'Authorization: Bearer YOUR_KEY' -H" in card) == is_asked


def test_a_wish_that_a_processor_overrides_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        settled = read_model(Settings(kv_memory=64 * MIB, device="cpu", deterministic=False))
    assert settled.config.deterministic is True
    said = [record.getMessage() for record in caplog.records]
    assert "deterministic: False -> True (on a CPU results are always deterministic)" in said


@pytest.mark.parametrize(("taken", "is_wrong"), [(1000, False), (1060, False), (1070, True), (940, False), (930, True)])
def test_a_wrong_plan_is_said(taken: int, is_wrong: bool) -> None:
    """The plan is wrong by more than 5% and by more than the 16 MiB that a matrix library may keep."""
    told = deviation(msgspec.structs.replace(READY, weights_bytes=taken * MIB))
    assert (told is not None) == is_wrong
    assert told is None or "1000.0 MiB were planned" in told

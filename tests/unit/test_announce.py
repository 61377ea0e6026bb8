"""What a start says: the plan in one line, the card, and a plan that was wrong."""

from __future__ import annotations

import re
import socket

import msgspec
import pytest

from inferd.engine.api.messages import Ready
from inferd.engine.api.roofline import Peaks
from inferd.server.announce import Plan, describe_plan, deviation, ready_card
from inferd.server.settings import Settings
from inferd.server.startup import make_plan

MIB = 2**20
READY = Ready(
    num_blocks=8, block_size=16, max_model_len=64, vocab_size=32, weights_bytes=1000 * MIB, kv_bytes=MIB,
    planned_weights_bytes=1000 * MIB, planned_kv_bytes=MIB, device="cpu", dtype="bfloat16",
    peaks=Peaks(1e10, 1e12),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Settings(kv_memory=64 * MIB, quantization="int8"))


def test_the_plan_is_said_before_anything_is_loaded(plan: Plan) -> None:
    text = describe_plan(plan)
    assert text.startswith("LlamaForCausalLM, 3.5 M parameters, int8 weights, float32 on cpu; plan ")
    assert "64.0 MiB KV" in text
    assert re.search(r"plan [\d.]+ MiB weights, .* MiB to work in$", text)


@pytest.mark.parametrize(
    ("quantization", "words"), [("none", ", bfloat16, context"), ("int4", ", int4 weights, bfloat16,")]
)
def test_the_card_says_what_the_weights_are_stored_in(plan: Plan, quantization: str, words: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card(plan, msgspec.structs.replace(READY, quantization=quantization), listener, 1.0)
    assert words in card
    assert "context 64, 128 KV tokens)" in card


@pytest.mark.parametrize(("taken", "is_wrong"), [(1000, False), (1060, False), (1070, True), (940, False), (930, True)])
def test_a_wrong_plan_is_said(taken: int, is_wrong: bool) -> None:
    """Beyond 5% and the 16 MiB that a matrix library may keep."""
    told = deviation(msgspec.structs.replace(READY, weights_bytes=taken * MIB))
    assert (told is not None) == is_wrong
    assert told is None or "1000.0 MiB were planned" in told

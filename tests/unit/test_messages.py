"""The wire: messages arrive as they were sent, and a frame that is not the next one of this engine's epoch is
refused."""

from __future__ import annotations

import msgspec
import pytest

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.wire.messages import (
    Abort,
    Delta,
    EngineStats,
    Failed,
    Failure,
    FromEngine,
    Phase,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    ToEngine,
    UseThreads,
    WireError,
    WireLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.process import main as parts_module
from inferd.engine.process.main import parts_of
from inferd.server.dispatch.token_stream import merge

TO_ENGINE: list[ToEngine] = [
    Submit(
        request_id="a",
        prompt_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=4, seed=5, logit_bias=((1, -2.5),), bad_words=((1, 2),), logprobs=3),
        scheduling=SchedulingParams(priority=-2, cache_salt="salt", arrival_s=1.25, ttft_target_s=0.5),
        emitted_ids=(9,),
    ),
    Abort(("a", "b")),
    ResetPrefixCache(),
    UseThreads(2),
]
FROM_ENGINE: list[FromEngine] = [
    StepOutput(
        deltas=(
            Delta(request_id="a", token_ids=(1,), logprobs=(WireLogprobs(1, -0.5, 1, ((1, -0.5),)),), scheduled_s=2.0),
            Delta(request_id="b", finish_reason="error", failure=Failure("invalid_value", "no", "n")),
            Delta(request_id="c", token_ids=(4, 5), num_drafts=3),
        ),
        stats=EngineStats(num_running=1, num_draft_rows=1, num_drafts=3, accepted_drafts=(1, 0)),
        step_duration_s=0.5,
        step_phase="mixed",
        step_own_s=0.25,
        step_flops=10**15,
        step_bytes=10**11,
    ),
    Phase("weights", 1.5, "12 tensors"),
    Failed("ModelError", "no"),
    Ready(
        num_blocks=1, block_size=2, max_model_len=3, vocab_size=4, weights_bytes=5, kv_bytes=6, planned_weights_bytes=7,
        planned_kv_bytes=8, device="cpu", dtype="float32", peaks=Peaks(2e10, 3e11), kernels=(("rope", "reference"),),
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_to_engine_round_trip(message: ToEngine) -> None:
    assert decode_to_engine(encode(message, 3, 7), 3, 7) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_from_engine_round_trip(message: FromEngine) -> None:
    assert decode_from_engine(encode(message, 3, 7), 3, 7) == message


@pytest.mark.parametrize(("epoch", "sequence"), [(2, 7), (4, 7), (3, 6), (3, 8)])
def test_a_frame_of_another_life_or_place_is_refused(epoch: int, sequence: int) -> None:
    frame = encode(TO_ENGINE[1], epoch, sequence)
    with pytest.raises(WireError, match=r"epoch|frame"):
        decode_to_engine(frame, 3, 7)


def test_another_version_is_refused() -> None:
    version, *rest = msgspec.msgpack.decode(encode(TO_ENGINE[1], 0, 0))
    with pytest.raises(WireError, match="wire version"):
        decode_to_engine(msgspec.msgpack.encode([version + 1, *rest]), 0, 0)


def test_every_truncation_is_refused() -> None:
    frame = encode(TO_ENGINE[0], 0, 0)
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode_to_engine(frame[:length], 0, 0)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(WireError, match="not a message to the engine"):
        decode_to_engine(encode(FROM_ENGINE[1], 0, 0), 0, 0)
    with pytest.raises(WireError, match="not a message from the engine"):
        decode_from_engine(encode(TO_ENGINE[1], 0, 0), 0, 0)


@pytest.mark.parametrize("number", range(len(FROM_ENGINE)))
def test_no_bit_of_a_frame_can_turn_without_being_seen(number: int) -> None:
    frame = encode(FROM_ENGINE[number], epoch=2, sequence=7)
    for bit in range(8 * len(frame)):
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_from_engine(bytes(turned), 2, 7)


def scored(start: int, num_tokens: int, num_top: int) -> tuple[WireLogprobs, ...]:
    top = tuple((i, -1.0 * i) for i in range(num_top))
    return tuple(WireLogprobs(i, -0.5, 1, top) for i in range(start, start + num_tokens))


@pytest.mark.parametrize("num_top", [0, 1, 3, 30])
def test_a_step_with_long_scored_prompts_is_told_in_parts(monkeypatch: pytest.MonkeyPatch, num_top: int) -> None:
    """No part holds more than may be decoded at once. Each request gets the same results, and the step is sent once."""
    monkeypatch.setattr(parts_module, "MAX_SCORED", 20)
    ended = Delta(request_id="gone", finish_reason="abort")
    last = Delta(
        request_id="long", token_ids=(7,), prompt_logprobs=scored(0, 33, num_top), num_cached_tokens=3, scheduled_s=2.5,
        finish_reason="length", num_drafts=2,
    )  # fmt: skip
    chunk = Delta(request_id="chunk", prompt_logprobs=scored(50, 19, num_top), scheduled_s=1.5)
    plain = Delta(request_id="plain", token_ids=(4,), logprobs=scored(4, 1, 2))
    told = (ended, last, chunk, plain)
    output = StepOutput(deltas=told, stats=EngineStats(num_running=3), step_duration_s=0.5, step_phase="mixed")
    parts = list(parts_of(output))
    assert len(parts) > 2
    assert [part.step_phase for part in parts] == [None] * (len(parts) - 1) + ["mixed"]
    assert parts[-1].step_duration_s == 0.5 and {part.stats for part in parts} == {output.stats}
    for part in parts:
        num_tokens = sum(len(delta.prompt_logprobs) for delta in part.deltas)
        assert num_tokens * (1 + num_top) <= 20 or num_tokens == 1
    for delta in told:
        assert merge([each for part in parts for each in part.deltas if each.request_id == delta.request_id]) == delta


def test_a_step_that_is_not_long_is_one_message() -> None:
    output = StepOutput(deltas=(Delta(request_id="a", prompt_logprobs=scored(0, 40, 3)),), stats=EngineStats())
    assert [part is output for part in parts_of(output)] == [True]

"""The wire: what is sent is what arrives, and a frame that is not the next one of this engine's life is refused."""

from __future__ import annotations

import msgspec
import pytest

from inferd.engine.api.messages import (
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
    WireError,
    WireLogprobs,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from inferd.engine.api.params import SamplingParams
from inferd.engine.api.roofline import Peaks

TO_ENGINE: list[ToEngine] = [
    Submit(
        request_id="a",
        prompt_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=4, seed=5, logit_bias=((1, -2.5),), bad_words=((1, 2),), logprobs=3),
        priority=-2,
        cache_salt="salt",
        arrival_s=1.25,
        emitted_ids=(9,),
    ),
    Abort(("a", "b")),
    ResetPrefixCache(),
]
FROM_ENGINE: list[FromEngine] = [
    StepOutput(
        deltas=(
            Delta(request_id="a", token_ids=(1,), logprobs=(WireLogprobs(1, -0.5, 1, ((1, -0.5),)),), scheduled_s=2.0),
            Delta(request_id="b", finish_reason="error", failure=Failure("invalid_value", "no", "n")),
        ),
        stats=EngineStats(num_running=1),
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


@pytest.mark.parametrize(("generation", "sequence"), [(2, 7), (4, 7), (3, 6), (3, 8)])
def test_a_frame_of_another_life_or_place_is_refused(generation: int, sequence: int) -> None:
    frame = encode(TO_ENGINE[1], generation, sequence)
    with pytest.raises(WireError, match=r"generation|frame"):
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
    with pytest.raises(WireError, match="no message to the engine"):
        decode_to_engine(encode(FROM_ENGINE[1], 0, 0), 0, 0)
    with pytest.raises(WireError, match="no message from the engine"):
        decode_from_engine(encode(TO_ENGINE[1], 0, 0), 0, 0)


@pytest.mark.parametrize("number", range(len(FROM_ENGINE)))
def test_no_bit_of_a_frame_can_turn_without_being_seen(number: int) -> None:
    frame = encode(FROM_ENGINE[number], generation=2, sequence=7)
    for bit in range(8 * len(frame)):
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_from_engine(bytes(turned), 2, 7)

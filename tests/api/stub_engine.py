"""An engine process for tests of the server's event loop: it answers every choice at once, over the real wire.

python -m tests.api.stub_engine RUN_DIR

Each choice gets one token and its end, with the log probabilities or the vector that it asked for. The stub encodes and
decodes messages like the engine, and knows no model and no scheduler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import zmq

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.wire.client import from_engine_endpoint, to_engine_endpoint
from inferd.engine.api.wire.messages import (
    Abort,
    Delta,
    EngineStats,
    FromEngine,
    Ready,
    StepOutput,
    Submit,
    SubmitChoices,
    WireLogprobs,
    decode_to_engine,
    encode,
)
from inferd.engine.process.main import parts_of

TOKEN = 300
"""An ordinary token of the embedded model's tokenizer."""
ROWS_A_STEP = 256
NUM_LABELS = 1
_LOGPROBS = tuple(tuple((i + j, -1.5 - j) for j in range(20)) for i in range(1_000))


def main(run_dir: Path, max_model_len: int) -> None:
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(to_engine_endpoint(run_dir))
    sender.connect(from_engine_endpoint(run_dir))
    num_sent = num_received = 0

    def send(message: FromEngine) -> None:
        nonlocal num_sent
        sender.send(encode(message, 0, num_sent))
        num_sent += 1

    send(ready(max_model_len))
    while True:
        message = decode_to_engine(receiver.recv(), 0, num_received)
        num_received += 1
        match message:
            case Submit():
                answer([message], send)
            case SubmitChoices():
                answer(message.each(), send)
            case Abort():
                pass  # whatever it names has ended


def answer(submits: Iterable[Submit], send: object) -> None:
    assert callable(send)
    deltas = map(delta_of, submits)
    while step := tuple(islice(deltas, ROWS_A_STEP)):
        for part in parts_of(StepOutput(deltas=step, stats=EngineStats(), step_ended_s=time.monotonic())):
            send(part)


def delta_of(submit: Submit) -> Delta:
    params = submit.params
    return Delta(
        request_id=submit.request_id,
        token_ids=(TOKEN,) if params.max_tokens else (),
        logprobs=tuple(scored([TOKEN], params.logprobs)) if params.max_tokens else (),
        prompt_logprobs=tuple(scored(submit.prompt_ids[1:], params.prompt_logprobs)),
        finish_reason="length",
        scheduled_s=submit.scheduling.arrival_s,
        embedding=bytes(4 * (params.pooling.num_components or NUM_LABELS)) if params.pooling is not None else b"",
    )


def scored(token_ids: Iterable[int], num_top: int | None) -> Iterator[WireLogprobs]:
    if num_top is not None:
        for token_id in token_ids:
            yield WireLogprobs(token_id, -1.5, 1, _LOGPROBS[token_id % 1_000][:num_top])


def ready(max_model_len: int) -> Ready:
    return Ready(
        num_blocks=2**16, block_size=32, max_model_len=max_model_len, vocab_size=3_072, hidden_size=6,
        num_labels=NUM_LABELS, weights_bytes=1, kv_bytes=1, planned_weights_bytes=1, planned_kv_bytes=1,
        device="none", dtype="float32", peaks=Peaks(1e10, 1e12),
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

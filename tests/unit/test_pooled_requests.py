"""The engine's core with requests that end with a vector."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.engine.api.wire.messages import Delta, StepOutput, Submit, decode_from_engine, encode
from inferd.engine.api.wire.params import ParamError, Pooling, PoolingKind, SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, RowStatus, StepPlan, StepResult, TokenMasks
from inferd.engine.sched.scheduler import Scheduler

BLOCK, BUDGET = 4, 16


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("nothing awaits masks")

    def wait(self) -> StepResult:
        return self._result


class Worker:
    """Returns the number of tokens as the vector of a row that ends a prompt, and a token for other rows that
    sample."""

    def __init__(self, status: RowStatus = RowStatus.OK) -> None:
        self._status = status
        self._num_prompt: dict[int, int] = {}
        self.rows: list[tuple[int, int]] = []
        """(start, tokens) of every row."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Done:
        del awaits_masks
        self._num_prompt |= {admission.slot: admission.num_prompt for admission in plan.admissions}
        self.rows += [(row.start, row.num_tokens) for row in plan.rows]
        results = []
        for row in plan.rows:
            is_last = row.start + row.num_tokens == self._num_prompt[row.slot]
            embedding = bytes([row.start + row.num_tokens]) if is_last and not row.samples else b""
            results.append(RowResult((50,) if row.samples else (), self._status, embedding=embedding))
        return Done(StepResult(plan.step_id, tuple(results), 0.1))

    def close(self) -> None:
        """Nothing to give back."""


def make(worker: Worker, *, has_memory: bool = True) -> EngineCore:
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET, max_model_len=64)
    return EngineCore(
        Scheduler(limits, KVCache(32, BLOCK, has_memory=has_memory)), worker, vocab_size=100, clock=lambda: 0.0
    )


def submit(name: str, num_prompt: int, how: PoolingKind = "last", **params: Any) -> Submit:
    asked = SamplingParams(**{"max_tokens": 0, "seed": 0, "pooling": Pooling(how), **params})
    return Submit(request_id=name, prompt_ids=tuple(range(num_prompt)), params=asked)


def run(core: EngineCore, *submits: Submit) -> list[Delta]:
    for message in submits:
        core.submit(message, 0.0)
    deltas: list[Delta] = []
    while core.has_work:
        output = core.step(0.0)
        core.check()
        deltas += output.deltas if output is not None else ()
    return deltas


@pytest.mark.parametrize("num_prompt", [1, BLOCK, BUDGET, 3 * BUDGET + 1, 64])
def test_a_vector_is_the_one_and_last_word(num_prompt: int) -> None:
    (delta,) = run(make(Worker()), submit("a", num_prompt))
    assert (delta.finish_reason, delta.embedding, delta.token_ids) == ("stop", bytes([num_prompt]), ())
    assert delta.scheduled_s == 0.0


def test_vectors_and_tokens_share_steps() -> None:
    deltas = run(make(Worker()), submit("a", 5), submit("b", 3, pooling=None, max_tokens=2), submit("c", 20, "mean"))
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
    assert {name: end.embedding for name, end in ends.items()} == {"a": bytes([5]), "b": b"", "c": bytes([20])}
    assert {name: end.finish_reason for name, end in ends.items()} == {"a": "stop", "b": "length", "c": "stop"}


def test_the_last_state_takes_prefix_hits_and_a_mean_does_not() -> None:
    worker = Worker()
    core = make(worker)
    run(core, submit("a", 14))
    worker.rows.clear()
    assert run(core, submit("b", 14))[0].num_cached_tokens == 12
    assert worker.rows == [(12, 2)]
    worker.rows.clear()
    assert run(core, submit("c", 14, "mean"))[0].num_cached_tokens == 0
    assert worker.rows == [(0, 14)]


def test_a_state_without_numbers_fails_alone_and_is_not_found_again() -> None:
    core = make(Worker(RowStatus.NUMERICAL_ERROR))
    (delta,) = run(core, submit("a", 14))
    assert delta.finish_reason == "error" and delta.failure is not None
    assert (delta.failure.code, delta.embedding) == ("numerical_error", b"")
    assert "hidden state" in delta.failure.message
    assert core.stats().num_blocks_cached == 0


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": 1}, "max_tokens"),
        ({"pooling": Pooling("last", -1)}, "pooling.num_components"),
        ({"pooling": Pooling("last", True)}, "pooling.num_components"),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_the_engine_too(params: dict[str, Any], param: str) -> None:
    message = submit("a", 3, **params)
    with pytest.raises(ParamError) as caught:
        message.params.check(100)
    assert caught.value.param == param
    (delta,) = run(make(Worker()), message)
    assert delta.failure is not None and delta.failure.param == param


def test_it_travels_bit_for_bit() -> None:
    asked = submit("a", 3, "mean").params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=SamplingParams) == asked
    delta = Delta(request_id="a", finish_reason="stop", embedding=bytes(range(256)))
    output = StepOutput(deltas=(delta,), stats=make(Worker()).stats())
    assert decode_from_engine(encode(output, 1, 2), 1, 2) == output


@pytest.mark.parametrize("has_memory", [True, False])
def test_blocks_without_memory_are_not_shown(has_memory: bool) -> None:
    core = make(Worker(), has_memory=has_memory)
    core.submit(submit("a", BUDGET + 1), 0.0)
    core.step(0.0)
    stats = core.stats()
    assert stats.num_running == 1 and (stats.num_blocks, stats.num_blocks_used > 0) == (32 * has_memory, has_memory)

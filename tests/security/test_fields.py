"""The engine checks requests again. Frames that no server would send end their own request, and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.config import AskedConfig
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process.engine_process import EngineProcess
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import Abort, Delta, Failed, Ready, StepOutput, Submit
from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from tests.e2e.conftest import Daemon, daemon

__all__ = ["daemon"]

VOCAB = 3_072
LENGTH = 2_048
GOOD = SamplingParams(max_tokens=6, seed=1, temperature=0.0)

HOSTILE_PARAMS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, 2**31, 2**62),
    "seed": (-1, 2**53, 2**62),
    "min_tokens": (-1, 7, 2**62),
    "temperature": (math.nan, math.inf, -math.inf, -1e-300, 2.1, 1e308),
    "top_k": (-1,),
    "top_p": (math.nan, -0.1, 1.1, math.inf),
    "min_p": (math.nan, -0.1, 1.1, math.inf),
    "repetition_penalty": (math.nan, 0.0, -1.0, 1e-320, 101.0, math.inf),
    "presence_penalty": (math.nan, -2.1, 2.1, math.inf),
    "frequency_penalty": (math.nan, -2.1, 2.1, -math.inf),
    "logit_bias": (((VOCAB, 1.0),), ((-1, 1.0),), ((2**62, 1.0),), ((1, math.nan),), ((1, 101.0),), ((1, -math.inf),)),
    "allowed_token_ids": ((VOCAB,), (-1,), (2**32,), (2**62,)),
    "bad_words": (((),), ((VOCAB,),), ((1, -1),), ((2**62,),)),
    "eos_token_ids": ((VOCAB,), (-1,), (2**62,)),
    "stop_token_ids": ((VOCAB,), (-1,), (2**32,), (2**62,)),
    "logprobs": (-1, 21, 2**62),
    "prompt_logprobs": (-1, 21, 2**62),
    "grammar": ("not a grammar", "{", '{"grammars": []}', "a" * 300_000),
    "pooling": (Pooling(), Pooling(num_components=-1)),
}
"""Values one step or far beyond each bound. A pooled state is allowed only if nothing is generated."""

TAKEN_PARAMS: dict[str, tuple[Any, ...]] = {
    "top_k": (0, 1, VOCAB, 2**31, 2**62),
    "temperature": (-0.0, 1e-320, 2.0),
    "top_p": (0.0, 1e-320),
    "logit_bias": (((1, 100.0), (1, -100.0)),),
    "bad_words": (tuple((i % VOCAB,) * 7 for i in range(3_000)),),
    "allowed_token_ids": ((5,) * 5_000,),
}
"""Values at a bound, or unusual ones, that are allowed."""

HOSTILE_SUBMITS: tuple[dict[str, Any], ...] = (
    {"prompt_ids": ()},
    {"prompt_ids": (VOCAB,)},
    {"prompt_ids": (-1,)},
    {"prompt_ids": (2**32,)},
    {"prompt_ids": (2**62,)},
    {"prompt_ids": (1,) * LENGTH},
    {"prompt_ids": (1,) * 1_000_000},
    {"emitted_ids": (VOCAB,)},
    {"emitted_ids": (1,) * 7},
)


def shared(**fields: Any) -> dict[str, Any]:
    return {"scheduling": SchedulingParams(**fields)}


ODD_SUBMITS: tuple[dict[str, Any], ...] = (
    *(shared(arrival_s=value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e308)),
    *(shared(priority=value) for value in (2**62, -(2**62))),
    *({"num_prompt_logprobs": value} for value in (-1, 2**62)),
    *(shared(alone_until=value) for value in (-1, 2**62)),
    *(shared(ttft_target_s=value) for value in (math.nan, math.inf, -1.0, 0.0, 1e-320)),
    *(shared(tpot_target_s=value) for value in (math.nan, math.inf, -1.0, 0.0, 1e-320)),
    shared(cache_salt="\u0000" * 100_000),
    {"request_id": ""},
)
"""Values that the server computes and no caller states. With any value the request must end."""


class Engine:
    """A real engine process without a server."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_asked = 0

    async def ask(self, *, params: SamplingParams = GOOD, **fields: Any) -> list[Delta]:
        """All deltas of one request, up to its end."""
        self._num_asked += 1
        name = fields.pop("request_id", f"r{self._num_asked}")
        self._client.send(Submit(request_id=name, params=params, **{"prompt_ids": (1, 2, 3), **fields}))
        deltas: list[Delta] = []
        while not deltas or deltas[-1].finish_reason is None:
            message = await asyncio.wait_for(self._client.receive(), 30)
            if isinstance(message, StepOutput):
                deltas += [delta for delta in message.deltas if delta.request_id == name]
        assert sum(delta.finish_reason is not None for delta in deltas) == 1
        return deltas

    async def tokens(self) -> tuple[int, ...]:
        return tuple(token_id for delta in await self.ask() for token_id in delta.token_ids)


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    asked = AskedConfig(model_path=str(EMBEDDED_PATH), kv_memory_bytes=64 * 2**20, max_num_seqs=4, num_threads=1)
    config, _, _ = resolve(asked, ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)), Machine.detect())
    process = EngineProcess(config, log_style=LogStyle("error"))
    client = EngineClient(process.run_dir, 0, on_first_frame=process.connected)
    try:
        process.spawn()
        while not isinstance(message := await asyncio.wait_for(client.receive(), 60), Ready):
            assert not isinstance(message, Failed), message
        yield Engine(client)
    finally:
        process.discard()
        client.close()


def test_no_frame_ends_more_than_its_own_request() -> None:
    """One engine for all cases. It answers the last as it answered the first."""

    async def work() -> None:
        async with running() as engine:
            expected = await engine.tokens()
            assert len(expected) == 6
            for name, values in HOSTILE_PARAMS.items():
                for value in values:
                    (delta,) = await engine.ask(params=msgspec.structs.replace(GOOD, **{name: value}))
                    assert delta.failure is not None, (name, value)
                    assert delta.failure.code in ("invalid_value", "context_length_exceeded"), (name, delta.failure)
                    assert len(delta.failure.message) < 1_000 or name == "grammar"
            for name, values in TAKEN_PARAMS.items():
                for value in values:
                    deltas = await engine.ask(params=msgspec.structs.replace(GOOD, **{name: value}))
                    assert deltas[-1].failure is None, (name, deltas[-1].failure)
            for fields in HOSTILE_SUBMITS:
                (delta,) = await engine.ask(**fields)
                assert delta.failure is not None, str(fields)[:100]
            for fields in ODD_SUBMITS:
                await engine.ask(**fields)
            engine._client.send(Abort(("no such request", "", "r1")))
            assert await engine.tokens() == expected

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [[1]] * 2_048, "n": 128}, 400),
        ({"prompt": ["x"] * 2_048, "n": 128, "max_tokens": 2_000}, 400),
        ({"prompt": "x", "n": 10**6}, 400),
        ({"prompt": "x", "n": 128, "best_of": 10**9}, 400),
        ({"prompt": [[1, 2, 3]] * 500, "n": 100, "prompt_logprobs": 20}, 400),
        ({"prompt": ["x"] * 8, "n": 4, "max_tokens": 1}, 200),
    ],
)
def test_what_one_body_may_ask_for_is_bounded(daemon: Daemon, body: dict[str, Any], status: int) -> None:
    """Prompts times answers times tokens: a body of a few kilobytes must not be a day's work."""
    pid = daemon.engine_pid
    answer = httpx.post(daemon.url + "/v1/completions", json={"max_tokens": 1, **body}, timeout=60)
    assert answer.status_code == status, answer.text[:500]
    assert daemon.engine_pid == pid

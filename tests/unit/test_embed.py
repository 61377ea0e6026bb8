"""Inputs of an embedding request in the router: how many run at a time, the order of their vectors, and what ends
them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.wire.messages import Delta, Failure, Submit
from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import Unlimited
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.token_stream import merge
from inferd.server.generate.embed import EmbedRequest, embed
from inferd.server.generate.inputs import MAX_AT_ONCE, MAX_TOKENS_AT_ONCE

Answer = Delta | Exception


@dataclass
class Stream:
    """Answers when the test says so."""

    submit: Submit
    answer: asyncio.Future[Answer]
    is_aborted: bool = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        answer = await self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self, reason: str = "abort") -> None:
        self.is_aborted = True

    def end(self, **fields: Any) -> None:
        delta = Delta(request_id=self.submit.request_id, **{"finish_reason": "stop", **fields})
        self.answer.set_result(delta)


@dataclass
class Router:
    limit: int = 10**6
    streams: list[Stream] = field(default_factory=list)
    going_on: list[bool] = field(default_factory=list)
    """Records the arguments of each submit."""
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)

    def submit(self, submit: Submit, *, is_admitted: bool = False) -> Stream:
        self.going_on.append(is_admitted)
        if len(self.streams) == self.limit:
            raise RequestError("server_is_overloaded", "full")
        self.streams.append(Stream(submit, asyncio.get_running_loop().create_future()))
        return self.streams[-1]


SCHEDULING = SchedulingParams(arrival_s=1.5, priority=3, cache_salt="salt")


class Paid(Unlimited):
    """An account that counts the use."""

    used = 0

    def take(self, num_tokens: int) -> None:
        self.used += num_tokens

    owe = take


def request(num_inputs: int) -> EmbedRequest:
    return EmbedRequest(
        engine_id="e",
        inputs=tuple((i,) for i in range(num_inputs)),
        params=SamplingParams(max_tokens=0, seed=0, pooling=Pooling()),
        scheduling=SCHEDULING,
    )


async def settled() -> None:
    """Give turns until no task can go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def failing(router: Router, num_inputs: int, *ends: tuple[int, Any]) -> Exception:
    """The request's error after these streams have ended so."""
    task = asyncio.ensure_future(embed(router, request(num_inputs)))  # type: ignore[arg-type]
    await settled()
    for index, end in ends:
        if isinstance(end, Exception):
            router.streams[index].answer.set_result(end)
        else:
            router.streams[index].end(**end)
    with pytest.raises((RequestError, EngineDeadError)) as caught:
        await task
    assert all(stream.is_aborted for stream in router.streams)
    return caught.value


def test_answers_that_come_in_any_order_are_given_in_that_of_the_inputs() -> None:
    async def run() -> None:
        router = Router()
        task = asyncio.ensure_future(embed(router, request(5)))  # type: ignore[arg-type]
        await settled()
        for i in (3, 0, 4, 2, 1):
            router.streams[i].end(embedding=bytes([i]))
            await settled()
        assert await task == tuple(bytes([i]) for i in range(5))
        submits = [stream.submit for stream in router.streams]
        assert [submit.request_id for submit in submits] == [f"e-{i}" for i in range(5)]
        assert [submit.prompt_ids for submit in submits] == [(i,) for i in range(5)]
        assert [submit.scheduling for submit in submits] == [SCHEDULING] * 5

    asyncio.run(run())


def test_an_input_goes_where_another_has_ended() -> None:
    async def run() -> None:
        router = Router()
        num_inputs = MAX_AT_ONCE + 3
        task = asyncio.ensure_future(embed(router, request(num_inputs)))  # type: ignore[arg-type]
        await settled()
        assert len(router.streams) == MAX_AT_ONCE
        for num_ended in range(1, 4):
            router.streams[7 * num_ended].end(embedding=b"x")
            await settled()
            assert len(router.streams) == MAX_AT_ONCE + num_ended
        for stream in router.streams:
            if not stream.answer.done():
                stream.end(embedding=b"x")
        assert len(await task) == num_inputs

    asyncio.run(run())


@pytest.mark.parametrize(
    ("end", "code", "param"),
    [
        ({"finish_reason": "error", "failure": Failure("numerical_error", "no")}, "numerical_error", None),
        ({"finish_reason": "error", "failure": Failure("x", "no", "prompt")}, "x", "input[2]"),
        ({"finish_reason": "error"}, "engine_error", None),
        ({"finish_reason": "abort"}, "server_is_overloaded", None),
    ],
)
def test_one_failure_is_that_of_all(end: dict[str, Any], code: str, param: str | None) -> None:
    error = asyncio.run(failing(Router(), 4, (0, {"embedding": b"x"}), (2, end)))
    assert isinstance(error, RequestError)
    assert (error.code, error.param) == (code, param)


def test_a_dead_engine_is_one_error() -> None:
    ends = [(i, EngineDeadError("gone")) for i in range(4)]
    assert isinstance(asyncio.run(failing(Router(), 4, *ends)), EngineDeadError)


def test_an_input_that_is_not_taken_ends_those_that_were() -> None:
    router = Router(limit=3)
    error = asyncio.run(failing(router, 5))
    assert isinstance(error, RequestError) and error.code == "server_is_overloaded"
    assert len(router.streams) == 3


def test_only_behind_one_that_was_taken_do_others_go_on() -> None:
    async def run() -> None:
        router = Router()
        num_inputs = MAX_AT_ONCE + 1
        task = asyncio.ensure_future(embed(router, request(num_inputs)))  # type: ignore[arg-type]
        await settled()
        router.streams[5].end(embedding=b"x")
        await settled()
        assert router.going_on == [False] + [True] * (num_inputs - 1)
        task.cancel()

    asyncio.run(run())
    shut = Router(limit=0)
    asyncio.run(failing(shut, 4))
    assert shut.going_on == [False] * len(shut.going_on), "none was taken, and each is a new one"


@pytest.mark.parametrize("last", [1, MAX_TOKENS_AT_ONCE, 2 * MAX_TOKENS_AT_ONCE])
def test_long_inputs_leave_the_engine_to_others(last: int) -> None:
    """Only so many tokens run at a time, in the order of the inputs. A longer input runs alone."""

    async def run() -> None:
        router = Router()
        inputs = (*[(5,) * (MAX_TOKENS_AT_ONCE // 4)] * 6, (5,) * last, (6,))
        task = asyncio.ensure_future(embed(router, replace(request(0), inputs=inputs)))  # type: ignore[arg-type]
        num_most = 0
        while not task.done():
            await settled()
            open_streams = [stream for stream in router.streams if not stream.answer.done()]
            running = [len(stream.submit.prompt_ids) for stream in open_streams]
            assert sum(running) <= MAX_TOKENS_AT_ONCE or len(running) == 1
            num_most = max(num_most, len(running))
            if open_streams:
                open_streams[-1].end(embedding=b"x")
        assert len(await task) == len(inputs)
        assert num_most >= 4
        assert [stream.submit.prompt_ids for stream in router.streams] == list(inputs)

    asyncio.run(run())


def test_the_bulk_of_a_large_request_is_later_than_a_small_one() -> None:
    """A level of priority is 10 s of waiting, so that texts in bulk are not starved."""

    async def run() -> None:
        router, size = Router(), MAX_TOKENS_AT_ONCE // 4
        task = asyncio.ensure_future(embed(router, replace(request(0), inputs=((5,) * size,) * 9)))  # type: ignore[arg-type]
        while not task.done():
            await settled()
            for stream in router.streams:
                if not stream.answer.done():
                    stream.end(embedding=b"x")
        own = SCHEDULING.priority
        assert [stream.submit.scheduling.priority for stream in router.streams] == [own] * 5 + [own + 1] * 4

    asyncio.run(run())


@pytest.mark.parametrize("limit", [0, 3])
def test_what_the_router_refuses_is_given_back(limit: int) -> None:
    async def run() -> None:
        account = Paid()
        with pytest.raises(RequestError):
            await embed(Router(limit), replace(request(5), account=account))  # type: ignore[arg-type]
        assert account.used == limit

    asyncio.run(run())


def test_who_gives_up_ends_all() -> None:
    async def run() -> None:
        router = Router()
        task = asyncio.ensure_future(embed(router, request(4)))  # type: ignore[arg-type]
        await settled()
        router.streams[1].end(embedding=b"x")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [stream.is_aborted for stream in router.streams] == [True] * 4

    asyncio.run(run())


def test_a_vector_survives_being_merged() -> None:
    first, last = Delta(request_id="a", scheduled_s=1.0), Delta(request_id="a", finish_reason="stop", embedding=b"x")
    assert merge([first, last]).embedding == b"x"

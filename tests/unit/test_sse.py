"""The bytes of an event stream, and the order of events at its end. The API tests use sockets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import table
from inferd.server.transport import sse

Sent = list[dict[str, Any]]


class Connection:
    """An ASGI client that records, and disconnects when told to."""

    def __init__(self) -> None:
        self.sent: Sent = []
        self.gone = asyncio.Event()
        self.has_sent = asyncio.Condition()
        self.can_send = asyncio.Event()
        self.can_send.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.can_send.wait()
        async with self.has_sent:
            self.sent.append(message)
            self.has_sent.notify_all()

    async def until(self, fact: Callable[[], bool]) -> None:
        async with self.has_sent:
            await asyncio.wait_for(self.has_sent.wait_for(fact), 10)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if "status" in message), None)


class Words:
    """A family of routes with its own wording."""

    keep_alive = sse.KEEP_ALIVE

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        return sse.event(orjson.dumps(table.body_of(error)), "error")


class Closing:
    """Counts how often a stream was closed, and whether its generator was."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.is_generator_closed = False

    def __call__(self) -> None:
        self.num_closed += 1


async def play(events: AsyncGenerator[bytes, None], connection: Connection, keep_alive_s: float = 60.0) -> Closing:
    closing = Closing()
    response = sse.EventStream(events, Words(), closing, keep_alive_s)
    await asyncio.wait_for(response({"type": "http", "state": {}}, connection.receive, connection.send), 10)
    closing.is_generator_closed = inspect.isasyncgen(events) and events.ag_frame is None
    return closing


async def words(*data: bytes, then: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for word in data:
        yield sse.event(word)
    if then is not None:
        raise then


def test_events_are_exact_bytes() -> None:
    async def run() -> None:
        connection = Connection()
        closing = await play(words(b'{"a":1}', b"{}"), connection)
        assert connection.body == b'data: {"a":1}\n\ndata: {}\n\n'
        start = connection.sent[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        assert start["type"] == "http.response.start"
        assert headers == {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        assert [message["more_body"] for message in connection.sent[1:]] == [True, True, False]
        assert (closing.num_closed, closing.is_generator_closed) == (1, True)

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [RequestError("numerical_error", "NaN"), EngineDeadError("gone"), ZeroDivisionError("a bug")]
)
def test_an_error_before_the_first_event_is_raised_to_whoever_answers_errors(error: Exception) -> None:
    async def run() -> None:
        connection, closing = Connection(), Closing()
        response = sse.EventStream(words(then=error), Words(), closing)
        with pytest.raises(type(error)) as caught:
            await asyncio.wait_for(response({"type": "http", "state": {}}, connection.receive, connection.send), 10)
        assert caught.value is error
        assert (connection.sent, closing.num_closed) == ([], 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [RequestError("numerical_error", "NaN"), EngineDeadError("gone"), ZeroDivisionError("a bug")]
)
def test_an_error_inside_a_stream_is_its_last_event(error: Exception) -> None:
    async def run() -> None:
        connection = Connection()
        await play(words(b"{}", then=error), connection)
        events = connection.body.decode().removesuffix("\n\n").split("\n\n")
        assert connection.status == 200
        assert events[0] == "data: {}"
        name, data = events[1].split("\n")
        assert name == "event: error"
        assert set(orjson.loads(data.removeprefix("data: "))) == {"error"}
        assert len(events) == 2
        assert connection.sent[-1]["more_body"] is False
        assert "bug" not in connection.body.decode()

    asyncio.run(run())


def test_silence_is_filled_and_begins_the_response() -> None:
    async def run() -> None:
        connection, release = Connection(), asyncio.Event()

        async def late() -> AsyncGenerator[bytes, None]:
            await release.wait()
            yield sse.event(b"{}")

        playing = asyncio.create_task(play(late(), connection, keep_alive_s=0.01))
        await connection.until(lambda: connection.body.count(sse.KEEP_ALIVE) >= 3)
        release.set()
        await playing
        assert connection.status == 200
        assert connection.body.replace(sse.KEEP_ALIVE, b"") == b"data: {}\n\n"

    asyncio.run(run())


def test_no_comment_is_written_into_an_event_that_is_being_sent() -> None:
    async def run() -> None:
        connection = Connection()
        connection.can_send.clear()
        playing = asyncio.create_task(play(words(b"{}"), connection, keep_alive_s=0.001))
        for _ in range(20):
            await asyncio.sleep(0.001)
        connection.can_send.set()
        await playing
        assert connection.body == b"data: {}\n\n"

    asyncio.run(run())


def test_a_client_that_goes_away_closes_the_stream() -> None:
    async def run() -> None:
        connection = Connection()

        async def endless() -> AsyncGenerator[bytes, None]:
            yield sse.event(b"{}")
            await asyncio.Event().wait()

        playing = asyncio.create_task(play(endless(), connection))
        await connection.until(lambda: b"{}" in connection.body)
        connection.gone.set()
        closing = await playing
        assert (closing.num_closed, closing.is_generator_closed) == (1, True)
        assert connection.sent[-1]["more_body"] is True

    asyncio.run(run())


def test_a_client_that_was_gone_before_the_first_event_closes_it_too() -> None:
    """The generator never ran, so its clean-up does not run either."""

    async def run() -> None:
        connection = Connection()
        connection.gone.set()
        closing = await play(words(), connection)
        assert closing.num_closed == 1

    asyncio.run(run())


def test_work_ends_with_its_client() -> None:
    async def run() -> None:
        connection, was_cancelled = Connection(), asyncio.Event()

        async def work() -> int:
            connection.gone.set()
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
            return 1

        with pytest.raises(sse.ClientGoneError):
            await sse.unless_disconnected(connection.receive, work())
        assert was_cancelled.is_set()

        async def quick() -> int:
            return 7

        assert await sse.unless_disconnected(Connection().receive, quick()) == 7

    asyncio.run(run())

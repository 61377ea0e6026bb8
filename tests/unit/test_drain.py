"""The drain of a server, without a server: when requests are refused, when they are given up, and what ends the
waiting."""

from __future__ import annotations

import asyncio
import signal
from typing import cast

import pytest
import uvicorn

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.lifecycle.drain import Drain, DrainOptions
from inferd.server.observability.metrics import Metrics
from inferd.server.transport.uvicorn_server import HttpServer
from tests.unit.scenes import play, settled

NEVER_S = 3600.0


class ServingRouter(Router):
    """A router with an engine, which ends no request."""

    def __init__(self) -> None:
        super().__init__(None, Metrics("tiny"))
        self.lifecycle.change(State.SERVING)
        self.num_aborted = 0

    @property
    def is_refusing(self) -> bool:
        return self.lifecycle.is_draining

    def take_on(self, request_id: str) -> None:
        """Add a request, as `submit` does."""
        submit = Submit(request_id=request_id, prompt_ids=(1,), params=SamplingParams(max_tokens=9, seed=1))
        self.streams.add([TokenStream(submit, self._count_abort)])

    def _count_abort(self, request_id: str) -> None:
        del request_id
        self.num_aborted += 1

    def end(self) -> None:
        for stream in tuple(self.streams.by_id.values()):
            self.streams.end_aborted(stream)


class Http:
    """The parts of the HTTP server that a drain uses."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.given_s: float | None = None

    def say_close(self) -> None:
        self.said.append("close")

    def close_idle(self) -> None:
        self.said.append("idle")

    def give_time(self, seconds: float) -> None:
        self.given_s = seconds

    def break_off(self) -> None:
        self.said.append("off")


class Scene:
    """A running drain."""

    def __init__(self, delay_s: float, timeout_s: float = NEVER_S) -> None:
        self.router, self.http, self.num_stuck = ServingRouter(), Http(), 0
        self.drain = Drain([self.router], DrainOptions(delay_s, timeout_s), self._stuck)
        self.task = asyncio.create_task(self.drain.run(cast("HttpServer", self.http)))

    def _stuck(self) -> None:
        self.num_stuck += 1


def test_nothing_happens_before_a_signal() -> None:
    async def scene() -> None:
        it = Scene(0.0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not it.router.lifecycle.is_leaving and not it.task.done() and it.http.said == []
        it.task.cancel()

    play(scene)


def test_sigterm_leaves_senders_time_and_refuses_then() -> None:
    async def scene() -> None:
        it = Scene(0.05)
        it.router.take_on("a")
        it.drain.signalled(signal.SIGTERM)
        assert it.router.lifecycle.is_leaving and not it.router.is_refusing
        await settled(lambda: it.http.said == ["close"])
        assert not it.router.is_refusing, "senders had no time"
        await settled(lambda: it.router.is_refusing)
        await settled(lambda: it.http.said == ["close", "idle"])
        assert not it.task.done(), "an answer is not finished"
        it.router.end()
        await it.task
        assert it.router.num_aborted == 0

    play(scene)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_has_no_senders_refuses_at_once(number: signal.Signals) -> None:
    """Ctrl-C, and a server that was not ready."""

    async def scene() -> None:
        it = Scene(NEVER_S)
        if number is signal.SIGTERM:
            it.router.lifecycle.change(State.STOPPED)
        it.drain.signalled(number)
        await it.task
        assert it.router.is_refusing

    play(scene)


def test_a_second_signal_ends_the_waiting_and_the_answers() -> None:
    async def scene() -> None:
        it = Scene(NEVER_S)
        it.router.take_on("a")
        it.drain.signalled(signal.SIGTERM)
        await settled(lambda: it.http.said == ["close"])
        it.drain.signalled(signal.SIGTERM)
        assert it.router.num_aborted == 1 and it.router.is_refusing, "one more could have been taken on"
        it.router.end()
        await it.task
        assert it.num_stuck == 0

    play(scene)


def test_the_deadline_counts_from_the_signal() -> None:
    """It includes the time that senders get. If the engine ends no request until then, requests are given up."""

    async def scene() -> None:
        it = Scene(NEVER_S, timeout_s=0.05)
        it.router.take_on("a")
        it.drain.signalled(signal.SIGTERM)
        await settled(lambda: it.router.num_aborted == 1)
        it.router.end()
        await it.task

    play(scene)


def test_what_is_still_being_written_has_the_rest_of_the_time() -> None:
    async def scene() -> None:
        it = Scene(0.0)
        it.drain.signalled(signal.SIGTERM)
        await it.task
        assert it.http.given_s is not None and NEVER_S - 60 < it.http.given_s <= NEVER_S
        assert "off" not in it.http.said
        it.drain.signalled(signal.SIGTERM)
        assert it.http.said[-1] == "off"

    play(scene)


def test_what_was_given_up_gets_no_time() -> None:
    async def scene() -> None:
        it = Scene(0.0)
        it.router.take_on("a")
        it.drain.signalled(signal.SIGTERM)
        it.drain.signalled(signal.SIGTERM)
        it.router.end()
        await it.task
        assert it.http.given_s is not None and it.http.given_s <= 0.0

    play(scene)


def test_a_server_that_leaves_waits_as_long_as_it_was_given_and_no_less_than_configured() -> None:
    async def scene() -> None:
        server = HttpServer(uvicorn.Config(_no_app, log_config=None, timeout_graceful_shutdown=5))
        server.give_time(-1.0)
        assert server.config.timeout_graceful_shutdown == 5
        server.give_time(29.5)
        assert server.config.timeout_graceful_shutdown == 30
        server.break_off()
        assert server.force_exit

    play(scene)


def test_an_engine_that_does_not_end_what_was_aborted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.server.lifecycle.drain._ABORT_GRACE_S", 0.01)

    async def scene() -> None:
        it = Scene(0.0, timeout_s=0.0)
        it.router.take_on("a")
        it.drain.signalled(signal.SIGTERM)
        await it.task
        assert it.num_stuck == 1

    play(scene)


def test_who_finds_that_nothing_can_be_served_waits_for_nobody() -> None:
    async def scene() -> None:
        it = Scene(NEVER_S)
        it.drain.give_up()
        await it.task
        assert it.router.num_aborted == 0

    play(scene)


def test_every_answer_of_a_server_that_leaves_ends_its_connection() -> None:
    """Also after uvicorn has made its headers anew, as it does each second."""

    async def scene() -> None:
        server = HttpServer(uvicorn.Config(_no_app, log_config=None))
        server.config.load()
        await server.on_tick(0)
        server.say_close()
        assert (b"connection", b"close") in server.server_state.default_headers
        await server.on_tick(0)
        assert server.server_state.default_headers.count((b"connection", b"close")) == 1

    play(scene)


async def _no_app(scope: object, receive: object, send: object) -> None:
    """An app that gets no requests."""

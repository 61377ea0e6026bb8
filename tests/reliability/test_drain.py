"""R7: after SIGTERM a server is not ready at once, answers its accepted requests, and refuses all others.

The model is free. An answer shows whether a part is lost, repeated or late, and its duration is known.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Daemon, free_model
from tests.reliability.asking import Answer, Ask, ask_one
from tests.reliability.conftest import wait_until
from tests.reliability.workloads import streams

SHORT_RESTARTS, LONG_RESTARTS = 2, 100
DELAY_S = 1.5
LONG_DELAY_S = 4.0
"""Delay in which even a busy machine sees not-ready and answers a short request."""
NUM_CLIENTS, PAUSE_S = 3, 0.15
_PROBE_S = 0.1

STEP_MS = 10.0
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
"""Number of tokens of an answer of twenty seconds, one per step."""
STREAMS = {
    "/v1/completions": {**ENDLESS, "prompt": "Hello"},
    "/v1/chat/completions": {**ENDLESS, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1900, "stream": True, "ignore_eos": True},
}


class Balancer:
    """Sends each request to a server that was ready, and after a 503 once more to another server."""

    def __init__(self, servers: list[Daemon]) -> None:
        self.servers = servers
        self._ready = [True] * len(servers)
        self._stop = threading.Event()
        self.wrong: list[str] = []
        self.num_answers = self.num_sent_on = 0
        self.thread = threading.Thread(target=self._run_all, daemon=True)

    def end(self) -> None:
        self._stop.set()
        self.thread.join(60)

    def _run_all(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:
            self.wrong.append(repr(error))

    async def _run(self) -> None:
        probes = [self._probe(slot) for slot in range(len(self.servers))]
        await asyncio.gather(*probes, *(self._ask_on_and_on(client) for client in range(NUM_CLIENTS)))

    async def _probe(self, slot: int) -> None:
        async with httpx.AsyncClient(verify=False, timeout=5) as http:
            while not self._stop.is_set():
                self._ready[slot] = False
                with suppress(httpx.TransportError):
                    self._ready[slot] = (await http.get(self.servers[slot].url + "/ready")).status_code == 200
                await asyncio.sleep(_PROBE_S)

    async def _ask_on_and_on(self, client: int) -> None:
        asks = [*streams(4, 10), *streams(1, 100)]
        expected: dict[int, Answer] = {}
        async with httpx.AsyncClient(verify=False, timeout=60) as http:
            turn = client
            while not self._stop.is_set():
                turn += 1
                kind = turn % len(asks)
                try:
                    answer = await self._sent(http, asks[kind], turn)
                except (httpx.HTTPError, AssertionError) as error:
                    self.wrong.append(f"{asks[kind].path}: {error!r}")
                    continue
                if answer.said != expected.setdefault(kind, answer).said or answer.status != 200:
                    self.wrong.append(f"{asks[kind]} was answered {answer.said}")
                self.num_answers += 1
                # Cores are for servers that start.
                await asyncio.sleep(PAUSE_S)

    async def _sent(self, http: httpx.AsyncClient, ask: Ask, turn: int) -> Answer:
        while True:
            slots = [slot for slot, is_ready in enumerate(self._ready) if is_ready]
            if not slots:
                await asyncio.sleep(_PROBE_S)
                continue
            url = self.servers[slots[turn % len(slots)]].url
            answer = await ask_one(http, Ask(url + ask.path, ask.body))
            if answer.status != 503:
                return answer
            self.num_sent_on += 1
            turn += 1


@pytest.mark.timeout(3600)
def test_r7_rolling_restarts_cost_no_answer(start: Callable[..., Daemon], is_long: bool) -> None:
    """Two servers get SIGTERM and are replaced, one after the other, while clients keep sending requests."""

    def another(*, ready: bool = True) -> Daemon:
        return start("--shutdown-delay-s", str(DELAY_S), ready=ready, program=free_model(STEP_MS))

    balancer = Balancer([another(ready=False), another()])
    balancer.servers[0].wait_ready()
    balancer.thread.start()
    num_restarts = LONG_RESTARTS if is_long else SHORT_RESTARTS
    for number in range(num_restarts):
        slot, goal = number % 2, balancer.num_answers + 5
        wait_until(lambda goal=goal: balancer.num_answers >= goal or bool(balancer.wrong))  # type: ignore[misc]
        assert balancer.servers[slot].stop() == 0, balancer.servers[slot].output
        balancer.servers[slot] = another()
    balancer.end()
    print(f"R7: {num_restarts} restarts, {balancer.num_answers} answers, {balancer.num_sent_on} sent on after a 503")
    assert not balancer.wrong, "\n".join(balancer.wrong)


@contextmanager
def streaming(url: str, path: str) -> Iterator[Iterator[str]]:
    """The lines of a long answer that has begun."""
    with httpx.stream("POST", url + path, json=STREAMS[path], timeout=60, verify=False) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line)
        yield lines


def test_a_server_that_leaves(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """The server is not ready at once, answers for a while and closes connections, refuses, then closes idle ones.
    It tells systemd about both ends."""
    flags = ("--shutdown-delay-s", str(LONG_DELAY_S), "--shutdown-timeout-s", "300")
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.settimeout(30)
    systemd.bind(f"{tmp_path}/notify")
    daemon = start(*flags, program=free_model(STEP_MS), env={"NOTIFY_SOCKET": f"{tmp_path}/notify"})
    assert systemd.recv(100) == b"READY=1"
    question = {"prompt": "Hello", "max_tokens": 4}
    # It still runs when the delay is over.
    finished = {**ENDLESS, "prompt": "Hello", "max_tokens": 800}
    with (
        httpx.Client(base_url=daemon.url, verify=False, timeout=120) as http,
        httpx.stream("POST", daemon.url + "/v1/completions", json=finished, timeout=300, verify=False) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        assert http.get("/ready").status_code == 200
        told_s = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/ready").status_code == 503, what="not ready")
        assert systemd.recv(100) == b"STOPPING=1"
        assert http.get("/live").status_code == 200
        served = http.post("/v1/completions", json=question)
        assert served.status_code == 200, served.text
        assert time.monotonic() - told_s < LONG_DELAY_S, "ready until requests were refused"
        assert served.headers["connection"] == "close"

        refused: list[Any] = []

        def is_refused() -> bool:
            # Connections on which nothing was asked yet are ended when the delay is over: this one may be among them.
            with suppress(httpx.TransportError):
                refused[:] = [http.post("/v1/completions", json=question)]
            return bool(refused and refused[0].status_code == 503)

        wait_until(is_refused, what="a refusal")
        assert time.monotonic() - told_s >= LONG_DELAY_S
        assert int(refused[0].headers["retry-after"]) >= 1 and refused[0].headers["connection"] == "close"
        error = refused[0].json()["error"]
        assert error["code"] == "server_is_overloaded" and "shutting down" in error["message"]
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2], rest[-3:]
    assert daemon.stop() == 0
    systemd.close()
    last = daemon.output.strip().splitlines()[-1]
    assert "stopped; " in last and last.endswith(" finished, 0 unfinished"), last


def test_a_second_signal_gives_every_stream_an_error_event(start: Callable[..., Daemon]) -> None:
    """The first one also closed the idle connections."""
    daemon = start(program=free_model(STEP_MS))
    url = httpx.URL(daemon.url)
    ends: dict[str, str] = {}
    begun = threading.Barrier(len(STREAMS) + 1)

    def read(path: str) -> None:
        with streaming(daemon.url, path) as lines:
            begun.wait(60)
            ends[path] = [line for line in lines if line][-1]

    readers = [threading.Thread(target=read, args=(path,), daemon=True) for path in STREAMS]
    with socket.create_connection((url.host, url.port), timeout=60) as silent:
        for reader in readers:
            reader.start()
        begun.wait(60)
        daemon.process.send_signal(signal.SIGTERM)
        assert silent.recv(1) == b"", "it was not closed"
    wait_until(lambda: f"finishing {len(STREAMS)} answers" in daemon.output)
    daemon.process.send_signal(signal.SIGINT)
    for reader in readers:
        reader.join(60)
    assert {path for path, end in ends.items() if "shutting down" in end} == set(STREAMS), ends
    assert daemon.stop() == 0
    assert f"giving up {len(STREAMS)} unfinished" in daemon.output
    assert f"stopped; answers since the start: 0 finished, {len(STREAMS)} unfinished" in daemon.output

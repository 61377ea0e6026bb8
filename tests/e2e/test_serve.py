"""The first steps of a new user: start, READY card, its curl command, a streamed chat, and a clean end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import httpx

from .conftest import Daemon, free_model

QUESTION = [{"role": "user", "content": "What are you?"}]


def test_the_start_says_what_happened_in_few_lines(daemon: Daemon) -> None:
    start = daemon.lines[: daemon.lines.index("  " + daemon.curl) + 1]
    assert len(start) <= 15, start
    seconds = [float(found) for found in re.findall(r"(\d+\.\d\d) s  ", "\n".join(start))]
    total = re.search(r"READY in (\d+\.\d) s", "\n".join(start))
    assert total is not None, start
    # Between two phases a process may wait for its turn, and longer on a busy machine.
    assert abs(sum(seconds) - float(total[1])) < 0.5 + 0.1 * float(total[1]), (
        f"phases {seconds} do not add up to {total[1]}"
    )


def test_the_printed_curl_works_when_pasted(daemon: Daemon) -> None:
    answer = subprocess.run(daemon.curl, shell=True, capture_output=True, text=True, check=True)
    message = json.loads(answer.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert len(message["content"]) > 10


def test_the_openai_client_streams_a_chat(daemon: Daemon) -> None:
    client = daemon.client()
    chunks = list(client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, stream=True))  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    plain = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert streamed == plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "stop", "the embedded model stops by itself"


def test_a_stream_comes_while_it_is_computed(daemon: Daemon) -> None:
    """Most of the answer arrives while the engine still generates. On a busy machine one piece may come late."""

    def is_early() -> bool:
        with daemon.client().completions.create(
            model="tiny", prompt="Once", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            pieces = (chunk for chunk in stream if chunk.choices[0].text)
            return len(list(islice(pieces, 2))) == 2 and daemon.get("/state").json()["requests"]["running"] > 0

    assert any(is_early() for _ in range(5))


def test_32_at_once_answer_as_alone(daemon: Daemon) -> None:
    client = daemon.client()

    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"Count to {seed}:", seed=seed, max_tokens=24, temperature=1
        )
        return answer.choices[0].text

    alone = {seed: ask(seed) for seed in (3, 17, 30)}
    with ThreadPoolExecutor(32) as threads:
        together = dict(enumerate(threads.map(ask, range(32))))
    assert {seed: together[seed] for seed in alone} == alone


def test_the_server_process_never_loads_torch(daemon: Daemon) -> None:
    """Looks at the memory maps of processes that answered requests. Only the engine's contain a torch library."""
    daemon.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]
    assert "libtorch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{daemon.engine_pid}/maps").read_text()


def test_metrics_count_what_was_served(daemon: Daemon) -> None:
    before = counter(daemon, "inferd_generation_tokens_total")
    answer = daemon.client().completions.create(
        model="tiny", prompt="Hello", max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert counter(daemon, "inferd_generation_tokens_total") - before == 5
    page = daemon.get("/metrics").text
    for name in ("time_to_first_token", "time_per_output_token", "inter_token_latency", "e2e_request_latency"):
        assert f"inferd_{name}_seconds_bucket" in page
    assert 'inferd_memory_bytes{kind="kv",model_name="tiny",source="measured"}' in page


def counter(daemon: Daemon, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", daemon.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@contextmanager
def streaming(daemon: Daemon) -> Iterator[Iterator[str]]:
    """The lines of a long streamed answer."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=60) as answer:
        yield answer.iter_lines()


def test_nothing_is_left_after_the_server_is_killed(start: Callable[..., Daemon]) -> None:
    daemon = start(program=free_model(0))
    # Many tests start such an engine because it is cheap.
    assert "libtorch" not in Path(f"/proc/{daemon.engine_pid}/maps").read_text()
    alive = os.pidfd_open(daemon.engine_pid)
    daemon.process.kill()
    daemon.process.wait()
    assert select.select([alive], [], [], 10)[0], "the engine outlived its server"


def test_a_client_that_does_not_read_cannot_keep_the_server(start: Callable[..., Daemon]) -> None:
    """The client's socket stays full. After the grace period the server closes it and exits."""
    daemon = start()
    host, port = daemon.url.removeprefix("http://").split(":")
    body = b'{"model":"tiny","prompt":"Hello","max_tokens":1900,"stream":true,"ignore_eos":true,"logprobs":5,"n":4}'
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", ""))
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        deaf.sendall(head.encode() + body)
        deaf.recv(1)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.stop() == 0


def test_an_engine_that_dies_before_it_was_ready_ends_the_start(start: Callable[..., Daemon]) -> None:
    """No request waits yet, and a new engine would most likely end the same way."""
    daemon = start(ready=False)
    while "checkpoint" not in daemon.output:
        assert daemon.process.poll() is None, daemon.output
        time.sleep(0.01)
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline, "no engine was started"
        try:
            os.kill(daemon.engine_pid, signal.SIGKILL)
            break
        except StopIteration:
            time.sleep(0.01)
    assert daemon.process.wait(timeout=30) == 70
    assert "was killed by SIGKILL" in daemon.output


def test_a_stopped_engine_cannot_keep_the_server(start: Callable[..., Daemon]) -> None:
    daemon = start("--shutdown-timeout-s", "1", program=free_model(5))
    with streaming(daemon) as lines:
        next(lines)
        os.kill(daemon.engine_pid, signal.SIGSTOP)
        daemon.process.send_signal(signal.SIGTERM)
        assert '"error"' in [line for line in lines if line][-1]
    assert daemon.process.wait(60) in (0, 70)

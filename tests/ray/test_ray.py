"""The application of deploy/ray on two Ray nodes, each with one daemon: `make ray-test`.

Ray has an environment of its own, build/ray. Without it these tests are skipped by name.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIError, OpenAI

ROOT = Path(__file__).resolve().parents[2]
RAY_PYTHON = Path(os.environ.get("RAY_PYTHON", ROOT / "build" / "ray" / "bin" / "python"))
INFERD = Path(sys.executable).parent / "inferd"
STORY = "Once upon a time there was a small boat. " * 20

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RAY_PYTHON.exists(), reason="Ray is not installed in build/ray: make tools"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of two replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(RAY_PYTHON), str(Path(__file__).with_name("cluster.py")), str(port), str(INFERD)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("READY"):
                break
        assert lines and lines[-1].startswith("READY on 2 nodes"), "".join(lines[-40:])
        print(lines[-1])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.wait(timeout=120)


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def wait_until(fact: Callable[[], bool], what: str, within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.2)


def chat(client: OpenAI, begin: str, *, num_turns: int = 1) -> list[int]:
    """Number of cached prompt tokens in each turn of a conversation."""
    messages, cached = [{"role": "user", "content": begin + STORY}], []
    for _ in range(num_turns):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "Go on."},
        ]
    return cached


def replicas() -> list[psutil.Process]:
    """Ray's processes that have a daemon."""
    found = []
    for process in psutil.process_iter():
        try:
            if "inferd" in " ".join(process.cmdline()) and "serve" in process.cmdline():
                parent = process.parent()
                if parent is not None and "ServeReplica" in " ".join(parent.cmdline()):
                    found.append(parent)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def test_an_answer_is_that_of_the_daemon(url: str, client: OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="Once", max_tokens=20, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) > 5
    assert chunks[-1].choices[0].finish_reason == "length"
    for body, status in (({"prompt": ""}, 400), ({"prompt": "a", "max_tokens": -1}, 200), ([], 400)):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", **body} if body else body, timeout=60)
        assert answer.status_code == status, answer.text
        assert "x-request-id" in answer.headers
    assert httpx.get(f"{url}/v1/models?a=b").json()["data"][0]["id"] == "tiny"


def test_conversations_are_spread_and_each_stays_at_its_replica(client: OpenAI) -> None:
    assert len({process.pid for process in replicas()}) == 2
    cached = [chat(client, f"{number}. ", num_turns=3) for number in range(8)]
    assert all(first == 0 < second < third for first, second, third in cached), cached


def test_a_refusal_passes_with_its_retry_after(url: str) -> None:
    body = {"model": "tiny", "prompt": STORY, "max_tokens": 200, "ignore_eos": True}

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(ask, range(40)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and len(refused) < 40, "four run and four wait"
    assert {answer.json()["error"]["code"] for answer in refused} == {"server_is_overloaded"}
    assert all(float(answer.headers["retry-after"]) > 0 for answer in refused)


def num_aborted(url: str) -> int:
    """Aborted sequences of the replica that answers."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(int(float(found)) for found in re.findall(r'finished_total\{[^}]*"abort"[^}]*\} (\S+)', page))


def test_a_client_that_leaves_aborts_its_request(url: str, client: OpenAI) -> None:
    assert {num_aborted(url) for _ in range(12)} == {0}
    stream = client.completions.create(
        model="tiny", prompt=STORY, max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: num_aborted(url) == 1, "an abort", within_s=20)


def test_clients_of_a_killed_replica_get_an_answer_that_can_be_retried(url: str, client: OpenAI) -> None:
    victims = replicas()
    stream = client.completions.create(
        model="tiny", prompt=STORY, max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(APIError, match="lost"):
        list(chunks)
    answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": STORY, "max_tokens": 2}, timeout=90)
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert answer.headers["retry-after"] == "1" and answer.json()["error"]["type"] == "server_error"
    patient = client.with_options(max_retries=60)
    assert patient.completions.create(model="tiny", prompt=STORY, max_tokens=2).choices[0].text
    wait_until(lambda: len({process.pid for process in replicas()}) == 2, "two replicas again")

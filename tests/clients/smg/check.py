"""SGLang's model gateway: it finds out what the server is, reads its load, and passes answers, errors and aborts on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
from checks import BASE_URL, KEY, MODEL, URL, check, run

SPAN_S = 30.0
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello, who are you?"}], "temperature": 0, "seed": 1}
LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
CHANGES = {"id", "created"}


def free_port() -> int:
    with closing(create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def wait_for(what: str, test: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SPAN_S
    while not test():
        assert time.monotonic() < end_s, f"not after {SPAN_S:.0f} s: {what}"
        time.sleep(0.1)


PORT = free_port()
GATEWAY = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60)
DIRECT = httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def is_up() -> bool:
    try:
        return GATEWAY.get("/v1/models").status_code == 200 and bool(GATEWAY.get("/workers").json()["workers"])
    except httpx.TransportError:
        return False


def load() -> dict[str, Any]:
    """The server's load as the gateway read it. Empty before its first reading."""
    loads = GATEWAY.get("/loads").json()["loads"]
    return loads[0] if loads else {}


@check
def the_gateway_finds_the_model_and_its_context() -> None:
    (worker,) = GATEWAY.get("/workers").json()["workers"]
    assert worker["is_healthy"] and worker["model_id"] == MODEL, worker
    assert worker["models"][0]["context_length"] == 2048, worker


@check
def a_chat_is_that_of_the_server() -> None:
    through, own = (
        GATEWAY.post("/v1/chat/completions", json=HELLO),
        DIRECT.post(f"{BASE_URL}/chat/completions", json=HELLO),
    )
    through.raise_for_status()
    one, two = ({key: value for key, value in answer.json().items() if key not in CHANGES} for answer in (through, own))
    one["usage"].pop("prompt_tokens_details"), two["usage"].pop("prompt_tokens_details")
    assert one == two, (one, two)


@check
def a_stream_arrives_whole() -> None:
    with GATEWAY.stream("POST", "/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    own = DIRECT.post(f"{BASE_URL}/chat/completions", json=HELLO).json()
    assert text == own["choices"][0]["message"]["content"]


@check
def its_load_is_the_servers() -> None:
    wait_for("a load of the server", lambda: load().get("max_total_num_tokens", 0) > 0)
    assert load()["num_running_reqs"] == 0
    # So many sequences run for longer than two readings are apart.
    with GATEWAY.stream("POST", "/v1/completions", json={**LONG, "n": 16}) as answer:
        lines = answer.iter_lines()  # closes the answer when it is freed
        next(lines)
        wait_for("the running sequences", lambda: load()["num_running_reqs"] == 16)
    wait_for("no sequence, since the client has gone", lambda: load()["num_running_reqs"] == 0)


@check
def a_client_that_goes_ends_its_request() -> None:
    def running() -> int:
        return int(DIRECT.get(f"{URL}/state").json()["requests"]["running"])

    with GATEWAY.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert running() == 1
    wait_for("an end of the request", lambda: running() == 0)


@check
def an_error_keeps_its_words() -> None:
    wrong = {**HELLO, "messages": []}
    through, own = (
        GATEWAY.post("/v1/chat/completions", json=wrong),
        DIRECT.post(f"{BASE_URL}/chat/completions", json=wrong),
    )
    assert through.status_code == own.status_code == 400
    assert own.json()["error"]["message"] in through.text


if __name__ == "__main__":
    options = ["--host", "127.0.0.1", "--port", str(PORT), "--worker-urls", URL, "--api-key", KEY]
    options += ["--policy", "least_load", "--load-monitor-interval", "1", "--prometheus-port", str(free_port())]
    program = [str(Path(sys.executable).parent / "smg"), "launch", *options, "--log-level", "error"]
    gateway = subprocess.Popen(program, env={**os.environ, "NO_COLOR": "1"})
    GATEWAY.headers["Authorization"] = f"Bearer {KEY}"
    try:
        wait_for("the gateway", is_up)
        run()
    finally:
        gateway.kill()
        gateway.wait()

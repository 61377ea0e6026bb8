"""A hostile chat template harms nobody but the requests that it renders: not the start, the server, or other chats."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Daemon, free_model, start
from tests.security.hostile_checkpoints import copy_of_tiny, tokenizer_config
from tests.security.hostile_templates import CALM, ENDLESS, HOSTILE

__all__ = ["start"]

MAX_GROWTH_BYTES = 64 * 2**20
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/chat/completions/render": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/messages/count_tokens": {},
    "/v1/responses": {"max_output_tokens": 16},
    "/tokenize": {},
}


def serving(start: Callable[..., Daemon], folder: Path, template: str) -> Daemon:
    """A server of a model with that template, and of the embedded one."""
    tokenizer_config(chat_template=template)(copy_of_tiny(folder / "model"))
    return start(f"hostile={folder / 'model'}", "tiny", program=free_model(1.0), may_fork=False)


def ask(daemon: Daemon, text: str, model: str = "hostile", path: str = "/v1/chat/completions") -> httpx.Response:
    said = text if path == "/v1/responses" else [{"role": "user", "content": text}]
    key = "input" if path == "/v1/responses" else "messages"
    return httpx.post(daemon.url + path, json={"model": model, key: said, **ROUTES[path]}, timeout=120)


@pytest.mark.timeout(400)
@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("name", HOSTILE)
def test_others_are_answered_meanwhile_and_the_request_fails_by_name(
    tmp_path: Path, start: Callable[..., Daemon], name: str, is_long: bool
) -> None:
    """Those without end are awaited with `--long` only."""
    daemon = serving(start, tmp_path, HOSTILE[name])
    server = psutil.Process(daemon.process.pid)
    at_first = server.memory_info().rss
    with ThreadPoolExecutor(2) as pool:
        hostile = [pool.submit(ask, daemon, "hi") for _ in range(2)]
        for _ in range(5):
            assert daemon.get("/live").status_code == 200
            assert ask(daemon, CALM).status_code == 200
            assert ask(daemon, "hi", "tiny").status_code == 200
        if name in ENDLESS:
            assert not any(one.done() for one in hostile), "nothing was asked meanwhile"
        if name in ENDLESS and not is_long:
            daemon.stop(signal.SIGKILL)
            return
        answers = [one.result() for one in hostile]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "messages")
        words = "10 s of processor time|longer than 60 s" if name in ENDLESS else "more than 512 MiB of memory"
        assert re.search(words, error["message"])
    assert ask(daemon, CALM).status_code == 200
    assert server.memory_info().rss - at_first < MAX_GROWTH_BYTES
    assert "Traceback" not in daemon.output and "Exception in thread" not in daemon.output
    assert daemon.output.count("the chat template did not render") == (1 if name in ENDLESS else 0)


def test_each_route_that_renders_is_bounded(tmp_path: Path, start: Callable[..., Daemon]) -> None:
    daemon = serving(start, tmp_path, HOSTILE["replace"])
    for path in ROUTES:
        refused = ask(daemon, "hi", path=path)
        assert refused.status_code == 400 and "more than 512 MiB of memory" in refused.text, path
        assert ask(daemon, CALM, path=path).status_code == 200, path

"""R6: nothing is left of a killed process, whatever it was doing, and another starts at once in its place.

Two of the ways depend on the model. The others have a free model, or the real one with `--long`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import forking
from tests.e2e.conftest import INFERD, children, free_model, is_engine
from tests.reliability.conftest import HTTP, wait_until
from tests.security.hostile_checkpoints import copy_of_tiny, tokenizer_config
from tests.security.hostile_templates import HOSTILE

GONE_WITHIN_S = 3.0
LOADED_WITHIN_S = 2.5
LONG_LOOPS = 17
"""Number of repetitions of each of seven ways."""

CHECK, RENDER = "inferd.engine.grammar", "inferd.server.text.render_process"
STEP_MS = 5.0
"""Duration of the free model's steps. `streaming` goes on for ten seconds."""


class Server:
    """A daemon on a given port, with temporary files in the test's directory."""

    def __init__(self, port: int, home: Path, *arguments: str, is_free: bool) -> None:
        self.url, self.home = f"http://127.0.0.1:{port}", home
        program = free_model(STEP_MS) if is_free else (INFERD,)
        command = [*program, "serve", "--port", str(port), "--log-level", "error", *arguments]
        environment = {"TMPDIR": str(home), "INFERD_NUM_THREADS": "2"}
        self.process: subprocess.Popen[bytes] | forking.Forked
        script = forking.script_of(command, environment) if is_free else None
        if script is not None:
            self.process = forking.start(script, environment)
        else:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
            )
        self.left: dict[int, str] = {}
        """Child processes at the time of the kill."""

    def children(self) -> dict[int, str]:
        """Engines, the process that checks grammars, and those that render chat templates."""
        found = children(self.process.pid)
        renders = [pid for pid, command in found.items() if RENDER in command]
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {pid: command for forker in renders for pid, command in children(forker).items()}
        return {
            pid: command
            for pid, command in found.items()
            if is_engine(command) or CHECK in command or RENDER in command
        }

    def engines(self) -> list[int]:
        return [pid for pid, command in self.children().items() if is_engine(command)]

    def engine(self) -> int:
        return next(iter(self.engines()), 0)

    def is_ready(self) -> bool:
        return '"ready"' in self.page("/health")

    def page(self, path: str) -> str:
        with contextlib.suppress(httpx.TransportError):
            return HTTP.get(self.url + path).text
        return ""

    def kill(self) -> None:
        if self.process.poll() is None:
            self.left = self.children()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[None]:
    body = {"prompt": "Hello", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
        yield


def while_loading(server: Server) -> None:
    wait_until(lambda: bool(server.engine()))


def stopped_while_it_loads(server: Server) -> None:
    """The engine is about to be ready when its server dies."""
    wait_until(lambda: bool(server.engine()))
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(LOADED_WITHIN_S)


def while_it_streams(server: Server) -> None:
    wait_until(server.is_ready)
    with streaming(server):
        server.kill()


def with_a_stopped_engine(server: Server) -> None:
    wait_until(server.is_ready)
    os.kill(server.engine(), signal.SIGSTOP)


def with_a_grammar_process(server: Server) -> None:
    wait_until(server.is_ready)
    asked = {"prompt": "Hello", "max_tokens": 4, "regex": "(?=a)*b"}
    assert httpx.post(server.url + "/v1/completions", json=asked, timeout=60).status_code == 400
    assert any(CHECK in args for args in server.children().values()), server.children()


def while_it_renders(server: Server) -> None:
    """A worker is in a call that never returns. The start tried the template before, and killed the worker."""
    wait_until(server.is_ready)
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    asking = threading.Thread(target=ask_in_vain, args=(server.url + "/v1/chat/completions", asked), daemon=True)
    asking.start()
    wait_until(lambda: sum(RENDER in command for command in server.children().values()) > 1)
    server.kill()
    asking.join()


def ask_in_vain(url: str, asked: dict[str, object]) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(url, json=asked, timeout=60)


def with_a_stopped_standby(server: Server) -> None:
    warm = re.compile(r"^inferd_standby_ready.* 1\.0$", re.MULTILINE)

    def is_warm() -> bool:
        return bool(warm.search(server.page("/metrics")))

    wait_until(is_warm, within_s=240)
    _, standby = server.engines()
    os.kill(standby, signal.SIGKILL)
    # Another comes in its place. It is there only after the metrics say that none is ready.
    wait_until(lambda: server.engines()[1:] not in ([], [standby]) and is_warm(), within_s=240)
    assert '"restarts":0' in server.page("/state"), "the engine was none the worse"
    os.kill(server.engines()[1], signal.SIGSTOP)


def after_its_engine(server: Server) -> None:
    """The engine is killed first, and then the server while it starts another."""
    wait_until(server.is_ready)
    dead = server.engine()
    with streaming(server):
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: server.engine() not in (0, dead))
        server.kill()


WAYS = (
    (while_loading, stopped_while_it_loads),
    (while_it_streams, with_a_stopped_engine),
    (with_a_grammar_process, while_it_renders, after_its_engine),
    (with_a_stopped_standby,),
)
"""Those of a group follow each other on one port."""
REAL = (while_loading, while_it_streams)
"""The engine's threads import libraries, or compute."""


@pytest.mark.timeout(3600)
@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: ways[0].__name__)
def test_r6_nothing_is_left_of_a_killed_server(
    tmp_path: Path, port: int, is_long: bool, ways: tuple[Callable[[Server], None], ...]
) -> None:
    """The next server listens on the same port. It starts before the last one's processes must be gone."""
    assert sys.platform == "linux"
    # In the short form other tests compute beside this one.
    within_s = GONE_WITHIN_S if is_long else 3 * GONE_WITHIN_S
    for loop, way in enumerate(ways * (LONG_LOOPS if is_long else 1)):
        home = tmp_path / str(loop)
        home.mkdir()
        flags = ["--standby"] if way is with_a_stopped_standby else []
        if way is while_it_renders:
            tokenizer_config(chat_template=HOSTILE["lists"])(copy_of_tiny(home / "model"))
            flags = [str(home / "model")]
        server = Server(port, home, *flags, is_free=not is_long and way not in REAL)
        try:
            way(server)
        finally:
            server.kill()
        assert server.left, f"{way.__name__}: there was nothing to be left"
        wait_until(lambda left=server.left: not any(map(is_alive, left)), within_s, way.__name__)  # type: ignore[misc]
        wait_until(lambda home=home: not list(home.glob("inferd-*")), within_s, way.__name__)  # type: ignore[misc]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return re.search(r"^State:\s+([A-Z])", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1] != "Z"  # type: ignore[index]
    return False

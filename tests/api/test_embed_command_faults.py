"""`inferd embed` against a server that fails, or never answers, and two runs that write the same output."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.embed.client import Embedder, EmbedError, check_answers, connect
from inferd.server.commands.embed.lines import Line
from inferd.server.commands.embed.output import TYPE_CODES, open_output
from inferd.server.commands.embed.run import EmbedOptions, run

TEXTS = [f"line {i}" for i in range(1_000)]
WAIT_S = 60.0
END_S = 20.0
"""Seconds for the end of an interrupted run, of which Python takes some on a busy machine."""


class Stub(ThreadingHTTPServer):
    """Answers with the status that `status` says for the texts of a request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status: Callable[[Sequence[str]], int] = lambda texts: 200
        self.describes = True
        self.asked: list[Sequence[str]] = []
        self.was_asked = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that went away are expected."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        is_first = not self.server.asked
        self.server.asked.append(texts)
        self.server.was_asked.set()
        # The first text is the command's own, by which it describes the model.
        status = 200 if is_first and self.server.describes else self.server.status(texts)
        vector = base64.b64encode(np.ones(2, np.float32).tobytes()).decode()
        rows = [{"index": i, "embedding": vector} for i in range(len(texts))]
        answer = {"model": "tiny", "data": rows}
        self._answer(status, answer if status == 200 else {"error": {"message": f"says {status}"}})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if status == 503:
            self.send_header("retry-after", "25")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        """Nothing is logged."""


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """A shell's background job ignores interrupts, and so would the commands of these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def options(stub: Stub, tmp_path: Path) -> EmbedOptions:
    file = tmp_path / "in.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    output = tmp_path / "out.jsonl"
    return EmbedOptions(file=str(file), output=output, base_url=stub.url, model=None, api_key=None, field=None)


def num_errors(options: EmbedOptions) -> int:
    rows = [json.loads(line) for line in options.output_path.read_text().splitlines()]
    assert len(rows) == len(TEXTS)
    return sum("error" in row for row in rows)


def test_a_model_without_embeddings_ends_the_run(stub: Stub, options: EmbedOptions) -> None:
    stub.status, stub.describes = lambda texts: 501, False
    command = [sys.executable, "-m", "inferd", "embed", options.file, "-o", str(options.output), "--base-url", stub.url]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, len(stub.asked)) == (1, 1)
    assert "says 501" in ended.stderr
    assert {path.name for path in options.output_path.parent.iterdir()} == {"in.txt"}, "no file is left"
    stub.status = lambda texts: 200
    assert run(options) == 0
    assert num_errors(options) == 0


@pytest.mark.parametrize("num_good", [0, 300])
def test_a_server_that_always_fails_ends_the_run(stub: Stub, options: EmbedOptions, num_good: int) -> None:
    good = set(TEXTS[:num_good])
    stub.status = lambda texts: 200 if good.issuperset(texts) and len(stub.asked) < 4 else 500
    with pytest.raises(EmbedError, match="says 500"):
        run(replace(options, concurrency=1))
    assert len(stub.asked) < 20 and not options.output_path.exists()


def test_lines_that_break_the_server_do_not_end_the_run(stub: Stub, options: EmbedOptions) -> None:
    bad = set(TEXTS[200:210])
    stub.status = lambda texts: 500 if bad.intersection(texts) else 200
    assert run(options) == 1
    assert num_errors(options) == len(bad)


@pytest.mark.parametrize("answers", [True, False], ids=["told to wait 25 s", "no answer"])
def test_an_interrupted_run_ends_at_once(stub: Stub, options: EmbedOptions, answers: bool) -> None:
    never, stub.describes = threading.Event(), False
    stub.status = lambda texts: 503 if answers else 503 * never.wait(WAIT_S)
    command = [sys.executable, "-m", "inferd", "embed", options.file, "-o", str(options.output), "--base-url", stub.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert stub.was_asked.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=END_S)[1]
    finally:
        process.kill()
        process.wait()
        never.set()
    assert process.returncode == 130 and "the same command goes on" in said


def test_the_end_of_a_run_ends_its_requests(stub: Stub) -> None:
    never = threading.Event()
    stub.status = lambda texts: 503 * never.wait(WAIT_S)
    http = connect(stub.url, None)
    check_answers(http)
    stub.describes = False
    embedder = Embedder(http, {}, TYPE_CODES["float"], WAIT_S)
    ended = threading.Event()

    def ask() -> None:
        with pytest.raises(EmbedError, match="stopped"):
            embedder.rows([Line(0, b"a", "a")])
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    try:
        assert stub.was_asked.wait(WAIT_S)
        embedder.stop()
        assert ended.wait(END_S)
    finally:
        never.set()


def test_a_second_run_on_an_output_is_refused(options: EmbedOptions) -> None:
    path = options.output_path
    with open_output(path, {}, "float", iter(()), restart=False) as output:
        for restart in (False, True):
            with pytest.raises(ConfigError, match="another run is writing"):
                run(replace(options, restart=restart))
        output.finish()
    with pytest.raises(ConfigError, match="is there already"):
        run(options)
    assert run(replace(options, restart=True)) == 0
    assert num_errors(options) == 0


SERVER = """#!/bin/sh
trap '' TERM
echo "READY in 0.1 s: tiny at $URL/v1"
while true; do sleep 0.1; done
"""


def test_an_interrupted_run_does_not_wait_for_its_own_server(
    stub: Stub, options: EmbedOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "server"
    server.write_text(SERVER)
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))
    monkeypatch.setenv("URL", stub.url)

    def interrupt(texts: Sequence[str]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 503

    stub.status = interrupt
    started_s = time.monotonic()
    assert run(replace(options, base_url=None, model="tiny")) == 130
    assert time.monotonic() - started_s < END_S


def test_rows_are_on_the_disk_before_the_state(options: EmbedOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def renamed(path: Path, target: Path) -> Path:
        for file in (path, options.output_path.with_name("out.jsonl.part")):
            if file.exists():
                assert synced[file.stat().st_ino] == file.stat().st_size
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", renamed)
    assert run(options) == 0

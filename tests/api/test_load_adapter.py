"""Requests to load adapters whose names or files are wrong. None makes a long answer, or holds up the event loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from inferd.engine.api.adapter import CONFIG, MAX_CONFIG_BYTES, MAX_HEADER_BYTES, WEIGHTS, read_adapter
from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import WAIT_S, Beats, ScriptedRouter, serving

ADMIN = {"Authorization": "Bearer boss"}
RULE = "a name of 1 to 256 printable characters, with no space at its ends"


@pytest.fixture(scope="module")
def beats() -> Beats:
    return Beats(time.monotonic, time.process_time)


@pytest.fixture(scope="module")
def server(model: ServedModel, beats: Beats) -> Iterator[httpx.Client]:
    """A server with room for two adapters."""
    arch = ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)).arch
    router = ScriptedRouter(model, adapters=AdapterPlaces(2, partial(read_adapter, arch=arch)))
    settings = app_settings(admin_key=("boss",), access_log=False)
    with (
        serving(model, router, settings, probe=beats.probe) as url,
        httpx.Client(base_url=url, headers=ADMIN, timeout=WAIT_S) as client,
    ):
        yield client


def refusal(server: httpx.Client, name: str, path: str) -> tuple[str, str]:
    """(field, message) of the answer to a request to load an adapter."""
    response = server.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value") and len(error["message"]) <= 1000
    return error["param"], error["message"]


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "\x1b[31m", "a\u2028b", "\u202e", "x" * 257, "x" * 2**20])
def test_a_name_is_short_and_visible(server: httpx.Client, tmp_path: Path, name: str) -> None:
    field, message = refusal(server, name, str(tmp_path))
    assert field == "lora_name" and RULE in message


@pytest.mark.parametrize("name", ["x" * 256, "sql-v2", "two words", "org/model:tag", "modèle", "模型"])
def test_other_names_are_allowed(server: httpx.Client, tmp_path: Path, name: str) -> None:
    assert refusal(server, name, str(tmp_path)) == (
        "lora_path", f"{tmp_path} holds no {CONFIG}: it is not a checkpoint directory."
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/" + "x" * 2**20, "/a\nb", "/" + "\x1b" * 2**20, "/\0"])
def test_a_path_makes_no_long_answer(server: httpx.Client, path: str) -> None:
    assert refusal(server, "x", path)[0] == "lora_path"


def small(content: str, num_bytes: int) -> bytes:
    """A JSON object of at most so many bytes, which repeats `content`."""
    return ('{"a":[' + content * ((num_bytes - 9) // len(content)) + "1]}").encode()


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


MANY_KEYS = ("{" + ",".join(f'"{i:05x}":1' for i in range(MAX_HEADER_BYTES // 10)) + "}").encode()


@pytest.mark.parametrize(
    ("config", "weights", "why"),
    [
        (b" " * 60_000_000, b"", "it has 60000000 bytes, and at most 262144 are allowed"),
        (small("[],", 60_000_000), b"", "bytes, and at most 262144 are allowed"),
        (small("[],", MAX_CONFIG_BYTES), b"", "peft_type must be 'LORA', but is None"),
        (small("1.5,", MAX_CONFIG_BYTES), b"", "peft_type must be 'LORA', but is None"),
        (b'{"peft_type":"' + b"x" * 200_000 + b'"}', b"", "peft_type must be 'LORA', but is 'xxx"),
        (b'{"peft_type":' + b"[" * 900 + b"]" * 900 + b"}", b"", "peft_type must be 'LORA', but is "),
        (b'{"peft_type":"LORA"}', header(b" " * 2**20), "header of 1048576 bytes, but at most 524288 are allowed"),
        (b'{"peft_type":"LORA"}', header(MANY_KEYS), "the header's entry for 00000 is malformed"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else "",
)
def test_files_are_bounded_before_they_are_read(
    server: httpx.Client, beats: Beats, tmp_path: Path, config: bytes, weights: bytes, why: str
) -> None:
    (tmp_path / CONFIG).write_bytes(config)
    (tmp_path / WEIGHTS).write_bytes(weights)
    beats.reset()
    field, message = refusal(server, "x", str(tmp_path))
    assert field == "lora_path" and why in message
    beats.check()


def test_only_regular_files_are_read(server: httpx.Client, tmp_path: Path) -> None:
    """Opening a pipe would wait without end."""
    os.mkfifo(tmp_path / CONFIG)
    assert "it must be a regular file" in refusal(server, "x", str(tmp_path))[1]


def test_one_adapter_is_read_at_a_time(model: ServedModel) -> None:
    """Two threads that read would meet at the barrier."""
    meeting, num_met = threading.Barrier(2), 0

    def read(path: Path) -> NoReturn:
        nonlocal num_met
        try:
            meeting.wait(0.5)
            num_met += 1
        except threading.BrokenBarrierError:
            pass
        raise ModelError(f"{path} is no adapter")

    router = ScriptedRouter(model, adapters=AdapterPlaces(2, read))
    settings = app_settings(admin_key=("boss",), access_log=False)
    with (
        serving(model, router, settings) as url,
        httpx.Client(base_url=url, headers=ADMIN, timeout=WAIT_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        found = list(pool.map(lambda name: refusal(client, name, "/x"), "abcd"))
    assert found == [("lora_path", "/x is no adapter.")] * 4 and num_met == 0

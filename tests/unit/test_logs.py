"""Log lines: one a record, as text and as JSON, and libraries log only warnings."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest

from inferd.engine.api.process.engine_process import EngineLaunch
from inferd.engine.api.process.logs import LogStyle, configure
from inferd.engine.process import main as process
from tests.configs import engine_config


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    loggers = (logging.root, logging.getLogger("inferd"))
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogStyle("info", "text"))
    logging.getLogger("inferd.x").info("hello %s", "you")
    line = capsys.readouterr().err
    assert line[2] == line[5] == ":"
    assert line[8:] == " info    hello you\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_warning_is_bounded_whatever_it_quotes(
    form: Literal["text", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogStyle("info", form))
    logging.getLogger("inferd.x").warning("it holds %s: give another", "x" * 10**6)
    line = capsys.readouterr().err
    assert len(line) <= 1_200 and line.count("\n") == 1
    assert "it holds x" in line and "x: give another" in line


def test_json_is_one_object_with_its_extras(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogStyle("info", "json"))
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("inferd.x").exception("two\nlines", extra={"route": "/v1/models", "status": 200})
    line = json.loads(capsys.readouterr().err)
    assert {key: line[key] for key in ("level", "logger", "message", "route", "status")} == {
        "level": "error", "logger": "inferd.x", "message": "two\nlines", "route": "/v1/models", "status": 200,
    }  # fmt: skip
    assert line["exception"].endswith("ValueError: why")
    assert line["time"].endswith("+00:00")
    assert set(line) == {"time", "level", "logger", "message", "route", "status", "exception"}


def test_the_engine_speaks_in_the_style_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launch line alone: logging is configured before all else."""

    def stop(path: object) -> None:
        logging.getLogger("inferd.engine.x").warning("on the way")
        raise InterruptedError

    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    monkeypatch.setattr(process, "FlightRecord", stop)
    launch = EngineLaunch(
        config=engine_config(), run_dir="/nowhere", heartbeat_fd=-1, flight_fd=-1,
        epoch=0, log_style=LogStyle("warning", "json"),
        server_pid=0, spawned_s=0.0,
    )  # fmt: skip
    with pytest.raises(InterruptedError):
        process.main(msgspec.json.encode(launch), threading.Event())
    line = json.loads(heard.getvalue())
    assert (line["level"], line["logger"], line["message"]) == ("warning", "inferd.engine.x", "on the way")


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["inferd info", "inferd debug", "other warning", "other info"]),
        ("info", ["inferd info", "other warning"]),
        ("warning", ["other warning"]),
        ("error", []),
    ],
)
def test_levels(level: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogStyle(level, "json"))  # type: ignore[arg-type]
    logging.getLogger("inferd").info("inferd info")
    logging.getLogger("inferd").debug("inferd debug")
    logging.getLogger("other").warning("other warning")
    logging.getLogger("other").info("other info")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == shown

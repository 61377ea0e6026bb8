"""The table of errors: shape, bounds and sentences."""

from __future__ import annotations

import json

import pytest

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import table

HUGE = "\U0001f600" * 100_000


@pytest.mark.parametrize("code", sorted(table.ROWS))
def test_every_code_has_openais_shape(code: str) -> None:
    response = table.response_of(RequestError(code, "why", "field"))
    row = table.ROWS[code]
    assert response.status_code == row.status
    body = json.loads(bytes(response.body))
    assert body == {"error": {"message": "why", "type": row.type, "param": "field", "code": row.wire_code}}
    assert row.wire_code is None or row.wire_code == code
    assert 400 <= row.status < 600


def test_who_may_come_back_is_told_when() -> None:
    for code, row in table.ROWS.items():
        headers = table.headers_of(RequestError(code, "why"))
        assert ("Retry-After" in headers) == (row.status in (429, 503) and row.is_retried)
        assert (headers.get("WWW-Authenticate") == "Bearer") == (row.status == 401)
    seen = {table.headers_of(RequestError("slow_down", ""))["Retry-After-Ms"] for _ in range(50)}
    assert len(seen) > 10, "callers refused together must not come back together"
    for _ in range(50):
        headers = table.headers_of(RequestError("server_is_overloaded", ""))
        assert int(headers["Retry-After"]) * 1_000 >= int(headers["Retry-After-Ms"]) >= 1_000


@pytest.mark.parametrize("wait_s", [0.02, 1.0, 58.0, 3_000.0])
def test_the_message_and_the_headers_name_the_same_wait(wait_s: float) -> None:
    waits = set()
    for _ in range(50):
        error = errors.TryAgainError("rate_limit_exceeded", "Too fast.", wait_s)
        headers = table.headers_of(error)
        wait_ms = int(headers["Retry-After-Ms"])
        assert wait_s * 1e3 <= wait_ms <= 2 * wait_s * 1e3
        named_s = wait_ms / 1e3 if wait_ms < 1_000 else int(headers["Retry-After"])
        assert error.message == f"Too fast. Please try again in {errors.duration_text(named_s)}."
        waits.add(wait_ms)
    assert len(waits) > 5, "callers refused together must not come back together"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (0.999, "999ms"),
        (1.0, "1s"),
        (59.1, "1m0s"),
        (61.0, "1m1s"),
        (360.0, "6m0s"),
        (3_723.0, "1h2m3s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert errors.duration_text(seconds) == text


def test_nothing_of_an_engines_death_is_told() -> None:
    body = table.body_of(EngineDeadError("killed by signal 9: /home/someone/core"))
    assert body["error"] == {
        "message": "The engine stopped while it was working on this request. Please try again.",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_a_code_that_is_not_in_the_table_is_logged_and_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    assert table.row_of(RequestError("made_up", "x")).status == 500
    assert "made_up" in caplog.text


def test_no_message_is_empty_or_long() -> None:
    assert table.body_of(RequestError("engine_error", ""))["error"] == {
        "message": "The request could not be served.",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    refusals = [
        RequestError("invalid_value", HUGE, HUGE),
        errors.invalid_type(HUGE, "an integer", HUGE),
        errors.invalid_value(HUGE, HUGE, "Rule."),
        errors.not_among("role", HUGE, ("a", "b")),
        errors.unknown_parameter(HUGE, None),
        errors.unsupported_value("x", [HUGE], "Rule."),
        errors.above_max("n", 1, 10**4_000),
        errors.model_not_found(HUGE, HUGE),
    ]
    for refusal in refusals:
        assert len(json.dumps(table.body_of(refusal), ensure_ascii=False)) < 2_000


def test_text_that_is_not_unicode_can_still_be_answered() -> None:
    assert table.response_of(errors.model_not_found("\ud800", "tiny")).status_code == 404


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            errors.above_max("max_tokens", 64, 99),
            "integer_above_max_value",
            "Invalid 'max_tokens': integer above maximum value. Expected a value <= 64, but got 99 instead.",
        ),
        (
            errors.below_min("n", 1, 0),
            "integer_below_min_value",
            "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead.",
        ),
        (
            errors.above_max("temperature", 2.0, 2.5),
            "decimal_above_max_value",
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 instead.",
        ),
        (
            errors.below_min("top_p", 0.0, -1),
            "decimal_below_min_value",
            "Invalid 'top_p': decimal below minimum value. Expected a value >= 0, but got -1 instead.",
        ),
        (
            errors.invalid_type("n", "an integer", "2"),
            "invalid_type",
            "Invalid type for 'n': expected an integer, but got a string instead.",
        ),
        (errors.missing("messages"), "missing_required_parameter", "Missing required parameter: 'messages'."),
        (
            errors.unknown_parameter("temprature", "temperature"),
            "unknown_parameter",
            "Unknown parameter: 'temprature'. Did you mean 'temperature'?",
        ),
        (
            errors.not_among("messages[0].role", "bot", ("user", "tool")),
            "invalid_value",
            "Invalid value: 'bot'. Supported values are: 'user' and 'tool'.",
        ),
        (
            errors.array_too_long("stop", 16, 17),
            "array_above_max_length",
            "Invalid 'stop': array too long. "
            "Expected an array with maximum length 16, but got an array with length 17 instead.",
        ),
    ],
)
def test_sentences_are_openais(error: RequestError, code: str, message: str) -> None:
    assert (error.code, error.message) == (code, message)


def test_json_types_are_named_as_openai_names_them() -> None:
    values: tuple[object, ...] = (None, True, 1, 1.5, "", [], {})
    names = [errors.json_type(value) for value in values]
    assert names == ["null", "a boolean", "an integer", "a decimal number", "a string", "an array", "an object"]


def test_a_refusal_in_other_words_stays_the_same_refusal() -> None:
    """Only message and param may change when a family of routes words an error in its own way."""
    plain = RequestError("rate_limit_exceeded", "no", "messages", retry_after_s=338.0)
    told = plain.reworded("nein", "input")
    assert vars(told) == {**vars(plain), "message": "nein", "param": "input"}
    assert str(told) == "nein"
    long = errors.context_too_long("messages", 10, 20, None)
    assert type(long.reworded("zu lang", None)) is errors.ContextTooLongError
    assert long.reworded("zu lang", None).num_prompt == 20

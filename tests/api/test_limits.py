"""Answers that end by a timeout or by repetition, and the times that an answer reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from inferd.server.endpoints import app, respond
from inferd.server.schema.latency import timeout_of
from inferd.server.text.text_threads import TextThreads
from tests.api.conftest import app_settings

from .conftest import MAX_MODEL_LEN

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])


LIMIT_FIELDS = {
    "/v1/chat/completions": (CHAT, "max_tokens", "length"),
    "/v1/chat/completions?": (CHAT, "max_completion_tokens", "length"),
    "/v1/completions": (TEXT, "max_tokens", "length"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens", "max_output_tokens"),
    "/v1/messages": ({"model": "tiny", **CHAT}, "max_tokens", "model_context_window_exceeded"),
}
"""Route -> (its body, its field with the limit of the answer, its word for an answer that was cut)."""


def events_of(response: httpx.Response) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part.startswith("data: ")]
    return [json.loads(part) for part in parts if part != "[DONE]"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", LIMIT_FIELDS)
def test_a_limit_beyond_the_context_is_cut_and_told_once(
    http: httpx.Client, router: Any, script: Any, path: str, is_stream: bool
) -> None:
    body, name, reason = LIMIT_FIELDS[path]
    router.will(script(text="a " * 300))
    answer = http.post(path, json={**body, name: 10**9, "stream": is_stream})
    assert answer.status_code == 200, answer.text
    (submit,) = router.submits
    room = MAX_MODEL_LEN - len(submit.prompt_ids)
    assert submit.params.max_tokens == room
    told = f"the limit of the answer is cut from 1000000000 to {room} tokens: the context holds {MAX_MODEL_LEN}"
    assert answer.headers["x-inferd-warning"].startswith(told) and ";" not in answer.headers["x-inferd-warning"]
    assert f'"{reason}"' in answer.text
    fits = http.post(path, json={**body, name: room, "stream": is_stream})
    assert "x-inferd-warning" not in fits.headers
    assert router.submits[-1].params.max_tokens == room


@BOTH
@pytest.mark.parametrize("where", ["field", "header", "the shorter"])
def test_a_plain_answer_that_takes_too_long_is_a_408(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any], where: str
) -> None:
    router.will(script(ends=False))
    fields = {"field": {"timeout": 0.05}, "header": {}, "the shorter": {"timeout": 60}}[where]
    headers = {} if where == "field" else {"X-Request-Timeout": "0.05"}
    response = http.post(path, json={**body, **fields, "n": 2}, headers=headers)
    error = response.json()["error"]
    found = (response.status_code, error["type"], error["code"], error["param"])
    assert found == (408, "timeout_error", "deadline_exceeded", None)
    assert set(router.aborted) == {submit.request_id for submit in router.submits}, "nothing runs on for nobody"


@BOTH
def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any]
) -> None:
    router.will(script(ends=False))
    response = http.post(path, json={**body, "timeout": 0.3, "stream": True})
    events = events_of(response)
    assert response.status_code == 200
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "choices" in events[0]
    assert not response.text.rstrip().endswith("[DONE]")
    assert set(router.aborted) == {submit.request_id for submit in router.submits}


@BOTH
def test_a_stream_that_never_begins_is_a_408(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any]
) -> None:
    router.will(script(token_ids=(), ends=False))
    response = http.post(path, json={**body, "timeout": 0.05, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")


@BOTH
def test_what_ends_in_time_is_left_alone(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        response = http.post(path, json={**body, "timeout": 60, "stream": stream})
        assert response.status_code == 200
        assert "error" not in response.text


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("soon", "invalid_value"),
        ("nan", "invalid_value"),
        ("0", "decimal_below_min_value"),
        ("inf", "decimal_above_max_value"),
    ],
)
def test_a_header_that_is_no_timeout(http: httpx.Client, router: Any, header: str, code: str) -> None:
    response = http.post("/v1/completions", json=TEXT, headers={"X-Request-Timeout": header})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, "X-Request-Timeout")
    assert router.submits == []


def test_of_field_and_header_the_shorter_holds() -> None:
    assert [timeout_of(2.0, "3"), timeout_of(3.0, "2"), timeout_of(None, "2"), timeout_of(2.0, None)] == [2.0] * 4
    assert timeout_of(None, None) is None


@BOTH
@pytest.mark.parametrize("cut", [1, 3, 50])
def test_an_answer_that_repeats_itself_is_ended_wherever_it_was_cut(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any], cut: int
) -> None:
    ids = router.model.tokenizer.encode("one two", False)
    router.will(script(token_ids=(5, 6, 7, *ids * 20), cuts=(cut,), ends=False))
    rule = {"max_pattern_size": len(ids), "min_count": 3}
    asked = {**body, "repetition_detection": rule, "return_token_ids": True}
    choice = http.post(path, json=asked).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [5, 6, 7, *ids * 3]
    assert router.aborted[router.submits[0].request_id] == "stop"
    last = events_of(http.post(path, json={**asked, "stream": True}))[-1]["choices"][0]
    assert last["finish_reason"] == "repetition"
    waits = http.post(path, json={**asked, "min_tokens": 20, "max_tokens": 40}).json()["choices"][0]
    assert len(waits["token_ids"]) == 20, "not before min_tokens"


def test_an_end_of_the_models_own_goes_first(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(5, 5, 5)))
    asked = {**TEXT, "repetition_detection": {"max_pattern_size": 1, "min_count": 3}}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["finish_reason"] == "length"


METRICS = {
    "time_to_first_token_ms": 250.0,
    "queue_time_ms": 1_000.0,
    "generation_time_ms": 40.0,
    "mean_itl_ms": 10.0,
    "tokens_per_second": 17.24,
    "draft_tokens": 0,
    "accepted_draft_tokens": 0,
    "not_speculated": "the server runs without --speculative",
    "cached_tokens": 0,
    "pool_tokens": 0,
    "loaded_tokens": 0,
    "restarts": 0,
}
"""The rate of five tokens in the scripted engine's time: 5 / 0.29 s."""


@BOTH
@pytest.mark.parametrize(
    ("speculative", "changes", "reason"),
    [
        ("none", {}, "the server runs without --speculative"),
        ("suffix", {}, None),
        ("suffix", {"max_tokens": 1}, "it draws no more than one token"),
    ],
)
def test_metrics_say_what_was_guessed_or_why_nothing_was(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any], speculative: str,
    changes: dict[str, Any], reason: str | None,
) -> None:  # fmt: skip
    router.speculative = speculative
    router.will(script(token_ids=(5, 6, 7, 8, 9), cuts=(1, 4), drafted=(6, 3)))
    told = http.post(path, json={**body, **changes, "include_metrics": True}).json()["metrics"]
    assert (told["draft_tokens"], told["accepted_draft_tokens"], told["not_speculated"]) == (6, 3, reason)


@BOTH
def test_metrics_come_where_they_are_asked_for(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any]
) -> None:
    router.will(script(token_ids=(5, 6, 7, 8, 9)))
    asked = {**body, "include_metrics": True}
    answer = http.post(path, json=asked).json()
    told, num_prompt = answer["metrics"], answer["usage"]["prompt_tokens"]
    assert told == pytest.approx({**METRICS, "not_cached": told["not_cached"], "computed_tokens": num_prompt})
    assert "tokens" in told["not_cached"]
    assert "metrics" not in http.post(path, json=body).json()
    assert http.post(path, json={**asked, "n": 2}).json()["metrics"] is None
    streamed = events_of(http.post(path, json={**asked, "stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-1]["metrics"] == pytest.approx(told)
    assert streamed[-1]["choices"] == []
    assert all("metrics" not in event for event in streamed[:-1])
    refused = http.post(path, json={**asked, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include_metrics")


def test_metrics_of_one_token_and_of_none(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(5,)))
    one = http.post("/v1/completions", json={**TEXT, "include_metrics": True}).json()["metrics"]
    assert (one["mean_itl_ms"], one["generation_time_ms"], one["tokens_per_second"]) == (None, 0.0, 4.0)
    asked = {**TEXT, "include_metrics": True, "max_tokens": 0, "echo": True}
    none = http.post("/v1/completions", json=asked).json()["metrics"]
    assert none["time_to_first_token_ms"] is None and none["computed_tokens"] is None


def test_the_official_client_sees_a_timeout_of_the_servers(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(ends=False))
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="x", extra_body={"timeout": 0.05})
    assert (caught.value.status_code, caught.value.code) == (408, "deadline_exceeded")


def test_a_text_too_long_by_its_bytes_is_refused_before_it_is_read(http: httpx.Client, router: Any) -> None:
    """A megabyte is always more than 256 tokens."""
    for path, asked, param in (
        ("completions", {"prompt": "x y z " * 200_000}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x y z " * 200_000}]}, "messages"),
    ):
        answer = http.post(f"/v1/{path}", json={"model": "tiny", **asked})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "bytes, which are at least" in error["message"]
    assert router.submits == []


LONG_ANSWERS = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": [1, 2, 3]}), ("/v1/embeddings", {"input": [1, 2, 3]})],
)


@LONG_ANSWERS
def test_a_computed_answer_is_sent_although_too_many_prompts_wait(
    serve: Any, router: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A refusal would waste what was computed, and the client would ask for it again."""

    class FullThreads(TextThreads):
        async def run(self, work: Callable[[], Any], size: int, *, is_begun: bool = False) -> Any:
            if router.submits:
                self._max_pending = 0
            return await super().run(work, size, is_begun=is_begun)

    monkeypatch.setattr(respond, "_LARGE_ANSWER", 0)
    monkeypatch.setattr(app, "TextThreads", FullThreads)
    url = serve(app_settings())
    assert httpx.post(f"{url}{path}", json=body).status_code == 200
    assert httpx.post(f"{url}{path}", json=body).status_code == 503


@LONG_ANSWERS
def test_the_timeout_holds_for_an_answer_that_waits_to_be_written(
    serve: Any, router: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A thread writes a long answer. It may wait there behind long texts of others."""

    class BusyThreads(TextThreads):
        async def run(self, work: Callable[[], Any], size: int, *, is_begun: bool = False) -> Any:
            if router.submits:
                await asyncio.Event().wait()
            return await super().run(work, size, is_begun=is_begun)

    monkeypatch.setattr(respond, "_LARGE_ANSWER", 0)
    monkeypatch.setattr(app, "TextThreads", BusyThreads)
    assert httpx.post(f"{serve(app_settings())}{path}", json={**body, "timeout": 0.2}).status_code == 408


def test_the_timeout_holds_for_a_conversation_that_waits_to_be_read(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads long conversations, and those that refer to stored items."""

    class BusyThreads(TextThreads):
        async def run(self, work: Callable[[], Any], size: int, *, is_begun: bool = False) -> Any:
            return await asyncio.Event().wait()

    monkeypatch.setattr(app, "TextThreads", BusyThreads)
    body = {"input": [{"type": "item_reference", "id": "msg_1"}], "timeout": 0.2}
    assert httpx.post(f"{serve(app_settings())}/v1/responses", json=body).status_code == 408

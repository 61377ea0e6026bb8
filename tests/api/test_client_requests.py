"""Requests of widely used clients are answered, and fields that would change nothing are not refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.server.generate.request import engine_seed
from inferd.server.schema.unread import left_out
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings
from tests.conftest import FRESH

from .client_requests import CALL, CHAT, CLAUDE_CODE, REQUESTS, RESPONSES, TEXT, TOOL, USER, Asked
from .conftest import WAIT_S, ScriptedRouter, serving

RECORDED = Path(__file__).with_name("recorded")
HELLO: dict[str, Any] = {"messages": [USER]}
WARNING = "x-inferd-warning"


@pytest.mark.parametrize("asked", REQUESTS, ids=[f"{i}-{asked.client}" for i, asked in enumerate(REQUESTS)])
def test_a_clients_request_is_answered(http: httpx.Client, asked: Asked) -> None:
    answer = http.post(asked.path, json={"model": "tiny", **asked.body})
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text


@contextmanager
def for_agents(model: ServedModel) -> Iterator[tuple[httpx.Client, ScriptedRouter]]:
    """A server whose context holds an agent's prompt."""
    served = replace(model, max_model_len=65_536)
    router = ScriptedRouter(served)
    with (
        serving(served, router, app_settings(access_log=False)) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, headers=FRESH) as client,
    ):
        yield client, router


@pytest.fixture
def roomy(model: ServedModel) -> Iterator[tuple[httpx.Client, ScriptedRouter]]:
    with for_agents(model) as served:
        yield served


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_is_answered(roomy: tuple[httpx.Client, ScriptedRouter], name: str) -> None:
    http, router = roomy
    asked = CLAUDE_CODE[name]
    body = {"model": "tiny", **asked["body"]}
    for stream in (True, False):
        answer = http.post(asked["path"], json={**body, "stream": stream}, headers=asked["headers"])
        assert answer.status_code == 200, answer.text
        assert ("message_stop" in answer.text) == stream
    told = answer.headers[WARNING].split("; ")
    assert [text for text in told if "no effect" not in text] == ([left_out(["image"])] if "last" in name else [])
    counted = http.post("/v1/messages/count_tokens", json={key: body[key] for key in ("messages", "tools", "system")})
    assert counted.status_code == 200
    text = str(router.model.tokenizer.decode(router.submits[0].prompt_ids, skip_special=False))
    assert "DeferredToolPlaceholder" not in text
    assert ("Tool loaded: mcp__words__count_words" in text) == ("last" in name)
    assert ("- mcp__words__count_words(text: string)" in text) == ("last" in name)


def test_claude_codes_loaded_tool_keeps_the_prefix(roomy: tuple[httpx.Client, ScriptedRouter]) -> None:
    http, router = roomy
    last = {"model": "tiny", **CLAUDE_CODE["tool_search_last_turn"]["body"], "stream": False}
    first = {**last, "messages": last["messages"][:2], "tools": last["tools"][:-1]}
    for body in (first, last):
        assert http.post("/v1/messages", json=body).status_code == 200
    one, other = (
        str(router.model.tokenizer.decode(submit.prompt_ids, skip_special=False)) for submit in router.submits
    )
    declared = one.index("- Write(") + len("- Write(")
    assert one[:declared] == other[:declared]
    assert other.index("- mcp__words__count_words(") > declared


@pytest.fixture(scope="module")
def shared_roomy(model: ServedModel) -> Iterator[httpx.Client]:
    with for_agents(model) as (client, _):
        yield client


def recorded() -> Iterator[Any]:
    """The requests that `make agents ARGS=--record` recorded."""
    for path in sorted(RECORDED.glob("*.jsonl")):
        for i, line in enumerate(path.read_text().splitlines(), start=1):
            yield pytest.param(json.loads(line), id=f"{path.stem}-{i}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", list(recorded()))
def test_an_agents_request_is_answered(shared_roomy: httpx.Client, row: dict[str, Any]) -> None:
    answer = shared_roomy.post(row["path"], json={"model": "tiny", **row["body"]})
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text


def prompts(http: httpx.Client, router: Any, *bodies: dict[str, Any]) -> list[tuple[int, ...]]:
    router.reset()
    for body in bodies:
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
    return [submit.prompt_ids for submit in router.submits]


def test_what_has_no_effect_does_not_reach_the_prompt(http: httpx.Client, router: Any) -> None:
    marked_tool = {**TOOL, "cache_control": {}, "function": {**TOOL["function"], "cache_control": {}}}
    marked_call = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
    said = {"role": "assistant", "content": "Well.", "tool_calls": [CALL]}
    marked = {**said, "tool_calls": [marked_call], "id": "m", "reasoning_details": [{}], "thinking_blocks": [{}]}
    plain, with_marks = prompts(
        http,
        router,
        {"messages": [USER, said, USER], "tools": [TOOL]},
        {"messages": [USER, marked, {**USER, "cache_control": {}}], "tools": [marked_tool]},
    )
    assert plain == with_marks


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**HELLO, "length_penalty": 1.5}, "length_penalty"),
        (CHAT, {**HELLO, "use_beam_search": True}, "use_beam_search"),
        (CHAT, {**HELLO, "echo": True}, "echo"),
        (CHAT, {**HELLO, "function_call": {"name": "f"}}, "function_call"),
        (CHAT, {**HELLO, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {**HELLO, "plugins": [{"id": "web"}]}, "plugins"),
        (CHAT, {**HELLO, "top_a": 0.5}, "top_a"),
        (CHAT, {**HELLO, "max_tokens": -2}, "max_tokens"),
        (CHAT, {**HELLO, "length_penalty": True}, "length_penalty"),
        (TEXT, {"prompt": "x", "early_stopping": True}, "early_stopping"),
        (RESPONSES, {"input": "x", "text": {"verbosity": "chatty"}}, "text.verbosity"),
        (
            RESPONSES,
            {
                "input": "x",
                "tools": [{"type": "web_search", "external_web_access": False}, {"type": "function", "name": "f g"}],
            },
            "tools[1].name",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {**HELLO, "reasoning_effort": "high"}, "'reasoning_effort' has no effect"),
        (CHAT, {**HELLO, "reasoning": {"effort": "high"}}, "'reasoning_effort' has no effect"),
        (CHAT, {**HELLO, "verbosity": "low", "stream": True}, "'verbosity' has no effect"),
        (RESPONSES, {"input": "x", "reasoning": {"effort": "low"}}, "'reasoning.effort' has no effect"),
        (RESPONSES, {"input": "x", "text": {"verbosity": "high"}, "background": True}, "'verbosity' has no effect"),
        (CHAT, {**HELLO, "verbosity": "medium"}, None),
    ],
)
def test_a_switch_that_the_model_lacks_is_told(
    http: httpx.Client, path: str, body: dict[str, Any], words: str | None
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    told = answer.headers.get(WARNING)
    assert told is None if words is None else words in told


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "b": 1}]}]},
         "messages[0].content[0].b"),
        (CHAT, {**HELLO, "tools": [{**TOOL, "function": {**TOOL["function"], "returns": {}}}]},
         "tools[0].function.returns"),
        (CHAT, {**HELLO, "stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        (CHAT, {**HELLO, "response_format": {"type": "text", "style": 1}}, "response_format.style"),
        (RESPONSES, {"input": [{"role": "user", "content": "x", "colour": "red"}]}, "input[0].colour"),
        ("/v1/messages", {**HELLO, "max_tokens": 5, "thinking": {"type": "disabled", "depth": 3}}, "thinking.depth"),
    ],
)  # fmt: skip
def test_unknown_keys_are_ignored_at_any_depth_where_that_is_allowed(
    serve: Callable[..., str], http: httpx.Client, path: str, body: dict[str, Any], name: str
) -> None:
    assert http.post(path, json=body).status_code == 400
    lenient = serve(app_settings(access_log=False, unknown_fields="warn"))
    answer = httpx.post(lenient + path, json=body)
    assert answer.status_code == 200, answer.text
    assert f"'{name}'" in answer.headers[WARNING]


SEEDS = (0, 7, 2**53 - 1, 2**53, 2**60 + 1, 2**63 - 1, -2, -(2**63))


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_the_answer_carries_the_callers_own_seed(http: httpx.Client, router: Any, path: str) -> None:
    said = {CHAT: HELLO, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    told = [http.post(path, json={**said, "seed": seed}).json()["seed"] for seed in SEEDS]
    assert told == list(SEEDS)
    drawn = [submit.params.seed for submit in router.submits]
    assert drawn == [engine_seed(seed) for seed in SEEDS]
    assert drawn[:3] == list(SEEDS[:3])
    assert len(set(drawn)) == len(SEEDS)
    assert all(0 <= seed < 2**53 for seed in drawn)


def test_minus_one_and_no_seed_are_chosen_anew(http: httpx.Client, router: Any) -> None:
    for body in ({}, {"seed": -1}, {"seed": -1.0}, {"seed": None}):
        seed = http.post(CHAT, json={**HELLO, **body}).json()["seed"]
        assert seed == router.submits[-1].params.seed
    assert len({submit.params.seed for submit in router.submits}) == 4


def test_whole_numbers_may_be_written_as_decimals(http: httpx.Client, router: Any) -> None:
    body = '{"prompt": [1.0, 2, 3e0], "max_tokens": 5.0, "seed": 42.0, "n": 1.0, "best_of": 1.0}'
    answer = http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    (submit,) = router.submits
    assert (submit.prompt_ids, submit.params.max_tokens, submit.params.seed) == ((1, 2, 3), 5, 42)
    for body in ('{"prompt": [1.5], "n": 1}', '{"prompt": "x", "n": 1.5}', '{"prompt": "x", "n": 1e400}'):
        assert http.post(TEXT, content=body, headers={"Content-Type": "application/json"}).status_code == 400

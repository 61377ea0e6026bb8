"""/v1/messages and /v1/messages/count_tokens: bytes, answers plain and streamed, and what the model reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.server.config.settings import Settings
from inferd.server.text.model import ServedModel
from inferd.server.text.template import ChatTemplate
from inferd.server.tools.detect import Clues, detect
from tests.api.conftest import app_settings

from .anthropic_stream import comparable, events_of, folded
from .conftest import MAX_MODEL_LEN, WAIT_S, Script, ScriptedRouter, serving
from .test_stream import connected

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FUNCTION = {
    "type": "function",
    "function": {key.replace("input_schema", "parameters"): value for key, value in WEATHER.items()},
}
ASK = {"role": "user", "content": "What is the weather in Paris?"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [ASK]}
WITH_TOOLS = {**ASKED, "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CUTS = [(1,), (2, 3), (64,), (5, 1)]
IDS = re.compile(rb'"(msg|toolu|fp)_[0-9a-f]+"')

Serve = Callable[..., tuple[httpx.Client, ScriptedRouter]]


@pytest.fixture
def serving_reasoning(model: ServedModel) -> Iterator[Serve]:
    """Serves the embedded tokenizer as if its model reasoned, with the test's template if one is given."""
    with contextlib.ExitStack() as stack:

        def serve(template: str = "", reasoning: str = "think") -> tuple[httpx.Client, ScriptedRouter]:
            served = replace(model, format=detect(Clues(), "hermes", reasoning))
            if template:
                served = replace(served, template=ChatTemplate(template, {}))
            router = ScriptedRouter(served)
            url = stack.enter_context(serving(served, router, app_settings(access_log=False)))
            return stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S)), router

        yield serve


@pytest.fixture
def reasoning(serving_reasoning: Serve) -> tuple[httpx.Client, ScriptedRouter]:
    """One server for all examples of a property."""
    return serving_reasoning()


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """Asks plain and streamed, and checks that the answers are equal."""
    plain = http.post("/v1/messages", json={**ASKED, **fields})
    streamed = http.post("/v1/messages", json={**ASKED, **fields, "stream": True})
    assert (plain.status_code, streamed.status_code) == (200, 200), plain.text
    message: dict[str, Any] = plain.json()
    assert comparable(folded(streamed.content)) == comparable(message)
    return message


def refused(http: httpx.Client, path: str = "/v1/messages", **fields: Any) -> str:
    response = http.post(path, json={**ASKED, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    return str(response.json()["error"]["message"])


def prompt(router: Any, index: int = -1) -> str:
    return str(router.model.tokenizer.decode(router.submits[index].prompt_ids, skip_special=False))


START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":ID,"type":"message","role":"assistant",'
    b'"model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":37,'
    b'"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0,'
    b'"output_tokens_details":{"thinking_tokens":0}},"seed":7,"system_fingerprint":ID}}\n\n'
    b'event: ping\ndata: {"type":"ping"}\n\n'
)
END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
    b'"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":16,"output_tokens":5,'
    b'"output_tokens_details":{"thinking_tokens":0}}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def test_the_bytes_of_a_stream(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text="Hello there", cuts=(64,), num_cached=16))
    response = http.post("/v1/messages", json={**ASKED, "stream": True, "seed": 7})
    num_prompt, num_output = len(router.submits[0].prompt_ids), len(router.model.tokenizer.encode("Hello there", False))
    start = START.replace(b":37,", b":%d," % num_prompt)
    end = END.replace(b":21,", b":%d," % (num_prompt - 16)).replace(b":5,", b":%d," % (num_output + 1))
    assert IDS.sub(b"ID", response.content) == (
        start + b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        b'"content_block":{"type":"text","text":""}}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"Hello there"}}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n' + end
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream_begins_before_the_first_token(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(), ends=False))
    received = b""
    with http.stream("POST", "/v1/messages", json={**ASKED, "stream": True, "seed": 7}) as response:
        for data in response.iter_raw():
            received += data
            if b"event: ping" in received:
                break
    start = START.replace(b":37,", b":%d," % len(router.submits[0].prompt_ids))
    assert IDS.sub(b"ID", received) == start


def test_the_bytes_of_a_plain_answer(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text="Hello there"))
    response = http.post("/v1/messages", json=ASKED)
    used = {"input_tokens": len(router.submits[0].prompt_ids), "cache_creation_input_tokens": 0}
    num_output = len(router.model.tokenizer.encode("Hello there", False)) + 1
    assert response.json() == {
        "id": response.json()["id"],
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            **used,
            "cache_read_input_tokens": 0,
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": 0},
        },
        "seed": router.submits[0].params.seed,
        "system_fingerprint": response.json()["system_fingerprint"],
    }
    assert re.fullmatch(r"msg_[0-9a-f]{16}", response.json()["id"])
    assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("cuts", CUTS)
def test_a_tool_is_used(http: httpx.Client, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text=f"I look.\n{CALL}\n{CALL}", cuts=cuts))
    message = ask(http, tools=[WEATHER])
    said, *uses = message["content"]
    assert said == {"type": "text", "text": "I look."}
    assert [(use["type"], use["name"], use["input"]) for use in uses] == [
        ("tool_use", "get_weather", {"city": "Paris"})] * 2  # fmt: skip
    assert all(re.fullmatch(r"toolu_[0-9a-f]{24}", use["id"]) for use in uses)
    assert uses[0]["id"] != uses[1]["id"]
    assert message["stop_reason"] == "tool_use"
    single = ask(http, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]


def test_the_input_is_streamed_as_it_is_written(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text=CALL))
    events = events_of(http.post("/v1/messages", json={**WITH_TOOLS, "stream": True}).content)
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 2
    assert "".join(pieces) == '{"city": "Paris"}'


def test_a_conversation_with_tools_is_read_as_chats(http: httpx.Client, router: Any) -> None:
    """The model reads the same tokens as for the equal conversation in OpenAI's API."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "18 C"}]}
    said = [
        ASK,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And in Oslo?"}]},
    ]
    call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    chat = [
        {"role": "system", "content": "Be\nbrief."},
        ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "18 C"},
        {"role": "user", "content": "And in Oslo?"},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    body = {**WITH_TOOLS, "max_tokens": 8, "system": system, "messages": said}
    assert http.post("/v1/messages", json=body).status_code == 200
    http.post("/v1/chat/completions", json={"messages": chat, "tools": [FUNCTION], "max_tokens": 8})
    assert prompt(router, 0) == prompt(router, 1)
    counted = http.post("/v1/messages/count_tokens", json={key: body[key] for key in body if key != "max_tokens"})
    assert counted.json() == {"input_tokens": len(router.submits[0].prompt_ids)}


def test_a_last_turn_of_the_assistants_is_continued(http: httpx.Client, router: Any) -> None:
    ask(http, messages=[ASK, {"role": "assistant", "content": "It is"}])
    assert prompt(router).endswith("It is")
    ask(http, messages=[ASK, {"role": "assistant", "content": []}])
    ask(http)
    assert prompt(router, -3) == prompt(router, -1)
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
    assert "send their results" in refused(http, messages=[ASK, {"role": "assistant", "content": [use]}])
    assert "a turn of the user" in refused(http, messages=[{"role": "assistant", "content": ""}])


PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
)
FIRST_ALONE += "[{{ m.role }}: {{ m.content }}]{% endfor %}"
SILENT = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}: {{ m.content }}]{% endif %}"
SILENT += "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "seen"),
    [
        (PLAIN, "[system: s][user: a][system: late][user: b]"),
        (FIRST_ALONE, "[system: s][user: a\nlate\nb]"),
        (SILENT, "[system: s][user: a\nlate\nb]"),
    ],
)
def test_a_late_system_turn_is_read_by_every_template(serving_reasoning: Serve, template: str, seen: str) -> None:
    """Agents send reminders to the model in the middle of a conversation."""
    http, router = serving_reasoning(template)
    roles = (("system", "s"), ("user", "a"), ("system", "late"), ("user", "b"))
    turns = [{"role": role, "content": content} for role, content in roles]
    other = {"max_tokens": 8}
    for path, body in (
        ("/v1/messages", {**ASKED, "messages": turns}),
        ("/v1/messages", {**ASKED, "system": "s", "messages": turns[1:]}),
        ("/v1/chat/completions", {**other, "messages": turns}),
        ("/v1/responses", {"input": turns}),
        ("/v1/responses", {"instructions": "s", "input": turns[1:]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert prompt(router) == seen
        warning = answer.headers.get("x-inferd-warning", "")
        assert ("late system messages became the user's" in warning) == (template != PLAIN)
    for body in ({"messages": turns}, {"system": "s", "messages": turns[1:]}):
        counted = http.post("/v1/messages/count_tokens", json=body).json()
        assert counted == {"input_tokens": len(router.submits[-1].prompt_ids)}


def test_the_billing_line_keeps_no_prefix_apart(http: httpx.Client, router: Any) -> None:
    for nonce in ("00aa0", "fa690"):
        billing = f"x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={nonce};"
        blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "Help."}]
        assert http.post("/v1/messages", json={**ASKED, "system": blocks}).status_code == 200
    assert router.submits[0].prompt_ids == router.submits[1].prompt_ids
    assert "x-anthropic" not in prompt(router)


def test_a_stop_sequence_says_which(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text="one two three"))
    message = ask(http, stop_sequences=["zzz", " three"])
    assert message["content"] == [{"type": "text", "text": "one two"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " three")


def test_the_reasons_for_an_end(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text="a b c d e f g h"))
    assert ask(http)["stop_reason"] == "end_turn"
    assert ask(http, max_tokens=3)["stop_reason"] == "max_tokens"
    router.will(script(text="a " * 300))
    cut = ask(http, max_tokens=32_000)
    assert cut["stop_reason"] == "model_context_window_exceeded"
    assert cut["usage"]["input_tokens"] + cut["usage"]["output_tokens"] == MAX_MODEL_LEN
    fits = ask(http, max_tokens=MAX_MODEL_LEN - cut["usage"]["input_tokens"])
    assert fits["stop_reason"] == "max_tokens"


def test_no_tokens_at_all_warm_the_cache(http: httpx.Client, router: Any) -> None:
    message = ask(http, max_tokens=0)
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert [submit.params.max_tokens for submit in router.submits] == [0, 0]


def test_an_empty_answer_has_no_blocks(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text=""))
    message = ask(http)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


@pytest.mark.parametrize("cuts", [(1,), (64,)])
def test_a_call_cut_short_is_what_is_complete_of_it(http: httpx.Client, router: Any, script: Any, cuts: Any) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 22, 333], "n": null}}\n'
    router.will(script(text=text, cuts=cuts))
    seen = []
    for max_tokens in range(1, len(router.model.tokenizer.encode(text, False))):
        plain = http.post("/v1/messages", json={**WITH_TOOLS, "max_tokens": max_tokens}).json()
        stream = http.post("/v1/messages", json={**WITH_TOOLS, "max_tokens": max_tokens, "stream": True})
        message = folded(stream.content)
        assert plain["stop_reason"] == message["stop_reason"] == "max_tokens"
        assert [block["type"] for block in plain["content"]] == [block["type"] for block in message["content"]]
        seen += [block["input"] for block in plain["content"] if block["type"] == "tool_use"]
    assert seen[0] == {}
    assert {"city": "Paris"} in seen
    assert {"city": "Paris", "days": [1, 22]} in seen
    assert seen[-1] == {"city": "Paris", "days": [1, 22, 333], "n": None}


@pytest.mark.parametrize("number", ["1e400", "1" * 60, "-0.0", "1.50"])
def test_an_input_is_passed_on_as_it_was_written(http: httpx.Client, router: Any, script: Any, number: str) -> None:
    router.will(script(text=CALL.replace('"Paris"', number)))
    response = http.post("/v1/messages", json={**WITH_TOOLS, "max_tokens": 200})
    assert f'"input":{{"city": {number}}}' in response.text


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
BASH = {"type": "bash_20250124", "name": "bash"}


def test_a_choice_of_a_tool_that_the_model_is_not_shown_is_refused(http: httpx.Client, router: Any) -> None:
    deferred = {**WEATHER, "defer_loading": True}
    for tool, name, words in (
        (SEARCH, "web_search", "does not search the web"),
        (deferred, "get_weather", "This tool is not loaded"),
        (BASH, "other", "Supported values are: 'bash'"),
    ):
        message = refused(http, tools=[tool], tool_choice={"type": "tool", "name": name})
        assert "tool_choice.name" in message and words in message
        if tool is not BASH:
            assert "none of the tools" in refused(http, tools=[tool], tool_choice={"type": "any"})
            auto = {"type": "auto", "disable_parallel_tool_use": True}
            assert http.post("/v1/messages", json={**ASKED, "tools": [tool], "tool_choice": auto}).status_code == 200
    named = {**ASKED, "tools": [BASH], "tool_choice": {"type": "tool", "name": "bash"}}
    assert http.post("/v1/messages", json=named).status_code == 200
    assert "bash" in router.submits[-1].params.grammar


def test_a_tool_is_loaded_behind_those_before_it(http: httpx.Client, router: Any) -> None:
    """A loaded tool keeps the prefix of the prompt, and a call of one that is not loaded is a call."""
    late = {**WEATHER, "name": "late", "defer_loading": True}
    use = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "x"}}
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "late"}]}
    talk = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    assert warning(http, tools=[WEATHER, late], max_tokens=9) == ""
    before = prompt(router)
    assert "late" not in before
    assert warning(http, tools=[WEATHER, late], messages=talk, max_tokens=9) == ""
    after = prompt(router)
    assert "Tool loaded: late" in after
    declared = "- get_weather(city: string): The weather of a city.\n"
    assert after.startswith(before[: before.index(declared)] + declared + "- late(")
    router.will(Script(text=CALL.replace("get_weather", "late")))
    message = ask(http, tools=[WEATHER, late])
    assert [(block["type"], block["name"]) for block in message["content"]] == [("tool_use", "late")]


def test_every_answer_can_be_sent_back(http: httpx.Client, serving_reasoning: Serve, router: Any) -> None:
    reasoning, slow = serving_reasoning()
    for text in ("Hi.", "", f"Well. {CALL}", f"<think>\nHm.\n</think>\n\n{CALL}", "<think>\nHm", CALL + CALL):
        for served, asked in ((http, router), (reasoning, slow)):
            for max_tokens in (0, 3, 12, 25, 100):
                asked.reset()
                asked.will(Script(text=text))
                answer = served.post("/v1/messages", json={**WITH_TOOLS, "max_tokens": max_tokens}).json()
                results = [
                    {"type": "tool_result", "tool_use_id": block["id"], "content": "18 C"}
                    for block in answer["content"]
                    if block["type"] == "tool_use"
                ]
                turns = [
                    {"role": "assistant", "content": answer["content"]},
                    {"role": "user", "content": results or "k"},
                ]
                again = {**WITH_TOOLS, "max_tokens": 2, "messages": [ASK, *turns]}
                assert served.post("/v1/messages", json=again).status_code == 200, answer


def test_what_is_cut_and_moved_is_told(http: httpx.Client, serving_reasoning: Serve) -> None:
    assert warning(http, max_tokens=32_000).startswith("the limit of the answer is cut from 32000 to ")
    assert warning(http, max_tokens=9) == ""
    late = [ASK, {"role": "system", "content": "late"}]
    for template, words in ((PLAIN, ""), (FIRST_ALONE, "became the user's")):
        served, _ = serving_reasoning(template)
        for path, fields in (("/v1/messages", ASKED), ("/v1/messages/count_tokens", {}), ("/tokenize", {})):
            response = served.post(path, json={**fields, "messages": late})
            told = response.headers.get("x-inferd-warning", "")
            assert (words in told) if words else not told, told


def test_notices_come_with_counts_and_refusals_too(http: httpx.Client) -> None:
    counted = http.post("/v1/messages/count_tokens", json={"messages": [ASK], "tools": [SEARCH]})
    assert "web_search_20250305" in counted.headers["x-inferd-warning"]
    refusal = http.post("/v1/messages", json={**ASKED, "tools": [SEARCH], "tool_choice": {"type": "any"}})
    assert (refusal.status_code, "web_search" in refusal.headers["x-inferd-warning"]) == (400, True)


def test_thinking_is_a_block_with_a_signature(serving_reasoning: Serve) -> None:
    http, router = serving_reasoning()
    thought = "Paris, then."
    router.will(Script(text=f"<think>\n{thought}\n</think>\n\nIt is sunny."))
    message = ask(http)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == (thought, "It is sunny.")
    signature = message["content"][0]["signature"]
    assert len(signature) == 44
    count = len(router.model.tokenizer.encode(f"<think>\n{thought}\n</think>", False))
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": count}
    again = {"role": "assistant", "content": message["content"]}
    assert ask(http, messages=[ASK, again, ASK])["content"] == message["content"]
    displays = [{"type": "adaptive", "display": display} for display in ("omitted", "updates")]
    for hidden in ({"type": "disabled"}, {"type": "between_tools"}, *displays):
        shown = ask(http, thinking=hidden)
        assert [block["type"] for block in shown["content"]] == ["text"]
        assert shown["usage"] == message["usage"]


SWITCHED = "{% if enable_thinking is defined %}{{ 'on ' if enable_thinking else 'off ' }}{% endif %}"
LEVELLED = "{% if reasoning_effort is defined %}{{ 'effort:' ~ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "seen"),
    [
        (SWITCHED, {}, "x"),
        (SWITCHED, {"thinking": {"type": "adaptive"}}, "on x"),
        (SWITCHED, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "on x"),
        (SWITCHED, {"thinking": {"type": "disabled"}}, "off x"),
        (SWITCHED, {"thinking": {"type": "between_tools"}}, "off x"),
        (SWITCHED, {"output_config": {"effort": "low"}}, "x"),
        (LEVELLED, {"thinking": {"type": "adaptive"}}, "x"),
        (LEVELLED, {"output_config": {"effort": "low"}}, "effort:lowx"),
        (LEVELLED, {"output_config": {"effort": "max"}}, "effort:xhighx"),
    ],
)
def test_thinking_and_effort_reach_the_template(
    serving_reasoning: Serve, template: str, fields: dict[str, Any], seen: str
) -> None:
    http, router = serving_reasoning(template + "x", "none")
    assert http.post("/v1/messages", json={**ASKED, **fields}).status_code == 200
    assert prompt(router) == seen


def warning(http: httpx.Client, path: str = "/v1/messages", **fields: Any) -> str:
    response = http.post(path, json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    return response.headers.get("x-inferd-warning", "")


def test_a_budget_of_thinking_is_enforced_or_told(http: httpx.Client, serving_reasoning: Serve, router: Any) -> None:
    """A client cannot know whether a model's reasoning can be bounded, and has no way around a refusal."""
    budget = {"type": "enabled", "budget_tokens": 50}
    assert "this model does not reason" in warning(http, thinking=budget)
    assert not router.submits[0].params.grammar
    reasoning, slow = serving_reasoning()
    assert "'thinking.budget_tokens' has no effect" in warning(reasoning, thinking=budget)
    assert "'thinking.budget_tokens' has no effect" in warning(reasoning, thinking={**budget, "budget_tokens": 31_999})
    assert not slow.submits[0].params.grammar
    assert warning(reasoning, thinking={"type": "adaptive"}) == ""
    assert "no switch that would end it" in warning(reasoning, thinking={"type": "disabled"})


def test_an_effort_without_levels_is_told(http: httpx.Client, serving_reasoning: Serve) -> None:
    effort = {"output_config": {"effort": "high"}}
    assert "'output_config.effort' has no effect" in warning(http, **effort)
    levelled, router = serving_reasoning(LEVELLED + "x", "none")
    assert warning(levelled, **effort) == ""
    system = {"role": "system", "output_config": {"effort": "low"}}
    assert warning(levelled, **effort, messages=[ASK, system]) == ""
    assert prompt(router) == "effort:lowx"


def test_a_choice_of_tools_becomes_a_grammar(http: httpx.Client, router: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        assert http.post("/v1/messages", json={**WITH_TOOLS, "tool_choice": choice}).status_code == 200
        assert "get_weather" in router.submits[-1].params.grammar
    hidden = http.post("/v1/messages", json={**WITH_TOOLS, "tool_choice": {"type": "none"}})
    assert hidden.status_code == 200
    assert "get_weather" not in prompt(router)
    assert "tool_choice.name: " in refused(http, tools=[WEATHER], tool_choice={"type": "tool", "name": "other"})
    assert "'tools'" in refused(http, tool_choice={"type": "any"})
    strict = {**WEATHER, "strict": True, "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}}
    assert "tools[0].input_schema.properties.a.not" in refused(http, tools=[strict])
    assert "tools[1].input_schema.properties.a.not" in refused(http, tools=[SEARCH, strict])


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_format_becomes_a_grammar(http: httpx.Client, router: Any, name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"age": {"type": "integer"}}}}
    field = {"format": form} if name == "output_config" else form
    assert http.post("/v1/messages", json={**ASKED, name: field}).status_code == 200
    assert "age" in router.submits[-1].params.grammar
    both = {"output_config": {"format": form}, "output_format": form}
    assert "Only one of" in refused(http, **both)
    broken = {"type": "json_schema", "schema": {"type": "string", "pattern": "("}}
    where = "output_config.format.schema" if name == "output_config" else "output_format.schema"
    assert where in refused(http, **{name: {"format": broken} if name == "output_config" else broken})


def test_numbers_reach_the_sampler(http: httpx.Client, router: Any) -> None:
    http.post("/v1/messages", json={**ASKED, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "max_tokens": 12})
    params = router.submits[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.9, 12)
    assert not router.submits[0].scheduling.cache_salt


def test_a_message_carries_its_seed_given_or_chosen_and_chats_fingerprint(http: httpx.Client, router: Any) -> None:
    given = ask(http, seed=2**53)
    assert given["seed"] == 2**53 and router.submits[0].params.seed == router.submits[1].params.seed < 2**53
    chosen = http.post("/v1/messages", json=ASKED).json()["seed"]
    assert chosen == router.submits[2].params.seed
    assert ask(http, seed=chosen)["seed"] == router.submits[3].params.seed == chosen
    chat = http.post("/v1/chat/completions", json={"messages": [ASK]}).json()
    assert given["system_fingerprint"] == chat["system_fingerprint"]
    assert "Invalid type for 'seed'" in refused(http, seed="7")
    counted = http.post("/v1/messages/count_tokens", json={"messages": [ASK], "seed": 7})
    assert counted.json()["error"]["message"].endswith(" No token is drawn here.")


def test_a_prompt_that_is_too_long_is_counted_and_refused_in_the_words_that_agents_know(http: httpx.Client) -> None:
    long = {"messages": [{"role": "user", "content": "a " * 600}]}
    count = http.post("/v1/messages/count_tokens", json=long).json()["input_tokens"]
    assert count > MAX_MODEL_LEN
    assert refused(http, **long) == f"prompt is too long: {count} tokens > {MAX_MODEL_LEN - 1} maximum"


def test_headers_of_anthropics_clients_are_taken(http: httpx.Client) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27,x"}
    assert http.post("/v1/messages?beta=true", json=ASKED, headers=headers).status_code == 200


def test_silence_is_filled_with_pings(serve: Callable[[Settings], str], router: Any, script: Any) -> None:
    url = serve(app_settings(access_log=False), keep_alive_s=0.01)
    router.will(script(text="one", ends=False))
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    received = b""
    with httpx.stream("POST", f"{url}/v1/messages", json={**ASKED, "stream": True}, timeout=WAIT_S) as response:
        for data in response.iter_raw():
            received += data
            if received.count(ping) > 2 and b"text_delta" in received:
                break
    assert next(event["type"] for event in events_of(received) if event["type"] != "ping") == "message_start"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts(url: str, router: Any, script: Any, stream: bool) -> None:
    router.will(script(text="some words", ends=False))
    with connected(url, "/v1/messages", {**ASKED, "stream": stream}):
        router.wait_for(lambda: len(router.submits) == 1)
    router.wait_for(lambda: list(router.aborted.values()) == ["abort"])


PIECES = st.sampled_from(
    [
        "Hi ",
        "\n",
        "<think>",
        "</think>",
        "a < b",
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "x"}',
        "\u00e9\U0001f600",
    ]
)


@pytest.mark.parametrize("cuts", [(1,), (3,), (99,)])
def test_thoughts_that_mention_a_call_are_counted_once(
    reasoning: tuple[httpx.Client, ScriptedRouter], cuts: tuple[int, ...]
) -> None:
    """The marker of a call ends the reasoning, until the text behind it shows that it was none."""
    http, router = reasoning
    router.reset()
    router.will(Script(text="<think>a<tool_call>b<think>", cuts=cuts))
    usage = http.post("/v1/messages", json={**WITH_TOOLS, "max_tokens": 1_000}).json()["usage"]
    assert usage["output_tokens_details"]["thinking_tokens"] == usage["output_tokens"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_streamed_is_plain_for_any_text_and_any_cuts(
    reasoning: tuple[httpx.Client, ScriptedRouter], data: st.DataObject
) -> None:
    http, router = reasoning
    text = "".join(data.draw(st.lists(PIECES, max_size=8)))
    cuts = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    router.reset()
    router.will(Script(text=text, cuts=cuts))
    body = {**WITH_TOOLS, "max_tokens": data.draw(st.sampled_from([1_000, 7, 20])), "stop_sequences": ["a < b"]}
    plain = http.post("/v1/messages", json=body).json()
    router.will(Script(text=text, cuts=(1,)))
    stream = folded(http.post("/v1/messages", json={**body, "stream": True}).content)
    assert comparable(stream) == comparable(plain)

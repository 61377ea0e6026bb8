"""Tools and reasoning over HTTP: the model's text as the official client sees it, streamed and plain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from inferd.server.text.model import ServedModel
from inferd.server.text.template import ChatTemplate
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.fallback import Fallback
from tests.api.conftest import app_settings
from tests.unit.tool_samples import SAMPLES, TOOLS, Sample, dumped

from .conftest import Script, ScriptedRouter, Serve, serving

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ASKED: Any = {"model": "tiny", "messages": MESSAGES, "tools": list(TOOLS), "seed": 1}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
CUTS = [(1,), (2, 3), (64,), (5, 1)]


def folded(chunks: list[Any]) -> dict[str, Any]:
    """Builds a message from its deltas by OpenAI's rules alone."""
    message: dict[str, Any] = {"content": None, "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content is not None:
                message["content"] = (message["content"] or "") + delta.content
            assert (delta.model_extra or {}).get("reasoning") == (delta.model_extra or {}).get("reasoning_content")
            message["reasoning"] += (delta.model_extra or {}).get("reasoning") or ""
            for call in delta.tool_calls or ():
                if call.index not in message["calls"]:
                    assert (call.id, call.type) != (None, None)
                    assert (call.type, call.function.arguments) == ("function", "")
                    message["calls"][call.index] = [call.function.name, ""]
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                message["calls"][call.index][1] += call.function.arguments
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
    return message


@pytest.mark.parametrize("cuts", CUTS)
def test_calls_come_back_as_calls(client: openai.OpenAI, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text=f"{CALL}\n{NOW}", cuts=cuts))
    answer = client.chat.completions.create(**ASKED)
    message = answer.choices[0].message
    assert message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    called = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert called == [("function", "get_weather", '{"city": "Paris"}'), ("function", "time.now", "{}")]
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == 2
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    streamed = folded(chunks)
    assert streamed["calls"] == {0: ["get_weather", '{"city": "Paris"}'], 1: ["time.now", "{}"]}
    assert (streamed["content"], streamed["finish_reason"]) == (None, "tool_calls")
    assert chunks[-1].usage == answer.usage


def test_the_clients_own_stream_helper(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=f"I look.\n{CALL}"))
    with client.chat.completions.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Paris"}]


def test_a_call_goes_back_with_its_result(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=CALL))
    message = client.chat.completions.create(**ASKED).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"}
    client.chat.completions.create(**{**ASKED, "messages": [*MESSAGES, message.model_dump(), result]})
    prompt = router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False)
    assert CALL in prompt
    assert "18 C" in prompt


def test_without_tools_and_with_none_wanted_a_call_is_text(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=CALL))
    for fields in ({}, {"tools": []}, {"tools": list(TOOLS), "tool_choice": "none"}):
        answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)  # type: ignore[call-overload]
        assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALL, None)
        assert answer.choices[0].finish_reason == "stop"
    prompts = [submit.prompt_ids for submit in router.submits]
    assert prompts[0] == prompts[1] == prompts[2]


def test_one_call_ends_the_answer_where_no_second_is_wanted(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=f"{CALL}\n{NOW}", ends=False, cuts=(64,)))
    first = client.chat.completions.create(**ASKED, parallel_tool_calls=False)
    assert first.choices[0].message.tool_calls is not None
    assert [call.function.name for call in first.choices[0].message.tool_calls] == ["get_weather"]
    assert first.choices[0].finish_reason == "tool_calls"
    router.wait_for(lambda: list(router.aborted.values()) == ["stop"])
    chunks = list(client.chat.completions.create(**ASKED, parallel_tool_calls=False, stream=True))
    assert folded(chunks)["calls"] == {0: ["get_weather", '{"city": "Paris"}']}
    assert first.usage is not None
    ends_at = len(router.model.tokenizer.encode(CALL.partition("\n</")[0], False))
    assert first.usage.completion_tokens == ends_at


@pytest.mark.parametrize("cuts", CUTS)
def test_a_call_cut_short_is_not_lost(client: openai.OpenAI, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text=CALL, cuts=cuts))
    ids = router.model.tokenizer.encode(CALL, False)
    texts = set()
    for max_tokens in range(1, len(ids)):
        plain = client.chat.completions.create(**ASKED, max_tokens=max_tokens).choices[0]
        stream = folded(list(client.chat.completions.create(**ASKED, max_tokens=max_tokens, stream=True)))
        calls = {i: [c.function.name, c.function.arguments] for i, c in enumerate(plain.message.tool_calls or ())}
        assert (stream["content"] or None, stream["calls"]) == (plain.message.content or None, calls)
        assert plain.finish_reason == stream["finish_reason"] == "length"
        assert (plain.message.content or "") in ("", "<", "<t"), "only what a text may begin with, too"
        texts.add("".join(arguments for _, arguments in calls.values()))
    assert max(texts, key=len) == '{"city": "Paris"}'


@pytest.mark.parametrize(
    "name", [name for name, sample in SAMPLES.items() if sample.tools != "json" and not sample.prompt]
)
def test_every_format_reaches_the_wire(serving_format: Serve, name: str) -> None:
    sample = SAMPLES[name]
    client, router = serving_format(sample.tools, sample.reasoning)
    router.will(Script(text=sample.text, cuts=(1,)))
    plain = client.chat.completions.create(**ASKED).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in plain.tool_calls or ()]
    assert (plain.content or "", calls) == (sample.content, list(sample.calls))
    assert (plain.model_extra or {}).get("reasoning", "") == sample.thought
    streamed = folded(list(client.chat.completions.create(**ASKED, stream=True)))
    assert [(call[0], json.loads(call[1])) for call in streamed["calls"].values()] == list(sample.calls)
    assert (streamed["content"] or "", streamed["reasoning"]) == (sample.content, sample.thought)


THOUGHT = Sample("hermes", "think", "<think>\nParis, then.\n</think>\n\nIt is sunny.", "It is sunny.", "Paris, then.")


def test_reasoning_has_two_names_and_is_counted(serving_format: Serve) -> None:
    client, router = serving_format("hermes", "think")
    count = router.model.tokenizer.encode
    for cuts in CUTS:
        router.will(Script(text=THOUGHT.text, cuts=cuts))
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
        message, usage = answer.choices[0].message, answer.usage
        assert (message.content, message.model_extra) == (
            "It is sunny.", {"reasoning": "Paris, then.", "reasoning_content": "Paris, then."})  # fmt: skip
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == len(count("<think>\nParis, then.\n</think>", False))
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options)
        )
        assert chunks[-1].usage == usage
        running = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks]
        assert running == sorted(running)


def test_reasoning_can_be_hidden(serving_format: Serve) -> None:
    client, router = serving_format("none", "think")
    router.will(Script(text=THOUGHT.text))
    hidden: Any = {"include_reasoning": False}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=hidden)
    assert answer.choices[0].message.content == "It is sunny."
    assert not answer.choices[0].message.model_extra
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=hidden, stream=True))
    assert (folded(chunks)["content"], folded(chunks)["reasoning"]) == ("It is sunny.", "")


def test_logprobs_are_of_every_token_reasoning_and_calls_too(serving_format: Serve) -> None:
    client, router = serving_format("hermes", "think")
    text = f"<think>Hm.</think>Well.\n{CALL}"
    router.will(Script(text=text, cuts=(3, 1)))
    plain = client.chat.completions.create(**ASKED, logprobs=True).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    ids = [*router.model.tokenizer.encode(text, False), router.model.eos_token_ids[0]]
    assert [bytes(token.bytes or ()) for token in plain.logprobs.content] == [
        router.model.tokenizer.bytes.of(i) for i in ids
    ]
    chunks = list(client.chat.completions.create(**ASKED, logprobs=True, stream=True))
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece or ()] == plain.logprobs.content
    assert folded(chunks)["content"] == "Well."


def test_each_choice_has_its_own_calls(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=CALL), script(text="No need."), script(text=NOW))
    answer = client.chat.completions.create(**ASKED, n=3)
    names = [[call.function.name for call in choice.message.tool_calls or ()] for choice in answer.choices]
    assert names == [["get_weather"], [], ["time.now"]]
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("stop", ['"city"', "Paris", "\n", "tool", "{"])
def test_a_stop_string_sees_neither_calls_nor_markers(
    client: openai.OpenAI, router: Any, script: Any, stop: str
) -> None:
    router.will(script(text=f"Wait.\n{CALL}\n{NOW}"))
    answer = client.chat.completions.create(**ASKED, stop=stop).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("Wait.", "tool_calls")
    assert answer.message.tool_calls is not None
    assert [call.function.arguments for call in answer.message.tool_calls] == ['{"city": "Paris"}', "{}"]
    assert (answer.model_extra or {})["stop_reason"] is None
    streamed = folded(list(client.chat.completions.create(**ASKED, stop=stop, stream=True)))
    assert (streamed["content"], len(streamed["calls"]), streamed["finish_reason"]) == ("Wait.", 2, "tool_calls")


def test_a_stop_string_in_content_ends_an_answer_with_calls(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=f"Wait. {CALL}\nDone and more.", ends=False))
    answer = client.chat.completions.create(**ASKED, stop=" and").choices[0]
    assert (answer.message.content, answer.finish_reason) == ("Wait. \nDone", "tool_calls")
    assert (answer.model_extra or {})["stop_reason"] == " and"
    assert len(answer.message.tool_calls or ()) == 1
    router.wait_for(lambda: list(router.aborted.values()) == ["stop"])


@pytest.mark.parametrize("stop", ["Paris", ","])
def test_a_stop_inside_reasoning_is_asked_for(serving_format: Serve, stop: str) -> None:
    """As a string and as a token. Without the field the answer has its content."""
    client, router = serving_format("hermes", "think")
    router.will(Script(text=THOUGHT.text.replace("sunny", "sunny, warm")))
    kinds: list[dict[str, Any]] = [{"stop": stop}]
    ids = router.model.tokenizer.encode(stop, False)
    if len(ids) == 1:
        kinds.append({"extra_body": {"stop_token_ids": list(ids)}})
    for fields in kinds:
        plain = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields).choices[0]
        content = {"Paris": "It is sunny, warm.", ",": "It is sunny"}[stop]
        assert (plain.message.content, plain.finish_reason) == (content, "stop")
        assert (plain.message.model_extra or {})["reasoning"] == "Paris, then."
        asked = {**fields, "extra_body": {**fields.get("extra_body", {}), "stop_in_reasoning": True}}
        inside = client.chat.completions.create(model="tiny", messages=MESSAGES, **asked).choices[0]
        assert (inside.message.content, (inside.model_extra or {})["stop_reason"]) == ("", fields.get("stop") or ids[0])
        streamed = folded(list(client.chat.completions.create(model="tiny", messages=MESSAGES, **asked, stream=True)))
        assert streamed["reasoning"] == (inside.message.model_extra or {}).get("reasoning", "")
        assert streamed["reasoning"] in ("", "Paris")


def test_the_engine_is_given_stop_tokens_only_if_all_of_the_answer_is_content(
    serving_format: Serve, client: openai.OpenAI, router: Any, script: Any
) -> None:
    extra: Any = {"stop_token_ids": [300]}
    router.will(script(text="Hi"))
    client.completions.create(model="tiny", prompt="x", extra_body=extra)
    assert router.submits[-1].params.stop_token_ids == (300,)
    thinking, its_router = serving_format("hermes", "think")
    its_router.will(Script(text="Hi"))
    thinking.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    assert its_router.submits[-1].params.stop_token_ids == ()


FENCED = 'I look it up.\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'


@pytest.mark.parametrize("tools", ["hermes", "mistral_args", "unknown"])
@pytest.mark.parametrize("cuts", CUTS)
def test_a_call_in_another_format_is_a_call(serving_format: Serve, tools: str, cuts: Any) -> None:
    """Also if the format of the model is not known. Without tools, and with none wanted, it is text."""
    client, router = serving_format("auto" if tools == "unknown" else tools, "none" if tools != "unknown" else "auto")
    router.will(Script(text=FENCED, cuts=cuts))
    plain = client.chat.completions.create(**ASKED).choices[0]
    assert (plain.message.content, plain.finish_reason) == ("I look it up.", "tool_calls")
    (call,) = plain.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    streamed = folded(list(client.chat.completions.create(**ASKED, stream=True)))
    assert (streamed["content"], streamed["calls"]) == ("I look it up.", {0: ["get_weather", '{"city": "Paris"}']})
    for fields in ({"model": "tiny", "messages": MESSAGES}, {**ASKED, "tool_choice": "none"}):
        text = client.chat.completions.create(**fields).choices[0]
        assert (text.message.content, text.finish_reason) == (FENCED, "stop")
    metrics = httpx.get(f"{str(client.base_url).removesuffix('/v1/')}/metrics").text
    assert 'repair="call_in_other_format"} 2.0' in metrics


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "get_weather"}}]}}, "tool_calls"),
    ],
)  # fmt: skip
def test_a_call_of_the_function_that_was_named_ends_with_stop(
    client: openai.OpenAI, router: Any, script: Any, choice: Any, reason: str, is_stream: bool
) -> None:
    router.will(script(text=CALL))
    if is_stream:
        chunks = list(client.chat.completions.create(**ASKED, tool_choice=choice, stream=True))
        folded_answer = folded(chunks)
        assert (folded_answer["finish_reason"], len(folded_answer["calls"])) == (reason, 1)
        return
    answer = client.chat.completions.create(**ASKED, tool_choice=choice).choices[0]
    assert (answer.finish_reason, len(answer.message.tool_calls or ())) == (reason, 1)


REQUIRED: Any = {"tool_choice": "required"}


def test_a_required_call_is_a_grammar(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=CALL))
    client.chat.completions.create(**ASKED)
    client.chat.completions.create(**ASKED, **REQUIRED)
    client.chat.completions.create(**ASKED, tool_choice={"type": "function", "function": {"name": "time.now"}})
    free, required, named = (submit.params.grammar for submit in router.submits)
    assert free == ""
    assert "get_weather" in required
    assert "time.now" in required
    assert "time.now" in named
    assert "get_weather" not in named


@pytest.mark.parametrize("cuts", CUTS)
def test_required_calls_without_markers_arrive_while_they_are_written(
    client: openai.OpenAI, router: Any, script: Any, cuts: Any
) -> None:
    """A stop string sees none of them, and a limit may cut them anywhere."""
    bare = '{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "time.now", "arguments": {}}\n'
    router.will(script(text=bare, cuts=cuts))
    called = {0: ["get_weather", '{"city": "Paris"}'], 1: ["time.now", "{}"]}
    for fields in ({}, {"stop": ["{", "Paris", "\n"]}):
        chunks = list(client.chat.completions.create(**ASKED, **REQUIRED, **fields, stream=True))
        streamed = folded(chunks)
        assert (streamed["content"], streamed["calls"], streamed["finish_reason"]) == (None, called, "tool_calls")
    first = {**ASKED, **REQUIRED, "parallel_tool_calls": False}
    assert folded(list(client.chat.completions.create(**first, stream=True)))["calls"] == {0: called[0]}
    for max_tokens in range(1, 30, 4):
        cut = client.chat.completions.create(**ASKED, **REQUIRED, max_tokens=max_tokens).choices[0]
        assert (cut.message.content or "", cut.finish_reason) == ("", "length")
        written = [call.function.arguments for call in cut.message.tool_calls or ()]
        assert all('{"city": "Paris"}'.startswith(arguments) for arguments in written[:1])
    free = folded(list(client.chat.completions.create(**ASKED, stream=True)))
    assert (free["content"], free["calls"]) == (None, called)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
        ({"tool_choice": 1}, "invalid_type", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
            "invalid_value", "tool_choice.function.name",
        ),
        ({"tool_choice": "required", "tools": None}, "invalid_value", "tool_choice"),
        ({"parallel_tool_calls": False, "tools": None}, "invalid_value", "parallel_tool_calls"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "empty_array", "tool_choice.allowed_tools.tools",
        ),
        ({"reasoning_effort": "utmost"}, "invalid_value", "reasoning_effort"),
        ({"thinking_token_budget": 5}, "unsupported_parameter", "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "integer_below_min_value", "thinking_token_budget"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                "type": "string"}}}], **REQUIRED},
            "invalid_value", "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                "type": "object", "properties": {"a": {"not": {}}}}}}]},
            "unsupported_value", "tools[0].function.parameters.properties.a.not",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(http: httpx.Client, change: dict[str, Any], code: str, param: str) -> None:
    answer = http.post("/v1/chat/completions", json={**ASKED, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3),
    max_leaves=6), max_size=4), cut=st.integers(1, 9))  # fmt: skip
def test_any_arguments_come_back_as_they_were_written(
    client: openai.OpenAI, router: Any, script: Any, arguments: dict[str, Any], cut: int
) -> None:
    router.reset()
    router.will(script(text=f'<tool_call>{{"name": "f", "arguments": {dumped(arguments)}}}</tool_call>', cuts=(cut,)))
    plain = client.chat.completions.create(**ASKED, max_tokens=140).choices[0]
    assume(plain.finish_reason != "length")
    assert plain.message.tool_calls is not None
    assert plain.message.tool_calls[0].function.arguments == dumped(arguments)
    streamed = folded(list(client.chat.completions.create(**ASKED, stream=True, max_tokens=140)))
    assert streamed["calls"] == {0: ["f", dumped(arguments)]}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def unshown(model: ServedModel) -> Iterator[tuple[str, ScriptedRouter]]:
    """A model whose chat template shows no tools."""
    template = ChatTemplate(CHATML, {})
    form = detect(Clues(chat_template=CHATML, shows_tools=False))
    assert form.call_syntax is not None
    served = replace(model, template=template.with_fallback(Fallback(template.probe(), form.call_syntax)), format=form)
    router = ScriptedRouter(served)
    with serving(served, router, app_settings(access_log=False)) as url:
        yield url, router


SMALL: Any = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_model_whose_template_shows_no_tools_is_told_of_them(
    unshown: tuple[str, ScriptedRouter], choice: str
) -> None:
    url, router = unshown
    router.will(Script(text='<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'))
    body = {"messages": MESSAGES, "tools": SMALL, "tool_choice": choice, "max_tokens": 40}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert "writes them into the prompt as text" in answer.headers["x-inferd-warning"]
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("now", "{}")
    (submit,) = router.submits
    prompt = router.model.tokenizer.decode(submit.prompt_ids, skip_special=False)
    assert json.dumps(SMALL[0]) in prompt
    assert ("<tool_call>" in submit.params.grammar) == (choice == "required")
    counted = httpx.post(f"{url}/tokenize", json={"messages": MESSAGES, "tools": SMALL}).json()
    assert counted["tokens"] == list(submit.prompt_ids)


def test_without_tools_nothing_is_told(unshown: tuple[str, ScriptedRouter]) -> None:
    url, router = unshown
    for fields in ({}, {"tools": SMALL, "tool_choice": "none"}):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert "x-inferd-warning" not in answer.headers
    assert len({submit.prompt_ids for submit in router.submits}) == 1
    assert "# Tools" not in router.model.tokenizer.decode(router.submits[0].prompt_ids, skip_special=False)


PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": '[a-z]+ "[a-z]"\n'}},
    },
}
PATCHED = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "edit \\"a\\"\\n"}}\n</tool_call>'


@pytest.mark.parametrize("cuts", CUTS)
def test_a_custom_tool_gets_a_text(client: openai.OpenAI, router: Any, script: Any, cuts: Any) -> None:
    """Beside a function, plain and streamed, and taken back as history."""
    router.will(script(text=f"{PATCHED}\n{CALL}", cuts=cuts))
    asked = {**ASKED, "tools": [PATCH, *TOOLS]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls is not None
    custom, function = (call.model_dump(exclude={"id"}) for call in message.tool_calls)
    assert custom == {"type": "custom", "custom": {"name": "apply_patch", "input": 'edit "a"\n'}}
    assert function["type"] == "function"
    assert "apply_patch" in prompt_text(router) and "[a-z]+" in prompt_text(router)
    deltas = [
        call.model_dump(exclude_none=True)
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
        if call.index == 0
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "apply_patch", "input": ""})
    assert "".join(delta["custom"]["input"] for delta in deltas) == 'edit "a"\n'
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(**{**asked, "messages": history})
    assert r'{"input": "edit \"a\"\n"}' in prompt_text(router)


def prompt_text(router: ScriptedRouter) -> str:
    """The last prompt that the router was given."""
    return router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False)


def test_a_custom_tool_may_be_named_and_allowed(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=PATCHED))
    named: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
    for choice in (named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        answer = client.chat.completions.create(**{**ASKED, "tools": [PATCH, *TOOLS]}, tool_choice=choice)
        assert [call.type for call in answer.choices[0].message.tool_calls or ()] == ["custom"]
    with pytest.raises(openai.BadRequestError, match="'apply_patch'") as refused:
        client.chat.completions.create(**ASKED, tool_choice=named)
    assert refused.value.param == "tool_choice.custom.name"

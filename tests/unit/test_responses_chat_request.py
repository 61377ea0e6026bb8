"""Items as messages: what belongs to one turn, and what of an item reaches the model."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.api.responses.chat_request import chat_request, in_callers_words, messages_of
from inferd.server.api.responses.toolset import toolset_of
from inferd.server.schema.model import read
from inferd.server.schema.response_items import sealed
from inferd.server.schema.responses import ResponsesRequest


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a": 1}'}


def output(call_id: str, text: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def messages(*given: dict[str, Any]) -> list[Any]:
    items = read(ResponsesRequest, {"input": list(given)}).input
    placed = [(item, f"input[{i}]") for i, item in enumerate(items)]
    return messages_of(placed, toolset_of((), placed))


def assistant(text: str | None = None, thinks: str = "", calls: tuple[str, ...] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    if text is not None:
        message["content"] = text
    if thinks:
        message |= {"reasoning": thinks, "reasoning_content": thinks}
    if calls:
        made = {"name": "f", "arguments": {"a": 1}}
        message["tool_calls"] = [{"type": "function", "id": call_id, "function": made} for call_id in calls]
    return message


def tool(call_id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([user("a"), user("b")], [user("a"), user("b")]),
        ([user("a"), said("b"), user("c")], [user("a"), assistant("b"), user("c")]),
        ([user("a"), thought("t"), said("b"), call("1"), call("2"), output("1"), output("2")],
         [user("a"), assistant("b", "t", ("1", "2")), tool("1"), tool("2")]),
        ([user("a"), thought("t"), call("1"), output("1"), thought("u"), said("b")],
         [user("a"), assistant(None, "t", ("1",)), tool("1"), assistant("b", "u")]),
        ([user("a"), call("1"), said("b"), call("2")],
         [user("a"), assistant(calls=("1",)), assistant("b", "", ("2",))]),
        ([user("a"), said("b"), said("c")], [user("a"), assistant("b"), assistant("c")]),
        ([user("a"), thought("t"), thought("u"), said("b")], [user("a"), assistant("b", "t\nu")]),
        ([user("a"), thought("t"), user("b")], [user("a"), user("b")]),
        ([{"role": "developer", "content": "d"}, user("a")], [{"role": "developer", "content": "d"}, user("a")]),
        ([user("a"), call("1"), output("1", [{"type": "input_text", "text": text} for text in "xy"])],
         [user("a"), assistant(calls=("1",)), tool("1", "x\ny")]),
        ([user("a"), {"type": "reasoning", "summary": [], "encrypted_content": sealed("t\u00e9")}, said("b")],
         [user("a"), assistant("b", "t\u00e9")]),
        ([user("a"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
         [user("a"), assistant("no")]),
    ],
)  # fmt: skip
def test_turns(given: list[Any], expected: list[Any]) -> None:
    assert messages(*given) == expected


def test_an_output_without_an_id_is_of_the_last_call() -> None:
    result = {key: value for key, value in output("2").items() if key != "call_id"}
    expected = [user("a"), assistant(calls=("1", "2")), tool("2")]
    assert messages(user("a"), call("1"), call("2"), result) == expected
    with pytest.raises(RequestError, match="No call before it"):
        messages(user("a"), result)


def test_the_effort_of_reasoning_is_that_of_chat() -> None:
    wire = read(ResponsesRequest, {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}})
    assert chat_request(wire, ()).reasoning_effort == "low"


def test_an_output_comes_after_its_call() -> None:
    for given in ([user("a"), output("1"), call("1")], [user("a"), call("2"), output("1")]):
        with pytest.raises(RequestError) as caught:
            messages(*given)
        assert caught.value.param is not None
        assert caught.value.param.endswith(".call_id")


@pytest.mark.parametrize(
    ("param", "message", "told_param", "told"),
    [
        ("messages", "Invalid 'messages': no.", "input", "Invalid 'input': no."),
        ("messages", "However, your messages resulted in 9 tokens. Reduce the length of the messages.", "input",
         "However, your input resulted in 9 tokens. Reduce the length of the input."),
        ("max_completion_tokens", "Invalid 'max_completion_tokens': x.", "max_output_tokens",
         "Invalid 'max_output_tokens': x."),
        ("tools[3].function.parameters.a", "Invalid 'tools[3].function.parameters.a': x.", "tools[3].parameters.a",
         "Invalid 'tools[3].parameters.a': x."),
        ("seed", "Invalid 'seed': 'many messages'.", "seed", "Invalid 'seed': 'many messages'."),
        (None, "Please try again.", None, "Please try again."),
    ],
)  # fmt: skip
def test_refusals_are_told_in_the_callers_words(
    param: str | None, message: str, told_param: str | None, told: str
) -> None:
    with pytest.raises(RequestError) as caught, in_callers_words():
        raise RequestError("invalid_value", message, param)
    assert (caught.value.code, caught.value.message, caught.value.param) == ("invalid_value", told, told_param)


@pytest.mark.parametrize(("thoughts", "joined"), [(["a", "b"], "a\nb"), (["", "a"], "a"), (["a", "", "b"], "a\n\nb")])
def test_thoughts_in_a_row_are_joined_once(thoughts: list[str], joined: str) -> None:
    assert messages(user("q"), *map(thought, thoughts), said("x"))[1]["reasoning"] == joined

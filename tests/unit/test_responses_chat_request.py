"""Items as messages: what belongs to one turn, and what of an item reaches the model."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.responses.chat_request import chat_request, in_callers_words, messages_of
from inferd.server.endpoints.responses.conversation import MAX_REFERRED_BYTES, conversation_of
from inferd.server.endpoints.responses.store import Stored
from inferd.server.endpoints.responses.toolset import toolset_of
from inferd.server.schema.request_model import read
from inferd.server.schema.response_options import AskedChoice, ToolName
from inferd.server.schema.response_parts import sealed
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
    again = [user("a"), call("1"), call("2"), call("1")]
    assert messages(*again, result)[-1] == tool("1"), "some servers number the calls of each turn anew"
    assert messages(user("a"), result) == [user("a"), tool("call_0")]


def test_the_effort_of_reasoning_is_that_of_chat() -> None:
    wire = read(ResponsesRequest, {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}})
    assert chat_request(wire, ()).reasoning_effort == "low"


def test_an_output_without_its_call_keeps_its_id() -> None:
    """Agents cut the begin of long histories off."""
    assert messages(output("1"), call("1")) == [tool("1"), assistant(calls=("1",))]
    assert messages(call("2"), output("1")) == [assistant(calls=("2",)), tool("1")]


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


LONG = {"type": "namespace", "name": "n" * 128}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def test_tools_whose_names_are_cut_have_names_of_their_own() -> None:
    tools = toolset_of([{**LONG, "tools": [function(f"f{i}") for i in range(12)]}], ()).tools
    names = [tool.name for tool in tools]
    assert len(set(names)) == 12 and max(map(len, names)) == 128
    assert {name.removeprefix("n" * 120) for name in names[1:]} == {f"_{i}" for i in range(2, 13)}


def test_many_tools_with_one_beginning_are_named_in_time() -> None:
    """Each name is tried once. If every tool tried the numbers of all before it, this would take half a minute."""
    tools = [{**LONG, "tools": [function(f"f{i}_{j}") for j in range(1_000)]} for i in range(10)]
    toolset = toolset_of(tools, ())
    assert len({tool.name for tool in toolset.tools}) == 10_000
    asked = tuple(ToolName("function", f"f{i}_{i}", LONG["name"], "tool_choice.tools") for i in range(10))
    chosen = toolset.choice(AskedChoice({}, "required", asked * 100))
    assert chosen is not None and chosen.names is not None
    assert [name for name, _ in chosen.names] == [toolset.name_of(LONG["name"], f"f{i}_{i}") for i in range(10)]


def stored(*items: dict[str, Any]) -> Stored:
    response = {"id": "resp_1", "status": "completed", "output": []}
    return Stored("resp_1", orjson.dumps(response), orjson.dumps(items))


def test_a_request_refers_to_so_many_bytes() -> None:
    """An item counts as often as it is referred to."""
    kept = stored({"type": "message", "id": "msg_1", **user("a" * 2**20)})
    reference = {"type": "item_reference", "id": "msg_1"}
    num_taken = MAX_REFERRED_BYTES // 2**20 - 1
    wire = read(ResponsesRequest, {"input": [reference] * num_taken})
    assert len(conversation_of(wire, None, lambda _: kept).chat.messages) == num_taken
    wire = read(ResponsesRequest, {"input": [reference] * 1_000})
    with pytest.raises(RequestError, match="more than 67108864 bytes together") as caught:
        conversation_of(wire, None, lambda _: kept)
    assert caught.value.param == f"input[{num_taken}].id"


def test_an_item_whose_id_is_no_text_gets_one() -> None:
    """Another server wrote it. It is stored, and its neighbours can be referred to."""
    wire = read(ResponsesRequest, {"input": [{**user("a"), "id": "msg_1"}, {"type": "web_search_call", "id": [1]}]})
    context = conversation_of(wire, None, lambda _: None)
    assert all(isinstance(item["id"], str) for item in orjson.loads(context.context))
    kept = Stored("resp_1", orjson.dumps({"output": []}), context.context, context.item_ids)
    again = read(ResponsesRequest, {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert conversation_of(again, None, lambda _: kept).chat.messages == (user("a"),)


def test_what_an_answer_could_not_repeat_is_refused_at_any_depth() -> None:
    """Also under keys that the server does not know, if it ignores them."""
    function_tool = {"type": "function", "name": "f", "parameters": {}}
    for fields, param in (
        ({"tools": [function_tool], "tool_choice": {"type": "function", "name": "f", "x": 2**70}}, "tool_choice"),
        ({"text": {"format": {"type": "text", "x": 2**70}}}, "text.format"),
    ):
        with pytest.raises(RequestError, match="a whole number of more than 64 bits") as caught:
            read(ResponsesRequest, {"input": "a", **fields}, [])
        assert caught.value.param == param

"""Anthropic requests as chat requests: turns, tools, thinking and formats, and the path named in every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.anthropic_turns import Conversation, Turn, joined
from inferd.server.schema.model import read
from inferd.server.schema.tool_choice import ToolChoice

ASK = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {"max_tokens": 9, "messages": [ASK]}


def turns(*messages: Any) -> list[Any]:
    return list(read(MessagesRequest, {**BASE, "messages": list(messages)}).messages)


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(MessagesRequest, {**BASE, **fields})
    return caught.value


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_a_string_is_a_text_block_and_blocks_are_joined() -> None:
    one, two = {"role": "user", "content": "a\nb"}, {"role": "user", "content": [text("a"), text("b")]}
    assert turns(one) == turns(two) == [one]
    marked = text("a", cache_control={"type": "ephemeral", "ttl": "1h", "scope": "global"}, citations=None)
    assert turns({"role": "user", "content": [marked, text("b")]}) == [one]


def test_neighbours_of_one_role_are_one_turn() -> None:
    said = turns(ASK, {"role": "user", "content": [text("there")]}, {"role": "assistant", "content": "x"}, ASK)
    assert said == [{"role": "user", "content": "hi\nthere"}, {"role": "assistant", "content": "x"}, ASK]


CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1]}, "caller": {"type": "direct"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def test_an_assistant_thinks_says_and_calls() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    made = turns(ASK, {"role": "assistant", "content": [thought, text("let me see"), CALL, {**CALL, "id": "toolu_2"}]})
    function = {"name": "f", "arguments": {"a": [1]}}
    assert made[1] == {
        "role": "assistant",
        "reasoning": "hm",
        "reasoning_content": "hm",
        "content": "let me see",
        "tool_calls": [
            {"type": "function", "id": "toolu_1", "function": function},
            {"type": "function", "id": "toolu_2", "function": function},
        ],
    }


@pytest.mark.parametrize(
    ("content", "read_as"),
    [("18 C", "18 C"), ([text("18"), text("C")], "18\nC"), ([], ""), (None, "")],
)
def test_a_result_is_a_message_of_the_tools_own(content: Any, read_as: str) -> None:
    given = [result(content, is_error=True), text("and now?")]
    made = turns(ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": given})
    told = {"role": "tool", "tool_call_id": "toolu_1", "content": read_as, "name": "f"}
    assert made[2:] == [told, {"role": "user", "content": "and now?"}]


def test_results_of_calls_that_nobody_sent_are_taken() -> None:
    """A client may have shortened its conversation."""
    made = turns({"role": "user", "content": [result("a"), result("b")]})
    assert made == [{"role": "tool", "tool_call_id": "toolu_1", "content": words} for words in ("a", "b")]


def test_an_empty_answer_can_be_sent_back() -> None:
    assert turns(ASK, {"role": "assistant", "content": []}, ASK)[1] == {"role": "assistant", "content": ""}
    assert refusal(messages=[{"role": "user", "content": []}]).param == "messages[0].content"


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("You help.", "You help."),
        ([text("You"), text("help.")], "You\nhelp."),
        (f"{BILLING}\nYou help.", "You help."),
        ([text(BILLING), text("You help.", cache_control={"type": "ephemeral"})], "You help."),
        ([text(f"{BILLING}\nYou"), text("help.")], "You\nhelp."),
        (BILLING, ""),
        (f"You help.\n{BILLING}", f"You help.\n{BILLING}"),
        ([text("You help."), text(BILLING)], f"You help.\n{BILLING}"),
        ([], ""),
    ],
)
def test_the_billing_line_alone_is_left_out_of_the_system_prompt(system: Any, expected: str) -> None:
    assert read(MessagesRequest, {**BASE, "system": system}).system == expected


def test_a_tool_is_a_function() -> None:
    schema = {"type": "object", "properties": {}}
    tool = {"name": "f", "description": "d", "input_schema": schema, "strict": True, "eager_input_streaming": True}
    for kind in ({}, {"type": "custom"}, {"type": None}):
        made = read(MessagesRequest, {**BASE, "tools": [{**tool, **kind}]}).tools
        function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
        assert made == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("given", "choice", "is_parallel"),
    [
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "f"}, ToolChoice("required", (("f", "tool_choice.name"),), True), False),
    ],
)
def test_tool_choices(given: Any, choice: ToolChoice, is_parallel: bool) -> None:
    use = read(MessagesRequest, {**BASE, "tool_choice": given}).tool_choice
    assert use is not None
    assert (use.choice, use.is_parallel) == (choice, is_parallel)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{**ASK, "name": "x"}]}, "messages[0].name", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [result([IMAGE])]}]}, "messages[0].content[0].content[0].type",
     "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type",
     "unsupported_value"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
     "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [ASK, {"role": "assistant", "content": [{**CALL, "input": "{}"}]}]}, "messages[1].content[0].input",
     "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text",
     "invalid_type"),
    ({"messages": [{"role": "user", "content": [text("x", colour="red")]}]}, "messages[0].content[0].colour",
     "unknown_parameter"),
    ({"system": [IMAGE]}, "system[0].type", "unsupported_value"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing_required_parameter"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading",
     "unsupported_value"),
    ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]}, "tools[0].input_examples",
     "unsupported_value"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type", "invalid_value"),
    ({"tool_choice": {"type": "none", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use",
     "unknown_parameter"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens", "unknown_parameter"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display", "invalid_value"),
    ({"output_config": {"effort": "none"}}, "output_config.effort", "invalid_value"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema.not",
     "unsupported_value"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type",
     "unsupported_value"),
    ({"context_management": {"edits": [{**KEEP_ALL, "keep": {"type": "thinking_turns", "value": 1}}]}},
     "context_management.edits[0].keep", "unsupported_value"),
    ({"temperature": 1.5}, "temperature", "decimal_above_max_value"),
    ({"speed": "fast"}, "speed", "unsupported_value"),
    ({"service_tier": "flex"}, "service_tier", "invalid_value"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "unsupported_parameter"),
    ({"container": "c"}, "container", "unsupported_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ({"stop": "x"}, "stop", "unknown_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_is_wrong_is_named_by_its_path(fields: dict[str, Any], param: str, code: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)


def test_what_agents_send_unasked_is_taken() -> None:
    read(
        MessagesRequest,
        {
            **BASE,
            "metadata": {"user_id": "someone"},
            "service_tier": "auto",
            "speed": "standard",
            "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": [KEEP_ALL]},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive"},
            "tools": [],
        },
    )


def test_counting_takes_what_says_what_the_model_reads() -> None:
    counted, whole = set(CountTokensRequest.model_fields), set(MessagesRequest.model_fields)
    sampling = {
        "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "metadata", "service_tier",
    }  # fmt: skip
    assert whole - counted == sampling
    assert counted < whole


def test_what_a_turn_says_in_many_blocks_is_joined_once() -> None:
    """Nothing is copied before the end: 10,000 blocks of 1.6 KB took 80 GB of copies."""
    conversation = Conversation()
    texts = [f"block {i}" for i in range(100)]
    blocks = [
        {"type": kind, ("text" if kind == "text" else kind): text} for kind in ("thinking", "text") for text in texts
    ]
    for block in blocks:
        conversation.add(Turn.model_validate({"role": "assistant", "content": [block]}))
    (message,) = conversation.messages
    for name in ("content", "reasoning"):
        kept = message[name]
        assert isinstance(kept, list)
        assert all(one is other for one, other in zip(kept, texts, strict=True))
    (finished,) = conversation.finished()
    assert finished["content"] == finished["reasoning"] == finished["reasoning_content"] == "\n".join(texts)


@pytest.mark.parametrize(
    ("texts", "said"),
    [(["a", "b"], "a\nb"), (["", "a"], "a"), (["a", ""], "a\n"), (["", "", "a"], "a"), (["", ""], "")],
)
def test_an_empty_text_before_others_leaves_no_line(texts: list[str], said: str) -> None:
    blocks = [{"type": "text", "text": text} for text in texts]
    conversation = Conversation()
    conversation.add(Turn.model_validate({"role": "user", "content": blocks}))
    assert [dict(message) for message in conversation.finished()] == [{"role": "user", "content": said}]


def test_neighbours_of_one_role_become_one_message() -> None:
    texts = [("system", "a"), ("system", "b"), ("user", "c"), ("user", ""), ("user", "d"), ("assistant", "e")]
    texts += [("assistant", "f"), ("user", "g")]
    told = joined({"role": role, "content": content} for role, content in texts)
    assert [(message["role"], message["content"]) for message in told] == [
        ("system", "a\nb"), ("user", "c\n\nd"), ("assistant", "e"), ("assistant", "f"), ("user", "g")
    ]  # fmt: skip

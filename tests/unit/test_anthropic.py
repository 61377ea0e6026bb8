"""Anthropic requests as chat requests: turns, tools, thinking and formats, and the path named in every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.anthropic.chat_request import shown_tools
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.anthropic_conversation import ConversationReader, Turn, joined
from inferd.server.schema.caller_tool import functions
from inferd.server.schema.notices import Notice
from inferd.server.schema.request_model import read
from inferd.server.schema.tool_choice import ToolChoice

ASK = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {"max_tokens": 9, "messages": [ASK]}


def turns(*messages: Any) -> list[Any]:
    return list(read(MessagesRequest, {**BASE, "messages": list(messages)}).messages.messages)


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
        assert made is not None
        assert made.callable == functions([{"type": "function", "function": function}])


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
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{**ASK, "name": "x"}]}, "messages[0].name", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source",
     "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].source.type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [IMAGE]}}
     ]}]}, "messages[0].content[0].source.content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [ASK, {"role": "assistant", "content": [result("x")]}]}, "messages[1].content[0].type",
     "unsupported_value"),
    ({"messages": [ASK, {"role": "system", "content": [IMAGE]}]}, "messages[1].content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type",
     "invalid_value"),
    ({"messages": [{**ASK, "clear_at": "never"}]}, "messages[0].clear_at", "invalid_value"),
    ({"messages": [{**ASK, "output_config": {}}]}, "messages[0].output_config", "invalid_value"),
    ({"messages": [ASK, {"role": "assistant", "content": [{**CALL, "input": "{}"}]}]}, "messages[1].content[0].input",
     "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text",
     "invalid_type"),
    ({"messages": [{"role": "user", "content": [text("x", colour="red")]}]}, "messages[0].content[0].colour",
     "unknown_parameter"),
    ({"system": [IMAGE]}, "system[0].type", "unsupported_value"),
    ({"tools": [{"type": "bash_20990101", "name": "bash"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "bash_20250124", "name": "sh"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing_required_parameter"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "invalid_value"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type", "invalid_value"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens", "unknown_parameter"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display", "invalid_value"),
    ({"output_config": {"effort": "none"}}, "output_config.effort", "invalid_value"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema.not",
     "unsupported_value"),
    ({"context_management": {"edits": [{"type": "cut_in_half"}]}}, "context_management.edits[0].type",
     "invalid_value"),
    ({"temperature": 1.5}, "temperature", "decimal_above_max_value"),
    ({"inference_geo": "eu"}, "inference_geo", "unsupported_value"),
    ({"compaction": {"type": "summarize"}}, "compaction", "unsupported_parameter"),
    ({"thread": {"type": "create"}}, "thread", "unsupported_parameter"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unsupported_parameter"),
    ({"stop": "x"}, "stop", "unsupported_parameter"),
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
        "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p", "seed", "metadata",
        "service_tier",
    }  # fmt: skip
    assert whole - counted == sampling
    assert counted < whole


def test_what_a_turn_says_in_many_blocks_is_joined_once() -> None:
    """Nothing is copied before the end: 10,000 blocks of 1.6 KB took 80 GB of copies."""
    conversation = ConversationReader()
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
    (finished,) = conversation.finished().messages
    assert finished["content"] == finished["reasoning"] == finished["reasoning_content"] == "\n".join(texts)


@pytest.mark.parametrize(
    ("texts", "said"),
    [(["a", "b"], "a\nb"), (["", "a"], "a"), (["a", ""], "a\n"), (["", "", "a"], "a"), (["", ""], "")],
)
def test_an_empty_text_before_others_leaves_no_line(texts: list[str], said: str) -> None:
    blocks = [{"type": "text", "text": text} for text in texts]
    conversation = ConversationReader()
    conversation.add(Turn.model_validate({"role": "user", "content": blocks}))
    assert [dict(message) for message in conversation.finished().messages] == [{"role": "user", "content": said}]


def test_neighbours_of_one_role_become_one_message() -> None:
    texts = [("system", "a"), ("system", "b"), ("user", "c"), ("user", ""), ("user", "d"), ("assistant", "e")]
    texts += [("assistant", "f"), ("user", "g")]
    told = joined({"role": role, "content": content} for role, content in texts)
    assert [(message["role"], message["content"]) for message in told] == [
        ("system", "a\nb"), ("user", "c\n\nd"), ("assistant", "e"), ("assistant", "f"), ("user", "g")
    ]  # fmt: skip


# --- What is left out, and what is loaded -----------------------------------------------------------------------------


def told(**fields: Any) -> tuple[MessagesRequest, list[Notice]]:
    notices: list[Notice] = []
    return read(MessagesRequest, {**BASE, **fields}, None, notices), notices


TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "All is well."}
NO_IMAGE = "[image omitted: this model reads text alone]"
NO_DOCUMENT = "[document omitted: this model reads text alone]"
HISTORY = [{"role": "assistant", "content": "Well."}, ASK]


def test_images_and_files_of_the_past_are_left_out_and_told() -> None:
    given = [{"role": "user", "content": [text("look"), IMAGE, PDF]}, *HISTORY]
    wire, notices = told(messages=given)
    assert wire.messages.messages[0]["content"] == f"look\n{NO_IMAGE}\n<document>\n{NO_DOCUMENT}\n</document>"
    assert [notice.name for notice in notices] == ["omitted_content"]
    assert "left out (1 image, 1 document)" in notices[0].text


def test_images_and_files_of_tools_are_left_out_even_in_the_newest_message() -> None:
    called = {"role": "assistant", "content": [CALL]}
    wire, notices = told(messages=[ASK, called, {"role": "user", "content": [result([text("see"), IMAGE, IMAGE])]}])
    assert wire.messages.messages[-1]["content"] == f"see\n{NO_IMAGE}\n{NO_IMAGE}"
    assert ["left out (2 image)" in notice.text for notice in notices] == [True]
    beside = {"role": "user", "content": [result("see"), IMAGE]}
    wire, notices = told(messages=[ASK, called, beside])
    assert wire.messages.messages[-1]["content"] == NO_IMAGE and len(notices) == 1


def test_a_refused_image_is_history_as_soon_as_the_user_goes_on() -> None:
    given = [{"role": "user", "content": [IMAGE]}, {"role": "user", "content": "go on"}]
    assert turns(*given) == [{"role": "user", "content": f"{NO_IMAGE}\ngo on"}]


@pytest.mark.parametrize(
    ("block", "read_as"),
    [
        ({"type": "document", "source": TEXT_SOURCE}, "<document>\nAll is well.\n</document>"),
        ({"type": "document", "source": TEXT_SOURCE, "title": "T", "context": "C", "citations": {"enabled": False}},
         "<document>\n<title>T</title>\n<context>C</context>\nAll is well.\n</document>"),
        ({"type": "document", "source": {"type": "content", "content": "x"}}, "<document>\nx\n</document>"),
        ({"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}},
         "<document>\nx\ny\n</document>"),
        ({"type": "search_result", "title": "T", "source": "S", "content": [text("x")]},
         "<search_result>\n<title>T</title>\n<source>S</source>\nx\n</search_result>"),
    ],
)  # fmt: skip
def test_documents_are_texts(block: Any, read_as: str) -> None:
    for content in ([block], [result([block])]):
        wire, notices = told(messages=[{"role": "user", "content": content}])
        assert (wire.messages.messages[-1]["content"], notices) == (read_as, [])


def test_an_answer_that_should_cite_is_told_that_it_does_not() -> None:
    block = {"type": "document", "source": TEXT_SOURCE, "citations": {"enabled": True}}
    _, notices = told(messages=[{"role": "user", "content": [block]}])
    assert [notice.text for notice in notices] == ["'citations' is not used: answers cite nothing"]


def test_an_unknown_key_of_a_document_is_told_whatever_its_citations_say() -> None:
    for citations in (None, {"enabled": False}):
        block = {"type": "document", "source": TEXT_SOURCE, "citations": citations, "x": 1}
        ignored: list[str] = []
        read(MessagesRequest, {**BASE, "messages": [{"role": "user", "content": [block]}]}, ignored)
        assert ignored == ["messages[0].content[0].x"]


SERVERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "web_search_tool_result", "content": [
        {"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "zzz"}]}, "T\nU"),
    ({"type": "web_search_tool_result", "content": {"type": "web_search_tool_result_error", "error_code": "E"}}, "E"),
    ({"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "url": "U", "content": {
        "type": "document", "source": TEXT_SOURCE, "title": "T"}}}, "U\nAll is well.\nT"),
    ({"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "url": "U", "content": PDF}}, "U"),
    ({"type": "code_execution_tool_result", "content": {"type": "code_execution_result", "stdout": "1", "stderr": "2",
        "return_code": 0, "content": [{"type": "code_execution_output", "file_id": "f"}]}}, "1\n2"),
    ({"type": "bash_code_execution_tool_result", "content": {"type": "bash_code_execution_result", "stdout": "1",
        "stderr": "", "return_code": 0, "content": []}}, "1\n"),
    ({"type": "text_editor_code_execution_tool_result", "content": {
        "type": "text_editor_code_execution_view_result", "content": "x = 1", "file_type": "text"}}, "x = 1"),
    ({"type": "text_editor_code_execution_tool_result", "content": {
        "type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"]}}, "-a\n+b"),
    ({"type": "advisor_tool_result", "content": {"type": "advisor_result", "text": "Do it."}}, "Do it."),
    ({"type": "mcp_tool_result", "is_error": False, "content": [text("x")]}, "x"),
    ({"type": "mcp_tool_result", "content": "x"}, "x"),
    ({"type": "compaction", "content": "So far.", "encrypted_content": "zzz"}, "So far."),
    ({"type": "web_search_tool_result", "content": {"tool_references": 5, "error_code": "E"}}, "E"),
    ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
    ({"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("block", "read_as"), SERVERS)
def test_what_anthropics_servers_wrote_is_read_as_its_text(block: Any, read_as: str) -> None:
    block = {"tool_use_id": "srvtoolu_1", **block} if "tool_result" in block["type"] else block
    wire, notices = told(messages=[ASK, {"role": "assistant", "content": [text("a"), block, text("b")]}, ASK])
    said = "a\nb" if not read_as else f"a\n{read_as}\nb"
    assert (wire.messages.messages[1]["content"], notices) == (said, [])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "container_upload", "file_id": "f"},
        {"type": "advisor_tool_result", "tool_use_id": "t",
         "content": {"type": "advisor_redacted_result", "encrypted_content": "zzz"}},
    ],
)  # fmt: skip
def test_what_only_anthropics_servers_can_read_is_left_out_and_told(block: Any) -> None:
    wire, notices = told(messages=[ASK, {"role": "assistant", "content": [block, text("b")]}, ASK])
    assert wire.messages.messages[1]["content"] == "b"
    assert [notice.name for notice in notices] == ["omitted_content"]
    assert f"left out (1 {block['type']})" in notices[0].text
    alone, _ = told(messages=[ASK, {"role": "assistant", "content": [block]}, ASK])
    assert alone.messages.messages[1] == {"role": "assistant", "content": ""}


F = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}
G = {**F, "name": "g"}


def loading(*blocks: Any) -> list[Any]:
    return [ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result(list(blocks))]}]


def shown(**fields: Any) -> list[str]:
    return [tool.name for tool in shown_tools(read(MessagesRequest, {**BASE, **fields}))]


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name, "cache_control": {"type": "ephemeral"}}


def test_a_deferred_tool_is_shown_from_its_reference_on_in_the_order_of_tools() -> None:
    tools = [F, {**F, "name": "h", "defer_loading": False}, G]
    assert shown(tools=tools) == ["h"]
    assert shown(tools=tools, messages=loading(reference("g"))) == ["h", "g"]
    assert shown(tools=tools, messages=loading(reference("g"), reference("f"))) == ["f", "h", "g"]
    wire, notices = told(tools=tools, messages=loading(reference("g")))
    assert (wire.messages.messages[-1]["content"], notices) == ("Tool loaded: g", [])
    search = {"type": "tool_search_tool_search_result", "tool_references": [reference("f")]}
    found = {"type": "tool_search_tool_result", "tool_use_id": "t", "content": search}
    given = [ASK, {"role": "assistant", "content": [found, text("b")]}, ASK]
    assert shown(tools=tools, messages=given) == ["f", "h"]
    assert turns(*given)[1]["content"] == "Tool not found: f\nb"


def test_an_unknown_reference_is_text_and_told() -> None:
    wire, notices = told(tools=[F], messages=loading(reference("x")))
    assert wire.messages.messages[-1]["content"] == "Tool not found: x"
    assert [notice.name for notice in notices] == ["no_effect"]


@pytest.mark.parametrize(
    "kind", ["tool_search_tool_regex_20251119", "tool_search_tool_bm25", "tool_search_tool_bm25_2"]
)
def test_a_hosted_search_shows_all_deferred_tools_and_is_told(kind: str) -> None:
    tools = [{"type": kind, "name": "tool_search_tool"}, F, G]
    assert shown(tools=tools) == ["f", "g"]
    _, notices = told(tools=tools)
    assert [notice.name for notice in notices] == ["hosted_tool"]


def test_tools_are_added_and_removed_by_the_system() -> None:
    def changed(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    add, remove = (changed(kind, type="tool_reference", name="f") for kind in ("tool_addition", "tool_removal"))
    assert shown(tools=[F], messages=[ASK, add]) == ["f"]
    assert shown(tools=[F], messages=[ASK, add, remove]) == []
    assert shown(tools=[F], messages=[ASK, add, remove, add]) == ["f"]
    assert turns(ASK, remove)[1] == {"role": "system", "content": "Tool removed: f"}
    define = changed("tool_addition", type="tool_definition", definition={**G, "defer_loading": False})
    assert shown(tools=[F], messages=[ASK, define]) == ["g"]
    listed = {"type": "compaction", "content": "So far.", "tool_changes": define["content"]}
    assert shown(messages=[{"role": "assistant", "content": [listed]}, ASK]) == ["g"]
    elsewhere = changed("tool_addition", type="mcp_toolset_reference", server_name="s")
    assert [notice.name for notice in told(messages=[ASK, elsewhere])[1]] == ["omitted_content"]


def test_a_tool_that_only_code_may_call_is_not_shown() -> None:
    tool = {**F, "defer_loading": False, "allowed_callers": ["code_execution_20250825"]}
    assert shown(tools=[tool]) == []
    assert "allowed_callers" in told(tools=[tool])[1][0].text
    assert shown(tools=[{**tool, "allowed_callers": ["direct", "code_execution_20250825"]}]) == ["f"]


def test_a_message_of_the_system_may_last_one_turn_and_set_the_effort() -> None:
    late = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    assert turns(ASK, late)[1:] == [{"role": "system", "content": "now"}]
    assert turns(ASK, late, *HISTORY) == turns(ASK, *HISTORY)
    effort = {"role": "system", "output_config": {"effort": "low"}}
    wire = read(MessagesRequest, {**BASE, "messages": [ASK, effort]})
    assert (wire.messages.messages, wire.messages.effort) == ((ASK,), "low")
    assert read(MessagesRequest, {**BASE, "messages": [ASK, effort, *HISTORY]}).messages.effort is None


@pytest.mark.parametrize(
    ("kind", "name", "commands", "inserted"),
    [
        ("text_editor_20241022", "str_replace_editor", "view create str_replace insert undo_edit", "new_str"),
        ("text_editor_20250124", "str_replace_editor", "view create str_replace insert undo_edit", "new_str"),
        ("text_editor_20250429", "str_replace_based_edit_tool", "view create str_replace insert", "insert_text"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "view create str_replace insert", "insert_text"),
        ("memory_20250818", "memory", "view create str_replace insert delete rename", "insert_text"),
    ],
)
def test_anthropics_own_tools_are_functions_with_their_commands(
    kind: str, name: str, commands: str, inserted: str
) -> None:
    made = read(MessagesRequest, {**BASE, "tools": [{"type": kind, "name": name, "strict": True}]}).tools
    assert made is not None
    function: Any = made.callable[0].function
    properties = function["parameters"]["properties"]
    assert (function["name"], function["strict"]) == (name, True)
    assert properties["command"]["enum"] == commands.split()
    assert "insert" in properties[inserted]["description"]
    assert ("insert_text" in properties) == (inserted == "insert_text")
    assert ("old_path" in properties) == (name == "memory")
    assert refusal(tools=[{"type": kind, "name": "other"}]).param == "tools[0].name"


def test_the_bash_tool_has_a_command_and_the_editor_says_how_much_it_shows() -> None:
    bash = read(MessagesRequest, {**BASE, "tools": [{"type": "bash_20250124", "name": "bash"}]}).tools
    assert bash is not None
    parameters: Any = bash.callable[0].function["parameters"]
    assert set(parameters["properties"]) == {"command", "restart"}
    tool = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 123}
    editor = read(MessagesRequest, {**BASE, "tools": [tool]}).tools
    assert editor is not None
    assert "123 characters" in str(editor.callable[0].function["description"])


def test_many_unknown_references_are_told_once() -> None:
    tools = [{**F, "name": f"tool_{i}"} for i in range(1_000)]
    wire, notices = told(tools=tools, messages=loading(*[reference(f"x{i}") for i in range(20_000)]))
    assert len(notices) == 1
    assert str(wire.messages.messages[-1]["content"]).count("\n") == 19_999


def test_the_state_of_a_browser_is_text() -> None:
    tab = {"tab_id": "1", "title": "T", "url": "U", "active": True}
    failed = {"type": "download_failed", "download_id": "d", "url": "V", "error": "E"}
    state = {"type": "browser_state", "tabs": [tab], "state_changes": [failed]}
    assert turns(*loading(state))[-1]["content"] == "T\nU\nV\nE"

"""Grammars for calls and reasoning, followed by llguidance on the embedded model's vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.grammar.compiler import normal_form
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.errors import messages as errors
from inferd.server.generate.answer_rules import (
    AnswerLanguage,
    AnswerRules,
    answer_rules,
    check_tools,
    template_kwargs,
    tools_shown,
)
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.request_model import read
from inferd.server.schema.tool_choice import ToolChoice
from inferd.server.structured.language import Language, json_value
from inferd.server.text.model import ServedModel
from inferd.server.tools import call_grammar as calls_module
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.builtin import CALLS
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.fallback import written_calls
from inferd.server.tools.format import NAME, CallSyntax
from inferd.server.tools.pieces import Content, Piece, Reasoning, joined
from tests.unit.tool_samples import PARIS, TIME, TOOLS, WEATHER, call

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
VOCAB_SIZE = 3_072
THOUGHT = "<think>\nHm.\n</think>\n\n"
PROMPT = "<|im_start|>assistant\n"
SCHEMA = AnswerLanguage("response_format", json_value({"type": "object", "properties": {"a": {"type": "integer"}}}))


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, VOCAB_SIZE)


@cache
def served(tools: str = "auto", reasoning: str = "auto") -> ServedModel:
    loaded = ServedModel.load(MODEL_PATH, ("m",), max_model_len=256, vocab_size=VOCAB_SIZE)
    return loaded if tools == "auto" else replace(loaded, format=detect(Clues(), tools, reasoning))


def wire(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": list(TOOLS), **fields}
    given = read(ChatRequest, body)
    check_tools(given)
    return given


def asked(model: ServedModel, prompt: str = PROMPT, answer: AnswerLanguage | None = None, **fields: Any) -> AnswerRules:
    return answer_rules(wire(**fields), model, prompt, answer)


def follows(what: AnswerRules, model: ServedModel, text: str) -> bool:
    """Whether the grammar accepts this text and may end there."""
    assert what.answer is not None
    matcher = LLMatcher(vocabulary(), normal_form(what.answer.language.text()).text)
    assert not matcher.is_error(), matcher.get_error()
    ids = model.tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting())


def names_in(what: AnswerRules, text: str) -> list[str]:
    assert what.parser_config is not None
    reader = AnswerParser(what.parser_config)
    pieces = [*reader.feed(text), *reader.finish()]
    return [piece.name for piece in pieces if hasattr(piece, "name")]


HERMES = f"<tool_call>\n{call(*PARIS)}\n</tool_call>"
NOW = '<tool_call>\n{"name": "time.now", "arguments": {}}\n</tool_call>'
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (WEATHER, TIME)]  # type: ignore[dict-item]


def test_what_nothing_is_asked_of_is_free() -> None:
    assert asked(served()).answer is None
    assert asked(served(), tools=None) == AnswerRules(None, None)
    assert asked(served(), tool_choice="none") == AnswerRules(None, None)
    assert tools_shown(wire(tool_choice="none")) is None


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        (
            {"tool_choice": "required"},
            [HERMES, f"{HERMES}\n{NOW}"],
            ["", "Hi", HERMES.replace("get_weather", "get_rain"), f"{HERMES} and", HERMES.replace('"Paris"', "1")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [HERMES], [f"{HERMES}\n{NOW}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "time.now"}}}, [NOW], [HERMES, f"{NOW}\n{NOW}"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "time.now"}}]}}},
            ["Hi", "", f"Well. {NOW}", f"{NOW} and {NOW}"], [HERMES, f"Well. {HERMES}"],
        ),
        (
            {"tools": STRICT},
            ["Hi", HERMES, f"I look. {HERMES}\n{NOW} Done."],
            [HERMES.replace("}}", ', "days": "x"}}'), HERMES.replace("city", "town"), "a <tool_call> is"],
        ),
    ],
    ids=["required", "one call", "a named function", "allowed tools", "strict"],
)  # fmt: skip
def test_calls_are_held_to_what_was_asked(fields: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    what = asked(served(), **fields)
    assert [text for text in taken if not follows(what, served(), text)] == []
    assert [text for text in refused if follows(what, served(), text)] == []


class Name(str):
    """A name that counts how often it is compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_tools_of_a_choice_are_looked_up() -> None:
    """A response may name 30,000 tools by their namespace, and the event loop checks them."""
    shown = {"type": "function", "function": {}}
    tools = tuple(CallerTool(Name(f"f{i}"), shown, "tools") for i in range(200))
    choice = ToolChoice("auto", tuple((Name(f"f{i}"), "tool_choice") for i in range(200)))
    Name.num_compared = 0
    check_tools(ChatRequest.model_construct(messages=(), tools=tools, tool_choice=choice))
    assert Name.num_compared <= 400
    wrong = ToolChoice("auto", (("g", "tool_choice.name"),))
    with pytest.raises(RequestError, match="'f0', 'f1', 'f2'"):
        check_tools(ChatRequest.model_construct(messages=(), tools=tools, tool_choice=wrong))


def test_tools_beside_a_schema_are_calls_or_the_schema() -> None:
    what = asked(served(), answer=SCHEMA)
    assert follows(what, served(), HERMES)
    assert follows(what, served(), '{"a": 1}')
    assert not follows(what, served(), '{"a": "x"}')
    assert not follows(what, served(), "Hi")
    assert what.answer is not None
    assert what.answer.param == "response_format"


def written(syntax: CallSyntax, *calls: tuple[str, dict[str, object]]) -> str:
    """The calls as the format spells them."""
    return written_calls(syntax, [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls])


@pytest.mark.parametrize("name", [name for name, calls in CALLS.items() if calls.syntax is not None])
def test_what_a_grammar_writes_the_reader_reads(name: str) -> None:
    model = served("none" if name == "json" else name, "harmony" if name == "harmony" else "none")
    syntax, now = CALLS[name].syntax, ("time.now", dict[str, object]())
    assert syntax is not None
    what = asked(model, prompt="<|start|>assistant", tool_choice="required")
    several = [(PARIS,)] if syntax.is_single else [(PARIS,), (PARIS, now), (now, now, PARIS)]
    for calls in several:
        text = written(syntax, *calls)
        assert follows(what, model, text), text
        assert names_in(what, text) == [name for name, _ in calls]
    one = asked(model, prompt="<|start|>assistant", tool_choice="required", parallel_tool_calls=False)
    assert follows(one, model, written(syntax, PARIS))
    assert not follows(one, model, written(syntax, PARIS, now))
    assert names_in(one, written(syntax, PARIS, now)) == ["get_weather"]
    assert not follows(what, model, written(syntax, ("get_rain", {})))


@pytest.mark.parametrize(
    "name", ["auto", *(name for name, calls in CALLS.items() if calls.syntax and calls.syntax.bare)]
)
def test_a_required_call_may_lack_the_markers_around_its_json(name: str) -> None:
    """Weights that never learned the markers write a call without them, and end their turn behind it."""
    model, now = served(name), ("time.now", dict[str, object]())
    what = asked(model, tool_choice="required")
    paris, twice = call(*PARIS), f"{call(*PARIS)}\n{call(*now)}"
    for text, names in ((paris, ["get_weather"]), (twice, ["get_weather", "time.now"])):
        assert follows(what, model, text) and names_in(what, text) == names
        assert names_in(what, f"{text}\n") == names
    refused = (call("get_rain", {}), paris.replace('"Paris"', "1"), f"{paris} {paris}", f"{paris}.", f"[{paris}]", "{}")
    assert [text for text in refused if follows(what, model, text)] == []
    one = asked(model, tool_choice="required", parallel_tool_calls=False)
    assert follows(one, model, paris) and not follows(one, model, twice)
    assert names_in(asked(model, answer=SCHEMA), paris) == []  # JSON of the caller's schema


def test_calls_with_and_without_markers_are_not_mixed() -> None:
    what, bare = asked(served(), tool_choice="required"), call(*PARIS)
    cut = (HERMES.removesuffix("\n</tool_call>"), HERMES.removeprefix("<tool_call>\n"))
    for text in (f"{HERMES}\n{bare}", f"{bare}\n{HERMES}", *cut):
        assert not follows(what, served(), text)


def test_an_answer_may_end_behind_the_blanks_between_two_calls() -> None:
    """Otherwise a model that has written them could only call again."""
    for choice in ({"tool_choice": "required"}, {"answer": SCHEMA}):
        what = asked(served(), **choice)
        for text in (HERMES, f"{HERMES}\n{NOW}", *([call(*PARIS)] if "tool_choice" in choice else [])):
            assert follows(what, served(), f"{text}\n")
            assert not follows(what, served(), f"{text}\n\n")
            assert names_in(what, f"{text}\n") == names_in(what, text)


@pytest.mark.parametrize(
    ("change", "bare"),
    [
        ({}, ('{"name": "', "}")),
        ({"begin": '<tool_call>{"type": "function", "function": {"name": "', "end": "}}</tool_call>"},
         ('{"type": "function", "function": {"name": "', "}}")),
        ({"begin": '<tool_call>\n{"', "between": '": '}, ('{"', "}")),
        ({"trigger": ""}, None),
        ({"trigger": "[TOOL_CALLS]", "begin": '[TOOL_CALLS]{"name": "'}, None),
        ({"begin": "<tool_call>"}, None),
        ({"begin": "<{tool_call}>", "end": "}"}, None),
        ({"end": f"}}</{NAME}>"}, None),
    ],
)  # fmt: skip
def test_calls_without_markers_are_the_json_between_them(change: dict[str, Any], bare: tuple[str, str] | None) -> None:
    hermes = CALLS["hermes"].syntax
    assert hermes is not None
    found = replace(hermes, **change).bare
    assert (found and (found.begin, found.end)) == bare


def test_reasoning_comes_first_where_the_model_reasons() -> None:
    model = served("hermes", "think")
    what = asked(model, tool_choice="required")
    assert follows(what, model, HERMES)
    assert follows(what, model, THOUGHT + HERMES)
    bare = THOUGHT + call(*PARIS)
    assert follows(what, model, bare) and names_in(what, bare) == ["get_weather"]
    assert not follows(what, model, THOUGHT)
    opened = asked(model, prompt=f"{PROMPT}<think>\n", tool_choice="required")
    assert follows(opened, model, f"Hm.\n</think>\n\n{HERMES}")
    assert not follows(opened, model, HERMES)
    done = asked(model, prompt=f"{PROMPT}<think>\n\n</think>\n\n", tool_choice="required")
    assert follows(done, model, HERMES)
    assert not follows(done, model, THOUGHT + HERMES)
    schema = asked(model, tools=None, answer=SCHEMA)
    assert follows(schema, model, THOUGHT + '{"a": 1}')
    assert follows(schema, model, '{"a": 1}')
    assert not follows(schema, model, "Hi")


def test_an_answer_of_gpt_oss_has_its_marker() -> None:
    model, start = served("harmony", "harmony"), "<|start|>assistant"
    thought, final = f"<|channel|>analysis<|message|>Hm.<|end|>{start}", "<|channel|>final<|message|>"
    schema = asked(model, prompt=start, tools=None, answer=SCHEMA)
    for before in ("", thought):
        assert follows(schema, model, before + final + '{"a": 1}')
        assert not follows(schema, model, before + '{"a": 1}')
    assert not follows(schema, model, f'{thought} {final}{{"a": 1}}')
    begun = asked(model, prompt=start + final, tools=None, answer=SCHEMA)
    assert follows(begun, model, '{"a": 1}') and not follows(begun, model, final + '{"a": 1}')
    strict, syntax = asked(model, prompt=start, tools=STRICT), CALLS["harmony"].syntax
    assert syntax is not None
    for text, is_right in ((written(syntax, PARIS), True), (f"{final}Hi", True), ("Hi", False)):
        assert follows(strict, model, thought + text) == is_right
    either = asked(model, prompt=start, answer=SCHEMA)
    assert follows(either, model, written(syntax, PARIS)) and follows(either, model, final + '{"a": 1}')


def test_a_format_that_is_not_known_is_written_as_json() -> None:
    model = served("none", "none")
    what = asked(model, tool_choice="required")
    text = f"[{call(*PARIS)}]"
    assert follows(what, model, text)
    assert not follows(what, model, "Hi")
    assert names_in(what, text) == ["get_weather"]
    assert asked(model).parser_config is None
    gemma = asked(served("gemma4", "none"), tool_choice="required")
    assert names_in(gemma, text) == ["get_weather"]
    free = asked(served("gemma4", "none"), tools=STRICT)
    assert free.answer is None
    assert names_in(free, '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>') == ["get_weather"]


def test_a_thinking_budget_forces_the_end() -> None:
    """The embedded vocabulary has no token for `</think>`, but one for `</tool_call>`: it may end reasoning as well."""
    own = {
        "start_anchor": PROMPT,
        "fields": {"thinking": {"open": "<tool_call>", "close": "</tool_call>"}, "content": {}},
    }
    model = replace(served(), format=detect(Clues(response_template=own)))
    words = " a b c d e f g h"
    ids = model.tokenizer.encode(words, False)
    what = asked(model, prompt=f"{PROMPT}<tool_call>", tools=None, thinking_token_budget=len(ids))
    assert follows(what, model, f"{words}</tool_call> Yes.")
    assert follows(what, model, " a</tool_call> Yes.")
    assert not follows(what, model, f"{words} i</tool_call> Yes.")
    none = asked(model, prompt=f"{PROMPT}<tool_call>", tools=None, thinking_token_budget=0)
    assert follows(none, model, "</tool_call>Yes.")
    assert not follows(none, model, " a</tool_call>Yes.")
    with pytest.raises(RequestError, match="no token that could be forced"):
        asked(served("hermes", "think"), thinking_token_budget=3)


@pytest.mark.parametrize(
    ("template", "effort", "kwargs"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{% if enable_thinking %}", "none", {"enable_thinking": False}),
        ("{% if enable_thinking %}", "high", {"enable_thinking": True}),
        ("{% if thinking is defined %}", "none", {"thinking": False}),
    ],
)
def test_reasoning_effort_has_the_templates_own_name(template: str, effort: str, kwargs: dict[str, object]) -> None:
    given = template_kwargs(wire(reasoning_effort=effort, chat_template_kwargs={"a": 1}), template)
    assert given == {"a": 1, **kwargs}
    (name,) = kwargs
    with pytest.raises(RequestError, match=f"Only one of 'reasoning_effort' and 'chat_template_kwargs.{name}'"):
        template_kwargs(wire(reasoning_effort=effort, chat_template_kwargs={name: 1}), template)
    assert template_kwargs(wire(reasoning_effort=effort), "{{ messages }}") is None, "it has no effect there"


# -- what small tools become -------------------------------------------------------------------------------------------

XML = next(name for name, calls in CALLS.items() if calls.syntax is not None and calls.syntax.tags is not None)


def tool(name: str, parameters: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize("strict", [True, False])
def test_definitions_stand_once_however_many_parameters_refer_to_them(strict: bool) -> None:
    definitions = {"d": {"type": "string", "enum": ["x" * 30_000]}}
    properties: dict[str, Any] = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/d"}]} for i in range(500)}
    properties |= {f"q{i}": {"type": "integer"} for i in range(20)}
    tools = [tool("f", {"type": "object", "properties": properties, "$defs": definitions}, strict=strict)]
    what = asked(served(XML, "none"), tools=tools, tool_choice="required")
    assert what.answer is not None
    assert len(normal_form(what.answer.language.text()).text) < 200_000


IN_TAGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "day": {"type": "string", "format": "date"},
        "note": {"type": "string", "maxLength": 5},
        "free": {"type": "string"},
        "mood": {"enum": ["good", "bad"]},
        "either": {"type": ["string", "null"]},
        "id": {"const": 2**53 + 1},
    },
}


@pytest.mark.parametrize("name", [name for name, calls in CALLS.items() if calls.syntax and calls.syntax.tags])
def test_strings_in_tags_follow_their_rules(name: str) -> None:
    model, syntax = served(name, "none"), CALLS[name].syntax
    assert syntax is not None
    what = asked(model, tools=[tool("f", IN_TAGS)], tool_choice="required")

    def takes(**arguments: object) -> bool:
        return follows(what, model, written(syntax, ("f", arguments)))

    assert takes() and takes(code="ab", day="2024-02-29", note="a <b>", free="x\n<y", mood="bad", id=2**53 + 1)
    if syntax.tags is not None and syntax.tags.is_raw:
        assert takes(either='"a"') and takes(either="null") and not takes(either="a")
    wrong = ({"code": "abc"}, {"day": "2023-02-29"}, {"note": "abcdef"}, {"mood": "sad"}, {"id": 2**53}, {"other": "a"})
    assert [arguments for arguments in wrong if takes(**arguments)] == []


def test_what_a_whole_object_must_be_holds_in_tags_too() -> None:
    model, syntax = served(XML, "none"), CALLS[XML].syntax
    assert syntax is not None
    of = {"type": "integer"}
    schema = {"properties": {"a": of, "b": of}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    what = asked(model, tools=[tool("f", schema)], tool_choice="required")
    for arguments in ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}):
        assert follows(what, model, written(syntax, ("f", arguments)))
    assert not follows(what, model, written(syntax, ("f", {})))
    least = asked(
        model, tools=[tool("f", {"properties": {"a": of, "b": of}, "minProperties": 1})], tool_choice="required"
    )
    assert least.answer is not None
    with pytest.raises(GrammarError, match="minProperties"):
        normal_form(least.answer.language.text())


@pytest.mark.parametrize("name", ["auto", XML])
def test_the_schemas_of_all_tools_together_are_bounded_while_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, read_schema = 0, calls_module.read_schema

    def counted(*args: Any, **named: Any) -> Language:
        nonlocal num_read
        num_read += 1
        return read_schema(*args, **named)

    monkeypatch.setattr(calls_module, "read_schema", counted)
    tools = [tool(f"f{i}", {"type": "object", "description": "x" * 60_000}) for i in range(128)]
    with pytest.raises(RequestError, match="at least 30") as caught:
        asked(served(name, "none") if name == XML else served(), tools=tools)
    assert caught.value.param == "tools" and num_read == 5


def test_bounds_of_numbers_are_exact_in_tags_too() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}},
              "required": ["x"]}  # fmt: skip
    model = served(XML, "none")
    what = asked(model, tools=[tool("f", schema)], tool_choice="required")
    syntax = CALLS[XML].syntax
    assert syntax is not None
    assert follows(what, model, written(syntax, ("f", {"x": 0.25})))
    assert not follows(what, model, written(syntax, ("f", {"x": 0})))


# -- custom tools ------------------------------------------------------------------------------------------------------

LINES = 'start: line+\nline: ("+" | "-") /[^\\n]*/ LF\n%import common.LF\n'
ADDED = '+say "hi"\\n\n-\t\n'


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "edit", "format": grammar}}


@pytest.mark.parametrize("name", ["hermes", "mistral", XML, "llama3_json", "deepseek_v3", "granite"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", LINES), ("regex", r"([+-][^\n]*\n)+")])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_text_of_a_custom_tool_follows_its_grammar_in_each_format(
    name: str, syntax: str, definition: str, choice: str
) -> None:
    model, form = served(name, "none"), CALLS[name].syntax
    assert form is not None
    what = asked(model, tools=[custom(syntax, definition)], tool_choice=choice)
    for text, is_right in ((ADDED, True), ("say\n", False), ("+no end", False), ("", False)):
        assert follows(what, model, written(form, ("edit", {"input": text}))) == is_right, text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "hermes"])
@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", "start: /a/ REST\nREST: /[\\s\\S]+/"), ("regex", r"a[\s\S]+")]
)
def test_a_grammar_of_any_text_ends_at_the_marker(name: str, syntax: str, definition: str) -> None:
    model, form = served(name, "none"), CALLS[name].syntax
    assert form is not None
    what = asked(model, tools=[custom(syntax, definition)], tool_choice="required")
    one = written(form, ("edit", {"input": 'a\n<b> "\\</c>\n'}))
    assert follows(what, model, one)
    assert not follows(what, model, written(form, ("edit", {"input": "b"})))
    assert not follows(what, model, one + "x")


def test_a_grammar_that_cannot_be_enforced_is_refused_by_its_path() -> None:
    for syntax, definition, reason in (
        ("regex", "a(?=b)", "look"),
        ("lark", 'start: %json {"type": "string"}', "json"),
        ("lark", "start: " + "b" * 50_000, "refers to 'bbb"),
    ):
        with pytest.raises(RequestError, match=reason) as caught:
            asked(served("hermes", "none"), tools=[custom(syntax, definition)])
        assert caught.value.param == "tools[0].custom.format.grammar.definition"
        assert len(caught.value.message) <= errors.MAX_MESSAGE


def test_markers_in_an_answer_under_a_schema_are_text() -> None:
    """The schema's strings may hold any text."""
    model = served("hermes", "think")
    html = AnswerLanguage("response_format", json_value({"type": "object", "properties": {"a": {"type": "string"}}}))
    content = '{"a": "</think> <think>b</think>"}'
    for tools in (None, list(TOOLS)):
        what = asked(model, answer=html, tools=tools)
        assert follows(what, model, f"{THOUGHT}{content}")
        assert what.parser_config is not None
        for cuts in ([len(content)], range(len(THOUGHT + content))):
            reader, start, pieces = AnswerParser(what.parser_config), 0, list[Piece]()
            for end in (*cuts, len(THOUGHT + content)):
                pieces += reader.feed((THOUGHT + content)[start:end])
                start = end
            assert joined([*pieces, *reader.finish()]) == [Reasoning("Hm."), Content(content)]

"""Formats derived from chat templates read the templates' own turns, and constrain calls to what they write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLMatcher

from inferd.engine.api.errors import ConfigError
from inferd.engine.grammar.compiler import normal_form
from inferd.server.commands.template_report import run
from inferd.server.generate.answer_rules import answer_rules
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.request_model import read as read_request
from inferd.server.text.model import ServedModel
from inferd.server.text.render_workers import OvertimeError
from inferd.server.text.template import ChatTemplate
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.derived.derive import derive
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.fallback import written_calls
from inferd.server.tools.format import ReasoningSyntax
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, joined
from tests.unit.derived_templates import MISPRINTS, STRANGE, TEMPLATES, turns
from tests.unit.round_trips import (
    SPECIAL_TOKENS,
    TOOLS,
    TURNS,
    Template,
    Turn,
    call,
    format_of,
    is_same,
    tiny,
    tried,
    trip,
    turn_of,
    vocabulary,
)

ALL = {**TEMPLATES, **STRANGE, **MISPRINTS}


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    report = tried(name, ALL[name])
    assert report.found.tool_name == "derived"
    wrong = {label: result for label, result in report.results.items() if result != "ok"}
    if report.found.is_bare:  # calls without a marker are a whole answer
        wrong = {label: result for label, result in wrong.items() if "content, call" not in label}
    if name in MISPRINTS:
        wrong = {label: result for label, result in wrong.items() if "required" not in label}
    assert wrong == {}
    assert len(report.results) >= 24


@pytest.mark.parametrize(
    ("name", "text"), [("JSON with other quotes", "<|q|>"), ("values in tags, as deep as they go", "~|")]
)
def test_texts_around_values_may_be_special_tokens(name: str, text: str) -> None:
    assert "<tool_call>" in tiny().tokenizer.added_tokens
    report = tried(name, TEMPLATES[name].replace(text, "<tool_call>"))
    assert report.found.tool_name == "derived" and report.is_ok


PROSE = (
    'Use <b>bold</b> and `[1, 2]`, or {"name": "x"}.\n\n```html\n<div><input name="a"></div>\n```\n'
    "A call(k='v') is no call, and [TODO] stays. 1 < 2 > 0."
)


LIKE_CALLS = (
    "[note(a=1)] is a reference.",
    "[todo(x=1), other()]",
    "[find_flight] was called",
    '{"name": "unknown", "arguments": {"a": 1}}',
    '{"steps": [{"name": "x"}]}',
    ">>>foo {bar}",
    "<<do it>> now",
    "--- run x\na: 1\n--- end run",
    "Action: think\nAction Input: {}",
    "((a)) \u00a7 5 := x | y && z",
)


@pytest.mark.parametrize("name", ALL)
def test_text_that_is_no_call_stays_as_it_is(name: str) -> None:
    template = Template(ALL[name])
    found = format_of(template, template.support())
    for prose in (PROSE, *LIKE_CALLS):
        for size in (1, 7, len(prose)):
            parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
            pieces = [piece for at in range(0, len(prose), size) for piece in parser.feed(prose[at : at + size])]
            assert joined([*pieces, *parser.finish()]) == [Content(prose)]


REFUSED = {
    "a call without a marker before its name": (
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}",
        "no marker",
    ),
    "a call whose arguments come first": (
        '{% for c in m.tool_calls or [] %}<call>{"arguments": {{ c.function.arguments | tojson }}, '
        '"name": "{{ c.function.name }}"}</call>{% endfor %}',
        "name before its arguments",
    ),
    "arguments as Python's own": (
        '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments }}}</call>{% endfor %}",
        "",
    ),
    "no calls": ("", "shows no calls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_for_certain_is_not_derived(name: str) -> None:
    calls, why = REFUSED[name]
    template = Template(turns(calls))
    support = template.support()
    derived = derive(template.render_turn, support)
    assert derived.calls is None
    assert why in derived.why_no_calls
    found = detect(Clues(chat_template="<tool_call>", shows_tools=support.tools, derived=derived))
    assert found.tool_name == ("none" if support.calls else "hermes"), "a wrong format is worse than none"
    assert derived.why_no_calls in found.words


def test_a_template_that_takes_only_short_ids_gets_them() -> None:
    calls = TEMPLATES["a name before JSON"]
    short = calls.replace("[CALL]", "{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}[CALL]")
    for text, has_short_ids in ((calls, False), (short, True)):
        template = Template(text)
        assert format_of(template, template.support()).has_short_ids == has_short_ids


def test_the_log_shows_what_was_derived() -> None:
    template = Template(TEMPLATES["tags of arguments"])
    assert format_of(template, template.support()).words == (
        "tool calls: derived, as <call> <function=NAME> <parameter=KEY> VALUE </parameter> ...</function> </call>; "
        "reasoning: derived, as <think>...</think> (from the chat template)"
    )


def test_the_doctor_shows_what_is_derived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text(TEMPLATES["tags of arguments"])
    assert run(path, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shows"] == "tools, calls, results, system"
    assert shown["calls"].startswith("derived: <call> <function=NAME>")
    assert shown["reasoning"] == "derived: <think>...</think>"
    assert run(path, as_json=False) == 0
    assert 'begin behind "<|im_end|>\\n<|im_start|>assistant\\n"' in capsys.readouterr().out
    with pytest.raises(ConfigError, match="give the file of a chat template"):
        run(tmp_path / "none.jinja", as_json=False)


@pytest.mark.parametrize("name", [*TEMPLATES, *STRANGE])
def test_a_grammar_takes_the_templates_own_answers(name: str) -> None:
    """Reasoning and then a required call; content and then a call that follows a strict schema."""
    template = Template({**TEMPLATES, **STRANGE}[name])
    support = template.support()
    model = replace(tiny(), format=format_of(template, support))
    for label, fields in (
        ("reasoning, call", {"tool_choice": "required"}),
        ("one call", {"tool_choice": "required"}),
        ("content, call", {"tools": [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]}),
    ):
        given = trip(template, support, TURNS[label], {})
        assert given is not None
        if given.turn.content and (model.format.is_bare or "<|START_TEXT|>" in given.texts[0]):
            continue  # no call follows such content
        body = {"messages": [{"role": "user", "content": "x"}], "tools": list(TOOLS), **fields}
        rules = answer_rules(read_request(ChatRequest, body), model, given.prompts[0], None)
        assert rules.answer is not None
        grammar = normal_form(rules.answer.language.text()).text
        texts = [ending for text in given.texts for ending in (text, text.strip(), f"{text.strip()}\n")]
        assert any(is_taken(grammar, model, text) for text in texts), texts[1]


REQUIRED = (TURNS["two calls"], TURNS["a call with a list"], TURNS["a call without arguments"])


@pytest.mark.parametrize("name", ALL)
def test_a_required_call_is_read_back(name: str) -> None:
    """A call as the grammar wants it, also from models whose template prints values in another way."""
    template = Template(ALL[name])
    model = replace(tiny(), format=format_of(template, template.support()))
    syntax = model.format.call_syntax
    assert syntax is not None
    asked = [{"role": "user", "content": "x"}]
    prompt = template.render(asked, TOOLS)
    assert prompt is not None
    body = {"messages": asked, "tools": list(TOOLS), "tool_choice": "required"}
    rules = answer_rules(read_request(ChatRequest, body), model, prompt, None)
    assert rules.answer is not None and rules.parser_config is not None
    grammar = normal_form(rules.answer.language.text()).text
    for turn in REQUIRED:
        if syntax.is_single and len(turn.calls) > 1:
            continue
        text = written_calls(syntax, turn.calls).lstrip()
        text = text.removeprefix(">>>") if prompt.endswith(">>>") else text
        text = f"Hm.\n</think>\n\n{text}" if prompt.endswith("<think>\n") else text
        assert any(is_taken(grammar, model, whole) for whole in (text, f"{text}\n", text.rstrip()))
        parser = AnswerParser.of(rules.parser_config)
        found = turn_of([*parser.feed(text), *parser.finish()])
        assert is_same(replace(found, thought=""), turn)


NESTED_RULES = {
    "type": "object",
    "properties": {
        "plan": {
            "type": "object",
            "properties": {"way": {"type": "string", "enum": ["air", "rail"]}, "seats": {"type": "integer"}},
            "required": ["way"],
            "additionalProperties": False,
        },
        "stops": {"type": "array", "items": {"type": "string", "minLength": 2}},
    },
    "required": ["plan"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["JSON with other quotes", "values in tags, as deep as they go"])
def test_values_inside_of_values_follow_their_schema(name: str) -> None:
    template = Template(TEMPLATES[name])
    model = replace(tiny(), format=format_of(template, template.support()))
    tool = {"type": "function", "function": {"name": "book", "parameters": NESTED_RULES, "strict": True}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    rules = answer_rules(read_request(ChatRequest, body), model, "", None)
    assert rules.answer is not None and model.format.call_syntax is not None
    grammar = normal_form(rules.answer.language.text()).text
    for is_right, arguments in (
        (True, {"plan": {"way": "rail", "seats": 2}, "stops": ["Rome", "Oslo"]}),
        (True, {"plan": {"way": "air"}}),
        (False, {"plan": {"way": "road"}}),
        (False, {"plan": {"seats": 2}}),
        (False, {"plan": {"way": "air", "seats": "two"}}),
        (False, {"plan": {"way": "air"}, "stops": ["x"]}),
        (False, {"stops": []}),
    ):
        text = written_calls(model.format.call_syntax, [call("book", "a", **arguments)]).strip()
        assert any(is_taken(grammar, model, whole) for whole in (text, f"{text}\n")) == is_right, text


def test_an_answer_goes_on_behind_a_marker_that_the_prompt_begins() -> None:
    template = Template(STRANGE["recipients"])
    found = format_of(template, template.support())
    for text, pieces in (
        ("all\nHello", [Content("Hello")]),
        ("Hello", [Content("Hello")]),
        ("> Hello", [Content("> Hello")]),
        ('stop_all\n{}', [CallBegun("stop_all"), CallArguments("{}"), CallEnded()]),
        ('not a call {', [Content("not a call {")]),
        ('>>>stop_all [1]', [Content(">>>stop_all [1]")]),
    ):  # fmt: skip
        for step in (1, 100):
            parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS, prefill=">>>"))
            read = [piece for at in range(0, len(text), step) for piece in parser.feed(text[at : at + step])]
            assert joined([*read, *parser.finish()]) == pieces


def test_a_marker_that_a_model_repeats_is_read_once() -> None:
    template = Template(TEMPLATES["JSON in one tag"])
    found = format_of(template, template.support())
    parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
    text = '<|calls|> <|calls|>[{"name": "stop_all", "arguments": {}}]<|/calls|>'
    assert turn_of([*parser.feed(text), *parser.finish()]).calls == ({"name": "stop_all", "arguments": {}},)


@pytest.mark.parametrize(
    ("name", "marker"), [("calls as requests have them", "<|calls|>"), ("JSON alone, without a separator", "")]
)
def test_calls_that_no_marker_closes(name: str, marker: str) -> None:
    """Models leave out the list around several calls, or write a bracket too many."""
    template = Template(TEMPLATES[name])
    found = format_of(template, template.support())
    one, two = (json.dumps({"name": each, "arguments": {}}) for each in ("stop_all", "find_flight"))
    for text, num_calls, content in (
        (f"{one}, {two}", 2, ""),
        (f"{one}\n{two}", 2, ""),
        (f"{one}; {two}; ", 2, ""),
        (f"[{one}]\n[ {two}]", 2, ""),
        (f"{one}}}}}\n", 1, ""),
        (f"{one}}}, {two}]]", 2, ""),
        (f"{one} Done.", 1, "Done."),
        (f"{one}, and [so on]", 1, ", and [so on]"),
        (f'{one} {{"note": 1}}', 1, '{"note": 1}'),
        (f'{one}; {{"name": "other", "arguments": {{}}}}', 1, '; {"name": "other", "arguments": {}}'),
        (f"{one} [", 1, "["),
    ):
        for size in (1, 7, len(text)):
            parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
            whole = marker + text
            pieces = [piece for at in range(0, len(whole), size) for piece in parser.feed(whole[at : at + size])]
            read = turn_of(joined([*pieces, *parser.finish()]))
            names = [each["name"] for each in read.calls]
            assert (names, read.content) == (["stop_all", "find_flight"][:num_calls], content), text
    parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
    cut = turn_of([*parser.feed(f'{marker}{one}, {{"name": "find'), *parser.finish(is_cut=True)])
    assert (len(cut.calls), cut.content) == (1, "")


def test_calls_between_markers_read_the_same_however_they_arrive() -> None:
    template = Template(TEMPLATES["JSON in tags"])
    found = format_of(template, template.support())
    one, two = (json.dumps({"name": each, "arguments": {}}) for each in ("stop_all", "find_flight"))
    for text, num_calls in (
        (f"<call>{one}; {two}</call>", 2),
        (f"<call>[{one}]\n[{two}]</call>", 2),
        (f"<call>{one}}}]; </call>", 1),
        (f"<call>{one}}}\n", 1),
        (f"<call>{one};{' ' * 15}</call>", 1),
        (f"<call>{one}{' ' * 15}]</call>", 1),
        (f"<call>{one};{' ' * 15}{two}</call>", None),
        (f"<call>{one}{' ' * 17}</call>", None),
    ):
        reads = []
        for size in (1, 5, 7, len(text)):
            parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
            pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
            read = turn_of(joined([*pieces, *parser.finish()]))
            assert num_calls is None or (len(read.calls), read.content) == (num_calls, ""), (text, size)
            reads.append(read)
        assert all(read == reads[0] for read in reads), text


def test_markers_of_reasoning_that_a_template_cuts_out_of_earlier_turns() -> None:
    text = TEMPLATES["reasoning that is cut out of earlier turns"]
    for cut, syntax in (
        (text, ReasoningSyntax("[MULL]", "[/MULL]")),
        (text.replace("[/MULL]", "<|end_of_mull|>"), None),  # it does not name the begin
        (f"{{{{ '<|begin_of_mull|>'[:0] }}}}{text}".replace("[/MULL]", "<|end_of_mull|>"),
         ReasoningSyntax("<|begin_of_mull|>", "<|end_of_mull|>")),
        (text.replace("[-1]", "[0]"), None),  # what is cut out stands behind the text
        (text.replace("[/MULL]", "</call>"), None),  # it cuts out calls
    ):  # fmt: skip
        template = Template(cut)
        found = format_of(template, template.support())
        assert found.reasoning_syntax == syntax, cut
    template = Template(text)
    parser = AnswerParser(ParserConfig(format_of(template, template.support()), with_calls=False))
    read = turn_of([*parser.feed("[MULL]\nIt may rain.[/MULL]\nTake a coat."), *parser.finish()])
    assert read == Turn(content="Take a coat.", thought="It may rain.")


def test_the_end_of_a_turn_is_known_if_its_reasoning_is_not() -> None:
    thought = "{% if m.reasoning_content %}(( {{ m.reasoning_content }} )){% endif %}"
    template = Template(turns("", thought=thought))
    found = format_of(template, template.support())
    assert found.reasoning_name == "none"
    parser = AnswerParser(ParserConfig(found, with_calls=False))
    assert turn_of([*parser.feed("(( no )) Hello<|im_end|>\n"), *parser.finish()]) == Turn(content="(( no )) Hello")


def test_a_thought_that_a_template_prints_as_json_has_no_markers() -> None:
    """It prints the parts of the content as it was given them."""
    template = Template(turns("", content="{{ m.content if m.content is string else m.content | tojson }}"))
    derived = derive(template.render_turn, template.support())
    assert derived.reasoning is None


def test_special_tokens_around_arguments_are_shown_to_the_parser() -> None:
    tags = TEMPLATES["tags of arguments"].replace("<parameter=", "<|arg|>").replace("</parameter>", "<|/arg|>")
    for text in (tags, STRANGE["quotes of its own"].replace("\u00ab", "<|arg|>").replace("\u00bb", "<|/arg|>")):
        template = Template(text)
        found = format_of(template, template.support())
        assert found.tool_name == "derived"
        assert found.special_markers(("<|arg|>", "<|/arg|>", "<|other|>"), with_calls=True) == {"<|arg|>", "<|/arg|>"}


def test_a_special_token_may_stand_before_calls_without_a_marker() -> None:
    template = Template(TEMPLATES["JSON alone"])
    found = format_of(template, template.support())
    tokens = ("<|python_tag|>", "<|eot_id|>", "<|im_end|>")
    assert found.special_markers(tokens, with_calls=True) == {"<|python_tag|>"}
    one = '{"name": "stop_all", "arguments": {}}'
    for text, content in ((one, ""), (f"<|python_tag|>{one}", ""), (f"I stop.<|python_tag|>{one}", "I stop.")):
        parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
        assert turn_of([*parser.feed(text), *parser.finish()]) == Turn(
            ({"name": "stop_all", "arguments": {}},), content=content
        )


def is_taken(grammar: str, model: ServedModel, text: str) -> bool:
    matcher = LLMatcher(vocabulary(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(model.tokenizer.encode(text, False))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_deriving_is_bounded_and_the_same_in_the_processes_that_render(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEMPLATES["tags with types"]
    template, here = ChatTemplate(text, SPECIAL_TOKENS), Template(text)
    try:
        support = template.probe()
        assert template.derive(support) == derive(here.render_turn, support, template.literals.names)
        monkeypatch.setattr("inferd.server.text.template.DERIVING_S", -1.0)
        with pytest.raises(OvertimeError, match="all probes took longer than"):
            template.derive(support)
    finally:
        template.close()

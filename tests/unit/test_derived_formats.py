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
from inferd.server.schema.model import read as read_request
from inferd.server.text.model import ServedModel
from inferd.server.text.render_workers import OvertimeError
from inferd.server.text.template import ChatTemplate
from inferd.server.tools.answer_parser import AnswerParser, ParserConfig
from inferd.server.tools.derived.derive import derive
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.pieces import Content, joined
from tests.unit.derived_templates import STRANGE, TEMPLATES, turns
from tests.unit.round_trips import SPECIAL_TOKENS, TOOLS, TURNS, Template, format_of, tiny, tried, trip, vocabulary


@pytest.mark.parametrize("name", [*TEMPLATES, *STRANGE])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    report = tried(name, {**TEMPLATES, **STRANGE}[name])
    assert report.found.tool_name == "derived"
    wrong = {label: result for label, result in report.results.items() if result != "ok"}
    if report.found.is_bare:  # calls without a marker are a whole answer
        wrong = {label: result for label, result in wrong.items() if "content, call" not in label}
    assert wrong == {}
    assert len(report.results) >= 24


PROSE = (
    'Use <b>bold</b> and `[1, 2]`, or {"name": "x"}.\n\n```html\n<div><input name="a"></div>\n```\n'
    "A call(k='v') is no call, and [TODO] stays. 1 < 2 > 0."
)


@pytest.mark.parametrize("name", [*TEMPLATES, *STRANGE])
def test_text_that_is_no_call_stays_as_it_is(name: str) -> None:
    template = Template({**TEMPLATES, **STRANGE}[name])
    found = format_of(template, template.support())
    for size in (1, 7, len(PROSE)):
        parser = AnswerParser(ParserConfig(found, with_calls=True, tools=TOOLS))
        pieces = [piece for at in range(0, len(PROSE), size) for piece in parser.feed(PROSE[at : at + size])]
        assert joined([*pieces, *parser.finish()]) == [Content(PROSE)]


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
    if model.format.call_syntax is None:
        assert name == "JSON with other quotes", "only these calls have no grammar"
        return
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
        assert template.derive(support) == derive(here.render_turn, support)
        monkeypatch.setattr("inferd.server.text.template.DERIVING_S", -1.0)
        with pytest.raises(OvertimeError, match="all probes took longer than"):
            template.derive(support)
    finally:
        template.close()

"""Tools for chat templates that do not show them: what probing finds, and what is written instead."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from inferd.server.schema.notices import Notice
from inferd.server.text.template import SLOW, ChatTemplate, Conversation
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.builtin import CALLS
from inferd.server.tools.detect import AUTO, Clues, detect
from inferd.server.tools.fallback import SPLIT_CALLS, SPLIT_TEXT, Fallback, ToolSupport, tools_text
from inferd.server.tools.format import INDEX, CallSyntax
from inferd.server.tools.parser_config import ParserConfig

TURN = "<{{ m.role }}>{{ m.content }}"
ALTERNATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
)
NATIVE = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>CONTENT"
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}"
NO_SYSTEM = ALTERNATE + TURN + "{% endfor %}"
SYSTEM_UNREAD = "{% for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
ONE_BRANCH = "{% if messages[0].role == 'system' and tools %}{{ tools | tojson }}{% endif %}" + CHATML
TOOLS_ALONE = "{% if tools %}{{ tools | tojson }}{% endif %}" + NO_SYSTEM
LONG_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}"
    "{% endif %}{{ c.function.name + c.function.arguments }}{% endfor %}" + TURN + "{% endfor %}{{ tools }}"
)
NULL_ALONE = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{{ m.tool_calls | tojson }}{% else %}" + TURN + "{% endif %}{% endfor %}"
)
STRAY_TURN = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.content is not none %}" + TURN + "{% endif %}{% endfor %}"
)
ONE_CALL = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single') }}{% endif %}<call>{{ m.tool_calls[0].function | tojson }}{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
NONE_SHOWN = ToolSupport(tools=False, calls=False, results=False)

TEMPLATES: dict[str, tuple[str, ToolSupport]] = {
    "chatml": (CHATML, NONE_SHOWN),
    "no system": (NO_SYSTEM, replace(NONE_SHOWN, system=False)),
    "system unread": (SYSTEM_UNREAD, replace(NONE_SHOWN, system=False)),
    "tools in one branch alone": (ONE_BRANCH, NONE_SHOWN),
    "tools, and neither calls nor results": (TOOLS_ALONE, ToolSupport(calls=False, results=False, system=False)),
    "native": (NATIVE.replace("CONTENT", "{{ m.content }}"), ToolSupport()),
    "content is trimmed": (NATIVE.replace("CONTENT", "{{ m.content | trim }}"), ToolSupport()),
    "content is added to": (NATIVE.replace("CONTENT", "{{ m.content + '!' }}"), ToolSupport()),
    "calls as text with long ids": (LONG_IDS, ToolSupport()),
    "calls beside null alone": (NULL_ALONE, ToolSupport(empty="null", content_beside_calls=False)),
    "one call a turn and no content": (ONE_CALL, ToolSupport(content_beside_calls=False, several_calls=False)),
    "a stray turn for empty content": (STRAY_TURN, ToolSupport(empty="null")),
    "refuses everything": ("{{ raise_exception('no') }}", ToolSupport(calls=False, results=False, system=False)),
}  # fmt: skip

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL: dict[str, Any] = {
    "type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}
}  # fmt: skip
USER, ANSWER = {"role": "user", "content": "How is it there?"}, {"role": "assistant", "content": "Fine."}
RESULTS = [{"role": "tool", "tool_call_id": "abcdefghi", "content": text} for text in ("18 C", "19 C")]
TALK: list[dict[str, Any]] = [
    USER, {"role": "assistant", "tool_calls": [CALL, CALL]}, *RESULTS, ANSWER, {"role": "user", "content": "And now?"}
]  # fmt: skip
HERMES = CALLS["hermes"].syntax
assert HERMES is not None


def made(source: str, syntax: CallSyntax = HERMES) -> ChatTemplate:
    template = ChatTemplate(source, {})
    return template.with_fallback(Fallback(template.probe(), syntax))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_shows_is_found_out(name: str) -> None:
    source, shown = TEMPLATES[name]
    assert ChatTemplate(source, {}).probe() == shown


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "refuses everything"])
@pytest.mark.parametrize("said", ["", "I look."])
def test_every_template_shows_tools_calls_and_results(name: str, said: str) -> None:
    template = made(TEMPLATES[name][0])
    called = {**TALK[1], "content": said} if said else TALK[1]
    prompt = template.render(Conversation([TALK[0], called, *TALK[2:]], tools=[TOOL]))
    for text in (
        "get_weather",
        "Z",
        "18 C",
        "19 C",
        "Fine.",
        "And now?",
        "How is it there?",
        called.get("content", ""),
    ):
        assert text in prompt, prompt
    assert "None" not in prompt
    assert template.render(Conversation(TALK[:1], tools=[TOOL])).count("get_weather") == 1


@pytest.mark.parametrize(
    ("name", "said", "told"),
    [
        ("one call a turn and no content", "I look.", [SPLIT_TEXT, SPLIT_CALLS]),
        ("one call a turn and no content", "", [SPLIT_CALLS]),
        ("calls beside null alone", "I look.", [SPLIT_TEXT]),
        ("calls beside null alone", "", []),
        ("native", "I look.", []),
        ("chatml", "I look.", []),
    ],
)
def test_a_turn_that_is_split_is_told_once(name: str, said: str, told: list[str]) -> None:
    notices: list[Notice] = []
    talk = [TALK[0], {**TALK[1], "content": said}, *TALK[2:]]
    made(TEMPLATES[name][0]).render(Conversation([*talk, *talk[1:]], tools=[TOOL]), SLOW, notices)
    rule = "the model's chat template does not take the messages in this order: "
    expected = [Notice("template_order", rule + ", and ".join(told))] if told else []
    assert notices == expected


def test_the_text_is_that_of_hermes() -> None:
    prompt = made(CHATML).render(Conversation(TALK, tools=[TOOL]))
    system, _, rest = prompt.partition("<user>")
    assert system.startswith("<system># Tools\n\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert '<tool_call>\n{"name": "<name of the function>", "arguments": <arguments as a JSON object>}\n' in system
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    results = "<tool_response>\n18 C\n</tool_response>\n<tool_response>\n19 C\n</tool_response>"
    assert rest == f"How is it there?<assistant>{call}\n{call}<user>{results}<assistant>Fine.<user>And now?"


def test_a_system_message_of_the_callers_stays_first() -> None:
    for role in ("system", "developer"):
        talk = [{"role": role, "content": "Be brief."}, USER]
        assert made(CHATML).render(Conversation(talk, tools=[TOOL])).startswith("<system>Be brief.\n\n# Tools")
        assert made(CHATML).render(Conversation(talk)) == "<system>Be brief.<user>How is it there?"
    assert made(NO_SYSTEM).render(Conversation([USER], tools=[TOOL])).endswith("\n\nHow is it there?")


def test_a_result_and_what_the_user_says_behind_it_are_one_turn() -> None:
    talk = [*TALK[:4], {"role": "user", "content": "Which is it?"}]
    assert made(NO_SYSTEM).render(Conversation(talk)).endswith("19 C\n</tool_response>\nWhich is it?")
    assert made(NO_SYSTEM).render(Conversation([USER, USER])).endswith("How is it there?\nHow is it there?")


def test_tools_that_are_not_wanted_are_not_told() -> None:
    assert "# Tools" not in made(CHATML).render(Conversation(TALK))


def test_a_turn_is_split_where_the_template_shows_one_call_alone() -> None:
    """Each result follows its call, even if the client sent them in another order."""
    calls = [{**CALL, "id": name, "function": {**CALL["function"], "name": name}} for name in ("first", "second")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("other", "second", "first")]
    talk = [USER, {"role": "assistant", "content": "I look.", "tool_calls": calls}, *results, ANSWER]
    prompt = made(ONE_CALL).render(Conversation(talk))
    order = ("I look.", "<call>", '"first"', "of first", "<call>", '"second"', "of second", "of other", "Fine.")
    at = 0
    for text in order:
        at = prompt.index(text, at) + 1


def test_messages_are_left_as_they_were() -> None:
    before = json.dumps(TALK)
    made(CHATML).render(Conversation(TALK, tools=[TOOL]))
    assert json.dumps(TALK) == before


@pytest.mark.parametrize("name", [name for name, calls in CALLS.items() if calls.syntax is not None])
def test_calls_are_written_as_they_are_read(name: str) -> None:
    """Earlier calls are rendered in the format that the prompt asks for, and the parser reads them."""
    syntax = CALLS[name].syntax
    assert syntax is not None
    talk = made(CHATML, syntax).render(Conversation(TALK[:2], tools=[TOOL]))
    written = talk.partition("<assistant>")[2]
    form = detect(Clues(), name, "harmony" if name == "harmony" else "none")
    tool: Any = TOOL
    pieces = (parser := AnswerParser(ParserConfig(form, with_calls=True, tools=(tool,)))).feed(
        written
    ) + parser.finish()
    arguments = [piece.text for piece in pieces if type(piece).__name__ == "CallArguments"]
    assert [json.loads(text) for text in arguments] == [{"city": "Zürich"}] * 2, written
    assert f"<name of the function>{syntax.between.replace(INDEX, '0')}" in tools_text(syntax, [tool])


def test_the_format_is_that_of_the_text_unless_a_setting_says_otherwise() -> None:
    mistral = Clues(chat_template="[INST]", tokens=["[TOOL_CALLS]"], model_type="mistral", shows_tools=False)
    assert detect(mistral).tool_name == "hermes"
    assert detect(mistral, "mistral").tool_name == "mistral"
    assert detect(replace(mistral, shows_tools=True), AUTO).tool_name == "mistral"


def test_many_results_are_joined_once() -> None:
    """Each character is copied a bounded number of times: 20,000 results in a row become one text."""

    class Counted(str):
        num_joins = 0

        def __format__(self, spec: str) -> str:
            Counted.num_joins += 1
            return super().__format__(spec)

    fallback = Fallback(NONE_SHOWN, HERMES)
    results = [{"role": "tool", "tool_call_id": "x", "content": Counted("y" * 10)}] * 20_000
    (told,) = fallback.messages(results, None)
    assert Counted.num_joins == 20_000
    assert len(str(told["content"])) == 20_000 * (10 + 1 + len("<tool_response>\n\n</tool_response>")) - 1

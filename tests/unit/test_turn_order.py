"""If a chat template refuses the order of messages, it gets another form of them, and a notice says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.schema.notices import Notice
from inferd.server.text.render_wire import Limits
from inferd.server.text.render_workers import OvertimeError
from inferd.server.text.template import SLOW, ChatTemplate, Conversation
from inferd.server.text.turn_order import ABOUT_FORMS, forms_of

Message = Mapping[str, object]

SHOWN = "[{{ m.role }}{% if m.content %}: {{ m.content }}{% endif %}{% for c in m.tool_calls %} {{ c.id }}{% endfor %}]"
ANY = "{% for m in messages %}" + SHOWN + "{% endfor %}"
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% set ns = namespace(i=0) %}{% for m in turns %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% elif m.role == 'system' %}{{ raise_exception('no late system') }}{% endif %}"
    "{% endfor %}" + ANY
)
"""Mistral's rule: calls and results do not count."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
"""Gemma 2's."""
FIRST_SHOWN = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}"
"""MiniMax's, SmolLM3's and others'."""
LAST_SHOWN = (
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    "{% for m in messages %}{% if m.role != 'system' %}" + SHOWN + "{% endif %}{% endfor %}"
)
LAST_SHOWN = "{% set ns = namespace(s='') %}" + LAST_SHOWN
"""DeepSeek R1's."""


def talk(spelt: str) -> list[Message]:
    """Messages by the first letters of their roles: "s1" is a system message of that text, "c1" calls, "r1" is a
    result."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    made: list[Message] = []
    for word in spelt.split():
        if word[0] == "c":
            function = {"name": "f", "arguments": {}}
            made.append({"role": "assistant", "tool_calls": [{"type": "function", "id": word, "function": function}]})
        elif word[0] == "r":
            made.append({"role": "tool", "tool_call_id": "c" + word[1:], "content": word})
        else:
            made.append({"role": roles[word[0]], "content": word})
    return made


def rendered(template: str, messages: Sequence[Message]) -> tuple[str, str]:
    """(prompt, form that the notice names)."""
    notices: list[Notice] = []
    text = ChatTemplate(template, {}).render(Conversation(messages), SLOW, notices)
    assert [notice.name for notice in notices] in ([], ["template_order"])
    return text, notices[0].text.partition(": ")[2] if notices else ""


@pytest.mark.parametrize(
    ("template", "spelt", "prompt", "form"),
    [
        (ANY, "s1 u1 u2 s2 a1", "[system: s1][user: u1][user: u2][system: s2][assistant: a1]", ""),
        (ALTERNATING, "s1 u1 a1 u2", "[system: s1][user: u1][assistant: a1][user: u2]", ""),
        (ALTERNATING, "s1 u1 u2", "[system: s1][user: u1\nu2]", "joined"),
        (ALTERNATING, "s1 d2 u1", "[system: s1\nd2][user: u1]", "joined"),
        (ALTERNATING, "u1 a1 a2 u2", "[user: u1][assistant: a1\na2][user: u2]", "joined"),
        (ALTERNATING, "s1 u1 a1 s2 u2", "[system: s1][user: u1][assistant: a1][user: s2\nu2]", "late_system_as_user"),
        (FIRST_SHOWN, "s1 u1 a1 s2", "[system: s1][user: u1][assistant: a1][user: s2]", "late_system_as_user"),
        (LAST_SHOWN, "s1 u1 a1 s2 u2", "s1[user: u1][assistant: a1][user: s2\nu2]", "late_system_as_user"),
        (NO_SYSTEM, "s1 u1 a1", "[user: s1\nu1][assistant: a1]", "no_system"),
        (ALTERNATING, "u1 c1 r1 u2", "[user: u1][assistant c1][tool: r1\nu2]", "alternating"),
        (ALTERNATING, "u1 c1 r1 s2 u2", "[user: u1][assistant c1][tool: r1\ns2\nu2]", "alternating"),
        (
            ALTERNATING,
            "u1 a1 c1 r1 a2 c2 r2 u2",
            "[user: u1][assistant c1][tool: r1][assistant: a1\na2][assistant c2][tool: r2][user: u2]",
            "alternating",
        ),
    ],
)
def test_a_template_gets_a_form_that_it_takes(template: str, spelt: str, prompt: str, form: str) -> None:
    assert rendered(template, talk(spelt)) == (prompt, ABOUT_FORMS.get(form, ""))


def test_no_form_drops_a_text_or_a_call() -> None:
    for words in product(("s", "u", "a", "c", "r"), repeat=5):
        messages = talk(" ".join(f"{word}{i}" for i, word in enumerate(words)))
        before, seen = json.dumps(messages), [messages]
        for name, form in forms_of(messages):
            assert name in ABOUT_FORMS and form not in seen
            seen.append(form)
            written = json.dumps(form)
            assert all(f"{word}{i}" in written for i, word in enumerate(words)), (messages, form)
        assert json.dumps(messages) == before


def test_the_templates_own_refusal_stands_if_no_form_helps() -> None:
    words = "{{ raise_exception('first ' ~ messages|length) }}"
    with pytest.raises(RequestError, match="does not accept these messages: first 3"):
        rendered(words, talk("u1 u2 s1"))
    with pytest.raises(RequestError, match="must alternate"):
        rendered(ALTERNATING, talk("a1 u1"))


def test_a_text_that_no_form_shows_changes_nothing() -> None:
    upper = "{% for m in messages %}[{{ m.content|upper }}]{% endfor %}"
    assert rendered(upper, talk("s1 u1 s2")) == ("[S1][U1][S2]", "")


def test_all_forms_together_have_the_time_of_one_rendering() -> None:
    long = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}" + long, {})
    with pytest.raises(OvertimeError):
        template.render(Conversation(talk("u1 u2 u3")), Limits(cpu_s=0.2))


def test_test_messages_are_rendered_as_they_are() -> None:
    """Whether a template shows system messages is asked, not whether some form does."""
    assert ChatTemplate(ANY, {}).probe().system
    assert not ChatTemplate(NO_SYSTEM, {}).probe().system

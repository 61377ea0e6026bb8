"""Chat templates: rendered as transformers renders them, with refusals in the template's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.engine.api.errors import ModelError, RequestError
from inferd.server.text import rendering
from inferd.server.text.render_wire import MAX_RENDERED_CHARS, RenderQuestion
from inferd.server.text.template import SLOW, ChatTemplate, Conversation, conversation_of

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
TALK = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"properties": {}}}}
ECHO = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.mark.parametrize("tools", [None, (TOOL,)])
@pytest.mark.parametrize("asks", [True, False])
def test_text_is_that_of_transformers(tools: tuple[dict[str, object], ...] | None, asks: bool) -> None:
    theirs = TokenizersBackend.from_pretrained(MODEL_PATH)
    ours = ChatTemplate(theirs.chat_template, theirs.special_tokens_map)
    expected = theirs.apply_chat_template(
        list(TALK), tools=list(tools) if tools else None, add_generation_prompt=asks, tokenize=False
    )
    assert ours.render(conversation_of(TALK, tools, asks, None, None)) == expected


def test_a_message_can_be_continued() -> None:
    talk = (*TALK, {"role": "assistant", "content": "Well, "})
    assert ChatTemplate(ECHO, {}).render(conversation_of(talk, None, None, True, None)).endswith("[assistant]Well, ")


def test_a_developer_speaks_as_the_system_where_the_template_knows_none() -> None:
    talk = ({"role": "developer", "content": "x"},)
    assert ChatTemplate(ECHO, {}).render(Conversation(talk)) == "[system]x>"
    knows = ECHO + "{# developer #}"
    assert ChatTemplate(knows, {}).render(Conversation(talk)) == "[developer]x>"


@pytest.mark.parametrize("refuses_two", [False, True])
def test_reasoning_and_content_before_a_call_are_one_text_only_if_they_must(refuses_two: bool) -> None:
    refusal = "{% if m.content and m.thinking %}{{ raise_exception('one text') }}{% endif %}" if refuses_two else ""
    thought = "{% if m.role == 'assistant' %}" + refusal + "({{ m.thinking }}){% endif %}"
    text = "{% for message in messages %}{% set m = message %}" + thought + "{{ m.content }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "said", "reasoning_content": "thought", "tool_calls": [call]}
    template = ChatTemplate(text + "{# message.thinking #}", {})
    written = template.render(Conversation(({"role": "user", "content": "hi."}, said)))
    assert written == ("hi.()thought\nsaid" if refuses_two else "hi.(thought)said")


def test_several_templates() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert both.render(Conversation(TALK)) == "plain"
    assert both.render(Conversation(TALK, tools=(TOOL,))) == "tools"
    with pytest.raises(ModelError, match="no default"):
        ChatTemplate({"rag": "x"}, {})


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_the_tools_template_is_parsed_too() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate({"default": "x", "tool_use": "\n{% if %}"}, {})


@pytest.mark.parametrize("text", ["{{ " + "(" * 5000, "{{ " + "9" * 5000 + " }}"])
def test_what_the_parser_itself_cannot_bear_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="does not parse"):
        ChatTemplate(text, {})


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    """In the file it stops the start. As an escape of a literal it is seen when it is rendered."""
    with pytest.raises(ModelError, match="no Unicode text"):
        ChatTemplate("\ud800", {})
    with pytest.raises(RequestError, match="surrogates not allowed"):
        ChatTemplate("{{ '\\ud800' }}", {}).render(Conversation(TALK))


@pytest.mark.timeout(30)
def test_the_start_runs_nothing_of_the_template() -> None:
    """It would take an hour to render."""
    ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ["{{ 9 ** 9 ** 9 }}", "{% set x = messages | length ** 9 %}"])
def test_a_template_raises_nothing_to_a_power(text: str) -> None:
    """The first has only constants. Compiling would evaluate it for hours, in one call that cannot be interrupted."""
    with pytest.raises(ModelError, match="raises to a power in line 1"):
        ChatTemplate(text, {})


@pytest.mark.parametrize(
    "text", ["{% generation %}x{% endgeneration %}", "{% for m in messages %}{% break %}{% endfor %}"]
)
def test_the_tags_of_transformers_parse(text: str) -> None:
    ChatTemplate(text, {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "accept these messages"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content + 1 }}", "accept these messages"),
    ],
)
def test_what_a_template_refuses_is_a_400_in_its_own_words(template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(template, {}).render(Conversation(TALK))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")


def test_arguments_of_calls_are_what_the_template_expects() -> None:
    """Templates that print arguments get an object; templates that join them to text get a text."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "\u00e9"}}}
    talk = [{"role": "assistant", "tool_calls": [call]}]
    for shown, text in (("arguments | tojson", '{"a": "\u00e9"}'), ("name + arguments", 'f{"a": "\u00e9"}')):
        shown = shown.replace("name", "call.function.name").replace("arguments", "call.function.arguments")
        template = f"{{% for call in messages[0].tool_calls %}}{{{{ {shown} }}}}{{% endfor %}}"
        assert ChatTemplate(template, {}).render(Conversation(talk)) == text
    with pytest.raises(RequestError, match="concatenate"):
        ChatTemplate("{{ messages[0].role + 1 }}", {}).render(Conversation(talk))


CALLS = "{% for m in messages %}{% for call in m.tool_calls %}<{{ call.function.name }} SHOWN>{% endfor %}{% endfor %}"
AS_WRITTEN = {
    "JSON": "{{ call.function.arguments | tojson }}",
    "JSON of the whole call": "{{ call.function | tojson }}",
    "JSON or text": "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}",
    "joined to text": "{{ '' + call.function.arguments }}",
}
"""How templates show arguments, whatever they are."""
AS_OBJECT = {
    "items": "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "its items": "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "refuses a text": "{% if call.function.arguments is not mapping %}{{ raise_exception('an object!') }}{% endif %}"
    "{% for k in call.function.arguments %}{{ k }}={{ call.function.arguments[k] }};{% endfor %}",
    "leaves a text out": "{% if call.function.arguments is mapping %}"
    "{% for k in call.function.arguments %}{{ k }}={{ call.function.arguments[k] }};{% endfor %}{% endif %}",
    "takes a text apart": "{% for k in call.function.arguments %}{{ k }}={{ call.function.arguments[k] }};{% endfor %}",
}
"""How templates show the keys of an object."""
NO_OBJECTS = (
    '{"city": "Par',
    '{"city',
    "{",
    "[1]",
    '"x"',
    "1e400",
    "NaN",
    " ",
    '{"a": 1, "a": 2}',
    "<|im_end|>",
    "\u00e9\n",
)


def shown(template: str, *arguments: object) -> str:
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    made = ChatTemplate(CALLS.replace("SHOWN", template), {})
    return made.render(Conversation([{"role": "assistant", "content": "", "tool_calls": calls}]))


@pytest.mark.parametrize("way", AS_WRITTEN)
def test_arguments_that_are_no_object_are_shown_as_they_were_written(way: str) -> None:
    text = shown(AS_WRITTEN[way], *NO_OBJECTS)
    objects = ('{"name": "f", "arguments": %s}' if "whole" in way else "%s").__mod__
    assert text == "".join(f"<f {objects(each)}>" for each in NO_OBJECTS)
    # An object beside them is shown as ever.
    written = [objects(each) for each in ('{"a": "\u00e9"}', "[1")]
    assert shown(AS_WRITTEN[way], {"a": "\u00e9"}, "[1") == f"<f {written[0]}><f {written[1]}>"


@pytest.mark.parametrize("way", AS_OBJECT)
def test_a_template_of_objects_gets_as_much_of_one_as_was_written(way: str) -> None:
    for text, expected in {
        '{"city': "", '{"city": "Par': "city=Par;", '{"city": "Paris", "days": [1, 2': "city=Paris;days=[1, 2];",
        "[1]": "arguments=[1];", "1e400": "arguments=1e400;", '{"a": 1e400}': 'arguments={"a": 1e400};',
        "{" * 500: f"arguments={'{' * 500};", '{"a": "\\ud800"}': 'arguments={"a": "\\ud800"};',
    }.items():  # fmt: skip
        assert shown(AS_OBJECT[way], text) == f"<f {expected}>"
    assert shown(AS_OBJECT[way], {"a": 1}, '{"b": "x') == "<f a=1;><f b=x;>"


def test_texts_that_a_template_repeats_are_counted() -> None:
    template = "{% for i in range(70) %}{{ call.function.arguments }}{% endfor %}"
    assert shown(template, "x" * 100).count("x") == 7_000
    with pytest.raises(RequestError, match="characters"):
        shown(template, "x" * 2**20)


def test_a_long_complaint_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ raise_exception('x' * 100000) }}", {}).render(Conversation(TALK))
    assert len(caught.value.message) < 300


def test_switches_reach_the_template_and_nothing_else_does() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(Conversation(TALK, kwargs={"enable_thinking": False})) == "False<s>"
    for name in ("chat_template", "messages", "tools", "tokenize", "continue_final_message"):
        with pytest.raises(RequestError, match=f"chat_template_kwargs.{name}"):
            template.render(Conversation(TALK, kwargs={name: "{{ 1 }}"}))


SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@pytest.mark.parametrize("name", [*SPECIAL, "image_token", "raise_exception", "strftime_now", "tools", "messages"])
def test_a_callers_switch_overrides_nothing_of_the_templates_own(name: str) -> None:
    """Holds even if the tokenizer lacks the token: another one in its place would be another prompt format."""
    for tokens in ({}, {name: "<own>"}):
        template = ChatTemplate(f"[{{{{ {name} }}}}]", tokens if name not in ("tools", "messages") else {})
        if name == "image_token" and not tokens:
            assert template.render(Conversation(TALK, kwargs={name: "x"})) == "[x]"
            continue
        with pytest.raises(RequestError, match=f"chat_template_kwargs.{name}") as caught:
            template.render(Conversation(TALK, kwargs={name: "<callers>"}))
        assert caught.value.code == "unsupported_parameter"


def test_the_sandbox_holds() -> None:
    """A checkpoint is not trusted: its template must not reach Python."""
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        template = ChatTemplate(attack, {})
        with pytest.raises(RequestError):
            template.render(Conversation(TALK))


EACH = "{% for n in messages %}{{ n.content }}{% endfor %}"
GREEDY = {
    "a loop in a loop": "{% for m in messages %}" + EACH + "{% endfor %}",
    "a macro": "{% macro all() %}" + EACH + "{% endmacro %}{% for m in messages %}{{ all() }}{% endfor %}",
    "what a macro gives is dropped": "{% macro all() %}"
    + EACH
    + "{% endmacro %}{% for m in messages %}{% set x = all() %}{% endfor %}done",
    "a block that is set": "{% for m in messages %}{% set x %}" + EACH + "{% endset %}{% endfor %}done",
    "a filtered block": "{% for m in messages %}{% filter trim %}" + EACH + "{% endfilter %}{% endfor %}",
    "a caller": "{% macro say() %}{{ caller() }}{% endmacro %}{% for m in messages %}{% call say() %}"
    + EACH
    + "{% endcall %}{% endfor %}",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_makes_too_much_of_its_messages_is_refused_before_it_has(name: str) -> None:
    """10,000 messages that share a text of 200 kB make 20 TB, in the output or in variables."""
    talk = ({"role": "user", "content": "x" * 200_000},) * 10_000
    program, question = ChatTemplate(GREEDY[name], {}).program, RenderQuestion(SLOW, talk, None, None, True, False, {})
    with pytest.raises(ValueError, match=f"more than {MAX_RENDERED_CHARS} characters of them; send fewer"):
        rendering.render(program, question)


def test_each_rendering_has_all_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders the allowed maximum repeatedly in one process, also after a refusal."""
    monkeypatch.setattr(rendering, "MAX_RENDERED_CHARS", 7)
    program = ChatTemplate(EACH, {}).program
    whole, over = ([{"role": "user", "content": "x" * num_chars}] for num_chars in (7, 8))
    for _ in range(3):
        assert rendering.render(program, RenderQuestion(SLOW, whole, None, None, True, False, {})) == "x" * 7
        with pytest.raises(ValueError, match="more than 7 characters"):
            rendering.render(program, RenderQuestion(SLOW, over, None, None, True, False, {}))


def test_the_longest_text_comes_back_whole() -> None:
    template = ChatTemplate("{% for n in messages %}{{ n.content }}{{ n.content }}{% endfor %}", {})
    half = "x" * (MAX_RENDERED_CHARS // 2)
    assert template.render(Conversation(({"role": "user", "content": half},))) == half * 2
    with pytest.raises(RequestError, match=f"more than {MAX_RENDERED_CHARS} characters of them; send fewer") as caught:
        template.render(Conversation(({"role": "user", "content": half + "x"},)))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")

"""Grammars, schemas and templates that brought other servers down. Each is refused with a message, or served and freed.

Most inputs are from published advisories and reports, whose names stand beside them. `e2e/test_structured` tests the
cost of a grammar for other streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError, RequestError
from inferd.engine.api.wire.grammar_check import Verdict
from inferd.engine.grammar import thread as thread_module
from inferd.engine.grammar.thread import GrammarThread
from inferd.server.structured import checker as checker_module
from inferd.server.structured.checker import GrammarChecker
from inferd.server.structured.language import pattern
from inferd.server.structured.schema import MAX_ENUM_ENTRIES, MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, read_schema
from inferd.server.text.template import ChatTemplate, Conversation
from tests.e2e.conftest import Daemon, daemon

__all__ = ["daemon"]

ENDLESS = {"type": "integer", "multipleOf": 9_999_991}
"""A grammar for which llguidance needs minutes."""


def constrained(**way: Any) -> dict[str, Any]:
    return {"structured_outputs": way}


def tool(**schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }


def text(**schema: Any) -> dict[str, Any]:
    return constrained(json={"type": "string", **schema})


def tags(*structures: dict[str, Any], triggers: list[str]) -> dict[str, Any]:
    return {
        "response_format": {"type": "structural_tag", "structures": list(structures), "triggers": triggers},
        "max_tokens": 4,
    }


def nested(keyword: str, levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {keyword: [schema, {"type": "string"}]}
    return schema


def choosing(levels: int) -> dict[str, Any]:
    """2^levels readings of one value."""
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"items": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def tags_in_tags(kind: str, levels: int = 15, num_triggers: int = 2) -> dict[str, Any]:
    """Each tag begins with all of its triggers, or stands before and after a separator: 2^levels copies of one tag."""
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(levels):
        inner = {"begin": "<" * num_triggers, "content": form, "end": ">"}
        form = {"type": kind, "tags": [inner]}
        if kind == "triggered_tags":
            form["triggers"] = ["<" * i for i in range(1, num_triggers + 1)]
        else:
            form["separator"] = ", "
    return {"response_format": {"type": "structural_tag", "format": form}, "max_tokens": 4}


def referring_tool(count: int) -> dict[str, Any]:
    """Parameters that all refer to one long definition."""
    asked = tool()
    properties = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(count)}
    parameters = {"type": "object", "properties": properties, "$defs": {"d": {"enum": ["x" * 30_000]}}}
    asked["tools"][0]["function"]["parameters"] = parameters
    return asked


PARENS = 30_000
BOTTOM = "\\U0010FFFF-\\U00000000"

REFUSED: dict[str, dict[str, Any]] = {
    # vllm#17313: an invalid expression killed the server; so did an invalid schema.
    "an unknown type": constrained(json={"properties": {"reason": {"type": "stsring"}}}),
    "an unknown type in a text": constrained(json='{"properties":{"reason":{"type":"stsring"}}}'),
    "an open class": constrained(regex="["),
    "nothing to repeat": constrained(regex="*"),
    # rust-lang/regex#465.
    "flags that are repeated": constrained(regex="(?i)(?i)*?"),
    # Nested brackets exhaust the stack of a recursive parser.
    "open brackets in GBNF": constrained(grammar="root ::= " + "(" * PARENS),
    "brackets in Lark": constrained(grammar="start: " + "(" * PARENS + '"a"' + ")" * PARENS),
    "optional brackets in Lark": constrained(grammar="start: " + "[" * PARENS + '"a"' + "]" * PARENS),
    "brackets in an expression": constrained(regex="(" * PARENS + "a" + ")" * PARENS),
    "classes in classes": constrained(regex="[" * PARENS),
    # llama.cpp#19008, llama.cpp#25283.
    "brackets in a pattern": text(pattern="(" * 20_000 + ")" * 20_000),
    "open brackets in a pattern": text(pattern="(" * 20_000),
    "a deep choice that must be one": constrained(json=nested("oneOf", 28)),
    "a deep contradiction": constrained(json=nested("allOf", 28)),
    # A reference is never fetched, whatever it names.
    "a reference to the network": constrained(json={"$ref": "http://169.254.169.254/latest/meta-data"}),
    "a reference to a file": constrained(json={"$ref": "file:///etc/passwd"}),
    "a reference to nothing": constrained(json={"$ref": "#/nope"}),
    "an import of a file": constrained(grammar='%import ../../etc/passwd\nstart: "a"'),
    # Numbers that overflow what reads them.
    "a multiple of nothing": constrained(json={"type": "integer", "multipleOf": 0}),
    "an empty range": constrained(json={"type": "integer", "minimum": 10, "maximum": 1}),
    "a negative length": text(maxLength=-1),
    "a count of 11 digits": constrained(regex="a{99999999999}"),
    "a bound of 20 digits": constrained(grammar="start[max_tokens=99999999999999999999]: /a+/"),
    "token ids beyond the vocabulary": constrained(grammar="start: <[0-4294967295]>"),
    "token ids backwards": constrained(grammar="start: <[5-1]>"),
    "no such special token": constrained(grammar='start: <|nope|> "a"'),
    "letters backwards": constrained(grammar=f"root ::= [{BOTTOM}]"),
    # What allows nothing, or never ends.
    "an enum of nothing": constrained(json={"enum": []}),
    "no value": constrained(json=False),
    "types of no schema": constrained(json={"type": ["x", 1, None]}),
    "a rule that is itself": constrained(grammar="root ::= root"),
    "rules in a circle": constrained(grammar="root ::= a\na ::= b\nb ::= a"),
    "terminals in a circle": constrained(grammar="start: A\nA: B\nB: A"),
    "the empty text for ever": constrained(grammar='root ::= ""*'),
    "a rule that is not there": constrained(grammar="root ::= nope"),
    "a class of nothing": constrained(regex="[^\\x00-\\U0010FFFF]"),
    "no choice": constrained(choice=[]),
    # What takes minutes.
    "an endless schema in Lark": constrained(grammar="start: %json " + json.dumps(ENDLESS)),
    "200 levels in Lark": constrained(grammar="start: %json " + '{"items":' * 200 + "{}" + "}" * 200),
    "30 expressions at once": constrained(grammar="start: A\nA: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(30))),
    "twice 65,535 of anything": constrained(regex=".{0,65535}.{0,65535}"),
    "6,000 alternatives": constrained(grammar="start: " + "|".join(f'"a{i}"' for i in range(6_000))),
    "tags of nothing": tags(triggers=[]),
    "a tag that begins with nothing": tags({"begin": "", "schema": {}, "end": ""}, triggers=[""]),
    # A small body whose grammar would be long.
    "250 triggers of a tag": tags_in_tags("triggered_tags", 16, 250),
    "300 kB of tags": {
        "response_format": {
            "type": "structural_tag",
            "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "x" * 60_000}] * 5},
        },
    },
    "128 tools of 60 kB": {
        "tools": [
            {**strict, "function": {**strict["function"], "name": f"f{i}"}}
            for i in range(128)
            for strict in tool(type="string", description="x" * 60_000)["tools"]
        ],
        "tool_choice": "required",
    },
    # Numbers that no double holds, alone and in pairs.
    **{
        f"{keyword} of 401 digits": constrained(json={"type": "number", keyword: 10**400, "maximum": 10**400})
        for keyword in ("minimum", "exclusiveMinimum", "multipleOf", "const", "default")
    },
    "exclusive bounds of 401 digits": constrained(
        json={"type": "number", "exclusiveMinimum": -(10**400), "exclusiveMaximum": 10**400}
    ),
    "a bound of 401 digits in a tool": tool(type="number", exclusiveMinimum=10**400),
    "a bound of 401 digits in a tag": tags(
        {"begin": "<a>", "schema": {"maximum": 10**400}, "end": "</a>"}, triggers=["<a"]
    ),
    "a bound of 401 digits in a text": constrained(json=json.dumps({"exclusiveMaximum": 10**400})),
    "a reference to itself": constrained(json={"$ref": "#"}),
    # A template of the caller's, and one smuggled in by its arguments.
    "a template": {"chat_template": "{% for i in range(999999999) %}{% endfor %}"},
    "a smuggled template": {"chat_template_kwargs": {"chat_template": "x"}},
    "a smuggled function": {"chat_template_kwargs": {"raise_exception": "x"}},
    "a smuggled token": {"chat_template_kwargs": {"bos_token": "x"}},
    "smuggled messages": {"chat_template_kwargs": {"messages": []}},
    "an argument of rendering": {"chat_template_kwargs": {"tokenize": True}},
    "an argument called self": {"chat_template_kwargs": {"self": 1}},
    # Tensors from strangers.
    "embeddings": {"prompt_embeds": "gASVJg=="},
}

SERVED: dict[str, dict[str, Any]] = {
    # vLLM GHSA-vrq3-r879-7m65: a type and an expression of a tool killed the worker. They are left to the model.
    "a tool's unknown type": tool(type="something"),
    "a tool's open class": tool(type="string", pattern="["),
    "a tool's open count": tool(type="string", pattern="\\d{"),
    # llguidance reads numbers as doubles, and keeps a state for each remainder.
    "a range of 300 digits": constrained(json={"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "a range of all numbers": constrained(json={"type": "number", "minimum": -1e308, "maximum": 1e308}),
    "a schema's own schema": constrained(json={"$schema": "http://127.0.0.1:1/s", "type": "integer"}),
    "the bounds of a double": constrained(json={"type": "number", "maximum": 1.7e308, "exclusiveMinimum": 0}),
    "a multiple of 1e-300": constrained(json={"type": "number", "multipleOf": 1e-300}),
    "an endless schema": constrained(json=ENDLESS),
    "an endless schema in a tag": tags({"begin": "<a>", "schema": ENDLESS, "end": "</a>"}, triggers=["<a"]),
    # outlines-core#96: a segmentation fault.
    "a schema that holds itself": constrained(json={"properties": {"c": {"type": "array", "items": {"$ref": "#"}}}}),
    "tags in tags, triggered": tags_in_tags("triggered_tags"),
    "tags in tags, with a separator": tags_in_tags("tags_with_separator"),
    "a tool of 40 references": referring_tool(40),
    "bounds that overwrite each other": constrained(
        json={"type": "number", "exclusiveMinimum": 0, "minimum": 0.4, "maximum": 0.5}
    ),
    # xgrammar#207: another.
    "alternatives at the edges of a pattern": text(pattern="^(\\{[a-z\\-]+\\})|([a-z\\-]+)$"),
    "2^30 readings": constrained(json=choosing(30)),
    "a deep choice": constrained(json=nested("anyOf", 28)),
    "a rule that begins with itself": constrained(grammar='root ::= root "a" | "b"'),
    "a thousand million letters": constrained(grammar='root ::= "a"{1000000000}'),
    "10^18 items": constrained(json={"type": "array", "minItems": 10**18}),
    "10^9 letters": text(minLength=10**9),
    "an expression of 64 KiB": constrained(regex="a" * 65_536),
    "4,096 choices": constrained(choice=[str(i) for i in range(4_096)]),
    "two loops": constrained(regex="(x+x+)+y"),
    "2^25 states": constrained(regex="(a|b)*a(a|b){25}"),
    "settings of the compiler": constrained(
        json={"type": "object", "x-guidance": {"whitespace_pattern": "(a{1,99})+"}}
    ),
    "a temperature of its own": constrained(grammar="start[temperature=99]: /a+/"),
    "names of Python": {"chat_template_kwargs": {"__class__": 1, "loop": 2, "varargs": 3, "caller": 4}},
    "3,000 switches": {"chat_template_kwargs": {f"k{i}": [i] for i in range(3_000)}},
    # vLLM GHSA-hpv8-x276-m59f: placeholders of images that are not there.
    "tokens of images": {"messages": [{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}]},
    "a template as a text": {"messages": [{"role": "user", "content": "{{ ''.__class__ }}{% for a in range(9**9) %}"}]},
}


BY_TIME = {"twice 65,535 of anything", "30 expressions at once"}
"""Grammars that are refused if they take too long. A fast machine serves them."""


MOST_PATIENCE_S = 90.0
"""Seconds for which a request is sent again. On a busy machine 30 checks of 1 s take longer than on a quiet one."""


def verdict_on(daemon: Daemon, body: dict[str, Any]) -> httpx.Response:
    """The answer. The request is sent again if the server had no time for the grammar, as on a busy machine."""
    answer = httpx.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)
    until_s = time.monotonic() + MOST_PATIENCE_S
    while answer.status_code == 429 and time.monotonic() < until_s:
        assert_no_verdict(answer)
        time.sleep(int(answer.headers["Retry-After-Ms"]) / 1_000)
        answer = httpx.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)
    return answer


def assert_no_verdict(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and error["param"] and "It may be valid" in error["message"]
    assert 1 <= int(answer.headers["Retry-After"]) <= 60, "clients wait no longer"


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
@pytest.mark.sampled(keep=30)
def test_what_brought_others_down(daemon: Daemon, name: str) -> None:
    pid = daemon.engine_pid
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1, **{**REFUSED, **SERVED}[name]}
    answer = verdict_on(daemon, body)
    if name not in BY_TIME:
        assert answer.status_code == (400 if name in REFUSED else 200), answer.text[:1_000]
    assert answer.status_code in (200, 400), answer.text[:1_000]
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert len(error["message"]) < 1_000 and error["type"] == "invalid_request_error"
        assert error["param"] or error["code"] is None, "what is wrong is named, or the body could not be parsed"
    assert daemon.engine_pid == pid


HI = [{"role": "user", "content": "hi"}]
FAMILIES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "completions": (
        "/v1/completions",
        lambda schema: {"prompt": ["hi", "ho"], "n": 2, "structured_outputs": {"json": schema}},
    ),
    "chat": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": HI,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    ),
    "responses, a tool": (
        "/v1/responses",
        lambda schema: {
            "input": "hi",
            "tool_choice": "required",
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": schema}},
                 "strict": False},
            ],
        },
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 4,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    ),
    "messages, a tool": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 4,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"x": schema}}}],
        },
    ),
}  # fmt: skip
EVERYWHERE_REFUSED: dict[str, Any] = {
    "401 digits": {"type": "number", "exclusiveMinimum": 10**400},
    "401 digits, twice": {"type": "number", "minimum": -(10**400), "exclusiveMaximum": 10**400},
    "deep": {"items": [{"maximum": 10**400}], "enum": [10**400]},
    "65 levels": json.loads('{"items":' * 64 + "{}" + "}" * 64),
    "65 KiB": {"type": "number", "title": "x" * 65_536},
}


@pytest.mark.parametrize("name", EVERYWHERE_REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(keep=10)
def test_a_hostile_schema_is_refused_by_every_family(daemon: Daemon, family: str, name: str) -> None:
    path, body = FAMILIES[family]
    plain = httpx.post(daemon.url + path, json=body({"type": "integer"}), timeout=60)
    assert plain.status_code == 200, plain.text
    answer = httpx.post(daemon.url + path, json=body(EVERYWHERE_REFUSED[name]), timeout=60)
    assert answer.status_code == 400, answer.text[:1_000]
    reasons = ("characters of JSON", "number that is too large", "whole number of more than 64 bits", "levels deep")
    assert any(reason in answer.text for reason in reasons), answer.text


NUM_SLOW = 20


def test_slow_grammars_at_once_hold_up_no_answer(daemon: Daemon) -> None:
    """One caller sends them. Each is soon refused or told when to try again, while an ordinary one is served."""
    most_s = 4.0  # 1.5 s on a quiet machine; one after the other they would take 20 s

    def ask(way: dict[str, Any]) -> httpx.Response:
        body = {"messages": HI, "max_tokens": 4, **constrained(**way)}
        return httpx.post(daemon.url + "/v1/chat/completions", json=body, timeout=60)

    assert ask({"regex": "warm"}).status_code == 200
    with ThreadPoolExecutor(NUM_SLOW) as threads:
        slow = [
            threads.submit(ask, {"grammar": f"start: %json {json.dumps({**ENDLESS, 'multipleOf': 9_999_991 - 2 * i})}"})
            for i in range(NUM_SLOW)
        ]
        usual = verdict_on(daemon, {"messages": HI, "max_tokens": 4, **constrained(regex="[0-9]{4}")})
        assert usual.status_code == 200, usual.text
        for answer in [each.result() for each in slow]:
            print(answer.status_code, answer.elapsed.total_seconds(), answer.headers.get("Retry-After"))
            assert answer.elapsed.total_seconds() < most_s and answer.status_code in (400, 429), answer.text
            if answer.status_code == 429:
                assert_no_verdict(answer)
            else:
                assert "processor time" in answer.json()["error"]["message"]
    # Grammars that were answered by 429 may still be checked.
    assert verdict_on(daemon, {"messages": HI, "max_tokens": 4, **constrained(regex="[0-9]{5}")}).status_code == 200


# -- bounds ------------------------------------------------------------------------------------------------------------


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("at", "beyond", "words"),
    [
        (deep(MAX_SCHEMA_DEPTH), deep(MAX_SCHEMA_DEPTH + 1), "nested more than 64 levels deep"),
        (
            {"title": "x" * (MAX_SCHEMA_CHARS - len('{"title": ""}'))},
            {"title": "x" * (MAX_SCHEMA_CHARS + 1 - len('{"title": ""}'))},
            "has more than 65536 characters of JSON",
        ),
        (
            {"enum": list(range(MAX_ENUM_ENTRIES))},
            {"anyOf": [{"enum": list(range(MAX_ENUM_ENTRIES))}, {"enum": [1]}]},
            "have 4097 entries, but at most 4096",
        ),
    ],
    ids=["levels", "bytes", "entries"],
)
def test_a_schema_at_its_bound_is_read_and_one_beyond_is_refused(at: Any, beyond: Any, words: str) -> None:
    assert read_schema(at, "here", is_strict=True)
    with pytest.raises(RequestError, match=words):
        read_schema(beyond, "here", is_strict=True)


def test_what_is_remembered_of_grammars_is_bounded_in_both_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """xgrammar GHSA-389x-67px-mjg3: every new grammar stayed in memory for good."""
    monkeypatch.setattr(thread_module, "_MAX_KEPT", 4)
    thread = GrammarThread(EMBEDDED_PATH, 3_072)
    for i in range(12):
        thread.open(pattern(f"a{{{i + 1}}}").text(), (1,), ())._future.exception()
    assert len(thread._kept) == 4
    thread.close()

    async def ask(self: GrammarChecker, given: str, lane: object) -> Verdict:
        return Verdict(text=given)

    async def work() -> None:
        checker = GrammarChecker(EMBEDDED_PATH, 3_072)
        for i in range(200):
            await checker.check(pattern(f"a{{{i + 1}}}").text(), "here")
            assert checker._kept_bytes <= 10_000
        assert 1 < len(checker._kept) < 40
        await checker.close()

    monkeypatch.setattr(GrammarChecker, "_ask", ask)
    monkeypatch.setattr(checker_module, "_MAX_KEPT_BYTES", 10_000)
    asyncio.run(work())


# -- templates of checkpoints ------------------------------------------------------------------------------------------

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__init__.__globals__['os'].system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages.__class__.__base__ }}",
    # CVE-2016-10745, CVE-2019-10906, CVE-2024-56326, CVE-2025-27516: by way of str.format.
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "{{ '{0.__class__}'|attr('format')(1) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    # Data of the caller's, which must stay as it is.
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{{ 'x' * 99999999999999 }}",
    "{{ range(10 ** 1) }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_leaves_its_sandbox(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is refused at the start, refuses the message, or prints nothing of Python's internals."""
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    shown = ""
    with suppress(ModelError, RequestError):
        shown = ChatTemplate(source, {}).render(Conversation(messages))
    assert "<class" not in shown and "<module" not in shown and "{'" not in shown, shown
    assert messages == [{"role": "user", "content": "x"}]
    assert not (tmp_path / "CANARY").exists()

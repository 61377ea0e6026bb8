"""Structured output with the official client: streams, several choices, and hostile grammars."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from .conftest import Daemon, children

HI: Any = [{"role": "user", "content": "Name a person."}]
NAME = re.compile(r"[A-Z][a-z]{2,7}")
MAX_TRIES = 5
"""Streams until one has pieces. On a busy machine the server joins the tokens that a client has not read yet."""


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]
    friends: list[Annotated[str, Field(max_length=12)]] = Field(max_length=2)


def post(daemon: Daemon, **body: Any) -> httpx.Response:
    return httpx.post(
        daemon.url + "/v1/chat/completions", json={"messages": HI, "max_tokens": 200, "seed": 3, **body}, timeout=60
    )


def post_again(daemon: Daemon, **body: Any) -> httpx.Response:
    """The answer to a request. It is sent again after `Retry-After` if the server has no time for its grammar."""
    response = post(daemon, **body)
    for _ in range(3):
        if response.status_code != 429:
            break
        time.sleep(int(response.headers["Retry-After-Ms"]) / 1_000)
        response = post(daemon, **body)
    return response


def answer(daemon: Daemon, **body: Any) -> dict[str, Any]:
    response = post(daemon, **body)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def test_the_official_client_parses_a_model(daemon: Daemon) -> None:
    with daemon.client() as client:
        for seed in range(4):
            parsed = client.chat.completions.parse(
                model="tiny", messages=HI, response_format=Person, seed=seed, temperature=1, max_tokens=300
            )
            person = parsed.choices[0].message.parsed
            assert parsed.choices[0].finish_reason == "stop"
            assert isinstance(person, Person) and person.mood in ("good", "bad")


def test_a_stream_is_the_plain_answer_in_pieces(daemon: Daemon) -> None:
    with daemon.client() as client:
        asked: Any = {"model": "tiny", "messages": HI, "response_format": Person, "seed": 5, "max_tokens": 300}
        plain = client.chat.completions.parse(**asked)
        most = 0
        for _ in range(MAX_TRIES):
            with client.chat.completions.stream(**asked) as stream:
                pieces = [event.delta for event in stream if event.type == "content.delta"]
                final = stream.get_final_completion()
            assert "".join(pieces) == plain.choices[0].message.content == final.choices[0].message.content
            assert final.choices[0].message.parsed == plain.choices[0].message.parsed
            most = max(most, len([piece for piece in pieces if piece]))
            if most > 1:
                break
    assert most > 1


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="each process has its own there")
def test_the_engine_and_the_process_that_checks_map_one_vocabulary(daemon: Daemon) -> None:
    answer(daemon, response_format={"type": "json_object"})
    checks = [pid for pid, command in children(daemon.process.pid).items() if "inferd.engine.grammar.check" in command]
    mapped = [
        {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:inferd-once" in line}
        for pid in (daemon.engine_pid, *checks)
    ]
    assert len(mapped) == 2 and len(mapped[0]) == 1 and mapped[0] == mapped[1], "the same inode"


def test_completions_take_the_same_fields(daemon: Daemon) -> None:
    with daemon.client() as client:
        found = client.completions.create(
            model="tiny",
            prompt=["one", "two"],
            n=2,
            max_tokens=40,
            extra_body={"structured_outputs": {"regex": r"\d{3}-\d{2}"}},
        )
    texts = [choice.text for choice in found.choices]
    assert len(texts) == 4 and all(re.fullmatch(r"\d{3}-\d{2}", text) for text in texts)
    assert {choice.finish_reason for choice in found.choices} == {"stop"}


def test_each_choice_follows_the_grammar_for_itself(daemon: Daemon) -> None:
    names = [
        choice["message"]["content"]
        for choice in answer(daemon, regex=NAME.pattern, n=8, temperature=1.5, logprobs=True)["choices"]
    ]
    assert all(NAME.fullmatch(name) for name in names)
    assert len(set(names)) > 1


def test_stop_strings_end_it_as_they_end_any_text(daemon: Daemon) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"grammar": 'root ::= "one, two, " [a-z]+ ", three"'}}
    whole = answer(daemon, **asked)["choices"][0]
    assert whole["message"]["content"].endswith(", three")
    cut = answer(daemon, **asked, stop=", two")["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("one", "stop")


def test_log_probabilities_list_every_token(daemon: Daemon) -> None:
    choice = answer(daemon, structured_outputs={"choice": ["red", "green"]}, logprobs=True, top_logprobs=2)["choices"][
        0
    ]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"] in ("red", "green")


def test_a_length_too_short_is_said_so(daemon: Daemon) -> None:
    choice = answer(daemon, regex="[a-z]{60}", max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_parameters_that_leave_nothing_are_told_apart(daemon: Daemon) -> None:
    response = post(daemon, structured_outputs={"choice": ["a"]}, bad_words=["a"])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_value"
    assert error["message"].startswith("the grammar, allowed_token_ids, bad_words")


def becomes_too_complex() -> str:
    """A grammar in Lark, checked beyond the first token, which may be "q", but not beyond "x"."""
    names = [f"r{i}" for i in range(2_000)]
    return 'start: "q" | "x" ' + " ".join(names) + "\n" + "\n".join(f'{name}: "a"? "b"*' for name in names)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("field", "path", "body"),
    [
        ("structured_outputs.grammar", "chat/completions", {"structured_outputs": {"grammar": becomes_too_complex()}}),
        ("ebnf", "completions", {"ebnf": becomes_too_complex()}),
    ],
)
def test_a_grammar_that_can_be_followed_no_further_names_its_field(
    daemon: Daemon, field: str, path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    (x,) = httpx.post(daemon.url + "/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"]
    prompt: dict[str, Any] = {"messages": HI} if path == "chat/completions" else {"prompt": "hi"}
    asked = {**prompt, **body, "n": 2, "max_tokens": 9, "allowed_token_ids": [x], "stream": is_streamed}
    error = {"code": "rate_limit_exceeded"}
    deadline_s = time.monotonic() + 90
    while error["code"] == "rate_limit_exceeded" and time.monotonic() < deadline_s:  # a busy machine had no time for it
        response = httpx.post(f"{daemon.url}/v1/{path}", json=asked, timeout=60)
        told = next(line for line in response.text.splitlines() if '"error"' in line)
        error = json.loads(told.removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", field)
    rule = "the grammar could not be followed beyond token 1 of the answer: "
    assert error["message"].startswith(f"Invalid value for '{field}': {rule}")


# -- what is left to the model ----------------------------------------------------------------------------------------

UNENFORCED: dict[str, Any] = {
    "type": "object",
    "properties": {"id": {"const": 2**53 + 1}, "a": {"type": "string", "pattern": "(?=x)", "maxLength": 3}},
    "required": ["id", "a"],
    "additionalProperties": False,
    "not": {"maxProperties": 1},
}


def schema_format(*, strict: bool | None = None) -> dict[str, Any]:
    named = {"name": "x", "schema": UNENFORCED} | ({} if strict is None else {"strict": strict})
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def required_tool(*, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": "get_rain", "parameters": UNENFORCED} | ({} if strict is None else {"strict": strict})
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("asked", "path"),
    [(schema_format(), "response_format.json_schema.schema"), (required_tool(), "tools[0].function.parameters")],
    ids=["format", "tool"],
)
def test_a_part_left_to_the_model_is_told(daemon: Daemon, asked: dict[str, Any], path: str, is_streamed: bool) -> None:
    response = post(daemon, **asked, stream=is_streamed)
    assert response.status_code == 200, response.text
    told = response.headers["x-inferd-warning"].split("; ")
    for keyword in ("not", "properties.a.pattern"):
        assert sum(text.startswith(f"'{path}.{keyword}'") for text in told) == 1, told
    assert is_streamed or "9007199254740993" in response.text, "the rest is enforced"


@pytest.mark.parametrize("asked", [schema_format(strict=True), required_tool(strict=True)], ids=["format", "tool"])
def test_a_strict_schema_is_enforced_or_refused(daemon: Daemon, asked: dict[str, Any]) -> None:
    response = post(daemon, **asked)
    assert response.status_code == 400
    assert ".not'" in response.json()["error"]["message"] and "x-inferd-warning" not in response.headers


def test_other_apis_are_told_in_their_words(daemon: Daemon) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 60, **schema_format()}
    response = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)
    assert "'response_format.json_schema.schema.not'" in response.headers["x-inferd-warning"]
    tool = {"type": "function", "name": "get_rain", "parameters": UNENFORCED, "strict": False}
    body = {"input": "hi", "tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    response = httpx.post(daemon.url + "/v1/responses", json=body, timeout=60)
    assert response.status_code == 200 and "'tools[0].parameters.not'" in response.headers["x-inferd-warning"]
    tool = {"name": "get_rain", "input_schema": UNENFORCED}
    body = {"messages": HI, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60}
    response = httpx.post(daemon.url + "/v1/messages", json=body, timeout=60)
    assert response.status_code == 200 and "'tools[0].input_schema.not'" in response.headers["x-inferd-warning"]
    body = {"messages": HI, "tools": [{**tool, "strict": True}], "tool_choice": {"type": "any"}, "max_tokens": 60}
    message = httpx.post(daemon.url + "/v1/messages", json=body, timeout=60).json()["error"]["message"]
    assert "tools[0].input_schema.not" in message and "'get_rain'" in message
    schema = {"type": "json_schema", "schema": UNENFORCED}
    body = {"messages": HI, "output_config": {"format": schema}, "max_tokens": 60}
    message = httpx.post(daemon.url + "/v1/messages", json=body, timeout=60).json()["error"]["message"]
    assert "output_config.format.schema.not" in message and "'strict'" not in message


# -- grammars made to do harm ------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def rules(count: int) -> str:
    return "\n".join(f'r{i}: "a"? "b"*' for i in range(count))


def doubling(keyword: str) -> dict[str, Any]:
    """A schema with 2^29 copies when its references are written out."""
    doubled = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 30)}
    return named(a={"$ref": "#/$defs/d29"}, d0={"type": "integer"}, **doubled)


def named(**definitions: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": "#/$defs/a", "$defs": definitions}


REFUSED: dict[str, dict[str, Any]] = {
    "endless multiple": {"grammar": 'start: %json {"type": "integer", "multipleOf": 9999991}'},
    "deep nesting": {"json": nested(40)},
    "very deep nesting": {"json": nested(400)},
    "huge enum": {"json": {"enum": list(range(5_000))}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_500)}}},
    "64 KiB": {"json": {"type": "object", "description": "x" * 70_000}},
    "reference loop": {"json": named(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"})},
    "reference to itself": {"json": named(a={"allOf": [{"$ref": "#/$defs/a"}] * 2})},
    "product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"type": "string", "minLength": i} for i in range(20)]} for _ in range(20)]}
    },
    "repetition of repetition": {"regex": "(a{1,10000}){1,10000}"},
    "three levels of repetition": {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
    "lookahead": {"regex": "(?=a)*b"},
    "wide grammar": {"grammar": "start: " + " ".join(f"r{i}" for i in range(2_000)) + "\n" + rules(2_000)},
    "ambiguous grammar": {"grammar": 'start: a\na: a a a a a | "x" | '},
    "deep grammar": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "(a+)+": {"regex": "(a+)+b"},
    "many states": {"regex": "([a-z]*[aeiou][a-z]{9}){5}"},
    "many items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "long string": {"json": {"type": "string", "maxLength": 10**9}},
    "doubling allOf": {"json": doubling("allOf")},
    "doubling anyOf": {"json": doubling("anyOf")},
}  # fmt: skip


def bystander(daemon: Daemon) -> httpx.Request:
    """A stream that fills the context."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1_500, "ignore_eos": True, "stream": True}
    return httpx.Request("POST", daemon.url + "/v1/completions", json=body)


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
def test_a_grammar_made_to_do_harm_harms_nobody(daemon: Daemon, name: str) -> None:
    """The request is refused or served to its end, while another stream continues on the same engine.

    On a busy machine an endless grammar may get no verdict, because others come first.
    """
    pid = daemon.engine_pid
    asked = REFUSED.get(name) or SERVED[name]
    num_tokens = 0
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as threads:
        with_stream = client.send(bystander(daemon), stream=True)
        lines = with_stream.iter_lines()
        next(lines)
        pending = threads.submit(post_again, daemon, structured_outputs=asked, max_tokens=60)
        for line in lines:
            if pending.done() and num_tokens:
                break
            num_tokens += line.startswith("data: {")
        with_stream.close()
        response = pending.result()
    is_late = name == "endless multiple" and response.status_code == 429
    assert is_late or response.status_code == (400 if name in REFUSED else 200), response.text
    if name in REFUSED:
        error = response.json()["error"]
        # A body as deep as that is refused before any field is looked at.
        assert (error["param"] or "structured_outputs.").startswith("structured_outputs.")
        assert len(error["message"]) < 1_000
    # A verdict takes a second, in which a busy machine computes some tokens, and an engine that waits none.
    assert num_tokens > (3 if name == "endless multiple" else 0), "the other stream stood still"
    assert daemon.engine_pid == pid
    choice = answer(daemon, regex="[0-9]{4}")["choices"][0]
    assert re.fullmatch("[0-9]{4}", choice["message"]["content"])


def test_a_body_deeper_than_any_stack(daemon: Daemon) -> None:
    body = '{"messages": [], "structured_outputs": {"json": ' + '{"items":' * 100_000 + "{}" + "}" * 100_000 + "}}"
    headers = {"Content-Type": "application/json"}
    response = httpx.post(daemon.url + "/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert response.status_code == 400
    json.loads(response.text)

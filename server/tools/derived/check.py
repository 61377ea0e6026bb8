"""Parses a template's own turns by a derived format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.derived.found import Derived
from inferd.server.tools.derived.probes import KEYS, NAMES, SAID, THOUGHT, VALUES, Probes, call
from inferd.server.tools.derived.reasoning import Markers
from inferd.server.tools.derived.turn import Frame
from inferd.server.tools.detect import composed
from inferd.server.tools.fallback import Message
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, Content, Reasoning

_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {KEYS[0]: "one\ntwo 'three' \"four\"", KEYS[1]: "5"},
    {KEYS[0]: 5, KEYS[1]: {"inner": [1.5, True, "x"]}},
    {KEYS[0]: True},
    {},
)


def fault_of(probes: Probes, frame: Frame, found: Derived, markers: Markers) -> str:
    """The first of the template's turns that the format does not read back, in words; empty if it reads all."""
    begin, end = markers.begin.strip(), markers.end.strip()
    turns: list[tuple[list[Message], str, str]] = [([], SAID, ""), ([], SAID, THOUGHT)]
    if found.calls is not None:
        turns = [([call(0, arguments)], "", "") for arguments in _ARGUMENTS]
        turns += [([call(0, _ARGUMENTS[2])], "", THOUGHT)] if found.reasoning is not None else []
        if not found.calls.is_bare:  # calls without a marker begin an answer
            turns.append(([call(0, _ARGUMENTS[2])], SAID, ""))
        if probes.support.several_calls:
            turns.append(([call(0, _ARGUMENTS[0]), call(1, _ARGUMENTS[2])], "", ""))
    num_calls = 0
    for calls, content, thought in turns:
        body = frame.body(probes.turn(calls, content=content, thought=thought))
        if body is None or (calls and NAMES[0] not in body):
            continue  # the template refuses the turn, or does not show it
        if begin and begin in body and end not in body:
            continue  # the template takes the content for reasoning that has begun
        if calls:
            body = frame.without_end(body)[0]
        elif frame.end.strip():
            body = body.rpartition(frame.end)[0]
        if frame.header.strip() in body:
            continue  # the template makes two turns of it
        num_calls += len(calls)
        wanted = (
            [(each["function"]["name"], each["function"]["arguments"]) for each in calls],  # type: ignore[index]
            content if content in body else "",
            thought if thought in body else "",
        )
        # A prompt may hold the beginning of the answer that the turn does not show.
        read = _read(found, body, calls)
        if read != wanted and all(_read(found, opening + body, calls) != wanted for opening in frame.openings):
            return f"the derived format reads {_short(read)} where the template writes {_short(body)}"
    return "" if num_calls or found.calls is None else "no turn with calls can be checked"


def reads(probes: Probes, frame: Frame, found: Derived) -> bool:
    """Whether the format reads a call with one argument of text."""
    calls = [call(0, {KEYS[0]: VALUES[0]})]
    body = frame.body(probes.turn(calls))
    return body is not None and _read(found, frame.without_end(body)[0], calls)[0] == [(NAMES[0], {KEYS[0]: VALUES[0]})]


def _read(found: Derived, body: str, calls: Sequence[Message]) -> tuple[list[tuple[str, object]], str, str]:
    schema = {"type": "object", "properties": {key: _types(calls, key) for key in KEYS}}
    tools = tuple({"type": "function", "function": {"name": name, "parameters": schema}} for name in NAMES)
    parser = AnswerParser(ParserConfig(composed(found), bool(calls), tools))
    pieces = [*parser.feed(body), *parser.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    arguments = [_value(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    if len(names) != len(arguments):
        return [(name, None) for name in names], content, thought
    return list(zip(names, arguments, strict=True)), content.strip(), thought


def _types(calls: Sequence[Message], key: str) -> dict[str, object]:
    """The schema of an argument, as a caller who wants these values has it."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    values = [each["function"]["arguments"].get(key) for each in calls]  # type: ignore[index]
    return {"type": sorted({kinds[type(value)] for value in values if value is not None}, key="string".__eq__)}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."

"""Derives a format from a template, and checks that it reads the template's own turns."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inferd.engine.api.errors import ModelError
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.builtin import CALLS, Field, ReasoningFormat
from inferd.server.tools.derived.calls import NotDerivedError, calls_of
from inferd.server.tools.derived.probes import KEYS, NAMES, SAID, THOUGHT, VALUES, Probes, RenderTurn, call
from inferd.server.tools.derived.reasoning import Markers, markers_of
from inferd.server.tools.derived.texts import are_a_pair
from inferd.server.tools.derived.turn import Frame, frame_of
from inferd.server.tools.detect import Derived, composed
from inferd.server.tools.fallback import Message, ToolSupport
from inferd.server.tools.format import ReasoningSyntax
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.patterns import TAG, flexible
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


def derive(render: RenderTurn, support: ToolSupport, texts: Collection[str] = ()) -> Derived:
    """The format of a model's answers, as far as the template behind `render` shows it. `texts`: strings in the
    template's expressions, which may be markers that it cuts out of earlier answers."""
    probes = Probes(render, support)
    frame = frame_of(probes)
    if frame is None:
        return Derived(why_no_calls="the template shows no turns of an assistant", num_rendered=probes.num_rendered)
    markers = markers_of(probes, frame, texts)
    frame = frame.without_answer_end(markers.answer_end)
    found = Derived(reasoning=_reasoning(markers), others=_others(markers, frame), anchors=frame.anchors)
    if fault := _fault(probes, frame, found, markers):
        markers = Markers()
        found = Derived(others=_others(markers, frame), anchors=frame.anchors, why_no_reasoning=fault)
    return replace(_with_calls(probes, frame, markers, found), num_rendered=probes.num_rendered)


def _fault(probes: Probes, frame: Frame, found: Derived, markers: Markers) -> str:
    """The fault that `check` finds, or why the format cannot be composed: a stranger's template may make patterns that
    do not compile."""
    try:
        return fault_of(probes, frame, found, markers)
    except (ModelError, re.error) as error:
        return str(error)


def _with_calls(probes: Probes, frame: Frame, markers: Markers, found: Derived) -> Derived:
    """The same with the first format of calls that reads all of the template's turns."""
    fault = ""
    try:
        for calls in calls_of(probes, frame, markers):
            with_calls = replace(found, calls=calls)
            fault = _fault(probes, frame, with_calls, markers)
            if not fault:
                return with_calls
    except NotDerivedError as error:
        fault = fault or str(error)
    readable = None
    if probes.support.calls:
        readable = frozenset(name for name, calls in CALLS.items() if reads(probes, frame, replace(found, calls=calls)))
    return replace(found, why_no_calls=fault, readable=readable)


_TEXT: Mapping[str, object] = {"content": "text", "repeats": True, "join": "\n"}


def _reasoning(markers: Markers) -> ReasoningFormat | None:
    """None if the template shows no markers of reasoning."""
    begin, end = markers.begin.strip(), markers.end.strip()
    if not (begin and end):
        return None
    syntax = ReasoningSyntax(begin, end, markers.answer.strip())
    return ReasoningFormat({"reasoning_content": {"open": begin, "close": end, **_TEXT}}, syntax)


def _others(markers: Markers, frame: Frame) -> dict[str, Field]:
    """Fields of content with markers, and of the end of a turn."""
    fields: dict[str, Field] = {}
    begin, end, answer = markers.begin.strip(), markers.end.strip(), markers.answer.strip()
    if answer:
        ends = [markers.answer_end.strip()] if markers.answer_end.strip() else []
        if end and not are_a_pair(begin, end):
            ends.append(end)  # all messages of a turn end alike
        fields["content"] = {"open": answer, **({"close": ends} if ends else {}), **_TEXT}
    if TAG.search(frame.end):
        fields["turn_end"] = {"open_pattern": _turn_end(frame.end.strip()), "content": "text"}
    return fields


def _turn_end(end: str) -> str:
    """A pattern of the end of a turn at the end of an answer. Its last tag may be missing: it ends the answer."""
    last = list(TAG.finditer(end))[-1]
    shorter = end[: last.start()].rstrip()
    return rf"(?:{flexible(end)}{'|' + flexible(shorter) if TAG.search(shorter) else ''})\s*\Z"

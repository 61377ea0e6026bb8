"""Derives a format from a template, and checks that it reads the template's own turns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from inferd.engine.api.errors import ModelError
from inferd.server.tools.builtin import CALLS, Field, ReasoningFormat
from inferd.server.tools.derived.calls import NotDerivedError, calls_of
from inferd.server.tools.derived.check import fault_of, reads
from inferd.server.tools.derived.found import Derived
from inferd.server.tools.derived.probes import Probes, RenderTurn
from inferd.server.tools.derived.reasoning import Markers, markers_of
from inferd.server.tools.derived.texts import are_a_pair
from inferd.server.tools.derived.turn import Frame, frame_of
from inferd.server.tools.fallback import ToolSupport
from inferd.server.tools.format import ReasoningSyntax
from inferd.server.tools.patterns import TAG, flexible


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

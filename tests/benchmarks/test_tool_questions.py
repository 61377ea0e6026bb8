"""The judges of `benchmarks/tool_questions`: each question's wanted calls are right, and others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.tool_questions import NAMES, QUESTIONS, equals, judged, weather

ROME, OSLO = ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo, Norway", "unit": "celsius"})
WANTED = (weather("rome"), weather("oslo"))


def answer(*calls: tuple[str, dict[str, Any]], reason: str = "tool_calls", text: str | None = None) -> dict[str, Any]:
    written = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    return {"finish_reason": reason, "message": {"content": text, "tool_calls": written}}


@pytest.mark.parametrize(
    ("choice", "held"),
    [
        (answer(ROME, OSLO), {"read", "ended", "number", "tools", "arguments", "all"}),
        (answer(OSLO, ROME), {"read", "ended", "number", "tools", "arguments", "all"}),
        (answer(OSLO, ROME, reason="length"), {"read", "number", "tools", "arguments"}),
        (answer(ROME, ROME), {"read", "ended", "number", "tools"}),
        (answer(ROME), {"read", "ended"}),
        (answer(ROME, OSLO, OSLO), {"read", "ended"}),
        (answer(ROME, ("roll_die", {"sides": 6})), {"read", "ended", "number"}),
        (answer(text="Rain.", reason="stop"), {"ended"}),
        (answer(text='{"name": "get_weather", "arguments": {}}.', reason="stop"), {"ended", "unread"}),
        (answer(text='Then get_weather("Rome") it is.', reason="stop"), {"ended", "unread"}),
    ],
)
def test_an_answer_is_judged_by_its_calls(choice: dict[str, Any], held: set[str]) -> None:
    assert judged(choice, WANTED) == held


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("(12.5+7.5)/4", True), ("5", True), ("2^2 + 1", True), ("12.5 + 7.5 / 4", False), ("1/0", False),
     ("9**9**9**9", False), ("exit()", False), ("5 +", False), ("", False)],
)  # fmt: skip
def test_an_expression_is_right_by_its_value(text: str, is_right: bool) -> None:
    assert equals(5)(text) is is_right


def test_there_are_30_questions_about_offered_tools() -> None:
    assert len({question for question, _ in QUESTIONS}) == 30
    assert {one.tool for _, wanted in QUESTIONS for one in wanted} == set(NAMES)

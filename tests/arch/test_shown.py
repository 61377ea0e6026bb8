"""A value of a file, as a message shows it, has one bounded line without anything that a terminal obeys."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.shown import MAX_MESSAGE, clipped, shown

LONG = 10**6
TEXT = "x" * LONG
NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED] * 8

VALUES = (
    TEXT, tuple(range(LONG)), [0.1] * LONG, {str(key): TEXT for key in range(2000)}, NESTED, 10**9999,
    [10**9999], "\ud800" * LONG, b"\0" * LONG, "\x1b[2J" * LONG,
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_any_value_is_shown_in_few_characters(value: object) -> None:
    text = shown(value)
    assert 0 < len(text) <= 200
    assert text.isprintable()


@pytest.mark.parametrize("value", ["a", 7, 1.5, None, True, ["full_attention", 3], {"rope_type": "yarn"}, (1, 2)])
def test_a_short_value_is_shown_as_python_writes_it(value: object) -> None:
    assert shown(value) == repr(value)


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = clipped("the file: " + "x" * LONG + "; give another")
    assert len(text) == MAX_MESSAGE
    assert text.startswith("the file: ") and text.endswith("; give another")
    assert clipped("x" * MAX_MESSAGE) == "x" * MAX_MESSAGE
    assert len(clipped("\0" * LONG)) <= MAX_MESSAGE


def test_a_message_is_one_line_that_no_terminal_obeys() -> None:
    assert clipped("a\n  b\t c\u2028d \x1b[2J \ud800") == "a b c d \\x1b[2J \\ud800"

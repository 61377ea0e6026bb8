"""The committed page is the one that the tables give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.server.api import reference as docs
from inferd.server.schema.kinds import (
    Array,
    Boolean,
    Choice,
    Decimal,
    Integer,
    Json,
    Kind,
    OneOrMany,
    Only,
    Text,
    TokenIds,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_the_page_is_what_the_tables_give() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert docs.fill(page) == page, "the tables have changed: run `make docs`"
    assert all(f"<!-- table: {name} -->" in page for name in docs.TABLES)


def test_a_stale_table_is_written_anew_and_prose_is_left_alone() -> None:
    page = "before\n<!-- table: aliases -->\n| old |\n<!-- end -->\nafter"
    filled = docs.fill(page)
    assert filled.startswith("before\n<!-- table: aliases -->\n| Name |")
    assert filled.endswith("\n<!-- end -->\nafter")
    assert "old" not in filled
    with pytest.raises(KeyError):
        docs.fill("<!-- table: nothing -->\n<!-- end -->")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Integer(), "integer"),
        (Integer(1, 128), "integer 1 to 128"),
        (Integer(0), "integer 0 or more"),
        (Decimal(0.01, 100), "number 0.01 to 100"),
        (Boolean(), "boolean"),
        (Text(), "string"),
        (Text(1, 1_024), "string of 1 to 1,024 characters"),
        (Choice(("a", "b")), '`"a"` or `"b"`'),
        (Only((1, ["text"]), ""), '`1` or `["text"]`'),
        (Array(Text(1, 9), max_length=16), "array of up to 16 strings of 1 to 9 characters"),
        (TokenIds(1, 64), "array of 1 to 64 integers 0 or more"),
        (OneOrMany(Text(), 4), "string; or array of up to 4 strings"),
        (Json(), "object"),
    ],
)
def test_bounds_in_words(kind: Kind, words: Any) -> None:
    assert docs.rule_of(kind.schema()) == words

"""JSON that is written in pieces equals JSON that is written at once, and is never in memory as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.server.endpoints.long_lists import PIECE_BYTES, Chained, LongList, dumps, pieces

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
NESTED = st.recursive(
    st.integers(-9, 9) | NAMES | st.none(),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=200,
)


def with_long_lists(document: Any) -> Any:
    """`document` with every outermost list as a `LongList`."""
    match document:
        case list():
            return LongList(document, lambda entry: entry)
        case dict():
            return {name: with_long_lists(value) for name, value in document.items()}
    return document


@given(NESTED)
def test_pieces_together_are_the_document(document: Any) -> None:
    long = with_long_lists(document)
    assert json.loads(dumps(long)) == document
    assert b"".join(pieces(long)) == dumps(long)


def test_a_document_without_long_lists_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of a stream is one: it takes no random mark from the system."""
    monkeypatch.setattr("inferd.server.endpoints.long_lists.secrets", None)
    assert dumps({"a": [1, {"b": "c"}]}) == b'{"a":[1,{"b":"c"}]}'
    with pytest.raises(AttributeError):
        dumps(LongList([1], lambda entry: entry))


def test_a_list_is_made_while_it_is_written() -> None:
    """No piece is much larger than it must be, and an entry is made only with the piece that holds it."""
    made: list[int] = []

    def show(i: int) -> dict[str, str]:
        made.append(i)
        return {"text": "x" * 1_000}

    document = {"before": 1, "list": LongList(range(1_000), show), "after": [2]}
    writing = pieces(document)
    first = next(writing)
    assert PIECE_BYTES <= len(first) < 3 * PIECE_BYTES and len(made) < 200
    rest = list(writing)
    assert max(map(len, rest)) < 3 * PIECE_BYTES
    assert made == list(range(1_000))
    assert len(json.loads(first + b"".join(rest))["list"]) == 1_000


def test_collections_are_chained() -> None:
    both = Chained([1, 2], (3,))
    assert list(both) == list(both) == [1, 2, 3] and len(both) == 3 and 3 in both and 4 not in both


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON"):
        dumps({"a": object()})

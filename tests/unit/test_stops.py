"""Stop strings against an oracle that reads the whole text at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferd.server.text.stops import StopStrings, StopTables

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
TEXTS = st.text("abc", max_size=24)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """(text sent, stop string): the longest of the stop strings that the earliest character completes."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def read(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    reader = StopStrings(StopTables.of(stops), include)
    given: list[str] = []
    for piece in pieces:
        given.append(reader.feed(piece))
        if reader.match is not None:
            return given, reader.match.stop
    return [*given, reader.finish()], None


@settings(deadline=None)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_every_way_of_cutting_a_text_gives_the_same(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    given_out, stop = read(split(text, cuts), stops, include)
    assert ("".join(given_out), stop) == oracle(text, stops, include)


@settings(deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_what_is_held_back_is_only_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    reader = StopStrings(StopTables.of(stops), include=False)
    released = ""
    for i, char in enumerate(text):
        released += reader.feed(char)
        if reader.match is not None:
            return
        held = text[len(released) : i + 1]
        longest = max((k for stop in stops for k in range(len(stop)) if text[: i + 1].endswith(stop[:k])), default=0)
        assert len(held) == longest


def test_the_oracle_tells_a_reader_that_forgets_between_pieces() -> None:
    """A search in each piece alone gives another result than the oracle."""
    pieces = ["xa", "b", "y"]
    forgetful = "".join(piece for piece in pieces if "ab" not in piece)
    assert forgetful != oracle("xaby", ["ab"], include=False)[0]
    assert read(pieces, ["ab"], include=False)[0] == ["x", ""]


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["aab"], ["ab"], "a", "ab"),
        (["ababac"], ["abac"], "ab", "abac"),  # the failed start contains the true one
        (["xabc"], ["bc", "abc"], "x", "abc"),  # one end, two starts: the longer
        (["xab", "c"], ["abcd", "b"], "xa", "b"),  # complete first
        (["a", "b"], ["abc"], "ab", None),  # held back, then sent
        (["\u00e9", "\U0001f600"], ["\u00e9\U0001f600"], "", "\u00e9\U0001f600"),
    ],
)  # fmt: skip
def test_cases(pieces: list[str], stops: list[str], text: str, stop: str | None) -> None:
    given_out, found = read(pieces, stops, include=False)
    assert ("".join(given_out), found) == (text, stop)


@settings(deadline=None)
@given(text=st.text("ab", min_size=4, max_size=12), stops=STOPS, early=st.integers(0, 12))
@example(text="ababa", stops=["aba"], early=3)
def test_what_is_complete_too_early_is_text_and_may_still_begin_another(
    text: str, stops: list[str], early: int
) -> None:
    reader = StopStrings(StopTables.of(stops), include=False)
    released = reader.feed(text[:early], is_armed=False) + reader.feed(text[early:])
    expected, found = text, None
    for end in range(min(early, len(text)) + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            expected = text[: end - len(found)]
            break
    if reader.match is None:
        released += reader.finish()
    assert (reader.match.stop if reader.match else None) == found
    # Text sent before the stop string could count is not taken back.
    assert released == expected or (found and released.startswith(expected))


def test_a_stop_string_that_is_complete_too_early_is_text() -> None:
    reader = StopStrings(StopTables.of(["ab"]), include=False)
    assert reader.feed("xab", is_armed=False) == "xab"
    assert reader.match is None
    assert reader.feed("a", is_armed=False) + reader.feed("b!") == ""
    assert reader.match is not None
    assert reader.match.stop == "ab"


class Counted(str):
    """A stop string that counts how often its characters are read."""

    num_looks = 0

    def __getitem__(self, index: object) -> str:
        Counted.num_looks += 1
        return super().__getitem__(index)  # type: ignore[index]


@pytest.mark.parametrize(
    ("stop", "text"),
    [("a" * 1_000 + "b", "a" * 20_000), ("ab" * 500 + "c", "ab" * 10_000), ("a" * 1_000, "a" * 999 + "b" + "a" * 999)],
)
def test_cost_is_linear_in_the_text(stop: str, text: str) -> None:
    """A text that restarts a long stop string at every character reads each character a bounded number of times."""
    tables = StopTables.of([stop])
    reader = StopStrings(StopTables((Counted(stop),), tables.failures, tables.first_chars), include=False)
    Counted.num_looks = 0
    assert reader.feed(text) + reader.finish() == text
    assert len(text) <= Counted.num_looks <= 3 * len(text), "a look, a way back along the table, and a look again"


def test_the_tables_of_a_request_are_made_in_linear_time() -> None:
    """Counts the reads of the stop string while its failure table is made."""
    Counted.num_looks = 0
    length = 20_000
    StopTables.of([Counted("a" * (length - 1) + "b")])
    assert Counted.num_looks <= 5 * length

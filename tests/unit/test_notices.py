"""The header that tells a caller what was not done."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.server.schema.notices import MAX_HEADER, Notice, header_of, names_of


def test_the_header_has_each_text_once_in_ascii() -> None:
    notices = [Notice("no_effect", "'é' has no effect"), Notice("max_tokens", "cut"), Notice("no_effect", "cut")]
    assert header_of(notices) == r"'\xe9' has no effect; cut"
    assert names_of(notices) == ["no_effect", "max_tokens"]


def test_no_caller_makes_a_header_that_is_long_or_a_line_of_its_own() -> None:
    notices = [Notice("no_effect", f"{i}\r\nx: y" * 10) for i in range(1_000)]
    header = header_of(notices)
    assert len(header) == MAX_HEADER and header.endswith("...")
    assert header.isascii() and header.isprintable()


class Read(list[Notice]):
    """Counts the notices that are read."""

    num_read = 0

    def __iter__(self) -> Iterator[Notice]:
        for notice in super().__iter__():
            self.num_read += 1
            yield notice


def test_no_more_is_read_than_the_header_holds() -> None:
    """The event loop writes it, and a request may have a notice for each of 30,000 tools."""
    notices = Read(Notice("hosted_tool", f"The model does not see 'f{i}'") for i in range(30_000))
    assert len(header_of(notices)) == MAX_HEADER
    assert notices.num_read < 50

"""Finds the beginning and the end of an assistant's turn in a rendered text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferd.server.tools.derived.probes import KEYS, NAMES, OFF, ON, RESULT, SAID, THOUGHT, VALUES, Probes, call
from inferd.server.tools.derived.texts import are_a_pair, common_prefix, common_suffix, tags_in
from inferd.server.tools.patterns import TAG


@dataclass(frozen=True, slots=True)
class Frame:
    """Texts around the turns of an assistant."""

    header: str
    """Text between the user's message and the turn."""
    end: str
    """Text behind the content of the last turn."""
    end_before_user: str
    """Text between the content and the user's next message."""
    openings: tuple[str, str, str]
    """Beginnings of the answer that a prompt holds: as it is, with reasoning switched on, and off."""
    anchors: tuple[str, ...]
    """Texts that an answer begins behind."""

    def body(self, turn: str | None) -> str | None:
        """A turn without its header; None if it has another one."""
        return None if turn is None else _behind(self.header, turn)

    def without_answer_end(self, answer_end: str) -> Frame:
        """The same, if the content has an end of its own before the end of the turn."""
        end = self.end.removeprefix(answer_end)
        return replace(self, end=end) if end.strip() else self

    def without_end(self, text: str) -> tuple[str, tuple[str, ...]]:
        """(the text of calls without the end of the turn, the tags that end a turn with calls alone)."""
        same = common_suffix(text, self.end)
        if same.strip():
            return text[: len(text) - len(same)], ()
        stripped = text.rstrip()
        tags = list(TAG.finditer(stripped))
        last = tags[-1] if tags and tags[-1].end() == len(stripped) else None
        after = tags_in(self.end_before_user)
        if last is not None and after and last[0] == after[0]:
            return text[: last.start()], ()
        if self.end.strip() and last is not None and not last[0].startswith(("</", "[/")):
            return text[: last.start()], (last[0],)
        return text, ()


def frame_of(probes: Probes) -> Frame | None:
    """None if the template does not show what an assistant says."""
    content = probes.turn(content=SAID)
    prompts = tuple(probes.prompt(kwargs) for kwargs in ({}, ON, OFF))
    if content is None or SAID not in content or prompts[0] is None:
        return None
    openings = tuple(prompts[0] if prompt is None else prompt for prompt in prompts)
    turns = [
        probes.turn([call(0, {KEYS[0]: VALUES[0]})]) if probes.support.calls else None,
        probes.turn(content=SAID, thought=THOUGHT),
    ]
    before = content[: content.find(SAID)]
    shown = _common_header(before, [turn for turn in turns if turn is not None])
    header = _common_header(shown, openings)
    if not header.strip() and all(shown.strip() in opening for opening in openings):
        # The last message of a prompt has more behind it, such as the tools.
        openings = tuple(opening[opening.rfind(shown.strip()) :] for opening in openings)
        header = _common_header(shown, openings)
    if not header.strip():
        # A switch also changes the user's turn.
        header = _common_header(shown, openings[:1])
        openings = tuple(opening[max(0, opening.rfind(header.strip())) :] for opening in openings)
    rest = shown[len(header) :].strip()
    if rest and all(opening.rstrip().endswith(rest) for opening in openings):
        # The prompt says more between the user's message and the answer than other turns do.
        header = _without_marker(probes, shown, content)
        openings = tuple(shown[len(header) :] for _ in openings)
    else:
        header = _without_marker(probes, header, content)
        openings = tuple(_behind(header, opening) or "" for opening in openings)
    if not header.strip():
        return None
    follows = probes.turn(content=SAID, follows=True)
    end_before_user = ""
    if follows is not None and SAID in follows:
        end_before_user = follows[follows.rfind(SAID) + len(SAID) :].partition(RESULT)[0]
    end = content[content.rfind(SAID) + len(SAID) :]
    default, on, off = openings
    return Frame(
        header, end, end_before_user, (default, on, off), _anchors(header, openings, probes.prompt_after_result)
    )


def _common_header(first: str, others: Sequence[str]) -> str:
    """The beginning of `first` that all others have, too; their blanks may differ."""
    squeezed = ["".join(text.split()) for text in (first, *others)]
    num = len(common_prefix(squeezed[0], *squeezed[1:], has_words=False))
    end = 0
    for at, char in enumerate(first):
        if num == 0:
            break
        if not char.isspace():
            num, end = num - 1, at + 1
    blanks = first[end:][: len(first[end:]) - len(first[end:].lstrip())]
    rests = [_behind(first[:end], text) for text in others]
    return first[:end] + common_prefix(blanks, *(rest for rest in rests if rest is not None))


def _behind(header: str, text: str) -> str | None:
    """The text behind a header whose blanks may differ; None if the text has another one."""
    at = 0
    for char in header:
        if char.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if text[at : at + 1] != char:
            return None
        at += 1
    blanks = header[len(header.rstrip()) :]
    return text[at:].removeprefix(blanks)


def _without_marker(probes: Probes, header: str, content: str) -> str:
    """The header without a marker at its end that belongs to the turn: one that the turn closes, or repeats."""
    symbols = re.search(r"(?<=\s)[^\w\s]{2,16}\Z", header)
    if symbols is not None and probes.support.several_calls:
        two = probes.turn([call(i, {KEYS[0]: VALUES[0]}) for i in range(2)])
        if two is not None and f"{symbols[0]}{NAMES[1]}" in two:
            return header[: symbols.start()]
    tags = list(TAG.finditer(header.rstrip()))
    if not tags or tags[-1].end() < len(header.rstrip()):
        return header
    last, body = tags[-1], content[len(header) :]
    follows = TAG.match(body.lstrip())
    is_closed = follows is not None and follows[0] != last[0] and are_a_pair(last[0], follows[0])
    is_repeated = last[0] in body[: body.find(SAID)] and body[:1].isalnum()
    return header[: last.start()] if is_closed or is_repeated else header


def _anchors(header: str, openings: tuple[str, ...], after_result: str | None) -> tuple[str, ...]:
    """The end of the header that also stands behind a tool's result; both headers if they have nothing in common."""
    if after_result is None:
        return (header,)
    for opening in sorted(openings, key=len, reverse=True):
        if opening and after_result.endswith(opening):
            after_result = after_result[: len(after_result) - len(opening)]
            break
    same = common_suffix(header, after_result)
    if same.strip():
        return (same,)
    starts = [tag.start() for tag in TAG.finditer(header)]
    found = next((header[start:] for start in starts if header[start:] in after_result), "")
    if found:
        return (found,)
    return (header, after_result.lstrip()) if after_result.strip() else (header,)

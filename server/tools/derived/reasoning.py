"""Markers around reasoning, and around the content beside it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from inferd.server.tools.derived.probes import KEYS, SAID, THOUGHT, VALUES, Probes, call
from inferd.server.tools.derived.texts import are_a_pair, common_suffix, is_rare, tags_in, words_of
from inferd.server.tools.derived.turn import Frame
from inferd.server.tools.patterns import TAG

_MOST_TEXTS = 16
"""Texts of a template that are tried as the end of reasoning."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Texts as the template writes them, with blanks. All are empty if there are none."""

    begin: str = ""
    end: str = ""
    """Begin and end of reasoning."""
    answer: str = ""
    answer_end: str = ""
    """Begin and end of the content."""

    def without_empty(self, text: str) -> str:
        """The text of a turn without empty reasoning and empty content at its beginning."""
        for begin, end in ((self.begin, self.end), (self.answer, self.answer_end)):
            begin, end, stripped = begin.strip(), end.strip(), text.lstrip()
            if not end:
                continue
            if begin and stripped.startswith(begin):
                rest = stripped[len(begin) :].lstrip()
                text = rest[len(end) :] if rest.startswith(end) else text
            elif stripped.startswith(end):
                text = stripped[len(end) :]
        return text


def markers_of(probes: Probes, frame: Frame, texts: Collection[str] = ()) -> Markers:
    """The markers that turns and prompts show. `texts`: strings in the template's expressions."""
    content = frame.body(probes.turn(content=SAID))
    before_content = "" if content is None else content[: content.find(SAID)]
    shown = _shown(probes, frame)
    if shown is None:
        begin, end = _from_openings([*frame.openings, before_content]) or _cut_out(probes, texts)
        rest = Markers(begin, end).without_empty(before_content)
        return _with_answer(probes, frame, Markers(begin, end), rest)
    before, after = shown
    if not after.strip():
        begin, end = _from_openings([*frame.openings, before_content, before]) or ("", "")
        return _with_answer(probes, frame, Markers(begin, end), Markers(begin, end).without_empty(before_content))
    begin = before if before.strip() else _opened_by_prompt(frame)
    same = common_suffix(after, before_content)
    if same.strip() == after.strip():
        # The turn without reasoning shows empty reasoning.
        end = _end_like(begin, after)
        same = after[len(end) :]
    else:
        end = after[: len(after) - len(same)]
    if not (begin.strip() and end.strip() and is_rare(begin) and is_rare(end)):
        return _with_answer(probes, frame, Markers(), before_content)
    return _with_answer(probes, frame, Markers(begin, end), same)


def _shown(probes: Probes, frame: Frame) -> tuple[str, str] | None:
    """(text before the thought, text between the thought and what follows)."""
    for chunks in (False, True):
        body = frame.body(probes.turn(content=SAID, thought=THOUGHT, chunks=chunks))
        is_dumped = body is not None and re.search(r"['\"]type['\"]", body)
        if body is not None and 0 <= body.find(THOUGHT) < body.find(SAID) and not is_dumped:
            before, _, rest = body.partition(THOUGHT)
            return before, rest.partition(SAID)[0]
    if not probes.support.calls:
        return None
    calls = [call(0, {KEYS[0]: VALUES[0]})]
    body, plain = frame.body(probes.turn(calls, thought=THOUGHT)), frame.body(probes.turn(calls))
    if body is None or plain is None or THOUGHT not in body:
        return None
    before, _, rest = body.partition(THOUGHT)
    return before, rest[: len(rest) - len(common_suffix(rest, plain))]


def _opened_by_prompt(frame: Frame) -> str:
    """The text that opens reasoning if only prompts show it."""
    return next((opening for opening in (frame.openings[1], frame.openings[0]) if opening.strip()), "")


def _end_like(begin: str, after: str) -> str:
    """The shortest text that names what `begin` names, up to the end of a tag, and ends as `begin` does."""
    words = words_of(begin)
    tags = list(TAG.finditer(after))
    for i, tag in enumerate(tags):
        text = after[: tag.end()]
        if any(word in text.lower() for word in words) or not words:
            marks = tags_in(begin)
            if len(marks) > 1 and i + 1 < len(tags) and tags[i + 1][0] == marks[-1] and tag[0] != marks[-1]:
                text = after[: tags[i + 1].end()]
            return text
    return after


def _from_openings(openings: list[str]) -> tuple[str, str] | None:
    """Markers from what prompts begin an answer with: empty reasoning, or only its begin, or only its end."""
    texts = [opening.strip() for opening in openings if opening.strip()]
    for text in sorted(texts, key=len):
        tags = list(TAG.finditer(text))
        if len(tags) >= 2 and tags[0].start() == 0 and are_a_pair(tags[0][0], tags[1][0]):
            return text[: tags[1].start()].strip(), tags[1][0]
    for text in texts:
        if tags_in(text) == [text]:
            if text.startswith(("</", "[/")):
                return text.replace("/", "", 1), text
            mirrored = f"{text[0]}/{text[1:]}"
            if not re.fullmatch(r"[<\[]\w.*", text):
                continue
            return text, mirrored
    return None


def _cut_out(probes: Probes, texts: Collection[str]) -> tuple[str, str]:
    """Markers of reasoning that the template cuts out of what an assistant said earlier, up to the end marker."""
    turns = (probes.turn(content=SAID), probes.turn([call(0, {KEYS[0]: VALUES[0]})]) if probes.support.calls else None)
    shown = "".join(turn or "" for turn in turns)
    tags = sorted(text for text in set(map(str.strip, texts)) if _is_lone_marker(text) and text not in shown)
    for end in tags[:_MOST_TEXTS]:
        begins = [text for text in tags if text != end and are_a_pair(text, end) and "/" not in text]
        begin = min(begins, key=len, default=end.replace("/", "", 1))
        if begin == end:
            continue
        turn = probes.turn(content=f"{begin}{THOUGHT}{end}\n{SAID}", follows=True)
        if turn is not None and SAID in turn and not any(text in turn for text in (THOUGHT, begin, end)):
            return begin, end
    return "", ""


def _is_lone_marker(text: str) -> bool:
    return is_rare(text) and len(text.split()) == 1 and len(text) <= 40 and bool(words_of(text))


def _with_answer(probes: Probes, frame: Frame, markers: Markers, answer: str) -> Markers:
    """The same with `answer` as the marker of the content, if it is one, and the end of the content."""
    if not is_rare(answer) or answer.strip() == markers.begin.strip():
        return markers
    end = _end_like(answer, frame.end)
    if end == frame.end and probes.support.calls:
        body = frame.body(probes.turn([call(0, {KEYS[0]: VALUES[0]})]))
        end = end[: len(end) - len(common_suffix(end, body or ""))]
    return Markers(markers.begin, markers.end, answer, end)

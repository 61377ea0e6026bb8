"""Checks histories: compares each answer with the one that an undisturbed server gave, whatever faults happened.

Pure: histories in, violations out. `tests/unit/test_chaos_checker` plants wrong histories, one for each rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.chaos.answer_fields import AnswerFields, read_answer
from tests.chaos.history import Attempt, End, History

_RETRYABLE = {429: "slow down", 503: "overloaded", 529: "overloaded, as Anthropic has it"}
_CLOCK_SLACK_S = 0.005
"""Seconds that a sleep may end early by the clock that stamps attempts."""
_SHOWN = 120
_SAID = ("text", "content", "arguments", "input", "token_ids")
"""Ends of the names of fields that hold the answer's text. Other fields, such as finish_reason, are alike in many."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a history broke."""

    rule: str
    mark: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.mark}: {self.detail}"


class Checker:
    """Judges histories by the due answer of each mark. A history without a due answer is judged by its form alone."""

    def __init__(self, due: Mapping[str, AnswerFields]) -> None:
        self._due = due

    def check(self, history: History) -> list[Violation]:
        """Every rule that the history broke."""
        broken = [*_attempts(history), *_end(history)]
        last = history.last
        if last.status == 200:
            if last.request_id != history.asked.mark:
                broken.append(("cross-talk", f"the answer's request id is {last.request_id!r}"))
            broken += self._answer(history, read_answer(last, history.asked.ask.path))
        return [Violation(rule, history.asked.mark, detail) for rule, detail in broken]

    def _answer(self, history: History, answer: AnswerFields) -> list[tuple[str, str]]:
        broken = [("protocol", sentence) for sentence in answer.breaks]
        is_whole = history.last.end is End.WHOLE
        if answer.error is not None:
            return [*broken, ("error", f"its answer ended with {answer.error}")]
        if is_whole and not answer.is_ended:
            broken.append(("terminal", "the stream was over without its terminal event"))
        due = self._due.get(history.asked.mark)
        if due is None:
            return broken
        broken += self._fields(history.asked.mark, answer, due, is_whole=is_whole)
        if is_whole or answer.usage is not None:
            broken += _usage(answer, due)
        return broken

    def _fields(self, mark: str, answer: AnswerFields, due: AnswerFields, *, is_whole: bool) -> list[tuple[str, str]]:
        broken = []
        for name, value in answer.fields.items():
            if value == due.fields.get(name) or (not is_whole and _is_prefix(value, due.fields.get(name))):
                continue
            place = _first_difference(value, due.fields.get(name))
            owner = self._owner(mark, name, value)
            rule = "cross-talk" if owner else "wrong" if is_whole else "no prefix"
            broken.append((rule, f"{name} {place}" + (f"; it is what {owner} was due" if owner else "")))
        if is_whole:
            broken += [("lost", f"{name} never came") for name in due.fields if name not in answer.fields]
        return broken

    def _owner(self, mark: str, name: str, value: Any) -> str:
        """The mark whose due answer this is, if it is another's; empty if it is no due answer."""
        if not name.endswith(_SAID) or not value:
            return ""
        others = ((other, answer.fields.get(name)) for other, answer in self._due.items() if other != mark)
        return next((other for other, theirs in others if _is_prefix(value, theirs) or _names(value, other)), "")


def _attempts(history: History) -> list[tuple[str, str]]:
    """Check that it was sent again only if the answer said so, and not too early."""
    broken = []
    for refused, again in pairwise(history.attempts):
        if refused.status not in _RETRYABLE or refused.retry_after_s is None or refused.events or refused.body:
            broken.append(("retry", f"sent again behind {_what(refused)}, which does not ask for it"))
        elif again.sent_s < refused.ended_s + refused.retry_after_s - _CLOCK_SLACK_S:
            broken.append(("retry", f"sent again {again.sent_s - refused.ended_s:.3f} s behind {_what(refused)}"))
    return broken


def _end(history: History) -> list[tuple[str, str]]:
    last = history.last
    if last.end in (End.WHOLE, End.LEFT):
        return []
    if last.end is End.REFUSED:
        if last.status not in _RETRYABLE:
            return [("status", _what(last))]
        if last.retry_after_s is None:
            return [("retry", f"{_what(last)} does not say when to ask again")]
        return [] if history.may_be_refused else [("refused", f"{_what(last)}, for too long")]
    if history.may_be_refused and last.status == 0:
        return []
    return [(last.end.value, _what(last))]


def _usage(answer: AnswerFields, due: AnswerFields) -> list[tuple[str, str]]:
    broken = []
    if answer.usage != due.usage:
        broken.append(("usage", f"{answer.usage} where {due.usage} is due"))
    if answer.usage is not None and due.num_ids is not None and answer.num_ids != answer.usage[1]:
        broken.append(("usage", f"{answer.usage[1]} tokens of an answer that brought {answer.num_ids}"))
    return broken


def _is_prefix(value: Any, whole: Any) -> bool:
    if isinstance(value, str) and isinstance(whole, str):
        return whole.startswith(value)
    return isinstance(value, list) and isinstance(whole, list) and whole[: len(value)] == value


def _names(value: Any, mark: str) -> bool:
    return isinstance(value, str) and mark in value


def _first_difference(value: Any, due: Any) -> str:
    """The first difference, in words."""
    if type(value) is not type(due) or not isinstance(value, str | list):
        return f"is {value!r:.{_SHOWN}} where {due!r:.{_SHOWN}} is due"
    at = next((i for i, (one, other) in enumerate(zip(value, due, strict=False)) if one != other), None)
    at = min(len(value), len(due)) if at is None else at
    return f"differs from {at} on: {value[at:]!r:.{_SHOWN}} where {due[at:]!r:.{_SHOWN}} is due"


def _what(attempt: Attempt) -> str:
    return f"status {attempt.status} ({attempt.detail or attempt.end.value})"

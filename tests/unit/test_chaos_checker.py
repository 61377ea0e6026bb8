"""The checker of chaos runs: correct histories pass, and each planted wrong history is named by its rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.answer_fields import AnswerFields, read_answer
from tests.chaos.asks import Marked, round_of
from tests.chaos.checker import Checker
from tests.chaos.history import Attempt, End, Event, History
from tests.reliability.asking import Ask, Json

Change = Callable[[History], object]


def events(said: Iterable[Json | str]) -> list[Event]:
    made = []
    for number, one in enumerate(said):
        name = str(one.get("type", "")) if isinstance(one, dict) else ""
        made.append(Event(float(number), name, one if isinstance(one, str) else json.dumps(one)))
    return made


def chunk(index: int, text: str = "", *, reason: str | None = None, ids: list[int] | None = None) -> Json:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason, "token_ids": ids or []}]}


def used(prompt: int, answer: int) -> Json:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}}


def completion(mark: str, *words: str) -> History:
    """Two choices, with one token a word. The second choice has the same text after the mark."""
    said: list[Json | str] = []
    for index, text in enumerate((words, (mark, *words))):
        said += [chunk(index, word + " ", ids=[len(word)]) for word in text]
        said.append(chunk(index, reason="length"))
    return streamed("/v1/completions", mark, [*said, used(3, 2 * len(words) + 1), "[DONE]"])


def streamed(path: str, mark: str, said: Iterable[Json | str]) -> History:
    attempt = Attempt(1.0, End.WHOLE, 2.0, 200, None, mark, events(said))
    return History(Marked(mark, "a kind", Ask(path, {"stream": True})), "to the end", [attempt])


def message() -> History:
    said: list[Json | str] = [
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " there"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ]
    return streamed("/v1/messages", "msg", said)


def response() -> History:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "Hello there"}]}]
    whole = {"status": "completed", "output": output, "usage": {"input_tokens": 4, "output_tokens": 2}}
    said: list[Json | str] = [
        {"type": "response.created", "sequence_number": 0},
        {"type": "response.output_text.delta", "sequence_number": 1, "output_index": 0, "delta": "Hello"},
        {"type": "response.output_text.delta", "sequence_number": 2, "output_index": 0, "delta": " there"},
        {"type": "response.completed", "sequence_number": 3, "response": whole},
    ]
    return streamed("/v1/responses", "resp", said)


def plain() -> History:
    body = {
        "choices": [{"index": 0, "text": "one two", "finish_reason": "stop", "token_ids": [1, 2]}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    attempt = Attempt(1.0, End.WHOLE, 2.0, 200, None, "plain", body=body)
    return History(Marked("plain", "a kind", Ask("/v1/completions", {})), "to the end", [attempt])


RIGHT = {
    "abc": completion("abc", "a", "river", "runs", "by"),
    "other": completion("other", "some", "old", "mill"),
    "msg": message(),
    "resp": response(),
    "plain": plain(),
}


def answer(history: History) -> AnswerFields:
    return read_answer(history.last, history.asked.ask.path)


CHECKER = Checker({mark: answer(history) for mark, history in RIGHT.items()})


def rules(history: History) -> set[str]:
    return {violation.rule for violation in CHECKER.check(history)}


def edit(number: int, change: Callable[[Json], object]) -> Change:
    """Change one event of the last attempt."""

    def apply(history: History) -> None:
        found = history.last.events
        said = json.loads(found[number].data)
        change(said)
        found[number] = Event(found[number].at_s, found[number].name, json.dumps(said))

    return apply


def choice(number: int, **fields: Any) -> Change:
    return edit(number, lambda said: said["choices"][0].update(fields))


def in_body(change: Callable[[Json], object]) -> Change:
    """Change the first choice of an answer that is not a stream."""

    def apply(history: History) -> None:
        assert history.last.body is not None
        change(history.last.body["choices"][0])

    return apply


def text(number: int, to: str) -> Change:
    return choice(number, text=to)


def usage(**fields: int) -> Change:
    return edit(-2, lambda said: said["usage"].update(fields))


def renamed(number: int, name: str) -> Change:
    def apply(history: History) -> None:
        event = history.last.events[number]
        history.last.events[number] = replace(event, name=name)

    return apply


def answer_of(mark: str) -> Change:
    """Another request's events under this one's id."""
    return lambda history: history.last.events.__setitem__(slice(None), RIGHT[mark].last.events)


def cut(number: int, end: End) -> Change:
    def apply(history: History) -> None:
        del history.last.events[number:]
        history.last.end = end

    return apply


def last(**fields: Any) -> Change:
    def apply(history: History) -> None:
        for name, value in fields.items():
            setattr(history.last, name, value)

    return apply


def refused_before(wait_s: float, status: int = 503, retry_after_s: float | None = 1.0, **fields: Any) -> Change:
    """An attempt that was refused, so long before the one that was served."""

    def apply(history: History) -> None:
        sent_s = history.last.sent_s - wait_s
        refused = Attempt(sent_s, End.REFUSED, sent_s, status, retry_after_s, **fields)
        history.attempts.insert(0, refused)

    return apply


def all_of(*changes: Change) -> Change:
    return lambda history: [change(history) for change in changes]


def insert(number: int, said: Json | str) -> Change:
    return lambda history: history.last.events.insert(number, events([said])[0])


PLANTED: dict[str, tuple[str, Change, str]] = {
    "a word is another": ("abc", text(1, "rover "), "wrong"),
    "a word comes twice": ("abc", lambda h: h.last.events.insert(1, h.last.events[1]), "wrong"),
    "a word is lost": ("abc", lambda h: h.last.events.pop(1), "wrong"),
    "two words change places": ("abc", lambda h: h.last.events.insert(1, h.last.events.pop(2)), "wrong"),
    "an id is another": ("abc", choice(2, token_ids=[99]), "wrong"),
    "a choice takes another's index": ("abc", choice(1, index=1), "wrong"),
    "it ends for another reason": ("abc", choice(4, finish_reason="stop"), "wrong"),
    "a cut answer has another word": ("abc", all_of(text(2, "rans "), cut(4, End.LEFT)), "no prefix"),
    "a cut answer repeats": (
        "abc",
        all_of(lambda h: h.last.events.insert(2, h.last.events[1]), cut(4, End.LEFT)),
        "no prefix",
    ),
    "it is somebody else's answer": ("abc", answer_of("other"), "cross-talk"),
    "it holds somebody else's mark": ("abc", text(1, "other "), "cross-talk"),
    "a cut answer is somebody else's": ("abc", all_of(answer_of("other"), cut(3, End.LEFT)), "cross-talk"),
    "its id is somebody else's": ("abc", last(request_id="other"), "cross-talk"),
    "a plain answer is wrong": ("plain", in_body(lambda first: first.update(text="one too")), "wrong"),
    "a plain answer lacks its end": ("plain", in_body(lambda first: first.pop("finish_reason")), "lost"),
    "[DONE] never came": ("abc", lambda h: h.last.events.pop(), "terminal"),
    "[DONE] came twice": ("abc", insert(99, "[DONE]"), "protocol"),
    "a word came after [DONE]": ("abc", insert(99, chunk(0, "late ")), "protocol"),
    "a word came after its choice had ended": ("abc", insert(5, chunk(0, "late ")), "protocol"),
    "a choice ended twice": ("abc", insert(5, chunk(0, reason="length")), "protocol"),
    "a choice never ended": ("abc", lambda h: h.last.events.pop(4), "protocol"),
    "a word came after usage": ("abc", lambda h: h.last.events.insert(-1, h.last.events[1]), "protocol"),
    "usage came twice": ("abc", insert(-1, used(3, 9)), "protocol"),
    "usage never came": ("abc", lambda h: h.last.events.pop(-2), "usage"),
    "usage counts a token too many": ("abc", usage(completion_tokens=10), "usage"),
    "usage counts another prompt": ("abc", usage(prompt_tokens=4), "usage"),
    "more ids came than usage says": ("abc", choice(0, token_ids=[1, 1]), "usage"),
    "a stream ended with an error": ("abc", all_of(cut(3, End.WHOLE), insert(3, {"error": {"code": "x"}})), "error"),
    "the connection broke": ("abc", cut(3, End.BROKEN), "broken"),
    "nothing came any more": ("abc", cut(3, End.SILENT), "silent"),
    "it was refused for good": (
        "abc",
        all_of(cut(0, End.REFUSED), last(status=503, retry_after_s=1.0)),
        "refused",
    ),
    "it was refused without a time": ("abc", all_of(cut(0, End.REFUSED), last(status=503)), "retry"),
    "it failed": ("abc", all_of(cut(0, End.REFUSED), last(status=500, retry_after_s=1.0)), "status"),
    "it was asked again too early": ("abc", refused_before(0.9), "retry"),
    "it was asked again behind a 500": ("abc", refused_before(2.0, status=500), "retry"),
    "it was asked again unbidden": ("abc", refused_before(2.0, retry_after_s=None), "retry"),
    "it was asked again behind half an answer": ("abc", refused_before(2.0, events=events([chunk(0, "a")])), "retry"),
    "a message's block has another index": ("msg", edit(3, lambda said: said.update(index=1)), "protocol"),
    "a message's block stays open": ("msg", lambda h: h.last.events.pop(4), "protocol"),
    "a message ends without a reason": ("msg", lambda h: h.last.events.pop(5), "protocol"),
    "a message goes on after its end": ("msg", insert(99, {"type": "message_stop"}), "protocol"),
    "a message's event has another name": ("msg", renamed(4, "ping"), "protocol"),
    "a message never stops": ("msg", lambda h: h.last.events.pop(), "terminal"),
    "a message's text is another": ("msg", edit(2, lambda said: said["delta"].update(text="Help")), "wrong"),
    "a message's usage is another": ("msg", edit(5, lambda said: said["usage"].update(output_tokens=3)), "usage"),
    "a response's event is lost": ("resp", lambda h: h.last.events.pop(1), "protocol"),
    "a response's event comes twice": ("resp", lambda h: h.last.events.insert(1, h.last.events[1]), "protocol"),
    "a response's deltas are not its text": ("resp", edit(2, lambda said: said.update(delta=" then")), "protocol"),
    "a response's text is another": (
        "resp",
        all_of(
            edit(2, lambda said: said.update(delta=" then")),
            edit(3, lambda said: said["response"]["output"][0]["content"][0].update(text="Hello then")),
        ),
        "wrong",
    ),
    "a response never ends": ("resp", lambda h: h.last.events.pop(), "terminal"),
}  # fmt: skip


@pytest.mark.parametrize("mark", list(RIGHT))
def test_a_right_history_passes_whole_and_cut_anywhere(mark: str) -> None:
    assert CHECKER.check(RIGHT[mark]) == []
    for number in range(len(RIGHT[mark].last.events)):
        history = deepcopy(RIGHT[mark])
        cut(number, End.LEFT)(history)
        assert CHECKER.check(history) == []


def test_a_refusal_that_says_when_and_is_obeyed_is_no_violation() -> None:
    history = deepcopy(RIGHT["abc"])
    refused_before(1.0)(history)
    assert CHECKER.check(history) == []


def test_a_server_that_ends_may_refuse() -> None:
    history = deepcopy(RIGHT["abc"])
    all_of(cut(0, End.REFUSED), last(status=503, retry_after_s=1.0))(history)
    history.may_be_refused = True
    assert CHECKER.check(history) == []
    all_of(cut(0, End.BROKEN), last(status=0))(history)
    assert CHECKER.check(history) == []
    last(status=200)(history)
    assert rules(history) == {"broken"}, "what it took it has to answer"


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_wrong_history_is_caught(name: str) -> None:
    mark, change, rule = PLANTED[name]
    history = deepcopy(RIGHT[mark])
    change(history)
    assert rule in rules(history), f"{name}: {[str(one) for one in CHECKER.check(history)]}"


def test_every_request_carries_its_mark_in_its_prompt() -> None:
    asks = [asked for seed in range(3) for asked in round_of(seed)]
    assert len({asked.mark for asked in asks}) == len(asks)
    for asked in asks:
        body = asked.ask.body
        prompt = body.get("prompt") or body.get("input") or body["messages"][-1]["content"]
        assert [other.mark for other in asks if other.mark in prompt] == [asked.mark]
